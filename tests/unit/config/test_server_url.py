"""Addresses of servers.

- a url is http(s) with a host, and carries no credentials, query or fragment
- the message about an address in a list has its index
- the addresses of MLflow and of an S3 server are those at which a server can be
"""

from __future__ import annotations

import pytest

from rlhf_core.config.base import host_of, url_problem
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.rewards import RemoteReward
from rlhf_core.storage.store import endpoint_problem
from rlhf_core.tracking.check import check_tracking
from rlhf_core.tracking.database import tracker_problem


@pytest.mark.parametrize(
    "url", ["http://h/score", "https://H.example:8443/a/b", "http://[::1]:80/", "http://10.0.0.1"]
)
def test_a_plain_url_has_no_problem(url: str) -> None:
    assert url_problem(url, "TOKEN") is None


@pytest.mark.parametrize(
    "url",
    ["", "h/score", "ftp://h/x", "http://", "http:///x", "http://h:port/", "http://h:0/", "http://h:99999/", "http://[::1/",
     "http://u:p@h/", "http://u@h/", "http://h/?key=1", "http://h/#a", "http://h/a b", "http://h/\n", "file:///etc/passwd",
     "http://0177.0.0.1/", "http://127.1/", "http://2130706433/", "http://0x7f.1/", "http://h..x/",
     "http://-h/", "http://b\u00fccher/", "http://xn--/", "http://xn--\u0100/", f"http://{'a' * 64}/"],
)  # fmt: skip
def test_any_other_url_has_one(url: str) -> None:
    assert url_problem(url, "TOKEN") is not None


def test_the_host_of_a_url_has_no_port_brackets_or_capitals() -> None:
    assert [host_of("http://A.B:80/x"), host_of("http://[::1]:80/x")] == ["a.b", "::1"]


def test_the_address_of_a_reward_service_is_checked() -> None:
    with pytest.raises(
        ValueError, match=r"urls\.1: it must have no user, .* give a token by RLHF_REWARD_TOKEN"
    ):
        RemoteReward(type="remote", urls=("http://one/x", "http://one/x?key=1"))


@pytest.mark.parametrize(
    "url",
    [
        "http://host:99999", "http://host:port", "http://host:0", "http://[::1", "http://ho st:1",
        "http://host: 5000", "http://a..b:5000", "http://-a:5000", "http://256.256.256.256:5000",
        "http://127.1:5000", "http://:5000", "http:///x", "http://.:5000",
    ],
)  # fmt: skip
def test_an_address_without_a_possible_server_is_refused_before_anything_starts(url: str) -> None:
    """A run continues without a tracker that does not answer, so that only its last stage would fail."""
    assert tracker_problem(url) and endpoint_problem(url)
    [problem] = check_tracking(PipelineConfig.model_validate({"tracking": {"uri": url}}))
    assert str(problem).startswith("tracking.uri (or MLFLOW_TRACKING_URI): ")


@pytest.mark.parametrize("url", ["http://host:5000", "https://a-b.example.org/mlflow", "http://[::1]:9000"])
def test_an_address_of_a_server_is_accepted(url: str) -> None:
    assert tracker_problem(url) is None and endpoint_problem(url) is None
    assert tracker_problem(f"{url}?x=1") and tracker_problem(f"{url}#x")
