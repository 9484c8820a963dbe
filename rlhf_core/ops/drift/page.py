"""The measures of drift against their limits, and their page in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_core.config.data import DriftConfig
from rlhf_core.data.card import markdown_cell
from rlhf_core.ops.drift.measures import MIN_NEW_ROWS, Drift

State = Literal["stop", "warn", "not measured", "ok"]


@dataclass(frozen=True)
class Finding:
    """A measure and its limits."""

    drift: Drift
    warn: float | None
    stop: float | None

    @property
    def state(self) -> State:
        """`stop` or `warn` if the value is above that limit. Where the value has an interval, its lower bound
        must be above the limit, so that chance alone is not drift.
        """
        if self.drift.value is None:
            return "not measured"
        value = self.drift.value if self.drift.low is None else self.drift.low
        if self.stop is not None and value > self.stop:
            return "stop"
        if self.warn is not None and value > self.warn:
            return "warn"
        return "ok"

    @property
    def sentence(self) -> str:
        """The value and its limit, or why there is no value."""
        drift, state = self.drift, self.state
        if drift.value is None:
            return f"{drift.measure} was not measured: {drift.note}"
        value = f"{drift.label} {drift.value:.3g}{_interval(drift)} ({drift.place})"
        if state == "ok":
            return value
        limit = self.stop if state == "stop" else self.warn
        return f"{value}, above drift.{state}.{drift.measure}={limit:g}"


def findings(drifts: Sequence[Drift], config: DriftConfig) -> list[Finding]:
    """Return each measure with its limits."""
    return [Finding(drift, *config.limits(drift.measure)) for drift in drifts]


def drift_markdown(found: Sequence[Finding], champion: str) -> str:
    """Return the page.

    Args:
        found: All measures.
        champion: Name of the version whose data the new data are compared with.
    """
    states = {finding.state for finding in found}
    verdict = "ok"
    for state in ("warn", "stop"):
        if state in states:
            verdict = state
    lines = [
        f"# Data drift: {verdict}",
        "",
        f"The data of this run, compared with those of {markdown_cell(champion)}.",
        "",
        "| measure | value | where | warns above | stops above | |",
        "|---|---|---|---|---|---|",
    ]
    for finding in found:
        drift = finding.drift
        value = "" if drift.value is None else f"{drift.value:.3f}{_interval(drift)}"
        bounds = f"{_limit(finding.warn)} | {_limit(finding.stop)}"
        lines.append(f"| {drift.label} | {value} | {drift.place} | {bounds} | {finding.state} |")
    lines += [
        "",
        "lengths, sources and vocabulary: Jensen-Shannon divergence in bits, 0 for equal and 1 for"
        " disjoint data. If a tenth of the new data is of a kind that the champion's data do not have, it is"
        " 0.05, for a fifth 0.11, for half 0.31. agreement: loss of a share, which is above a limit if its"
        " whole interval is.",
        "",
        f"of new rows: only the rows that the champion's data do not have, if there are at least"
        f" {MIN_NEW_ROWS} of them in the set, and other rows. The limits are the same.",
    ]
    for finding in found:
        drift = finding.drift
        if drift.note:
            lines += ["", f"{drift.measure} was not measured: {markdown_cell(drift.note)}."]
        if not drift.value:
            continue
        rows = "" if drift.new_rows is None else f", {drift.new_rows} rows"
        lines += ["", f"## {drift.label}, {drift.place}{rows}", ""]
        lines += ["| | champion | new |", "|---|---|---|"]
        for change in drift.changes:
            category = markdown_cell(change.category)
            lines.append(f"| {category} | {change.before:.2%} | {change.after:.2%} |")
    return "\n".join(lines) + "\n"


def _interval(drift: Drift) -> str:
    return "" if drift.low is None else f" [{drift.low:.3f}, {drift.high:.3f}]"


def _limit(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
