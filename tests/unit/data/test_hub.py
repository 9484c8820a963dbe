"""The commit behind a hub name.

- a commit stands for itself; a branch is asked of the hub, then of the local cache
- where nobody knows, the name stays, with a warning
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.data import hub
from rlhf_core.data.sources import pinned, source_digests

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    hub.resolve_revision.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_commit_stands_for_itself() -> None:
    assert hub.resolve_revision("org/data", "dataset", COMMIT) == COMMIT


def test_a_branch_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def info(_self: Any, repo: str, **options: Any) -> Any:
        asked.append((repo, options["repo_type"], options["revision"]))
        return SimpleNamespace(sha=COMMIT)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", info)
    assert hub.resolve_revision("org/model", "model", None) == COMMIT
    assert asked == [("org/model", "model", "main")]


def test_offline_the_local_cache_knows(fresh: Path) -> None:
    ref = fresh / "datasets--org--data" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text(COMMIT)
    assert hub.resolve_revision("org/data", "dataset", None) == COMMIT


def test_where_nobody_knows_the_name_stays_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert hub.resolve_revision("org/data", "dataset", "v2") == "v2"
    assert "pin `revision`" in caplog.text


def test_what_is_read_is_pinned_to_the_commits_that_the_digests_name(fresh: Path) -> None:
    for kind in ("datasets", "models"):
        ref = fresh / f"{kind}--org--it" / "refs" / "main"
        ref.parent.mkdir(parents=True)
        ref.write_text(COMMIT)
    sources = {"sft": [{"path": "org/it"}, {"path": "synthetic"}]}
    config = pinned(config_from_tree({"model": {"path": "org/it"}, "data": sources}, "test"))
    assert [source.revision for source in config.data.sft] == [COMMIT, None]
    assert config.model.revision == COMMIT
    assert COMMIT in source_digests(config)["model"]
