"""`rlhf blame` of regression sets and of stages without a record.

- the items that a policy lost are ranked by their share, with both answers; items that it won are left out
- the rows of a step are those that the training takes, by its seed, also in later epochs
- a set that does not exist, a step after the last one, one that an early stop left out, and contradicting
  options are refused
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.main import main
from rlhf_core.config import PipelineConfig, redact
from rlhf_core.config.pipeline import RecordConfig
from rlhf_core.data.dataset import write
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import InputError
from rlhf_core.ops.blame import lost_items, trained_rows
from rlhf_core.ops.finished_run import FinishedRun, find_run
from rlhf_core.pipeline import StageName
from rlhf_core.record.writer import AnswerRecord
from rlhf_core.run.local_context import stage_context
from rlhf_core.seeds import derive_seed, epoch_batch
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.types import PairExample, PromptExample, RewardInput, SFTExample

WORDS = ["dog", "cat", "fox", "bear", "frog", "duck", "lion"]
TOKENIZER = train_tokenizer(WORDS * 3, 300)
SEED, BATCH = 5, 3


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.fixture
def run(tmp_path: Path) -> FinishedRun:
    """A run with seven rows, batches of three and two epochs, and a regression set of four items."""
    return _run(tmp_path)


def _run(tmp_path: Path, metrics: Mapping[str, float] | None = None, **sft: Any) -> FinishedRun:
    settings = {"batch_size": BATCH, "epochs": 2}
    tree = {"run": {"home": str(tmp_path), "seed": SEED}, "sft": settings | sft, "reward": settings}
    config = PipelineConfig.model_validate(tree)
    made = Provenance(config=config.model_dump(mode="json", by_alias=True), metrics=metrics or {})
    data = write_data_artifact(
        tmp_path / "data",
        sft=[SFTExample(ids(word), (1,) * len(ids(word)), "chats") for word in WORDS],
        pairs=[PairExample(word, word, ids(word), ids("cat"), ids("dog"), "people") for word in WORDS],
        tokenizer=TOKENIZER,
    )
    context = stage_context(tmp_path / "stage")
    prompts = [PromptExample(word, f"about a {word}", ids(word)) for word in WORDS[:4]]
    record = AnswerRecord("evaluation", RecordConfig(), seed=lambda _: 0)
    for model, scores in {"sft": [1.0, 1.0, 1.0, 0.0], "ppo": [0.25, 1.0, 0.0, 1.0]}.items():
        tokens = ids("cat" if model == "sft" else "dog")
        answers = [RewardInput(p.prompt_id, p.prompt, "", p.input_ids, tokens, True) for p in prompts]
        record.add(model, prompts, answers, "animals")
        record.note("score", answers, scores)
    record.save(context)
    folder = context.output / "regression" / "animals"
    folder.mkdir(parents=True)
    write(folder, "prompts", "eval", prompts)
    store = ArtifactStore(Store(config.store_url), tmp_path / "cache")
    for name in ("sft", "reward"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    folders: dict[StageName, Path] = {
        "data": data, "evaluate": context.output, "sft": tmp_path / "sft", "reward": tmp_path / "reward",
    }  # fmt: skip
    stages = {
        stage: {"artifact": store.publish(stage, "c" * 16, at, made).uri} for stage, at in folders.items()
    }
    file = tmp_path / "runs" / "small" / "summary.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"run": "small", "policy": "ppo", "stages": stages}))
    return find_run("small", str(tmp_path))


def test_lost_items_are_ranked_by_their_share(run: FinishedRun, capsys: pytest.CaptureFixture[str]) -> None:
    items, count = lost_items(run, "animals")
    assert count == 4
    assert [(item.prompt, item.scores) for item in items] == [
        ("about a fox", (1.0, 0.0)), ("about a dog", (1.0, 0.25)),
    ]  # fmt: skip
    assert [item.share for item in items] == pytest.approx([1 / 1.75, 0.75 / 1.75])
    assert items[0].responses == ("cat", "dog")
    command = ["blame", "small", "--home", str(run.home.path), "--regression", "animals"]
    assert main([*command, "--top", "1"]) == 0
    out = capsys.readouterr().out
    assert "lost 2 of 4 items" in out and "item 57.1% (1 -> 0): about a fox" in out and "a dog" not in out
    assert main([*command, "--step", "3"]) == 2
    with pytest.raises(InputError, match="got plants; it has animals"):
        lost_items(run, "plants")


def test_a_secret_in_a_prompt_or_row_is_not_shown(run: FinishedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = trained_rows(run, "sft", 3)
    monkeypatch.setattr(redact, "_SHORTEST_SECRET", 3)
    monkeypatch.setenv("MY_TOKEN", "about a fox")
    monkeypatch.setenv("MY_KEY", row.texts[0])
    assert lost_items(run, "animals")[0][0].prompt == "(hidden)"
    assert trained_rows(run, "sft", 3)[0].texts == ["(hidden)"]


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_the_rows_of_a_step_are_those_of_its_batch(
    run: FinishedRun, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Seven rows are three batches. Step 5 is the second batch of the second epoch.
    for step, epoch, batch in ((1, 0, 0), (3, 0, 2), (5, 1, 1)):
        expected = epoch_batch(7, BATCH, derive_seed(SEED, stage), epoch, batch)
        rows = trained_rows(run, stage, step)  # type: ignore[arg-type]
        assert [row.index for row in rows] == list(expected) and len(rows) == (1 if batch == 2 else 3)
        assert [row.texts[0] for row in rows] == [WORDS[index] for index in expected]
    assert rows[0].source == ("chats" if stage == "sft" else "people")
    with pytest.raises(InputError, match=f"a step that {stage} made, 1 to 6; got 7"):
        trained_rows(run, stage, 7)  # type: ignore[arg-type]
    command = ["blame", "small", "--home", str(run.home.path), "--stage", stage]
    assert main([*command, "--step", "1"]) == 0
    out = capsys.readouterr().out
    assert "3 rows; they are not ranked, because" in out and out.count("\nrow ") == 3
    assert ("    chosen: cat" in out) == (stage == "reward")
    assert main(command) == 2


def test_a_step_that_an_early_stop_left_out_is_refused(tmp_path: Path) -> None:
    early_stop = {"every": 2, "patience": 1}
    run = _run(tmp_path / "early", {"best_step": 2.0}, early_stop=early_stop)
    assert trained_rows(run, "sft", 4)
    with pytest.raises(InputError, match="a step that sft made, 1 to 4; got 5"):
        trained_rows(run, "sft", 5)
    # The epochs end before the patience does.
    run = _run(tmp_path / "late", {"best_step": 6.0}, early_stop=early_stop)
    assert trained_rows(run, "sft", 6)
    with pytest.raises(InputError, match="1 to 6; got 7"):
        trained_rows(run, "sft", 7)
