"""The stage `benchmark` without lm-evaluation-harness. An integration test runs the harness.

- without the section nothing of it is imported, and no key has it
- the policy is that of `register.policy`, with its adapter if it has one, in the precision that it is served
  in; the chat template is used if the policy was trained with one
- paths of the tasks start at their folder
- an unknown task is refused, with the nearest names
- a missing package or folder, and a Ray cluster, are found before a run that comes to the stage
- a new version, or a file that changes, is another key, and ends a stage that has begun; without reading the
  files, those that were written again are noticed
- a metric that is not finite is left out
- a group with a metric stands for its tasks
- a question with a wrong answer by every filter is kept, once
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import is_enabled, stage_inputs, stage_key
from rlhf_core.data.answers import gold_answers
from rlhf_core.data.prompt_sets import read_sets
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.preflight import check
from rlhf_core.run.external_inputs import external_digests, external_marks
from rlhf_core.stages import benchmark
from rlhf_core.stages.benchmark import FINDINGS, benchmark_digests, check_benchmark
from rlhf_core.testing import stage_context
from rlhf_core.types import ArtifactRef, StageContext


def config_of(settings: dict[str, Any] | None = None, **sections: Any) -> PipelineConfig:
    tree = {"run": {"device": "cpu"}, "benchmark": {"tasks": ["sums"], **(settings or {})}}
    return PipelineConfig.model_validate_json(json.dumps(tree | sections))


@dataclass
class Task:
    """A task as the harness has it."""

    output_type: str = "generate_until"

    def get_config(self, key: str) -> Any:
        return getattr(self, key)

    def doc_to_text(self, doc: dict[str, str]) -> str:
        return doc["question"]


def sample(number: int, right: bool, by: str = "none") -> dict[str, Any]:
    doc = {"question": f"What is {number} plus {number}?"}
    return {
        "doc_id": number, "doc": doc, "target": str(2 * number), "filter": by,
        "metrics": ["exact_match", "length"], "exact_match": float(right), "length": 1.0,
    }  # fmt: skip


class Harness:
    """The functions of `lm_eval` that the stage calls."""

    def __init__(self) -> None:
        self.tasks: dict[str, Any] = {"sums": Task()}
        self.group_map: dict[str, list[str]] = {}
        self.results: dict[str, dict[str, Any]] = {"sums": {"alias": "sums", "exact_match,none": 0.5}}
        self.samples: dict[str, list[dict[str, Any]]] = {"sums": []}
        self.arguments: dict[str, Any] = {}
        self.folder = ""
        self.problem = ""

    task_index = property(lambda self: self.tasks)
    all_tasks = property(lambda self: sorted(self.tasks))

    def load(self, names: list[str]) -> dict[str, Any]:
        self.folder = os.getcwd()
        if self.problem:
            raise ValueError(self.problem)
        groups = {name: self.tasks[name] for name in self.group_map}
        tasks = {name: task for name, task in self.tasks.items() if name not in groups}
        return {"tasks": tasks, "groups": groups, "group_map": self.group_map}

    def simple_evaluate(self, kind: str, model: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        self.arguments = {"kind": kind, "model": model, **arguments}
        return {"results": self.results, "samples": self.samples}


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    fake = Harness()
    top, tasks = ModuleType("lm_eval"), ModuleType("lm_eval.tasks")
    top.simple_evaluate = fake.simple_evaluate  # type: ignore[attr-defined]
    tasks.TaskManager = lambda include_path: fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", top)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    monkeypatch.setattr(benchmark, "version", lambda name: "0.4.13")
    yield fake


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    inputs = {name: tmp_path / name for name in ("data", "sft", "ppo", "dpo")}
    train_tokenizer(["What is 1 plus 1?"], 300).save_pretrained(inputs["data"] / "tokenizer")
    return stage_context(tmp_path, inputs=inputs)


def test_without_the_section_there_is_no_stage_and_no_digest() -> None:
    config = PipelineConfig()
    assert not is_enabled(config, "benchmark")
    assert benchmark_digests(config) == {} and list(check_benchmark(config)) == []


def test_the_policy_is_the_registered_one(harness: Harness, context: StageContext) -> None:
    dpo: dict[str, Any] = {"dpo": {"enabled": True}, "register": {"policy": "dpo"}}
    assert stage_inputs(config_of(), "benchmark") == ("data", "sft", "ppo")
    assert stage_inputs(config_of(**dpo), "benchmark") == ("data", "sft", "dpo")
    benchmark.run(config_of(), context)
    assert harness.arguments["model"]["pretrained"] == str(context.inputs["ppo"] / "policy")
    assert "peft" not in harness.arguments["model"]
    benchmark.run(config_of(**dpo), context)
    assert harness.arguments["model"]["pretrained"] == str(context.inputs["dpo"] / "policy")


def test_an_adapter_is_loaded_beside_its_base_in_the_precision_of_the_engines(
    harness: Harness, context: StageContext
) -> None:
    (context.inputs["ppo"] / "adapter").mkdir(parents=True)
    ppo = {
        "lora": {},
        "engine": {"dtype": "bfloat16"},
        "policy_deepspeed": {"dtype": "bfloat16"},
    }
    benchmark.run(config_of(ppo=ppo), context)
    model = harness.arguments["model"]
    assert model["pretrained"] == str(context.inputs["sft"] / "model")
    assert model["peft"] == str(context.inputs["ppo"] / "adapter")
    assert model["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("template", "given", "used"),
    [("chat", None, True), ("plain", None, False), ("chat", False, False), ("plain", True, True)],
)
def test_the_chat_template_is_used_as_in_training_unless_it_is_set(
    harness: Harness, context: StageContext, template: str, given: bool | None, used: bool
) -> None:
    benchmark.run(config_of({"apply_chat_template": given}, data={"template": template}), context)
    assert harness.arguments["apply_chat_template"] is used


def test_limits_and_examples_reach_the_harness(harness: Harness, context: StageContext) -> None:
    benchmark.run(config_of({"limit": 7, "num_fewshot": 0, "batch_size": 2}), context)
    given = {name: harness.arguments[name] for name in ("limit", "num_fewshot", "batch_size", "device")}
    assert given == {"limit": 7, "num_fewshot": 0, "batch_size": 2, "device": "cpu"}


def test_paths_of_tasks_start_at_their_folder(
    harness: Harness, context: StageContext, tmp_path: Path
) -> None:
    (tmp_path / "tasks").mkdir()
    before = os.getcwd()
    benchmark.run(config_of({"folder": str(tmp_path / "tasks")}), context)
    assert harness.folder == str(tmp_path / "tasks")
    assert os.getcwd() == before


def test_an_unknown_task_is_refused_with_the_nearest_names(harness: Harness, context: StageContext) -> None:
    with pytest.raises(ConfigError, match=r"benchmark\.tasks: sum is no task .* use sums"):
        benchmark.run(config_of({"tasks": ["sum"]}), context)


def test_a_task_that_is_also_in_a_group_is_refused_with_the_words_of_the_harness(
    harness: Harness, context: StageContext
) -> None:
    harness.problem = "Duplicate task 'sums': found in both 'both' and 'sums'"
    with pytest.raises(ConfigError, match=r"benchmark\.tasks: .*Duplicate task 'sums'.*name each task once"):
        benchmark.run(config_of(), context)


def test_a_missing_package_and_a_missing_folder_are_found_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark, "_harness", lambda: None)
    found = [str(each) for each in check_benchmark(config_of({"folder": str(tmp_path / "none")}))]
    assert len(found) == 2
    assert "uv pip install --no-deps --require-hashes -r requirements/benchmark.txt" in found[0]
    assert found[1].startswith("benchmark.folder: must be a folder")


def test_a_cluster_is_refused_unless_the_stage_runs_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**run: Any) -> list[str]:
        return [str(each) for each in check_benchmark(config_of(run={"device": "cpu", **run}))]

    monkeypatch.setattr(benchmark, "_harness", lambda: "0.4.13")
    [message] = found(executor="slurm")
    assert "got run.executor=slurm;" in message
    assert "`rlhf run CONFIG run.executor=local --from benchmark`" in message
    assert found(executor="slurm", resources={"benchmark": {"executor": "local"}}) == found() == []
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    [message] = found()
    assert "got RAY_ADDRESS;" in message


def test_only_a_run_of_this_machine_that_comes_to_the_stage_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark, "_harness", lambda: None)
    config = config_of(run={"device": "cpu", "home": str(tmp_path)})
    with pytest.raises(ConfigError, match="needs the package lm_eval"):
        check(config)
    check(config, stages=["data", "sft"])
    check(config, this_machine=False)


def test_the_version_and_every_file_are_in_the_key_but_not_the_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def key(folder: str) -> str:
        config = config_of({"folder": str(tmp_path / folder)})
        sources = {name: value for name, value in external_digests(config).items() if "benchmark" in name}
        assert set(sources) == {"benchmark.lm_eval", "benchmark.folder"}
        return stage_key(config, "benchmark", {}, sources)

    for folder in ("one", "two"):
        (tmp_path / folder / "part").mkdir(parents=True)
        (tmp_path / folder / "part" / "items.jsonl").write_text("{}\n")
        (tmp_path / folder / "__pycache__").mkdir()
        (tmp_path / folder / "__pycache__" / "code.pyc").write_text(folder)
    monkeypatch.setattr(benchmark, "_harness", lambda: "0.4.13")
    first = key("one")
    assert key("two") == first
    monkeypatch.setattr(benchmark, "_harness", lambda: "0.4.14")
    assert key("one") != first
    monkeypatch.setattr(benchmark, "_harness", lambda: "0.4.13")
    (tmp_path / "two/part/items.jsonl").write_text("{} \n")
    assert key("two") != first


def test_a_file_that_was_written_again_has_another_mark_and_the_same_digest(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text("{}\n")
    config = config_of({"folder": str(tmp_path)})
    name = "benchmark.folder"
    mark, digest = external_marks(config)[name], external_digests(config)[name]
    assert external_marks(config)[name] == mark
    os.utime(tmp_path / "items.jsonl", ns=(1, 1))
    assert external_marks(config)[name] != mark and external_digests(config)[name] == digest


def test_a_stage_whose_tasks_have_changed_ends(harness: Harness, context: StageContext) -> None:
    changed = stage_context(
        context.output.parent, inputs=context.inputs, sources={"benchmark.lm_eval": "0.4.12"}
    )
    with pytest.raises(DataError, match=r"benchmark\.lm_eval was changed after the run began"):
        benchmark.run(config_of(), changed)


def test_a_group_with_a_metric_stands_for_its_tasks(harness: Harness, context: StageContext) -> None:
    harness.tasks = {name: Task("multiple_choice") for name in ("one", "two", "both", "other", "plain")}
    harness.group_map = {"both": ["one", "two"], "plain": ["other"]}
    harness.results = {
        "both": {"acc,none": 0.25, "acc_stderr,none": 0.01, "sample_len": 8},
        "one": {"acc,none": 0.5, "acc_stderr,none": "N/A"},
        "two": {"acc,none": 0.0},
        "plain": {"alias": "plain"},
        "other": {"exact_match,strict": 1.0},
    }
    result = benchmark.run(config_of({"tasks": ["both", "plain"]}), context)
    assert harness.arguments["tasks"] == [harness.tasks["both"], harness.tasks["plain"]]
    assert result.metrics == {"both/acc": 0.25, "both/acc_stderr": 0.01, "other/exact_match/strict": 1.0}
    logged = context.metrics.last  # type: ignore[attr-defined]
    assert logged["benchmark/one/acc"] == 0.5 and "benchmark/one/acc_stderr" not in logged
    written = json.loads((context.output / "benchmark.json").read_text())
    assert written["metrics"][0] == {
        "task": "both", "metric": "acc", "value": 0.25, "standard_error": 0.01, "items": 8
    }  # fmt: skip
    assert [row["task"] for row in written["metrics"]] == ["both", "one", "two", "other"]

    ref = ArtifactRef("benchmark", "0" * 16, "", "", metrics=result.metrics)
    found = FINDINGS.read(ref)
    assert found == {
        "both/acc": {"value": 0.25, "standard_error": 0.01},
        "other/exact_match/strict": {"value": 1.0, "standard_error": None},
    }
    assert [value for _, value in FINDINGS.rows(found)] == ["0.250, standard error 0.010", "1.000"]


def test_what_is_not_finite_is_left_out_with_a_warning(
    harness: Harness, context: StageContext, caplog: pytest.LogCaptureFixture
) -> None:
    nan = float("nan")
    harness.results = {
        "sums": {"acc,none": 0.5, "acc_stderr,none": nan, "loss,none": nan, "word_perplexity,none": math.inf}
    }
    assert benchmark.run(config_of(), context).metrics == {"sums/acc": 0.5}
    assert "loss of sums is nan" in caplog.text and "word_perplexity of sums is inf" in caplog.text
    [row] = json.loads((context.output / "benchmark.json").read_text())["metrics"]
    assert (row["value"], row["standard_error"]) == (0.5, None)


def test_spellings_of_an_answer_stay_a_list_that_a_regression_set_reads(
    harness: Harness, context: StageContext
) -> None:
    harness.samples = {"sums": [sample(1, False) | {"target": ["two", 2]}, sample(2, False) | {"target": 4}]}
    benchmark.run(config_of(), context)
    failed = context.output / "failed.jsonl"
    assert [json.loads(line)["answer"] for line in failed.read_text().splitlines()] == [["two", "2"], "4"]
    regression = {"name": "failed", "path": str(failed), "reward": {"type": "answer"}}
    config = PipelineConfig.model_validate_json(json.dumps({"evaluate": {"regression": [regression]}}))
    prompts = read_sets(config, context.inputs["data"])["failed"]
    assert [gold_answers(prompt.meta["answer"]) for prompt in prompts] == [("two", "2"), ("4",)]


def test_a_question_that_every_filter_finds_wrong_is_kept_once(
    harness: Harness, context: StageContext
) -> None:
    harness.tasks["likely"] = Task("multiple_choice")
    harness.samples = {
        "sums": [
            *(sample(number, right, "strict") for number, right in ((1, False), (2, False), (3, True))),
            *(sample(number, right, "loose") for number, right in ((1, False), (2, True), (3, True))),
        ],
        "likely": [sample(4, False)],
    }
    result = benchmark.run(config_of(), context)
    rows = [json.loads(line) for line in (context.output / "failed.jsonl").read_text().splitlines()]
    assert rows == [{"prompt": "What is 1 plus 1?", "answer": "2", "task": "sums"}]
    assert result.attributes == {"failed": 1}
