"""When PPO stops before a policy that has gone wrong does more harm.

- engines whose log-probabilities differ by more than float32 explains hold other weights: a WeightSyncError; half of it
  is an alarm, in the log and among the metrics; without the canary there is only the alarm
- the KL above its limit in three steps in a row, and 90 % of empty responses, end the stage; one step, or 20 %, do not
- the adaptive KL coefficient stays while the critic's warm-up leaves the policy alone
- a step whose numbers are not finite is skipped; the third in a row ends the stage, a good one in between starts anew
- steps in a row are counted across a restart
- checkpoints are kept by reward minus KL penalty
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_core.cluster.controller import PPOController
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import GateFailed, NonFiniteError, WeightSyncError
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from rlhf_core.types import Services

GOOD = {
    "objective/kl": 1.0,
    "objective/rlhf_reward": 0.5,
    "policy/entropy": 1.0,
    "rollout/logprob_gap_mean": 1e-6,
    "rollout/empty_rate": 0.0,
    "rollout/repeating_rate": 0.0,
    "objective/scores_std": 1.0,
    "rollout/unscored": 0.0,
}


class _Experience:
    scores_B = torch.zeros(4)

    def __init__(self, **changed: float) -> None:
        self.metrics = GOOD | {name.replace("__", "/"): value for name, value in changed.items()}


@pytest.fixture
def controller(tmp_path: Path) -> Any:
    nothing: Any = None
    config = config_from_tree({"ppo": {"max_kl": 20.0}}, "test")
    checkpoints: Any = SimpleNamespace(best=lambda: "s3://bucket/step-00000004")
    services = Services({}, tmp_path, tmp_path, checkpoints, nothing, nothing)
    return PPOController(config, nothing, [], lambda ids: "", nothing, services)


def test_engines_with_other_weights_stop_the_run(controller: Any) -> None:
    controller._guard(_Experience(), 1)
    with pytest.raises(WeightSyncError, match=r"ppo step 2: engines and trainer differ by 0\.3"):
        controller._guard(_Experience(rollout__logprob_gap_mean=0.3), 2)


@pytest.mark.parametrize(
    ("dtype", "limit", "quiet", "loud"),
    [("float32", None, 4e-4, 6e-4), ("bfloat16", None, 0.024, 0.026), ("bfloat16", 0.01, 0.009, 0.011)],
)
def test_a_gap_to_the_engines_is_an_alarm_before_it_stops_the_run(
    controller: Any, caplog: pytest.LogCaptureFixture, dtype: str, limit: float | None, quiet: float, loud: float
) -> None:
    tree = {"policy_deepspeed": {"dtype": dtype}, "engine": {"dtype": dtype}, "logprob_gap_limit": limit}
    controller._ppo = config_from_tree({"ppo": tree}, "test").ppo
    for step, (gap, alarm) in enumerate(((quiet, 0.0), (loud, 1.0)), start=1):
        experience = _Experience(rollout__logprob_gap_mean=gap)
        controller._guard(experience, step)
        assert experience.metrics["rollout/logprob_gap_alarm"] == alarm
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"step 2: engine and trainer log-probabilities differ by {loud:.3g} on average"]


def test_without_the_canary_a_gap_to_the_engines_does_not_stop_the_run(controller: Any) -> None:
    controller._ppo = config_from_tree({"ppo": {"weight_sync": {"canary": False}}}, "test").ppo
    experience = _Experience(rollout__logprob_gap_mean=0.3)
    controller._guard(experience, 1)
    assert experience.metrics["rollout/logprob_gap_alarm"] == 1.0


def test_a_high_kl_stops_the_run_in_the_third_step_in_a_row(controller: Any) -> None:
    for step, kl in enumerate((21.0, 30.0, 19.0, 21.0, 21.0), start=1):
        controller._guard(_Experience(objective__kl=kl), step)
    with pytest.raises(
        GateFailed, match=r"ppo step 6: KL 25\.0 has been above ppo\.max_kl=20 for three steps"
    ) as caught:
        controller._guard(_Experience(objective__kl=25.0), 6)
    assert caught.value.message.endswith("by reward minus KL penalty, is kept: s3://bucket/step-00000004")


def test_empty_responses_are_warned_of_and_stop_the_run_when_nearly_all_are(
    controller: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        controller._guard(_Experience(rollout__empty_rate=0.19), 1)
        assert not caplog.records
        controller._guard(_Experience(rollout__empty_rate=0.2), 2)
    assert "step 2: 20 % of the responses are empty" in caplog.text
    with pytest.raises(GateFailed, match="ppo step 3: 90% of the responses are empty; the policy has collapsed"):
        controller._guard(_Experience(rollout__empty_rate=0.9), 3)


def test_text_that_repeats_and_scores_that_do_not_differ_are_warned_of(
    controller: Any, caplog: pytest.LogCaptureFixture
) -> None:
    same = {"rollout__zero_variance_groups": 0.9}
    for step, changed in enumerate(({"rollout__repeating_rate": 0.3}, same, same, {}, {"objective__scores_std": 0.0})):
        controller._guard(_Experience(**changed), step)
    said = [record.getMessage().split(";")[0] for record in caplog.records]
    assert said == [
        "step 0: 30 % of the responses repeat one or two tokens",
        "step 1: nearly all scores that are compared with each other are the same: nothing is learned from them",
        "step 4: nearly all scores that are compared with each other are the same: nothing is learned from them",
    ]


def test_the_kl_coefficient_stays_while_the_policy_does(tmp_path: Path) -> None:
    nothing: Any = None
    kl = {"coef": 0.1, "target": 6.0, "horizon": 400}
    config = config_from_tree({"ppo": {"critic_warmup_steps": 2, "kl": kl}}, "test")
    controller: Any = PPOController(
        config, nothing, [], lambda ids: "", nothing, Services({}, tmp_path, tmp_path, nothing, nothing, nothing)
    )
    controller._updater = SimpleNamespace(update=lambda *_args: {"loss/value": 1.0})
    batch = SimpleNamespace(rollouts=[None] * 40)
    coefs = []
    for step in (1, 2, 3, 4):
        controller._train(batch, _Experience(), step)
        coefs.append(controller._kl.coef)
    # KL 1 is far below the target: 1 - 0.2 x 40 / 400 with each step that trains the policy.
    assert coefs == pytest.approx([0.1, 0.1, 0.098, 0.09604])


BECOME_NAN = ["objective__kl", "objective__rlhf_reward", "policy__entropy", "value__mean", "rollout__logprob_gap_mean"]


@pytest.mark.parametrize("name", BECOME_NAN)
def test_a_step_that_is_not_finite_is_skipped_and_the_third_in_a_row_ends_the_stage(controller: Any, name: str) -> None:
    bad = _Experience(**{name: float("nan")})
    assert controller._usable(_Experience(), 1)
    assert not controller._usable(bad, 2) and not controller._usable(bad, 3)
    assert controller._usable(_Experience(), 4)
    assert not controller._usable(bad, 5) and not controller._usable(bad, 6)
    with pytest.raises(NonFiniteError, match=r"ppo steps 5 to 7 had to be skipped: .* not finite"):
        controller._usable(bad, 7)


def test_a_step_that_is_skipped_is_logged_like_any_other_and_the_run_goes_on(
    controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, float]] = []
    logged: list[dict[str, float]] = []
    kept: list[tuple[Any, ...]] = []
    bad = _Experience(objective__kl=float("nan"), objective__scores=float("nan"))
    batch = SimpleNamespace(rollouts=[None] * 40, prompts=[None] * 40, kept=True)
    monkeypatch.setattr(controller, "collect", lambda: batch)
    monkeypatch.setattr(controller, "score", lambda batch: bad)
    monkeypatch.setattr(controller, "sync", lambda: 1)
    monkeypatch.setattr(controller, "_log_samples", lambda *arguments: kept.append(arguments[2:]))
    tracker = SimpleNamespace(log_metrics=lambda metrics, step: logged.append(metrics))
    report = SimpleNamespace(metrics=tracker, progress=lambda *place, **numbers: shown.append(numbers))
    monkeypatch.setattr(controller, "_services", report)
    controller._log(controller.iterate())
    assert shown == [{}]
    assert logged[0]["ppo/skipped_steps"] == 1.0
    assert "objective/kl" not in logged[0]
    assert controller.done == 1
    controller._log(controller.iterate())
    with pytest.raises(NonFiniteError):
        controller.iterate()
    assert [entry for entry in kept if entry[0] == "skipped"] == [("skipped", step, 40) for step in (1, 2, 3)]


def test_a_step_without_any_score_is_skipped(controller: Any) -> None:
    assert not controller._usable(_Experience(rollout__unscored=4.0), 1)
    assert controller._usable(_Experience(rollout__unscored=3.0), 2)


def test_the_third_step_in_a_row_ends_the_stage_also_where_it_comes_after_a_restart(tmp_path: Path) -> None:
    def started(attempt: str) -> Any:
        work = tmp_path / attempt
        work.mkdir()
        (work / "metrics.jsonl").touch()
        group = SimpleNamespace(submit=lambda *_: [0])
        fleet: Any = SimpleNamespace(groups={"policy": group, "critic": group}, wait=lambda calls, _what: calls)
        tracker: Any = SimpleNamespace(flush=lambda: None, log_metrics=lambda *_: None)
        nothing: Any = None
        services = Services(
            {}, work, work, CheckpointStore(Store(tmp_path / "store"), "key", work, 1), tracker, nothing
        )
        config = config_from_tree({"ppo": {"max_kl": 20.0}}, "test")
        return PPOController(config, fleet, [], lambda ids: "", nothing, services)

    high, bad = _Experience(objective__kl=25.0), _Experience(policy__entropy=float("nan"))
    first = started("first")
    for first.done in (4, 5):
        first._guard(high, first.done)
        first._usable(bad, first.done)
    first._checkpoint(0.5)
    second = started("second")
    second._restore()
    assert second.done == 5
    with pytest.raises(GateFailed, match=r"ppo step 6: KL 25\.0 .* for three steps"):
        second._guard(high, 6)
    with pytest.raises(NonFiniteError, match="ppo steps 4 to 6 had to be skipped"):
        second._usable(bad, 6)


def test_checkpoints_are_kept_by_reward_minus_kl_penalty(controller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[int, float | None]] = []

    def iterate() -> dict[str, float]:
        controller.done += 1
        return {**GOOD, "objective/kl": 9.0, "objective/rlhf_reward": controller.done / 10}

    controller._ppo = config_from_tree({"ppo": {"steps": 7, "checkpoint_every": 3}}, "test").ppo
    for name in ("_restore", "sync"):
        monkeypatch.setattr(controller, name, lambda: None)
    monkeypatch.setattr(controller, "_log", lambda metrics: None)
    monkeypatch.setattr(controller, "iterate", iterate)
    monkeypatch.setattr(controller, "_checkpoint", lambda score: kept.append((controller.done, score)))
    controller.run()
    assert kept == [(3, 0.3), (6, 0.6)]
