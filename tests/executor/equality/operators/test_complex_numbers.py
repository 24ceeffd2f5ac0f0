"""Complex numbers within a model train as in plain torch, parameters seen as such too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stratagem.executor.actions.views_of_memory import ViewOfMemory
from stratagem.simulator.operators.kinds.generics import is_generic
from tests.support.plans import (
    assert_equal_to_torch,
    double,
    drawing,
    make_case,
    make_plan,
    sharding,
    whole,
)

torch.set_num_threads(1)


class Spectrum(nn.Module):
    """Mixes channels frequency by frequency, as Fourier neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1, 4), nn.Linear(4, 1)
        self.mixing = nn.Parameter(torch.randn(4, 4, 3, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(self.up(x.unsqueeze(-1)).transpose(1, 2))
        mixed = torch.einsum("bif,iof->bof", waves[..., :3], torch.view_as_complex(self.mixing))
        back = torch.fft.irfft(nn.functional.pad(mixed, (0, 2)), n=8)
        return self.down(back.tanh().transpose(1, 2)).square().mean()


class Conjugates(nn.Module):
    """A parameter of which backward saves a part, conjugated, and the negative of another."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(5, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        c = torch.view_as_complex(self.pairs)
        waves = torch.complex(x, x.roll(1, 1))
        turned = (waves * c[0].conj()) @ c[1:].T.conj()
        return (turned.abs().square() + turned.real * c[1:, 1].conj().imag).mean()


class Phases(nn.Module):
    """Real means become complex phases: nothing but a program may stand for those."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        turned = torch.complex(h, h.flip(1)) * torch.exp(1j * h.mean(0))
        return self.down(turned.abs() + turned.angle().sin()).square().mean()


INPUTS = {Spectrum: (4, 8), Conjugates: (4, 4), Phases: (4, 6)}


@pytest.mark.parametrize("kind", INPUTS)
def test_they_train_like_torch(kind: type[nn.Module]) -> None:
    """Phases had an operator whose numbers were complex, and half of its gradient."""
    torch.manual_seed(0)
    case = double(make_case(kind(), x=torch.randn(INPUTS[kind])))
    assert any(map(is_generic, case.graph.operators))
    for ways in (2, 3):
        assert_equal_to_torch(case, make_plan(case, drawing(ways), (ways,)), 1e-9)


@pytest.mark.parametrize("kind", INPUTS)
def test_what_is_gathered_again_is_seen_as_before(kind: type[nn.Module]) -> None:
    """Under ZeRO-3 backward took the real numbers of a parameter for its complex ones."""
    torch.manual_seed(0)
    case = double(make_case(kind(), x=torch.randn(INPUTS[kind])))
    choose = sharding(None, zero=3) if case.graph.whole_batch else sharding("sample", zero=3)
    assert_equal_to_torch(case, make_plan(case, choose, (2,)), 1e-9)
    assert_equal_to_torch(case, make_plan(case, whole, (1,)), 1e-9)


def test_a_view_is_made_again_on_other_memory() -> None:
    """Whatever its dtype, and whether its numbers are conjugates of what lies there."""
    pairs, moved = torch.arange(24.0).reshape(4, 3, 2), torch.zeros(30)
    other = moved[6:].view(4, 3, 2).copy_(pairs + 100)
    seen = torch.view_as_complex(pairs)
    there = torch.view_as_complex(other)
    for mine, its in (
        (pairs[1:, 0], other[1:, 0]),
        (seen[2, 1:], there[2, 1:]),
        (seen[1:].mT.conj(), there[1:].mT.conj()),
        (seen[3].conj().imag, there[3].conj().imag),
    ):
        view = ViewOfMemory.of(mine, mine.data_ptr() - pairs.data_ptr())
        assert torch.equal(view.on(other), its)
        assert view.on(other).untyped_storage().data_ptr() == moved.untyped_storage().data_ptr()
