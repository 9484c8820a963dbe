"""Reports of the agents of other hosts, as the driver asks for them. The cluster is scripted here.

- a host that does not answer within the limit is lost with its processes, and is not waited for again
- a report that comes late is taken, and the host is not lost
- a report that was under way while its process was killed is not taken
- an error of Ray, such as the death of an agent, names the host
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.cluster.agent import Started
from rlhf_core.cluster.nodes import SILENT_SECONDS, ClusterNodes
from rlhf_core.cluster.stored_output import StoredOutput
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import StoreError, WorkerDied
from rlhf_core.storage.store import Store
from rlhf_core.system.heartbeat import Monitor, Participant
from rlhf_core.system.processes import ProcessId
from tests.support.scripted_cluster import ScriptedCluster, node


class Agent:
    """Reports one process, at once while `answers`. The other calls do nothing, or raise `error`."""

    def __init__(self, node_id: str) -> None:
        self.error: Exception | None = None
        self.asked = 0
        self._node_id = node_id
        self._waiting: Future[list[Participant]] | None = None
        self._answers = True
        self._names = [f"rank on {self.host}"]

    @property
    def host(self) -> str:
        return f"host-{self._node_id}"

    def start(self, _node_id: str, _token: str) -> Started:
        self._fail()
        return Started(self.host, "machine", self._node_id)

    def fetch_artifacts(self, _refs: object) -> list[Path]:
        return []

    def kill(self, names: list[str]) -> None:
        self._names = [name for name in self._names if name not in names]

    def upload(self, _target: str) -> None:
        self._fail()

    def report(self) -> Any:
        self.asked += 1
        if self._answers:
            return self._participants()
        self._waiting, self._found = Future(), self._participants()
        return self._waiting

    def fall_silent(self) -> None:
        self._answers = False

    def answer(self) -> None:
        """Answer the call that waits, and all later ones."""
        self._answers = True
        assert self._waiting is not None
        self._waiting.set_result(self._found)

    def _participants(self) -> list[Participant]:
        return [Participant(name, ProcessId(1, 0), self.host, 1, 600.0, "step") for name in self._names]

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


def cluster_nodes(agents: list[Agent], folder: Path) -> ClusterNodes:
    """Return what the driver on the node "1" has of the hosts of these agents, before it joins them."""
    actors = {agent._node_id: agent for agent in agents}
    cluster = ScriptedCluster(
        [node("1", "host-1"), *(node(agent._node_id, agent.host) for agent in agents)], actors=actors
    )
    config = PipelineConfig()
    output = StoredOutput(folder / "out", Store(folder / "store"), "artifacts/sft/k/000001")
    return ClusterNodes(config, folder, [], output, Monitor(folder / "stacks"), cluster=cluster)


@pytest.fixture
def agents() -> list[Agent]:
    return [Agent("2"), Agent("3")]


@pytest.fixture(autouse=True)
def on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")


@pytest.fixture
def nodes(agents: list[Agent], tmp_path: Path) -> ClusterNodes:
    found = cluster_nodes(agents, tmp_path)
    found.join({"1": {}, "2": {}, "3": {}})
    return found


def states(nodes: ClusterNodes, passed: float = 1.0, *, fresh: bool = False) -> list[str]:
    return [participant.state for participant in nodes.participants(passed, fresh=fresh)]


def test_a_lost_host_is_not_waited_for(
    nodes: ClusterNodes, agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert states(nodes, fresh=True) == ["running", "running"]
    agents[1].fall_silent()
    assert states(nodes) == ["running", "running"], "asked, but not silent for long"
    assert states(nodes, SILENT_SECONDS) == ["running", "lost"]
    monkeypatch.setattr("rlhf_core.cluster.nodes._FRESH_SECONDS", 60.0)
    started, asked = time.monotonic(), [agent.asked for agent in agents]
    assert states(nodes, fresh=True) == ["running", "lost"]
    assert time.monotonic() - started < 30.0
    assert agents[0].asked > asked[0] and agents[1].asked == asked[1]


def test_a_late_report_is_taken(nodes: ClusterNodes, agents: list[Agent]) -> None:
    states(nodes, fresh=True)
    agents[1].fall_silent()
    for _ in range(int(SILENT_SECONDS) - 2):
        assert states(nodes) == ["running", "running"]
    [_, waiting] = nodes.participants(0.0, fresh=False)
    assert waiting.seconds == int(SILENT_SECONDS) - 2, "they are not known to have made progress"
    agents[1].answer()
    [_, answered] = nodes.participants(1.0, fresh=False)
    assert (answered.state, answered.seconds) == ("running", 0.0)


def test_a_report_from_before_a_kill_is_not_taken(nodes: ClusterNodes, agents: list[Agent]) -> None:
    states(nodes, fresh=True)
    agents[1].fall_silent()
    states(nodes)
    nodes.kill(["rank on host-3"])
    agents[1].answer()
    assert [each.name for each in nodes.participants(1.0, fresh=False)] == ["rank on host-2"]


def test_an_error_of_an_agent_names_its_host(
    nodes: ClusterNodes, agents: list[Agent], tmp_path: Path
) -> None:
    agents[1].error = WorkerDied("a process died: The actor died.")
    with pytest.raises(WorkerDied, match=r"^host host-3: a process died: The actor died\.$"):
        nodes.upload("checkpoints/k/step-00000001/a")()
    with pytest.raises(WorkerDied, match=r"^host host-3 \(10\.0\.0\.1\): a process died"):
        cluster_nodes(agents, tmp_path).join({"1": {}, "3": {}})
    agents[1].error = StoreError("host host-3, upload: denied")
    with pytest.raises(StoreError, match=r"^host host-3, upload: denied$"):
        nodes.upload("checkpoints/k/step-00000001/a")()
