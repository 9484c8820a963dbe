"""`rlhf rescore` on small records, without PPO.

- the gold reward of recorded responses is that of the run, bit for bit, and is an annotation of the artifact
- a reward model reads the recorded tokens; one with another tokenizer the text
- a command that was killed continues after its last step, with the same rows in the end
- steps and prompts can be chosen; a file without weights, sections that are not rewards, steps that were not
  recorded, and columns that are no rewards are errors
- the answers of an evaluation to held-out prompts are scored as well, and compared by model
- a range of steps can be longer than the run
- ranks with ties are (r - 0.5) / n
- the step at which two rewards part, rank correlations over all responses and within prompts, and the largest
  disagreements, on numbers that are worked out by hand
- the command prints the tables and writes them as HTML and JSON
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import rankdata

from rlhf_cli.main import main
from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import RecordConfig
from rlhf_core.data.tokenizer import load_decoder, train_tokenizer
from rlhf_core.errors import ConfigError, InputError, RewardError
from rlhf_core.ops.finished_run import FinishedRun, find_run
from rlhf_core.ops.rescore import compare, parting_step, rescore, verdict
from rlhf_core.record.annotations import annotations_of
from rlhf_core.record.reader import read_rollouts
from rlhf_core.record.schema import schema_of
from rlhf_core.record.writer import AnswerRecord, RecordWriter
from rlhf_core.rewards.compose import reward_input
from rlhf_core.rewards.rules import gold
from rlhf_core.run.local_context import stage_context
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.types import PromptExample, RewardInput
from tests.support.known_models import save_last_token_scorer
from tests.support.match_models import PROMPTS

RESPONSES = ["The fox is kind and warm.", "It is dull.", "A cat sings on the roof of the barn!", "gentle"]
TOKENIZER = train_tokenizer([*PROMPTS, *RESPONSES], 400)
STEPS, GROUPS = 3, 2


def prompt(number: int) -> PromptExample:
    text = PROMPTS[number]
    return PromptExample(f"p{number}", text, tuple(TOKENIZER.encode(text)), source="ab"[number % 2])


def ids(text: str) -> list[int]:
    return [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]


def recorded(data: Path, folder: Path) -> Path:
    """Record two responses to each of two prompts in each step, with the gold reward."""
    schema = schema_of("rewards", ["gold"])
    record = RecordWriter(folder / "parts", "ppo", RecordConfig(level="rewards"))
    decode = load_decoder(data).response
    for step in range(1, STEPS + 1):
        rows = []
        for index in range(2 * GROUPS):
            asked, tokens = prompt((step + index // 2) % 3), ids(RESPONSES[(step + index) % 4])
            value = gold(reward_input(asked, tokens, index % 3 != 0, decode(tokens)))
            row = {"kind": "ppo", "step": step, "index": index, "group": index // 2}
            row |= {"prompt_id": asked.prompt_id, "prompt_ids": asked.input_ids, "response_ids": tokens}
            rows.append(row | {"finished": index % 3 != 0, "reward/gold": value, "total": float(index)})
        table = [{name: row.get(name) for name in schema.names} for row in rows]
        record.add(step, pa.Table.from_pylist(table, schema))
    record.save(folder)
    for part in (folder / "parts").iterdir():
        part.unlink()
    (folder / "parts").rmdir()
    return folder


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Undo what the command sets for the libraries of its process."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def run(tmp_path: Path) -> FinishedRun:
    home = tmp_path / "home"
    config = PipelineConfig.model_validate({"run": {"home": str(home), "name": "small"}})
    store = ArtifactStore(Store(config.store_url), home / "cache")
    made = Provenance(config=config.model_dump(mode="json", by_alias=True))
    data = write_data_artifact(
        tmp_path / "data",
        prompts=[prompt(number) for number in range(3)],
        eval_prompts=[prompt(number) for number in (3, 4)],
        tokenizer=TOKENIZER,
    )
    ppo = recorded(data, tmp_path / "ppo")
    reward = tmp_path / "reward"
    save_last_token_scorer(reward / "model", {TOKENIZER.eos_token_id: 1.5}, len(TOKENIZER))
    TOKENIZER.save_pretrained(reward / "model")
    stages = {}
    for stage, folder in (("data", data), ("reward", reward), ("ppo", ppo)):
        ref = store.publish(stage, "c" * 16, folder, made)  # type: ignore[arg-type] # a stage name
        stages[stage] = {"artifact": ref.uri}
    file = home / "runs/small/summary.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"run": "small", "stages": stages}))
    return find_run("small", str(home))


def test_a_copied_home_has_its_own_artifacts(run: FinishedRun, tmp_path: Path) -> None:
    copy = shutil.copytree(run.home.path, tmp_path / "copy")
    for _ in range(2):
        artifacts, _ref = find_run("small", str(copy)).artifact("ppo")
        assert artifacts.store.url == str(copy / "store")
        shutil.rmtree(run.home.path, ignore_errors=True)  # with the original, and without


def written(folder: Path, text: str, name: str = "new.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def annotation(run: FinishedRun, name: str = "new") -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = pq.read_table(annotations_of(*run.artifact("ppo"))[name]).to_pydict()
    return columns


def test_the_gold_reward_is_that_of_the_run_bit_for_bit(run: FinishedRun, tmp_path: Path) -> None:
    done = rescore(run, written(tmp_path, "rewards: [{type: gold}]"), against="reward/gold")
    found = annotation(run)
    assert list(found) == ["kind", "step", "index", "score", "reward/gold"]
    wanted = read_rollouts(run.recorded("ppo"), ["step", "index", "reward/gold"]).to_pydict()
    assert (found["step"], found["index"]) == (wanted["step"], wanted["index"])
    assert np.array(found["score"]).tobytes() == np.array(wanted["reward/gold"]).tobytes()
    assert len(set(found["score"])) > 3  # they differ, so that the order of rows matters
    assert (done.failed, done.comparison.count, done.comparison.parted) == (0, STEPS * 2 * GROUPS, None)
    assert done.comparison.overall == pytest.approx(1.0)
    assert not list((run.file.parent / "rescore").iterdir())


def test_a_secret_in_a_response_is_scored_and_not_shown(
    run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "rewards: [{type: length, target: 2, tolerance: 2}]")
    before, scores = rescore(run, file), annotation(run)["score"]
    assert any("kind and warm" in row["text"] for row in before.comparison.disagreements)
    monkeypatch.setenv("MY_TOKEN", "kind and warm")
    texts = [row["text"] for row in rescore(run, file).comparison.disagreements]
    assert any("The fox is (hidden)." in text for text in texts)
    assert not any("kind and warm" in text for text in texts)
    assert annotation(run)["score"] == scores


def test_a_reward_model_reads_the_tokens_and_one_with_another_tokenizer_the_text(
    run: FinishedRun, tmp_path: Path
) -> None:
    file = written(tmp_path, "rewards: [{type: model}]")
    rescore(run, file)
    # The models like EOS. All recorded responses have it, also those that are not finished.
    assert all(score > 1 for score in annotation(run)["score"])
    other = train_tokenizer([*RESPONSES, *PROMPTS, "zebra quartz"], 300)
    folder = save_last_token_scorer(tmp_path / "other", {other.eos_token_id: 1.5}, len(other))
    other.save_pretrained(folder)
    rescore(run, file, model=str(folder))
    finished = [index % 3 != 0 for index in annotation(run)["index"]]
    assert [score > 1 for score in annotation(run)["score"]] == finished


def test_a_killed_command_continues_after_its_last_step(run: FinishedRun, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        f"calls, fails = Path({str(tmp_path / 'calls')!r}), Path({str(tmp_path / 'fails')!r})\n"
        "def score(samples):\n"
        "    with calls.open('a') as file:\n        file.write('x')\n"
        "    if fails.exists() and len(calls.read_text()) > 2:\n        raise ValueError('killed')\n"
        "    return [float(len(s.response)) + len(s.prompt_ids) / 7 for s in samples]\n"
    )
    file = written(tmp_path, code, "words.py")
    (tmp_path / "fails").touch()
    with pytest.raises(RewardError, match="killed"):
        rescore(run, file)
    (tmp_path / "fails").unlink()
    (tmp_path / "calls").unlink()
    rescore(run, file)
    assert (tmp_path / "calls").read_text() == "x"  # the last of three steps
    resumed = annotation(run, "words")
    rescore(run, file)
    assert (tmp_path / "calls").read_text() == "xxxx"  # all steps: what was finished is not kept
    assert annotation(run, "words") == resumed


def test_steps_and_prompts_are_chosen(run: FinishedRun, tmp_path: Path) -> None:
    file = written(tmp_path, "rewards: [{type: length, target: 9, tolerance: 9}, {type: gold, weight: 0}]")
    rescore(run, file, steps=[2, 3], limit=1, name="some")
    found = annotation(run, "some")
    assert (found["step"], found["index"]) == ([2, 2, 3, 3], [0, 1, 0, 1])
    assert found["score"] == found["reward/length"] and "reward/gold" in found
    with pytest.raises(InputError, match="none of these steps"):
        rescore(run, file, steps=[9])


def test_a_range_of_steps_can_be_longer_than_the_run(
    run: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, "rewards: [{type: gold}]")
    command = ["rescore", "small", "--home", str(run.home.path), "--rewards", file]
    assert main([*command, "--steps", "2:1000000000000"]) == 0  # more than a list could have
    assert set(annotation(run)["step"]) == {2, 3}


def test_the_answers_of_an_evaluation_are_scored_by_model(
    run: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = stage_context(tmp_path / "stage")
    answers = AnswerRecord("evaluation", RecordConfig(), seed=lambda _: 7)
    held_out = [prompt(number) for number in (3, 4)]
    for score, model in enumerate(("sft", "dpo")):
        tokens = tuple(ids(RESPONSES[score]))
        rows = [RewardInput(p.prompt_id, p.prompt, "", p.input_ids, tokens, True) for p in held_out]
        answers.add(model, held_out, rows, "held-out")
        answers.note("score", rows, [score, score + 1])
    further = [RewardInput("r0", "", "", (1,), tuple(ids("gentle")), True)]
    answers.add("dpo", [PromptExample("r0", "", (1,))], further, "a regression set")
    answers.save(context)
    config = PipelineConfig.model_validate({"run": {"home": str(run.home.path)}})
    made = Provenance(config=config.model_dump(mode="json", by_alias=True))
    store = ArtifactStore(Store(config.store_url), tmp_path / "cache")
    summary = json.loads(run.file.read_text())
    ref = store.publish("evaluate", "c" * 16, context.output, made)
    summary["stages"]["evaluate"] = {"artifact": ref.uri}
    del summary["stages"]["ppo"]
    run.file.write_text(json.dumps(summary))

    file = written(tmp_path, "rewards: [{type: gold}]")
    command = ["rescore", "small", "--home", str(run.home.path), "--rewards", file, "--kind", "evaluation"]
    assert main([*command, "--output", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    by_model = {row["name"]: row for row in found["parts"] if row["by"] == "model"}
    assert (found["against"], found["count"]) == ("score", 4), "without the regression set"
    assert (by_model["sft"]["old"], by_model["dpo"]["old"]) == (0.5, 1.5)
    decode = load_decoder(run.artifact("data")[0].fetch(run.artifact("data")[1])).response
    for score, model in enumerate(("sft", "dpo")):
        answer = ids(RESPONSES[score])
        values = [gold(reward_input(each, answer, True, decode(answer))) for each in held_out]
        assert by_model[model]["new"] == pytest.approx(sum(values) / 2)
    printed = capsys.readouterr().out
    assert "rank correlation" in printed and "they do not part" not in printed
    written_rows = annotations_of(*find_run("small", str(run.home.path)).artifact("evaluate"))["new"]
    assert pq.read_table(written_rows, columns=["kind"])["kind"].to_pylist() == ["evaluation"] * 4
    assert main([*command, "--steps", "1:2"]) == 2


def test_ranks_with_ties_are_those_of_inspect() -> None:
    old, new = [1.0, 1.0, 2.0, 3.0, 3.0, 3.0], [4.0, 2.0, 2.0, 1.0, 0.0, 0.0]
    names, numbers = [f"p{number}" for number in range(6)], list(range(6))
    rows = {"step": [1] * 6, "index": numbers}
    record = pa.table({**rows, "group": numbers, "prompt_id": names, "total": old})
    scores = pa.table({**rows, "score": new, "length": [3] * 6})
    prompts = {name: PromptExample(name, "", (1,)) for name in names}
    found = compare(record, scores, "total", prompts, lambda places: [""] * len(places))
    ranks = {row["index"]: (row["old_rank"], row["new_rank"]) for row in found.disagreements}
    expected = [(rankdata(values) - 0.5) / 6 for values in (old, new)]
    pairs = list(zip(*expected, strict=True))
    assert len(ranks) >= 5
    assert ranks == {index: pytest.approx(pairs[index]) for index in ranks}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rewards: [{type: gold, weight: 0}]", "all sources have the weight 0"),
        ("rewards: [{type: golden}]", r"new.yaml:1: ppo\.rewards\.0"),
        ("ppo: {steps: 3}", "must have the section `rewards` and no other one; got ppo"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    run: FinishedRun, tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises((ConfigError, InputError), match=problem):
        rescore(run, written(tmp_path, text))


@pytest.mark.parametrize("column", ["step", "prompt_id", "response_ids", "weights"])
def test_a_column_without_rewards_is_refused_before_anything_is_scored(
    run: FinishedRun, tmp_path: Path, column: str
) -> None:
    with pytest.raises(InputError, match=f"--against: must be a column of rewards.* got {column}"):
        rescore(run, written(tmp_path, "rewards: [{type: gold}]"), against=column)
    assert not (run.file.parent / "rescore").exists()


def test_they_part_where_the_new_one_stays_lower_while_the_old_one_rises() -> None:
    old, new = [0, 1, 2, 3, 4, 5], [0.0, 1.0, 0.9, 0.4, 0.5, 0.2]
    steps = [
        {"step": 10 * i, "old": a, "new": b, "new_error": 0.1}
        for i, (a, b) in enumerate(zip(old, new, strict=True))
    ]
    # Two standard errors of the difference are 2 * sqrt(0.1**2 + 0.1**2) = 0.283: 0.9 is no fall from 1.0.
    assert parting_step(steps) == 30
    assert parting_step(steps[:3]) is None and parting_step([]) is None
    steps[5]["old"] = 0.5  # the old one has fallen as well
    assert parting_step(steps) is None


def test_ranks_are_compared_over_all_responses_and_within_prompts() -> None:
    old = [1.0, 2.0, 3.0, 4.0, 5.0, 5.0, math.nan]
    new = [2.0, 1.0, 3.0, 4.0, 9.0, 8.0, 0.0]
    groups, ids_of = [0, 0, 0, 1, 2, 2, 3], ["p0", "p0", "p0", "p1", "p2", "p2", "p0"]
    places = {"step": [1] * 7, "index": list(range(7))}
    asked: list[tuple[int, int]] = []

    def texts(wanted: Sequence[tuple[int, int]]) -> list[str]:
        asked.extend(wanted)
        return ["text"] * len(wanted)

    found = compare(
        pa.table({**places, "group": groups, "prompt_id": ids_of, "total": old}),
        pa.table({**places, "score": new, "length": [4, 8, 8, 8, 9, 9, 9]}),
        "total",
        {each.prompt_id: each for each in map(prompt, range(3))},
        texts,
    )
    # Ranks 1 2 3 4 5.5 5.5 and 2 1 3 4 6 5: the sum of products is 16, the squares are 17 and 17.5.
    assert found.count == 6 and found.overall == pytest.approx(16 / math.sqrt(17 * 17.5))
    # Within group 0 the ranks are 1 2 3 and 2 1 3: 0.5. Group 1 has one response, group 2 equal old rewards.
    assert found.within_prompts == pytest.approx(0.5) and found.prompts == 1
    # Ranks as shares: 2/6 and 1/6 for index 1. Index 0 is the opposite, of the same prompt. Index 4 and 5
    # have 5.5/6, and 1 and 5/6.
    ranked = [(row["index"], row["old_rank"] > row["new_rank"]) for row in found.disagreements]
    assert ranked == [(1, True), (5, True), (0, False), (4, False)]
    assert asked == [(1, 1), (1, 5), (1, 0), (1, 4)]
    by = [(part["by"], part["name"], part["count"]) for part in found.parts]
    assert by[-2:] == [("source", "a", 5), ("source", "b", 1)]
    assert [count for kind, _, count in by if kind == "length"] == [2, 1, 2, 1]


def test_the_command_prints_and_writes_the_comparison(
    run: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, file = str(run.home.path), written(tmp_path, "rewards: [{type: gold}]", "true reward.yaml")
    options = ["rescore", "small", "--rewards", file, "--home", home, "--steps", "1:2"]
    assert main(options) == 2
    assert "the name of an annotation" in capsys.readouterr().err
    for ending in ("html", "json"):
        output = tmp_path / f"out.{ending}"
        assert main([*options, "--name", "gold", "--output", str(output)]) == 0
        printed = capsys.readouterr().out
        assert "rank correlation" in printed and "annotations-" in printed
    page = (tmp_path / "out.html").read_text()
    assert "<h1>rank correlation: " in page and "The largest disagreements" in page
    assert "default-src 'none'" in page and "<script" not in page and 'class="left"' in page
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["count"] == 8 and len(content["steps"]) == 2
    assert main([*options, "--output", "out.txt"]) == 2
    assert main([*options[:-1], "1-2"]) == 2


def test_a_constant_reward_ranks_nothing() -> None:
    rows = {"step": [1, 1, 2, 2], "index": [0, 1, 0, 1]}
    old = pa.table({**rows, "group": [0, 1, 0, 1], "prompt_id": ["a", "b"] * 2, "total": [0.0] * 4})
    new = pa.table({**rows, "score": [1.0, 2.0, 3.0, 4.0], "length": [1, 2, 3, 4]})
    asked = {name: prompt(0) for name in ("a", "b")}
    found = compare(old, new, "total", asked, lambda keys: ["text"] * len(keys))
    assert verdict(found) == "nothing to rank: total or the new reward is the same for all 4 responses"
