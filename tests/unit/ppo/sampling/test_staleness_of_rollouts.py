"""`ppo.staleness` with scripted engines and ranks.

- the engines sample the next step, from the version that they have, while a step is scored and trained; the
  sync waits for both; the last step samples nothing
- after the first two syncs and every tenth version, log-probabilities of the engines are compared with those
  of the policy, which has the same version; engines with other weights end the run, and without the canary
  nothing is compared
- a batch that is further behind is refused
- a checkpoint has the rollouts of the next step, and the next attempt uses them; without them it ends
- with 0, nothing is sampled ahead, and the configuration of keys is as it was without the field
- with n, there is a sync after every n-th step, and the n batches between two syncs are sampled one after the
  other; each is at most n versions behind, as a function of its step
- a checkpoint between two syncs has all batches that wait; attempts that are killed after any checkpoint end
  together in the metrics of the run that nobody disturbed, and no batch is sampled twice
- an evaluation between two syncs waits for all batches, and gets its own sync
- shares of a step are measured from one sync to the next; there are none if an evaluation or a
  checkpoint in between let the engines finish all batches
- the space for stored rollouts is that of the controller, which writes them, and not that of the ranks
- if an engine dies, the others sample its share of all batches
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import result_settings
from rlhf_core.config.load import config_from_tree
from rlhf_core.engines.sync.sender import SyncReport
from rlhf_core.errors import ConfigError, CorruptArtifact, WeightSyncError
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.sampling.rollouts import Collector, Sampling, read_responses
from rlhf_core.ppo.sampling.schedule import RolloutsAhead, rollouts_of
from rlhf_core.ppo.training.batch import RolloutBatch, RolloutColumns, row_columns
from rlhf_core.ppo.watching.selection import OBJECTIVE, HeldOutResult
from rlhf_core.ppo.watching.step_checks import PROMPTS, TOKENS, SyncCheck
from rlhf_core.ppo.watching.utilisation import StepsSinceSync
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from rlhf_core.testing import FolderCheckpoints, stage_context
from rlhf_core.testing.engines import Reply, ScriptedEngine
from rlhf_core.types import PromptExample
from tests.support.checkpoints import keep
from tests.support.scripted_fleet import ScriptedEngineActor, ScriptedFleet, ScriptedRank
from tests.unit.ppo.test_controller import FORTY, Controller, _Experience

Events = list[tuple[Any, ...]]


class _Collector(Collector):
    """Returns `FORTY`, with the number of the step as `replaced`."""

    events: Events
    behind = 0
    """Versions between the weights that the engines should have and those that they have."""

    @override
    def start(self, step: int, version: int, *, ahead: bool = False) -> Sampling:
        self.events.append(("start", step, version, ahead))
        return Sampling(step, [], [], version, ahead)

    @override
    def finish(self, sampling: Sampling) -> RolloutBatch:
        self.events.append(("finish", sampling.step))
        return replace(FORTY, version=sampling.version - self.behind, replaced=sampling.step, routes={})


class _SyncCheck(SyncCheck):
    events: Events
    gaps: dict[int, float]

    @override
    def gap(self, version: int) -> float:
        self.events.append(("compare", version))
        return self.gaps.get(version, 0.0)


class _Fleet(ScriptedFleet):
    events: Events

    @override
    def sync(self, version: int) -> SyncReport:
        self.events.append(("sync", version))
        return super().sync(version)


class Scripted(Controller):
    """A controller of five steps whose parts write down what they do."""

    fleet_class = _Fleet
    prompts = FORTY.prompts[:1]
    is_killed_after_checkpoint = False

    def __init__(self, work: Path, **ppo: Any) -> None:
        store = CheckpointStore(Store(work.parent / "store"), "key", work / "checkpoints", keep(9))
        context = stage_context(work, checkpoints=store)
        (context.output / "metrics.jsonl").touch()
        super().__init__(context, **{"steps": 5, "checkpoint_every": 1, **ppo})
        self.events: Events = []
        self.gaps: dict[int, float] = {}
        """Differences between engines and policy, by version."""
        given: Any = (self._ppo, self._fleet, self.prompts, str, None, 0)
        self._collector = _Collector(*given)
        fleet: Any = self._fleet
        self._collector.events = fleet.events = self.events
        self._rollouts: Any = rollouts_of(self._ppo, self._fleet, self.prompts, self._collector)
        if self._sync_check is not None:
            self._sync_check = _SyncCheck(*given)
            self._sync_check.events, self._sync_check.gaps = self.events, self.gaps

    @override
    def collect(self) -> RolloutBatch:
        return PPOController.collect(self)

    @override
    def score(self, batch: RolloutBatch) -> Any:
        self.events.append(("score", batch.replaced, batch.version))
        return _Experience(objective__net_score=10.0 + batch.version)

    @override
    def _train(self, batch: RolloutBatch, experience: Any, step: int) -> dict[str, float]:
        self.events.append(("train", step))
        return super()._train(batch, experience, step)

    @override
    def _checkpoint(self) -> None:
        super()._checkpoint()
        if self.is_killed_after_checkpoint:
            raise KeyboardInterrupt


def test_the_next_step_is_sampled_during_the_training(tmp_path: Path) -> None:
    run = Scripted(tmp_path / "work", staleness=1, steps=3, checkpoint_every=9)
    run.run()
    assert run.events == [
        *[("sync", 0), ("compare", 0)],
        ("start", 1, 0, False),
        ("finish", 1),
        *[("start", 2, 0, True), ("score", 1, 0), ("train", 1), ("finish", 2), ("sync", 1), ("compare", 1)],
        *[("start", 3, 1, True), ("score", 2, 0), ("train", 2), ("finish", 3), ("sync", 2)],
        *[("score", 3, 1), ("train", 3), ("sync", 3)],
    ]


def test_engines_that_do_not_use_the_weights_end_the_run(tmp_path: Path) -> None:
    run = Scripted(tmp_path / "work", staleness=1, checkpoint_every=9)
    run.gaps[1] = 0.3
    with pytest.raises(WeightSyncError, match=r"ppo step 1: engines and trainer differ by 0\.3"):
        run.run()
    without = Scripted(tmp_path / "other", staleness=1, weight_sync={"canary": False})
    assert without._sync_check is None
    assert [version for version in range(25) if SyncCheck.is_due(version)] == [0, 1, 10, 20]


def test_the_gap_is_the_mean_over_all_tokens() -> None:
    """Each engine samples, and its log-probabilities are 0 for each token. One engine is lost."""

    class Policy(ScriptedRank):
        @override
        def logprobs(self, role: Any, with_entropy: bool, share: Any, *chunks: RolloutColumns) -> Any:
            _, responses = self.received(share, chunks).tokens()
            rows = [np.full(len(response), -0.5, np.float32) for response in responses]
            return None, row_columns([len(row) for row in rows], logprobs=rows)

    engines = [ScriptedEngine(lambda request: Reply((7,) * 99)) for _ in range(3)]
    config = config_from_tree({"ppo": {"samples_per_prompt": 2, "engine": {"count": 3}}}, "test")
    actors = [ScriptedEngineActor(each) for each in engines]
    fleet = ScriptedFleet(config, ranks={"policy": [Policy()]}, engines=actors)
    fleet.sync(7)
    fleet.engines.lost = {1}
    fleet.engines.collect({}, "nothing")
    prompts = [PromptExample(f"p{i}", "", (1, i)) for i in range(3 * PROMPTS + 5)]
    composer: Any = None
    check = SyncCheck(config.ppo, fleet, prompts, str, composer, 0)
    assert check.gap(7) == pytest.approx(0.5)
    asked = [request for engine in engines for request in engine.requests]
    assert {request.prompt.prompt_id for request in asked} == {f"p{i}" for i in range(3 * PROMPTS)}
    assert len(asked) == 3 * PROMPTS, "one sample of each prompt"
    assert {request.max_new_tokens for request in asked} == {TOKENS}
    loads = [len(engine.requests) for engine in engines]
    assert loads[1] == 0 and min(loads[0], loads[2]) > 0
    # Cached prompts change the rounding of later rollouts.
    assert [engine.prefix_resets for engine in engines] == [1, 0, 1]


def test_with_0_nothing_is_sampled_ahead(tmp_path: Path) -> None:
    run = Scripted(tmp_path / "work", steps=2, checkpoint_every=9)
    run.run()
    assert run.events == [
        ("sync", 0),
        *[("start", 1, 0, False), ("finish", 1), ("score", 1, 0), ("train", 1), ("sync", 1)],
        *[("start", 2, 1, False), ("finish", 2), ("score", 2, 1), ("train", 2), ("sync", 2)],
    ]


@pytest.mark.parametrize(("staleness", "version"), [(1, 1), (0, 2), (1, 4)])
def test_a_batch_that_is_too_far_behind_is_refused(tmp_path: Path, staleness: int, version: int) -> None:
    controller = Scripted(tmp_path / "work", staleness=staleness)
    controller.completed_steps = 3
    if staleness:
        controller._rollouts._batches[4] = replace(FORTY, version=version)
    collector: Any = controller._collector
    collector.behind = 3 - version
    with pytest.raises(WeightSyncError, match=f"step 4 was sampled from policy version {version}, "):
        controller.collect()


def test_the_next_attempt_uses_the_rollouts_of_the_checkpoint(tmp_path: Path) -> None:
    whole = Scripted(tmp_path / "whole", staleness=1, checkpoint_every=9)
    whole.run()
    first = Scripted(tmp_path / "first", staleness=1, checkpoint_every=3)
    first.is_killed_after_checkpoint = True
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = Scripted(tmp_path / "second", staleness=1, checkpoint_every=9)
    second.run()
    assert second.events[0] == ("sync", 3)
    assert first.events + second.events[1:] == whole.events


def test_a_checkpoint_without_the_next_rollouts_is_refused(tmp_path: Path) -> None:
    first = Scripted(tmp_path / "first")
    first.completed_steps = 2
    first._checkpoint()
    second = Scripted(tmp_path / "second", staleness=1)
    with pytest.raises(
        CorruptArtifact, match=r"no readable rollouts of step 3, which ppo\.staleness=1 needs"
    ):
        second._restore()


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


# -- more than one version --


def test_the_batches_between_two_syncs_are_sampled_one_after_the_other(tmp_path: Path) -> None:
    run = Scripted(tmp_path / "work", staleness=2, steps=5, checkpoint_every=9)
    run.run()
    assert run.events == [
        *[("sync", 0), ("compare", 0), ("start", 1, 0, False), ("finish", 1)],
        *[("start", 2, 0, True), ("start", 3, 0, True), ("score", 1, 0), ("train", 1)],
        *[("finish", 2), ("score", 2, 0), ("train", 2), ("finish", 3), ("sync", 2), ("compare", 2)],
        *[("start", 4, 2, True), ("start", 5, 2, True), ("score", 3, 0), ("train", 3)],
        *[("finish", 4), ("score", 4, 2), ("train", 4), ("finish", 5), ("sync", 4)],
        *[("score", 5, 2), ("train", 5)],
    ]
    rows = [json.loads(line) for line in (run._context.output / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("sync/version") for row in rows] == [None, 2, None, 4, None]


@pytest.mark.parametrize("staleness", [1, 2, 3, 4, 7])
def test_versions_are_a_function_of_the_step_and_within_the_bound(tmp_path: Path, staleness: int) -> None:
    run = Scripted(tmp_path / "work", staleness=staleness, steps=20, checkpoint_every=99)
    run.run()
    versions = {event[1]: event[2] for event in run.events if event[0] == "score"}
    later = {step: staleness * ((step - 2) // staleness) for step in range(2, 21)}
    assert versions == {1: 0} | later
    behind = {step - 1 - version for step, version in later.items()}
    assert behind == set(range(1, staleness + 1))
    assert [event[1] for event in run.events if event[0] == "sync"] == list(range(0, 21, staleness))


def test_a_batch_that_is_more_than_n_behind_is_refused(tmp_path: Path) -> None:
    run = Scripted(tmp_path / "work", staleness=3)
    run.completed_steps = 4
    run._rollouts._batches[5] = replace(FORTY, version=1)
    assert run.collect().version == 1
    run._rollouts._batches[5] = replace(FORTY, version=0)
    with pytest.raises(WeightSyncError, match=r"version 0, 4 behind; ppo\.staleness=3 is the limit"):
        run.collect()


@pytest.mark.parametrize("staleness", [2, 3, 4])
def test_attempts_killed_after_any_checkpoint_end_as_one_run(tmp_path: Path, staleness: int) -> None:
    def attempt(name: str, every: int, *, is_killed: bool) -> Scripted:
        run = Scripted(tmp_path / name, staleness=staleness, steps=10, checkpoint_every=every)
        run.is_killed_after_checkpoint = is_killed
        if is_killed:
            with pytest.raises(KeyboardInterrupt):
                run.run()
        else:
            run.run()
        return run

    def trained(runs: list[Scripted]) -> Events:
        return [event for run in runs for event in run.events if event[0] in ("score", "train")]

    whole = attempt("whole/work", 99, is_killed=False)
    runs = [attempt(f"killed/{number}", 1, is_killed=True) for number in range(9)]
    assert [run.completed_steps for run in runs] == list(range(1, 10))
    runs.append(attempt("killed/last", 1, is_killed=False))
    assert trained(runs) == trained([whole])
    sampled = [event[1] for run in runs for event in run.events if event[0] == "start"]
    assert sampled == list(range(1, 11)), "each step once"
    metrics = [(run._context.output / "metrics.jsonl").read_bytes() for run in (runs[-1], whole)]
    assert metrics[0] == metrics[1]


def test_a_checkpoint_without_one_of_the_batches_is_refused(tmp_path: Path) -> None:
    first = Scripted(tmp_path / "first", staleness=3)
    first.is_killed_after_checkpoint = True
    with pytest.raises(KeyboardInterrupt):
        first.run()
    # After step 1, the batches of steps 2 to 4 wait.
    ahead = RolloutsAhead(first._ppo, first._fleet, first.prompts, first._collector)
    _, folder = first._context.checkpoints.latest() or (0, Path())
    ahead.restore(folder, 1)
    assert [batch.replaced for batch in ahead.finished] == [2, 3, 4]
    (folder / "ahead-3" / "rollouts" / "batch.json").unlink()
    with pytest.raises(CorruptArtifact, match=r"no readable rollouts of step 4, which ppo\.staleness=3"):
        ahead.restore(folder, 1)


def test_an_evaluation_between_two_syncs_has_its_own_sync(tmp_path: Path) -> None:
    run = Scripted(tmp_path / "work", staleness=3, steps=4, checkpoint_every=9, evaluate_every=2)

    class Evaluation:
        def evaluate(self, version: int) -> HeldOutResult:
            run.events.append(("evaluate", version))
            return HeldOutResult({OBJECTIVE: 1.0, "eval/kl": 0.0}, [1.0])

    evaluation: Any = Evaluation()
    run._evaluation = evaluation
    run.run()
    start = run.events.index(("train", 2))
    assert run.events[start : start + 7] == [
        *[("train", 2), ("finish", 3), ("finish", 4), ("sync", 2), ("evaluate", 2), ("score", 3, 0)],
        ("train", 3),
    ]


def test_shares_are_measured_from_one_sync_to_the_next(tmp_path: Path) -> None:
    measured: list[tuple[int, list[int]]] = []
    run = Scripted(tmp_path / "work", staleness=3, steps=7, checkpoint_every=9)

    def measure(steps: StepsSinceSync, sampled: list[RolloutBatch]) -> dict[str, float]:
        assert steps.timings["timing/step"] > steps.timings["timing/sync"] > 0
        measured.append((len(steps.batches), [batch.replaced for batch in sampled]))
        return {}

    utilisation: Any = SimpleNamespace(measure=measure, begin=lambda: None)
    run._utilisation = utilisation
    run.run()
    assert measured == [(3, [2, 3, 4]), (3, [5, 6, 7])]


@pytest.mark.parametrize("field", ["evaluate_every", "checkpoint_every"])
@pytest.mark.parametrize(("every", "expected"), [(2, []), (3, [3, 6, 9]), (7, [3, 6]), (9, [3, 6, 9])])
def test_idle_engines_after_an_evaluation_or_a_checkpoint_are_not_measured(
    tmp_path: Path, field: str, every: int, expected: list[int]
) -> None:
    """Syncs are after steps 3, 6 and 9. Every second version is one between each two of them."""
    ppo = {"evaluate_every": 99, "checkpoint_every": 99, field: every}
    run = Scripted(tmp_path / "work", staleness=3, steps=10, **ppo)
    evaluation: Any = SimpleNamespace(
        evaluate=lambda _: HeldOutResult({OBJECTIVE: 1.0, "eval/kl": 0.0}, [1.0]),
        state_dict=dict,
    )
    run._evaluation = evaluation
    measured: list[int] = []

    def measure(steps: StepsSinceSync, sampled: list[RolloutBatch]) -> dict[str, float]:
        measured.append(run.completed_steps)
        return {}

    utilisation: Any = SimpleNamespace(measure=measure, begin=lambda: None)
    run._utilisation = utilisation
    run.run()
    assert measured == expected


def test_the_controller_needs_the_space_for_stored_rollouts(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    class Checkpoints(FolderCheckpoints):
        @override
        def prepare(
            self, step: int, folder: Path, size: int, unsharded: int | None = None, *, own: int = 0
        ) -> None:
            asked.append({"size": size, "unsharded": unsharded, "own": own})
            super().prepare(step, folder, size, unsharded, own=own)

    run = Scripted(tmp_path / "work", staleness=2)
    run._context = replace(run._context, checkpoints=Checkpoints(tmp_path / "checkpoints"))
    run._checkpoint()
    run._rollouts._batches = {2: FORTY, 3: FORTY}
    run._checkpoint()
    assert asked[0]["own"] == 0
    assert asked[1] == {**asked[0], "own": 2 * FORTY.token_bytes}


def test_the_others_sample_the_share_of_an_engine_that_dies() -> None:
    def sampled(lost: set[int]) -> list[list[Any]]:
        engines = [ScriptedEngine(lambda request: Reply((7, request.seed % 97))) for _ in range(2)]
        ppo = {"staleness": 3, "prompts_per_step": 8, "engine": {"count": 2}}
        config = config_from_tree({"ppo": ppo}, "test")
        fleet = ScriptedFleet(config, engines=[ScriptedEngineActor(each) for each in engines])
        fleet.sync(3)
        prompts = [PromptExample(f"p{i}", "", (1, i)) for i in range(20)]
        composer: Any = None
        ahead = RolloutsAhead(
            config.ppo, fleet, prompts, Collector(config.ppo, fleet, prompts, str, composer, 0)
        )
        ahead.start(3)
        responses = []
        for step in (5, 6, 7):
            fleet.engines.lost = lost
            batch = ahead.take(step)
            assert batch.version == 3
            responses.append(read_responses(fleet, batch, range(len(batch))))
        assert fleet.client.killed == ["engine 1"] * len(lost), "once"
        assert ahead.finished == [] and not ahead.is_unfinished, "nothing else was sampled"
        return responses

    assert sampled({1}) == sampled(set())
    assert all(len(responses) == 8 for responses in sampled(set()))


def test_several_batches_and_filtering_are_refused() -> None:
    grpo = {"algorithm": "grpo", "samples_per_prompt": 4, "dynamic_filtering": {"max_rounds": 2}}
    config_from_tree({"ppo": {**grpo, "staleness": 1}}, "test")
    with pytest.raises(ConfigError, match=r"ppo\.staleness=2 lets the engines sample one batch after"):
        config_from_tree({"ppo": {**grpo, "staleness": 2}}, "test")
    with pytest.raises(ConfigError, match=r"ppo\.staleness"):
        config_from_tree({"ppo": {"staleness": 17}}, "test")
    assert config_from_tree({"ppo": {"staleness": 4}}, "test").ppo.used_importance == "truncate"
