"""The PPO loop with scripted parts.

- the adaptive KL coefficient is constant during the critic's warm-up, in which the policy does not change
- a skipped step is logged with its samples, and the run continues
- metrics of guards are logged, but are not part of the artifact, because their settings are not part of its
  key
- the counters of consecutive bad steps, and the end of the critic's warm-up, survive a restart
- each step says whether it trains the policy; the artifact does not, because its digest is in later keys
- the score of a checkpoint is that of its own policy: the mean score of the next step's responses minus
  ppo.kl.coef times their KL, for every place of the KL and every normalization of the scores
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.cluster.rpc import Pending
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import GateFailed, NonFiniteError
from rlhf_core.ppo.batch import RolloutBatch
from rlhf_core.ppo.columns import Places, columns_of, header_of
from rlhf_core.ppo.controller import PPOController
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from rlhf_core.types import PromptExample, Rollout, StageContext
from tests.support.checkpoints import keep
from tests.unit.ppo.test_step_checks import GOOD

FLEET: Any = SimpleNamespace(packs=True, device="cpu", usage_by_group=lambda: None)


def batch_of(count: int) -> RolloutBatch:
    """Return finished responses of two tokens."""
    rollouts = [Rollout("p", i, (1,), (2, 3), (-1.0, -1.0), True, 0) for i in range(count)]
    header, numbers = header_of(rollouts), np.arange(count)
    return RolloutBatch(
        [Pending(columns_of(rollouts, count))],
        Places(0 * numbers, numbers),
        header.lengths,
        header.finished,
        [PromptExample("p", "question", (1,))] * count,
    )


FORTY = batch_of(40)


class _Experience:
    scores_B = torch.zeros(4)

    def __init__(self, **changed: float) -> None:
        self.metrics = GOOD | {name.replace("__", "/"): value for name, value in changed.items()}


def synced(controller: Any) -> int:
    """Return the version, and measure the speed: a step of microseconds can give advice that names it."""
    controller._timings["sync/gb_per_s"] = 1.0
    version: int = controller.completed_steps
    return version


@pytest.fixture
def controller(tmp_path: Path) -> Any:
    nothing: Any = None
    config = config_from_tree({"ppo": {"max_kl": 20.0}}, "test")
    return PPOController(
        config,
        FLEET,
        [],
        lambda ids: "",
        nothing,
        StageContext({}, tmp_path, tmp_path, nothing, nothing, nothing),
    )


def test_the_kl_coefficient_is_constant_during_the_warm_up(tmp_path: Path) -> None:
    nothing: Any = None
    kl = {"coef": 0.1, "target": 6.0, "horizon": 400}
    config = config_from_tree({"ppo": {"critic_warmup_steps": 2, "kl": kl}}, "test")
    controller: Any = PPOController(
        config,
        FLEET,
        [],
        lambda ids: "",
        nothing,
        StageContext({}, tmp_path, tmp_path, nothing, nothing, nothing),
    )
    controller._updater = SimpleNamespace(update=lambda *_args, **_options: {"loss/value": 1.0})
    batch = FORTY
    coefs = []
    for step in (1, 2, 3, 4):
        controller._train(batch, _Experience(), step)
        coefs.append(controller._kl.coef)
    # KL 1 is far below the target: 1 - 0.2 x 40 / 400 with each step that trains the policy.
    assert coefs == pytest.approx([0.1, 0.1, 0.098, 0.09604])


def test_a_step_reports_whether_it_trains_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    logged: list[dict[str, float]] = []
    tracker: Any = SimpleNamespace(log_metrics=lambda metrics, _step: logged.append(metrics))
    context = StageContext({}, tmp_path, tmp_path, nothing, tracker, lambda *_args, **_shown: None)
    config = config_from_tree({"ppo": {"critic_warmup_steps": 2, "critic_warmup_max_steps": 3}}, "test")
    controller: Any = PPOController(config, FLEET, [], lambda ids: "", nothing, context)
    controller._updater = SimpleNamespace(update=lambda *_args, **_options: {"loss/value": 1.0})
    blind, skipped = {"value__explained_variance": -1.0}, {"objective__kl": float("nan")}
    steps = [_Experience(**changed) for changed in (blind, skipped, blind, blind)]
    monkeypatch.setattr(controller, "collect", lambda: replace(FORTY, from_cache=True))
    monkeypatch.setattr(controller, "score", lambda _batch: steps[controller.completed_steps])
    monkeypatch.setattr(controller, "sync", lambda: synced(controller))
    monkeypatch.setattr(controller, "_log_samples", lambda *_arguments: None)
    controller._timings["timing/sync"] = 0.0
    for _ in steps:
        controller._log(controller.iterate())
    assert [metrics["ppo/trains_policy"] for metrics in logged] == [0, 0, 0, 1]
    assert "trains_policy" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_skipped_step_is_logged_and_the_run_continues(
    controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, float]] = []
    logged: list[dict[str, float]] = []
    kept: list[tuple[Any, ...]] = []
    bad = _Experience(objective__kl=float("nan"), objective__scores=float("nan"))
    batch = replace(FORTY, from_cache=True)
    monkeypatch.setattr(controller, "collect", lambda: batch)
    monkeypatch.setattr(controller, "score", lambda batch: bad)
    monkeypatch.setattr(controller, "sync", lambda: synced(controller))
    monkeypatch.setattr(controller, "_log_samples", lambda *arguments: kept.append(arguments[2:]))
    tracker = SimpleNamespace(log_metrics=lambda metrics, step: logged.append(metrics))
    report = SimpleNamespace(metrics=tracker, progress=lambda *place, **numbers: shown.append(numbers))
    monkeypatch.setattr(controller, "_context", report)
    controller._log(controller.iterate())
    assert shown == [{}]
    assert logged[0]["ppo/skipped_steps"] == 1.0
    assert "objective/kl" not in logged[0]
    assert controller.completed_steps == 1
    controller._log(controller.iterate())
    with pytest.raises(NonFiniteError):
        controller.iterate()
    assert [entry for entry in kept if entry[0] == "skipped"] == [("skipped", step, 40) for step in (1, 2, 3)]


def test_guard_settings_do_not_change_the_artifact(tmp_path: Path) -> None:
    logged: list[dict[str, float]] = []
    written = []
    settings: list[dict[str, Any]] = [
        {},
        {"guards": {"loops": "off", "patience": 1}},
        {"logprob_gap_limit": 1e-6},
    ]
    for number, ppo in enumerate(settings):
        folder = tmp_path / str(number)
        folder.mkdir()
        tracker: Any = SimpleNamespace(log_metrics=lambda metrics, _step: logged.append(metrics))
        nothing: Any = None
        context = StageContext({}, folder, folder, nothing, tracker, lambda *_args, **_shown: None)
        config = config_from_tree({"ppo": ppo}, "test")
        controller: Any = PPOController(config, FLEET, [], lambda ids: "", nothing, context)
        found = dict(GOOD) | {"rollout/logprob_gap_mean": 1e-5}
        controller._checks.verify(found, 1)
        controller._log(found)
        written.append((folder / "metrics.jsonl").read_bytes())
    assert set(written) == {written[0]}
    assert len({tuple(sorted(found.items())) for found in logged}) == len(settings)
    assert all("guards/empty" in found for found in logged)


def test_a_restart_does_not_reset_the_counters(tmp_path: Path) -> None:
    def started(attempt: str) -> Any:
        work = tmp_path / attempt
        work.mkdir()
        (work / "metrics.jsonl").touch()
        rank = SimpleNamespace(call=lambda *_: 0)
        group = SimpleNamespace(call=lambda *_: [0], workers=[rank])
        fleet: Any = SimpleNamespace(
            packs=True,
            device="cpu",
            groups={"policy": group, "critic": group},
            wait=lambda calls, _what: calls,
        )
        tracker: Any = SimpleNamespace(flush=lambda: None, log_metrics=lambda *_: None)
        nothing: Any = None
        context = StageContext(
            {}, work, work, CheckpointStore(Store(tmp_path / "store"), "key", work, keep(1)), tracker, nothing
        )
        config = config_from_tree({"ppo": {"max_kl": 20.0, "critic_warmup_max_steps": 9}}, "test")
        return PPOController(config, fleet, [], lambda ids: "", nothing, context)

    high, bad = _Experience(objective__kl=25.0), _Experience(policy__entropy=float("nan"))
    first = started("first")
    for first.completed_steps in (4, 5):
        first._checks.verify(high.metrics, first.completed_steps)
        first._checks.is_finite(bad.metrics, 4, first.completed_steps)
    assert first._warmup.is_over({"value/explained_variance": 0.5}, 5)
    first._checkpoint()
    first._record_score({"objective/net_score": 0.5}, 5)
    second = started("second")
    second._restore()
    assert second.completed_steps == 5
    with pytest.raises(GateFailed, match=r"ppo step 6: KL 25\.0 .* for three steps"):
        second._checks.verify(high.metrics, 6)
    with pytest.raises(NonFiniteError, match="ppo steps 4 to 6 had to be skipped"):
        second._checks.is_finite(bad.metrics, 4, 6)
    assert second._warmup.is_over({"value/explained_variance": -1.0}, 6), "a warm-up that is over stays so"


def test_a_checkpoint_has_the_score_of_its_own_policy(
    controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step n's rollouts are those of policy n - 1 and score that: the policy that step 6 leaves is the broken
    one.
    """
    of_policy = {0: 0.1, 1: 0.2, 2: 0.3, 3: 1.0, 4: 0.5, 5: 1.1, 6: -5.0, 7: -5.0, 8: -5.0}
    known: dict[int, dict[int, float]] = {}
    controller._ppo = config_from_tree({"ppo": {"steps": 9, "checkpoint_every": 3}}, "test").ppo
    batch = replace(FORTY, from_cache=True)
    monkeypatch.setattr(controller, "_restore", lambda: None)
    monkeypatch.setattr(controller, "sync", lambda: synced(controller))
    monkeypatch.setattr(controller, "_log", lambda metrics: None)
    monkeypatch.setattr(controller, "_log_samples", lambda *_: None)
    monkeypatch.setattr(controller, "_train", lambda *_: {"loss/policy": 1.0})
    monkeypatch.setattr(controller, "collect", lambda: replace(batch, version=controller.completed_steps))
    monkeypatch.setattr(
        controller, "score", lambda _: _Experience(objective__net_score=of_policy[controller.completed_steps])
    )
    controller._timings["timing/sync"] = 0.0

    def checkpoint() -> None:
        known[controller.completed_steps] = dict(controller._scores)
        controller._last_checkpoint_step = controller.completed_steps

    monkeypatch.setattr(controller, "_checkpoint", checkpoint)
    controller.run()
    assert known == {3: {}, 6: {3: 1.0}}
    assert controller._scores == {3: 1.0, 6: -5.0}


