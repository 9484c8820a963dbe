"""Results of actors that other actors need, with the real Ray.

- each part of a result is an object of its own, which Ray transfers to the actor that needs it
- the objects outlive the actor that made them, because the caller owns them: an engine or a group of frozen
  models that is replaced takes no rollouts with it
"""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core.cluster.connect import connect
from rlhf_core.cluster.rpc import RemoteActor, as_argument, fetch
from rlhf_core.ppo.training.batch import RowColumns, row_columns

ROWS = [100_000, 1, 60_000]  # the first and the last one are not sent inside of messages


def test_parts_of_a_result_outlive_the_actor_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    class Engine:
        def sample(self) -> tuple[str, *tuple[RowColumns, ...]]:
            columns = [row_columns([length], logprobs=[np.full(length, length)]) for length in ROWS]
            return "header", *columns

    class Rank:
        def read(self, *columns: RowColumns) -> list[tuple[int, float]]:
            rows = [chunk.row("logprobs", 0) for chunk in columns]
            return [(len(row), float(row[-1])) for row in rows]

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    connect(2, "cpu")
    try:
        engine = RemoteActor[Engine](ray.remote(Engine).remote())
        rank = RemoteActor[Rank](ray.remote(Rank).remote())
        header, chunks = engine.call_parts(1 + len(ROWS), Engine.sample)
        assert fetch([header], 60) == ["header"]
        ray.kill(engine.handle)
        (read,) = fetch([rank.call(Rank.read, *(as_argument(chunk) for chunk in chunks))], 60)
        assert read == [(length, float(length)) for length in ROWS]
    finally:
        ray.shutdown()
