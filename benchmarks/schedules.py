"""How much of a pipeline is idle under every schedule, and how fast are schedules played?

    python -m benchmarks.schedules

Prints one JSON object a line. First, for balanced stages and transfers that take no time, the
bubble of each schedule as simulated beside the formula of its paper, as shares of the ranks' time
and exactly equal or not. Then the time to simulate 8 stages × 256 microbatches with transfers: the
best of several repeats of the event simulation, its macro graph made once.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.schedules.actions import Schedule
from stratagem.simulator.schedules.ampnet import ampnet
from stratagem.simulator.schedules.dual_pipe import dualpipe
from stratagem.simulator.schedules.macro_graph import macro_graph
from stratagem.simulator.schedules.named_schedules import (
    chimera,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    record_of,
    terapipe,
    zb_h1,
)
from stratagem.simulator.schedules.schedule_player import StageTimes, duration_table, play_schedule
from stratagem.simulator.schedules.schedule_record import PassTimes, Sizes
from stratagem.simulator.schedules.steady_state import steady_state

STAGES, MICROBATCHES = 8, 32
F, B, I, W = 1000, 2000, 1000, 1000  # noqa: E741
REPEATS = 20


@dataclass(frozen=True)
class Case:
    """A schedule, the times it is played with, and the bubble that its record says."""

    name: str
    schedule: Schedule
    formula: Fraction | None
    times: StageTimes

    def bubble(self) -> Fraction:
        """The simulated bubble; in the steady state for what never flushes."""
        if self.schedule.update_every is None:
            return play_schedule(self.schedule, self.times).bubble
        return steady_state(self.schedule, self.times).bubble


def cases() -> list[Case]:
    """Every schedule on 8 ranks, 32 microbatches."""
    s, m, v, k = STAGES, MICROBATCHES, 2, 4
    whole = StageTimes(F, B, I, W)
    one = Sizes(s, m, s)
    two = Sizes(v * s, m, s)
    listed = [
        _case("gpipe", "gpipe", one),
        _case("1f1b", "1f1b", one),
        _case(f"interleaved, {v} stages a rank", "interleaved", two, share=v),
        _case("zb-h1", "zb-h1", one),
        _case("chimera, B = F", "chimera", one, PassTimes(F, F)),
        _case("chimera, B = 2F, M = S", "chimera", Sizes(s, s, s)),
        _case("dualpipe", "dualpipe", one),
        _case(f"terapipe, {k} slices", "terapipe", Sizes(s, m, s, k), share=k),
        _case("pipedream, steady state", "pipedream", one),
        _case("pipedream-vertical, steady state", "pipedream-vertical", one),
    ]
    greedy = ampnet(s, 4 * m, whole, max_active=s)
    return [*listed, Case("ampnet, steady state", greedy, Fraction(0), whole)]


def _case(
    case: str,
    name: str,
    sizes: Sizes,
    times: PassTimes = PassTimes(F, B, I, W),  # noqa: B008 (frozen)
    share: int = 1,
) -> Case:
    """A schedule of some sizes, whose stages or slices are a share of a rank's work."""
    each = PassTimes(*(ns // share for ns in times))
    record = record_of(name)
    return Case(case, record.make(sizes), record.bubble(sizes, each), StageTimes(*each))


def bubble_line(case: Case) -> dict[str, object]:
    """The bubble of one case, simulated and by formula."""
    bubble = case.bubble()
    return {
        "case": case.name,
        "simulated": round(float(bubble), 6),
        "formula": None if case.formula is None else round(float(case.formula), 6),
        "equal": bubble == case.formula,
    }


def speed_cases() -> dict[str, Schedule]:
    """Every schedule of 8 ranks and 256 microbatches."""
    s, m = STAGES, 256
    times = StageTimes(F, B)
    return {
        "gpipe": gpipe(s, m),
        "1f1b": one_f_one_b(s, m),
        "interleaved, 2 stages a rank": interleaved(2 * s, m, s),
        "zb-h1": zb_h1(s, m),
        "chimera": chimera(s, m),
        "dualpipe": dualpipe(s, m),
        "terapipe, 4 slices": terapipe(s, m, 4),
        "pipedream": pipedream(s, m),
        "ampnet": ampnet(s, m, times, max_active=s),
    }


def speed_line(name: str, schedule: Schedule) -> dict[str, object]:
    """The time to simulate one schedule, from a table of durations to every start and end."""
    macro = macro_graph(schedule, tuple(pairwise(range(schedule.num_stages))))
    times = StageTimes(F, B, I, W, transfer=100, update=500, replica_sync=300)
    table, _ = duration_table(macro, times)
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        simulate(macro.with_durations(table))
        best = min(best, time.perf_counter() - begin)
    tasks = macro.graph.num_tasks
    return {"case": f"{name}, 8 × 256", "tasks": tasks, "ms": round(best * 1e3, 3)}


def main() -> None:
    """Print one line a case."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for case in cases():
        print(json.dumps(bubble_line(case)), flush=True)
    for name, schedule in speed_cases().items():
        print(json.dumps(speed_line(name, schedule), ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
