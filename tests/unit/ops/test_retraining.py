"""When a retraining is due.

- for unchanged sources, no file is read
- a changed rubric or folder of the judge, and changed votes of people, are seen
- finished stages in the store count on every machine, without the folder of the run
- with too few new rows, or too early, it waits; a failed retraining is due again after the pause
- rows and pause also count from a retraining that another program ran
- waiting reads no file twice, and objects are listed without a request for each
- while MLflow does not answer, nothing is due
- a policy that MLflow has lost is made again
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import is_enabled
from rlhf_core.data import sources
from rlhf_core.data.sources import count_rows, source_marks
from rlhf_core.evaluation.votes import FORMAT
from rlhf_core.ops.retraining import Retraining, finished_registration
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.run.pipeline_run import PipelineRun
from rlhf_core.storage.artifacts import Provenance
from rlhf_core.tracking.champions import WEIGHTS
from rlhf_core.tracking.mlflow_client import Mlflow
from rlhf_core.types import ArtifactRef
from tests.conftest import S3Server
from tests.support.demo_data import GENERATED
from tests.support.opened_files import opened_files

DIGEST = "a" * 64


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows" / "part-1.jsonl"
    file.parent.mkdir()
    add(file, 10)
    return file


def add(file: Path, count: int) -> None:
    with file.open("a") as lines:
        for number in range(count):
            lines.write(json.dumps({"prompt": f"fox {number}", "completion": "It runs."}) + "\n")


@pytest.fixture
def configured(database: Path, rows: Path, tmp_path: Path) -> Callable[[str], PipelineConfig]:
    def make(home: str) -> PipelineConfig:
        tree = {
            "run": {"home": str(tmp_path / home), "name": tmp_path.name[-40:].strip("_-.").lower()},
            "store": {"url": str(tmp_path / "store")},
            "tracking": {"uri": f"sqlite:///{database}"},
            "data": {**GENERATED, "sft": [{"path": str(rows.parent)}]},
        }
        return PipelineConfig.model_validate_json(json.dumps(tree))

    return make


def finish(config: PipelineConfig) -> None:
    """Publish an artifact of each stage, and register a version, as a finished run does."""
    run = PipelineRun(config, "")
    found: dict[StageName, ArtifactRef] = {}
    for stage in STAGES:
        if is_enabled(config, stage):
            out = Path(config.run.home) / "out" / stage
            out.mkdir(parents=True, exist_ok=True)
            (out / "file").write_text(stage)
            facts = {"weights_sha256": DIGEST, "version": "1"} if stage == "register" else {}
            key = run.spec(stage, found).key
            found[stage] = run.artifacts.publish(stage, key, out, Provenance(attributes=facts))
    mlflow: Mlflow = run.tracking.mlflow
    mlflow.ensure_model(config.registered_model, "")
    mlflow.create_version(
        config.registered_model, source="/x", run_id=None, tags={WEIGHTS: DIGEST}, description=""
    )


def check_now(
    config: PipelineConfig, rows: int = 0, hours: float = 0, clock: Callable[[], float] = time.time
) -> tuple[str, str]:
    decision = Retraining(config, clock=clock).check(min_new_rows=rows, min_pause_hours=hours)
    return decision.name, decision.message


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now

    def add_hours(self, hours: float) -> None:
        self.now += 3600 * hours


def test_unchanged_sources_are_not_read(configured: Any, rows: Path) -> None:
    config = configured("one")
    with opened_files(rows.parent) as opened:
        assert check_now(config)[0] == "Due"
    assert set(opened) == {"part-1.jsonl"}
    finish(config)
    assert check_now(config) == (
        "Unchanged",
        f"{config.registered_model} version 1 was made from these inputs",
    )
    with opened_files(rows.parent) as opened:
        assert check_now(config) == ("Unchanged", "the sources look as after the last retraining")
        # Another machine has another home, and the same store and MLflow.
        assert check_now(configured("two"))[0] == "Unchanged"
    assert opened == []
    os.utime(rows, (1, 1))
    assert check_now(config)[1].endswith("was made from these inputs"), "the contents are the same"
    add(rows, 1)
    assert check_now(config) == ("Due", "the sources have changed: data.sft[0] (+1 rows)")


@pytest.mark.parametrize(
    ("name", "change"),
    [("rubric.txt", ("short", "long")), ("judge/config.json", ("{}", "[]")), ("votes.json", (": 1", ": 2"))],
)
def test_a_changed_judge_and_new_votes_are_seen(
    configured: Any, tmp_path: Path, name: str, change: tuple[str, str]
) -> None:
    votes = {"format": FORMAT, "page": "p", "saved": 1, "votes": []}
    files = {"rubric.txt": "Be short.", "judge/config.json": "{}", "votes.json": json.dumps(votes)}
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    tree = configured("home").model_dump(mode="json", by_alias=True)
    judge = {"path": str(tmp_path / "judge"), "rubric": str(tmp_path / "rubric.txt")}
    tree["evaluate"]["language_model"] = judge
    tree["register"]["votes"] = [str(tmp_path / "votes.json")]
    config = PipelineConfig.model_validate_json(json.dumps(tree))
    Retraining(config).record_end(DIGEST)
    finish(config)
    assert check_now(config) == ("Unchanged", "the sources look as after the last retraining")
    (tmp_path / name).write_text(files[name].replace(*change))
    assert check_now(config)[0] == "Due"


def test_another_machine_asks_the_store(configured: Any) -> None:
    assert finished_registration(configured("one")) is None
    finish(configured("one"))
    found = finished_registration(configured("two"))
    assert found is not None and found.attributes["weights_sha256"] == DIGEST


def test_a_policy_that_mlflow_has_lost_is_made_again(configured: Any) -> None:
    config = configured("one")
    finish(config)
    assert check_now(config)[0] == "Unchanged"
    client = Retraining(config)._tracking.mlflow._client
    client.delete_model_version(config.registered_model, "1")
    assert check_now(config)[0] == "Due"


def test_it_waits_for_rows_and_for_the_pause(configured: Any, rows: Path) -> None:
    config, clock = configured("one"), Clock()
    first = Retraining(config, clock=clock)
    assert first.check(min_new_rows=5, min_pause_hours=24).due, "nothing was trained before"
    first.record_start()
    finish(config)
    first.record_end(DIGEST)
    add(rows, 4)
    assert check_now(config, 5, 0, clock) == ("Waiting", "4 new rows, of 5 that are needed")
    add(rows.with_name("part-2.jsonl"), 1)
    clock.add_hours(6)
    assert check_now(config, 5, 24, clock) == ("Waiting", "6.0 hours since the last start, of 24")
    clock.add_hours(18)
    second = Retraining(config, clock=clock)
    assert second.check(min_new_rows=5, min_pause_hours=24).due
    second.record_start()  # and it fails
    assert check_now(config, 5, 24, clock)[0] == "Waiting"
    clock.add_hours(24)
    assert check_now(config, 5, 24, clock)[0] == "Due", "a failed retraining is due again"


def test_rows_and_pause_count_from_a_retraining_of_another_program(configured: Any, rows: Path) -> None:
    config, clock = configured("one"), Clock()
    finish(config)
    assert check_now(config, 5, 24, clock)[0] == "Unchanged"
    os.utime(rows, (1, 1))
    clock.add_hours(24)
    assert check_now(config, 5, 24, clock)[0] == "Unchanged"
    add(rows, 4)
    assert check_now(config, 5, 48, clock) == ("Waiting", "24.0 hours since the last start, of 48")
    assert check_now(config, 5, 24, clock) == ("Waiting", "4 new rows, of 5 that are needed")
    add(rows, 1)
    assert check_now(config, 5, 24, clock)[0] == "Due"


def test_waiting_reads_no_file_twice(configured: Any, rows: Path) -> None:
    config = configured("one")
    finish(config)
    assert check_now(config)[0] == "Unchanged"
    add(rows, 4)
    waiting = ("Waiting", "4 new rows, of 5 that are needed")
    assert check_now(config, rows=5) == waiting
    with opened_files(rows.parent) as opened:
        assert check_now(config, rows=5) == waiting
        assert check_now(config, rows=4)[0] == "Due"
    assert opened == []
    add(rows, 1)
    with opened_files(rows.parent) as opened:
        assert check_now(config, hours=24)[1].endswith("hours since the last start, of 24")
    assert opened == []
    check_now(config, rows=9)
    finish(config)  # by another program, and nothing was written since
    assert check_now(config, rows=9) == (
        "Unchanged",
        f"{config.registered_model} version 1 was made from these inputs",
    )


def test_an_interrupted_flow_run_continues_its_retraining(configured: Any, rows: Path) -> None:
    config = configured("one")
    first = Retraining(config, run="flow-run-1")
    first.record_start()
    for run, due in (("flow-run-1", True), ("flow-run-2", False), ("", False)):
        assert Retraining(config, run=run).check(min_new_rows=0, min_pause_hours=24).due is due
    finish(config)
    first.record_end(DIGEST)
    add(rows, 1)
    assert not Retraining(config, run="flow-run-1").check(min_new_rows=0, min_pause_hours=24).due


def test_a_state_that_cannot_be_parsed_only_makes_the_next_check_read_the_sources(
    configured: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured("one")
    finish(config)
    retraining = Retraining(config)
    for text in ("[1]", "{"):
        retraining._tracking.mlflow.tag_model(config.registered_model, {retraining._tag: text})
        assert check_now(config)[1].endswith("was made from these inputs")
        assert "cannot be read" in caplog.text
        caplog.clear()


def test_nothing_is_due_while_mlflow_does_not_answer(configured: Any) -> None:
    config = configured("one")
    nowhere = config.model_copy(
        update={"tracking": config.tracking.model_copy(update={"uri": "sqlite:////proc/nowhere/x.db"})}
    )
    name, message = check_now(nowhere)
    assert name == "Waiting"
    assert message.startswith("MLflow at sqlite:////proc/nowhere/x.db does not answer (")
    assert not Retraining(nowhere).record_start()
    assert Retraining(config).record_start()


def test_marks_of_objects_are_their_etags(s3_server: S3Server, configured: Any) -> None:
    import boto3

    config: PipelineConfig = configured("one")
    client = boto3.client("s3", endpoint_url=s3_server.endpoint)
    row = b'{"prompt": "fox", "completion": "It runs."}\n'
    client.put_object(Bucket=s3_server.bucket, Key="watched/a.jsonl", Body=row)
    source = config.data.sft[0].model_copy(update={"path": f"s3://{s3_server.bucket}/watched"})
    data = config.data.model_copy(update={"sft": (source,)})
    store = config.store.model_copy(update={"endpoint": s3_server.endpoint})
    config = config.model_copy(update={"data": data, "store": store})
    before = source_marks(config)
    assert before == source_marks(config) and count_rows(config) == 1
    client.put_object(Bucket=s3_server.bucket, Key="watched/b.jsonl", Body=row * 2)
    assert before["data.sft[0]"] != source_marks(config)["data.sft[0]"] and count_rows(config) == 3
    single = source.model_copy(update={"path": f"{source.path}/b.jsonl"})
    data = config.data.model_copy(update={"sft": (single,)})
    of_one = source_marks(config.model_copy(update={"data": data}))["data.sft[0]"]
    assert of_one in source_marks(config)["data.sft[0]"].splitlines()

    requests: list[str] = []
    events = sources._bucket(store).s3.meta.events
    events.register("before-call.s3", lambda params, **_: requests.append(params["url_path"]), "requests")
    try:
        assert of_one in source_marks(config)["data.sft[0]"].splitlines()
    finally:
        events.unregister("before-call.s3", unique_id="requests")
    assert requests
    assert not any(path.endswith(".jsonl") for path in requests), "no request for a single object"
