"""Actors whose methods run at once in this process, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhf_core.cluster.rpc import Pending, RemoteActor
from rlhf_core.ppo.batch import SentShare
from rlhf_core.ppo.columns import RolloutColumns
from rlhf_core.ppo.rank_rows import RankBatch


class _Method:
    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = method

    def options(self, *, num_returns: int) -> _Parts:
        return _Parts(self.remote, num_returns)


class _Parts:
    def __init__(self, method: Callable[..., Any], count: int) -> None:
        self._method, self._count = method, count

    def remote(self, *args: Any, **kwargs: Any) -> Sequence[Any]:
        parts: Sequence[Any] = self._method(*args, **kwargs)
        assert len(parts) == self._count, "Ray would raise an error"
        return parts


class _Handle:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._actor, name))


class KeepsBatch:
    """A rank that keeps the responses that it got last, as `ModelWorker` does."""

    _batch: RankBatch

    def batch(self, sent: SentShare | int, chunks: Sequence[RolloutColumns] = ()) -> RankBatch:
        """Return the responses that a call is about."""
        if isinstance(sent, SentShare):
            self._batch = RankBatch(sent, chunks)
        else:
            assert sent == self._batch.share.batch and not chunks
        return self._batch


def scripted(actor: Any) -> RemoteActor[Any]:
    """Return an actor whose calls run the methods of `actor`. References are the results themselves."""
    return RemoteActor(_Handle(actor))


def results(pending: Sequence[Pending[Any]], _what: str = "") -> list[Any]:
    """Return the results of scripted calls, as `Fleet.wait` does."""
    return [call.reference for call in pending]
