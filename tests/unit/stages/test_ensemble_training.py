"""The members of an ensemble are trained one after the other, here with a training that is scripted.

- a stage that ends after any step of any member, or between two, continues to the same files and metrics
- the other ranks begin with the member that rank 0 continues with, and wait for rank 0 before each member
- a checkpoint has links to the files of finished members, or copies where links are impossible, and no score
- metrics of later members have a prefix, and progress counts the steps of all members
- a member below `reward.min_accuracy` ends the stage before the next one is trained, also after a restart
- the first member has the seeds of a run without ensemble; the others have seeds of their own
- the first member's files are those of a run without ensemble, and the others have another score head
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from rlhf_core.config.load import config_from_tree
from rlhf_core.config.training import EnsembleConfig
from rlhf_core.engines import checkpointing
from rlhf_core.engines.distributed import Rank
from rlhf_core.errors import ConfigError, GateFailed
from rlhf_core.models.batching import TokenBatch
from rlhf_core.models.scoring import load_ensemble, member_folder
from rlhf_core.stages import reward
from rlhf_core.stages.gates import check_gate
from rlhf_core.stages.reward import Member, train_members
from rlhf_core.stages.training import Folders
from rlhf_core.system.heartbeat import Monitor, current_activity, register, unregister
from rlhf_core.testing import RecordingMetrics, RecordingProgress, stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.trainer import ScriptedTrainer, scripted_trainers, single_rank
from rlhf_core.types import PairExample, StageContext
from tests.support.tiny_llama import save_tiny_llama
from tests.support.two_ranks import as_rank_one

STEPS, MEMBERS = 4, 3
ENSEMBLE = EnsembleConfig(members=MEMBERS, combine="mean")


class Killed(Exception):
    pass


def train(out: Path, kill: tuple[int, int] | None, number: int, context: StageContext | None) -> Member:
    """Make `STEPS` steps with a checkpoint after every second one. `kill` is a member and a step; a negative
    step is that of a stop request.
    """
    assert context is not None
    engine = ScriptedTrainer()
    state = checkpointing.restore(engine, context) or {"step": 0}
    for step in range(state["step"] + 1, STEPS + 1):
        engine.steps_done += 1
        context.metrics.log_metrics({"train/loss": number + step / 10}, step)
        context.progress("reward", step, STEPS, "steps")
        if kill == (number, step):
            raise Killed
        context.stop.requested = kill == (number, -step)
        checkpointing.after_step(engine, context, context.scratch, step, every=2, total=STEPS, state={})
    assert engine.steps_done == STEPS
    folder = member_folder(out / "model", number)
    folder.mkdir(parents=True)
    (folder / "weights").write_text(f"member {number}")
    if kill == (number, STEPS + 1):
        raise Killed
    # The second pair is right for all members, and the first one for the first of them only.
    right = 1.0 - number / 4
    metrics = {"accuracy": right, "accuracy_low": right - 0.2, "accuracy_high": 1.0}
    return Member(metrics, [0.0, float(number) - 0.5, 2.0, 1.0])


def run(folder: Path, kill: tuple[int, int] | None = None, limit: float = 0.0) -> tuple[Any, StageContext]:
    context = stage_context(folder)
    config = config_from_tree({"reward": {"min_accuracy": limit}}, "test")
    with single_rank():
        metrics = train_members(
            ENSEMBLE,
            partial(train, context.output, kill),
            partial(check_gate, config, "reward"),
            held_out=PAIRS[:2],
            steps=STEPS,
            start_seconds=1.0,
            out=context.output,
            work=context.scratch,
            context=context,
        )
    return metrics, context


def files(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def empty(folder: Path) -> None:
    """The next attempt has a new work folder."""
    for name in ("output", "scratch"):
        (folder / name).rename(folder / f"{name}-{len(list(folder.iterdir()))}")


def test_a_stage_that_ends_after_any_step_continues_to_the_same_result(tmp_path: Path) -> None:
    wanted, context = run(tmp_path / "whole")
    assert set(files(context.output)) == {
        "model/ensemble.json", "model/weights", "model/member-1/weights", "model/member-2/weights",
    }  # fmt: skip
    assert load_ensemble(context.output / "model") == ENSEMBLE
    for member in range(MEMBERS):
        for step in range(1, STEPS + 2):
            folder = tmp_path / f"{member}-{step}"
            with pytest.raises(Killed):
                run(folder, (member, step))
            empty(folder)
            metrics, again = run(folder)
            assert (metrics, files(again.output)) == (wanted, files(context.output)), (member, step)
            assert isinstance(again.metrics, RecordingMetrics)
            # It continues from the last checkpoint: every second step of a member, and each member's end.
            first = STEPS * member + (step - 1) // 2 * 2 if step <= STEPS else STEPS * member + 2
            trained = [row for row in again.metrics.rows if any(name.endswith("loss") for name in row[1])]
            assert len(trained) == STEPS * MEMBERS - first


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_stage_that_is_asked_to_stop_loses_no_step(step: int, tmp_path: Path) -> None:
    wanted, context = run(tmp_path / "whole")
    for member in range(MEMBERS):
        folder = tmp_path / f"{member}"
        with pytest.raises(SystemExit):
            run(folder, (member, -step))
        empty(folder)
        metrics, again = run(folder)
        assert (metrics, files(again.output)) == (wanted, files(context.output)), member
        assert isinstance(again.metrics, RecordingMetrics)
        trained = [row for row in again.metrics.rows if any(name.endswith("loss") for name in row[1])]
        assert len(trained) == STEPS * MEMBERS - STEPS * member - step


def test_other_ranks_begin_with_the_member_of_rank_zero(tmp_path: Path) -> None:
    """Rank 0, a process of its own, continues in the second member."""
    with pytest.raises(Killed):
        run(tmp_path, (1, 3))
    empty(tmp_path)
    out, heartbeats = tmp_path / "output", tmp_path / "heartbeats"
    heartbeats.mkdir()

    def train_on_rank_zero(number: int, _context: StageContext | None) -> Member:
        deadline = time.monotonic() + 30
        while number + 1 < MEMBERS and not other_waits(number):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        folder = member_folder(out / "model", number)
        folder.mkdir(parents=True)
        (folder / "weights").write_text(f"member {number}")
        metrics = {"accuracy": 1.0, "accuracy_low": 0.6, "accuracy_high": 1.0}
        return Member(metrics, [0.0, 1.0, 2.0, 1.0])

    def other_waits(number: int) -> bool:
        """Whether rank 1 has trained this member and waits to begin the next."""
        if not (tmp_path / f"trained-{number}").exists():
            return False
        [other] = Monitor(heartbeats).local()
        return (other.activity, other.stall_after) == ("wait for rank 0", math.inf)

    trained = []

    def train_here(number: int, context: StageContext | None) -> Member:
        assert context is None and current_activity() == f"load reward model {number}"
        trained.append((number, (member_folder(out / "model", number - 1) / "weights").exists()))
        (tmp_path / f"trained-{number}").touch()
        return Member({}, [])

    def train_all(
        train_one: Callable[[int, StageContext | None], Member], context: StageContext | None
    ) -> Any:
        return train_members(
            ENSEMBLE,
            train_one,
            lambda metrics: None if context is not None else pytest.fail("only rank 0 knows all metrics"),
            held_out=PAIRS[:2],
            steps=STEPS,
            start_seconds=1.0,
            out=out,
            work=tmp_path / "scratch",
            context=context,
        )

    with as_rank_one(lambda: train_all(train_on_rank_zero, stage_context(tmp_path))):
        # Not before the fork: rank 0 would write to the same file.
        register(heartbeats, "rank 1", 600.0)
        try:
            metrics = train_all(train_here, None)
        finally:
            unregister()
    assert (trained, metrics) == ([(1, True), (2, True)], {}), (
        "not before rank 0 has the files of the last one"
    )
    assert (out / "model" / "member-2" / "weights").read_text() == "member 2"


@pytest.mark.parametrize("links", [True, False])
def test_checkpoint_has_the_files_of_finished_members(
    links: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not links:
        request.getfixturevalue("no_hard_links")
    with pytest.raises(Killed):
        run(tmp_path, (2, 3))
    saved = sorted(tmp_path.glob("checkpoints/step-*/members/output/model"))
    assert [folder.parents[2].name for folder in saved] == [f"step-{step:08d}" for step in (5, 7, 10, 12)]
    for folder in saved:
        assert (folder / "weights").samefile(tmp_path / "output/model/weights") is links
    assert (saved[-1] / "member-1/weights").read_text() == "member 1"


def test_metrics_and_progress_of_members(tmp_path: Path) -> None:
    metrics, context = run(tmp_path)
    assert {name: metrics[name] for name in ("accuracy", "member_1/accuracy", "member_2/accuracy")} == {
        "accuracy": 1.0, "member_1/accuracy": 0.75, "member_2/accuracy": 0.5,
    }  # fmt: skip
    # Means 0 and 0.5 of the first pair, 2 and 1 of the second.
    assert metrics["ensemble/accuracy"] == 0.5
    # One of two pairs is right: (0.5 + 0.9604 +- 1.96 sqrt(0.125 + 0.2401)) / 2.9208
    assert metrics["ensemble/accuracy_low"] == pytest.approx(0.0945, abs=1e-4)
    assert metrics["ensemble/accuracy_high"] == pytest.approx(0.9055, abs=1e-4)
    assert metrics["ensemble/std"] == pytest.approx(math.sqrt(2 / 3) / 4)
    assert isinstance(context.metrics, RecordingMetrics) and isinstance(context.progress, RecordingProgress)
    assert context.metrics.column("train/loss") == [0.1, 0.2, 0.3, 0.4]
    assert context.metrics.column("member_2/train/loss") == [2.1, 2.2, 2.3, 2.4]
    assert context.metrics.last["eval/ensemble/accuracy"] == 0.5
    assert [report[1:3] for report in context.progress.reports] == [(n, 12) for n in range(1, 13)]


def test_a_member_below_the_limit_ends_the_stage_before_the_next_is_trained(tmp_path: Path) -> None:
    message = r"accuracy of member 1 0\.750 \[0\.550, 1\.000\] is below reward\.min_accuracy=0\.8"
    for _attempt in range(2):
        with pytest.raises(GateFailed, match=message):
            run(tmp_path, limit=0.8)
        assert not (tmp_path / "output" / "model" / "member-2").exists()
        empty(tmp_path)
    assert run(tmp_path, limit=0.0)[0]["member_2/accuracy"] == 0.5


PAIRS = [PairExample(f"p{i}", "", (1, 2, 3), (5 + i, 7), (9, 11 + i)) for i in range(6)]


class Noting(ScriptedTrainer):
    """Notes the tokens of its micro-batches in training."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[Any] = []

    @override
    def __call__(self, batch: TokenBatch, at: str) -> Any:
        if torch.is_grad_enabled():
            self.seen.append(batch.input_ids_BL.tolist())
        return super().__call__(batch, at)


