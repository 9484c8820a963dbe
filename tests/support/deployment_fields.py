"""The fields that files in deployments/ may have: those of Kubernetes by the models of its client, those of
KubeRay, Kueue and compose by lists, because no package of the lock has their schemas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kubernetes import client


def walk(value: Any, kind: Any, path: str) -> Iterator[str]:
    """Yield the fields of `value` that are not in `kind`: the name of a model of the client, or fields with
    their kinds (`*`: any name), or a list with the kind of its items, or None for any value.
    """
    if isinstance(value, str) and "{{" in value:
        return  # a placeholder of the work pool
    listed = re.fullmatch(r"[Ll]ist\[(.+)\]", kind) if isinstance(kind, str) else None
    if listed or isinstance(kind, list):
        [item_kind] = [listed[1]] if listed else kind
        for index, item in enumerate(value):
            yield from walk(item, item_kind, f"{path}[{index}]")
    elif isinstance(kind, dict) or (isinstance(kind, str) and hasattr(client, kind)):
        types: dict[str, Any]
        if isinstance(kind, dict):
            types = kind
        else:
            model = getattr(client, kind)
            types = {model.attribute_map[name]: of for name, of in model.openapi_types.items()}
        for name, item in value.items():
            if name not in types and "*" not in types:
                yield f"{path}.{name}"
            else:
                yield from walk(item, types.get(name, types.get("*")), f"{path}.{name}")


def fields(names: str, **kinds: Any) -> dict[str, Any]:
    """Return fields of any value, by `names` with blanks between them, and those with `kinds`."""
    return {**dict.fromkeys(names.split()), **kinds}


def kinds_of(spec: Any) -> dict[str, Any]:
    """Return the fields of an object of Kubernetes with this `spec`."""
    return fields("apiVersion kind", metadata="V1ObjectMeta", spec=spec)


_GROUP = fields("labels rayStartParams resources", template="V1PodTemplateSpec")
RAYJOB = kinds_of(
    fields(
        "activeDeadlineSeconds backoffLimit clusterSelector deletionStrategy entrypoint entrypointNumCpus"
        " entrypointNumGpus entrypointResources jobId managedBy metadata preRunningDeadlineSeconds"
        " runtimeEnvYAML shutdownAfterJobFinishes submissionMode submitterConfig submitterPodTemplate suspend"
        " ttlSecondsAfterFinished",
        rayClusterSpec=fields(
            "autoscalerOptions enableInTreeAutoscaling gcsFaultToleranceOptions headServiceAnnotations"
            " managedBy rayVersion suspend upgradeStrategy",
            authOptions=fields("mode"),
            headGroupSpec=_GROUP | fields("enableIngress headService serviceType"),
            workerGroupSpecs=[
                _GROUP
                | fields(
                    "groupName idleTimeoutSeconds maxReplicas minReplicas numOfHosts replicas scaleStrategy"
                    " suspend"
                )
            ],
        ),
    )
)
"""A RayJob of KubeRay 1.5."""

_QUOTA = fields("borrowingLimit lendingLimit name nominalQuota")
KUEUE = {
    "ClusterQueue": kinds_of(
        fields(
            "admissionChecks admissionChecksStrategy admissionScope cohort fairSharing queueingStrategy"
            " stopPolicy",
            flavorFungibility=fields("whenCanBorrow whenCanPreempt"),
            namespaceSelector="V1LabelSelector",
            preemption=fields("borrowWithinCohort reclaimWithinCohort withinClusterQueue"),
            resourceGroups=[fields("coveredResources", flavors=[fields("name", resources=[_QUOTA])])],
        )
    ),
    "LocalQueue": kinds_of(fields("clusterQueue fairSharing stopPolicy")),
    "ResourceFlavor": kinds_of(
        fields("nodeLabels topologyName", nodeTaints="list[V1Taint]", tolerations="list[V1Toleration]")
    ),
    "WorkloadPriorityClass": fields("apiVersion description kind value", metadata="V1ObjectMeta"),
}
"""Objects of Kueue, kueue.x-k8s.io/v1beta1."""

COMPOSE = fields(
    "name x-clients x-rlhf x-s3",
    services={
        "*": fields(
            "build cap_add cap_drop command container_name deploy entrypoint env_file expose extra_hosts gpus"
            " hostname image init labels logging mem_limit networks platform ports privileged profiles"
            " pull_policy read_only restart secrets security_opt shm_size stop_grace_period stop_signal"
            " sysctls tmpfs ulimits user volumes working_dir",
            configs=[fields("gid mode source target uid")],
            depends_on={"*": fields("condition required restart")},
            environment={"*": None},
            healthcheck=fields("disable interval retries start_interval start_period test timeout"),
        )
    },
    networks={"*": fields("attachable driver driver_opts external internal name")},
    volumes={"*": fields("driver driver_opts external labels name")},
    configs={"*": fields("content environment external file name")},
    secrets={"*": fields("environment external file name")},
)
"""A file of the Compose Specification."""
