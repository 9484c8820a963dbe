"""A sample of `make chaos`: stages killed several times, in different processes, a full disk, and the same
command again.

- it ends well, in the bits and with the metrics, each once, of an undisturbed run
- nothing is left 10 s after the end
- asked to stop, PPO and supervised fine-tuning finish the current step and save a checkpoint
- rollouts that were sampled before the kill are trained on, not sampled again
- a step with numbers that are not finite, wherever they come from, is skipped, its batch is kept, and the run
  goes on
- a run that forgets its KL coefficient is noticed
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rlhf_core.pipeline import StageName
from tests.chaos.__main__ import negative_control
from tests.chaos.harness import Case, Golden, read_passes, run_case

SAMPLE = (
    pytest.param(Case("data", ("data.encoded:1:kill", "bundle.uploaded:1:kill")), marks=pytest.mark.slow),
    Case(
        "sft", ("sft.step:4:int", "checkpoint.written:2:kill", "bundle.committed:2:kill", "flow.made:1:kill")
    ),
    Case("reward", ("checkpoint.written:1:enospc", "stage.made:1:kill")),
    pytest.param(Case("reward", ("reward.step:7:kill",)), marks=pytest.mark.slow),
)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    stages: tuple[StageName, ...] = ("data", "sft", "reward", "ppo")
    return Golden(tmp_path_factory.mktemp("golden"), stages)


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: f"{case.stage}-{case.points[0]}")
def test_a_killed_stage_gives_the_same_bits(golden: Golden, case: Case, tmp_path: Path) -> None:
    check(golden, case, tmp_path)


@pytest.mark.slow  # tests/unit/tracking/test_champions.py kills a registration before each of its writes
def test_a_killed_registration_gives_the_same_result(tmp_path: Path) -> None:
    golden = Golden(tmp_path / "golden", ("register",))
    check(golden, Case("register", ("register.created:1:kill",)), tmp_path / "case")


@pytest.mark.slow  # it makes the data and the SFT model first
def test_killed_dpo_gives_the_same_bits(tmp_path: Path) -> None:
    overrides = (
        "dpo.enabled=true",
        "dpo.batch_size=32",
        "dpo.optimizer.learning_rate=1e-3",
        "dpo.checkpoint_every=3",
        "dpo.eval_every=3",
        # A reward model is not needed, and slow.
        "reward.enabled=false",
        "ppo.rewards=[{type: well_formed}]",
    )
    golden = Golden(tmp_path / "golden", ("dpo",), overrides)
    check(golden, Case("dpo", ("dpo.step:5:kill", "checkpoint.written:2:kill")), tmp_path / "case")


@pytest.mark.slow  # it makes the data and the SFT model first
def test_an_ensemble_killed_in_its_second_member_gives_the_same_bits(tmp_path: Path) -> None:
    # A member has 22 steps, and checkpoints after 10 and 20 of them. The first attempt is killed at step 20
    # of the first member, the second one, which continues after step 10, at the last step of the second
    # member.
    golden = Golden(tmp_path / "golden", ("reward",), ("reward.ensemble={members: 2}",))
    case = Case("reward", ("reward.step:34:kill", "checkpoint.written:2:kill", "stage.made:1:kill"))
    check(golden, case, tmp_path / "case")


def check(golden: Golden, case: Case, folder: Path) -> None:
    result = run_case(golden, case, folder)
    assert result.ended, result.why
    assert {kill.what for kill in result.kills} == {point.removesuffix(":kill") for point in case.points}
    assert result.same, result.why
    assert not result.left


def test_ppo_saves_a_checkpoint_when_stopped_and_samples_an_interrupted_step_again(
    golden: Golden, tmp_path: Path
) -> None:
    # Asked in step 1, by a SIGTERM straight to the stage's process, the first attempt leaves a checkpoint of
    # it. The second one's controller is killed in step 3, after the checkpoint of step 2, and the third one's
    # critic in step 4: the attempts sample steps 1, 2 and 3, 3 and 4, and 3 and 4.
    points = ("ppo.after_scoring:1:term", "ppo.after_rollout:2:kill", "critic.update:2:kill")
    result = run_case(golden, Case("ppo", points), tmp_path)
    assert result.ended and result.same, result.why
    assert len(result.kills) == 3
    passed = Counter(p.point for p in read_passes(tmp_path / "trace"))
    assert (passed["ppo.after_checkpoint"], passed["ppo.after_scoring"]) == (2, 6)
    # The last attempt continues from the checkpoint of step 2, which has the evaluation of version 2.
    assert passed["ppo.after_evaluation"] == len([0, 1, 2, 3, 3, 4])
    assert passed["engine.generate"] == 7 + passed["ppo.after_evaluation"]


@pytest.mark.parametrize(
    ("stage", "points", "rows"),
    [
        pytest.param("sft", ("train.backward:3",), 32, marks=pytest.mark.slow),
        pytest.param("reward", ("train.backward:3",), 32, marks=pytest.mark.slow),
        pytest.param("ppo", ("train.backward:3",), 16, marks=pytest.mark.slow),
        # Policy and reward model compute an evaluation before each step.
        ("ppo", ("policy.logprobs:2", "critic.values:2", "reward.scores:8"), 16),
    ],
)
def test_a_step_with_numbers_that_are_not_finite_is_skipped_and_its_batch_is_kept(
    golden: Golden, stage: StageName, points: tuple[str, ...], rows: int, tmp_path: Path
) -> None:
    result = run_case(golden, Case(stage, tuple(f"{point}:nan" for point in points)), tmp_path)
    assert result.ended and result.commands == 1, result.why
    assert not result.same, "nobody came by the point"
    tables = set(tmp_path.rglob("tables/skipped/*.json"))
    assert not set(golden.folder.rglob("tables/skipped/*.json")), "MLflow's files are those of the case"
    assert [len(json.loads(table.read_text())["data"]) for table in tables] == [rows] * len(points)


@pytest.mark.slow  # `make chaos` begins with it, too
def test_a_run_that_loses_its_kl_coefficient_gives_other_bits(golden: Golden, tmp_path: Path) -> None:
    result = run_case(golden, negative_control(), tmp_path)
    assert result.ended and result.kills, result.why
    assert not result.same