def test_first_member_is_the_model_of_a_run_without_ensemble(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "sft" / "model")
    data = write_data_artifact(tmp_path / "data", pairs=PAIRS, eval_pairs=PAIRS)
    outputs = {}
    orders = []
    for name, ensemble in (("plain", None), ("ensemble", {"members": 3})):
        section = {"ensemble": ensemble, "min_accuracy": 0.0, "batch_size": 1, "epochs": 1}
        config = config_from_tree({"run": {"device": "cpu"}, "reward": section}, "test")
        inputs = {"data": data, "sft": tmp_path / "sft"}
        context = stage_context(tmp_path / name, inputs=inputs)
        with single_rank(), scripted_trainers(Noting) as trainers:
            reward._train(Rank(), config, Folders.of(context), "reward", context)
        assert isinstance(context.progress, RecordingProgress)
        assert {report[0] for report in context.progress.reports} == {"reward"}
        orders += [trainer.seen for trainer in trainers if isinstance(trainer, Noting)]
        outputs[name] = context.output
    # The order of the pairs is that of the seed.
    plain_order, *of_members = orders
    assert len(plain_order) == len(PAIRS) and of_members[0] == plain_order
    assert of_members[1] != plain_order != of_members[2] != of_members[1]
    plain = {path.name: path.read_bytes() for path in (outputs["plain"] / "model").iterdir()}
    members = outputs["ensemble"] / "model"
    assert plain == {name: (members / name).read_bytes() for name in plain}
    heads, bodies = [], []
    for number in range(3):
        weights = _weights(member_folder(members, number))
        heads.append(weights.pop("score.weight").tolist())
        bodies.append({name: tensor.tolist() for name, tensor in weights.items()})
    assert bodies[0] == bodies[1] == bodies[2]
    assert heads[0] != heads[1] != heads[2] != heads[0]
    statistics = [
        json.loads((member_folder(members, n) / "score_statistics.json").read_text()) for n in range(3)
    ]
    assert statistics[0] != statistics[1], "each member is normalised by its own scores"
    assert (outputs["ensemble"] / "member-2" / "examination.json").is_file()


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return weights


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"ensemble": {}, "enabled": False},
            r"reward\.ensemble trains reward models, but reward\.enabled is",
        ),
        ({"ensemble": {"members": 1}}, r"reward\.ensemble\.members"),
        ({"ensemble": {"members": 9}}, r"reward\.ensemble\.members"),
        ({"ensemble": {"combine": "median"}}, r"reward\.ensemble\.combine"),
        ({"ensemble": {"penalty": -1.0}}, r"reward\.ensemble\.penalty"),
    ],
)
def test_settings_that_make_no_sense_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_tree({"reward": section}, "test")