@pytest.mark.parametrize("place", ["reward", "loss"])
@pytest.mark.parametrize("normalize", ["none", "batch"])
def test_the_checkpoint_score_always_includes_the_kl(tmp_path: Path, place: str, normalize: str) -> None:
    nothing: Any = None
    fleet: Any = SimpleNamespace(packs=True, device="cpu", usage_by_group=lambda: None)
    ppo = {
        "kl": {"coef": 0.1, "place": place},
        "rewards": [{"type": "keywords", "words": ["x"], "weight": 2.0, "normalize": normalize}],
    }
    controller: Any = PPOController(
        config_from_tree({"ppo": ppo}, "test"),
        fleet, [], lambda ids: "", nothing, StageContext({}, tmp_path, tmp_path, nothing, nothing, nothing),
    )  # fmt: skip
    batch = batch_of(2)
    metrics = controller._reward_metrics(batch, RewardBatch([0.0, 0.0], {"keywords": [1.0, 4.0]}), 90.0)
    assert metrics["objective/net_score"] == pytest.approx(2.0 * 2.5 - 0.1 * 90)


def test_filtering_and_clipping_are_logged(tmp_path: Path) -> None:
    nothing: Any = None
    fleet: Any = SimpleNamespace(packs=True, device="cpu", usage_by_group=lambda: None)
    ppo = {"algorithm": "grpo", "samples_per_prompt": 2, "dynamic_filtering": {}, "score_clip": 5.0}
    controller: Any = PPOController(
        config_from_tree({"ppo": ppo}, "test"),
        fleet, [], lambda ids: "", nothing, StageContext({}, tmp_path, tmp_path, nothing, nothing, nothing),
    )  # fmt: skip
    batch = replace(batch_of(2), replaced=3, scores_before=0.165)
    metrics = controller._reward_metrics(batch, RewardBatch([0.0, 0.0], {"model": [1.0, 9.0]}), 0.0)
    assert metrics["objective/scores_before_filtering"] == 0.165
    assert metrics["objective/score_clipfrac"] == 0.5
    assert metrics["objective/net_score"] == pytest.approx((1 + 5) / 2)
