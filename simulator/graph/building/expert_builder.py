"""Builders of mixtures of experts: tokens choose experts, are sent to them and come back."""

from __future__ import annotations

import math

from stratagem.simulator.graph.building.contraction_builder import label
from stratagem.simulator.graph.building.convolution_builder import ConvolutionBuilder
from stratagem.simulator.graph.building.operator_drafts import (
    DraftParameter,
    DraftTensor,
    Loop,
    OperatorDraft,
)
from stratagem.simulator.operators.operator import DimKind

ATTRIBUTE, PARAMETER, REDUCTION = DimKind.ATTRIBUTE, DimKind.PARAMETER, DimKind.REDUCTION


def expert_capacity(tokens: int, experts: int, top_k: int, factor: float) -> int:
    """Slots of an expert for a group of `tokens`, each of which chooses `top_k` experts.

    Example:
        >>> expert_capacity(1024, 16, 2, 1.25)
        160

    A `factor` of 1 is enough where all experts are chosen equally often (Lepikhin et al. 2020,
    GShard, arXiv 2006.16668).

    Raises:
        ValueError: a size below 1, more choices than experts, or a factor that leaves no slot.
    """
    if min(tokens, experts, top_k) < 1 or top_k > experts:
        raise ValueError(
            f"experts: {tokens} tokens cannot choose {top_k} of {experts} experts; choose at "
            "least 1 and at most all"
        )
    slots = math.ceil(top_k * tokens / experts * factor) if factor > 0 else 0
    if slots < 1:
        raise ValueError(
            f"experts: a capacity factor of {factor} leaves {slots} slots an expert; it must be "
            "above 0"
        )
    return slots


