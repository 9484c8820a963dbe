"""Operators who promote and roll back at the same moment, each perhaps killed at any of its requests.

A seed decides the order of all requests and the kills. Afterwards the next command finds a registry in which

- no move is unfinished, and the champion is not revoked;
- the champion is that of the last finished move in the history;
- each finished move begins where the one before ended, and what a command has reported is one of them;
- a rollback has revoked its version.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from typing import cast

import pytest

from rlhf_core.errors import RLHFError
from rlhf_core.tracking.champion_log import log_of
from rlhf_core.tracking.champions import POLICY, REVOKED, WEIGHTS, Moved, history, promote, rollback, settle
from rlhf_core.tracking.mlflow_client import Mlflow, ModelVersion
from tests.support.sampled import share


class Killed(BaseException):
    """The process of an operator is killed."""


class State:
    """Alias and versions of one model, and its log."""

    def __init__(self) -> None:
        self.alias: str | None = None
        self.versions = {
            "m": {number: {POLICY: f"p{number}", WEIGHTS: f"w{number}"} for number in "12345"},
            log_of("m"): {},
        }


class Registry:
    """MLflow in memory, as one operator uses it: `before` is called before each request."""

    uri = "memory"

    def __init__(self, state: State, before: Callable[[], None] = lambda: None) -> None:
        self._state = state
        self._before = before

    def model_tags(self, model: str) -> dict[str, str]:
        self._before()
        return {}

    def ensure_model(self, model: str, description: str) -> None:
        self._before()

    def create_version(self, model: str, *, tags: Mapping[str, str], **more: object) -> ModelVersion:
        self._before()
        versions = self._state.versions[model]
        versions[str(len(versions) + 1)] = dict(tags)
        return ModelVersion(str(len(versions)), dict(tags))

    def versions(self, model: str, tag: str | None = None) -> list[ModelVersion]:
        self._before()
        found = self._state.versions[model].items()
        return [ModelVersion(number, dict(tags)) for number, tags in found if tag is None or tag in tags]

    def version(self, model: str, number: str) -> ModelVersion | None:
        self._before()
        return ModelVersion(number, dict(self._state.versions[model][number]))

    def tag_version(self, model: str, number: str, tags: Mapping[str, str]) -> None:
        self._before()
        self._state.versions[model][number].update(tags)

    def by_alias(self, model: str, alias: str) -> ModelVersion | None:
        self._before()
        number = self._state.alias
        return None if number is None else ModelVersion(number, dict(self._state.versions[model][number]))

    def set_alias(self, model: str, alias: str, number: str) -> None:
        self._before()
        self._state.alias = number

    def delete_alias(self, model: str, alias: str) -> None:
        self._before()
        self._state.alias = None


class Turns:
    """Lets one operator at a time do one request, in an order that `chance` decides."""

    def __init__(self, chance: random.Random, operators: int) -> None:
        self._chance = chance
        self._changed = threading.Condition()
        self._working = set(range(operators))
        self._waiting: set[int] = set()
        self._turn: int | None = None

    def of(self, operator: int, kill_at: int) -> Callable[[], None]:
        requests = 0

        def wait() -> None:
            nonlocal requests
            requests += 1
            if requests == kill_at:
                raise Killed
            with self._changed:
                self._waiting.add(operator)
                self._choose()
                while self._turn != operator:
                    self._changed.wait()
                self._waiting.remove(operator)
                self._turn = None

        return wait

    def end(self, operator: int) -> None:
        with self._changed:
            self._working.remove(operator)
            self._choose()

    def _choose(self) -> None:
        if self._turn is None and self._waiting and self._waiting == self._working:
            self._turn = self._chance.choice(sorted(self._waiting))
            self._changed.notify_all()


@pytest.mark.sampled
@pytest.mark.parametrize("seed", share(range(150), 5))
def test_alias_and_history_agree_after_operators_at_the_same_moment(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, state = random.Random(seed), State()
    alone = cast("Mlflow", Registry(state))
    clock = iter(range(1000, 2000))
    # Moves at the same time, and clocks that are behind the last move.
    monkeypatch.setattr(
        "rlhf_core.tracking.champions.time.time", lambda: next(clock) // chance.choice([1, 1, 10])
    )
    for number in "123":
        promote(alone, "m", number, f"start {number}")
    turns = Turns(chance, 2)
    results: dict[int, Moved] = {}

    def operate(operator: int, to: str | None, mlflow: Mlflow) -> None:
        try:
            if to is not None and to.startswith("promote"):
                results[operator] = promote(mlflow, "m", to[-1], f"reason {operator}")
            else:
                results[operator] = rollback(mlflow, "m", f"reason {operator}", to)
        except (Killed, RLHFError):
            pass
        finally:
            turns.end(operator)

    threads = []
    for operator in range(2):
        to = chance.choice([f"promote {chance.choice('12345')}", None, "none", chance.choice("12345")])
        registry = Registry(state, turns.of(operator, chance.choice([0, chance.randrange(1, 45)])))
        threads.append(threading.Thread(target=operate, args=(operator, to, registry)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    settle(alone, "m")
    moves = history(alone, "m")
    assert "started" not in {move.state for move in moves}
    done = [move for move in moves if move.state == "done"]
    assert done[-1].version == state.alias
    assert [move.previous for move in done] == [None, *(move.version for move in done[:-1])]
    versions = state.versions["m"]
    assert state.alias is None or REVOKED not in versions[state.alias]
    for move, _ in results.values():
        assert move in done
        assert move.action != "rolled_back" or REVOKED in versions[str(move.previous)]
