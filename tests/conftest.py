"""Fixtures that several kinds of tests share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.sampled import SEED, seed, share


@dataclass(frozen=True)
class S3Server:
    """A running S3-compatible server."""

    endpoint: str
    """`http://127.0.0.1:port`"""
    bucket: str
    """An existing bucket."""

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LINES] = []
    config.stash[_COUNTS] = Counter()
    seed()
    # A shell starts background commands with SIGINT ignored, and so would be every process that a test
    # interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As in the processes of a stage. Tests run two at a time, and spinning threads would stall the other one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Collect no garbage while all packages are imported: millions of objects, and all of them stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "sampled" in getattr(item, "fixturenames", ()):
            item.add_marker("sampled")


@pytest.fixture
def sampled() -> Callable[[Sequence[Any], int], list[Any]]:
    """Return `tests.support.sampled.share`, and give the test the mark `sampled`."""
    return share


_LINES = pytest.StashKey[list[str]]()
_COUNTS = pytest.StashKey[Counter[str]]()


@pytest.fixture(scope="session")
def summary_lines(pytestconfig: pytest.Config) -> list[str]:
    """Lines to show at the end of the whole run, also if all tests pass: tables of faults and counts."""
    return pytestconfig.stash[_LINES]


@pytest.fixture(scope="session")
def summary_counts(pytestconfig: pytest.Config) -> Counter[str]:
    """Numbers by name, added up over all processes of the run. They are shown at its end."""
    return pytestconfig.stash[_COUNTS]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of pytest-xdist's processes
        session.config.workeroutput["counted"] = [
            session.config.stash[_LINES],
            dict(session.config.stash[_COUNTS].items()),
        ]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    lines, counts = getattr(node, "workeroutput", {}).get("counted", ([], {}))
    node.config.stash[_LINES].extend(lines)
    node.config.stash[_COUNTS].update(counts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = [f"{name}: {count}" for name, count in config.stash[_COUNTS].items()]
    terminalreporter.section("counted")
    for line in [*config.stash[_LINES], *counts, f"sweeps are sampled by {SEED}={seed()}"]:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def new_home(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Return a function that makes a home with MLflow's database, whose migrations take seconds."""
    from rlhf_core.tracking.database import ensure_database

    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    ensure_database(database)

    def make(home: Path) -> Path:
        home.mkdir()
        shutil.copy(database, home)
        return home

    return make


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    """A real S3-compatible server on loopback, with one bucket; child processes reach it through the
    environment, which the tests of other files do not have.
    """
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ACCESS_KEY_ID", "test-key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="rlhf-test")
        yield S3Server(endpoint, "rlhf-test")
        server.stop()
