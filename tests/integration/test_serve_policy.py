"""`rlhf serve` with the real vLLM: the champion, a rollback by a command, and the champion before.

- the served model answers OpenAI's completions, names its version, and refuses requests of web pages
- after `rlhf rollback`, the same command serves the weights of the version before

Slow: vLLM starts twice.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.storage.bundles import weights_sha256
from rlhf_core.system.processes import free_port
from rlhf_core.tracking.mlflow_client import Mlflow
from tests.chaos.servers import wait
from tests.support.registered_policy import TEXT, register_policy

pytestmark = pytest.mark.slow
MODEL = "served-policy"


def ask(port: int, path: str, body: dict[str, Any] | None = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **headers}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def served(home: Path, environment: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Run `rlhf serve`: its port and its first line."""
    port = free_port(18000)
    command = [
        sys.executable,
        "-m",
        "rlhf_cli.main",
        "serve",
        MODEL,
        "--home",
        str(home),
        "--port",
        str(port),
    ]
    command += ["--vllm", "--enforce-eager"]  # compiling takes minutes on a CPU
    with (home / "serve.log").open("a") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
    assert process.stdout is not None
    try:
        first = process.stdout.readline().strip()

        def ready() -> bool:
            assert process.poll() is None, (home / "serve.log").read_text()[-3000:]
            try:
                return bool(ask(port, "/v1/models"))
            except OSError:
                return False

        assert wait(ready, 300), (home / "serve.log").read_text()[-3000:]
        yield port, first
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        process.stdout.close()


def test_the_champion_is_served_and_after_a_rollback_the_one_before(
    tmp_path: Path, summary_lines: list[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    uri = f"sqlite:///{home}/mlflow.db"
    mlflow = Mlflow(uri, "serve")
    digests = [register_policy(mlflow, MODEL, tmp_path / "store", tmp_path, number) for number in (1, 2)]
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    answers = []
    for version in (2, 1):
        with served(home, environment) as (port, first):
            assert first == f"serving {MODEL}@{version}, weights {digests[version - 1]}"
            models = {entry["id"]: entry["root"] for entry in ask(port, "/v1/models")["data"]}
            assert set(models) == {MODEL, f"{MODEL}@{version}"}
            assert weights_sha256(Path(models[MODEL])) == digests[version - 1]
            body = {"model": MODEL, "prompt": TEXT, "max_tokens": 8, "temperature": 0}
            answers.append(ask(port, "/v1/completions", body)["choices"][0]["text"])
            with pytest.raises(urllib.error.HTTPError, match="403"):
                ask(port, "/v1/models", origin="http://example.com")
        if version == 2:
            command = [
                sys.executable,
                "-m",
                "rlhf_cli.main",
                "rollback",
                MODEL,
                "--reason",
                "it insults people",
            ]
            done = subprocess.run(
                [*command, "--home", str(home)], env=environment, capture_output=True, text=True, check=True
            )
            assert "rolled back from version 2 to 1: it insults people" in done.stdout
    assert answers[0] != answers[1], "other weights give another answer"
    summary_lines.append(f"served version 2, rolled back, served version 1 ({digests[0][:12]})")
