"""Several ranks as streams of one GPU: every plan family trains as one process of torch does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.gpu.models import Model, devices, family, one_stage
from benchmarks.gpu.setting import Case, Figures, Setting
from stratagem.executor import model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.running.checking import judge
from stratagem.executor.running.execute import prepare
from stratagem.executor.training.batches import Batches
from stratagem.executor.training.training_loop import first_step
from stratagem.executor.watching.rank_place import Place
from stratagem.searcher.space.stage_cuts import balanced_stages
from stratagem.searcher.space.strategies import data_parallel, expert_parallel, tensor_parallel
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage

TRAINING = Training(learning_rate=1e-2)
PARTS = 4
FAMILIES = (
    "data parallel",
    "zero 1",
    "zero 2",
    "zero 3",
    "tensor parallel",
    "tensor and sequence parallel",
    "data and tensor parallel",
    "1f1b",
    "gpipe",
    "expert parallel",
)
WORLDS = {"data and tensor parallel": 4}
"""How many ranks, where not 2."""


def cases(setting: Setting) -> list[Case]:
    """A case for every family of plans."""
    return [Case(name, partial(_case, setting, name)) for name in FAMILIES]


def model_of(setting: Setting, name: str) -> Model:
    """The model that a family of plans is tried on."""
    return family(setting, "experts" if name == "expert parallel" else "gpt")


def plan_of(graph: OperatorGraph, name: str) -> Plan:
    """A plan of a family for a model.

    Raises:
        KeyError: when there is no such family.
    """
    ways = WORLDS.get(name, 2)
    cluster = devices(ways)
    if name in ("1f1b", "gpipe"):
        return _pipeline(graph, name)
    shape = (2, 2) if ways == 4 else (ways,)
    choices = {
        "data parallel": lambda: data_parallel(graph, shape),
        "zero 1": lambda: data_parallel(graph, shape, zero=1),
        "zero 2": lambda: data_parallel(graph, shape, zero=2),
        "zero 3": lambda: data_parallel(graph, shape, zero=3),
        "tensor parallel": lambda: tensor_parallel(graph, shape, 0),
        "tensor and sequence parallel": lambda: tensor_parallel(
            graph, shape, 0, sequence_parallel=True
        ),
        "data and tensor parallel": lambda: tensor_parallel(graph, shape, 1),
        "expert parallel": lambda: expert_parallel(graph, shape),
    }[name]()
    return one_stage(graph, choices, TRAINING, cluster, shape=shape)


def _pipeline(graph: OperatorGraph, schedule: str) -> Plan:
    """A stage on each of two ranks."""
    cluster, choices = devices(2), data_parallel(graph, (1,))
    stages = [
        Stage(
            names,
            DeviceMesh((MeshAxis("data", 1),), (device,)),
            {name: choices[name] for name in names},
        )
        for device, names in enumerate(balanced_stages(graph, cluster, 2))
    ]
    return Plan(
        name=schedule,
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=cluster,
        training=TRAINING,
        stages=tuple(stages),
        num_microbatches=PARTS,
        schedule=schedule,
    )


def first_of(plan: Plan, model: Model) -> Callable[[Communicator], ExecutionResult]:
    """What every rank does: the first step of a plan, with its gradients."""
    state, program = model_state(model.module), prepare(plan, model.graph)
    batches = Batches(model.batch, model.graph, buffers=state)
    return lambda comm: first_step(Interpreter(program, comm, state), batches, Place())


def judged(plan: Plan, model: Model, result: ExecutionResult) -> Figures:
    """The verdict on a first step."""
    verdict = judge(model.module, model.batch, result, plan, model.graph)
    return {
        "ranks": plan.num_devices,
        "verdict": verdict.sentence(),
        "error": verdict.max_error,
        "agrees": verdict.agrees,
    }


def _case(setting: Setting, name: str) -> Figures:
    model = model_of(setting, name)
    plan = plan_of(model.graph, name)
    run = first_of(plan, model)
    result = run_local(plan.num_devices, run, timeout=60, device=setting.device)[0]
    return judged(plan, model, result)
