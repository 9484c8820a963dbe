"""The schemas of KubeRay and Kueue that this project has: each rule refuses what breaks it.

The rules are those of the custom resource definitions, of KubeRay's checks and of Kueue's webhook.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deployment_schemas import KUEUE, RAYJOB, problems

FILES = Path(__file__).resolve().parents[2] / "deployments" / "kubernetes"
QUEUE = "kueue.x-k8s.io/queue-name"
CLUSTER = "spec/rayClusterSpec"
HEAD, WORKERS = f"{CLUSTER}/headGroupSpec", f"{CLUSTER}/workerGroupSpecs/0"
QUOTA = "spec/resourceGroups/0/flavors/1/resources/0"


def documents(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FILES / file).read_text(encoding="utf-8")))


def rayjob(queue: str | None = None) -> dict[str, Any]:
    [body] = copy.deepcopy(documents("rayjob.yaml"))
    if queue is not None:
        body["metadata"]["labels"][QUEUE] = queue
        body["spec"]["suspend"] = True
    return body


def changed(body: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `body` with other values at paths such as `spec/suspend`; None removes the field."""
    for path, value in changes.items():
        *parents, name = path.split("/")
        where: Any = body
        for parent in parents:
            where = where[int(parent)] if isinstance(where, list) else where.setdefault(parent, {})
        if value is None:
            del where[name]
        else:
            where[name] = value
    return body


@pytest.mark.parametrize(
    "changes",
    [
        {"spec/submissionMode": "SidecarMode", f"{HEAD}/template/spec/restartPolicy": "Never"},
        {"spec/submissionMode": "K8sJobMode", "spec/submitterConfig": {"backoffLimit": 3}},
        {"spec/shutdownAfterJobFinishes": False, "spec/ttlSecondsAfterFinished": 0},
        {f"{HEAD}/resources": {"CPU": "0"}, f"{HEAD}/rayStartParams": {"dashboard-host": "0.0.0.0"}},
        {f"{CLUSTER}/authOptions/mode": "disabled", f"{CLUSTER}/rayVersion": None},
        {f"{CLUSTER}/rayVersion": "2.100.0"},
        {"spec/managedBy": "kueue.x-k8s.io/multikueue"},
    ],
)
def test_a_valid_rayjob_is_accepted(changes: dict[str, Any]) -> None:
    assert problems(changed(rayjob(), changes), RAYJOB) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata/name": "a" * 48},
        {"metadata/name": "1-job"},
        {"metadata/name": "a_job"},
        {"metadata/labels": {"rlhf/stage": "of the policy"}},
        {"spec/entrypoint": None},
        {"spec/activeDeadlineSeconds": 0},
        {"spec/activeDeadlineSeconds": 2**31},
        {"spec/activeDeadlineSeconds": "3600"},
        {"spec/backoffLimit": -1},
        {"spec/ttlSecondsAfterFinished": -1},
        {"spec/shutdownAfterJobFinishes": False},  # and ttlSecondsAfterFinished
        {"spec/shutdownAfterJobFinishes": None, "spec/ttlSecondsAfterFinished": 0, "spec/suspend": True},
        {"spec/managedBy": "somebody"},
        {"spec/submissionMode": "InteractiveMode"},
        {"spec/submissionMode": "httpMode"},
        {"spec/submissionMode": "SidecarMode", "spec/submitterConfig": {}},
        {"spec/submissionMode": "SidecarMode", f"{HEAD}/template/spec/restartPolicy": "Always"},
        {"spec/clusterSelector": {"ray.io/cluster": "other"}},
        {"spec/preRunningDeadlineSeconds": 600},  # KubeRay 1.6
        {"spec/deletionStrategy": {}},  # a feature gate
        {"spec/rayClusterSpec": None},
        {f"{CLUSTER}/upgradeStrategy": {"type": "Recreate"}},
        {f"{CLUSTER}/rayVersion": None},
        {f"{CLUSTER}/rayVersion": "2.51.9"},
        {f"{CLUSTER}/authOptions/enableK8sTokenAuth": True},
        {f"{CLUSTER}/workerGroupSpecs": []},
        {f"{HEAD}/rayStartParams/num-gpus": 0},
        {f"{HEAD}/rayStartParams/labels": "zone=a"},
        {f"{HEAD}/resources": {"CPU": "0"}},  # and num-gpus in rayStartParams
        {f"{WORKERS}/resources": {"GPU": 8}},
        {f"{HEAD}/template/spec/containers": []},
        {f"{WORKERS}/template": {}},
        {f"{WORKERS}/groupName": None},
        {f"{WORKERS}/minReplicas": -1},
        {f"{WORKERS}/numOfHosts": 0},
    ],
    ids=str,
)
def test_an_invalid_rayjob_is_refused(changes: dict[str, Any]) -> None:
    assert problems(changed(rayjob(), changes), RAYJOB) != []


