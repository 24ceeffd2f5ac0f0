"""How the model is trained, as far as it decides time and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

from stratagem.simulator.base.field_types import check_fields
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.base.precision import (
    DTYPE_BYTES,
    STORED,
    Precision,
    is_full,
    precision_named,
)
from stratagem.simulator.optimizers.factored_squares import AS_TORCH as FACTORED_AS_TORCH
from stratagem.simulator.optimizers.factored_squares import FactoredSquares
from stratagem.simulator.optimizers.newton_schulz import AS_TORCH, NewtonSchulz
from stratagem.simulator.optimizers.parameter_groups import (
    HAVING,
    ParameterGroup,
    usual_having,
)
from stratagem.simulator.optimizers.quantised_states import AS_TORCHAO, Blocks
from stratagem.simulator.optimizers.torch_optimizers import fields_of

FLASH_VERSIONS = (1, 2, 3)
OPTIMIZER_STATES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "adam": ("mean", "square"),
    "lion": ("mean",),
    "lamb": ("mean", "square"),
    "muon": ("momentum",),
    "adafactor": ("row", "column", "square"),
    "adam8bit": ("mean", "square", "mean_scale", "square_scale"),
}
"""What an optimizer keeps of each parameter, unless it is told to keep more."""

_AT_LEAST_0 = ("weight_decay", "clip_norm", "clip_value", "epsilon", "momentum", "learning_rate")

WHOLE_STATES = ("row", "column", "mean_scale", "square_scale")
"""What is kept of whole parameters by every rank that has a part; all else lies as that does."""

_ROUNDS = {"lamb": 1, "adafactor": 2, "adam8bit": 1}
"""How often ranks bring together what they measure of parameters before an update."""

AVERAGE = "average"
"""The state of a parameter that is its average."""

AVERAGES = ("", "equal", "exponential")
"""How parameters may be averaged from step to step: not at all, alike, or the latest ones most."""


@dataclass(frozen=True)
class Training:
    """Precision and optimizer of a training run.

    Attributes:
        precision: in which formats numbers are held: the name of a preset (`PRECISIONS`), or a
            `Precision`.
        optimizer: ``sgd``, ``adam``, ``lion`` (Chen et al. 2023, arXiv 2302.06675) or ``lamb``
            (You et al. 2020, arXiv 1904.00962), whose step of a parameter is as long as that is,
            or ``muon`` (Jordan et al. 2024), which trains matrices; groups of others have another;
            ``adafactor`` (Shazeer and Stern 2018) or ``adam8bit`` (Dettmers et al. 2022), AdamW
            with means in 8 bits.
        learning_rate: of the optimizer, where no schedule of a run scales it.
        betas: decay of the means of the gradient and of its square that Adam and LAMB have; of
            Lion's mean as it is used and as it is kept.
        epsilon: what Adam and LAMB add to the root that they divide by.
        amsgrad: whether Adam divides by the largest of its means so far (Reddi et al. 2018).
        coupled_decay: whether Adam adds its weight decay to the gradient, as `torch.optim.Adam`
            does, instead of taking it off the parameter itself, as `AdamW` does.
        momentum: of SGD and Muon: the share of the last step that is made again.
        dampening: of SGD: the share of the gradient that its momentum lacks, from the second
            update on, as in `torch.optim.SGD`.
        nesterov: whether they look ahead along it (Sutskever et al. 2013).
        maximize: whether the loss is made larger, not smaller: gradients count with the other
            sign, but not in the decay. Of all optimizers but Muon, as in torch.
        newton_schulz: how Muon orthogonalises.
        adafactor: how Adafactor holds squares and how long its steps are.
        blocks: which parameters have means in 8 bits, and in what blocks.
        weight_decay: of every parameter: added to the gradient by SGD, taken off the parameter
            itself by Adam (AdamW, Loshchilov and Hutter 2019) and Lion, part of the step of LAMB.
        groups: parameters with a rate, a decay or other options of their own (`ParameterGroup`);
            the first that has a name counts.
        clip_value: gradients are held between its negative and itself, each number on its own; 0
            for never.
        clip_norm: gradients are made shorter where the norm of all of them is above it (Pascanu et
            al. 2013); 0 for never. It is executed, and priced only where the update is not fused
            (`fused_update`), without the sum of one number over ranks. In float16 the same sum
            tells whether a gradient of any rank is not finite.
        clip_norm_type: which norm that is, as `torch.nn.utils.clip_grad_norm_` has it: 2, 1 or
            any other power above 0, or ``inf``, the largest of all gradients.
        average: of parameters, kept beside them as `torch.optim.swa_utils.AveragedModel` keeps it:
            ``equal`` over all steps (Izmailov et al. 2018), ``exponential`` with `average_decay`
            (Polyak and Juditsky 1992); empty: none. The first step sets it, and a step that is
            left out in float16 does not count. It lies as the states of the optimizer do.
        expert_loads: the share of choices that each expert of a mixture gets, in their order, of
            all mixtures; empty: all alike. It counts in predicted time alone: of a mixture slots
            are computed up to the last one that a token is in, of any expert.
        average_decay: the share that an exponential average keeps of itself at a step.
        gradient_precision: in which gradients are added up and reduced, instead of what
            `precision` says; empty: as that says. Megatron-LM adds bfloat16 gradients up in
            float32.
        flash_version: which FlashAttention runs fused attention, 1 (Dao et al. 2022), 2 (Dao 2023)
            or 3 (Shah et al. 2024, on Hopper).
        fused_loss: whether the cross-entropy is one kernel that leaves the gradient where the
            logits were. The executor's, the default, keeps the logits and makes their gradient
            beside them, each in the precision of the logits.
        eager_loss: whether it works on float32 copies of the logits and keeps probabilities, as
            PyTorch's own operators do. Like `fused_loss` it counts in predictions alone: the
            executor runs its own.
        fused_accumulation: whether products add a microbatch's gradients of weights to those
            before where these lie (Megatron-LM's fusion of 2022). Otherwise every microbatch's are
            added in a pass of their own, those of the first to zeros: as autograd and hooks do it.
            It counts in predicted time alone, and on GPUs: on CPUs all but the first are added
            in passes of their own, as the executor does it.
        fused_update: whether an update is one kernel, which reads gradients as backward leaves
            them and writes parameters as operators use them (the executor's on GPUs). Otherwise
            optimizers of mixed precision make passes over float32 copies of the gradients, as
            Megatron-LM's does. It counts in predicted time alone: copies are there when
            activations are gone.
        bucketed_gradients: whether gradients that are added up in another precision are also held
            as backward makes them: in the buckets of PyTorch's DistributedDataParallel (Li et al.
            2020), or until all of backward is through. It counts in predicted memory alone; the
            executor holds none.

    Example:
        >>> Training(precision="bfloat16").optimizer_bytes
        12

    Below float32 the optimizer keeps a float32 master copy beside its states (mixed precision,
    Micikevicius et al. 2018). `fused_elementwise` says that a chain of elementwise steps runs as
    one kernel, as a compiler makes it, not as one kernel a step, and that nothing inside is kept
    for backward. The executor runs and keeps steps.

    Raises:
        ValueError: on an unknown precision or optimizer, a beta that is not in [0, 1), or a
            weight decay or a norm below 0, an option that the optimizer does not have, or two
            kinds of loss.
    """

    precision: str | Precision = "float32"
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    gradient_precision: str = ""
    fused_elementwise: bool = False
    flash_version: int = 2
    fused_loss: bool = False
    eager_loss: bool = False
    fused_accumulation: bool = True
    fused_update: bool = True
    bucketed_gradients: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    clip_norm_type: float | str = 2.0
    clip_value: float = 0.0
    epsilon: float = 1e-8
    amsgrad: bool = False
    coupled_decay: bool = False
    momentum: float = 0.0
    nesterov: bool = False
    newton_schulz: NewtonSchulz = AS_TORCH
    adafactor: FactoredSquares = FACTORED_AS_TORCH
    blocks: Blocks = AS_TORCHAO
    average: str = ""
    average_decay: float = 0.999
    groups: tuple[ParameterGroup, ...] = ()
    expert_loads: tuple[float, ...] = ()
    dampening: float = 0.0
    maximize: bool = False

    @classmethod
    def of(cls, optimizer: Any, model: Any = None, **other: Any) -> Training:
        """What an optimizer of torch does, its groups included.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(3, 2)
            >>> groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0}]
            >>> training = Training.of(torch.optim.AdamW(groups, lr=0.1), model)
            >>> [(each.names, each.weight_decay) for each in training.groups]
            [(('bias',), 0.0)]

        Args:
            optimizer: a `torch.optim.SGD`, `Adam`, `AdamW`, `Adafactor` or `Muon`, or an
                `AdamW8bit` of torchao or bitsandbytes, or several of them, of which
                each has some of the parameters; nothing of them is changed.
            model: whose parameters it has, for their names; may be left out where the optimizer
                was made of ``named_parameters()``.
            other: fields that an optimizer does not have, such as `precision`.

        Raises:
            ValueError: an optimizer or an option that plans do not have; parameters without names.
        """
        return cls(**fields_of(optimizer, model), **other)

    def unlike(self, other: Training) -> str:
        """In words, the first thing in which another one differs; empty if nothing does.

        Example:
            >>> Training("bfloat16").unlike(Training())
            "precision is 'bfloat16', not 'float32'"
        """
        same = replace(self.formats, name="x") == replace(other.formats, name="x")
        for each in fields(self):
            mine, its = getattr(self, each.name), getattr(other, each.name)
            if mine != its and not (same and each.name.endswith("precision")):
                return f"{each.name} is {mine!r}, not {its!r}"
        return ""

    def __post_init__(self) -> None:
        check_fields(self, "training")
        precision_named(self.precision)
        for what, value, known in (
            ("gradient_precision", self.gradient_precision or STORED[0], STORED),
            ("optimizer", self.optimizer, tuple(OPTIMIZER_STATES)),
            ("average", self.average, AVERAGES),
        ):
            if value not in known:
                raise unknown(what, value, known)
        if self.flash_version not in FLASH_VERSIONS:
            versions = ", ".join(map(str, FLASH_VERSIONS))
            raise ValueError(f"no flash_version {self.flash_version}; there are {versions}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}; each must be at least 0 and below 1")
        for name in _AT_LEAST_0:
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} is {value}; it must be 0 or more, and finite")
        self._check_norm_type()
        loads = self.expert_loads
        if loads and not (min(loads) >= 0 and 0 < sum(loads) < math.inf):
            raise ValueError(
                f"expert_loads are {loads}; each must be 0 or more, and their sum above 0 and "
                "finite"
            )
        self._check_options()

    def _check_norm_type(self) -> None:
        """Refuse what is no norm, or would count nowhere; an infinite one has a word in files."""
        try:
            order = float(self.clip_norm_type)
        except ValueError:
            order = math.nan
        if not order > 0:
            raise ValueError(
                f"clip_norm_type is {self.clip_norm_type!r}; it must be above 0, such as 1, 2 or "
                "'inf'"
            )
        if order != 2 and not self.clip_norm:
            raise ValueError(
                f"clip_norm_type is {self.clip_norm_type!r}, but clip_norm is 0; give a clip_norm"
            )
        object.__setattr__(self, "clip_norm_type", "inf" if math.isinf(order) else order)

    def _check_options(self) -> None:
        """Refuse what the optimizer does not have, which would be left out in silence."""
        for group in self.groups:
            self._check_group(group)
        measuring = [each for each in self.optimizers if each in _ROUNDS]
        if len(self.optimizers) > 1 and measuring:
            raise ValueError(
                f"optimizers are {', '.join(self.optimizers)}; {measuring[0]} takes norms of "
                "all parameters and is not beside others: give groups no optimizer of their own"
            )
        usual = _usual()
        for name, having in HAVING.items():
            if getattr(self, name) != usual[name] and not having & set(self.optimizers):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but optimizer {self.optimizer!r} has none; "
                    f"leave it out, or take optimizer={usual_having(name)!r}"
                )
        if self.maximize and "muon" in self.optimizers:
            raise ValueError(
                "maximize is True, but Muon has none; leave it out, and give the loss another sign"
            )
        if not 0 <= self.average_decay < 1:
            raise ValueError(
                f"average_decay is {self.average_decay}; it must be at least 0 and below 1"
            )
        if self.average_decay != usual["average_decay"] and self.average != AVERAGES[2]:
            raise ValueError(
                f"average_decay is {self.average_decay}, but average is {self.average!r}; leave "
                f"it out, or take average={AVERAGES[2]!r}"
            )
        momentum = self.momentum or any(group.momentum for group in self.groups)
        for name in ("nesterov", "dampening"):
            if getattr(self, name) and not momentum:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but momentum is 0; give a momentum above 0"
                )
        if self.clip_norm and self.clip_value:
            raise ValueError(
                f"clip_norm is {self.clip_norm} and clip_value {self.clip_value}; choose one"
            )
        if self.fused_loss and self.eager_loss:
            raise ValueError(
                "fused_loss and eager_loss are both True, but one loss runs; leave fused_loss out "
                "for float32 copies of the logits, or eager_loss for one kernel without any"
            )
        _ = self.by_group  # What groups say must be what their optimizers take.

    def _check_group(self, group: ParameterGroup) -> None:
        """Refuse options of a group that its optimizer does not have."""
        if group.optimizer and group.optimizer not in OPTIMIZER_STATES:
            raise unknown("optimizer", group.optimizer, tuple(OPTIMIZER_STATES))
        group.check_options(group.optimizer or self.optimizer, self.momentum)

    @property
    def optimizers(self) -> tuple[str, ...]:
        """That of the whole, and those of groups that have another one.

        Example:
            >>> Training(groups=(ParameterGroup(("*.weight",), optimizer="muon"),)).optimizers
            ('adam', 'muon')
        """
        own = (group.optimizer for group in self.groups if group.optimizer)
        return tuple(dict.fromkeys((self.optimizer, *own)))

    def for_parameter(self, parameter: str) -> Training:
        """How one parameter is trained: by one optimizer, with the options of its group.

        Example:
            >>> mixed = Training(groups=(ParameterGroup(("*.weight",), optimizer="muon"),))
            >>> mixed.for_parameter("up.weight").states, mixed.for_parameter("up.bias").states
            (('momentum',), ('mean', 'square'))
            >>> slow = Training(groups=(ParameterGroup(("*.bias",), 0.5, betas=(0.8, 0.9)),))
            >>> bias = slow.for_parameter("up.bias")
            >>> bias.learning_rate, bias.betas, bias.groups
            (0.0005, (0.8, 0.9), ())
        """
        return self.by_group[self.group_of(parameter)]

    def only(self, optimizer: str) -> Training:
        """How the first parameters of one of the optimizers are trained."""
        return next(each for each in self.by_group if each.optimizer == optimizer)

    @cached_property
    def by_group(self) -> tuple[Training, ...]:
        """How the parameters of no group are trained, and those of each group.

        Example:
            >>> training = Training(groups=(ParameterGroup(("*.bias",), weight_decay=0.1),))
            >>> [each.weight_decay for each in training.by_group]
            [0.0, 0.1]
        """
        if not self.groups:
            return (self,)
        usual = ParameterGroup(("*",))
        return tuple(self._of(group) for group in (usual, *self.groups))

    def _of(self, group: ParameterGroup) -> Training:
        """How the parameters of a group are trained, without options that have no effect there."""
        optimizer = group.optimizer or self.optimizer
        own = {name: getattr(self, name) for name in HAVING} | group.options
        usual = _usual()
        for name, having in HAVING.items():
            lost = name in ("nesterov", "dampening") and not own["momentum"]
            if optimizer not in having or lost:
                own[name] = usual[name]
        decay, rate = group.weight_decay, group.learning_rate
        return replace(
            self,
            optimizer=optimizer,
            learning_rate=self.learning_rate * group.rate if rate is None else rate,
            weight_decay=self.weight_decay if decay is None else decay,
            groups=(),
            **own,
        )

    def group_of(self, parameter: str) -> int:
        """Which place in `by_group` a parameter has: that of the first group that has it, or 0.

        Example:
            >>> training = Training(groups=(ParameterGroup(("*.bias",)),))
            >>> training.group_of("up.weight"), training.group_of("up.bias")
            (0, 1)
        """
        if not self.groups:
            return 0
        if parameter not in self._places:
            holding = (n for n, group in enumerate(self.groups, 1) if group.holds(parameter))
            self._places[parameter] = next(holding, 0)
        return self._places[parameter]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {}

    @cached_property
    def keeps_apart(self) -> bool:
        """Whether groups differ in what time and memory an update takes.

        Example:
            >>> Training(groups=(ParameterGroup(("*.bias",), amsgrad=True),)).keeps_apart
            True
        """
        return len({each.kept for each in self.by_group}) > 1

    def costs_of(self, parameters: Sequence[str]) -> tuple[object, ...]:
        """What parameters' updates take, where groups differ: equal where that is the same."""
        return tuple(self.for_parameter(p).kept for p in parameters) if self.keeps_apart else ()

    @cached_property
    def kept(self) -> tuple[str | NewtonSchulz, ...]:
        """What decides time and memory of an update of parameters that are trained alike."""
        return (self.optimizer, *self.states, self.newton_schulz)

    @property
    def states(self) -> tuple[str, ...]:
        """What is kept of each parameter from step to step, by name; of some, not all of it.

        Example:
            >>> Training(amsgrad=True).states, Training(optimizer="sgd", momentum=0.9).states
            (('mean', 'square', 'largest'), ('momentum',))
        """
        if self.groups:
            each = (state for one in self.by_group for state in one.states)
            return tuple(dict.fromkeys(each))
        more = (
            ("momentum", self.momentum and self.optimizer == "sgd"),
            ("largest", self.amsgrad),
            (AVERAGE, self.average),
        )
        return (*OPTIMIZER_STATES[self.optimizer], *(name for name, kept in more if kept))

    def states_of(self, shape: Sequence[int]) -> tuple[str, ...]:
        """What is kept of a parameter of a shape.

        Example:
            >>> Training(optimizer="adafactor").states_of((8, 8))
            ('row', 'column')
        """
        left: tuple[str, ...] = ()
        if self.optimizer == "adafactor":
            left = ("square",) if len(shape) > 1 else ("row", "column")
        if self.optimizer == "adam8bit" and not self.blocks.count(math.prod(shape)):
            left = ("mean_scale", "square_scale")
        return tuple(state for state in self.states if state not in left)

    @property
    def rounds(self) -> int:
        """How often ranks bring together what they measure of parameters before an update."""
        return _ROUNDS.get(self.optimizer, 0)

    @property
    def measures_updates(self) -> bool:
        """Whether an update needs numbers of whole parameters, which ranks bring together."""
        return self.rounds > 0

    @property
    def goes_by_parameters(self) -> bool:
        """Whether it counts which elements are one parameter: then no plan rewrites its graph."""
        return bool(self.groups) or self.measures_updates or "muon" in self.optimizers

    @cached_property
    def formats(self) -> Precision:
        """The formats of all numbers, by their role.

        Example:
            >>> Training("bfloat16", gradient_precision="float32").formats.gradients
            'float32'
        """
        return precision_named(self.precision).adding_in(self.gradient_precision)

    def multiplying_as_stored(self) -> Training:
        """The same, whose products multiply what is stored: all that other programs can be told.

        Example:
            >>> own = Precision("own", products="bfloat16")
            >>> Training(own).multiplying_as_stored() == Training()
            True
        """
        formats = self.formats
        if not formats.rounds_products:
            return self
        added = "" if formats.gradients == formats.storage else formats.gradients
        return replace(self, precision=formats.storage, gradient_precision=added)

    @property
    def precision_name(self) -> str:
        """What the precision is called."""
        return precision_named(self.precision).name

    def bytes_of(self, dtype: str) -> int:
        """Bytes of one scalar of an activation: floating ones are held as they are stored."""
        is_floating = dtype.startswith(("float", "bfloat"))
        return DTYPE_BYTES[self.formats.storage if is_floating else dtype]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one parameter."""
        return DTYPE_BYTES[self.formats.storage]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient of one parameter."""
        return DTYPE_BYTES[self.formats.gradients]

    @property
    def master_bytes(self) -> int:
        """Bytes of the copy of one parameter that the optimizer updates; 0 where it needs none."""
        return DTYPE_BYTES[self.formats.master] if self.formats.master else 0

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are made or added up in float16, which has none as small as they are.

        Example:
            >>> Training(precision="float16").scales_loss
            True
            >>> Training(precision="bfloat16").scales_loss
            False
        """
        return self.formats.scales_loss

    @property
    def holds_buckets(self) -> bool:
        """Whether gradients are held a second time, in buckets of the parameters' precision."""
        return self.bucketed_gradients and self.gradient_bytes != self.parameter_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state per parameter: its means and, if needed, a master copy.

        Those of matrices where Adafactor holds them factored, and of large parameters where means
        are in 8 bits; `state_bytes` says those of any parameter.
        """
        state = DTYPE_BYTES[self.formats.states]
        averages = state if self.average else 0
        if self.optimizer == "adafactor":
            return self.master_bytes + averages
        if self.optimizer == "adam8bit":
            return self.master_bytes + averages + 2
        return self.master_bytes + state * len(self.states)

    def state_bytes(self, elements: int, shape: Sequence[int]) -> int:
        """Bytes of what is kept of so many elements of a parameter of a shape.

        Example:
            >>> Training(optimizer="adafactor").state_bytes(50, (10, 10))
            80
        """
        state, found = DTYPE_BYTES[self.formats.states], elements * self.optimizer_bytes
        if self.optimizer == "adafactor":
            matrix = len(shape) > 1
            found += state * (self.adafactor.means(shape) if matrix else elements)
        if self.optimizer == "adam8bit":
            blocks = self.blocks.count(math.prod(shape))
            found += 2 * DTYPE_BYTES["float32"] * blocks if blocks else (2 * state - 2) * elements
        return found if elements else 0

    @property
    def update_bytes(self) -> int:
        """Bytes that an update reads and writes per parameter.

        Every state is read and written once, gradients are read, parameters written. LAMB reads
        states and parameters once more, when it knows the norm of the step; Adafactor reads
        gradients in each of its rounds and parameters in the first, Adam in 8 bits its means and
        gradients in its only one. Where the
        update is not fused, gradients are copied to float32 and read there, in float16 unscaled in
        place, clipped in place after a pass for their norm, and parameters copied from masters.

        Example:
            >>> Training("float16").update_bytes
            30
            >>> Training("float16", fused_update=False, clip_norm=1.0).update_bytes
            62
        """
        fused = 2 * self.optimizer_bytes + 3 * self.parameter_bytes
        if self.optimizer == "adafactor":
            fused += 2 * self.gradient_bytes
        if self.optimizer == "adam8bit":
            fused += 2 + self.gradient_bytes
        if self.optimizer == "lamb":
            fused += 2 * DTYPE_BYTES[self.formats.states]
        if self.optimizer in ("lamb", "adafactor"):
            fused += self.master_bytes or self.parameter_bytes
        if self.fused_update:
            return fused
        copied = 0 if is_full(self.formats.gradients) else 8  # Read, written, read by the update.
        masters = self.master_bytes
        clipped = 12 if self.clip_norm else 0
        return fused + copied + masters + clipped + (8 if self.scales_loss else 0)


@cache
def _usual() -> dict[str, Any]:
    """What each option is unless told."""
    return {each.name: each.default for each in fields(Training)}
