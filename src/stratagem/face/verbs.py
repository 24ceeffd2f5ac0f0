"""The verbs of the public face: search, simulate, profile and execute.

Each is the library's own function with what a person wants around it: progress bars, defaults, and
the steps that always go together.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from stratagem.basics.progress import Show, progress_bar
from stratagem.exports import lossless_exports
from stratagem.searcher.driver import search as searching
from stratagem.searcher.driver.budget import Budget, StopReason
from stratagem.searcher.driver.incumbent import SearchProgress
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.processes.garbage_collection import seldom_collected
from stratagem.searcher.processes.interrupts import Interrupts
from stratagem.searcher.processes.search_clock import OutOfTimeError, SearchClock
from stratagem.searcher.robustness.robust_choice import DRAWS
from stratagem.searcher.space.constraints import Space
from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.base.tables import Table
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.fitted_kernels import costs_or_default
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.simulation import schedule_comparison
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan

if TYPE_CHECKING:
    from torch import nn

    from stratagem.executor.results.execution_result import ExecutionResult
    from stratagem.executor.training.batches import Data
    from stratagem.executor.training.learning_rates import Rate
    from stratagem.profiler.costs.measured_costs import MeasuredCosts
    from stratagem.profiler.timing.operator_timing import Effort

Backend = Literal["local", "gloo", "nccl"]

MAX_OPERATORS = 1000
"""Distinct local operators that `profile` times unless told; what is beyond is estimated."""


def search(
    graph: OperatorGraph,
    cluster: Cluster,
    *,
    space: Space | None = None,
    costs: CostModel | None = None,
    training: Training | None = None,
    budget: Budget | None = None,
    baselines: Sequence[str] | None = None,
    start: Plan | None = None,
    checkpoint: str | Path | None = None,
    prefer: str = "simplest",
    draws: int = DRAWS,
    progress: bool | Callable[[SearchProgress], None] = True,
) -> SearchResult:
    """Find a plan to train `graph` on `cluster`, and bound the best there can be.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph = mlp([256, 256, 256], batch=64)
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=1)
        >>> search(graph, cluster, budget=Budget(evaluations=100), progress=False).plan.num_devices
        8

    Ctrl-C ends it early and returns the best plan until then; a second Ctrl-C ends it without.

    Args:
        graph: the model at its whole batch, from `capture`.
        cluster: where it is to run; all its devices are used.
        space: what may be searched (schedules, ZeRO stages, recomputing, overlap in pieces,
            fusion, gradient buckets) and what the plan must meet (degrees, pins, memory); see
            `Space`.
        costs: prices of operators, such as those of `profile`; the device model of the cluster
            when left out.
        training: precision and optimizer; those of `start` when left out, without one float32 and
            Adam, as models are captured. (A `TrainingSetup` takes bfloat16, as the runs that it
            states do.)
        budget: what may be spent: evaluations, seconds, threads; see `Budget`. When left out, the
            search ends where what could still be gained is proved to be less than predictions
            tell apart (5 %). Equal arguments give equal plans.
        baselines: methods to compare with, such as ``["Alpa", "FlexFlow"]``; see
            `stratagem.searcher.methods.registry.METHODS`.
        start: a plan, perhaps edited, to go on from.
        checkpoint: a file in which finished parts are kept; an equal call goes on from it.
        prefer: ``"simplest"``: of the plans within 5 % of the fastest, which no prediction tells
            apart, the one that treats like layers most alike, within the budget's gap where that
            is less; or ``"fastest"``. The result has both, and says what it costs to be simple
            (`SearchResult.simplicity`, `SearchResult.fastest`).
        draws: how often errors of the prices are drawn, as large as the cost model states, to say
            how often each plan compared is the best, and what it loses at worst
            (`SearchResult.robustness`); with 0 nothing is said of that.
        progress: True shows a bar, False nothing; a function is told instead where the search is,
            some times a second, and may raise KeyboardInterrupt to end it with the best plan
            until then.

    Returns:
        The best plan that fits, beside every baseline, and what no plan can be under; where
        nothing fits, the plan closest to it.

    Raises:
        ValueError: no plan meets the conditions of the space; an unknown name; a checkpoint or a
            plan to start from that is not for this search.
    """
    begun = time.monotonic()
    check_arguments("search", checkpoint=(checkpoint, str | Path | None))
    costs, memory = costs_or_default(costs), RowMemory()
    with (
        seldom_collected(),
        Interrupts().heard() as interrupts,
        progress_bar(enabled=not callable(progress) and progress) as show,
    ):
        found = searching.search(
            graph,
            cluster,
            space=space,
            costs=costs,
            training=training,
            budget=budget,
            baselines=baselines,
            start=start,
            checkpoint=Path(checkpoint) if checkpoint is not None else None,
            prefer=prefer,
            draws=draws,
            progress=progress if callable(progress) else _shown_by(show),
            interrupts=interrupts,
            memory=memory,
        )
        until = math.inf if budget is None or budget.seconds is None else begun + budget.seconds
        clock = SearchClock(until, interrupts=interrupts)
        memory.watch = clock.check
        return _with_exports(found, costs, memory, clock)


def _with_exports(
    found: SearchResult, costs: CostModel, memory: RowMemory, clock: SearchClock
) -> SearchResult:
    """What a search found, with the formats that say its plan without loss, if there is time."""
    is_whole = found.simulation.fits and found.stop_reason is not StopReason.INTERRUPTED
    if not is_whole or found.graph.is_forward:
        return found
    try:
        formats = lossless_exports(
            found.plan,
            found.graph,
            costs=costs,
            step_time=found.simulation.step_time,
            check=clock.check,
            memory=memory,
        )
    except (OutOfTimeError, KeyboardInterrupt):
        return found
    return dataclasses.replace(found, exports=formats)


def _shown_by(show: Show) -> Callable[[SearchProgress], None]:
    """What shows the progress of a search."""

    def report_progress(where: SearchProgress) -> None:
        show(where.phase, where.fraction, where.in_words)

    return report_progress


def report(
    result: SearchResult,
    path: str | Path,
    *,
    costs: CostModel | None = None,
    space: Space | None = None,
    budget: Budget | None = None,
    progress: bool = True,
) -> None:
    """Write what a search found as one HTML page, which needs no network.

    Example:
        >>> sg.report(sg.search(graph, cluster), "report.html")  # doctest: +SKIP

    The page holds the plan in words and as a picture, the known strategies beside it, the timeline
    to zoom into, memory over time, how each operator is sharded, the certificate, and what faster
    links and one node more would do, for which a quick search is made.

    Args:
        result: of `search`.
        path: of the page. It appears whole or not at all.
        costs: prices of operators, those of the search; the device model when left out.
        space: that of the search, for the search on one node more.
        budget: of the search on one node more; a small one when left out.
        progress: False shows nothing.

    Raises:
        OSError: the page cannot be written.
    """
    from stratagem.searcher.report import page

    check_arguments(
        "report",
        result=(result, SearchResult),
        path=(path, str | Path),
        space=(space, Space | None),
        budget=(budget, Budget | None),
    )
    with progress_bar(enabled=progress) as show:
        page.report(
            result,
            path,
            costs=costs,
            space=space,
            budget=budget or page.QUICK,
            progress=_shown_by(show),
        )


def simulate(plan: Plan, graph: OperatorGraph, costs: CostModel | None = None) -> Simulation:
    """Predict a plan's step time, memory and timeline.

    Example:
        >>> simulate(sg.Plan.load("plan.json"), graph).step_time  # doctest: +SKIP
        0.0179

    Args:
        plan: for this graph.
        graph: the model at its whole batch.
        costs: prices of operators; the device model of the plan's cluster when left out.

    Raises:
        ValueError: when the plan is not for this graph.
    """
    return simulate_plan(plan, graph, costs_or_default(costs))


def compare_schedules(
    plan: Plan, graph: OperatorGraph, costs: CostModel | None = None, *, token_slices: int = 1
) -> Table:
    """The step, bubble and memory of a pipelined plan under each schedule, the fastest first.

    Example:
        >>> sg.compare_schedules(sg.Plan.load("plan.json"), graph)  # doctest: +SKIP

    Args:
        plan: with one stage on each set of devices, for this graph; its own schedule does not
            count.
        graph: the model at its whole batch.
        costs: prices of operators; the device model of the plan's cluster when left out.
        token_slices: of a microbatch under TeraPipe, for causal models; 1 leaves it out.

    Raises:
        ValueError: when the plan is no such pipeline, or not for this graph.
    """
    check_arguments(
        "compare_schedules",
        plan=(plan, Plan),
        graph=(graph, OperatorGraph),
        token_slices=(token_slices, int),
    )
    return schedule_comparison.compare_schedules(
        plan, graph, costs_or_default(costs), token_slices=token_slices
    )


def profile(
    graph: OperatorGraph,
    cluster: Cluster | None = None,
    *,
    plan: Plan | None = None,
    training: Training | None = None,
    cache: str | Path | None = None,
    max_operators: int = MAX_OPERATORS,
    seconds: float | None = None,
    effort: Effort | None = None,
    progress: bool = True,
) -> MeasuredCosts:
    """Time on this machine what a search over `cluster` may ask for, and answer from that.

    Example:
        >>> costs = sg.profile(graph, sg.Cluster.preset("local-cpu"))  # doctest: +SKIP
        >>> sg.search(graph, sg.Cluster.preset("local-cpu"), costs=costs)  # doctest: +SKIP

    Every distinct local operator is timed once and kept in the timing cache, so that a second call
    is quick and an interrupted one goes on where it stopped. The devices of a CPU cluster are
    processes of this machine: each operator is timed on one thread while the other processes of
    the node run it too.

    Args:
        graph: the model at its whole batch.
        cluster: of one device type: CPUs, or the GPU of this machine; the plan's when left out.
        plan: time only what this plan runs, on its cluster and in its training.
        training: precision and optimizer; the plan's when left out, without one float32 and Adam.
        cache: the file of the timing cache; the user's own when left out.
        max_operators: how many distinct local operators to time at most, those with the largest
            share of the step first, in the shapes of simple plans; the others are estimated from
            those, and a warning says how many.
        seconds: how long timing them may take; the same holds for what is left by then.
        effort: how long to go on with each operator.
        progress: False shows nothing.

    Raises:
        ValueError: on a cluster of several device types, or a GPU that is not the one here; a
            cluster or a training beside a plan that has another one, or neither cluster nor plan.
    """
    from stratagem.calibration.profile_space import profile_wanted, wanted_operators
    from stratagem.profiler.timing.operator_timing import Effort

    check_arguments(
        "profile",
        graph=(graph, OperatorGraph),
        cluster=(cluster, Cluster | None),
        plan=(plan, Plan | None),
        training=(training, Training | None),
        cache=(cache, str | Path | None),
        max_operators=(max_operators, int),
        seconds=(seconds, float | None),
        effort=(effort, Effort | None),
    )
    wanted = wanted_operators(graph, cluster, plan=plan, training=training)
    done = profile_wanted(
        wanted.operators,
        wanted.cluster,
        wanted.training,
        cache=cache,
        touched=wanted.touched,
        limit=max_operators,
        seconds=seconds,
        effort=effort,
        progress=progress,
    )
    for warning in done.warnings:
        warnings.warn(f"profile: {warning}", stacklevel=2)
    return done.costs


def local_cluster(
    num_processes: int = 2, *, cache: str | Path | None = None, anew: bool = False
) -> Cluster:
    """Processes of this machine as a cluster, with the link between them as it is now.

    The link is fitted to the times of dozens of collectives, which are kept. A later call times
    six of them again and goes by what is kept where these are as before: large ones within 15 %,
    small ones, which vary more, within 50 %. Else it measures all of them again.

    Example:
        >>> local_cluster(2).intra_node.bandwidth_gb_s  # doctest: +SKIP
        1.1

    Args:
        num_processes: how many devices it has; one core each at best.
        cache: the file of the timing cache, which keeps the times of the collectives; the user's
            own when left out.
        anew: whether all collectives are measured again, whatever is kept.

    Raises:
        ValueError: when `num_processes` is below 1.
    """
    from stratagem.calibration.measured_links import measured_links

    check_arguments(
        "local_cluster",
        num_processes=(num_processes, int),
        cache=(cache, str | Path | None),
        anew=(anew, bool),
    )
    cluster = Cluster.preset("local-cpu", devices_per_node=num_processes)
    return measured_links(cluster, cache=cache, anew=anew).cluster


def fit_links(cluster: Cluster, *, cache: str | Path | None = None) -> Cluster:
    """A cluster with its links as the collectives in the timing cache show them.

    Example:
        >>> cluster = fit_links(Cluster.preset("dgx-h100", num_nodes=4))  # doctest: +SKIP
        >>> sg.search(graph, cluster)  # doctest: +SKIP

    The times are those that ``stratagem cache import`` took from the output of nccl-tests, or that
    ``stratagem profile --out`` measured, on devices of the cluster's type. Links without any stay
    as they are; so does everything else.

    Args:
        cluster: of one device type.
        cache: the file of the timing cache; the user's own when left out.

    Raises:
        ValueError: when the cache has none of these devices and links, or too few to tell latency
            from bandwidth.
    """
    from stratagem.calibration.measured_links import links_from_cache

    check_arguments("fit_links", cluster=(cluster, Cluster), cache=(cache, str | Path | None))
    return links_from_cache(cluster, cache=cache).cluster


def execute(
    plan: Plan,
    model: nn.Module,
    data: Data,
    *,
    graph: OperatorGraph | None = None,
    steps: int = 1,
    warmup: int = 0,
    gradients: bool = False,
    parameters: bool = True,
    weights: str | Path | None = None,
    rate: Rate | None = None,
    checkpoint: str | Path | None = None,
    every: int = 0,
    resume: str | Path | None = None,
    keep: int = 2,
    finite: bool = False,
    memory: bool = False,
    cuda_graph: bool = False,
    backend: Backend = "local",
    progress: bool = True,
) -> ExecutionResult:
    """Train a model for some steps by a plan, on the CPUs or the GPUs of this machine.

    Or run its forward pass, where the plan is for that: `outputs` of the result has what the model
    returns for the last batch.

    Example:
        >>> result = sg.execute(plan, model, batch, steps=10, backend="gloo")  # doctest: +SKIP
        >>> result.step_time  # doctest: +SKIP
        0.152

    Args:
        plan: for this model and batch.
        model: its parameters and buffers are read, not changed, wherever they are;
            `load_checkpoint` puts what was trained into it.
        data: the keyword arguments of the model's `forward`, the same for every step; or an
            iterable of such batches, as a DataLoader: the first one is captured.
        graph: what `capture` gave; the model is captured anew when left out.
        steps: how many to run, those before a checkpoint to go on from counted.
        warmup: steps to run and undo before, so that the measured ones are not the first.
        gradients: whether to bring the gradients of the last step together.
        parameters: whether to bring the parameters together behind the last step; of a model that
            no process has the memory for, a checkpoint has them.
        weights: a file of safetensors, or a folder of them, that has the model's parameters and
            buffers, under the names of its ``state_dict``: ranks read their parts of it, so that
            the model may be one without values (``torch.device("meta")``).
        rate: what the plan's learning rate is multiplied by at each step, such as a
            `RateSchedule` or a function of the step from 0; 1 when left out.
        checkpoint: folder for checkpoints; none are written when left out.
        every: steps between two checkpoints; 0 writes one after the last step only.
        resume: a checkpoint, perhaps of another plan, or a folder of checkpoints with the last
            finite one, to go on from.
        keep: how many checkpoints stay; the last finite one stays in any case.
        finite: whether a loss that is not finite is an error; it is a warning otherwise.
        memory: whether to find the most bytes that each rank holds, in a step that is undone.
        cuda_graph: whether ranks on GPUs run the steps but a few as one CUDA graph; where that
            cannot be, a warning says why.
        backend: ``local`` runs all ranks as threads of this process, exact but not timed as a
            cluster would be; ``gloo`` starts a process for each on this machine, and gives them
            the same batches, drawn here; ``nccl`` does so with a GPU for each.
        progress: False shows nothing.

    Raises:
        ValueError: when the plan is not for this model, batch and sequence length, or cannot be
            executed; a batch, weights or a checkpoint do not fit, or are damaged; when a parameter
            has no values; on an unknown backend.
        RuntimeError: when CUDA, CuPy, NCCL or a GPU is missing for ``nccl``; when a rank fails,
            says which and where it was.
    """
    from torch import nn

    from stratagem.executor.running.execute import run_plan
    from stratagem.executor.running.planned_graph import planned_graph
    from stratagem.executor.state.weight_files import starting_state
    from stratagem.executor.training.batches import first_batch
    from stratagem.executor.training.training_loop import RunOptions
    from stratagem.runs.process_ranks import run_processes

    check_arguments("execute", backend=(backend, str))
    if backend not in get_args(Backend):
        raise unknown("backend", backend, get_args(Backend))
    check_arguments(
        "execute",
        plan=(plan, Plan),
        model=(model, nn.Module),
        data=(data, Iterable),
        graph=(graph, OperatorGraph | None),
        checkpoint=(checkpoint, str | Path | None),
        resume=(resume, str | Path | None),
        weights=(weights, str | Path | None),
    )
    run = run_plan if backend == "local" else partial(run_processes, backend=backend)
    options = RunOptions.of(
        steps=steps,
        warmup=warmup,
        gradients=gradients,
        parameters=parameters,
        rate=rate,
        checkpoint=checkpoint,
        every=every,
        resume=resume,
        keep=keep,
        finite=finite,
        memory=memory,
        cuda_graph=cuda_graph,
    )
    used = graph or planned_graph(plan, model, first_batch(data))
    plan.on(used)  # Refused where it is for another model.
    if backend != "nccl" and any(each.is_cuda for each in model.parameters()):
        warnings.warn(
            f"execute: the model is on a GPU, but backend {backend!r} trains on CPUs; say "
            "backend='nccl' to train on the GPUs of this machine",
            stacklevel=2,
        )
    with progress_bar(enabled=steps > 1 and progress) as show:
        state = starting_state(model, weights)
        result = run(plan, used, state, data, options, show=show)
    ran = result.provenance if backend == "nccl" else None
    elsewhere = "" if ran is None else ran.elsewhere(plan)
    if elsewhere:
        warnings.warn(f"execute: {elsewhere}", stacklevel=2)
    return result
