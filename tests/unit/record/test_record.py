"""The record of rollouts as files.

- what was written is read, also a few columns of a few steps
- a step of many tokens has several row groups
- an attempt that continues has each step once, with the parts of its checkpoint
- a second attempt in the same folders begins without what the first one left there
- from the step on that would exceed the limit nothing is recorded, also by later attempts
- a stage that has collected no answers writes no record
- a column that a part lacks is null; a missing record and a missing column are errors that name them
- docs/record.md has every column with its type and level; its example and that of the reader run
- the digest of an artifact, which is in later keys, is the same for every record, and a fetch leaves the
  record out unless it is wanted
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.config.pipeline import RecordConfig, RecordLevel
from rlhf_core.errors import CorruptArtifact, InputError
from rlhf_core.record import reader
from rlhf_core.record.reader import RECORD, read_rollouts
from rlhf_core.record.schema import ANSWER_COLUMNS, COLUMNS, REWARD_COLUMNS, schema_of
from rlhf_core.record.writer import AnswerRecord, RecordWriter
from rlhf_core.run.local_context import stage_context
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store

DOCS = Path(__file__).resolve().parents[3] / "docs/record.md"


def rows(step: int, level: RecordLevel = "logprobs") -> pa.Table:
    """Return two rollouts of a step, with tokens that follow from the step."""
    schema = schema_of(level, ["length"])
    values = {
        "kind": "ppo",
        "step": step,
        "response_ids": [step, 7],
        "rollout_logprobs": [-step / 3, -0.1],
        "score": step / 2,
        "reward/length": float("nan"),
    }
    table = [{name: values.get(name) for name in schema.names} | {"index": index} for index in range(2)]
    return pa.Table.from_pylist(table, schema)


def writer(folder: Path, **settings: object) -> RecordWriter:
    return RecordWriter(folder, "ppo", RecordConfig.model_validate(settings))


def recorded(folder: Path, *steps: int) -> Path:
    """Record these steps as one part in `folder`/record."""
    record = writer(folder / f"parts-{steps[0]}")
    for step in steps:
        record.add(step, rows(step))
    record.save(folder)
    return folder


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = recorded(tmp_path, 1, 2, 3)
    assert repr(read_rollouts(folder).to_pylist()) == repr(pa.concat_tables(map(rows, (1, 2, 3))).to_pylist())
    assert read_rollouts(folder).schema.equals(rows(1).schema)
    found = read_rollouts(folder, ["score", "response_ids"], steps=[3])
    assert found.to_pylist() == [{"score": 1.5, "response_ids": [3, 7]}] * 2
    assert read_rollouts(str(folder), ["step"], steps=[9]).num_rows == 0


def test_a_step_of_many_tokens_is_read_from_several_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_core.record.writer._GROUP_BYTES", rows(1).nbytes // 2)
    folder = recorded(tmp_path, 1, 2)
    [part] = (folder / RECORD).iterdir()
    assert pq.read_metadata(part).num_row_groups == 4, "one for each of two rows in two steps"
    assert read_rollouts(folder, ["step", "index"], steps=[2]).to_pylist() == [
        {"step": 2, "index": 0},
        {"step": 2, "index": 1},
    ]


def test_an_attempt_that_continues_has_each_step_once(tmp_path: Path) -> None:
    first = writer(tmp_path / "first")
    checkpoints = [tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"]
    for step in (1, 2, 3, 4, 5):
        first.add(step, rows(step))
        if step in (2, 4):
            first.save(checkpoints[step // 2 - 1])
    # Killed after step 5, and the newest checkpoint is damaged.
    second = writer(tmp_path / "second")
    second.restore(checkpoints[0], is_full=False)
    for step in (3, 4, 5, 6):
        second.add(step, rows(step))
    second.save(tmp_path / "output")
    assert read_rollouts(tmp_path / "output", ["step"])["step"].to_pylist() == [
        step for step in range(1, 7) for _ in range(2)
    ]
    expected = pa.concat_tables(rows(step) for step in range(1, 7)).to_pylist()
    assert repr(read_rollouts(tmp_path / "output").to_pylist()) == repr(expected)
    # Parts are links: what a checkpoint has was not written to.
    assert read_rollouts(checkpoints[1], ["step"])["step"].to_pylist()[-1] == 4


def test_an_attempt_in_the_same_folders_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    folders = tmp_path / "parts", tmp_path / "output"
    first = writer(folders[0])
    first.add(1, rows(1))
    first.save(tmp_path / "checkpoint-1")
    first.add(2, rows(2))
    first.save(folders[1])
    second = writer(folders[0])
    second.restore(tmp_path / "checkpoint-1", is_full=False)
    for step in (2, 3):
        second.add(step, rows(step))
    second.save(folders[1])
    assert read_rollouts(folders[1], ["step"])["step"].to_pylist() == [1, 1, 2, 2, 3, 3]
    assert read_rollouts(tmp_path / "checkpoint-1", ["step"])["step"].to_pylist() == [1, 1]


def test_nothing_is_recorded_beyond_the_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limit = 2 * rows(1).nbytes
    first = writer(tmp_path / "first", max_bytes=limit)
    for step in (1, 2, 3):
        first.add(step, rows(step))
    assert "step 3 and later ones are not recorded" in caplog.text and first.is_full
    first.save(tmp_path / "checkpoint")
    second = writer(tmp_path / "second", max_bytes=limit)
    second.restore(tmp_path / "checkpoint", is_full=first.is_full)
    assert second.is_full
    second.add(4, rows(4).slice(0, 0))  # nothing, which would fit
    second.add(4, rows(4))
    second.save(tmp_path / "output")
    assert read_rollouts(tmp_path / "output", ["step"])["step"].to_pylist() == [1, 1, 2, 2]


def test_an_attempt_whose_checkpoint_has_no_record_records_its_steps(tmp_path: Path) -> None:
    record = writer(tmp_path / "parts")
    record.restore(tmp_path / "checkpoint", is_full=False)
    record.add(6, rows(6))
    record.save(tmp_path)
    assert read_rollouts(tmp_path, ["step"])["step"].to_pylist() == [6, 6]


def test_a_stage_without_answers_has_no_record(tmp_path: Path) -> None:
    context = stage_context(tmp_path)
    AnswerRecord("match", RecordConfig(), seed=int).save(context)
    assert not (context.output / RECORD).exists()


def test_a_column_that_a_part_lacks_is_null(tmp_path: Path) -> None:
    first = writer(tmp_path / "first", level="rewards")
    first.add(1, rows(1, "rewards"))
    first.save(tmp_path)
    second = writer(tmp_path / "second", level="all")
    second.restore(tmp_path, is_full=False)
    second.add(2, rows(2, "all"))
    second.save(tmp_path / "output")
    found = read_rollouts(tmp_path / "output", ["rollout_logprobs"])["rollout_logprobs"].to_pylist()
    assert found[:2] == [None, None] and found[2] == pytest.approx([-2 / 3, -0.1])


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"has no recorded rollouts; .* unless record\.level is none, .*record=True"
    ):
        read_rollouts(tmp_path)
    with pytest.raises(InputError, match=r"no column scores, text; it has kind, step, .*reward/length"):
        read_rollouts(recorded(tmp_path, 1), ["text", "step", "scores"])


def test_the_documentation_has_every_column() -> None:
    expected = [
        f"| `{column.name}` | {column.type} | `{column.level}` | {column.meaning} |"
        for column in (*COLUMNS, *REWARD_COLUMNS, *ANSWER_COLUMNS)
    ]
    lines = [line.replace("element: ", "") for line in expected]
    assert [
        line for line in DOCS.read_text().splitlines() if line.startswith("| `") and line.count("|") == 5
    ] == lines


def test_the_examples_run(tmp_path: Path) -> None:
    found = doctest.testmod(reader)
    assert found.attempted > 0 and found.failed == 0
    example, _ = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"folder": recorded(tmp_path, 9, 10, 20)}
    exec(compile(example, "record.md", "exec"), names)
    assert [row["step"] for row in names["best"]] == [20, 20, 10, 10]


def test_a_record_changes_no_later_key(tmp_path: Path) -> None:
    artifacts = ArtifactStore(Store(str(tmp_path / "store")), tmp_path / "cache")
    refs = []
    for key, steps in (("0" * 16, ()), ("1" * 16, (1, 2))):
        output = tmp_path / key
        output.mkdir()
        (output / "metrics.jsonl").write_text("{}\n")
        if steps:
            recorded(output, *steps)
            for folder in output.glob("parts-*"):
                folder.rename(tmp_path / "parts")
        refs.append(artifacts.publish("ppo", key, output, Provenance()))
    assert refs[0].digest == refs[1].digest
    # A damaged part is noticed by whoever reads the record, and by nobody else.
    folder = artifacts.fetch(refs[1], record=True)
    assert read_rollouts(folder).num_rows == 4
    [part] = (folder / RECORD).iterdir()
    content = part.read_bytes()
    part.write_bytes(content[:-1] + b"x")
    assert artifacts.fetch(refs[1]) == folder
    with pytest.raises(CorruptArtifact, match=r"record/ppo-00000001\.parquet"):
        artifacts.address(refs[1], RECORD)
