"""`rlhf compare`.

- what differs is named with its values: settings, data, code, packages, machine; what is equal is left out
- differences of results are paired by prompt, with the interval of the evaluation, on all answers of the
  record or, without one, on the kept samples
- scores of other reward models are not compared
- the first difference of the steps of PPO is named
- MLflow's page is named only if one server has both runs
- the page of the comparison has no scripts, and names are escaped
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from rlhf_cli import main as cli
from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import RecordConfig
from rlhf_core.data.dataset import write
from rlhf_core.errors import InputError
from rlhf_core.evaluation.statistics import bootstrap_mean, difference_of_means
from rlhf_core.ops.compare import Comparison, compare, render, tables
from rlhf_core.record.schema import REWARD, schema_of
from rlhf_core.record.writer import AnswerRecord, RecordWriter
from rlhf_core.seeds import derive_seed
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store
from rlhf_core.testing import stage_context
from rlhf_core.types import PromptExample, RewardInput

INTERVAL = {"mean": 0.9, "low": 0.8, "high": 1.0}
PROMPTS = tuple(f"p{i}" for i in range(8))


@dataclass(frozen=True)
class Made:
    """A run to be made. Scores, curves and responses differ only if they are given."""

    name: str
    gold: Sequence[float] = (1.0, 2.0, 3.0, 4.0)
    """Scores of the policy's answers to the first prompts, as samples."""
    overrides: dict[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    reward_model: str = "1" * 64
    recorded: Sequence[float] = ()
    """Gold rewards of all answers in the record of the evaluation."""
    scores: Sequence[float] = (0.1, 0.2, 0.3)
    responses: Sequence[int] = (5, 6, 7)
    prompt: str = "p0"
    prompts: Sequence[str] = PROMPTS
    """The held-out ones."""
    gold_curve: bool = False
    server: str = "http://127.0.0.1:5000"


def make(home: Path, run: Made) -> None:
    """Publish the artifacts of a run, and write the files of its folder."""
    config = PipelineConfig.model_validate({"run": {"home": str(home), "name": run.name}})
    store = ArtifactStore(Store(config.store_url), home / "cache")
    tree = config.model_dump(mode="json", by_alias=True)
    key = run.name.encode().hex().rjust(16, "0")
    data, evaluate, ppo = (home / "out" / name for name in ("data", "evaluate", "ppo"))
    for folder in (data, evaluate, ppo):
        folder.mkdir(parents=True)
    # The last two prompts are related.
    groups = [*run.prompts[:-2], "related", "related"]
    examples = [PromptExample(p, p, (1,), group=g) for p, g in zip(run.prompts, groups, strict=True)]
    write(data, "prompts", "eval", examples)
    evaluation = {
        "prompts": len(run.prompts),
        "judge_digests": {"gold": "synthetic-3", "reward_model": run.reward_model, "rules": "3" * 64},
    }
    (evaluate / "evaluation.json").write_text(json.dumps(evaluation))
    lines = []
    for prompt, gold in zip(run.prompts, run.gold, strict=False):
        scores = {model: {"gold": gold, "reward_model": gold} for model in ("sft", "ppo")}
        lines.append(json.dumps({"prompt_id": prompt, "scores": scores}) + "\n")
    (evaluate / "samples.jsonl").write_text("".join(lines))
    if run.recorded:
        record_evaluation(evaluate, examples, run.recorded)
    curve = [
        {"step": step, "objective/scores": score, "objective/kl": 0.5, "rollout/length": 20.0}
        for step, score in enumerate(run.scores, start=1)
    ]
    for metrics in curve if run.gold_curve else ():
        metrics["rewards/gold/mean"] = -float(metrics["step"])
    (ppo / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve))
    writer = RecordWriter(ppo / "parts", "ppo", RecordConfig())
    for step, (score, response) in enumerate(zip(run.scores, run.responses, strict=True), start=1):
        row = {"step": step, "index": 0, "prompt_id": run.prompt, "response_ids": [response], "score": score}
        writer.add(step, pa.Table.from_pylist([row], schema_of("rewards", ())))
    writer.save(ppo)
    stages = {}
    for stage, folder in (("data", data), ("ppo", ppo), ("evaluate", evaluate)):
        ref = store.publish(stage, key, folder, Provenance(config=tree))  # type: ignore[arg-type]
        stages[stage] = {"artifact": ref.uri, "metrics": {}}
    stages["data"]["metrics"] = {"data/sft_train": 10.0 * len(run.name)}
    folder = home / "runs" / run.name
    folder.mkdir(parents=True)
    summary = {
        "run": run.name,
        "stages": stages,
        "policy": "ppo",
        "evaluate": {
            "policies": {"ppo": {"win_rate": INTERVAL, "kl": 0.5}},
            "gold_reward": {"ppo": INTERVAL, "sft": INTERVAL},
            "reward_model": {"ppo": INTERVAL, "sft": INTERVAL},
        },
        "mlflow_run_id": f"id-{run.name}",
        "tracking_uri": run.server,
        "where": {"MLflow": f"{run.server}/#/experiments/7/runs/id-{run.name}?x"},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"sft": {"epochs": 3, "batch_size": 8} | run.overrides})
    )
    decided_by = {"schema.ppo": 20, "device": "cpu"} | {f"sources.{n}": v for n, v in run.sources.items()}
    (folder / "run.json").write_text(json.dumps({"state": "finished", "decided_by": decided_by}))


