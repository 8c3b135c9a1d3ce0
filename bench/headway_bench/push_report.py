"""What the push bench's figures come to: rows, tables, and the bars that they are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from headway_bench.harness import Row, make_row, quantiles

RAW_SHARE = 0.6  # tcp, digest included, of raw loopback TCP without one
OVER_GLOO = 1.5
SENT_BAR = 2.2  # bytes that the learner sends, per payload byte, whatever the number of receivers
DENSE_TOTAL = {
    "shm swap": 1.4,
    "shm": 2.4,
}  # dense, from the end of the cast to the proof, in memcpys of the state
DENSE_PAUSE = 1.2
SPARSE_PAUSE, SPARSE_BYTES = 0.1, 0.05  # shm at 1 %: pause in memcpys; wire bytes per parameter
BARS_FROM_MB = 200  # below, fixed costs rule: shown, not judged


@dataclass(frozen=True)
class Push:
    """One whole push: seconds by stage (and "bytes"), and a memcpy of a whole state right after it."""

    channel: str
    num_bytes: int
    density: float
    turn: int
    times: dict[str, float]
    memcpy_s: float


@dataclass(frozen=True)
class Finding:
    """A bar and the figure that is held to it: the median of the ratios within rounds."""

    claim: str
    value: float
    bar: float
    at_least: bool

    @property
    def held(self) -> bool:
        """Whether it is met."""
        return self.value >= self.bar if self.at_least else self.value <= self.bar


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def wire_rows(size_mb: int, seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """GB/s of each contestant, with its share of the limits measured in the same rounds."""
    rows: list[Row] = []
    for name, values in seconds.items():
        ratios = {
            "of memcpy": _ratios(seconds["memcpy"], values),
            "of raw tcp": _ratios(seconds["raw tcp"], values),
            "over gloo": _ratios(seconds["gloo broadcast"], values),
        }
        rates = [size_mb / 1000 / value for value in values]
        rows.append(
            make_row("push", f"wire/{size_mb}MB/{name}", "GB/s", rates, config={"mb": size_mb}, ratios=ratios)
        )
    return rows


def wire_findings(size_mb: int, seconds: Mapping[str, Sequence[float]]) -> list[Finding]:
    """tcp against raw TCP and against gloo."""
    if size_mb < BARS_FROM_MB:
        return []
    raw = quantiles(_ratios(seconds["raw tcp"], seconds["tcp"])).p50
    tuned = quantiles(_ratios(seconds["raw tcp, small buffers"], seconds["tcp"])).p50
    gloo = quantiles(_ratios(seconds["gloo broadcast"], seconds["tcp"])).p50
    return [
        Finding(f"{size_mb} MB: tcp with its digest, of raw tcp without", raw, RAW_SHARE, at_least=True),
        Finding(f"{size_mb} MB: the same, of raw tcp with small buffers", tuned, RAW_SHARE, at_least=True),
        Finding(f"{size_mb} MB: tcp over a gloo broadcast", gloo, OVER_GLOO, at_least=True),
    ]


def push_rows(pushes: Sequence[Push], stages: Sequence[str]) -> list[Row]:
    """A row per channel, density and stage, in seconds and in memcpys of the state; and the bytes."""
    rows: list[Row] = []
    for channel, density in _cases(pushes):
        chosen = [push for push in pushes if (push.channel, push.density) == (channel, density)]
        size_mb = chosen[0].num_bytes // 1_000_000
        config: dict[str, str | float | int | bool] = {"mb": size_mb, "channel": channel, "density": density}
        for stage in stages:
            values = [push.times[stage] for push in chosen]
            ratios = {"memcpys": _ratios(values, [push.memcpy_s for push in chosen])}
            case = f"push/{size_mb}MB/{channel}/{density:g}/{stage}"
            rows.append(make_row("push", case, "s", values, config=config, ratios=ratios))
        values = [push.times["bytes"] for push in chosen]
        rows.append(
            make_row("push", f"push/{size_mb}MB/{channel}/{density:g}/bytes", "B", values, config=config)
        )
    return rows


def push_table(size_mb: int, pushes: Sequence[Push], stages: Sequence[str]) -> Table:
    """Milliseconds by stage, medians; the total and the pause in memcpys too."""
    table = Table(title=f"pushes of a {size_mb} MB state, ms (p50)", title_justify="left")
    for column in ("channel", "changed"):
        table.add_column(column)
    for column in ("MB sent", *stages, "total / memcpy", "pause / memcpy"):
        table.add_column(column, justify="right")
    for channel, density in _cases(pushes):
        chosen = [push for push in pushes if (push.channel, push.density) == (channel, density)]
        shown = [f"{1000 * quantiles([push.times[stage] for push in chosen]).p50:.1f}" for stage in stages]
        shares = [
            quantiles([push.times[stage] / push.memcpy_s for push in chosen]).format()
            for stage in ("total", "pause")
        ]
        sent = f"{quantiles([push.times['bytes'] for push in chosen]).p50 / 1e6:.2f}"
        table.add_row(channel, f"{density:g}", sent, *shown, *shares)
    return table


def push_findings(pushes: Sequence[Push]) -> list[Finding]:
    """The bars of shm: dense pushes, and sparse ones at 1 %. Widened ones write twice the bytes: shown, not judged."""
    found: list[Finding] = []
    for channel, density in _cases(pushes):
        chosen = [push for push in pushes if (push.channel, push.density) == (channel, density)]
        size_mb = chosen[0].num_bytes // 1_000_000
        if size_mb < BARS_FROM_MB or channel not in ("shm", "shm swap", "shm double"):
            continue
        pause = quantiles([push.times["pause"] / push.memcpy_s for push in chosen]).p50
        claim = f"{size_mb} MB, {channel}, {'dense' if density == 1.0 else f'{100 * density:g} % changed'}"
        if density == 1.0:
            found.append(Finding(f"{claim}: pause, memcpys", pause, DENSE_PAUSE, at_least=False))
            if bar := DENSE_TOTAL.get(channel):
                total = quantiles([_checked_s(push) / push.memcpy_s for push in chosen]).p50
                words = "end of the cast to applied and checked, memcpys"
                found.append(Finding(f"{claim}: {words}", total, bar, at_least=False))
        elif density == 0.01:
            found.append(Finding(f"{claim}: pause, memcpys", pause, SPARSE_PAUSE, at_least=False))
            if channel == "shm":
                size = chosen[0].times["bytes"] / (chosen[0].num_bytes / 2)
                found.append(Finding(f"{claim}: wire bytes a parameter", size, SPARSE_BYTES, at_least=False))
    return found


def _checked_s(push: Push) -> float:
    """From the end of the publish to the proof."""
    return push.times["total"] + push.times["prove"] - push.times["encode"]


def fan_rows(size_mb: int, fan: Mapping[int, Sequence[Mapping[str, float]]]) -> list[Row]:
    """Milliseconds to the first and the last receiver, and bytes sent by the learner per payload byte."""
    rows: list[Row] = []
    for count, rounds in fan.items():
        config = {"mb": size_mb, "receivers": count}
        one = fan.get(1, [])
        for what, unit, scale in (
            ("first", "ms", 1000.0),
            ("last", "ms", 1000.0),
            ("sent", "x payload", 1.0),
        ):
            values = [scale * each[what] for each in rounds]
            ratios = (
                {"of one receiver": _ratios(values, [scale * each["last"] for each in one])}
                if unit == "ms" and one
                else {}
            )
            case = f"fan/{size_mb}MB/{count} receivers/{what}"
            rows.append(make_row("push", case, unit, values, config=config, ratios=ratios))
    return rows


def fan_findings(size_mb: int, fan: Mapping[int, Sequence[Mapping[str, float]]]) -> list[Finding]:
    """What the learner sends, at the most in any round. Time to the last one is shown: it takes a core each."""
    count = max(fan)
    most = max(each["sent"] for each in fan[count])
    return [
        Finding(
            f"{size_mb} MB to {count} receivers: bytes sent by the learner, of the payload",
            most,
            SENT_BAR,
            at_least=False,
        )
    ]


def findings_table(found: Sequence[Finding]) -> Table:
    """One line a bar."""
    table = Table(title="bars", title_justify="left")
    table.add_column("claim")
    table.add_column("figure", justify="right")
    table.add_column("bar", justify="right")
    table.add_column("")
    for finding in found:
        sign = ">=" if finding.at_least else "<="
        bar = f"{sign} {finding.bar:g}"
        table.add_row(finding.claim, f"{finding.value:.3f}", bar, "held" if finding.held else "NOT HELD")
    return table


def _cases(pushes: Sequence[Push]) -> list[tuple[str, float]]:
    return list(dict.fromkeys((push.channel, push.density) for push in pushes))