class ExpertBuilder(ConvolutionBuilder):
    """moe_weights, moe_dispatch, expert_linear and moe_combine.

    Gates are (group, token, choice), the share that each token gives to each expert. Tokens of a
    group choose their `top_k` experts; an expert has `capacity` slots for a group. First choices
    take slots before second ones, earlier tokens before later ones; a choice that finds no slot is
    dropped, so that the token gets nothing from that expert. What the chosen experts return is
    added up, weighted by their gates over the sum of those chosen.
    """

    def moe_weights(
        self, gates: DraftTensor, *, top_k: int, capacity: int, name: str = "weights"
    ) -> DraftTensor:
        """With which weight each slot holds each token: (group, token, expert, slot), mostly 0.

        GShard's formulation: as masks, they send tokens to slots by matrix products.

        Raises:
            ValueError: more choices than experts, or no slots.
        """
        gates = self._written(gates)
        draft, group, token, choice = self._routing("moe_weights", gates, top_k, capacity, name)
        expert, slot = self._slots(draft, gates, capacity)
        draft.reads.append(self._bind(draft, gates, [group, token, choice]))
        return self._expert_tensor(draft, [group, token, expert, slot], gates.dtype)

    def moe_dispatch(
        self,
        x: DraftTensor,
        gates: DraftTensor,
        *,
        top_k: int,
        capacity: int,
        name: str = "dispatch",
    ) -> DraftTensor:
        """The tokens in the slots of their experts: (group, token, hidden) to (group, expert,
        slot, hidden); slots that nobody took hold zeros.

        Raises:
            ValueError: more choices than experts, or no slots.
        """
        x = self._written(x)
        chosen = self._chosen(gates, name)
        draft, group, token, choice = self._routing("moe_dispatch", chosen, top_k, capacity, name)
        expert, slot = self._slots(draft, gates, capacity)
        hidden = self._loop(draft, "hidden", ATTRIBUTE, x.shape[-1], labelled=True)
        draft.reads.append(self._bind(draft, x, [group, token, hidden]))
        draft.reads.append(self._bind(draft, chosen, [group, token, choice]))
        return self._expert_tensor(draft, [group, expert, slot, hidden], x.dtype)

    def moe_combine(
        self, y: DraftTensor, gates: DraftTensor, *, top_k: int, name: str = "combine"
    ) -> DraftTensor:
        """What the experts made of each token, weighted: (group, expert, slot, hidden) to
        (group, token, hidden).

        Raises:
            ValueError: more choices than experts, or y has another number of experts.
        """
        y, gates = self._written(y), self._written(gates)
        draft, group, token, choice = self._routing("moe_combine", gates, top_k, y.shape[-2], name)
        if y.shape[-3] != gates.shape[-1]:
            raise ValueError(
                f"{draft.where}: there are {y.shape[-3]} experts but {gates.shape[-1]} gates; "
                "every expert needs one"
            )
        expert, slot = self._slots(draft, gates, y.shape[-2])
        hidden = self._loop(draft, "hidden", ATTRIBUTE, y.shape[-1], labelled=True)
        draft.reads.append(self._bind(draft, y, [group, expert, slot, hidden]))
        draft.reads.append(self._bind(draft, gates, [group, token, choice]))
        return self._made(draft, [group, token, hidden], y.dtype)

    def expert_linear(
        self,
        x: DraftTensor,
        weight: DraftTensor,
        bias: DraftTensor | None = None,
        *,
        gates: DraftTensor | None = None,
        top_k: int = 1,
        name: str = "",
    ) -> DraftTensor:
        """A linear layer of its own for each expert: (..., expert, slot, in) to (..., expert,
        slot, out).

        The weight is (expert, in, out), the bias (expert, out). The last two dims of the weight
        may be seen through a transposition. With `gates`, slots behind the last one that a token
        is in are not computed; x then is (group, expert, slot, in).

        Raises:
            ValueError: the weight is no parameter of three dims, or sizes differ.
        """
        x = self._written(x)
        chosen = None if gates is None else self._chosen(gates, name or "expert_linear")
        draft = self._draft("expert_linear", name)
        if not isinstance(weight.node, DraftParameter) or len(weight.node.dims) != 3:
            raise ValueError(
                f"{draft.where}: its weight has shape {weight.shape}; it must be a parameter "
                "(expert, in, out)"
            )
        if not (weight.is_plain or weight.is_turned) or (bias is not None and not bias.is_stored):
            raise ValueError(f"{draft.where}: its parameters must be seen as they are stored")
        leading = self._leading(draft, x, 3)
        expert = self._loop(draft, "expert", PARAMETER, weight.shape[0])
        slot = self._loop(draft, "slot", ATTRIBUTE, x.shape[-2], labelled=True)
        into = self._loop(draft, "in", REDUCTION, weight.shape[1])
        out = self._loop(draft, "out", PARAMETER, weight.shape[2])
        draft.reads.append(self._bind(draft, x, [*leading, expert, slot, into]))
        if chosen is not None:
            self._read_gates(draft, leading, chosen, top_k)
        draft.weights.append(self._bind_weight(draft, weight, [expert, into, out], turned=True))
        if not weight.is_plain:
            draft.attributes["transposed"] = True
        if bias is not None:
            draft.weights.append(self._bind_weight(draft, bias, [expert, out]))
        made = self._expert_tensor(draft, [*leading, expert, slot, out], x.dtype)
        label(made, [-1], "feature", 1)
        return made

    def _chosen(self, gates: DraftTensor, name: str) -> DraftTensor:
        """Gates that are looked at and have no gradient."""
        return self.handed_on(self._written(gates), name=f"{name}.choice", detached=True)

    def _read_gates(
        self, draft: OperatorDraft, leading: list[Loop], gates: DraftTensor, top_k: int
    ) -> None:
        """Let a linear layer see which slots are taken."""
        if len(leading) != 1 or not 1 <= top_k <= gates.shape[-1]:
            raise ValueError(
                f"{draft.where}: its slots have {len(leading)} dims before that of experts, and "
                f"tokens choose {top_k} of {gates.shape[-1]}; with gates they are of one group "
                "each, and at least one and at most all are chosen"
            )
        token = self._loop(
            draft, "token", ATTRIBUTE, gates.shape[-2], whole="slots are counted along it"
        )
        choice = self._loop(
            draft, "choice", ATTRIBUTE, gates.shape[-1], whole="the best of all are chosen"
        )
        draft.reads.append(self._bind(draft, gates, [*leading, token, choice]))
        draft.attributes["top_k"] = top_k

    def _routing(
        self, kind: str, gates: DraftTensor, top_k: int, capacity: int, name: str
    ) -> tuple[OperatorDraft, Loop, Loop, Loop]:
        """A draft with the loops of gates: group, token and choice."""
        draft = self._draft(kind, name)
        if not 1 <= top_k <= gates.shape[-1] or capacity < 1:
            raise ValueError(
                f"{draft.where}: {top_k} of {gates.shape[-1]} experts with {capacity} slots each "
                "cannot be chosen; choose at least one and at most all, and leave a slot"
            )
        draft.attributes["top_k"] = top_k
        label(gates, [-3], "group", 2)
        label(gates, [-2], "token", 2)
        (group,) = self._leading(draft, gates, 2)
        token = self._loop(
            draft, "token", ATTRIBUTE, gates.shape[-2], whole="slots are counted along it"
        )
        choice = self._loop(
            draft, "choice", ATTRIBUTE, gates.shape[-1], whole="the best of all are chosen"
        )
        return draft, group, token, choice

    def _slots(self, draft: OperatorDraft, gates: DraftTensor, capacity: int) -> tuple[Loop, Loop]:
        expert = self._loop(draft, "expert", ATTRIBUTE, gates.shape[-1])
        slot = self._loop(draft, "slot", ATTRIBUTE, capacity, whole="slots are counted along it")
        return expert, slot

    def _expert_tensor(self, draft: OperatorDraft, loops: list[Loop], dtype: str) -> DraftTensor:
        """The output of a draft, with its dims of experts and slots named."""
        made = self._made(draft, loops, dtype)
        for dim, loop in enumerate(loops):
            if loop.name in ("expert", "slot"):
                label(made, [dim], loop.name, 3)
        return made
