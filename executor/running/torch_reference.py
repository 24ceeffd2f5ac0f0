"""The same step on one device, as the truth about what a plan trains.

no dropout    one process of torch: the same model, the whole batch, no plan
batch norms   the same, each batch norm given the batch by the plan's microbatches
dropout       a plan of one device, which draws the same masks
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from stratagem.executor.results.verdict import BUFFER, LOSS_NAME, OUTPUT
from stratagem.executor.running.execute import execute
from stratagem.executor.running.rounded_products import rounded_products
from stratagem.executor.state.batch_norm_counters import COUNTER
from stratagem.executor.state.parameter_parts import model_state
from stratagem.simulator.base.precision import FORMATS, FULL, Precision
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, splits_of
from stratagem.simulator.graph.substitutions import rewrite
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.norms import LOCAL
from stratagem.simulator.operators.kinds.sums_over_samples import takes_statistics
from stratagem.simulator.operators.operator import DimKind, Operator
from stratagem.simulator.operators.sliding_windows import shard_bounds
from stratagem.simulator.operators.step_programs import DRAWING
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.step_options import StepOptions
from stratagem.simulator.torch_ops.capture.capture import capture
from stratagem.simulator.torch_ops.capture.exporting import named_results
from stratagem.simulator.torch_ops.kernels.norms import one_sample_in_order

NEGLIGIBLE = 1e-5
"""Share of the largest gradient below which a gradient counts as rounding error of 0."""

LOSS_SCALE = 4096.0
"""What torch's loss in a narrow format is multiplied by, so that small gradients are not lost."""

