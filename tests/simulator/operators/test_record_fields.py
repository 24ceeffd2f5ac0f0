"""Records that people write refuse what they cannot mean where they are made, not where read.

A role that was a word was no role to anything, and a misspelt way to try an option a `KeyError` in
the middle of a search.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from stratagem.simulator.hardware.device_type import DeviceType, device_names
from stratagem.simulator.operators.kinds.operator_kinds import KINDS
from stratagem.simulator.schedules.named_schedules import record_of
from stratagem.simulator.schedules.schedule_record import OF_TORCH
from stratagem.simulator.sharding import choice as choices
from stratagem.simulator.sharding.choice import Choice, ParameterMessage, option_named, sent_format
from stratagem.simulator.torch_ops.aten.new_operators import register_operator

LAYER = KINDS["linear"]


@pytest.mark.parametrize(
    ("record", "changed", "message"),
    [
        (LAYER, {"role": "other"}, "kind 'linear': role is 'other'; it must be an OperatorRole"),
        (LAYER, {"flops": 2.0}, "kind 'linear': flops is 2.0; it must be a function"),
        (LAYER, {"traffic": "once"}, "kind 'linear': traffic is 'once'; it must be a Traffic"),
        (LAYER, {"saved": ()}, r"kind 'linear': saved is \(\); it must be a Saved"),
        (LAYER, {"product": True}, "product is True; it must be a MatrixProduct or None"),
        (LAYER, {"values": {0: "rows"}}, "values is .*; it must be a mapping of a whole"),
        (LAYER, {"asks_host": "8"}, "asks_host is '8'; it must be a whole number or None"),
        (LAYER.product, {"shape": (1, 2, 3)}, r"shape is \(1, 2, 3\); it must be a function"),
        (record_of("gpipe"), {"name": ""}, "a schedule has no name"),
        (record_of("gpipe"), {"make": None}, "schedule 'gpipe': make is None; it must be a funct"),
        (
            record_of("gpipe"),
            {"torch_name": "NoSuch"},
            "torch_name is 'NoSuch', which is no schedule of torch.distributed.pipelining; those",
        ),
        (option_named("fused"), {"name": "fusion"}, "name is 'fusion', which is no field"),
        (option_named("fused"), {"tried_by": "fuses"}, "tried_by is 'fuses', which is no"),
        (option_named("streamed"), {"part_of": "pieces"}, "part_of is 'pieces', which is no"),
        (option_named("fused"), {"touches": 3}, "option 'fused': touches is 3; it must be a T"),
        (
            DeviceType.preset("A100-80GB"),
            {"matmul_efficiency": 80.0},
            r"matmul_efficiency is 80.0; it is the share of a peak that is reached, at most 1",
        ),
        (DeviceType.preset("A40"), {"memory_efficiency": 1.2}, "memory_efficiency is 1.2; it is"),
    ],
)
def test_a_field_of_another_meaning_is_refused(
    record: Any, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(record, **changed)


def test_records_of_the_package_may_be_made_again() -> None:
    for kind in KINDS.values():
        assert replace(kind) == kind
    for name in device_names():
        assert replace(DeviceType.preset(name)) == DeviceType.preset(name)


@pytest.mark.parametrize("name", OF_TORCH)
def test_torch_has_these_schedules(name: str) -> None:
    assert isinstance(get_schedule_class(name), type)


def test_links_carry_no_format_that_there_is_none_of(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = replace(option_named("fused"), sends=lambda chosen, what, held: "float9")
    monkeypatch.setattr(choices, "OPTIONS", (fused,))
    with pytest.raises(ValueError, match="links would carry 'float9' of a parameter that is held"):
        sent_format(Choice(()), ParameterMessage.GRADIENT, "float32")


def test_a_kind_is_not_captured_from_what_torch_has_not() -> None:
    kind = replace(LAYER, name="cumsum")
    with pytest.raises(ValueError, match=r"torch .* has no operator aten::cumsun; operators of"):
        register_operator(kind, lambda *given: torch.ones(()), {"cumsun": lambda call: None})
    assert "cumsum" not in KINDS