def record_evaluation(folder: Path, prompts: Sequence[PromptExample], gold: Sequence[float]) -> None:
    """Record answers as the stage does: two of each model to each held-out prompt, whose means are `gold` and
    the value of a rule, and one to a prompt of a regression set.
    """
    context = stage_context(folder / "stage")
    record = AnswerRecord("evaluation", RecordConfig(), seed=lambda _: 0)
    further = PromptExample("r0", "r0", (1,))
    for model in ("sft", "ppo"):
        answers = [RewardInput(p.prompt_id, p.prompt, "", (1,), (2,), True) for p in (*prompts, *prompts)]
        record.add(model, prompts, answers, "held-out")
        values = [-9.0] * len(answers)
        if model == "ppo":
            values = [value + add for add in (-0.5, 0.5) for value in gold]
        for measure in ("gold", "length"):
            record.note(f"{REWARD}{measure}", answers, values)
        [other] = answers_to_set = [RewardInput("r0", "r0", "", (1,), (2,), True)]
        record.add(model, [further], answers_to_set, "regressions")
        record.note("score", [other], [7.0])
    record.save(context)
    shutil.move(context.output / "record", folder / "record")
    shutil.rmtree(folder / "stage")


def compared(home: Path, *runs: Made) -> Comparison:
    for run in runs:
        make(home, run)
    return compare([run.name for run in runs], str(home))


FIRST = Made("one")


def differing(found: Comparison, kind: str) -> dict[str, tuple[Any, ...]]:
    return {row.what: row.values for row in found.differing.get(kind, ())}


def test_only_what_differs_is_named_with_its_values(tmp_path: Path) -> None:
    other = replace(FIRST, name="other", overrides={"epochs": 4}, sources={"data.sft[0]": "a" * 64})
    found = compared(tmp_path, FIRST, other)
    assert differing(found, "configuration") == {"sft.epochs": (3, 4)}
    assert differing(found, "data") == {
        "content of data.sft[0]": (None, "a" * 64), "sft_train": (30.0, 50.0),
    }  # fmt: skip
    assert set(found.differing) == {"configuration", "data"}, "code and versions are equal"


def test_other_code_and_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, FIRST)
    versions = {"code": "0123456789ab", "torch": "9.9", "gpu_driver": "1"}
    monkeypatch.setattr("rlhf_core.storage.artifacts.versions", lambda: versions)
    make(tmp_path, replace(FIRST, name="other"))
    found = compare(["one", "other"], str(tmp_path))
    versions_then = differing(found, "versions")
    assert versions_then["torch"][1] == "9.9" and versions_then["gpu_driver"] == (None, "1")
    assert differing(found, "code")["digest (code)"][1] == "0123456789ab"


def result(found: Comparison, what: str) -> Any:
    [row] = [row for row in found.results if row.what == what]
    return row


