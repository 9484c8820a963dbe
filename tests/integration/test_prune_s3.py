"""`rlhf prune` on a real S3-compatible server."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.main import main
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.store import Store
from rlhf_core.tracking.mlflow_client import Mlflow
from tests.support.old_runs import WITH_WEIGHTS, OldRuns, names


def test_old_runs_in_a_bucket(
    s3_server: Any,
    new_home: Callable[[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    home = new_home(tmp_path / "home")
    store = Store(f"{s3_server.url}/prune-{time.time_ns()}/x", s3_server.endpoint)
    runs = OldRuns(store, home, Mlflow(f"sqlite:///{home}/mlflow.db", "pruned"))
    champion, refused, newest = (runs.run(name) for name in ("champion", "refused", "newest"))
    for name, made in (("champion", champion), ("refused", refused), ("newest", newest)):
        version = runs.register(name, made)
        if name == "champion":
            runs.crown(version)
    copy = runs.artifacts.fetch(refused["ppo"])
    config = tmp_path / "config.yaml"
    config.write_text(f"run: {{name: x, home: {home}}}\nstore: {{url: '{store.url}'}}\n")
    before = store.sizes("artifacts")
    assert main(["prune", str(config), "--older-than", "0d"]) == 0
    assert "would be deleted: 4," in capsys.readouterr().out
    assert store.sizes("artifacts") == before
    assert (
        main(["prune", str(config), f"store.endpoint={s3_server.endpoint}", "--older-than", "0d", "--delete"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "deleted: 4," in printed and f"copy of ppo/{refused['ppo'].key}" in printed
    gone = names(refused, *WITH_WEIGHTS)
    assert runs.present() == {*names(champion), *names(refused), *names(newest)} - gone
    assert not [path for path in store.list("artifacts") for name in gone if f"/{name}/" in path]
    assert not copy.exists()
    assert ArtifactStore(store, tmp_path / "cache").fetch(champion["ppo"]).is_dir()
    # What was deleted can be made again, in a folder of its own.
    again = runs.publish("refused", "sft", {"data": refused["data"]})
    assert (again.digest, again.uri.rsplit("/", 1)[-1]) == (refused["sft"].digest, "000003")
