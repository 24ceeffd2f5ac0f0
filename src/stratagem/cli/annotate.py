"""The command line's verb on plans that a person says a part of.

stratagem annotate examples.gpt2:build asked.yaml --cluster dgx-a100 --out plan.json --regret
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from stratagem.cli.shared.named_models import load_cluster, load_graph
from stratagem.cli.shared.options import (
    AsJson,
    ClusterName,
    Devices,
    Model,
    Nodes,
    Optimizer,
    PrecisionName,
    print_json,
    print_tables,
    say_written,
    speaker,
    training_of,
)
from stratagem.cli.shared.simulations import show_simulation, simulation_facts
from stratagem.face import verbs
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.semi_automatic.annotated_plans import complete_plan
from stratagem.searcher.semi_automatic.annotation_files import read_annotations
from stratagem.searcher.semi_automatic.regret import annotation_regret
from stratagem.simulator.base.files import check_outputs


def annotate(
    model: Model,
    asked: Annotated[Path, typer.Argument(help="YAML file of a mesh and annotations or a layout")],
    cluster: ClusterName,
    out: Annotated[Path, typer.Option("--out", "-o", help="plan file to write")],
    nodes: Nodes = None,
    devices: Devices = None,
    precision: PrecisionName = None,
    optimizer: Optimizer = None,
    search: Annotated[
        bool, typer.Option("--search", help="better what the annotations leave open")
    ] = False,
    regret: Annotated[
        bool, typer.Option("--regret", help="what the annotations cost, and which is to blame")
    ] = False,
    evaluations: Annotated[int, typer.Option(help="plans that each search decides on")] = 20_000,
    as_json: AsJson = False,
) -> None:
    """Complete a plan from how a few tensors lie.

    Example: stratagem annotate examples.gpt2:build asked.yaml --cluster dgx-a100 --out plan.json
    """
    check_outputs(out, read=(model, asked, cluster))
    graph, asking = load_graph(model), read_annotations(asked)
    training = training_of(precision, optimizer, None)
    done = complete_plan(graph, load_cluster(cluster, nodes, devices), asking, training)
    say, budget = speaker(as_json), Budget(evaluations=evaluations)
    plan, answer = done.plan, {}
    if regret:
        found = annotation_regret(done, budget=budget)
        print_tables(say, found.table)
        plan = found.held.plan if search else plan
        answer = {
            "regret": found.found if math.isfinite(found.found) else None,
            "at_least": found.at_least,
            "gains": found.gains,
            "to_blame": found.to_blame,
        }
    elif search:
        plan = verbs.search(
            graph,
            plan.cluster,
            training=training,
            start=plan,
            space=done.space,
            budget=budget,
            draws=0,
            progress=not as_json,
        ).plan
    simulation = verbs.simulate(plan, graph)
    if done.inferred:
        print_tables(say, done.table)
    show_simulation(say, simulation, graph, None, None)
    plan.save(out)
    say_written(say, out)
    if as_json:
        facts: dict[str, Any] = {"plan": plan.name, **simulation_facts(simulation)}
        print_json({**facts, "inferred": len(done.inferred), **answer})
