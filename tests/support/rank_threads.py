"""A process group whose ranks are threads of this process, with torch's own backend for such tests.

with RankThreads(2) as ranks:
    first, second = ranks.run(lambda rank: mean_over_ranks(values[rank]))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

T = TypeVar("T")

SECONDS = 60.0
"""Longest time of `RankThreads.run`."""


class RankThreads:
    """Each thread is one rank of the default process group. Collective operations exchange the values of all.

    Args:
        count: Number of ranks.
        stores: The store of each rank. Default: one store in memory.
    """

    def __init__(self, count: int, stores: Sequence[Any] | None = None) -> None:
        self._stores = list(stores) if stores is not None else [dist.HashStore()] * count  # type: ignore[attr-defined]
        self._threads = [ThreadPoolExecutor(1) for _ in range(count)]

    def __enter__(self) -> RankThreads:
        torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
        threaded._install_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        try:
            self.run(self._join)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._stores.clear()
        try:
            for thread in self._threads:
                thread.submit(_leave).result(SECONDS)
                thread.shutdown()
        finally:
            threaded._uninstall_threaded_pg()
            torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]

    def start(self, rank: int, call: Callable[..., T], *args: Any) -> Future[T]:
        """Start `call(*args)` on one rank."""
        return self._threads[rank].submit(_run, call, *args)

    def run(self, call: Callable[[int], T]) -> list[T]:
        """Return `call(rank)` of each rank."""
        calls = [self.start(rank, call, rank) for rank in range(len(self._threads))]
        return [each.result(SECONDS) for each in calls]

    def leave(self, rank: int) -> None:
        """Let one rank leave the group."""
        self._stores[rank] = None
        self._threads[rank].submit(_leave).result(SECONDS)

    def _join(self, rank: int) -> None:
        store, size = self._stores[rank], len(self._threads)
        dist.init_process_group("threaded", rank=rank, world_size=size, store=store)


def _run(call: Callable[..., T], *args: Any) -> T:
    try:
        return call(*args)
    except BaseException as error:
        # Otherwise the other ranks wait in their next collective operation.
        threaded.ProcessLocalGroup.exception_handle(error)
        raise


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
