"""Two hosts and a store on a third, with Ray between them (`tests.support.hosts`).

- a result that takes longer than one poll to cross a slow link arrives
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.hosts import Host, missing_right, ray_cluster, s3_server, start_hosts

pytestmark = pytest.mark.skipif(missing_right() is not None, reason=str(missing_right()))

SLOW_RESULT = """
import time, ray
from rlhf_core.cluster.connect import connect
from rlhf_core.cluster.rpc import Pending, receive
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

connect(1, "cpu")
here = ray.get_runtime_context().get_node_id()
(there,) = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != here]
make = ray.remote(lambda: bytes(20 << 20))
strategy = NodeAffinitySchedulingStrategy(there, soft=False)
call = Pending(make.options(scheduling_strategy=strategy).remote())
ray.wait([call.reference], fetch_local=False, timeout=60)
received, polls, start = {}, 0, time.monotonic()
while not received and time.monotonic() < start + 60:
    receive([call], received, seconds=0.2)
    polls += 1
print("received", len(received[0]) >> 20, "MiB", "in several polls" if polls > 2 else "at once")
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Two hosts for Ray, and one for the store."""
    with start_hosts(3) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def store(hosts: list[Host]) -> Iterator[dict[str, str]]:
    """The environment of the store's clients."""
    with s3_server(hosts[2]) as environment:
        yield environment


@pytest.fixture(scope="module")
def cluster(hosts: list[Host]) -> Iterator[dict[str, str]]:
    """The environment of processes that use the cluster of the first two hosts."""
    with ray_cluster(hosts[:2]) as address:
        yield {"RAY_ADDRESS": address}


def test_a_result_arrives_that_takes_longer_than_one_poll(hosts: list[Host], cluster: dict[str, str]) -> None:
    hosts[1].limit("100mbit")
    code, output = hosts[0].run(sys.executable, "-c", SLOW_RESULT, seconds=120, **cluster)
    hosts[1].limit(None)
    assert code == 0, output
    assert "received 20 MiB in several polls" in output, output
