"""`rlhf plan` counts the rows that each stage trains on, and their steps and minutes.

- a set of which all rows were read has the counts of the stage `data`; of a larger one, the share of its
  first rows that is kept is that of all
- the judge trains on its own part of the pairs, an ensemble several times on all
- a run takes from the time of rows of median length to that of full length, and in both cases also its
  evaluations and the starts of its processes
- what the stage `data` would end with ends the plan
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rlhf_core.config.data import Source
from rlhf_core.config.load import load_config
from rlhf_core.errors import DataError
from rlhf_core.ops.plan import rows
from rlhf_core.ops.plan.plan import as_json, make_plan
from rlhf_core.ops.plan.rows import count_rows, stage_work
from tests.support.demo_data import config_with_demo_data

pytestmark = pytest.mark.usefixtures("nothing_is_searched")

ROWS = [
    {"prompt": f"Name bird {number}.", "chosen": f"A robin {number}.", "rejected": "Bird bird."}
    for number in range(60)
]


def config_of(folder: Path, **sections: Any) -> str:
    """Write the rows and a configuration that reads them as all three sets, with a model from scratch."""
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {name: [{"path": str(pairs)}] for name in ("sft", "preference", "prompts")}
    file = folder / "my.yaml"
    file.write_text(yaml.safe_dump({"run": {"home": str(folder / "home")}, "data": data, **sections}))
    return str(file)


def test_each_stage_trains_on_the_rows_that_the_stage_data_keeps(tmp_path: Path) -> None:
    config = config_of(tmp_path, sft={"batch_size": 8, "epochs": 2}, ppo={"steps": 7, "prompts_per_step": 8})
    plan = make_plan(config, rows=1000)
    assert plan.table is not None
    counts = plan.table.card["counts"]
    work = {each.stage: each for each in plan.work}
    assert work["sft"].rows == counts["sft"]["train"] > 40
    assert work["sft"].steps == 2 * -(-work["sft"].rows // 8)
    assert work["sft"].seconds == pytest.approx(work["sft"].steps * plan.steps["sft"])
    assert work["reward"].rows == counts["preference"]["train"]
    assert (work["ppo"].rows, work["ppo"].steps) == (counts["prompts"]["train"], 7)
    assert plan.config.limits.response == plan.table.card["limits"]["response"], "measured, not estimated"
    printed = json.loads(as_json(plan))
    assert printed["work"][0]["rows"] == work["sft"].rows
    assert printed["rows"]["sft"]["read"] == 60


def test_rows_that_were_not_read_are_kept_like_the_first_ones(tmp_path: Path) -> None:
    plan = make_plan(config_of(tmp_path), rows=20)
    assert plan.table is not None
    counts = plan.table.card["counts"]["sft"]
    assert counts["read"] == 20 and 15 < counts["train"] < 20
    assert {each.stage: each.rows for each in plan.work}["sft"] == 3 * counts["train"]


def test_a_weight_counts_for_all_rows_of_its_source_and_not_only_for_the_first_ones(tmp_path: Path) -> None:
    for name, count in (("many", 2000), ("few", 100)):
        rows_ = [{"prompt": f"{name} {at}?", "completion": f"It is {at}."} for at in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_))
    config = config_of(tmp_path)
    tree = yaml.safe_load(Path(config).read_text())
    many = {"path": str(tmp_path / "many.jsonl"), "weight": 0.05}
    tree["data"] |= {"sft": [many, {"path": str(tmp_path / "few.jsonl")}], "max_eval": 10}
    Path(config).write_text(yaml.safe_dump(tree))
    [planned, whole] = [
        next(each.rows for each in make_plan(config, rows=rows_).work if each.stage == "sft")
        for rows_ in (100, 5000)
    ]
    assert planned == pytest.approx(whole, rel=0.1) and 160 < whole < 200


def test_rows_of_another_split_and_of_another_subset_are_not_counted(tmp_path: Path) -> None:
    for name, count in (("a", 60), ("b", 500)):
        (tmp_path / "set" / name).mkdir(parents=True)
        with (tmp_path / "set" / name / "rows.jsonl").open("w") as file:
            for i in range(count):
                split = {"prompt": f"{i}?", "split": "train" if i < 40 else "test"}
                file.write(json.dumps({**ROWS[i % 60], **split}) + "\n")
    source = {"path": str(tmp_path / "set"), "subset": "a", "only_split": True}
    sources = {name: [source] for name in ("sft", "preference", "prompts")}
    plan = make_plan(config_of(tmp_path, data=sources), rows=1000)
    assert plan.table is not None and plan.table.card["counts"]["sft"]["read"] == 40
    assert {each.stage: each.rows for each in plan.work}["sft"] == plan.table.card["counts"]["sft"]["train"]


def test_the_judge_trains_on_its_part_of_the_pairs_and_an_ensemble_several_times(tmp_path: Path) -> None:
    judge = {"fraction": 0.25, "epochs": 1}
    path = config_of(tmp_path, reward={"ensemble": {"members": 3}, "batch_size": 8, "judge": judge})
    plan = make_plan(path, rows=1000)
    work = {each.stage: each for each in plan.work}
    assert plan.table is not None
    pairs = plan.table.card["counts"]["preference"]["train"]
    assert work["judge"].rows == round(pairs / 4) and work["reward"].rows == round(pairs * 3 / 4)
    assert work["reward"].steps == 3 * -(-work["reward"].rows // 8)
    assert work["judge"].steps == -(-work["judge"].rows // 8), "it is one model"
    halved = stage_work(plan.config, plan.table, dict.fromkeys(plan.steps, 0.5))
    assert halved[0].seconds == halved[0].steps / 2


def test_the_time_of_a_run_has_its_starts_and_evaluations_and_a_range_by_length(tmp_path: Path) -> None:
    ppo = {"steps": 7, "prompts_per_step": 8, "evaluate_every": 2, "evaluate_prompts": 16}
    sections = {"ppo": ppo, "data": {"max_response_tokens": 150}, "evaluate": {"prompts": 16}}
    path = config_of(tmp_path)
    tree = yaml.safe_load(Path(path).read_text())
    tree["data"] |= sections.pop("data")
    Path(path).write_text(yaml.safe_dump(tree | sections))
    plan = make_plan(path, rows=1000)
    least, most = plan.whole
    assert 16 + plan.evaluations < least < most
    for work in plan.work:
        assert 0 < work.at_median < work.seconds / 2, "rows are much shorter than the limits"
    assert most == pytest.approx(sum(work.seconds for work in plan.work) + plan.evaluations + 80)

    # One evaluation before the training, four within it, and two models after it: seven times 16 responses.
    without = make_plan(path, ["ppo.evaluate_every=0"], rows=1000)
    assert plan.evaluations == pytest.approx(without.evaluations / 2 * 7, rel=0.25)
    alone = make_plan(path, ["ppo.enabled=false", "dpo.enabled=true", "register.policy=dpo"], rows=1000)
    assert list(plan.starts) == [16, 80], "six stages, and the ranks and engines of PPO"
    assert list(alone.starts) == [6, 30], "DPO starts no others"
    # Two models again, and no evaluation of PPO.
    assert alone.evaluations == pytest.approx(without.evaluations)
    answers = make_plan(path, ["ppo.evaluate_every=0", "evaluate.answers_per_prompt=4"], rows=1000)
    assert answers.evaluations == pytest.approx(4 * without.evaluations, rel=0.25)


def test_rows_without_texts_do_not_take_the_time_of_texts(tmp_path: Path) -> None:
    path = config_of(tmp_path)
    plans = [make_plan(path, [f"data.max_text_tokens={limit}"], rows=1000) for limit in (50, 250)]
    short, long = ({work.stage: work.seconds for work in plan.work} for plan in plans)
    assert plans[1].steps["sft"] > 2 * plans[0].steps["sft"], "a batch could have longer texts"
    assert long["sft"] == pytest.approx(short["sft"], rel=0.2)


def test_what_ends_the_stage_data_ends_the_plan(tmp_path: Path) -> None:
    path = config_of(tmp_path)
    (tmp_path / "pairs.jsonl").write_text('{"question": "What?"}\n' * 20)
    with pytest.raises(DataError, match=r"data.sft\[0\]: 20 of 20 rows"):
        make_plan(path, rows=1000)


def test_rows_are_counted_in_every_kind_of_file(tmp_path: Path) -> None:
    lines = b'{"prompt": "a"}\n\n{"prompt": "b"}\n{"prompt": "c"}'
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.json").write_text('[{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]')
    (tmp_path / "d.csv").write_text("prompt\na\nb\nc\n")
    pq.write_table(pa.table({"prompt": ["a", "b", "c"]}), tmp_path / "e.parquet")
    config = config_with_demo_data({}, "test")
    for file in sorted(tmp_path.iterdir()):
        assert count_rows(config, "prompts", Source(path=str(file))) == 3, file.name
    assert count_rows(config, "prompts", Source(path=str(tmp_path))) == 15
    assert count_rows(config, "prompts", Source(path=str(tmp_path), limit=4)) == 4
    assert count_rows(config, "sft", Source(path="synthetic")) == config.data.synthetic.sft_examples


def test_rows_beyond_those_that_are_counted_are_taken_to_be_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_COUNTED_LINES", 10)
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a"}\n' * 70)
    assert count_rows(config_with_demo_data({}, "test"), "prompts", Source(path=str(file))) == 70


def test_every_shipped_configuration_can_be_asked_whether_its_rows_are_here() -> None:
    from rlhf_core.ops.plan.rows import why_unread
    from tests.support.planned_models import CONFIGS

    assert why_unread(load_config(CONFIGS / "demo.yaml")) is None
    assert "is not on this machine" in str(why_unread(load_config(CONFIGS / "production.yaml")))
