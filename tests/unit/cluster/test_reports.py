"""Reports of the agents of other hosts, as the driver asks for them. Ray is scripted here.

- a host that does not answer within the limit is lost with its processes, and is not waited for again
- a report that comes late is taken, and the host is not lost
- an error of Ray, such as the death of an agent, names the host
- the versions of all GPU drivers are reported
- the more hosts there are, the more rarely each is asked, but often enough to notice the loss of one
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.cluster import nodes as nodes_module
from rlhf_core.cluster.agent import NodeAgent, Started
from rlhf_core.cluster.nodes import SILENT_SECONDS, ClusterNodes, report_seconds, silent_seconds
from rlhf_core.cluster.rpc import Pending
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import StoreError, WorkerDied
from rlhf_core.system.heartbeat import Monitor, Participant
from rlhf_core.system.processes import ProcessId


class Agent:
    """Answers at once while `answers`."""

    def __init__(self, host: str) -> None:
        self.answers = True
        self.error: Exception | None = None
        self.asked = 0
        self._host = host

    def call(self, *_method: Any) -> Pending[Any]:
        self.asked += 1
        return Pending(self)

    def result(self) -> list[Participant]:
        if self.error is not None:
            raise self.error
        return [Participant(f"rank on {self._host}", ProcessId(1, 0), self._host, 1, 600.0, "step")]


@pytest.fixture
def agents() -> list[Agent]:
    return [Agent(f"host-{number}") for number in (2, 3)]


@pytest.fixture
def nodes(agents: list[Agent], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> ClusterNodes:
    def ready(pending: Sequence[Pending[Agent]], seconds: float) -> list[bool]:
        ended = [call.reference.answers for call in pending]
        if not all(ended):
            time.sleep(seconds)
        return ended

    monkeypatch.setattr(nodes_module, "ready", ready)
    monkeypatch.setattr(
        nodes_module, "fetch", lambda pending, _: [call.reference.result() for call in pending]
    )
    found = ClusterNodes(PipelineConfig(), tmp_path, [], Monitor(tmp_path / "stacks"))
    for number, agent in enumerate(agents):
        actor: Any = agent
        found._hosts.append(nodes_module._Host(str(number), actor, f"host-{number + 2}", str(number)))
    return found


def states(nodes: ClusterNodes, passed: float = 1.0, *, fresh: bool = False) -> list[str]:
    return [participant.state for participant in nodes.participants(passed, fresh=fresh)]


def test_a_lost_host_is_not_waited_for(nodes: ClusterNodes, agents: list[Agent]) -> None:
    assert states(nodes, fresh=True) == ["running", "running"]
    agents[1].answers = False
    assert states(nodes) == ["running", "running"], "asked, but not silent for long"
    assert states(nodes, SILENT_SECONDS) == ["running", "lost"]
    started, asked = time.monotonic(), [agent.asked for agent in agents]
    assert states(nodes, fresh=True) == ["running", "lost"]
    assert time.monotonic() - started < 1.0
    assert agents[0].asked > asked[0] and agents[1].asked == asked[1]


def test_a_late_report_is_taken(nodes: ClusterNodes, agents: list[Agent]) -> None:
    states(nodes, fresh=True)
    agents[1].answers = False
    for _ in range(int(SILENT_SECONDS) - 2):
        assert states(nodes) == ["running", "running"]
    [_, waiting] = nodes.participants(0.0, fresh=False)
    assert waiting.seconds == int(SILENT_SECONDS) - 2, "they are not known to have made progress"
    agents[1].answers = True
    [_, answered] = nodes.participants(1.0, fresh=False)
    assert (answered.state, answered.seconds) == ("running", 0.0)


def test_an_error_of_an_agent_names_its_host(nodes: ClusterNodes, agents: list[Agent]) -> None:
    agents[1].error = WorkerDied("a process died: The actor died.")
    with pytest.raises(WorkerDied, match=r"^host host-3: a process died: The actor died\.$"):
        nodes.discard("checkpoints/k/step-00000001")
    [_, host] = nodes._hosts
    with pytest.raises(WorkerDied, match=r"^host host-3: a process died"):
        nodes._started(host)
    agents[1].error = StoreError("host host-3, upload: denied")
    with pytest.raises(StoreError, match=r"^host host-3, upload: denied$"):
        nodes.discard("checkpoints/k/step-00000001")


class Starts:
    """An agent that starts, with a GPU driver of this version, and has nothing to fetch."""

    def __init__(self, node_id: str, driver: str) -> None:
        self._started = Started(f"host-{node_id}", "machine", node_id, driver)

    def call(self, method: Any, *_args: Any) -> Pending[Any]:
        answer = self._started if method is NodeAgent.start else None
        return Pending(SimpleNamespace(result=lambda: answer))


def test_gpu_drivers_of_other_hosts_are_reported(
    nodes: ClusterNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers = {"a": "NVIDIA 590", "b": "NVIDIA 580", "c": "", "d": "NVIDIA 590"}
    monkeypatch.setattr(nodes_module, "node_names", lambda: dict.fromkeys(drivers, "host"))
    monkeypatch.setattr(nodes, "_start", lambda node_id: Starts(node_id, drivers[node_id]))
    found: list[str] = []
    nodes.on_gpu_drivers = found.append
    nodes._gpu_drivers.clear()
    nodes._add_hosts(["c"])
    assert found == []
    nodes._add_hosts(["a", "b", "d"])
    assert found == ["NVIDIA 580, NVIDIA 590"]


def test_many_hosts_are_asked_more_rarely() -> None:
    assert [report_seconds(hosts) for hosts in (1, 10, 125)] == [1.0, 1.0, 12.5]
    assert [silent_seconds(hosts) for hosts in (1, 100, 125)] == [30.0, 30.0, 37.5]
