"""What headway claims against its rivals, and whether a run of the bench bears it out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import msgspec
from rich.table import Table

from headway_bench.contestants import CONTESTANTS, HEADWAY
from headway_bench.harness import quantiles, ratios_by_round
from headway_bench.rivals.workload import Report

# Least median ratio of samples per second, headway over the rival, on both workloads.
LEAST_RATIO = {"trl_async": 1.3, "trl_two": 2.0, "trl_default": 2.5, "trl_threads": 2.5}
MOST_LAG = 4
LEARNING_WORKLOAD = "w1"
# Rewards of two seeds of one contestant differ by up to this much; with few rounds their variance says
# too little.
LEAST_SEED_NOISE = 0.03


class Outcome(msgspec.Struct, frozen=True):
    """One run of one contestant in one round; `load` is the machine's load average before it."""

    workload: str
    contestant: str
    turn: int
    seed: int
    load: float
    report: Report


@dataclass(frozen=True)
class Finding:
    """A claim with what was found."""

    claim: str
    found: str
    held: bool


def findings(outcomes: Sequence[Outcome]) -> list[Finding]:
    """Every claim that these outcomes can settle; none without headway among them."""
    found: list[Finding] = []
    for workload in sorted({outcome.workload for outcome in outcomes}):
        by_name: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            if outcome.workload == workload:
                by_name.setdefault(outcome.contestant, []).append(outcome)
        ours = by_name.pop(HEADWAY, [])
        if not ours:
            continue
        for name in (name for name in LEAST_RATIO if name in by_name):
            found.append(ratio_finding(workload, name, ours, by_name[name]))
        if workload == LEARNING_WORKLOAD and by_name:
            found.append(reward_finding(workload, ours, [each for runs in by_name.values() for each in runs]))
        found.append(lag_finding(workload, ours))
    return found


def ratio_finding(workload: str, rival: str, ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> Finding:
    """The median over rounds of headway's samples per second over the rival's."""
    ratios = ratios_by_round(
        {outcome.turn: outcome.report.samples_per_s for outcome in ours},
        {outcome.turn: outcome.report.samples_per_s for outcome in theirs},
    )
    spread = quantiles(ratios)
    least = LEAST_RATIO[rival]
    return Finding(
        f"{workload}: at least {least:.1f}x {CONTESTANTS[rival].title}",
        spread.format() + "x",
        spread.p50 >= least,
    )


def reward_finding(workload: str, ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> Finding:
    """Our mean final reward is not below the rivals' by more than the noise between seeds.

    The noise is two standard errors of the difference of the means, at least LEAST_SEED_NOISE.
    """
    our_rewards = [outcome.report.reward_last_10 for outcome in ours]
    their_rewards = [outcome.report.reward_last_10 for outcome in theirs]
    error = math.sqrt(
        sum(variance(each) / len(each) for each in (our_rewards, their_rewards) if len(each) > 1)
    )
    noise = max(LEAST_SEED_NOISE, 2 * error)
    gap = fmean(our_rewards) - fmean(their_rewards)
    return Finding(
        f"{workload}: reward of the last 10 updates within seed noise ({noise:.3f}) of the rivals'",
        f"{fmean(our_rewards):.3f} against {fmean(their_rewards):.3f}",
        gap >= -noise,
    )


def lag_finding(workload: str, ours: Sequence[Outcome]) -> Finding:
    """No trained token lagged by more than what the rivals are allowed."""
    most = max(outcome.report.max_lag_seen for outcome in ours)
    return Finding(f"{workload}: lag at most {MOST_LAG}", str(most), most <= MOST_LAG)


def findings_table(found: Sequence[Finding]) -> Table:
    """The findings as a table."""
    table = Table(title="claims", title_justify="left")
    for column in ("claim", "found", ""):
        table.add_column(column)
    for finding in found:
        table.add_row(finding.claim, finding.found, "held" if finding.held else "[bold red]NOT HELD")
    return table
