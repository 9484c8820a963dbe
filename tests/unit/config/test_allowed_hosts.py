"""Which hosts may be asked.

- a url is http(s) with a host, and carries no credentials, query or fragment
- a host is listed by its name in any case, its address, or a network around its address
- private, loopback, link-local, mapped, translated and multicast addresses are forbidden unless the
  address itself is listed: a listed name is not enough, but for localhost
- the message about an address in a list has its index
- the addresses of MLflow and of an S3 server are those at which a server can be
"""

from __future__ import annotations

import pytest

from rlhf_core.config.allowed_hosts import forbidden, host_of, is_listed, is_public, url_problem
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.rewards import RemoteReward
from rlhf_core.storage.store import endpoint_problem
from rlhf_core.tracking.check import check_tracking, tracker_problem


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


@pytest.mark.parametrize(
    ("host", "allowed", "listed"),
    [
        ("a.example", ("A.example",), True),
        ("b.a.example", ("a.example",), False),
        ("a.example.evil", ("a.example",), False),
        ("127.0.0.1", ("127.0.0.1",), True),
        ("10.1.2.3", ("10.0.0.0/8",), True),
        ("11.1.2.3", ("10.0.0.0/8", "localhost"), False),
        ("::1", ("::1",), True),
        ("2130706433", ("127.0.0.1",), False),
    ],
)
def test_a_host_is_listed_by_name_address_or_network(
    host: str, allowed: tuple[str, ...], listed: bool
) -> None:
    assert is_listed(host, allowed) == listed


def test_the_host_of_a_url_has_no_port_brackets_or_capitals() -> None:
    assert [host_of("http://A.B:80/x"), host_of("http://[::1]:80/x")] == ["a.b", "::1"]


PRIVATE = ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "224.0.0.1",
           "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
           "::ffff:0:7f00:1",
           "ff02::1", "64:ff9b::a9fe:a9fe", "64:ff9b::127.0.0.1", "64:ff9b:1::1", "2002:7f00:1::",
           "2002:5db8:d70e::1", "::127.0.0.1", "::93.184.215.14", "fec0::1", "192.88.99.1", "3fff::1",
           "5f00::1", "2001:db8::1",
           "100::1",
           "198.18.0.1"]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_a_listed_name_may_not_lead_to_a_private_address(address: str) -> None:
    assert forbidden("a.example", ["93.184.215.14", address], ("a.example", "11.0.0.0/8")) == address
    assert not is_public(address)


def test_a_private_address_is_allowed_by_itself_or_its_network() -> None:
    assert forbidden("a.example", ["10.1.2.3"], ("a.example", "10.0.0.0/8")) is None
    assert forbidden("10.1.2.3", ["10.1.2.3"], ("10.1.2.3",)) is None
    assert forbidden("a.example", ["::ffff:10.1.2.3"], ("10.1.2.3",)) is None


def test_localhost_is_loopback_by_its_name_and_nothing_else() -> None:
    assert forbidden("localhost", ["::1", "127.0.0.1"], ("localhost",)) is None
    assert forbidden("localhost", ["10.0.0.1"], ("localhost",)) == "10.0.0.1"


def test_public_addresses_are_allowed() -> None:
    addresses = ["93.184.215.14", "2606:2800:21f::1", "64:ff9b::93.184.215.14"]
    assert forbidden("a.example", addresses, ("a.example",)) is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://one/x?key=1", "urls.1: it must have no user, .* give a token by RLHF_REWARD_TOKEN"),
        ("http://two/x", r"urls.1 must lead to allowed_hosts \(one\); got two"),
    ],
)
def test_the_address_of_a_reward_service_is_checked(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RemoteReward(type="remote", urls=("http://one/x", url), allowed_hosts=("one",))


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