@pytest.mark.parametrize(
    ("queue", "changes"),
    [
        ("training queue", {}),
        ("Training", {}),
        ("training", {"spec/shutdownAfterJobFinishes": False, "spec/suspend": False}),
        ("training", {f"{WORKERS}/groupName": "head"}),
        ("training", {f"{CLUSTER}/workerGroupSpecs": "eight"}),
    ],
)
def test_a_rayjob_that_kueue_refuses_is_refused(queue: str, changes: dict[str, Any]) -> None:
    body = rayjob("training")
    assert problems(body, RAYJOB) == []
    if changes.get(f"{CLUSTER}/workerGroupSpecs") == "eight":
        [group] = body["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        changes = {f"{CLUSTER}/workerGroupSpecs": [{**group, "groupName": f"g{i}"} for i in range(8)]}
    body["metadata"]["labels"][QUEUE] = queue
    assert problems(changed(body, changes), RAYJOB) != []


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("ClusterQueue", {"apiVersion": "kueue.x-k8s.io/v1beta1"}),  # served until Kueue 0.19
        ("ClusterQueue", {"spec/cohort": "team"}),  # v1beta1: now cohortName
        ("ClusterQueue", {"spec/admissionChecks": ["a"]}),  # v1beta1: now admissionChecksStrategy
        ("ClusterQueue", {"spec/flavorFungibility": {"whenCanBorrow": "Borrow"}}),
        ("ClusterQueue", {"spec/flavorFungibility": {"preference": "PreemptionOverBorrowing"}}),
        ("ClusterQueue", {"spec/queueingStrategy": "FIFO"}),
        ("ClusterQueue", {"spec/preemption/withinClusterQueue": "Any"}),
        ("ClusterQueue", {"spec/preemption/borrowWithinCohort": {"policy": "LowerPriority"}}),
        ("ClusterQueue", {f"{QUOTA}/nominalQuota": "-1"}),
        ("ClusterQueue", {f"{QUOTA}/nominalQuota": -1}),
        ("ClusterQueue", {f"{QUOTA}/borrowingLimit": "1"}),  # without a cohort
        ("ClusterQueue", {f"{QUOTA}/lendingLimit": "1"}),
        ("ClusterQueue", {"spec/fairSharing": {"enable": True}}),
        ("LocalQueue", {"spec/clusterQueue": "RLHF"}),
        ("ResourceFlavor", {"metadata/name": "gpu_nodes"}),
        ("ResourceFlavor", {"spec/topologyName": "racks", "spec/nodeLabels": {}}),
        ("ResourceFlavor", {"spec/nodeTaints": [{"key": "a", "effect": "Never"}]}),
        ("ResourceFlavor", {"spec/tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}),
        ("ResourceFlavor", {"spec/tolerations": [{"effect": "NoSchedule"}]}),
        ("ResourceFlavor", {"spec/tolerations": [{"key": "a", "tolerationSeconds": 5}]}),
        ("WorkloadPriorityClass", {"value": "1000"}),
        ("WorkloadPriorityClass", {"value": 2**31}),
        ("WorkloadPriorityClass", {"description": "a" * 2049}),
    ],
)
def test_an_invalid_object_of_kueue_is_refused(kind: str, changes: dict[str, Any]) -> None:
    item = [item for item in documents("kueue.yaml") if item["kind"] == kind][-1]
    assert problems(item, KUEUE[kind]) == []
    assert problems(changed(item, changes), KUEUE[kind]) != []


@pytest.mark.parametrize(
    "changes",
    [
        {"spec/cohortName": "team", f"{QUOTA}/borrowingLimit": "8", f"{QUOTA}/lendingLimit": 2},
        {"spec/preemption/borrowWithinCohort/policy": "Never"},
        {
            "spec/flavorFungibility": {
                "preference": "PreemptionOverBorrowing",
                "whenCanBorrow": "TryNextFlavor",
                "whenCanPreempt": "TryNextFlavor",
            }
        },
    ],
    ids=str,
)
def test_a_valid_queue_is_accepted(changes: dict[str, Any]) -> None:
    [queue] = [item for item in documents("kueue.yaml") if item["kind"] == "ClusterQueue"]
    assert problems(changed(queue, changes), KUEUE["ClusterQueue"]) == []
