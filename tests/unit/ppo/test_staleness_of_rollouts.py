"""`ppo.staleness: 1` with scripted engines and ranks.

- the engines sample the next step, from the version that they have, while a step is scored and trained; the
  sync waits for both; the last step samples nothing
- after the first two syncs and every tenth version, log-probabilities of the engines are compared with those
  of the policy, which has the same version; engines with other weights end the run, and without the canary
  nothing is compared
- a batch that is further behind is refused
- a checkpoint has the rollouts of the next step, and the next attempt uses them; without them it ends
- the score of a checkpoint is known two steps later, also if every step has a checkpoint
- with 0, nothing is sampled ahead, and the configuration of keys is as it was without the field
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.cluster.rpc import Pending
from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import result_settings
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import ConfigError, CorruptArtifact, WeightSyncError
from rlhf_core.ppo.batch import RolloutBatch
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.engine_actor import EngineActor
from rlhf_core.ppo.sync_check import PROMPTS, TOKENS, SyncCheck
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from rlhf_core.types import StageContext
from tests.support.checkpoints import keep
from tests.support.scripted_actors import results
from tests.unit.ppo.test_controller import FORTY
from tests.unit.ppo.test_step_checks import GOOD

Events = list[tuple[Any, ...]]


class Scripted:
    """A controller of five steps whose parts write down what they do."""

    def __init__(self, work: Path, monkeypatch: pytest.MonkeyPatch, **ppo: Any) -> None:
        self.events: Events = []
        self.gaps: dict[int, float] = {}
        """Of engines and policy, by version."""
        work.mkdir(exist_ok=True)
        (work / "metrics.jsonl").touch()
        rank = SimpleNamespace(call=lambda *_: 0)
        group = SimpleNamespace(call=lambda *_: [0], workers=[rank])
        fleet: Any = SimpleNamespace(
            packs=True,
            device="cpu",
            groups={"policy": group, "critic": group},
            wait=self.wait,
            put=Pending,
            usage_by_group=lambda: None,
            turns=SimpleNamespace(sample=lambda: None, train=lambda: None),
        )
        tracker: Any = SimpleNamespace(flush=lambda: None, log_metrics=lambda *_: None)
        store = CheckpointStore(Store(work.parent / "store"), "key", work, keep(9, 9))
        context = StageContext({}, work, work, store, tracker, lambda *_args, **_named: None)
        nothing: Any = None
        config = config_from_tree({"ppo": {"steps": 5, "checkpoint_every": 1, **ppo}}, "test")
        self.controller: Any = PPOController(
            config, fleet, FORTY.prompts[:1], lambda ids: "", nothing, context
        )
        monkeypatch.setattr(self.controller._collector, "start", self.start)
        monkeypatch.setattr(self.controller._collector, "finish", self.finish)
        monkeypatch.setattr(self.controller, "score", self.score)
        monkeypatch.setattr(self.controller, "_train", self.train)
        monkeypatch.setattr(self.controller, "sync", self.sync)
        monkeypatch.setattr(self.controller, "_log_samples", lambda *_: None)
        if self.controller._sync_check is not None:
            monkeypatch.setattr(self.controller._sync_check, "gap", self.gap)

    @staticmethod
    def wait(calls: list[Any], _what: str) -> list[Any]:
        return results(calls) if calls and isinstance(calls[0], Pending) else calls

    def start(self, step: int, version: int, *, ahead: bool = False) -> tuple[int, int]:
        self.events.append(("start", step, version, ahead))
        return step, version

    def finish(self, sampling: tuple[int, int]) -> RolloutBatch:
        self.events.append(("finish", sampling[0]))
        # The chunk is marked with the step.
        return replace(FORTY, version=sampling[1], replaced=sampling[0], routes={})

    def score(self, batch: RolloutBatch) -> Any:
        self.events.append(("score", batch.replaced, batch.version))
        return SimpleNamespace(metrics=dict(GOOD) | {"objective/net_score": 10.0 + batch.version})

    def train(self, _batch: Any, _experience: Any, step: int) -> dict[str, float]:
        self.events.append(("train", step))
        return {"loss/policy": 1.0}

    def sync(self) -> int:
        version: int = self.controller.completed_steps
        self.events.append(("sync", version))
        # A step of microseconds can give advice about the sync, which names its speed.
        self.controller._timings |= {"timing/sync": 0.0, "sync/gb_per_s": 1.0}
        return version

    def gap(self, version: int) -> float:
        self.events.append(("compare", version))
        return self.gaps.get(version, 0.0)


def test_the_next_step_is_sampled_during_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Scripted(tmp_path / "work", monkeypatch, staleness=1, steps=3, checkpoint_every=9)
    run.controller.run()
    assert run.events == [
        *[("sync", 0), ("compare", 0)],
        ("start", 1, 0, False),
        ("finish", 1),
        *[("start", 2, 0, True), ("score", 1, 0), ("train", 1), ("finish", 2), ("sync", 1), ("compare", 1)],
        *[("start", 3, 1, True), ("score", 2, 0), ("train", 2), ("finish", 3), ("sync", 2)],
        *[("score", 3, 1), ("train", 3), ("sync", 3)],
    ]


def test_engines_that_do_not_use_the_weights_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Scripted(tmp_path / "work", monkeypatch, staleness=1, checkpoint_every=9)
    run.gaps = {1: 0.3}
    with pytest.raises(WeightSyncError, match=r"ppo step 1: engines and trainer differ by 0\.3"):
        run.controller.run()
    without = Scripted(tmp_path / "other", monkeypatch, staleness=1, weight_sync={"canary": False})
    assert without.controller._sync_check is None
    assert [version for version in range(25) if SyncCheck.is_due(version)] == [0, 1, 10, 20]


def test_the_gap_is_the_mean_over_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine samples, and its log-probabilities are -1 for each token."""
    ppo = config_from_tree({"ppo": {"samples_per_prompt": 2, "engine": {"dispatch": "queue"}}}, "test").ppo
    policy = SimpleNamespace(gather=lambda name: [np.full(2, -1.5)] * len(FORTY))
    called: list[tuple[int, Any]] = []
    engines = SimpleNamespace(
        serving=[0, 2],
        actor=lambda index: SimpleNamespace(call=lambda method: called.append((index, method))),
    )
    fleet: Any = SimpleNamespace(
        wait=lambda pending, what: results(pending, what) if "rollouts" in what else None,
        logprobs=lambda role, *_args, **_named: policy,
        engines=engines,
    )
    check = SyncCheck(ppo, fleet, FORTY.prompts, str, None, 0)  # type: ignore[arg-type]
    asked: list[Any] = []

    def sample(*args: Any) -> RolloutBatch:
        asked.append(args)
        return FORTY

    monkeypatch.setattr(check._collector, "sample", sample)
    assert check.gap(7) == pytest.approx(0.5)
    assert asked == [(FORTY.prompts[:PROMPTS], 7, 0, 7)]
    forget = EngineActor.forget_prefixes
    assert called == [(0, forget), (2, forget)], "cached prompts change the rounding of later rollouts"
    own = check._collector._ppo
    assert (own.samples_per_prompt, own.max_new_tokens, own.engine.dispatch) == (1, TOKENS, "fixed")


