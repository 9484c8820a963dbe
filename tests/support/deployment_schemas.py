"""JSON schemas of the files in deployments/.

compose          the Compose Specification's own schema, from the package check-jsonschema
Kubernetes       the schemas of its API without other fields, from the package kubernetes-validate
KubeRay, Kueue   written here from their API types, because no package of PyPI contains their custom resource
                 definitions. Objects of Kubernetes in them have the schemas of Kubernetes.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from kubernetes_validate import latest_version
from referencing import Registry, Resource

KUBERNETES = latest_version()
"""The version of Kubernetes that is checked, such as 1.37.0."""

Schema = Mapping[str, Any]


def problems(value: Any, schema: Schema) -> list[str]:
    """Return a line with the path and the rule for each part of `value` that the schema does not allow."""
    found = Draft202012Validator(schema, registry=_definitions()).iter_errors(value)
    return [f"{error.json_path}: {error.message}" for error in found]


def compose_schema() -> Schema:
    """Return the schema of a compose file."""
    folder = importlib.resources.files("check_jsonschema.builtin_schemas") / "vendor"
    schema: Schema = json.loads((folder / "compose-spec.json").read_text(encoding="utf-8"))
    return schema


def kubernetes_schema(name: str) -> Schema:
    """Return the schema of a kind, such as `io.k8s.api.apps.v1.Deployment`."""
    return {"$ref": f"https://kubernetes.io/api/_definitions.json#/$defs/{name}"}


@functools.cache
def _definitions() -> Registry[Any]:
    folder = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
    file = folder / f"v{KUBERNETES}-local-strict" / "_definitions.json"
    return Resource.from_contents(json.loads(file.read_text(encoding="utf-8"))) @ Registry()


# -- what is written by hand --

_BOOL, _INTEGER, _NUMBER, _STRING = ({"type": kind} for kind in ("boolean", "integer", "number", "string"))
_STRINGS = {"type": "object", "additionalProperties": _STRING}
_ANY: Schema = {}
_QUANTITY = kubernetes_schema("io.k8s.apimachinery.pkg.api.resource.Quantity")
_POD_TEMPLATE = kubernetes_schema("io.k8s.api.core.v1.PodTemplateSpec")


def _object(required: str = "", **properties: Schema) -> Schema:
    """Return the schema of an object with these properties only; the names of `required` have blanks between
    them.
    """
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": required.split(),
    }


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _one_of(words: str) -> Schema:
    return {"enum": words.split()}


def _resource(api: str, kind: str, required: str = "", **properties: Schema) -> Schema:
    metadata = kubernetes_schema("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")
    return _object(
        f"apiVersion kind metadata {required}",
        apiVersion={"const": api},
        kind={"const": kind},
        metadata=metadata,
        **properties,
    )


_GROUP: Mapping[str, Schema] = {
    "labels": _STRINGS,
    "rayStartParams": _STRINGS,
    "resources": {"type": "object", "additionalProperties": _QUANTITY},
    "template": _POD_TEMPLATE,
}
_HEAD = _object(
    "template",
    **_GROUP,
    enableIngress=_BOOL,
    headService=kubernetes_schema("io.k8s.api.core.v1.Service"),
    serviceType=_STRING,
)
_WORKERS = _object(
    "groupName maxReplicas minReplicas template",
    **_GROUP,
    groupName=_STRING,
    idleTimeoutSeconds=_INTEGER,
    maxReplicas=_INTEGER,
    minReplicas=_INTEGER,
    numOfHosts=_INTEGER,
    replicas=_INTEGER,
    scaleStrategy=_ANY,
    suspend=_BOOL,
)
_MANAGER = _one_of("ray.io/kuberay-operator kueue.x-k8s.io/multikueue")
_CLUSTER = _object(
    "headGroupSpec",
    authOptions=_object(mode=_one_of("disabled token")),
    autoscalerOptions=_ANY,
    enableInTreeAutoscaling=_BOOL,
    gcsFaultToleranceOptions=_ANY,
    headGroupSpec=_HEAD,
    headServiceAnnotations=_STRINGS,
    managedBy=_MANAGER,
    rayVersion=_STRING,
    suspend=_BOOL,
    upgradeStrategy=_ANY,
    workerGroupSpecs=_list(_WORKERS),
)
RAYJOB = _resource(
    "ray.io/v1",
    "RayJob",
    "spec",
    spec=_object(
        activeDeadlineSeconds=_INTEGER,
        backoffLimit=_INTEGER,
        clusterSelector=_STRINGS,
        deletionStrategy=_ANY,
        entrypoint=_STRING,
        entrypointNumCpus=_NUMBER,
        entrypointNumGpus=_NUMBER,
        entrypointResources=_STRING,
        jobId=_STRING,
        managedBy=_MANAGER,
        metadata=_STRINGS,
        preRunningDeadlineSeconds=_INTEGER,
        rayClusterSpec=_CLUSTER,
        runtimeEnvYAML=_STRING,
        shutdownAfterJobFinishes=_BOOL,
        submissionMode=_one_of("K8sJobMode HTTPMode InteractiveMode SidecarMode"),
        submitterConfig=_ANY,
        submitterPodTemplate=_POD_TEMPLATE,
        suspend=_BOOL,
        ttlSecondsAfterFinished=_INTEGER,
    ),
)
"""A RayJob of KubeRay 1.5."""

_KUEUE = "kueue.x-k8s.io/v1beta1"
_QUOTAS = _object(
    "name nominalQuota",
    borrowingLimit=_QUANTITY,
    lendingLimit=_QUANTITY,
    name=_STRING,
    nominalQuota=_QUANTITY,
)
_FLAVOR = _object("name resources", name=_STRING, resources=_list(_QUOTAS, minItems=1, maxItems=64))
_STOP = _one_of("None Hold HoldAndDrain")
KUEUE: Mapping[str, Schema] = {
    "ClusterQueue": _resource(
        _KUEUE,
        "ClusterQueue",
        "spec",
        spec=_object(
            admissionChecks=_list(_STRING),
            admissionChecksStrategy=_ANY,
            admissionScope=_ANY,
            cohort=_STRING,
            fairSharing=_ANY,
            flavorFungibility=_object(whenCanBorrow=_STRING, whenCanPreempt=_STRING),
            namespaceSelector=kubernetes_schema("io.k8s.apimachinery.pkg.apis.meta.v1.LabelSelector"),
            preemption=_object(
                borrowWithinCohort=_ANY,
                reclaimWithinCohort=_one_of("Never LowerPriority Any"),
                withinClusterQueue=_one_of("Never LowerPriority LowerOrNewerEqualPriority"),
            ),
            queueingStrategy=_one_of("StrictFIFO BestEffortFIFO"),
            resourceGroups=_list(
                _object(
                    "coveredResources flavors",
                    coveredResources=_list(_STRING, minItems=1, maxItems=64),
                    flavors=_list(_FLAVOR, minItems=1, maxItems=64),
                ),
                maxItems=16,
            ),
            stopPolicy=_STOP,
        ),
    ),
    "LocalQueue": _resource(
        _KUEUE,
        "LocalQueue",
        "spec",
        spec=_object("clusterQueue", clusterQueue=_STRING, fairSharing=_ANY, stopPolicy=_STOP),
    ),
    "ResourceFlavor": _resource(
        _KUEUE,
        "ResourceFlavor",
        spec=_object(
            nodeLabels={**_STRINGS, "maxProperties": 8},
            nodeTaints=_list(kubernetes_schema("io.k8s.api.core.v1.Taint"), maxItems=8),
            tolerations=_list(kubernetes_schema("io.k8s.api.core.v1.Toleration"), maxItems=8),
            topologyName=_STRING,
        ),
    ),
    "WorkloadPriorityClass": _resource(
        _KUEUE, "WorkloadPriorityClass", "value", description=_STRING, value=_INTEGER
    ),
}
"""Objects of Kueue, by their kind."""
