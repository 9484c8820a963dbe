"""The commit behind a hub name, and models from there.

- a commit stands for itself; a branch is asked of the hub, then of the local cache
- if neither has it, the name is used as it is, with a warning
- a hub whose answer does not end is a hub that does not answer
- the model of the SFT stage is fetched before its ranks start, whose time to load is bounded, if it is on the
  hub; a fetch that fails leaves it to them to say why
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.data import hub
from rlhf_core.data.sources import pinned
from rlhf_core.run.external_inputs import external_digests, external_marks
from rlhf_core.testing import stage_context
from tests.support.demo_data import config_with_demo_data as config_from_tree

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    hub.resolve_revision.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_commit_stands_for_itself() -> None:
    assert hub.resolve_revision("org/data", "dataset", COMMIT) == COMMIT


class Hub(ThreadingHTTPServer):
    """A hub on loopback. It answers `HUNG` with a body that does not end."""

    HUNG = "/api/datasets/org/data/revision/v2"
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.stopped = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.shutdown()
        self.server_close()

    def resolve(self, *calls: tuple[Any, ...]) -> str:
        """Return the results of `resolve_revision` for these arguments, and the log.

        They are of a process of its own, because the library reads the address of the hub once.
        """
        code = (
            "from rlhf_core.data.hub import resolve_revision\n"
            f"for arguments in {calls!r}: print(resolve_revision(*arguments))"
        )
        environment = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip() + done.stderr


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if "/revision/" in self.path:  # the library asks other questions too
            self.server.asked.append(self.path)
        body = json.dumps({"id": "org/model", "sha": COMMIT, "siblings": []}).encode()
        is_hung = self.path == Hub.HUNG
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(10_000 if is_hung else len(body)))
        self.end_headers()
        if not is_hung:
            self.wfile.write(body)
        while is_hung and not self.server.stopped.wait(0.2):
            with suppress(OSError):  # the client has ended
                self.wfile.write(b" ")

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_branch_is_asked_of_the_hub() -> None:
    with Hub() as server:
        assert server.resolve(("org/model", "model", None)) == COMMIT
        assert server.asked == ["/api/models/org/model/revision/main"]


def test_offline_the_local_cache_is_used(fresh: Path) -> None:
    ref = fresh / "datasets--org--data" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text(COMMIT)
    assert hub.resolve_revision("org/data", "dataset", None) == COMMIT


def test_an_unresolved_name_is_kept_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert hub.resolve_revision("org/data", "dataset", "v2") == "v2"
    assert "pin `revision`" in caplog.text


def test_a_hub_that_does_not_finish_its_answer_is_left_after_the_time_limit() -> None:
    with Hub() as server:
        began = time.monotonic()
        # The first request of a process also imports the library, for longer than the limit of the second.
        printed = server.resolve(("org/model", "model", None), ("org/data", "dataset", "v2", 0.5))
        assert time.monotonic() - began < 60
        assert server.asked == ["/api/models/org/model/revision/main", Hub.HUNG]
    assert printed.startswith(f"{COMMIT}\nv2") and "pin `revision`" in printed


def test_what_is_read_is_pinned_to_the_commits_that_the_digests_name(fresh: Path) -> None:
    for kind in ("datasets", "models"):
        ref = fresh / f"{kind}--org--it" / "refs" / "main"
        ref.parent.mkdir(parents=True)
        ref.write_text(COMMIT)
    sources = {"sft": [{"path": "org/it"}, {"path": "synthetic"}]}
    judge = {"judge": {"path": "org/it"}}
    teacher = {"teacher": {"path": "org/it"}}
    tree = {"model": {"path": "org/it"}, "data": sources, "reward": judge, "ppo": teacher}
    config = pinned(config_from_tree(tree, "test"))
    assert [source.revision for source in config.data.sft] == [COMMIT, None]
    assert config.model.revision == COMMIT
    assert config.reward.judge is not None and config.reward.judge.revision == COMMIT
    assert config.ppo.teacher is not None and config.ppo.teacher.revision == COMMIT
    digests = external_digests(config)
    assert digests["model"] == digests["reward.judge.path"] == f"hub:org/it@{COMMIT}"
    assert digests["ppo.teacher.path"] == external_marks(config)["ppo.teacher.path"] == digests["model"]
    assert external_marks(config)["reward.judge.path"] == f"hub:org/it@{COMMIT}"


@pytest.mark.parametrize(("path", "fetched"), [("org/model", True), ("./model", False), (None, False)])
def test_the_model_is_fetched_before_the_ranks_start(
    path: str | None, fetched: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from rlhf_core.cluster import ranks as launch
    from rlhf_core.stages import sft

    order: list[Any] = []

    def download(repo: str, **options: Any) -> None:
        order.append((repo, options["revision"]))
        raise TimeoutError

    def ranks(*_: Any, **__: Any) -> None:
        order.append("ranks")
        raise KeyboardInterrupt  # the test ends here

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(launch, "run_ranks", ranks)
    for name in ("model_digest", "require_unchanged"):
        monkeypatch.setattr(f"rlhf_core.stages.training.{name}", lambda *_: "")
    config: Any = SimpleNamespace(
        model=SimpleNamespace(path=path, revision=COMMIT),
        reward=SimpleNamespace(judge=None),
        run=SimpleNamespace(device="cpu", timeouts=None, home="home"),
        sft=SimpleNamespace(enabled=True, deepspeed=SimpleNamespace(ranks=1, hpz=1), threads=None),
    )
    context = stage_context(tmp_path, inputs={"data": tmp_path})
    with pytest.raises(KeyboardInterrupt):
        sft.run(config, context)
    assert order == [*([("org/model", COMMIT)] if fetched else []), "ranks"]
