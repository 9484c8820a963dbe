"""What the pages of `rlhf inspect` ask the database: steps, samples, two scores, two runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rlhf_core.ops.inspect.rollouts import Filter, Rollouts, Row, quoted


def share_below(column: str) -> str:
    """Return the expression of the share of all rows that have a smaller value. Of the rows with the same
    value, half count, so that it is (r - 0.5) / n with the mean rank r of ties, as in Spearman's correlation.

    >>> import duckdb
    >>> duckdb.sql(f"SELECT {share_below('x')} FROM (VALUES (1), (2), (2), (3)) t(x) ORDER BY x").fetchall()
    [(0.125,), (0.5,), (0.5,), (0.875,)]
    """
    window = f"OVER (ORDER BY {column})"
    return f"(rank() {window} - 1 + cume_dist() {window} * count(*) OVER ()) / (2 * count(*) OVER ())"


_MOST_STEPS = 100
_BINS = 8
_TAIL = 0.01
"""Share of the responses beyond the borders of the outermost bins, on each side."""

Range = tuple[float | None, float | None]
"""Above the first value, up to the second. If both are equal, this value."""


def steps(rollouts: Rollouts, chosen: Filter) -> list[Row]:
    """Return means of all numbers by run and step; with more than 100 steps, of several steps together."""
    width = math.ceil((rollouts.last_step - rollouts.first_step + 1) / _MOST_STEPS)
    where, values = chosen.condition()
    means = ", ".join(f"avg({quoted(name)}) AS {quoted(name)}" for name in rollouts.numbers[1:])
    return rollouts.rows(
        "SELECT run, (step - ?) // ? AS bin, min(step) AS first, max(step) AS last, count(*) AS responses,"
        f" count(excluded) AS excluded, avg(finished::INTEGER) AS finished, {means},"
        " list_sort(list_distinct(flatten(array_agg(DISTINCT raised)))) AS raised"
        f" FROM rollouts WHERE {where} GROUP BY run, bin ORDER BY run, bin",
        [rollouts.first_step, width, *values],
    )


def sample(rollouts: Rollouts, chosen: Filter, size: int) -> list[Row]:
    """Return random responses of a filter with their texts, always the same ones."""
    where, values = chosen.condition()
    rows = rollouts.rows(
        f'FROM rollouts WHERE {where} ORDER BY hash(run, step, "index") LIMIT ?', [*values, size]
    )
    return rollouts.with_texts(rows)


@dataclass(frozen=True)
class Grid:
    """Numbers of responses by two scores."""

    columns: list[Range]
    rows: list[Range]
    """From the highest values to the lowest."""
    counts: dict[tuple[int, int], int]
    """By places in `rows` and `columns`."""

    @property
    def largest(self) -> int:
        return max(self.counts.values(), default=0)


def grid(rollouts: Rollouts, chosen: Filter, x: str, y: str) -> Grid:
    """Return how many responses of a filter have which values of two columns."""
    where, values = _with_both(chosen, x, y)
    columns = _bins(rollouts, x, where, values)
    rows = _bins(rollouts, y, where, values)
    counts = rollouts.rows(
        f"SELECT {_place(x, columns)} AS x, {_place(y, rows)} AS y, count(*) AS n"
        f" FROM rollouts WHERE {where} GROUP BY ALL",
        [*_borders(columns), *_borders(rows), *values],
    )
    last = len(rows) - 1
    return Grid(columns, rows[::-1], {(last - row["y"], row["x"]): row["n"] for row in counts})


def lowest(bounds: Range) -> float | None:
    """Return the smallest number in a range."""
    low, high = bounds
    # A range leaves its lower border out, and the filter `min:` takes it in.
    return low if low is None or low == high else math.nextafter(low, math.inf)


def _with_both(chosen: Filter, x: str, y: str) -> tuple[str, list[Any]]:
    where, values = chosen.condition()
    return f"{where} AND {quoted(x)} IS NOT NULL AND {quoted(y)} IS NOT NULL", values


def _bins(rollouts: Rollouts, name: str, where: str, values: list[Any]) -> list[Range]:
    """Return eight ranges of equal width, or one for each value if there are at most eight."""
    column = quoted(name)
    found = rollouts.rows(
        f"SELECT DISTINCT {column} AS value FROM rollouts WHERE {where} ORDER BY value LIMIT {_BINS + 1}",
        values,
    )
    if len(found) <= _BINS:
        return [(row["value"], row["value"]) for row in found]
    low, high = rollouts.one(
        # The exact quantile keeps all values in memory, and these are only borders of a table.
        f"SELECT approx_quantile({column}, {_TAIL}), approx_quantile({column}, {1 - _TAIL})"
        f" FROM rollouts WHERE {where}",
        values,
    )
    borders = [low + (high - low) * place / _BINS for place in range(1, _BINS)]
    return [(None, borders[0]), *pairwise(borders), (borders[-1], None)]


def _borders(bins: list[Range]) -> list[float | None]:
    return [high for _, high in bins[:-1]]


def _place(name: str, bins: list[Range]) -> str:
    """Return the SQL of the number of a value's bin. The parameters are `_borders(bins)`."""
    if len(bins) < 2:
        return "0"
    cases = " ".join(f"WHEN {quoted(name)} <= ? THEN {place}" for place in range(len(bins) - 1))
    return f"CASE {cases} ELSE {len(bins) - 1} END"