TRUTH = "float64"
"""The format of a step that all others are compared with."""


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """What a step made: its loss, gradients by parameter, and buffers after it.

    As a truth it has those buffers only that the step changed.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    def errors_against(self, truth: StepOutcome) -> dict[str, float]:
        """Relative errors of the loss, of every gradient and of every buffer that changed.

        Raises:
            ValueError: when a gradient or a buffer is missing here.
        """
        for what, ours, theirs in (
            ("gradients", self.gradients, truth.gradients),
            ("buffers", self.buffers, truth.buffers),
        ):
            missing = theirs.keys() - ours.keys()
            if missing:
                raise ValueError(f"the result lacks the {what} of {', '.join(sorted(missing))}")
        losses = torch.tensor([self.loss, truth.loss], dtype=torch.float64)
        errors = {LOSS_NAME: relative_error(losses[0], losses[1])}
        errors |= gradient_errors(self.gradients, truth.gradients)
        for name, value in truth.buffers.items():
            errors[BUFFER + name] = relative_error(self.buffers[name].cpu(), value)
        return errors


class ReferenceStep(Protocol):
    """Makes a step on one device, on a copy of the model, perhaps in another precision."""

    def __call__(
        self, model: nn.Module, batch: Mapping[str, Tensor], precision: str = ""
    ) -> StepOutcome:
        """The outcome.

        Args:
            model: of which a copy makes it.
            batch: that it is given.
            precision: the format of all floats, or of the operands of products alone where no
                tensor is held in it; those of the model where it is empty.
        """


@dataclass(frozen=True, eq=False)
class Reference:
    """What trains as a plan does, and what it is called."""

    step: ReferenceStep
    words: str


def reference_of(plan: Plan, planned: OperatorGraph) -> Reference:
    """What makes the same step as a plan on one device.

    Args:
        plan: to be compared.
        planned: the graph that it runs.

    Raises:
        ValueError: when weights are updated amid the plan's step; when batch norms with local
            statistics share them over several numbers of devices, or the model has dropout too.
    """
    if plan.is_asynchronous:
        raise ValueError(
            f"plan {plan.name!r} has schedule {plan.schedule!r}, whose gradients are of several "
            "versions of the weights, and one process has but one: compare the plan under 1f1b"
        )
    norms = [operator for operator in planned.operators if takes_statistics(operator)]
    parts = plan.num_microbatches if norms else 1
    devices = _devices_apart(plan, norms)
    if any(map(_draws, planned.operators)):
        if devices > 1:
            raise ValueError(
                f"plan {plan.name!r} has dropout, and batch norms with the statistics of each "
                f"device's own samples on {devices} devices: no plan of one device draws the same "
                "masks; compare it without local statistics"
            )
        words = "a plan of one device, which draws the same dropout masks"
        words += f" and whose batch norms see {parts} microbatches" if parts > 1 else ""
        return Reference(_OneDevice(plan, parts), words)
    words = "one process of torch"
    if parts * devices > 1:
        apart = f", {devices} devices' samples apart" if devices > 1 else ""
        words += f" whose batch norms see {parts} microbatches{apart}"
    return Reference(_Torch(plan.training, parts, devices, len(norms)), words)


# -- torch --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Torch:
    """One process of torch, its batch norms given parts of the batch."""

    training: Training
    parts: int
    devices: int
    num_norms: int

    def __call__(
        self, model: nn.Module, batch: Mapping[str, Tensor], precision: str = ""
    ) -> StepOutcome:
        held, products = _held(precision)
        model, batch = _copied(model, batch, held)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        if self.parts * self.devices > 1:
            with statistics_apart(self.parts, self.devices) as seen, rounded_products(products):
                loss = first_scalar(model(**batch))
            if len(seen) != self.num_norms:
                raise ValueError(
                    f"the model normalised {len(seen)} times by torch.nn.functional.batch_norm, "
                    f"but its graph has {self.num_norms} batch norms: call that function for all "
                    "of them, so that they can be compared by microbatches"
                )
        else:
            with rounded_products(products):
                loss = first_scalar(model(**batch))
        scale = LOSS_SCALE if precision and FORMATS[precision].narrow else 1.0
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            if parameter.grad is not None and scale != 1.0:
                parameter.grad /= scale
        if self.training.clip_norm:
            longest, order = self.training.clip_norm, float(self.training.clip_norm_type)
            nn.utils.clip_grad_norm_(model.parameters(), longest, order)
        if self.training.clip_value:
            nn.utils.clip_grad_value_(model.parameters(), self.training.clip_value)
        gradients = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        buffers = {
            name: buffer
            for name, buffer in model.named_buffers()
            if not torch.equal(buffer, before[name])
        }
        for name in (name for name in buffers if name.rpartition(".")[2] == COUNTER):
            # Batch norms normalise each part on its own, but see torch count the whole once.
            buffers[name] = before[name] + self.parts * (buffers[name] - before[name])
        return StepOutcome(float(loss.detach()), gradients, buffers)


@contextmanager
def statistics_apart(parts: int, devices: int = 1) -> Iterator[list[int]]:
    """Let batch norms normalise parts of their batch one after the other, as microbatches are.

    Running statistics are counted once a part, when all have been normalised: part by part, as a
    module that is used twice is given all of one microbatch before the next. Of several devices
    they are those of the first.

    Yields:
        The sizes of the batches that were normalised, one for each call.
    """
    original = functional.batch_norm
    seen: list[int] = []
    counted: list[list[Callable[[], Tensor]]] = [[] for _ in range(parts)]

    def apart(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return original(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        seen.append(len(input))
        made = []
        for count, part in zip(counted, input.chunk(parts), strict=True):
            for device in range(devices):
                first, last = shard_bounds(len(part), [devices], [device])
                own = part[first:last]
                own = one_sample_in_order(own)
                made.append(
                    one_sample_in_order(
                        original(own, None, None, weight, bias, True, momentum, eps)
                    )
                )
                if device == 0 and running_mean is not None:
                    kept = own.detach(), running_mean, running_var, None, None, True, momentum
                    count.append(partial(original, *kept))
        return torch.cat(made)

    functional.batch_norm = apart
    try:
        yield seen
    finally:
        functional.batch_norm = original
    for count in chain.from_iterable(counted):
        count()


def _devices_apart(plan: Plan, norms: list[Operator]) -> int:
    """Over how many devices the samples of batch norms with local statistics are split."""
    found = {_ways(plan, operator) for operator in norms if operator.attributes.get(LOCAL)}
    if len(found) > 1:
        raise ValueError(
            f"plan {plan.name!r} has batch norms with statistics of their own on "
            f"{' and on '.join(map(str, sorted(found)))} devices, which one process cannot "
            "repeat: split their samples over as many devices everywhere"
        )
    return found.pop() if found else 1


def _ways(plan: Plan, operator: Operator) -> int:
    """Over how many devices a plan splits the samples of an operator."""
    shape = plan.stages[plan.stage_of[operator.name]].mesh.shape
    config = plan.choice(operator.name).config
    samples = [dim.name for dim in operator.dims if dim.kind is DimKind.SAMPLE]
    return math.prod(math.prod(splits_of(config, name, shape)) for name in samples)


def forward_outputs(
    model: nn.Module, batch: Mapping[str, Tensor], precision: str = ""
) -> dict[str, Tensor]:
    """What a copy of a model that evaluates returns, by name (see `ReferenceStep`)."""
    held, products = _held(precision)
    model, batch = _copied(model, batch, held)
    with torch.no_grad(), rounded_products(products):
        return named_results(model.eval()(**batch))


def output_errors(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative errors of what a forward pass gave back.

    What is 0 but for rounding, as the mean of what was normalised, has no relative error of its
    own: below `NEGLIGIBLE` of the largest output of all, it is compared with that one.

    Raises:
        ValueError: when some of it is missing.
    """
    missing = truth.keys() - found.keys()
    if missing:
        raise ValueError(f"the result lacks the outputs {', '.join(sorted(missing))}")
    real = {name: value.double() for name, value in truth.items() if value.is_floating_point()}
    whole = {name: value.double() for name, value in truth.items() if name not in real}
    errors = gradient_errors({name: found[name].double() for name in real}, real)
    errors |= {name: relative_error(found[name].double(), value) for name, value in whole.items()}
    return {OUTPUT + name: errors[name] for name in truth}