def test_differences_are_paired_by_prompt_with_the_interval_of_the_evaluation(tmp_path: Path) -> None:
    gold = [1.5, 2.75, 3.5, 5.0]
    found = compared(tmp_path, FIRST, replace(FIRST, name="other", gold=gold))
    [paired] = result(found, "gold_reward").differences
    expected = bootstrap_mean(
        [0.5, 0.75, 0.5, 1.0],
        resamples=PipelineConfig().evaluate.bootstrap,
        confidence=0.95,
        seed=derive_seed(0, "evaluate", "bootstrap", "gold"),
        groups=PROMPTS[:4],
    )
    assert paired == {**expected.to_json(), "prompts": 4} and expected.mean == 0.6875
    assert found.verdict.startswith("other is better at gold_reward than one: +0.688 [+0.5")
    assert "on 4 prompts" in found.verdict


def test_all_answers_of_the_record_are_paired_and_related_prompts_count_once(tmp_path: Path) -> None:
    first = replace(FIRST, recorded=[0.0] * 8)
    second = replace(FIRST, name="other", recorded=[0.0, 1.0] * 3 + [2.0, 2.0])
    found = compared(tmp_path, first, second)
    [paired] = result(found, "gold_reward").differences
    expected = bootstrap_mean(
        [0.0, 1.0] * 3 + [2.0, 2.0],
        resamples=PipelineConfig().evaluate.bootstrap,
        confidence=0.95,
        seed=derive_seed(0, "evaluate", "bootstrap", "gold"),
        groups=[*PROMPTS[:-2], "related", "related"],
    )
    assert paired == {**expected.to_json(), "prompts": 8}
    [of_rule] = result(found, "rules/length").differences
    assert of_rule["mean"] == paired["mean"] and of_rule["prompts"] == 8


def test_a_difference_that_the_prompts_do_not_show_is_none(tmp_path: Path) -> None:
    found = compared(tmp_path, FIRST, replace(FIRST, name="other", gold=[2.0, 1.0, 4.0, 3.0]))
    assert found.verdict.startswith("no difference in gold_reward between other and one")


def test_the_better_run_is_named_if_it_is_the_first(tmp_path: Path) -> None:
    found = compared(tmp_path, FIRST, replace(FIRST, name="other", gold=[0.0, 1.0, 2.0, 3.0]))
    assert found.verdict.startswith("one is better at gold_reward than other: -1.000 [-1.000, -1.000]")


def test_runs_with_mostly_other_prompts_have_an_unpaired_interval(tmp_path: Path) -> None:
    gold = [2.0, 3.0, 4.0, 6.0, 3.0, 4.0, 2.0, 1.0]
    # Three of eight prompts are common, which is less than half.
    others = (*PROMPTS[:3], *(f"other{number}" for number in range(5)))
    second = replace(FIRST, name="other", recorded=gold, prompts=others)
    found = compared(tmp_path, replace(FIRST, recorded=[1.0, 2.0] * 4), second)
    [difference] = result(found, "gold_reward").differences
    intervals = []
    for values, prompts in ((gold, others), ([1.0, 2.0] * 4, PROMPTS)):
        mean = bootstrap_mean(
            values,
            resamples=PipelineConfig().evaluate.bootstrap,
            confidence=0.95,
            seed=derive_seed(0, "evaluate", "bootstrap", "gold"),
            groups=[*prompts[:-2], "related", "related"],
        )
        intervals.append(mean)
    expected = difference_of_means(*intervals)
    assert difference == {**expected.to_json(), "prompts": 8, "other_prompts": 8}
    assert difference["mean"] == pytest.approx(3.125 - 1.5)
    assert "on 8 and 8 other prompts" in found.verdict
    *_, note = tables(found)["Results"]
    assert "one seed of each says nothing about the noise of training" in note


def test_the_gold_curve_is_shown_if_all_runs_have_one(tmp_path: Path) -> None:
    found = compared(tmp_path, replace(FIRST, gold_curve=True), replace(FIRST, name="o", gold_curve=True))
    assert found.curves[1][1]["gold"] == (-2.0, -2.0)
    assert "gold" in render(found).partition("Steps of PPO")[2]
    make(tmp_path, replace(FIRST, name="without"))
    assert "gold" not in compare(["one", "without"], str(tmp_path)).curves[1][1]


def test_scores_of_another_reward_model_are_not_compared(tmp_path: Path) -> None:
    found = compared(tmp_path, FIRST, replace(FIRST, name="other", reward_model="2" * 64))
    assert result(found, "reward_model").differences == (None,)
    assert result(found, "gold_reward").differences != (None,)
    assert result(found, "reward_model").values[1]["mean"] == 0.9, "each has its own interval"


