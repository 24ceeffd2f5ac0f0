"""Builders of the operators that run on matrix units, and of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stratagem.simulator.graph.building.base_builder import GraphBuilderBase
from stratagem.simulator.graph.building.factor_unification import (
    fresh,
    leaves_of,
    name_factors,
    size_of,
)
from stratagem.simulator.graph.building.operator_drafts import (
    DraftParameter,
    DraftTensor,
    Loop,
    OperatorDraft,
)
from stratagem.simulator.operators.operator import DimKind

ATTRIBUTE, PARAMETER, REDUCTION = DimKind.ATTRIBUTE, DimKind.PARAMETER, DimKind.REDUCTION


def label(tensor: DraftTensor, dims: Sequence[int], name: str, priority: int) -> None:
    """Propose a name for dims of a tensor (see `factor_unification.name_factors`)."""
    for dim in dims:
        name_factors(tensor.dims[dim], name, priority)


class ContractionBuilder(GraphBuilderBase):
    """linear, linear_sum, matmul, embedding and attention."""

    def linear(
        self,
        x: DraftTensor,
        weight: DraftTensor,
        bias: DraftTensor | None = None,
        *,
        transposed: bool = False,
        name: str = "",
    ) -> DraftTensor:
        """``x @ weight.T + bias``: (..., in) to (..., out).

        The weight is (out, in), or (in, out) if `transposed`.

        Raises:
            ValueError: the weight is no matrix, or its `in` differs from that of x.
        """
        x = self._written(x)
        draft = self._draft("linear", name)
        if not isinstance(weight.node, DraftParameter) or len(weight.node.dims) != 2:
            raise ValueError(
                f"{draft.where}: its weight has shape {weight.shape}; it must be a parameter of "
                "two dims (use matmul for computed weights)"
            )
        stored_swapped = transposed != (not weight.is_plain)
        out_dim, in_dim = (1, 0) if transposed else (0, 1)
        leading = self._leading(draft, x, 1)
        into = self._loop(draft, "in", REDUCTION, weight.shape[in_dim])
        out = self._loop(draft, "out", PARAMETER, weight.shape[out_dim])
        draft.reads.append(self._bind(draft, x, [*leading, into]))
        order = [into, out] if transposed else [out, into]
        draft.weights.append(self._bind_weight(draft, weight, order, turned=True))
        if bias is not None:
            draft.weights.append(self._bind_weight(draft, bias, [out]))
        draft.attributes["transposed"] = stored_swapped
        made = self._made(draft, [*leading, out], x.dtype)
        label(made, [-1], "feature", 1)
        return made

    def linear_sum(
        self,
        inputs: Sequence[DraftTensor],
        weights: Sequence[DraftTensor],
        bias: DraftTensor | None = None,
        *,
        name: str = "",
    ) -> DraftTensor:
        """``x0 @ weight0.T + x1 @ weight1.T + … + bias``: several (..., in) to (..., out).

        Every weight is (out, in).

        Raises:
            ValueError: the inputs have different sizes, or there is not one weight for each.
        """
        inputs = [self._written(each) for each in inputs]
        draft = self._draft("linear_sum", name)
        shapes = sorted({tensor.shape for tensor in (*inputs, *weights)})
        if len({tensor.shape for tensor in inputs}) != 1 or len(weights) != len(inputs):
            raise ValueError(
                f"{draft.where}: it has {len(inputs)} inputs and {len(weights)} weights, of "
                f"shapes {', '.join(map(str, shapes))}; inputs must be alike, each with a weight"
            )
        leading = self._leading(draft, inputs[0], 1)
        into = self._loop(draft, "in", REDUCTION, inputs[0].shape[-1])
        out = self._loop(draft, "out", PARAMETER, weights[0].shape[0])
        draft.reads += [self._bind(draft, each, [*leading, into]) for each in inputs]
        draft.weights += [
            self._bind_weight(draft, each, [out, into], turned=True) for each in weights
        ]
        if bias is not None:
            draft.weights.append(self._bind_weight(draft, bias, [out]))
        draft.attributes["transposed"] = [not each.is_plain for each in weights]
        made = self._made(draft, [*leading, out], inputs[0].dtype)
        label(made, [-1], "feature", 1)
        return made

    def matmul(self, a: DraftTensor, b: DraftTensor, *, name: str = "") -> DraftTensor:
        """The batched product (..., m, k) × (..., k, n); leading dims broadcast.

        Raises:
            ValueError: the sizes of k differ, or a dim does not broadcast.
        """
        a, b = (self._computed(each) for each in (a, b))
        draft = self._draft("matmul", name)
        batch = self._broadcast_loops(draft, [each.shape[:-2] for each in (a, b)])
        m = self._loop(draft, "m", ATTRIBUTE, a.shape[-2])
        n = self._loop(draft, "n", ATTRIBUTE, b.shape[-1])
        k = self._loop(draft, "k", REDUCTION, a.shape[-1])
        if a.shape[-1] != b.shape[-2]:
            raise ValueError(
                f"{draft.where}: dim 'k' has size {a.shape[-1]} on the left and {b.shape[-2]} on "
                "the right; they must be equal"
            )
        for tensor, loops in ((a, [m, k]), (b, [k, n])):
            own = batch[len(batch) - len(tensor.dims) + 2 :]
            draft.reads.append(self._bind(draft, tensor, [*own, *loops], broadcast=True))
        return self._made(draft, [*batch, m, n], a.dtype)

    def embedding(
        self,
        ids: DraftTensor,
        weight: DraftTensor,
        *,
        padding: int | None = None,
        name: str = "",
    ) -> DraftTensor:
        """Rows of `weight` (vocabulary, hidden): (...) to (..., hidden).

        Row `padding` gets no gradient, as with ``padding_idx`` of `torch.nn.Embedding`.

        Raises:
            ValueError: the weight is no parameter of two dims, or seen in other dims than it has.
        """
        ids = self._written(ids)
        draft = self._draft("embedding", name)
        if not weight.is_stored or len(weight.dims) != 2:
            raise ValueError(f"{draft.where}: its weight must be a stored parameter of two dims")
        leading = self._leading(draft, ids, 0)
        vocabulary = self._loop(draft, "vocabulary", REDUCTION, weight.shape[0])
        hidden = self._loop(draft, "hidden", PARAMETER, weight.shape[1])
        draft.reads.append(self._bind(draft, ids, leading))
        draft.weights.append(self._bind_weight(draft, weight, [vocabulary, hidden]))
        label(ids, range(len(ids.dims)), "sequence", 1)
        label(weight, [0], "vocabulary", 2)
        if padding is not None:
            draft.attributes["padding"] = padding
        made = self._made(draft, [*leading, hidden], weight.dtype)
        label(made, [-1], "hidden", 2)
        return made

    def attention(
        self,
        query: DraftTensor,
        key: DraftTensor,
        value: DraftTensor,
        mask: DraftTensor | None = None,
        *,
        causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        name: str = "attention",
    ) -> DraftTensor:
        """``softmax(q·kᵀ·scale + mask)·v``: (sample, head, query, e), (.., key, e), (.., key, f).

        With fewer heads in key and value (grouped-query attention) each of them serves equally
        many heads of the query, and the query's head dim becomes (head of the keys, group). A bool
        mask says what is looked at. `scale` defaults to 1 / sqrt(e). `dropout` is the probability
        with which a weight is dropped inside the kernel, which draws them anew in backward.

        Raises:
            ValueError: the shapes do not fit.
        """
        query, key, value = self._written(query), self._computed(key), self._computed(value)
        mask = None if mask is None else self._computed(mask)
        draft = self._draft("attention", name)
        key, value = (self._share_heads(draft, query, each) for each in (key, value))
        leading = self._leading(draft, query, 2, head=True)
        rows = self._loop(draft, "query", ATTRIBUTE, query.shape[-2])
        softmax, inner = "the softmax runs over it", "every score needs all of it"
        columns = self._loop(draft, "key", ATTRIBUTE, key.shape[-2], whole=softmax)
        e = self._loop(draft, "head_dim", REDUCTION, query.shape[-1], whole=inner)
        f = self._loop(draft, "value_dim", ATTRIBUTE, value.shape[-1], whole=inner)
        for tensor, loops in ((query, [rows, e]), (key, [columns, e]), (value, [columns, f])):
            draft.reads.append(self._bind(draft, tensor, [*leading, *loops]))
            label(tensor, [-2], "sequence", 3)
            label(tensor, [-1], "head_dim", 3)
        if mask is not None:
            every = [*leading, rows, columns]
            own = every[len(every) - len(mask.dims) :]
            draft.reads.append(self._bind(draft, mask, own, broadcast=True))
        if len(leading) > 1:
            label(query, [-3], "head", 3)
            _label_groups(key)
        draft.attributes["causal"] = causal
        draft.attributes["scale"] = query.shape[-1] ** -0.5 if scale is None else scale
        if dropout:
            draft.attributes["dropout"] = dropout
        return self._made(draft, [*leading, rows, f], query.dtype)

    def _share_heads(
        self, draft: OperatorDraft, query: DraftTensor, other: DraftTensor
    ) -> DraftTensor:
        """Keys or values with each head repeated for its group of query heads."""
        if len(query.dims) < 4 or other.shape[-3] == query.shape[-3]:
            return other
        heads, own = query.shape[-3], other.shape[-3]
        if heads % own:
            raise ValueError(
                f"{draft.where}: {heads} query heads cannot share {own} key and value heads; the "
                "first must be a multiple of the second"
            )
        dims = list(other.dims)
        dims[-3] = (*dims[-3], *fresh(heads // own))
        return replace(other, dims=tuple(dims))

    def _leading(
        self, draft: OperatorDraft, x: DraftTensor, own: int, *, head: bool = False
    ) -> list[Loop]:
        """Loops over the dims of `x` before its last `own` ones."""
        groups = x.dims[: len(x.dims) - own]
        loops = []
        for i, group in enumerate(groups):
            is_head = head and i > 0 and i == len(groups) - 1
            name = "head" if is_head else f"dim{i}"
            loops.append(self._loop(draft, name, ATTRIBUTE, size_of(group), labelled=True))
        return loops


def _label_groups(key: DraftTensor) -> None:
    """Tell the heads that keys have from the groups of query heads that share one."""
    if key.is_broadcast:
        own = {id(leaf) for group in key.own for leaf in leaves_of(group)}
        for leaf in leaves_of(key.dims[-3]):
            name_factors([leaf], "kv_head" if id(leaf) in own else "group", 4)
