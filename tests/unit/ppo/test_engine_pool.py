"""How long engines are waited for; Ray is scripted here (`tests/integration/test_stuck.py` has the real one).

- one whose call never begins is given up after the longest of its limits, while nobody works, and the others'
  answers stay
- as long as any process works, the wait goes on
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config.engine import EngineConfig
from rlhf_core.ppo import engine_pool as module
from rlhf_core.ppo.engine_pool import Engines

LIMIT = 30.0


class _Engine:
    """`generate` gives the engine's number; what `ray.wait` has not shown as ready never begins."""

    def __init__(self, number: int) -> None:
        self.generate = SimpleNamespace(remote=lambda: number)


@dataclass
class _Ray:
    clock: float = 0.0
    killed: list[Any] = field(default_factory=list)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> _Ray:
    """Engine 0 answers at once, engine 1 never; each look takes a second."""
    import ray

    script = _Ray()

    def wait(references: list[int], **_options: Any) -> tuple[list[int], list[int]]:
        script.clock += 1.0
        return [r for r in references if r == 0], [r for r in references if r != 0]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "kill", script.killed.append)
    monkeypatch.setattr(module, "fetch", lambda references, seconds: [f"of {r}" for r in references])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: script.clock))
    return script


def asked(busy_looks: int) -> tuple[Engines, dict[int, Any]]:
    looks = iter(range(10**6))
    monitor = SimpleNamespace(
        busy=lambda: next(looks) < busy_looks,
        participant=lambda name: None,
        kill=lambda names: None,
        folder="stacks",
    )
    calls: Any = SimpleNamespace(monitor=monitor, timeouts=SimpleNamespace(start=LIMIT, stall=LIMIT / 2))
    found = Engines(lambda index, restarts: _Engine(index), EngineConfig(count=2, min_count=1), calls)
    found.synced()
    return found, found.ask("generate", {0: (), 1: ()}, "the rollout")


@pytest.mark.parametrize("busy_looks", [0, 100])
def test_a_call_that_never_begins_is_given_up_when_nobody_has_worked_for_the_limit(
    scripted: _Ray, busy_looks: int, caplog: pytest.LogCaptureFixture
) -> None:
    engines, answers = asked(busy_looks)
    assert answers == {0: "of 0"}
    assert (engines.health["engine 0"], engines.health["engine 1"]) == ("healthy", "dead")
    assert scripted.clock == pytest.approx(max(1, busy_looks) + LIMIT + 1, abs=2)
    assert len(scripted.killed) == 1, "the one that was given up is killed, and no other"
    assert "engine 1 is lost: the rollout did not begin within 31 s" in caplog.text
