"""Detection of responses that repeat themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_LOOP_TOKENS = 16
"""Shortest response and shortest loop that count as repetition, in tokens."""


def repeats(response_ids: Sequence[int] | np.ndarray[Any, Any]) -> bool:
    """Return whether a response of 16 tokens or more has at most two different tokens or contains a loop.

    A loop is a piece of any length that occurs three or more times in a row and covers at least 16 tokens and
    a quarter of the response.
    """
    length = len(response_ids)
    if length < _LOOP_TOKENS:
        return False
    ids_T = np.asarray(response_ids)
    if len(set(ids_T.tolist())) <= 2:
        return True
    shortest = max(_LOOP_TOKENS, math.ceil(length / 4))
    for period in _periods(ids_T, shortest // 5):
        needed = max(3 * period, shortest) - period
        # In a loop of this period, each token is equal to the token one period before.
        differs = np.flatnonzero(ids_T[period:] != ids_T[:-period])
        edges = np.concatenate(([-1], differs, [length - period]))
        runs_of_equal = np.diff(edges) - 1
        if runs_of_equal.max() >= needed:
            return True
    return False


def _periods(ids_T: np.ndarray, window: int) -> Iterator[int]:
    """Yield the periods that a loop of at least `5 * window` tokens can have, each once.

    All periods up to a third of the length would take quadratic time. Only those are tried at which one of
    about twenty windows of the response recurs. One of the windows begins among the first `window` tokens of
    the loop. One period later, still within the loop, the same tokens follow.

    A window that repeats a few tokens (spaces, dashes) recurs at nearly every position of a long series of
    them. If the series is longer than the loop's period, the whole loop has the period of the series. If it
    is shorter, the window is extended to the end of the series before the search. Windows that overlap their
    recurrence by more than half are of this kind, so the number of periods is small in all cases.
    """
    length, size, text = len(ids_T), ids_T.itemsize, ids_T.tobytes()
    seen = set()
    for start in range(0, length - window, window):
        end = start + window
        small = _small_period(text[start * size : end * size], size)
        if small:
            if small not in seen:
                seen.add(small)
                yield small
            breaks = np.flatnonzero(ids_T[start + small :] != ids_T[start:-small])
            if not len(breaks):
                continue
            end = start + small + int(breaks[0]) + 1
        piece = text[start * size : end * size]
        # The limit is where the second occurrence may end: a loop has at least three pieces, so its period
        # is at most a third of the length.
        for position in _occurrences(text, piece, start + 1, end + length // 3, size):
            period = position - start
            if period not in seen:
                seen.add(period)
                yield period


def _small_period(piece: bytes, size: int) -> int:
    """Return the smallest period of `piece` that is at most half of its tokens, or 0. A token has `size`
    bytes.
    """
    half = len(piece) // size // 2
    for period in _occurrences(piece, piece[: half * size], 1, 2 * half, size):
        if piece[period * size :] == piece[: -period * size]:
            return period
    return 0


def _occurrences(text: bytes, piece: bytes, first: int, end: int, size: int) -> Iterator[int]:
    """Yield the positions of the tokens of `piece` in `text`, between the tokens `first` and `end`."""
    offset = text.find(piece, first * size, end * size)
    while offset >= 0:
        if offset % size == 0:
            yield offset // size
        # `find` compares bytes, so it can stop within a token. Continue at the next one.
        offset = text.find(piece, offset + size - offset % size, end * size)
