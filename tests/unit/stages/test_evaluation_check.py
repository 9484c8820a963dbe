"""What the evaluation cannot use ends the run before anything is trained.

- rows of regression sets: the preflight reads all rows of local files, and the data stage encodes them
- of a large regression set, the preflight reads only the beginning
- a judge at an address is asked about the held-out pairs, and the evaluation asks nothing again; one that
  agrees too little is refused, and one that cannot be reached yet is a warning
- questions to a local judge must fit its context
- a judge that labels the answers of the stage `sample` is checked in the same way
- a stage with another executor than the evaluation checks nothing: its host can have other files
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import DataError, GateFailed, InputError, ModelError
from rlhf_core.evaluation.language_model import LanguageModelJudge
from rlhf_core.preflight import check
from rlhf_core.stages.data import run
from rlhf_core.testing import stage_context
from tests.support.chat_server import ChatServer, prefer_first, prefer_longer
from tests.support.demo_data import LIMITS

PAIRS = [
    {"prompt": f"What is {i}?", "chosen": f"It is the number {i}.", "rejected": f"No {i}."} for i in range(80)
]
GOOD = [{"prompt": f"What is {i} plus {i}?", "answer": str(2 * i)} for i in range(300)]


def written(path: Path, rows: list[Any]) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def config_of(folder: Path, evaluate: dict[str, Any], **run_settings: Any) -> PipelineConfig:
    source = [{"path": written(folder / "pairs.jsonl", PAIRS)}]
    tree = {
        "run": {"home": str(folder / "home"), "device": "cpu", **run_settings},
        "data": {"sft": source, "preference": source, "prompts": source, "eval_fraction": 0.5, **LIMITS},
        "evaluate": {"bootstrap": 200, **evaluate},
    }
    return PipelineConfig.model_validate_json(json.dumps(tree))


def with_set(folder: Path, row: Any, reward: str = "answer") -> PipelineConfig:
    """The last of 301 rows cannot be used."""
    rows = written(folder / "sums.jsonl", [*GOOD, row])
    return config_of(folder, {"regression": [{"name": "sums", "path": rows, "reward": {"type": reward}}]})


BAD_ROWS: dict[str, tuple[Any, str, str]] = {
    "no JSON": ('{"prompt": ', "answer", r"sums.jsonl:301: "),
    "no prompt": ({"answer": "1"}, "answer", r"sums.jsonl:301: "),
    "no answer": (
        {"prompt": "What is it?"},
        "answer",
        r"reward: type answer needs the field 'answer' in every prompt row; 1 of 301 have none",
    ),
    "of another task": (
        {"prompt": "What is it?"},
        "gold",
        r"reward: type gold is the true reward of the demo's task, which has no prompt 'What is 0 plus 0\?'",
    ),
}


@pytest.mark.parametrize(("row", "reward", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_the_preflight_reads_all_rows_of_a_regression_set(
    row: Any, reward: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"evaluate\.regression\.0.*" + message):
        check(with_set(tmp_path, row, reward))


def test_the_preflight_leaves_the_rows_of_a_large_regression_set_to_the_data_stage(tmp_path: Path) -> None:
    config = with_set(tmp_path, "no JSON")
    with (tmp_path / "sums.jsonl").open("ab") as file:
        file.truncate(32 * 2**20)
    warnings = [warning for warning in check(config) if "regression" in warning]
    assert len(warnings) == 1
    assert "sums.jsonl has 32 MiB. With more than 16 MiB the rows are not checked now" in warnings[0]


def test_usable_rows_pass(tmp_path: Path) -> None:
    config = with_set(tmp_path, GOOD[0])
    assert not [warning for warning in check(config) if "regression" in warning]
    run(config, stage_context(tmp_path))


def test_the_data_stage_encodes_all_rows_of_a_regression_set(tmp_path: Path) -> None:
    config = with_set(tmp_path, {"prompt": "word " * 500, "answer": "1"})
    assert check(config) is not None, "this needs the tokenizer"
    with pytest.raises(
        DataError, match=r"regression\[0\]: .*sums.jsonl:301: prompt longer than data.max_pro"
    ):
        run(config, stage_context(tmp_path))


def test_another_executor_can_have_other_files(tmp_path: Path) -> None:
    rows = written(tmp_path / "sums.jsonl", [{"prompt": "word " * 500, "answer": "1"}])
    regression = [{"name": "sums", "path": rows, "reward": {"type": "answer"}}]
    resources = {"evaluate": {"executor": "slurm"}}
    run(config_of(tmp_path, {"regression": regression}, resources=resources), stage_context(tmp_path))


def judged(folder: Path, url: str, **settings: Any) -> PipelineConfig:
    judge = {"url": url, "model": "judge-1", "retries": 0} | settings
    return config_of(folder, {"language_model": judge})


def test_a_judge_at_an_address_is_asked_once(tmp_path: Path) -> None:
    with ChatServer(prefer_longer) as server:
        config = judged(tmp_path, server.url)
        context = stage_context(tmp_path)
        run(config, context)
        asked = len(server.requests)
        assert asked >= 60
        evaluation = replace(context, inputs={"data": context.output})
        found = LanguageModelJudge(config, evaluation, "cpu").measure_agreement()
        assert len(server.requests) == asked and found["language_model/agreement/mean"] == 1.0


def test_a_judge_that_agrees_too_little_is_refused_before_the_training(tmp_path: Path) -> None:
    with ChatServer(prefer_first) as server, pytest.raises(GateFailed, match=r"agrees with 0\.500 \["):
        run(judged(tmp_path, server.url), stage_context(tmp_path))


def labelling(config: PipelineConfig, **executors: str) -> PipelineConfig:
    """`config` with a stage `sample` that the language model labels, and the executors of stages."""
    tree = config.model_dump(mode="json", by_alias=True)
    tree["sample"] = {"judge": "language_model"}
    for stage, executor in executors.items():
        tree["run"]["resources"][stage] = {"executor": executor}
    return PipelineConfig.model_validate_json(json.dumps(tree))


def test_a_judge_that_labels_answers_is_refused_before_the_training(tmp_path: Path) -> None:
    with ChatServer(prefer_first) as server:
        config = labelling(judged(tmp_path, server.url), evaluate="slurm")
        with pytest.raises(GateFailed, match=r"^sample: .* agrees with 0\.500 \["):
            run(config, stage_context(tmp_path / "here"))
        asked = len(server.requests)
        run(
            labelling(judged(tmp_path, server.url), evaluate="slurm", sample="slurm"), stage_context(tmp_path)
        )
        assert len(server.requests) == asked, "both stages run on other hosts"


def test_a_judge_that_cannot_be_reached_yet_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run(judged(tmp_path, "http://127.0.0.1:9/v1"), stage_context(tmp_path))
    assert "the judge cannot be asked yet (evaluate.language_model: http://127.0.0.1:9/v1/" in caplog.text


@pytest.mark.parametrize(("context_length", "fits"), [(4096, True), (128, False)])
def test_questions_to_a_local_judge_fit_its_context(context_length: int, fits: bool, tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    train_tokenizer(["ABC Answer which is longer"], 300).save_pretrained(judge)
    (judge / "config.json").write_text(json.dumps({"max_position_embeddings": context_length}))
    config = config_of(tmp_path, {"language_model": {"path": str(judge)}})
    if fits:
        run(config, stage_context(tmp_path))
        return
    with pytest.raises(ModelError, match=r"language_model\.path: the longest question has \d+ tokens"):
        run(config, stage_context(tmp_path))


def test_questions_about_training_prompts_fit_the_context_of_a_judge_that_labels(tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    train_tokenizer(["ABC Answer which is longer"], 300).save_pretrained(judge)
    (judge / "config.json").write_text(json.dumps({"max_position_embeddings": 450}))
    config = config_of(tmp_path, {"language_model": {"path": str(judge)}})
    # Which rows are held out depends on the prompt only: this one is for training. Its words are frequent, so
    # that they are few tokens of the policy, and many of the judge.
    row = {"prompt": "What is the number?" * 12, "chosen": "a", "rejected": "b"}
    written(tmp_path / "pairs.jsonl", [*PAIRS, row])
    run(config, stage_context(tmp_path / "judges"))
    with pytest.raises(ModelError, match=r"language_model\.path: the longest question has \d+ tokens"):
        run(labelling(config), stage_context(tmp_path / "labels"))


def test_a_judge_needs_held_out_pairs(tmp_path: Path) -> None:
    config = judged(tmp_path, "http://127.0.0.1:9/v1")
    data = config.data.model_copy(update={"preference": (), "eval_fraction": 0.5})
    with pytest.raises(DataError, match="with held-out pairs that people labelled; got 0"):
        run(config.model_copy(update={"data": data}), stage_context(tmp_path))
