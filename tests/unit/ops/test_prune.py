"""`rlhf prune` on a real store and a real registry.

- without --delete nothing is changed, and the table says what and why; with it, the weights of old runs that
  no version needs are deleted, and the champion, a rollback and the data of all runs are not
- runs, jobs and unfinished stages keep what they read; checkpoints that were not continued are deleted
- a champion by a person in the meantime keeps its artifacts; two commands at the same time delete once
- an outbox and copies of artifacts of a bucket are emptied
- a clock that differs from that of the store deletes nothing
- without MLflow, or with that of other runs, nothing that was registered is deleted; wrong input is exit
  code 2
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from rlhf_cli import main as cli
from rlhf_core.config.pipeline import StoreConfig
from rlhf_core.errors import InfrastructureError
from rlhf_core.executors.job_files import JobFiles
from rlhf_core.ops.prune import DAY, Pruning, parse_age
from rlhf_core.ops.retention import Reason
from rlhf_core.pipeline import StageName
from rlhf_core.run.registered_policies import find_artifacts
from rlhf_core.storage.bundles import Manifest
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.fencing import acquire
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store
from rlhf_core.system.files import json_sha256
from rlhf_core.system.home import Home
from rlhf_core.system.processes import ProcessId, RecordedProcess
from rlhf_core.system.waiting import Clock
from rlhf_core.tracking.champions import promote, rollback
from rlhf_core.tracking.mlflow_client import Mlflow
from rlhf_core.types import ArtifactRef
from tests.support.claims import claim
from tests.support.old_runs import MODEL, WITH_WEIGHTS, OldRuns, key_of, names
from tests.support.scripted_store import ScriptedStore


@pytest.fixture
def home(new_home: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # Tables of 80 columns would fold their cells.
    monkeypatch.setenv("COLUMNS", "200")
    return new_home(tmp_path / "home")


@pytest.fixture
def mlflow(home: Path) -> Mlflow:
    return Mlflow(f"sqlite:///{home}/mlflow.db", "pruned")


@pytest.fixture
def store(home: Path) -> ScriptedStore:
    return ScriptedStore(home / "store")


@pytest.fixture
def runs(store: ScriptedStore, mlflow: Mlflow, tmp_path: Path) -> OldRuns:
    return OldRuns(store, tmp_path / "work", mlflow)


class Impatient(Clock):
    """The registry is read again before each deletion."""

    def __init__(self) -> None:
        self._now = 0.0

    @override
    def monotonic(self) -> float:
        self._now += 10.0
        return self._now


def pruning(store: Store, mlflow: Mlflow, home: Path, days: float = 90, later: float = 100) -> Pruning:
    """The command, `later` days from now."""
    now = time.time() + later * DAY
    return Pruning(store, mlflow, Home.of(home), days * DAY, clock=Impatient(), now=lambda: now)


def delete(command: Pruning) -> list[str]:
    """Delete, and return the names of what was deleted."""
    plan = command.plan()
    return [item.label for item, deleted in command.delete(plan) if deleted]


def rlhf(*arguments: str) -> int:
    return cli.main(["prune", *arguments])


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_clock_that_is_not_that_of_the_store_deletes_nothing(
    runs: OldRuns, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.publish("old", "sft")
    defaults = Pruning.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "now", lambda: time.time() + 400 * DAY)
    assert rlhf("--home", str(home), "--delete") == 2
    printed = capsys.readouterr().err
    assert "+9600.0 hours from that of" in printed and "nothing was deleted; set the clock" in printed
    assert rlhf("--home", str(home)) == 0
    assert "would be deleted: 1," in capsys.readouterr().out
    assert len(runs.present()) == 1


def test_the_command_shows_and_then_deletes_what_no_version_needs(
    runs: OldRuns, home: Path, mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    first, refused, second, newest = (runs.run(name) for name in ("first", "refused", "second", "newest"))
    for name, made in (("first", first), ("refused", refused), ("second", second), ("newest", newest)):
        version = runs.register(name, made)
        if name in ("first", "second"):
            runs.crown(version)
    before = files(home / "store")
    assert rlhf("--home", str(home), "--older-than", "0d") == 0
    printed = capsys.readouterr().out
    assert files(home / "store") == before
    for artifact in names(refused, *WITH_WEIGHTS):
        assert f"{artifact}, 0.00 MB: would be deleted, no version needs it" in printed
    assert re.search(r"sft +│ +1 │ 0.00 MB │ 0 to 0 d │ goes +│ no version needs it", printed)
    assert re.search(r"sft +│ +3 │ 0.01 MB │ 0 to 0 d │ stays │ a version that is or was champion", printed)
    assert "would be deleted: 3," in printed and "--delete" in printed
    # 90 days by default.
    assert rlhf("--home", str(home), "--delete") == 0
    assert "deleted: 0, 0.00 MB" in capsys.readouterr().out
    assert files(home / "store") == before
    assert rlhf("--home", str(home), "--older-than", "0", "--delete") == 0
    printed = capsys.readouterr().out
    assert "deleted: 3," in printed
    for artifact in names(refused, *WITH_WEIGHTS):
        assert f"{artifact}, 0.00 MB: deleted" in printed
    kept = {*names(first), *names(second), *names(newest), *names(refused, "data", "evaluate", "register")}
    assert runs.present() == kept
    assert rlhf("--home", str(home), "--older-than", "0d", "--delete") == 0
    assert "deleted: 0, 0.00 MB" in capsys.readouterr().out
    rollback(mlflow, MODEL, "it insults people")
    champion, artifacts = find_artifacts(mlflow, MODEL, str(home))
    assert champion.version == "1"
    for stage in WITH_WEIGHTS:
        ref = artifacts.find_registered(stage, champion.tags)
        assert ref is not None and artifacts.fetch(ref).is_dir()
    # A revoked version without an alias has lost its claim.
    assert rlhf("--home", str(home), "--older-than", "0d", "--delete") == 0
    assert names(second, *WITH_WEIGHTS).isdisjoint(runs.present()) and names(first) <= runs.present()


def test_a_configuration_names_store_and_tracker(
    runs: OldRuns, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.run("of another tracker")
    config = tmp_path / "config.yaml"
    config.write_text("run: {name: x, home: /nowhere}\n")
    given = [str(config), f"run.home={home}"]
    # The artifact `register` names a version that MLflow does not have.
    assert rlhf(*given, "--older-than", "0d", "--delete") == 0
    printed = capsys.readouterr().out
    assert "this MLflow does not have" in printed and "deleted: 0" in printed
    made = runs.publish("alone", "ppo")
    assert rlhf(*given, f"store.url={home}/store", "--older-than", "0d", "--delete") == 0
    printed = capsys.readouterr().out
    assert f"ppo/{made.key}, 0.00 MB: deleted" in printed


def test_wrong_input_is_named(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"run: {{name: x, home: {home}}}\n")
    for arguments, message in (
        (["--older-than", "soon"], "--older-than must be a number of days, such as 90d; got 'soon'"),
        (["--older-than=-1d"], "--older-than must be a number of days, such as 90d; got '-1d'"),
        ([str(config), "--home", str(home)], "--home: CONFIG has run.home; leave one of them out"),
        ([str(config), "run.hoem=x"], "unknown key; did you mean run.home?"),
        (["--home", str(tmp_path / "typo")], "--home: there is no database of MLflow at"),
        (["--home", str(home)], "has neither artifacts nor checkpoints; name the store of the runs"),
    ):
        assert rlhf(*arguments) == 2
        assert message in capsys.readouterr().err
    assert [parse_age(text) / DAY for text in ("90d", "90", " 0d ", "1.5")] == [90.0, 90.0, 0.0, 1.5]
    assert not (home / "store").exists(), "nothing is created"


def test_without_an_answer_of_mlflow_nothing_is_deleted(
    runs: OldRuns, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.publish("alone", "ppo")
    before = files(home / "store")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert rlhf("--home", str(home), "--older-than", "0d", "--delete") == 3
    assert "did not list the versions of its models" in capsys.readouterr().err
    assert files(home / "store") == before


def test_mlflow_fails_between_two_deletions(
    runs: OldRuns, store: Store, mlflow: Mlflow, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        runs.publish(name, "ppo")
    command = pruning(store, mlflow, home)
    plan = command.plan()
    deletions = command.delete(plan)
    next(deletions)

    def fail() -> Any:
        raise OSError("connection reset")

    monkeypatch.setattr(mlflow, "all_model_names", fail)
    with pytest.raises(InfrastructureError, match="connection reset"):
        next(deletions)
    assert len(runs.present()) == 2


def test_a_version_that_is_promoted_in_the_meantime_keeps_its_artifacts(
    runs: OldRuns, store: Store, mlflow: Mlflow, home: Path
) -> None:
    made = {name: runs.run(name) for name in ("old", "older", "newest")}
    for name, artifacts in made.items():
        runs.register(name, artifacts)
    command = pruning(store, mlflow, home)
    plan = command.plan()
    assert len(plan.deleted) == 6
    promote(mlflow, MODEL, "2", "a person likes it")
    deleted = {each.label for each, done in command.delete(plan) if done}
    assert deleted == {str(name) for name in names(made["old"], *WITH_WEIGHTS)}
    assert {*names(made["older"]), *names(made["newest"])} <= runs.present()


def test_a_run_that_begins_in_the_meantime_keeps_what_it_reuses(
    runs: OldRuns, store: Store, mlflow: Mlflow, home: Path
) -> None:
    keys = [runs.publish(name, "sft").key for name in ("a", "b", "c")]
    command = pruning(store, mlflow, home)
    plan = command.plan()
    reused = plan.deleted[1].label
    _write_run(home, {"sft": {"seconds": 0.0, "key": reused.removeprefix("sft/")}})
    assert [each.label for each, deleted in command.delete(plan) if not deleted] == [reused]
    assert {str(name) for name in runs.present()} == {reused} and len(keys) == len(plan.deleted)


def test_base_models_and_sources_of_a_champion_are_kept(
    runs: OldRuns, store: Store, mlflow: Mlflow, home: Path
) -> None:
    base, other = runs.run("base"), runs.run("other")
    path = f"{store.url}/artifacts/ppo/{base['ppo'].key}/000001/policy"
    champion = runs.run("champion", base=path)
    for name, made in (("base", base), ("other", other), ("champion", champion)):
        version = runs.register(name, made)
    runs.crown(version)
    assert set(delete(pruning(store, mlflow, home))) == {str(name) for name in names(other, *WITH_WEIGHTS)}
    assert {*names(base), *names(champion)} <= runs.present()


def test_young_artifacts_keep_what_they_were_made_from(
    runs: OldRuns, store: Store, mlflow: Mlflow, home: Path
) -> None:
    made = runs.run("old")
    runs.register("old", made)
    runs.register("newest", runs.run("newest"))
    parents: dict[StageName, ArtifactRef] = {
        "data": made["data"],
        "sft": made["sft"],
        "reward": made["reward"],
    }
    assert len(pruning(store, mlflow, home, days=90).plan().deleted) == 3
    young = runs.publish("young", "ppo", parents)
    manifest = home / "store" / "artifacts" / "ppo" / young.key / "manifest.json"
    _change(manifest, created=_iso(time.time() + 50 * DAY))
    assert delete(pruning(store, mlflow, home)) == [str(name) for name in names(made, "ppo")]
    assert names(parents) <= runs.present()


def _write_run(home: Path, stages: Any, **changes: Any) -> None:
    """Write the state of a run of this process."""
    state = {"state": "running", "config": "c.yaml", "updated": time.time(), "stages": stages}
    file = home / "runs" / "x" / "run.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**state, "process": RecordedProcess.own(), **changes}))


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(seconds))


def _change(manifest: Path, **changes: Any) -> None:
    content = json.loads(manifest.read_text()) | changes
    content.pop("checksum")
    manifest.write_text(json.dumps({**content, "checksum": json_sha256(content)}))


def test_runs_jobs_and_unfinished_stages_keep_what_they_read(
    runs: OldRuns, store: ScriptedStore, mlflow: Mlflow, home: Path
) -> None:
    made = {name: runs.publish(name, "sft") for name in ("of a run", "of a job", "of a stage", "of none")}
    stages = {"sft": {"seconds": 1.0, "key": made["of a run"].key}}
    _write_run(home, stages)
    job = {
        "time": time.time(),
        "spec": {"inputs": {"sft": {"key": made["of a job"].key}}, "config": {}},
    }
    store.put_bytes(f"{JobFiles(store, '4' * 16, 1).folder}/spec.json", json.dumps(job).encode())
    acquire(store, "5" * 16, "ppo", inputs=[f"sft/{made['of a stage'].key}"])

    def of(*which: str) -> set[str]:
        return {f"sft/{made[name].key}" for name in which}

    # Within a week, all of them count, whatever the age.
    assert set(delete(pruning(store, mlflow, home, days=0, later=1))) == of("of none")
    assert set(delete(pruning(store, mlflow, home, days=0, later=8))) == of("of a job", "of a stage")
    _write_run(home, stages, state="finished")
    assert set(delete(pruning(store, mlflow, home, days=0, later=8))) == of("of a run")


def test_what_was_made_since_a_run_began_is_kept(
    runs: OldRuns, store: ScriptedStore, mlflow: Mlflow, home: Path
) -> None:
    """Between two stages, neither a claim nor the state of the run names the artifact of the first one."""
    ref = runs.publish("between", "reward")
    own = RecordedProcess.own()
    command = pruning(store, mlflow, home, days=0, later=1e-4)
    for process in (
        own,
        own._replace(host="elsewhere"),
    ):
        _write_run(home, {}, process=process)
        assert delete(command) == []
        others = {("mlflow", Reason.NOT_ASKED), ("runs", Reason.NOT_ASKED)}
        assert set(command.plan().groups()) == {("reward", Reason.IN_USE), *others}
    _write_run(home, {}, process=own._replace(pid=2**22 + 1))
    assert delete(command) == [f"reward/{ref.key}"]


def test_a_stage_that_runs_keeps_its_artifact(
    runs: OldRuns, store: ScriptedStore, mlflow: Mlflow, home: Path
) -> None:
    key = runs.publish("old", "ppo").key
    file = home / "store" / "checkpoints" / key / "attempts" / "000001.json"
    content = json.loads(file.read_text())
    other = ProcessId.of(os.getppid())
    assert other is not None
    file.write_text(json.dumps({**content, "pid": other.pid, "started": other.started}))
    assert delete(pruning(store, mlflow, home)) == []
    file.write_text(json.dumps(content))
    assert delete(pruning(store, mlflow, home)) == [f"ppo/{key}"]


def test_checkpoints_that_were_not_continued(
    runs: OldRuns, store: ScriptedStore, mlflow: Mlflow, home: Path, tmp_path: Path
) -> None:
    key = key_of("interrupted", "ppo")
    checkpoints = CheckpointStore(store, key, tmp_path / "c", StoreConfig(), claim(store, key))
    for step in (4, 8):
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "loop.json").write_text(str(step))
        checkpoints.save(step, tmp_path / "state")
    assert delete(pruning(store, mlflow, home, later=89)) == []
    assert checkpoints.latest() is not None
    assert delete(pruning(store, mlflow, home, later=91)) == [f"checkpoints of {key}"]
    assert CheckpointStore(store, key, tmp_path / "c", StoreConfig()).latest() is None
    assert not [path for path in store.list(f"checkpoints/{key}") if "/attempts/" not in path]
    # A stage of an earlier release did not write when it was saved.
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "loop.json").write_text("12")
    CheckpointStore(store, key, tmp_path / "c", StoreConfig(), claim(store, key)).save(12, tmp_path / "state")
    _change(home / "store" / "checkpoints" / key / "step-00000012" / "manifest.json", created=None)
    assert delete(pruning(store, mlflow, home, later=900)) == []


def test_files_that_a_killed_attempt_left(
    runs: OldRuns, store: ScriptedStore, mlflow: Mlflow, home: Path
) -> None:
    key = key_of("killed", "ppo")
    claim(store, key)
    store.put_bytes(f"artifacts/ppo/{key}/000001/policy/a.safetensors", b"weights")
    assert delete(pruning(store, mlflow, home, days=0, later=6)) == []
    assert delete(pruning(store, mlflow, home, days=0, later=8)) == [f"files of ppo/{key}"]
    assert not store.list("artifacts")


def test_what_is_kept_is_grouped_by_stage_and_reason(
    runs: OldRuns, store: ScriptedStore, mlflow: Mlflow, home: Path
) -> None:
    for name in ("first", "second"):
        runs.crown(runs.register(name, runs.run(name)))
    plan = pruning(store, mlflow, home).plan()
    groups = plan.groups()
    for stage in WITH_WEIGHTS:
        assert len(groups[stage, Reason.VERSION]) == 2
        assert plan.versions(groups[stage, Reason.VERSION]) == [f"{MODEL} 1", f"{MODEL} 2"]
    assert plan.versions(groups["register", Reason.NO_WEIGHTS]) == []


def test_two_commands_at_the_same_time_delete_once(
    runs: OldRuns, store: ScriptedStore, mlflow: Mlflow, home: Path
) -> None:
    champion, *refused = (runs.run(name) for name in ("champion", "a", "b", "newest"))
    runs.crown(runs.register("champion", champion))
    for name, made in zip(("a", "b", "newest"), refused, strict=True):
        runs.register(name, made)
    first, second = pruning(store, mlflow, home), pruning(store, mlflow, home)
    plan, same = first.plan(), second.plan()
    assert (plan.deleted, plan.kept) == (same.deleted, same.kept) and len(plan.deleted) == 6
    deleted: list[str] = []
    both = zip(first.delete(plan), second.delete(same), strict=True)
    for (one, by_first), (other, by_second) in both:
        assert one == other and by_first and not by_second
        deleted.append(one.label)
    assert len(set(deleted)) == 6
    assert names(champion) <= runs.present()


def test_outbox_and_copies_of_a_bucket(
    mlflow: Mlflow, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ScriptedStore(tmp_path / "bucket", remote=True)
    runs = OldRuns(store, home, mlflow)
    refs = {name: runs.publish(name, "ppo") for name in ("deleted", "kept")}
    copies = {name: runs.artifacts.fetch(ref) for name, ref in refs.items()}
    unknown = copies["kept"].with_name(f"artifacts-ppo-{'6' * 16}-{'7' * 12}")
    unknown.mkdir()
    runs.register("kept", {"ppo": refs["kept"]})
    outbox = Outbox.of(store, home / "outbox")
    assert outbox is not None
    (tmp_path / "out").mkdir()
    outbox.add(Manifest(f"artifacts/sft/{'8' * 16}", "000001", (), {}), tmp_path / "out")
    command = pruning(store, mlflow, home, later=100)
    assert [each.label for each in command.plan().deleted] == [
        f"ppo/{refs['deleted'].key}", f"copy of ppo/{refs['deleted'].key}",
    ]  # fmt: skip
    pending = home / "outbox" / "artifacts" / "sft" / ("8" * 16) / "manifest.json"
    os.utime(pending, (0, 0))
    assert delete(command) == [
        f"ppo/{refs['deleted'].key}", f"outbox: artifacts/sft/{'8' * 16}",
        f"copy of ppo/{refs['deleted'].key}",
    ]  # fmt: skip
    assert not copies["deleted"].exists() and copies["kept"].is_dir() and unknown.is_dir()
    assert not list(home.glob("cache/*deleted*")) and len(list(home.glob("cache/*.store"))) == 1
    assert outbox.pending("artifacts") == []


def test_outbox_and_copies_that_are_used_again(mlflow: Mlflow, home: Path, tmp_path: Path) -> None:
    store = ScriptedStore(tmp_path / "bucket", remote=True)
    runs = OldRuns(store, home, mlflow)
    copy = runs.artifacts.fetch(runs.publish("old", "ppo"))
    outbox = Outbox.of(store, home / "outbox")
    assert outbox is not None
    prefixes = [f"artifacts/sft/{key_of(name, 'sft')}" for name in ("held", "added")]
    (tmp_path / "out").mkdir()
    for prefix in prefixes:
        outbox.add(Manifest(prefix, "000001", (), {}), tmp_path / "out")
        os.utime(home / "outbox" / prefix / "manifest.json", (0, 0))
    _hold(store, key_of("held", "sft"))
    command = pruning(store, mlflow, home)
    plan = command.plan()
    assert len(plan.deleted) == 3, "artifact, one of the outbox, and the copy"
    claim(store, key_of("added", "sft"))
    outbox.add(Manifest(prefixes[1], "000001", (), {}), tmp_path / "out")
    deletions = command.delete(plan)
    assert next(deletions)[1]
    runs.publish("old", "ppo")
    assert [deleted for _, deleted in deletions] == [False, False]
    assert outbox.pending("artifacts") == sorted(prefixes) and copy.is_dir()


def _hold(store: Store, key: str) -> None:
    """Have another process of this machine, which lives, hold a key that was claimed once."""
    other = ProcessId.of(os.getppid())
    assert other is not None
    claim(store, key)
    name = f"checkpoints/{key}/attempts/000001.json"
    content = json.loads(store.read_bytes(name) or b"")
    store.put_bytes(name, json.dumps({**content, "pid": other.pid, "started": other.started}).encode())