def test_with_0_nothing_is_sampled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Scripted(tmp_path / "work", monkeypatch, steps=2, checkpoint_every=9)
    monkeypatch.setattr(run.controller._rollout_cache, "write", lambda *_: None)
    run.controller.run()
    assert run.events == [
        ("sync", 0),
        *[("start", 1, 0, False), ("finish", 1), ("score", 1, 0), ("train", 1), ("sync", 1)],
        *[("start", 2, 1, False), ("finish", 2), ("score", 2, 1), ("train", 2), ("sync", 2)],
    ]


@pytest.mark.parametrize(("staleness", "version"), [(1, 1), (0, 2), (1, 4)])
def test_a_batch_that_is_too_far_behind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, version: int
) -> None:
    controller = Scripted(tmp_path / "work", monkeypatch, staleness=staleness).controller
    controller.completed_steps = 3
    batch = replace(FORTY, version=version)
    controller._next_batch = batch
    monkeypatch.setattr(controller, "_collect_or_read", lambda: batch)
    with pytest.raises(WeightSyncError, match=f"step 4 was sampled from policy version {version}, "):
        controller.collect()


def test_the_next_attempt_uses_the_rollouts_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Scripted(tmp_path / "whole", monkeypatch, staleness=1, checkpoint_every=9)
    whole.controller.run()
    first = Scripted(tmp_path / "first", monkeypatch, staleness=1, checkpoint_every=3)
    monkeypatch.setattr(first.controller, "_checkpoint", _and_stop(first.controller._checkpoint))
    with pytest.raises(KeyboardInterrupt):
        first.controller.run()
    second = Scripted(tmp_path / "second", monkeypatch, staleness=1, checkpoint_every=9)
    second.controller.run()
    assert second.events[0] == ("sync", 3)
    assert first.events + second.events[1:] == whole.events


def _and_stop(checkpoint: Any) -> Any:
    def run() -> None:
        checkpoint()
        raise KeyboardInterrupt

    return run


def test_a_checkpoint_without_the_next_rollouts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Scripted(tmp_path / "first", monkeypatch)
    first.controller.completed_steps = 2
    first.controller._checkpoint()
    second = Scripted(tmp_path / "second", monkeypatch, staleness=1)
    with pytest.raises(
        CorruptArtifact, match=r"no readable rollouts of step 3, which ppo\.staleness=1 needs"
    ):
        second.controller._restore()


def test_every_checkpoint_gets_the_score_of_its_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Scripted(tmp_path / "work", monkeypatch, staleness=1)
    run.controller.run()
    # Step k + 2 is sampled from policy k; steps 1 and 2 from the SFT model.
    assert run.controller._scores == {1: 11.0, 2: 12.0, 3: 13.0}


def test_importance_weights_are_on_with_staleness() -> None:
    def used(**ppo: Any) -> str:
        return config_from_tree({"ppo": ppo}, "test").ppo.used_importance

    assert (used(), used(staleness=1), used(staleness=1, importance="none")) == ("none", "truncate", "none")


def test_engines_on_the_devices_of_the_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ppo\.staleness=1 lets the engines sample during the training"):
        config_from_tree({"ppo": {"staleness": 1, "colocate": "all"}}, "test")


def test_the_default_is_not_part_of_keys() -> None:
    assert "staleness" not in result_settings(PipelineConfig().ppo)
    assert result_settings(config_from_tree({"ppo": {"staleness": 1}}, "test").ppo)["staleness"] == 1