def parting(
    rollouts: Rollouts, chosen: Filter, x: str, y: str, limit: int
) -> tuple[float | None, list[Row], list[Row]]:
    """Return where two columns rank the responses of a filter differently.

    Args:
        rollouts: The responses.
        chosen: The filter.
        x: The first column.
        y: The second column.
        limit: The largest number of responses of each list.

    Returns:
        Spearman's correlation, or None if one column has one value only; the responses that `x` ranks highest
        above `y`; and those that `y` ranks highest above `x`. The columns `above_x` and `above_y` are
        `share_below` of both.
    """
    where, values = _with_both(chosen, x, y)
    ranked = (
        f'SELECT run, step, "index", "group", prompt_id, {quoted(x)} AS x, {quoted(y)} AS y,'
        f" {share_below(quoted(x))} AS above_x, {share_below(quoted(y))} AS above_y"
        f" FROM rollouts WHERE {where}"
    )
    [found] = rollouts.rows(
        f"WITH ranked AS ({ranked}) SELECT corr(above_x, above_y) AS correlation,"
        f" arg_max(ranked, above_x - above_y, {limit}) AS above,"
        f" arg_min(ranked, above_x - above_y, {limit}) AS below FROM ranked",
        values,
    )
    above, below = (rollouts.with_texts(found[side] or []) for side in ("above", "below"))
    correlation = found["correlation"]
    return (None if correlation is None or math.isnan(correlation) else correlation), above, below


def pairs(
    rollouts: Rollouts, chosen: Filter, name: str, *, descending: bool, offset: int, limit: int
) -> tuple[int, list[Row]]:
    """Return how many prompts both runs have, and for some of them the last response of each run.

    The rows are sorted by `difference`: the value of a column in the second run minus that in the first.

    Args:
        rollouts: Those of two runs.
        chosen: The filter.
        name: The column.
        descending: Whether the largest differences are first.
        offset: Prompts to leave out before the first one.
        limit: The largest number of prompts.
    """
    where, values = chosen.condition()
    last = (
        f'SELECT run, step, "index", prompt_id, {quoted(name)} AS value FROM rollouts WHERE {where}'
        ' QUALIFY row_number() OVER (PARTITION BY run, prompt_id ORDER BY step DESC, "index") = 1'
    )
    joined = (
        f"WITH last AS MATERIALIZED ({last}), joined AS (SELECT a.prompt_id, a AS one, b AS other,"
        " b.value - a.value AS difference FROM last a JOIN last b USING (prompt_id)"
        " WHERE a.run = 0 AND b.run = 1)"
    )
    (count,) = rollouts.one(f"{joined} SELECT count(*) FROM joined", values)
    order = "DESC" if descending else "ASC"
    rows = rollouts.rows(
        f"{joined} FROM joined ORDER BY difference {order} NULLS LAST, prompt_id LIMIT ? OFFSET ?",
        [*values, limit, offset],
    )
    for side in ("one", "other"):
        rollouts.with_texts([row[side] for row in rows])
    return count, rows
