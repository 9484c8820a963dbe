"""Fixtures that several kinds of tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


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


def pytest_configure() -> None:
    # A shell starts background commands with SIGINT ignored, and so would be every process that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


_SUMMARY = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def summary_lines(pytestconfig: pytest.Config) -> list[str]:
    """Lines that are shown at the end of the whole run, also when all is well: tables of faults and counts."""
    return pytestconfig.stash.setdefault(_SUMMARY, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash.get(_SUMMARY, []):
        terminalreporter.section("counted")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3-compatible server on loopback, with one bucket; child processes reach it through the environment."""
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