# -- a plan of one device -----------------------------------------------------------------------


@dataclass(frozen=True)
class _OneDevice:
    """A plan of one device with the seed, rewriting and training of another plan."""

    plan: Plan
    parts: int

    def __call__(
        self, model: nn.Module, batch: Mapping[str, Tensor], precision: str = ""
    ) -> StepOutcome:
        below = "" if precision == TRUTH else precision
        model, batch = _copied(model, batch, precision if not below else "")
        graph = capture(model, (), batch, name=self.plan.model)
        if self.plan.substitutions:
            graph = rewrite(graph, self.plan.substitutions).graph
        state = model_state(model)
        plan = self._alone(graph, below)
        result = execute(plan, graph, state, batch, gradients=True)
        assert result.gradients is not None
        buffers = {
            name: value
            for name, value in result.parameters.items()
            if name in dict(model.named_buffers()) and not torch.equal(value, state[name])
        }
        return StepOutcome(result.losses[0], result.gradients, buffers)

    def _alone(self, graph: OperatorGraph, precision: str) -> Plan:
        plan = self.plan
        held, products = _held(precision)
        mesh = DeviceMesh((MeshAxis("device", 1),), plan.stages[0].mesh.devices[:1])
        choices = {name: Choice((REPLICATE,)) for name in graph.names}
        return replace(
            plan,
            fingerprint=graph.fingerprint,
            training=replace(
                plan.training,
                precision=Precision("alone", held or FULL, products),
                gradient_precision="",
            ),
            stages=(Stage(tuple(graph.names), mesh, choices),),
            num_microbatches=self.parts,
            schedule="1f1b",
            token_slices=1,
            orders=(),
            **StepOptions().as_options,
        )


def _draws(operator: Operator) -> bool:
    steps = operator.attributes.get("steps", ())
    draws = any(function in DRAWING for function, _ in steps)
    return draws or bool(operator.attributes.get("dropout"))


# -- both ---------------------------------------------------------------------------------------


def _held(precision: str) -> tuple[str, str]:
    """What all floats are held in and what products are rounded to; either may be empty."""
    if not precision or FORMATS[precision].stored:
        return precision, ""
    return "", precision


def _copied(
    model: nn.Module, batch: Mapping[str, Tensor], precision: str
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and its batch on the CPU, their floats in a precision unless it is empty."""
    model = copy.deepcopy(model).cpu()
    moved = {name: value.cpu() for name, value in batch.items()}
    if precision:
        dtype = getattr(torch, precision)
        model = model.to(dtype)
        moved = {k: v.to(dtype) if v.is_floating_point() else v for k, v in moved.items()}
    return model, moved


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Largest difference over largest magnitude; 0 for two tensors of zeros.

    Example:
        >>> import torch
        >>> round(relative_error(torch.tensor([1.0, 2.1]), torch.tensor([1.0, 2.0])), 3)
        0.05
    """
    difference = float((value - truth).abs().max())
    return difference / max(float(truth.abs().max()), 1e-30) if difference else 0.0


def gradient_errors(
    gradients: Mapping[str, Tensor], truths: Mapping[str, Tensor]
) -> dict[str, float]:
    """Relative errors of gradients, by name.

    A gradient that is 0 but for rounding, such as that of a bias before a batch norm, has no
    relative error of its own: below `NEGLIGIBLE` of the largest gradient of all, it is compared
    with that one.
    """
    largest = max((float(truth.abs().max()) for truth in truths.values()), default=0.0)
    errors: dict[str, float] = {}
    for name, truth in truths.items():
        value = gradients[name].cpu()
        if float(truth.abs().max()) < NEGLIGIBLE * largest:
            errors[name] = float((value - truth).abs().max()) / largest
        else:
            errors[name] = relative_error(value, truth)
    return errors


def first_scalar(outputs: object) -> Tensor:
    """The loss among what a model returns: the first floating-point scalar.

    Raises:
        ValueError: when there is none.
    """
    for value in pytree.tree_leaves(outputs):
        if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
            return value
    raise ValueError("the model returns no scalar to train; let it return its loss")
