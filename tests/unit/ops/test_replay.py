"""Replays, first differences and blame, with the scripted engines and models of the record's tests.

- a replay makes the steps of a run again and finds them equal, without a change of the store
- a kept replay continues, and a step that it has is only compared
- each of twelve planted perturbations is found where it acts first, and not where it shows up later
- what cannot have caused the first difference is no explanation of it
- the advantages of a blame are those that the policy was trained on; its shares add up to 1
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from rlhf_cli.main import main
from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.engines.sync.sender import SyncReport
from rlhf_core.errors import InputError
from rlhf_core.ops.blame import blame, shares_of, token_values
from rlhf_core.ops.finished_run import FinishedRun, find_run
from rlhf_core.ops.first_difference import (
    _AFTER_UPDATE,
    _BEFORE_UPDATE,
    Difference,
    Kind,
    Recording,
    conditions,
    differing,
    first_difference,
    settings_of,
)
from rlhf_core.ops.replay import changed_since, replay
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.training.batch import RolloutColumns, RowColumns, row_columns
from rlhf_core.ppo.training.rank_rows import ExperienceInputs
from rlhf_core.record.schema import COLUMNS
from rlhf_core.record.writer import RecordWriter
from rlhf_core.rewards.compose import RewardBatch, RewardComposer
from rlhf_core.run.external_inputs import reward_code_digests
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store
from rlhf_core.testing import stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.engines import Reply, Request, ScriptedEngine
from rlhf_core.testing.trainer import ScriptedTrainer
from rlhf_core.types import PromptExample, RewardInput, StageContext
from tests.support.scripted_fleet import ScriptedEngineActor, ScriptedFleet
from tests.unit.ppo.test_recording import PPO, PROMPTS, Models, respond

STEP, ROW, TOKEN = 3, 2, 1
"""Where a perturbation of one number is planted."""


class Rewards(RewardComposer):
    """The rewards of step `STEP` can be changed."""

    def __init__(self, config: PipelineConfig, change: Callable[[list[float]], None] | None) -> None:
        super().__init__(config.ppo.rewards)
        self._change = change
        self._steps = 0

    @override
    def score(
        self,
        batch: Sequence[RewardInput],
        model_scores: Sequence[float] | None,
        opponents: Sequence[RewardInput] = (),
    ) -> RewardBatch:
        found = super().score(batch, model_scores)
        self._steps += 1
        if self._change is not None and self._steps == STEP:
            self._change(found.by_source["length"])
        return found


class Engines(ScriptedFleet):
    stale = False

    @override
    def sync(self, version: int) -> SyncReport:
        report = super().sync(version)
        return replace(report, checksum="stale") if self.stale and version == STEP - 1 else report


class StaleEngines(Engines):
    stale = True


class FasterModels(Models):
    """Each update changes the weights more."""

    @override
    def update_policy(self, *_given: Any, **_options: Any) -> dict[str, float]:
        self.trained += 10
        return {"loss": self.trained / 10}


class OtherLoss(Models):
    @override
    def update_policy(self, *given: Any, **options: Any) -> dict[str, float]:
        return {"loss": super().update_policy(*given, **options)["loss"] * (1 + (self.trained >= STEP))}


class OtherMask(Models):
    """The experience leaves out a response."""

    @override
    def make_experience(self, inputs: ExperienceInputs, *objects: RowColumns) -> Any:
        if self.trained == STEP - 1:
            masked = inputs.scores.copy()
            masked[ROW] = np.nan
            inputs = replace(inputs, scores=masked)
        return super().make_experience(inputs, *objects)


class OtherThreads(Models):
    """One number of one response is rounded the other way."""

    @override
    def logprobs(self, role: Any, with_entropy: bool, share: Any, *chunks: RolloutColumns) -> Any:
        sums, columns = super().logprobs(role, with_entropy, share, *chunks)
        if not with_entropy or self.trained != STEP - 1:
            return sums, columns
        rows = {name: [columns.row(name, row).copy() for row in range(4)] for name in columns.values}
        rows["logprobs"][ROW][TOKEN] = np.nextafter(rows["logprobs"][ROW][TOKEN], np.float32(0))
        return sums, row_columns([len(row) for row in rows["logprobs"]], **rows)


@dataclass
class Stage:
    """The stage `ppo` with scripted models."""

    models: type[Models] = Models
    fleet: type[ScriptedFleet] = Engines
    respond: Callable[[Request], Reply] = respond
    prompts: Sequence[PromptExample] = tuple(PROMPTS)
    rewards: Callable[[list[float]], None] | None = None
    calls: int = 0

    def __call__(self, config: PipelineConfig, context: StageContext) -> None:
        self.calls += 1
        roles: Any = ("policy", "reference", "critic")
        fleet = self.fleet(
            config,
            ranks={role: [self.models({role: ScriptedTrainer()}, config)] for role in roles},
            engines=[ScriptedEngineActor(ScriptedEngine(self.respond))],
        )
        record = RecordWriter(context.scratch / "record", "ppo", config.record)
        with fleet, Rewards(config, self.rewards) as composer:
            fleet.sync(0)
            made = PPOController(
                fleet, self.prompts, lambda ids: " ".join(map(str, ids)), composer, context, record=record
            )
            made.run()
            made.save_record(context.output)


def configured(**sections: Any) -> PipelineConfig:
    return config_from_tree({"ppo": PPO, "record": {"level": "all"}, **sections}, "test")


def recorded(folder: Path, stage: Stage | None = None, **sections: Any) -> Recording:
    """Return the recording of a whole run."""
    context = stage_context(folder)
    (stage or Stage())(configured(**sections), context)
    return Recording(context.output, folder.name)


def finished(home: Path, level: str = "logprobs", eps: float | None = None, **ppo: Any) -> FinishedRun:
    """Make a run with its artifacts and its summary. Earlier releases had a field `eps` of optimizers."""
    config = configured(run={"home": str(home)}, ppo=PPO | ppo, record={"level": level})
    artifacts = ArtifactStore(Store(str(home / "store")), home / "cache")
    tree = config.model_dump(mode="json", by_alias=True)
    if eps is not None:
        tree["ppo"]["policy"]["eps"] = eps
    made = Provenance(config=tree, decided_by={"sources": reward_code_digests(config)})
    write_data_artifact(home / "data", prompts=PROMPTS)
    for stage in ("sft", "reward"):
        (home / stage).mkdir()
        (home / stage / "note.txt").write_text(stage)
    context = stage_context(home / "made")
    Stage()(config, context)
    stages = {}
    folders = {name: home / name for name in ("data", "sft", "reward")} | {"ppo": context.output}
    for name, folder in folders.items():
        stages[name] = {"artifact": artifacts.publish(name, "a" * 16, folder, made).uri}  # type: ignore[arg-type]
    file = home / "runs" / "small" / "summary.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"run": "small", "stages": stages}))
    return find_run("small", str(home))


def files_of(folder: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("level", ["rewards", "logprobs", "all"])
def test_a_replay_finds_its_steps_equal(tmp_path: Path, level: str) -> None:
    run, stage = finished(tmp_path, level), Stage()
    stored = files_of(tmp_path / "store")
    done = replay(run, 4, train=stage)
    assert done.difference is None
    assert (done.start, done.responses, done.has_weights, stage.calls) == (0, 4, True, 1)
    columns = {"rewards": 16, "logprobs": 20, "all": 23}
    assert done.columns == columns[level]
    assert done.metrics > 10
    assert files_of(tmp_path / "store") == stored
    assert not run.home.replay("small").exists()


def test_a_kept_replay_continues(tmp_path: Path) -> None:
    run, stage = finished(tmp_path), Stage()
    starts = []
    for step in (2, 4, 3):
        done = replay(run, step, tmp_path / "kept", stage)
        assert done.difference is None
        starts.append(done.start)
    assert (starts, stage.calls) == ([0, 2, 4], 2)
    (tmp_path / "kept" / "versions.json").write_text("{}")
    with pytest.raises(InputError, match="made by another version of the code; use another folder"):
        replay(run, 5, tmp_path / "kept", stage)


def test_a_run_with_another_epsilon_is_not_replayed(tmp_path: Path) -> None:
    assert replay(finished(tmp_path / "same", eps=1e-8), 2, train=Stage()).difference is None
    run, stage = finished(tmp_path / "other", eps=1e-5), Stage()
    with pytest.raises(
        InputError, match="made with eps=1e-05 of policy or critic, which is always 1e-08 now"
    ):
        replay(run, 2, train=stage)
    assert stage.calls == 0


def test_a_replay_with_another_reward_says_where_and_why(tmp_path: Path) -> None:
    run = finished(tmp_path)
    found = replay(run, 5, train=Stage(rewards=lambda values: values.reverse())).difference
    assert found is not None
    assert (found.step, found.kind, found.name) == (STEP, "score", "reward/length")
    assert changed_since(run) == {}
    with pytest.raises(InputError, match="must be a recorded step of small; got 6; it has 1 to 5"):
        replay(run, 6)


def test_a_changed_file_of_a_loss_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    given: Any = {"loss": {"type": "python", "function": "mine:loss", "file": str(file)}}
    file.write_text("def loss(): ...")
    one = finished(tmp_path / "one", **given)
    file.write_text("def loss(): return 1")
    other = finished(tmp_path / "other", **given)
    assert list(changed_since(one)) == ["ppo.loss.content"] and changed_since(other) == {}
    [named] = differing(conditions(one), conditions(other))
    assert named == "ppo.loss.content"
    assert Difference(1, "gradient", "loss/policy", 0, 1).can_be_explained_by(named)
    assert not Difference(1, "score", "score", 0, 1).can_be_explained_by(named)


def test_the_last_step_of_a_policy_with_an_adapter_is_replayed(tmp_path: Path) -> None:
    run = finished(tmp_path, lora={"r": 4})
    assert replay(run, 5, train=Stage()).difference is None


def test_the_command_why_compares_runs_or_replays_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_core.executors.spec.stage_environment", lambda _: {})
    stage = Stage()
    monkeypatch.setattr("rlhf_core.ops.replay.STAGES", {"ppo": SimpleNamespace(load=lambda: stage)})
    for name, coef in (("one", 0.05), ("same", 0.05), ("other", 0.5)):
        finished(tmp_path / name, kl={"coef": coef})
    one, same, other = (str(tmp_path / name / "runs" / "small") for name in ("one", "same", "other"))

    def why(*words: str) -> tuple[int, str]:
        code = main(["why", *words, "--home", str(tmp_path)])
        out, err = capsys.readouterr()
        return code, out + err

    code, said = why(one, same, "--step", "5")
    assert code == 0 and "steps 1 to 5: equal" in said
    code, said = why(one, other, "--step", "5")
    assert code == 1 and "first difference: step 1, advantage: " in said
    assert "can explain it: ppo.kl.coef: 0.05 and 0.5" in said and stage.calls == 0
    code, said = why(one, "--step", "3")
    assert code == 0 and "step 3: 4 responses, 20 columns" in said and stage.calls == 1
    for words, expected in (
        (("small",), "small is no YAML file; to explain a run, give a step of PPO"),
        (("small.yaml", "--step", "3"), "compares one or two finished runs; got small.yaml"),
        ((one, one, one, "--step", "3"), "compares one or two finished runs; got"),
        ((one, other, "--step", "6"), "must be a recorded step of small; got 6; it has 1 to 5"),
    ):
        code, said = why(*words)
        assert code == 2 and f"--step: {expected}" in said


def with_ids(change: Callable[[int], Sequence[int]]) -> Sequence[PromptExample]:
    return [replace(prompt, input_ids=(1, *change(prompt.input_ids[1]))) for prompt in PROMPTS]


def raised(values: list[float]) -> None:
    values[ROW] += 0.125


def later(values: list[float]) -> None:
    for index, _ in enumerate(values):
        values[index] -= 0.5


@pytest.mark.parametrize(
    ("stage", "sections", "expected"),
    [
        (None, {}, (STEP, "token", "response_ids", ROW, TOKEN)),
        (Stage(rewards=raised), {}, (STEP, "score", "reward/length", ROW, None)),
        (Stage(), {"run": {"seed": 1}}, (1, "prompt", "prompt_id", 0, None)),
        (Stage(FasterModels), {}, (1, "new weight", "new_logprobs", 0, 0)),
        (Stage(OtherThreads), {}, (STEP, "log-probability", "old_logprobs", ROW, TOKEN)),
        (Stage(OtherLoss), {}, (STEP, "gradient", "loss/policy", None, None)),
        (Stage(prompts=with_ids(lambda i: (5, i))), {}, (1, "prompt", "prompt_ids", 0, 1)),
        (Stage(prompts=PROMPTS[:-1]), {}, (1, "prompt", "prompt_id", 1, None)),
        (Stage(prompts=with_ids(lambda i: (i + 50,))), {}, (1, "prompt", "prompt_ids", 0, 1)),
        (Stage(OtherMask), {}, (STEP, "advantage", "kl", ROW, None)),
        (Stage(fleet=StaleEngines), {}, (STEP - 1, "new weight", "weights after the step", None, None)),
        (Stage(rewards=later), {}, (STEP, "score", "reward/length", 0, None)),
    ],
    ids=["one token", "one score", "seed", "learning rate", "threads", "a changed loss", "a changed template",
         "a dropped row", "another tokenizer", "a wrong mask", "a stale weight",
         "a reward that depends on time"],
)  # fmt: skip
def test_a_perturbation_is_found_where_it_acts_first(
    tmp_path: Path,
    stage: Stage | None,
    sections: Mapping[str, Any],
    expected: tuple[int, Kind, str, int | None, int | None],
) -> None:
    undisturbed = recorded(tmp_path / "undisturbed")
    if stage is None:
        asked = undisturbed.rollouts(STEP)["seed"][ROW].as_py()

        def one_other_token(request: Request) -> Reply:
            tokens = list(respond(request).token_ids)
            if request.seed == asked:
                tokens[TOKEN] += 1
            return replace(respond(request), token_ids=tokens)

        stage = Stage(respond=one_other_token)
    other = recorded(tmp_path / "other", stage, **sections)
    found = first_difference(undisturbed, other, 5)
    assert found is not None
    assert (found.step, found.kind, found.name, found.index, found.position) == expected
    assert first_difference(undisturbed, other, expected[0] - 1) is None
    assert f"step {expected[0]}, {expected[1]}: {expected[2]}" in found.describe()
    assert first_difference(undisturbed, recorded(tmp_path / "same"), 5) is None


def test_steps_that_one_run_has_not_recorded_are_compared_by_their_metrics(tmp_path: Path) -> None:
    one, other = recorded(tmp_path / "one"), recorded(tmp_path / "other", Stage(rewards=raised))
    (other.folder / "record" / "ppo-00000003.parquet").unlink()
    found = first_difference(one, other, 5)
    assert found is not None
    assert (found.step, found.kind, found.index) == (STEP, "advantage", None)
    shutil.rmtree(other.folder / "record")
    assert first_difference(one, replace(other), 5) == found
    assert first_difference(one, replace(other), STEP - 1) is None


def test_every_column_of_the_record_is_compared() -> None:
    names = [name for _, names in (*_BEFORE_UPDATE, *_AFTER_UPDATE) for name in names]
    recorded_columns = [column.name for column in COLUMNS if column.name not in ("kind", "step", "index")]
    assert sorted(name for name in names if not name.endswith("/")) == sorted(recorded_columns)


def test_only_what_acts_early_enough_explains_a_difference() -> None:
    def settings(seed: int, coef: float, rate: float) -> dict[str, Any]:
        changed = {"kl": {"coef": coef}, "policy": {"learning_rate": rate}, "evaluate_prompts": 10 + seed}
        return settings_of(configured(run={"seed": seed}, ppo=PPO | changed))

    one, other = settings(0, 0.1, 1e-6), settings(1, 0.2, 1e-5)
    names = differing(one, other)
    assert set(names) == {"run.seed", "ppo.kl.coef", "ppo.policy.learning_rate"}

    def explanations(step: int, kind: Kind, name: str) -> set[str]:
        found = Difference(step, kind, name, 0, 1)
        return {each for each in names if found.can_be_explained_by(each)}

    assert explanations(1, "score", "score") == {"run.seed"}
    assert explanations(1, "advantage", "advantages") == {"run.seed", "ppo.kl.coef"}
    assert explanations(1, "gradient", "loss/policy") == set(names)
    assert explanations(1, "new weight", "new_logprobs") == set(names)
    assert explanations(1, "weight", "weights") == {"run.seed"}
    assert explanations(2, "token", "response_ids") == set(names)


def test_the_advantages_of_a_blame_are_those_of_the_training(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "all")
    for step in (1, 4):
        rows = recording.rollouts(step).to_pylist()
        advantages, errors = token_values(recording, configured().ppo, rows, step)
        for row, found, error in zip(rows, advantages, errors, strict=True):
            assert found.tolist() == row["advantages"]
            assert (error + np.float32(row["values"])) == pytest.approx(row["returns"], abs=1e-6)


def test_a_blame_ranks_responses_by_their_part_of_the_change(tmp_path: Path) -> None:
    run = finished(tmp_path)
    found = blame(run, STEP, "kl")
    rows = Recording(run.recorded("ppo"), "small").rollouts(STEP).to_pylist()
    assert found.mean == pytest.approx(np.mean([row["kl"] for row in rows]))
    assert sum(each.share for each in found.responses) == pytest.approx(1.0)
    sign = 1 if found.mean > (found.before or 0.0) else -1
    largest = max(rows, key=lambda row: sign * row["kl"])
    first = found.responses[0]
    assert first.index == largest["index"] and first.value == pytest.approx(largest["kl"])
    assert first.prompt == f"question {largest['prompt_ids'][1]}"
    assert set(found.rewards) == {"token_share", "length"}
    assert found.cut[0] == pytest.approx(np.mean([not row["finished"] for row in rows]))
    assert sum(found.sources.values()) == pytest.approx(1.0)
    assert blame(run, STEP, "reward").responses and blame(run, STEP, "value").responses


def test_a_blame_leaves_out_earlier_steps_that_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorded(tmp_path / "late").folder
    (folder / "record" / "ppo-00000001.parquet").unlink()
    run = finished(tmp_path)
    monkeypatch.setattr(FinishedRun, "recorded", lambda *_: folder)
    assert blame(run, 3).before is None and blame(run, 4).before == blame(run, 3).mean


def test_shares_are_of_the_values_that_moved_with_the_mean() -> None:
    assert shares_of(np.array([1.0, -3.0, -1.0]), 1.0).tolist() == pytest.approx([0.0, 2 / 3, 1 / 3])
    assert shares_of(np.array([1.0, 1.0]), 1.0).tolist() == [0.0, 0.0]


def test_a_record_of_rewards_has_no_loss(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"loss and value need record\.level=logprobs; small has less"):
        blame(finished(tmp_path, "rewards"), STEP, "loss")
