"""How far predictions are from what was measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.fidelity.predict import Outcome

HEADROOM = 0.1
"""Share of the memory that a chosen plan shall leave free: about the error of predicted peaks.

Where it is full but for less, PyTorch's allocator gives memory back and asks for it again in every
pass, and steps take three to five times as long.
"""


def score(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Errors in per cent; None where a set has nothing to say.

    `mape`, `median` and `p90` are of |predicted / measured − 1|, `bias` is the mean with its sign.
    `regret_mean`: choosing in each group the plan that is predicted to be fastest, how much slower
    it was than the fastest there. `fit_false_alarm`: of the runs that ran, how many were predicted
    not to fit; `fit_recall`: of those that did not, how many were.
    """
    timed = [outcome for outcome in outcomes if outcome.run.seconds is not None]
    sized = [outcome for outcome in outcomes if outcome.run.peak_bytes is not None]
    errors = np.array([outcome.error for outcome in timed])
    return {
        "scored": len(timed),
        "mape": _percent(np.abs(errors), np.mean),
        "median": _percent(np.abs(errors), np.median),
        "p90": _percent(np.abs(errors), lambda e: np.percentile(e, 90)),
        "bias": _percent(errors, np.mean),
        "spearman": _spearman(timed),
        "regret_mean": _regret(timed),
        "memory_mape": _percent(np.abs(np.array([o.memory_error for o in sized])), np.mean),
        "fit_false_alarm": _share(outcomes, ran=True),
        "fit_recall": _share(outcomes, ran=False),
    }


def regrets(timed: Sequence[Outcome]) -> dict[tuple[str, int], float]:
    """Per group of several plans, how much slower the chosen one was than the fastest.

    Chosen is the one that is predicted to be fastest of those that are predicted to leave some
    memory free (see `HEADROOM`), or else of those that are predicted to fit.
    """
    groups: dict[tuple[str, int], list[Outcome]] = defaultdict(list)
    for outcome in timed:
        groups[outcome.run.group].append(outcome)
    found = {}
    for group, members in groups.items():
        if len(members) > 1:
            chosen = min(members, key=_preference).run.seconds
            best = min(outcome.run.seconds or 0.0 for outcome in members)
            assert chosen is not None
            found[group] = chosen / best - 1.0
    return found


def _preference(outcome: Outcome) -> tuple[bool, bool, float]:
    """The less, the rather a plan is chosen."""
    return not outcome.fits, outcome.free < HEADROOM, outcome.seconds


def reasons(counts: Counter[str]) -> dict[str, int]:
    """Counts by reason, the most frequent first."""
    return dict(counts.most_common())


def _percent(errors: Any, of: Any) -> float | None:
    return round(100.0 * float(of(errors)), 2) if len(errors) else None


def _spearman(timed: Sequence[Outcome]) -> float | None:
    if len(timed) < 3:
        return None
    measured = [outcome.run.seconds for outcome in timed]
    if len(set(measured)) == 1:
        return None
    return round(float(spearmanr([o.seconds for o in timed], measured).statistic), 4)


def _regret(timed: Sequence[Outcome]) -> float | None:
    found = regrets(timed)
    return round(100.0 * float(np.mean(list(found.values()))), 2) if found else None


def _share(outcomes: Sequence[Outcome], *, ran: bool) -> float | None:
    """Of the runs that did or did not run, the share that was predicted not to fit."""
    of = [outcome for outcome in outcomes if outcome.run.ran is ran]
    return round(100.0 * sum(not o.fits for o in of) / len(of), 2) if of else None
