"""Ranks of scores, in the SQL of DuckDB."""

from __future__ import annotations


def share_below(column: str) -> str:
    """Return the expression of the share of all rows that have a smaller value. Of the rows with the same
    value, half count, so that it is (r - 0.5) / n with the mean rank r of ties, as in Spearman's correlation.

    >>> import duckdb
    >>> duckdb.sql(f"SELECT {share_below('x')} FROM (VALUES (1), (2), (2), (3)) t(x) ORDER BY x").fetchall()
    [(0.125,), (0.5,), (0.5,), (0.875,)]
    """
    window = f"OVER (ORDER BY {column})"
    return f"(rank() {window} - 1 + cume_dist() {window} * count(*) OVER ()) / (2 * count(*) OVER ())"
