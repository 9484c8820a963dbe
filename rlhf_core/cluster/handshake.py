"""The handshake: what every node of a cluster reports before anything heavy is started on it.

A node with other code or other versions would compute other numbers, or fail with an error of pickle. A node
that does not reach the store fails after the models are loaded. All of this is found in seconds, by one task
without resources per node. One error names each node and its differences.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.cluster.placement import RAY_CLUSTER, RayCluster, node_name
from rlhf_core.cluster.rpc import Pending, settle
from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import uses_gpu
from rlhf_core.errors import ConfigError, Finding, InfrastructureError, RLHFError
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.planning.check import check_cluster_memory, check_gpu_counts
from rlhf_core.planning.hardware import cluster_hardware
from rlhf_core.storage.s3 import s3_endpoint
from rlhf_core.storage.store import Store
from rlhf_core.storage.versions import sources_digest, versions
from rlhf_core.system.home import home_problem
from rlhf_core.system.machine import machine

log = logging.getLogger(__name__)

# Not `store.retry_seconds`: a node without access to the store is to be named in seconds.
_STORE_SECONDS = 5.0
_STORE_OF_HOSTS = "several hosts need a bucket, or a folder that all of them mount at the same path"
_NOT_COMPARED = ("git", "gpu_driver")
"""The digest of the sources covers the commit. NCCL works across drivers."""


@dataclass(frozen=True)
class StoreProbe:
    """What a node needs to show that it reaches the store."""

    url: str
    endpoint: str | None
    prefix: str
    """Prefix of the objects that driver and nodes write."""

    def store(self) -> Store:
        return Store(self.url, self.endpoint, _STORE_SECONDS)

    def key(self, node: str) -> str:
        return f"{self.prefix}/{node}"


def check_nodes(config: PipelineConfig, stages: Collection[StageName]) -> None:
    """Ask every node of the cluster for its report. Call it after `connect`, on a cluster.

    Args:
        config: The configuration.
        stages: The stage and the later ones of its run.

    Raises:
        ConfigError: Nodes differ from this process, and the message names each of them with its differences;
            or the GPUs of all nodes are too few or too small for one of `stages`. For other stages, this is a
            warning.
        InfrastructureError: A node did not answer within `run.timeouts.start`.
    """
    nodes = RAY_CLUSTER.nodes()
    # A cluster that is created for one stage has only the GPUs of that stage.
    own_clusters = any(config.run.executor_of(stage) in ("kuberay", "slurm") for stage in STAGES)
    if uses_gpu(config.run.device) and not own_clusters:
        _check_gpus(nodes, config, stages)
    probe = _store_probe(config)
    store = probe.store()
    # Each side reads what the other one wrote: a folder that is not shared would pass a test of writing.
    store.put_bytes(probe.key("driver"), b"driver")
    try:
        calls = _ask(nodes, probe, config)
        reports = _reports(nodes, calls, config.run.timeouts.start, RAY_CLUSTER)
        nodes = [node for node in nodes if node["NodeID"] in reports]
        problems = []
        for node in nodes:
            report = reports[node["NodeID"]]
            found = [report] if isinstance(report, str) else _problems(report, config)
            if not isinstance(report, str):
                if store.read_bytes(probe.key(node["NodeID"])) is None and not report["store"]:
                    found.append(
                        f"store.url={config.store_url}: this host does not see what that node writes;"
                        f" {_STORE_OF_HOSTS}"
                    )
                log.info("node %s: %s", node_name(node), _describe(report))
            if found:
                problems.append(f"{node_name(node)}: {'; '.join(found)}")
    finally:
        # A probe that stays harms nothing, and its error would hide what was found.
        with suppress(RLHFError):
            store.delete_prefix(probe.prefix)
    if problems:
        raise ConfigError(
            f"RAY_ADDRESS: all {len(nodes)} nodes of the cluster must run the same code and reach the store;"
            f" {len(problems)} do not:\n"
            + "\n".join(problems)
            + "\nuse one image on all nodes, and give each of them"
            " the credentials of the store"
        )
    if uses_gpu(config.run.device):
        _check_memory(nodes, reports, config, () if own_clusters else stages)


def _check_gpus(nodes: list[dict[str, Any]], config: PipelineConfig, stages: Collection[StageName]) -> None:
    """Compare the GPUs of the cluster with the needs of all stages, as the preflight does on one host."""
    gpus = sum(node["Resources"].get("GPU", 0) for node in nodes)
    _raise_or_warn(list(check_gpu_counts(config, int(gpus), "registered", stages)))


def _raise_or_warn(found: Sequence[Finding]) -> None:
    """Raise one ConfigError for all that are errors. Otherwise log all of them."""
    problems = [finding.message for finding in found if isinstance(finding, ConfigError)]
    if problems:
        raise ConfigError("\n".join(problems))
    for warning in found:
        log.warning("%s", warning)


def _check_memory(
    nodes: list[dict[str, Any]],
    reports: Mapping[str, Any],
    config: PipelineConfig,
    stages: Collection[StageName],
) -> None:
    """Compare the memory of the GPUs with the needs of all stages; those of `stages` must fit."""
    hosts = [(int(node["Resources"].get("GPU", 0)), reports[node["NodeID"]]["gpus"]) for node in nodes]
    hardware = cluster_hardware(hosts)
    if hardware is None:
        log.info("the memory of the GPUs is not compared: unknown, or of several kinds")
        return
    found = check_cluster_memory(config, hardware, stages)
    if found is not None:
        _raise_or_warn([found])


def _store_probe(config: PipelineConfig) -> StoreProbe:
    url = config.store_url
    if config.store_folder is not None:
        url = str(Path(config.store_folder).absolute())
    endpoint = s3_endpoint(config.store.endpoint)
    # Random, because several runs may look at one store at the same time.
    return StoreProbe(url, endpoint, f"probe-{uuid.uuid4().hex}")


def _ask(
    nodes: list[dict[str, Any]], probe: StoreProbe, config: PipelineConfig
) -> list[Pending[dict[str, Any]]]:
    """Start a task on each node that returns its report."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # A task of Ray has another working folder than this process.
    home = str(Path(config.run.home).absolute())
    calls: list[Pending[dict[str, Any]]] = []
    for node in nodes:
        task = ray.remote(report_node).options(
            # No resources, so that nodes which are in use answer as well. No retries: it must be this node.
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        calls.append(Pending(task.remote(probe, node["NodeID"], home)))
    return calls


def _reports(
    nodes: list[dict[str, Any]], calls: list[Pending[dict[str, Any]]], seconds: float, cluster: RayCluster
) -> dict[str, Any]:
    """Return the report of each node by its id, or a sentence with the reason why it has none.

    Nodes that Ray loses in the meantime are left out. Raises InfrastructureError if a node has not answered
    after `seconds`.
    """
    answers = list(zip(nodes, settle(calls, seconds), strict=True))
    silent = [node_name(node) for node, answer in answers if isinstance(answer, TimeoutError)]
    if silent:
        raise InfrastructureError(
            f"{', '.join(silent)}: no answer within {seconds:g} s (run.timeouts.start); end these nodes, or"
            " wait until they have started"
        )
    reports: dict[str, Any] = {}
    for node, answer in answers:
        if not isinstance(answer, RLHFError):
            reports[node["NodeID"]] = answer
        # A node without power is alive for Ray until its health check fails, after about a minute.
        elif node["NodeID"] not in {each["NodeID"] for each in cluster.nodes()}:
            log.warning("%s is lost, and is not used: %s", node_name(node), answer.message)
        else:
            reports[node["NodeID"]] = f"cannot run this code: {answer.message.splitlines()[0][:300]}"
    return reports


def report_node(probe: StoreProbe, node: str, home: str) -> dict[str, Any]:
    """Return what this node reports. It runs as a task of Ray.

    Args:
        probe: The store.
        node: Ray's id of this node.
        home: `run.home`.
    """
    return {
        "versions": _versions(),
        "gpus": machine().gpu_names(),
        "store": _reach_store(probe, node),
        "home": home_problem(Path(home)) or "",
    }


def _versions() -> dict[str, str]:
    """Return the versions of this process. Nodes exchange pickled objects, so all of their code is equal."""
    return {**versions(), "code": sources_digest()}


def _reach_store(probe: StoreProbe, node: str) -> str:
    """Return why this node does not reach the store, or an empty string."""
    try:
        store = probe.store()
        if store.read_bytes(probe.key("driver")) is None:
            return f"the folder is not shared with the host of the driver; {_STORE_OF_HOSTS}"
        store.put_bytes(probe.key(node), b"node")
    except RLHFError as error:
        return error.message
    return ""


# -- comparison --


def _problems(report: Mapping[str, Any], config: PipelineConfig) -> list[str]:
    """Return in words what is wrong with one node."""
    found = compare_versions(_versions(), report["versions"])
    if report["store"]:
        found.append(f"store.url={config.store_url}: {report['store']}")
    if report["home"]:
        found.append(f"run.home={config.run.home}: {report['home']}")
    return found


def compare_versions(own: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return one phrase for each version that differs from that of this process."""
    found = []
    for name in sorted({*own, *other} - {*_NOT_COMPARED}):
        if own.get(name) != other.get(name):
            found.append(
                f"{name} is {other.get(name, 'missing')}, and {own.get(name, 'missing')} on this host"
            )
    return found


def _describe(report: Mapping[str, Any]) -> str:
    devices = f"{len(report['gpus'])} x {report['gpus'][0]}" if report["gpus"] else "no GPU"
    return f"{devices}, code {report['versions']['code']}"
