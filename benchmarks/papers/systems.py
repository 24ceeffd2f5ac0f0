"""What each system of the field can do, and the name under which it is found here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import stratagem as sg
from stratagem.searcher.methods.registry import METHODS
from stratagem.simulator.schedules.named_schedules import SCHEDULES


@dataclass(frozen=True)
class System:
    """A system or an idea of the literature.

    Attributes:
        name: as its paper has it, with the paper.
        does: what it decides, or how it runs a step.
        methods: of `METHODS`, which a search may be compared with.
        schedules: of `SCHEDULES`, which a plan may name.
        names: public ones, dotted: functions, classes, and fields of these.
        lacks: what of it is not here.
    """

    name: str
    does: str
    methods: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    lacks: str = ""

    @property
    def where(self) -> str:
        """The names of all of it."""
        parts = [f"`{name}`" for name in self.names]
        parts += [f"method `{name}`" for name in self.methods]
        parts += [f"schedule `{name}`" for name in self.schedules]
        return ", ".join(parts)

    def missing(self) -> Iterator[str]:
        """Its names that nothing has."""
        yield from (name for name in self.methods if name not in METHODS)
        yield from (name for name in self.schedules if name not in SCHEDULES)
        yield from (name for name in self.names if not _is_public(name))


def _is_public(name: str) -> bool:
    """Whether `sg.…` has it; a field of a dataclass counts."""
    first, *rest = name.removeprefix("sg.").split(".")
    if first not in dir(sg):
        return False
    value = getattr(sg, first)
    for part in rest:
        fields = {each.name for each in dataclasses.fields(value)}
        if part not in fields and not hasattr(value, part):
            return False
    return True


SYSTEMS = (
    System(
        "FlexFlow (Jia et al. 2019)",
        "places operators on devices and splits each along samples, attributes and parameters, by "
        "random proposals that a delta simulator judges",
        methods=("FlexFlow",),
        names=("sg.search", "sg.Space", "sg.Choice.config"),
        lacks="plans with operators on parts of a mesh are played anew, not by what changes",
    ),
    System(
        "Unity (Unger et al. 2022)",
        "rewrites the graph and splits it in one search",
        methods=("Unity",),
        names=("sg.search", "sg.Plan.substitutions"),
    ),
    System(
        "OptCNN (Jia et al. 2018)",
        "the least sum of computing, conversions and syncs, a configuration a layer",
        methods=("OptCNN",),
        names=("sg.search",),
    ),
    System(
        "Alpa (Zheng et al. 2022)",
        "stages and sub-meshes by a dynamic program, shardings in each by an integer program",
        methods=("Alpa",),
        names=("sg.search", "sg.Stage.mesh"),
    ),
    System(
        "Mesh-TensorFlow (Shazeer et al. 2018)",
        "a layout says which axis of a mesh splits a named dim",
        methods=("Mesh-TensorFlow",),
        names=("sg.annotate",),
    ),
    System(
        "GSPMD and GShard (Xu et al. 2021, Lepikhin et al. 2020)",
        "few annotated tensors, completed over the graph; experts shared out",
        methods=("GSPMD", "GShard annotations", "GShard expert parallel"),
        names=("sg.annotate", "sg.annotation_regret", "sg.TrainingSetup.expert"),
    ),
    System(
        "Megatron-LM (Narayanan et al. 2021, Korthikanti et al. 2022)",
        "tensor, sequence, pipeline and data parallel degrees, several stages a rank",
        methods=("Megatron-LM 3D",),
        schedules=("interleaved",),
        names=(
            "sg.TrainingSetup.tensor",
            "sg.TrainingSetup.sequence_parallel",
            "sg.TrainingSetup.virtual_stages",
        ),
    ),
    System(
        "ZeRO (Rajbhandari et al. 2020)",
        "shards states, gradients, parameters over data parallel ranks",
        methods=("DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3"),
        names=("sg.Choice.zero", "sg.TrainingSetup.zero"),
        lacks="a bucket of gathers that is not the bucket of sums; a search has one size of "
        "buckets, that of its fastest baseline",
    ),
    System(
        "PipeDream (Narayanan et al. 2019)",
        "replicated stages of unequal sizes, a pipeline that never drains, stashed weights",
        methods=("PipeDream", "PipeDream asynchronous"),
        schedules=("pipedream", "pipedream-vertical"),
        names=("sg.compare_schedules",),
        lacks="runs drain at the end of a step (compared is the pace of a stream that does not); "
        "stages of the least pace",
    ),
    System(
        "DAPPLE (Fan et al. 2021)",
        "the same stages under a synchronous schedule with early backward passes",
        methods=("DAPPLE",),
        schedules=("1f1b",),
    ),
    System(
        "Tofu (Wang et al. 2019)",
        "splits all tensors in two, again and again, with the least bytes each time",
        methods=("Tofu",),
    ),
    System(
        "GPipe (Huang et al. 2019)",
        "microbatches, all forward passes first, activations recomputed",
        schedules=("gpipe",),
        names=("sg.TrainingSetup.recompute",),
    ),
    System(
        "1F1B and interleaved 1F1B (Narayanan et al. 2021)",
        "few microbatches in flight, several stages a rank",
        schedules=("1f1b", "interleaved"),
    ),
    System(
        "TeraPipe (Li et al. 2021)",
        "slices the tokens of a microbatch, too",
        schedules=("terapipe",),
        names=("sg.search", "sg.slice_tokens", "sg.Plan.token_slices"),
        lacks="no bound of a search is about slices",
    ),
    System(
        "Chimera (Li and Hoefler 2021)",
        "two pipelines in opposite directions",
        names=("sg.search",),
        methods=("Chimera",),
        schedules=("chimera",),
    ),
    System(
        "DualPipe (DeepSeek-AI 2024)",
        "two pipelines in opposite directions, gradients of weights where ranks would wait",
        names=("sg.search",),
        schedules=("dualpipe",),
        lacks="a forward and a backward pass that run beside each other follow one another",
    ),
    System(
        "Zero bubble (Qi et al. 2023)",
        "gradients of weights apart from those of inputs, where ranks would wait",
        schedules=("zb-h1",),
    ),
    System(
        "AMPNet (Gaunt et al. 2017)",
        "ranks take whatever is ready, and update as gradients come",
        names=("sg.compare_schedules",),
        lacks="compared only, no plan runs it",
    ),
    System(
        "Device placement by REINFORCE (Mirhoseini et al. 2017)",
        "a device for each group of operators, learned from step times",
        methods=("REINFORCE",),
    ),
    System(
        "CoCoNet (Jangda et al. 2022)",
        "updates and elementwise work inside collectives, products in pieces beside the "
        "collectives of others",
        names=(
            "sg.Choice.chunks",
            "sg.Choice.streamed",
            "sg.Choice.fused",
            "sg.Choice.in_sum",
            "sg.Space.chunks",
            "sg.Space.stream",
            "sg.Space.fuse",
            "sg.Space.in_sums",
        ),
        lacks="a collective that waits for parts of a product, or computes, is predicted, not "
        "executed",
    ),
)
"""In the order of the page."""
