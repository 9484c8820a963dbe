"""The PPO loop with scripted parts.

- the adaptive KL coefficient is constant during the critic's warm-up, in which the policy does not change
- a skipped step is logged with its samples, and the run continues
- metrics of guards are logged, but are not part of the artifact, because their settings are not part of its
  key
- the counters of consecutive bad steps, and the end of the critic's warm-up, survive a restart
- each step says whether it trains the policy; the artifact does not, because its digest is in later keys
- `objective/net_score` is the mean score minus ppo.kl.coef times the KL, for every place of the KL and every
  normalization of the scores
- a stop request commits a checkpoint of its step, also in the last one, from which an attempt continues
- engines that cache prompts forget those of an evaluation before they sample the next step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import GateFailed, NonFiniteError
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.sampling.rollouts import reward_metrics
from rlhf_core.ppo.training.batch import Places, RolloutBatch, columns_of, header_of
from rlhf_core.ppo.watching.selection import OBJECTIVE, HeldOutResult
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from rlhf_core.testing import RecordingMetrics, RecordingProgress, stage_context
from rlhf_core.testing.engines import Reply, ScriptedEngine
from rlhf_core.testing.trainer import ScriptedTrainer
from rlhf_core.types import PromptExample, Rollout, StageContext
from tests.support.checkpoints import keep
from tests.support.scripted_actors import ended
from tests.support.scripted_fleet import ScriptedEngineActor, ScriptedFleet, ScriptedRank
from tests.unit.ppo.watching.test_step_checks import GOOD


def batch_of(count: int) -> RolloutBatch:
    """Return finished responses of two tokens."""
    rollouts = [Rollout("p", i, (1,), (2, 3), (-1.0, -1.0), True, 0) for i in range(count)]
    header, numbers = header_of(rollouts), np.arange(count)
    return RolloutBatch(
        [ended(columns_of(rollouts, count))],
        Places(0 * numbers, numbers),
        header.lengths,
        header.finished,
        [PromptExample("p", "question", (1,))] * count,
        RewardBatch([0.0] * count, {"model": [0.0] * count}),
        seeds_B=numbers,
        numbers_B=0 * numbers,
    )


FORTY = batch_of(40)


class _Experience:
    scores_B = torch.zeros(40)
    kl_B = np.zeros(40)
    scored_B = np.ones(40, np.bool_)

    def __init__(self, **changed: float) -> None:
        self.metrics = GOOD | {name.replace("__", "/"): value for name, value in changed.items()}


class Controller(PPOController):
    """Its rollouts are `FORTY`, and its experience is that of `experiences`. No model is updated."""

    fleet_class = ScriptedFleet
    prompts: Sequence[PromptExample] = ()

    def __init__(self, context: StageContext, experiences: Sequence[_Experience] = (), **ppo: Any) -> None:
        config = config_from_tree({"ppo": ppo}, "test")
        models: Any = {"policy": ScriptedTrainer(), "critic": ScriptedTrainer()}
        ranks: Any = {role: [ScriptedRank(models)] for role in models}
        no_rewards: Any = None
        fleet = self.fleet_class(config, ranks=ranks)
        super().__init__(fleet, self.prompts, lambda ids: "", no_rewards, context)
        self.script(experiences)

    def script(self, experiences: Sequence[_Experience]) -> None:
        """Replace the numbers of each step by `experiences`, and its updates by a constant."""
        self.experiences = experiences
        updater: Any = SimpleNamespace(update=lambda *_args, **_options: {"loss/value": 1.0})
        self._updater = updater

    @override
    def collect(self) -> RolloutBatch:
        return replace(FORTY, version=self.completed_steps)

    @override
    def score(self, batch: RolloutBatch) -> Any:
        return self.experiences[self.completed_steps]


def test_the_kl_coefficient_is_constant_during_the_warm_up(tmp_path: Path) -> None:
    kl = {"coef": 0.1, "target": 6.0, "horizon": 400}
    controller: Any = Controller(stage_context(tmp_path), critic_warmup_steps=2, kl=kl)
    batch = FORTY
    coefs = []
    for step in (1, 2, 3, 4):
        controller._train(batch, _Experience(), step)
        coefs.append(controller._kl.coef)
    # KL 1 is far below the target: 1 - 0.2 x 40 / 400 with each step that trains the policy.
    assert coefs == pytest.approx([0.1, 0.1, 0.098, 0.09604])


def test_a_step_reports_whether_it_trains_the_policy(tmp_path: Path) -> None:
    metrics = RecordingMetrics()
    context = stage_context(tmp_path, metrics=metrics)
    blind, skipped = {"value__explained_variance": -1.0}, {"objective__kl": float("nan")}
    steps = [_Experience(**changed) for changed in (blind, skipped, blind, blind)]
    controller = Controller(context, steps, critic_warmup_steps=2, critic_warmup_max_steps=3)
    for _ in steps:
        controller._log(controller.iterate())
    assert metrics.column("ppo/trains_policy") == [0, 0, 0, 1]
    assert "trains_policy" not in (context.output / "metrics.jsonl").read_text()


def test_a_skipped_step_is_logged_and_the_run_continues(tmp_path: Path) -> None:
    shown: list[dict[str, float]] = []

    class Shown(RecordingProgress):
        @override
        def __call__(self, task: str, done: int, total: int, unit: str, **metrics: float) -> None:
            shown.append(metrics)

    metrics = RecordingMetrics()
    bad = _Experience(objective__kl=float("nan"), objective__scores=float("nan"))
    controller = Controller(
        stage_context(tmp_path, metrics=metrics, progress=Shown()), [bad] * 3, max_kl=20.0
    )
    controller._log(controller.iterate())
    assert shown == [{}]
    assert metrics.last["ppo/skipped_steps"] == 1.0
    assert "objective/kl" not in metrics.last
    assert controller.completed_steps == 1
    controller._log(controller.iterate())
    with pytest.raises(NonFiniteError):
        controller.iterate()
    skipped = {name: len(rows) for name, rows in metrics.tables.items() if name.startswith("skipped/")}
    assert skipped == {f"skipped/step_{step:06d}": 40 for step in (1, 2, 3)}


def test_guard_settings_do_not_change_the_artifact(tmp_path: Path) -> None:
    metrics = RecordingMetrics()
    written = []
    settings: list[dict[str, Any]] = [
        {},
        {"guards": {"loops": "off"}, "guard_patience": 1},
        {"weight_sync": {"canary_tolerance": 1.5e-5}},
    ]
    for number, ppo in enumerate(settings):
        context = stage_context(tmp_path / str(number), metrics=metrics)
        controller = Controller(context, **ppo)
        found = dict(GOOD) | {"rollout/logprob_gap_mean": 1e-5}
        controller._checks.verify(found, 1)
        controller._log(found)
        written.append((context.output / "metrics.jsonl").read_bytes())
    assert set(written) == {written[0]}
    assert len({tuple(sorted(found.items())) for _, found in metrics.rows}) == len(settings)
    assert all("warnings/empty" in found for _, found in metrics.rows)


def test_a_restart_does_not_reset_the_counters(tmp_path: Path) -> None:
    def started(attempt: str) -> Any:
        work = tmp_path / attempt
        store = CheckpointStore(Store(tmp_path / "store"), "key", work, keep(1))
        context = stage_context(work, checkpoints=store)
        (context.output / "metrics.jsonl").touch()
        return Controller(context, max_kl=20.0, critic_warmup_max_steps=9)

    high, bad = _Experience(objective__kl=25.0), _Experience(policy__entropy=float("nan"))
    first = started("first")
    for first.completed_steps in (4, 5):
        first._checks.verify(high.metrics, first.completed_steps)
        first._checks.is_finite(bad.metrics, 4, first.completed_steps)
    assert first._warmup.is_over({"value/explained_variance": 0.5}, 5)
    first._checkpoint()
    second = started("second")
    second._restore()
    assert second.completed_steps == 5
    with pytest.raises(GateFailed, match=r"ppo step 6: KL 25\.0 .* for three steps"):
        second._checks.verify(high.metrics, 6)
    with pytest.raises(NonFiniteError, match="ppo steps 4 to 6 had to be skipped"):
        second._checks.is_finite(bad.metrics, 4, 6)
    assert second._warmup.is_over({"value/explained_variance": -1.0}, 6), "a warm-up that is over stays so"


@pytest.mark.parametrize("asked_in", [1, 2, 3])
def test_a_stop_request_commits_its_step_also_the_last_one(asked_in: int, tmp_path: Path) -> None:
    class Asked(Controller):
        @override
        def score(self, batch: RolloutBatch) -> Any:
            self._context.stop.requested = self.completed_steps + 1 == asked_in
            return super().score(batch)

    def started(attempt: str, kind: type[Controller]) -> Controller:
        store = CheckpointStore(Store(tmp_path / "store"), "key", tmp_path / attempt, keep(1))
        context = stage_context(tmp_path / attempt, checkpoints=store)
        return kind(context, [_Experience()] * 3, steps=3, checkpoint_every=9, evaluate_every=0)

    with pytest.raises(SystemExit):
        started("first", Asked).run()
    second = started("second", Controller)
    second._restore()
    assert second.completed_steps == asked_in
    second.run()
    lines = (second._context.output / "metrics.jsonl").read_text().splitlines()
    assert (second.completed_steps, len(lines)) == (3, 3)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_an_evaluation_leaves_no_prompts_in_the_caches(tmp_path: Path, prefix_caching: bool) -> None:
    events: list[Any] = []

    class Engine(ScriptedEngine):
        @override
        def forget_prefixes(self) -> None:
            events.append("forget")

    class Evaluation:
        def evaluate(self, version: int) -> HeldOutResult:
            events.append(version)
            return HeldOutResult({OBJECTIVE: 1.0, "eval/kl": 0.0}, [1.0])

        def state_dict(self) -> dict[str, Any]:
            return {}

    engine = {"prefix_caching": prefix_caching}
    experiences = [_Experience() for _ in range(3)]
    controller = Controller(stage_context(tmp_path), experiences, steps=3, evaluate_every=2, engine=engine)
    actor = ScriptedEngineActor(Engine(lambda request: Reply((2,))))
    controller._fleet.engines = ScriptedFleet(engines=[actor]).engines
    evaluation: Any = Evaluation()
    controller._evaluation = evaluation
    controller.run()
    forgotten = ["forget"] if prefix_caching else []
    assert events == [0, *forgotten, 2, *forgotten, 3, *forgotten]


@pytest.mark.parametrize("place", ["reward", "loss"])
@pytest.mark.parametrize("normalize", ["none", "batch"])
def test_the_net_score_always_includes_the_kl(place: str, normalize: str) -> None:
    ppo: dict[str, Any] = {
        "kl": {"coef": 0.1, "place": place},
        "rewards": [{"type": "keywords", "words": ["x"], "weight": 2.0, "normalize": normalize}],
    }
    config = config_from_tree({"ppo": ppo}, "test").ppo
    batch = batch_of(2)
    metrics = reward_metrics(config, batch, RewardBatch([0.0, 0.0], {"keywords": [1.0, 4.0]}), 90.0)
    assert metrics["objective/net_score"] == pytest.approx(2.0 * 2.5 - 0.1 * 90)


def test_filtering_and_clipping_are_logged() -> None:
    ppo: dict[str, Any] = {
        "algorithm": "grpo",
        "samples_per_prompt": 2,
        "dynamic_filtering": {},
        "score_clip": 5.0,
    }
    config = config_from_tree({"ppo": ppo}, "test").ppo
    batch = replace(batch_of(2), replaced=3, scores_before=0.165)
    metrics = reward_metrics(config, batch, RewardBatch([0.0, 0.0], {"model": [1.0, 9.0]}), 0.0)
    assert metrics["objective/scores_before_filtering"] == 0.165
    assert metrics["objective/score_clipfrac"] == 0.5
    assert metrics["objective/net_score"] == pytest.approx((1 + 5) / 2)
