"""Building operator graphs by hand, without torch: one method per kind of the rule table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stratagem.simulator.graph.building.base_builder import is_float
from stratagem.simulator.graph.building.contraction_builder import label
from stratagem.simulator.graph.building.convolution_builder import window_sizes
from stratagem.simulator.graph.building.factor_unification import fresh
from stratagem.simulator.graph.building.generic_builder import GenericBuilder
from stratagem.simulator.graph.building.operator_drafts import (
    DraftTensor,
    Loop,
    OperatorDraft,
    reshape,
)
from stratagem.simulator.operators.kinds.norms import INSTANCE
from stratagem.simulator.operators.operator import DimKind
from stratagem.simulator.operators.step_programs import Steps

ATTRIBUTE, PARAMETER, REDUCTION = DimKind.ATTRIBUTE, DimKind.PARAMETER, DimKind.REDUCTION


class GraphBuilder(GenericBuilder):
    """Makes an `OperatorGraph` from shapes.

    Example:
        >>> b = GraphBuilder("one layer")
        >>> x, labels = b.input("x", (32, 784)), b.input("labels", (32,), "int64")
        >>> logits = b.linear(x, b.parameter("weight", (10, 784)), name="layer")
        >>> [o.name for o in b.build(b.cross_entropy(logits, labels)).operators]
        ['x', 'labels', 'count', 'layer', 'cross_entropy']

    Methods take and return `DraftTensor` handles and keep to the conventions of `operator_kinds`.
    Views are the functions of `operator_drafts` (`reshape`, `permute`, `select`, `part`,
    `expand`)."""

    def layer_norm(
        self,
        x: DraftTensor,
        weight: DraftTensor | None,
        bias: DraftTensor | None = None,
        *,
        num_dims: int = 1,
        eps: float = 1e-5,
        name: str = "",
    ) -> DraftTensor:
        """Normalise the last `num_dims` dims of x to mean 0 and variance 1."""
        return self._norm("layer_norm", x, [weight, bias], num_dims, eps, name)

    def rms_norm(
        self,
        x: DraftTensor,
        weight: DraftTensor | None,
        *,
        num_dims: int = 1,
        eps: float | None = 1e-6,
        name: str = "",
    ) -> DraftTensor:
        """Divide the last `num_dims` dims of x by their root mean square.

        `eps` None is the smallest of the dtype that the norm runs in, as torch has it.
        """
        return self._norm("rms_norm", x, [weight], num_dims, eps, name)

    def _norm(
        self,
        kind: str,
        x: DraftTensor,
        weights: Sequence[DraftTensor | None],
        num_dims: int,
        eps: float | None,
        name: str,
    ) -> DraftTensor:
        x = self._written(x)
        draft = self._draft(kind, name)
        leading = self._leading(draft, x, num_dims)
        normalised = [
            self._loop(draft, "hidden", PARAMETER, size, whole="the norm is taken over it")
            for size in x.shape[len(leading) :]
        ]
        draft.reads.append(self._bind(draft, x, [*leading, *normalised]))
        draft.weights.extend(
            self._bind_weight(draft, w, normalised) for w in weights if w is not None
        )
        draft.attributes["eps"] = eps
        label(x, range(-num_dims, 0), "hidden", 2)
        return self._made(draft, [*leading, *normalised], x.dtype)

    def batch_norm(
        self,
        x: DraftTensor,
        weight: DraftTensor,
        bias: DraftTensor,
        running_mean: DraftTensor,
        running_variance: DraftTensor,
        *,
        eps: float = 1e-5,
        momentum: float = 0.1,
        training: bool = True,
        name: str = "",
    ) -> DraftTensor:
        """Normalise each channel (dim 1) over the rest; by running values if not training."""
        x = self._written(x)
        draft = self._draft("batch_norm", name)
        sample = self._loop(draft, "sample", ATTRIBUTE, x.shape[0])
        channel = self._loop(draft, "channel", PARAMETER, x.shape[1])
        image = [self._loop(draft, "dim", ATTRIBUTE, n, labelled=True) for n in x.shape[2:]]
        loops = [sample, channel, *image]
        draft.reads.append(self._bind(draft, x, loops))
        for stored in (weight, bias, running_mean, running_variance):
            draft.weights.append(self._bind_weight(draft, stored, [channel]))
        draft.attributes.update(eps=eps, momentum=momentum, training=training)
        return self._made(draft, loops, x.dtype)

    def group_norm(
        self,
        x: DraftTensor,
        weight: DraftTensor | None,
        bias: DraftTensor | None = None,
        *,
        groups: int,
        eps: float = 1e-5,
        instance: bool = False,
        name: str = "",
    ) -> DraftTensor:
        """Normalise each group of channels (dim 1) of a sample to mean 0 and variance 1.

        Wu and He 2018, Group Normalization. Of as many groups as channels it is an instance norm;
        an `instance` one runs torch's function of that name, which rounds in another way.

        Raises:
            ValueError: the channels cannot be cut into so many equal groups.
        """
        x = self._written(x)
        draft = self._draft("group_norm", name)
        samples, channels, *image = x.shape
        if groups < 1 or channels % groups:
            raise ValueError(
                f"{draft.where}: {channels} channels are no {groups} equal groups; give a number "
                "of groups that divides them"
            )
        shape = (groups, channels // groups)
        whole = "the norm is taken over it"
        loops = [
            self._loop(draft, "sample", ATTRIBUTE, samples),
            self._loop(draft, "group", PARAMETER, groups),
            self._loop(draft, "channel", PARAMETER, shape[1], whole=whole),
            *(self._loop(draft, "dim", ATTRIBUTE, n, whole=whole) for n in image),
        ]
        draft.reads.append(self._bind(draft, reshape(x, (samples, *shape, *image)), loops))
        for stored in (weight, bias):
            if stored is not None:
                split = reshape(stored, shape)
                draft.weights.append(self._bind_weight(draft, stored, loops[1:3], split=split))
        draft.attributes["eps"] = eps
        if instance:
            draft.attributes[INSTANCE] = True
        return reshape(self._made(draft, loops, x.dtype), (samples, channels, *image))

    def rotary(
        self,
        x: DraftTensor,
        cosine: DraftTensor,
        sine: DraftTensor,
        *,
        name: str = "rotary",
    ) -> DraftTensor:
        """Turn pairs of features by the angle of their position (Su et al. 2021, RoFormer).

        x is (..., sequence, e), both tables are (sequence, e). With x = (a, b) in halves the
        result is ``x · cosine + (−b, a) · sine``, in one kernel.

        Raises:
            ValueError: e is odd, or the shapes do not fit.
        """
        x = self._written(x)
        draft = self._draft("rotary", name)
        if x.shape[-1] % 2:
            raise ValueError(f"{draft.where}: its last dim has size {x.shape[-1]}; pairs need 2 n")
        leading = self._leading(draft, x, 2)
        rows = self._loop(draft, "sequence", ATTRIBUTE, x.shape[-2], labelled=True)
        pairs = self._loop(draft, "head_dim", ATTRIBUTE, x.shape[-1], whole="pairs of it turn")
        draft.reads.append(self._bind(draft, x, [*leading, rows, pairs]))
        draft.reads.extend(self._bind(draft, each, [rows, pairs]) for each in (cosine, sine))
        return self._made(draft, [*leading, rows, pairs], x.dtype)

    def selective_scan(
        self,
        x: DraftTensor,
        dt: DraftTensor,
        a: DraftTensor,
        b: DraftTensor,
        c: DraftTensor,
        *,
        name: str = "scan",
    ) -> DraftTensor:
        """The recurrence of Mamba along the last dim (see `torch_ops.blocks.scans`).

        x and dt are (sample, channel, time), a is (channel, state), b and c are (sample, state,
        time). The states of a channel, and time, stay whole.
        """
        x, dt, a, b, c = (self._written(each) for each in (x, dt, a, b, c))
        draft = self._draft("selective_scan", name)
        sample, channel = (
            self._loop(draft, f"dim{i}", ATTRIBUTE, x.shape[i], labelled=True) for i in range(2)
        )
        states = "all of them are summed up"
        state = self._loop(draft, "state", REDUCTION, a.shape[-1], whole=states)
        runs = "the recurrence runs along it"
        time = self._loop(draft, "time", ATTRIBUTE, x.shape[2], whole=runs)
        for tensor, loops in (
            *((each, [sample, channel, time]) for each in (x, dt)),
            (a, [channel, state]),
            *((each, [sample, state, time]) for each in (b, c)),
        ):
            draft.reads.append(self._bind(draft, tensor, loops))
        return self._made(draft, [sample, channel, time], x.dtype)

    def softmax(
        self,
        x: DraftTensor,
        *,
        dim: int = -1,
        causal: bool = False,
        scale: float = 1.0,
        name: str = "softmax",
    ) -> DraftTensor:
        """Exponentials of `scale` · x over their sum along `dim`.

        If `causal`, x is (..., query, key) and a query sees no later key: the masked softmax of
        attention scores as one kernel.

        Raises:
            ValueError: `causal` along another dim than the last.
        """
        x = self._written(x)
        draft = self._draft("softmax", name)
        at = dim % len(x.dims)
        if causal and (at == 0 or at != len(x.dims) - 1):
            raise ValueError(
                f"{draft.where}: it is causal along dim {at} of {len(x.dims)}; scores are (..., "
                "query, key), so it must be the last"
            )
        loops = self._loops_of(draft, x, {at: "the softmax runs over it"})
        draft.reads.append(self._bind(draft, x, loops))
        draft.attributes["dim"] = at
        if causal:
            draft.attributes["causal"] = True
        if scale != 1.0:
            draft.attributes["scale"] = scale
        return self._made(draft, loops, x.dtype)

    def pool2d(
        self,
        x: DraftTensor,
        *,
        mode: str,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int] = (0, 0),
        name: str = "pool",
    ) -> DraftTensor:
        """The ``"max"`` or ``"avg"`` of windows of (sample, channel, in_height, in_width).

        Raises:
            ValueError: another mode, or a window larger than the padded image.
        """
        x = self._written(x)
        draft = self._draft("pool2d", name)
        if mode not in ("max", "avg"):
            raise ValueError(f"{draft.where}: mode {mode!r} is neither 'max' nor 'avg'")
        halo = "images are split by `split_images`"
        sizes = window_sizes(draft.where, x.shape[2:], kernel, stride, padding)
        named = zip(
            ("sample", "channel", "in_height", "in_width", "height", "width"),
            (*x.shape, *sizes),
            ("", "", halo, halo, halo, halo),
            strict=True,
        )
        loops = [self._loop(draft, n, ATTRIBUTE, size, whole=whole) for n, size, whole in named]
        draft.reads.append(self._bind(draft, x, loops[:4]))
        draft.attributes.update(
            mode=mode, kernel=list(kernel), stride=list(stride), padding=list(padding)
        )
        made = self._made(draft, [*loops[:2], *loops[4:]], x.dtype)
        label(made, [2], "height", 2)
        label(made, [3], "width", 2)
        return made

    def reduce(
        self,
        x: DraftTensor,
        dims: Sequence[int] | None = None,
        *,
        scale: float = 1.0,
        keep: bool = False,
        name: str = "reduce",
    ) -> DraftTensor:
        """`scale` × the sum over `dims` (all by default), which stay with size 1 if `keep`.

        Sums of whole numbers and of truth values are in int64, as in torch.
        """
        x = self._written(x)
        draft = self._draft("reduce", name)
        rank = len(x.dims)
        gone = {dim % rank for dim in (range(rank) if dims is None else dims)}
        loops = [
            self._loop(draft, f"dim{i}", REDUCTION if i in gone else ATTRIBUTE, n, labelled=True)
            for i, n in enumerate(x.shape)
        ]
        draft.reads.append(self._bind(draft, x, loops))
        draft.attributes["scale"] = scale
        kept = [
            None if i in gone else loop for i, loop in enumerate(loops) if keep or i not in gone
        ]
        return self._made(draft, kept, x.dtype if is_float(x.dtype) else "int64")

    def mean(
        self,
        x: DraftTensor,
        dims: Sequence[int] | None = None,
        *,
        keep: bool = False,
        name: str = "mean",
    ) -> DraftTensor:
        """The mean over `dims` (all by default), of the whole batch where they count samples."""
        gone = range(len(x.dims)) if dims is None else dims
        count = math.prod(x.shape[dim] for dim in gone)
        return self.reduce(x, dims, scale=1.0 / count, keep=keep, name=name)

    def cat(self, tensors: Sequence[DraftTensor], *, dim: int, name: str = "cat") -> DraftTensor:
        """Tensors of equal shape but for `dim`, one after the other along it.

        Raises:
            ValueError: their other dims differ.
        """
        tensors = [self._written(each) for each in tensors]
        draft = self._draft("cat", name)
        at = dim % len(tensors[0].dims)
        whole = "it is concatenated"
        loops = self._loops_of(draft, tensors[0], {at: whole})
        loops[at].factors = fresh(sum(each.shape[at] for each in tensors))
        for index, tensor in enumerate(tensors):
            part = self._loop(draft, f"part{index}", ATTRIBUTE, tensor.shape[at], whole=whole)
            draft.reads.append(self._bind(draft, tensor, [*loops[:at], part, *loops[at + 1 :]]))
        draft.attributes["dim"] = at
        return self._made(draft, loops, tensors[0].dtype)

    def narrow(
        self, x: DraftTensor, *, dim: int, start: int, length: int, name: str = "narrow"
    ) -> DraftTensor:
        """Elements `start` to `start` + `length` of a dim.

        Raises:
            ValueError: they reach beyond the dim.
        """
        x = self._written(x)
        draft = self._draft("narrow", name)
        at = dim % len(x.dims)
        if start < 0 or length < 1 or start + length > x.shape[at]:
            raise ValueError(
                f"{draft.where}: elements {start} to {start + length} of dim {at} of size "
                f"{x.shape[at]}; a slice must be in the dim and not empty"
            )
        loops = self._loops_of(draft, x, {at: "it is narrowed"})
        draft.reads.append(self._bind(draft, x, loops))
        draft.attributes.update(dim=at, start=start, length=length)
        out = self._loop(draft, "narrowed", ATTRIBUTE, length, whole="it is narrowed")
        return self._made(draft, [*loops[:at], out, *loops[at + 1 :]], x.dtype)

    def cross_entropy(
        self,
        logits: DraftTensor,
        target: DraftTensor,
        *,
        ignore_index: int = -100,
        name: str = "cross_entropy",
    ) -> DraftTensor:
        """Mean over counted targets of the negative log-likelihood: (..., class), (...) to ().

        Raises:
            ValueError: `target` does not come from an input or a source, or the shapes differ.
        """
        logits = self._written(logits)
        count = self._count(target, ignore_index)
        draft = self._draft("cross_entropy", name)
        if logits.shape[:-1] != target.shape:
            raise ValueError(
                f"{draft.where}: logits of shape {logits.shape} need targets of shape "
                f"{logits.shape[:-1]}, not {target.shape}"
            )
        tokens = self._leading(draft, logits, 1)
        classes = self._loop(draft, "class", PARAMETER, logits.shape[-1])
        draft.reads.append(self._bind(draft, logits, [*tokens, classes]))
        draft.reads.append(self._bind(draft, target, tokens))
        draft.reads.append(self._bind(draft, count, []))
        draft.attributes["ignore_index"] = ignore_index
        return self._made(draft, [], logits.dtype)

    def _count(self, target: DraftTensor, ignore_index: int) -> DraftTensor:
        """The number of targets of the whole batch that are not `ignore_index`."""
        node = target.node
        if not isinstance(node, OperatorDraft) or not node.is_source or target.selected:
            raise ValueError(
                f"cross entropy: its target {node.name!r} must be a graph input or a source, "
                "whole; targets that the model itself computes are not supported"
            )
        steps = node.attributes["steps"]
        last = len(steps) - 1
        counting: Steps = [
            ["ne", [["step", last], ignore_index]],
            ["sum", [["step", last + 1], None, False]],
        ]
        return self.source([*steps, *counting], (), "int64", name="count")

    def _loops_of(self, draft: OperatorDraft, x: DraftTensor, whole: dict[int, str]) -> list[Loop]:
        """One loop per dim of x; `whole` says which may not be split, and why."""
        return [
            self._loop(
                draft, f"dim{i}", ATTRIBUTE, size, whole=whole.get(i, ""), labelled=i not in whole
            )
            for i, size in enumerate(x.shape)
        ]
