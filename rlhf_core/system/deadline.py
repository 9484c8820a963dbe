"""A time limit for calls of libraries that limit only the time between two reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """Return the result of `call`. Raises TimeoutError if it takes longer than `seconds`.

    `call` runs in a daemon thread, so that it does not delay the end of the process. After the time limit it
    continues there, and its result is ignored.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="within", daemon=True).start()
    return future.result(timeout=seconds)
