"""The comparison of the nodes of a cluster, and what their ranks get from the driver. The handshake itself
runs on hosts in `tests/integration/test_several_hosts.py`.

- a node with the same report has no problem
- each difference is a phrase with the field, the value of the node and the rule
- a node that Ray loses during the handshake is left out; one that does not answer is named
- commit and driver version are not compared
- a node reports what it can use; a folder that is not shared is no store; an empty variable is no endpoint
- ranks get settings and `run.env`, and nothing secret
- `run.env` refuses other names and secrets
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.cluster import handshake
from rlhf_core.cluster.connect import rank_environment
from rlhf_core.cluster.handshake import StoreProbe, compare_versions, report_node
from rlhf_core.cluster.rpc import Pending
from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import ConfigError, InfrastructureError
from rlhf_core.executors.spec import stage_environment
from rlhf_core.pipeline import STAGES, stages_between
from tests.support.scripted_cluster import ScriptedCluster, node


@pytest.fixture
def probe(tmp_path: Path) -> StoreProbe:
    probe = StoreProbe(str(tmp_path / "store"), None, "probe-1")
    probe.store().put_bytes(probe.key("driver"), b"driver")
    return probe


@pytest.fixture
def report(probe: StoreProbe, tmp_path: Path) -> dict[str, Any]:
    return report_node(probe, "node-1", str(tmp_path / "home"))


def problems(report: dict[str, Any]) -> list[str]:
    return handshake._problems(report, PipelineConfig())


def test_the_same_host_has_no_problem(report: dict[str, Any], probe: StoreProbe) -> None:
    assert problems(report) == []
    assert probe.store().read_bytes(probe.key("node-1")) == b"node"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["versions"].update(code="0123456789ab"), ("code is 0123456789ab", "on this host")),
        (lambda r: r["versions"].pop("ray"), ("ray is missing",)),
        (lambda r: r.update(store="denied"), ("store.url", "denied")),
        (lambda r: r.update(home="it is a file"), ("run.home", "it is a file")),
    ],
)
def test_each_difference_is_named(
    report: dict[str, Any], change: Callable[[dict[str, Any]], Any], words: tuple[str, ...]
) -> None:
    change(report)
    (problem,) = problems(report)
    assert all(word in problem for word in words), problem


def test_commit_and_driver_are_not_compared() -> None:
    assert compare_versions({"git": "a", "torch": "2"}, {"gpu_driver": "570", "torch": "2"}) == []


def test_another_folder_is_no_store(tmp_path: Path) -> None:
    probe = StoreProbe(str(tmp_path / "elsewhere"), None, "probe-1")
    report = report_node(probe, "node-1", str(tmp_path / "home"))
    assert "not shared" in report["store"]


def test_an_empty_variable_names_no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "")
    assert handshake._store_probe(PipelineConfig()).store().is_local


def test_ranks_get_settings_and_no_secret() -> None:
    config = PipelineConfig.model_validate({"run": {"env": {"NCCL_DEBUG": "INFO"}, "device": "cpu"}})
    given = {
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "eu",
        "HF_TOKEN": "secret",
        "HOME": "/root",
        "NCCL_SOCKET_IFNAME": "eth0",
        "RAY_AUTH_TOKEN": "secret",
    }
    ranks = rank_environment(config.run, "cpu", given)
    assert not {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "HOME", "NCCL_SOCKET_IFNAME", "RAY_AUTH_TOKEN"} & set(
        ranks
    )
    assert ranks["NCCL_DEBUG"] == "INFO" and ranks["AWS_REGION"] == "eu"
    # The same settings as on this host.
    stage = stage_environment(config, given)
    assert {name: stage[name] for name in ranks} == ranks
    for name in ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "DO_NOT_TRACK", "DS_ACCELERATOR"):
        assert name in ranks
    on_gpus = rank_environment(config.run, "cuda", given)
    assert "CUDA_VISIBLE_DEVICES" not in on_gpus, "Ray chooses the GPUs"
    assert on_gpus["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "HF_TOKEN", "HF_ENDPOINT", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_DEBUG_FILE",
     "NCCL_", "nccl_debug", "NCCL_DEBUG "],
)  # fmt: skip
def test_other_variables_and_secrets_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_tree({"run": {"env": {name: "x"}}}, "test")
    for words in ("run.env", "the list in docs/configuration.md", "secrets", repr(name)):
        assert words in caught.value.message


def test_the_gpus_of_all_nodes_are_counted_for_the_stages_of_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = PipelineConfig.model_validate(
        {"run": {"device": "cuda"}, "sft": {"deepspeed": {"ranks": 16}}, "ppo": {"engine": {"count": 2}}}
    )
    two = [{"Resources": {"GPU": 8.0}}] * 2 + [{"Resources": {"CPU": 4.0}}]
    handshake._check_gpus(two, config, tuple(STAGES))
    too_few = r"sft\.deepspeed\.ranks: must be at most the 8 registered GPUs; got 16"
    with pytest.raises(ConfigError, match=too_few):
        handshake._check_gpus([{"Resources": {"GPU": 8.0}}], config, stages_between("data", "sft"))
    assert caplog.text == ""
    handshake._check_gpus([{"Resources": {"GPU": 8.0}}], config, stages_between("reward", "register"))
    assert re.search(too_few, caplog.text)


def test_a_node_that_ray_loses_meanwhile_is_left_out(report: dict[str, Any]) -> None:
    """As after a power cut, which Ray notices a minute later."""
    nodes = [node("1" * 56, "one", address="10.0.0.1"), node("2" * 56, "two", address="10.0.0.2")]
    one, two = (each["NodeID"] for each in nodes)
    cluster = ScriptedCluster(nodes)
    calls: list[Pending[dict[str, Any]]] = [Pending(Future(), cluster.objects) for _ in nodes]
    calls[0].reference.set_result(report)
    calls[1].reference.set_exception(InfrastructureError("Ray: the node is gone"))
    found = handshake._reports(nodes, calls, 1.0, cluster)
    assert found == {one: report, two: "cannot run this code: Ray: the node is gone"}
    nodes[1]["Alive"] = False
    assert handshake._reports(nodes, calls, 1.0, cluster) == {one: report}


def test_a_node_without_an_answer_is_named(report: dict[str, Any]) -> None:
    nodes = [node("1", "one", address="10.0.0.1"), node("2", "two", address="10.0.0.2")]
    cluster = ScriptedCluster(nodes)
    calls: list[Pending[dict[str, Any]]] = [Pending(Future(), cluster.objects) for _ in nodes]
    calls[0].reference.set_result(report)
    with pytest.raises(InfrastructureError, match=r"^two \(10\.0\.0\.2\): no answer within 0\.1 s"):
        handshake._reports(nodes, calls, 0.1, cluster)