@pytest.mark.parametrize(
    ("other", "parted"),
    [
        ({}, "no difference"),
        ({"scores": (0.1, 0.2, 0.4)}, "the first difference is in step 3, score: score of response 0"),
        (
            {"scores": (0.1, 0.4, 0.4), "responses": (5, 8, 9)},
            "the first difference is in step 2, token: response_ids of response 0, position 0: 6 and 8",
        ),
        (
            {"scores": (0.2, 0.4, 0.4), "prompt": "p1"},
            "the first difference is in step 1, prompt: prompt_id of response 0: 'p0' and 'p1'",
        ),
    ],
)
def test_the_first_difference_of_ppo_is_named(tmp_path: Path, other: dict[str, Any], parted: str) -> None:
    found = compared(tmp_path, FIRST, replace(FIRST, name="other", **other)).parted
    assert found.startswith(f"steps 1 to 3 of one and other: {parted}")


def test_curves_are_those_of_common_steps(tmp_path: Path) -> None:
    longer = replace(FIRST, name="other", scores=[0.2] * 40, responses=[1] * 40)
    first = replace(FIRST, scores=[0.1] * 21, responses=[1] * 21)
    found = compared(tmp_path, first, longer)
    steps = [step for step, _ in found.curves]
    assert steps[0] == 1 and steps[-1] == 21 and len(steps) == 10
    assert found.curves[0][1] == {"score": (0.1, 0.2), "KL": (0.5, 0.5), "length": (20.0, 20.0)}


def test_a_step_without_a_score_is_shown_as_such_and_is_no_difference(tmp_path: Path) -> None:
    first = replace(FIRST, scores=(0.1, math.nan, 0.3))
    found = compared(tmp_path, first, replace(first, name="other"))
    assert found.parted == "steps 1 to 3 of one and other: no difference"
    assert found.curves[1][1]["score"] == (None, None) and tables(found)["PPO"][1][1][1] == "-"
    json.dumps(found.to_json(), allow_nan=False)


def test_mlflows_page_is_named_if_one_server_has_all_runs(tmp_path: Path) -> None:
    found = compared(tmp_path, FIRST, replace(FIRST, name="other"))
    lists = "runs=%5B%22id-one%22%2C%22id-other%22%5D&experiments=%5B%227%22%5D"
    assert found.mlflow == f"http://127.0.0.1:5000/#/compare-runs?{lists}"
    make(tmp_path, replace(FIRST, name="far", server="http://127.0.0.1:6000"))
    assert compare(["one", "far"], str(tmp_path)).mlflow == ""


def test_three_runs_are_compared_with_the_first(tmp_path: Path) -> None:
    others = [replace(FIRST, name=name, gold=[2.0, 3.0, 4.0, 5.0]) for name in ("two", "three")]
    found = compared(tmp_path, FIRST, *others)
    assert [each["mean"] for each in result(found, "gold_reward").differences] == [1.0, 1.0]
    headings, *_ = tables(found)["Results"]
    assert headings == ["measure", "A", "B", "C", "B - A", "C - A"]


def test_one_run_cannot_be_compared(tmp_path: Path) -> None:
    make(tmp_path, FIRST)
    with pytest.raises(InputError, match="needs at least two runs; got 1"):
        compare(["one"], str(tmp_path))


def test_the_page_has_no_scripts_and_escapes_what_it_shows(tmp_path: Path) -> None:
    found = compared(tmp_path, FIRST, replace(FIRST, name="other", overrides={"epochs": "<script>"}))
    page = render(found)
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "<svg" in page and "default-src 'none'" in page
    assert page.index("What differs") < page.index("Results") < page.index("PPO</h2>")


def test_the_command_prints_the_verdict_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for run in (FIRST, replace(FIRST, name="other", gold=[2.0, 3.0, 4.0, 5.0])):
        make(tmp_path, run)
    page = tmp_path / "page.html"
    assert cli.main(["compare", "one", "other", "--home", str(tmp_path), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("other is better at gold_reward than one")
    assert "of the 8 held-out prompts of A" in out and "+1.000 [+1.000, +1.000] on 4" in out
    assert page.is_file()
    assert cli.main(["compare", "one", "other", "--home", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == ["one", "other"]
    assert found["results"][0]["differences"] == [{"mean": 1.0, "low": 1.0, "high": 1.0, "prompts": 4}]
