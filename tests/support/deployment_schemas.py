"""JSON schemas of the files in deployments/.

compose          the Compose Specification's own schema, from the package check-jsonschema
Kubernetes       the schemas of its API without other fields, from the package kubernetes-validate
KubeRay, Kueue   written here, because no package of PyPI contains their custom resource definitions. Objects
                 of Kubernetes in them have the schemas of Kubernetes.

On 2026-11-27 the last two were compared with the API types and checks of KubeRay 1.5 to 1.7.0, and with the
API types v1beta2 of Kueue and its webhook for RayJobs. Kueue serves v1beta2 from 0.15 on, and v1beta1 before
0.20. The schema of RayJobs has the fields that KubeRay 1.5.1 and newer accept. Left out are fields that no
RayJob of this project can use: those of the autoscaler (the number of pods is fixed), `clusterSelector`,
InteractiveMode (nobody submits the job), `upgradeStrategy` (refused in a RayJob), and those of feature gates
and of newer releases. Not checked: minReplicas <= maxReplicas, and that each flavor has the covered resources
in their order.
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

_BOOL, _STRING = ({"type": kind} for kind in ("boolean", "string"))
_STRINGS = {"type": "object", "additionalProperties": _STRING}
_LABEL = {"type": "string", "maxLength": 63, "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}
_NAME = {
    "type": "string",
    "maxLength": 253,
    "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}
_AMOUNT: Schema = {
    "allOf": [
        kubernetes_schema("io.k8s.apimachinery.pkg.api.resource.Quantity"),
        {"type": ["string", "integer"], "minimum": 0, "pattern": "^[^-]"},
    ]
}
"""A quantity that is not negative. The custom resource definitions take strings and integers."""


def _integer(minimum: int = -(2**31)) -> Schema:
    """Return the schema of Go's int32."""
    return {"type": "integer", "minimum": minimum, "maximum": 2**31 - 1}


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


def _with(**properties: Schema) -> Schema:
    """Return the schema of objects that have all these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _without(*names: str) -> Schema:
    return {"not": {"anyOf": [{"required": [name]} for name in names]}}


def _rule(condition: Schema, consequence: Schema) -> Schema:
    return {"if": condition, "then": consequence}


def _at(path: str, schema: Schema) -> Schema:
    """Return the schema of objects that may have something at `path`, to which `schema` applies.

    `[]` stands for each item of a list.
    """
    for name in reversed(path.split(".")):
        if name.endswith("[]"):
            schema = {"items": schema}
        schema = {"properties": {name.removesuffix("[]"): schema}}
    return schema


def _resource(api: str, kind: str, required: str = "", **properties: Schema) -> Schema:
    metadata = kubernetes_schema("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")
    labels = {"type": "object", "additionalProperties": _LABEL}
    return _object(
        f"apiVersion kind metadata {required}",
        apiVersion={"const": api},
        kind={"const": kind},
        metadata={"allOf": [metadata, _with(name=_NAME), {"properties": {"labels": labels}}]},
        **properties,
    )


# -- KubeRay --

_POD_TEMPLATE: Schema = {
    "allOf": [
        kubernetes_schema("io.k8s.api.core.v1.PodTemplateSpec"),
        {"required": ["spec"], **_at("spec.containers", {"minItems": 1})},
    ]
}
_GROUP: Mapping[str, Schema] = {
    "labels": {"type": "object", "additionalProperties": _LABEL},
    "rayStartParams": {**_STRINGS, "propertyNames": {"not": _one_of("labels redis-username")}},
    "resources": _STRINGS,
    "template": _POD_TEMPLATE,
}
_RESOURCES_ONCE = _rule(
    _with(
        rayStartParams={
            "anyOf": [{"required": [name]} for name in ("num-cpus", "num-gpus", "memory", "resources")]
        }
    ),
    {"properties": {"resources": {"maxProperties": 0}}},
)
_HEAD: Schema = {
    **_object(
        "template",
        **_GROUP,
        enableIngress=_BOOL,
        headService=kubernetes_schema("io.k8s.api.core.v1.Service"),
        serviceType=_one_of("ClusterIP NodePort LoadBalancer"),
    ),
    "allOf": [_RESOURCES_ONCE],
}
_WORKERS: Schema = {
    **_object(
        "groupName maxReplicas minReplicas template",
        **_GROUP,
        groupName=_STRING,
        maxReplicas=_integer(0),
        minReplicas=_integer(0),
        numOfHosts=_integer(1),
        replicas=_integer(0),
    ),
    "allOf": [_RESOURCES_ONCE],
}
_MANAGER = _one_of("ray.io/kuberay-operator kueue.x-k8s.io/multikueue")
_RAY_WITH_TOKENS = {"type": "string", "pattern": r"^(2\.(5[2-9]|[6-9][0-9]|[0-9]{3,})|[3-9]|[0-9]{2,})\."}
_CLUSTER: Schema = {
    **_object(
        "headGroupSpec workerGroupSpecs",
        authOptions=_object(mode=_one_of("disabled token")),
        headGroupSpec=_HEAD,
        headServiceAnnotations=_STRINGS,
        managedBy=_MANAGER,
        rayVersion=_STRING,
        workerGroupSpecs=_list(_WORKERS, minItems=1),
    ),
    "allOf": [
        _rule(_with(authOptions=_with(mode={"const": "token"})), _with(rayVersion=_RAY_WITH_TOKENS)),
    ],
}
_SHUT_DOWN = _with(shutdownAfterJobFinishes={"const": True})
_JOB: Schema = {
    **_object(
        "entrypoint rayClusterSpec",
        activeDeadlineSeconds=_integer(1),
        backoffLimit=_integer(0),
        entrypoint={"type": "string", "minLength": 1},
        entrypointNumCpus={"type": "number", "minimum": 0},
        entrypointNumGpus={"type": "number", "minimum": 0},
        entrypointResources=_STRING,
        jobId=_STRING,
        managedBy=_MANAGER,
        metadata=_STRINGS,
        rayClusterSpec=_CLUSTER,
        runtimeEnvYAML=_STRING,
        shutdownAfterJobFinishes=_BOOL,
        submissionMode=_one_of("K8sJobMode HTTPMode SidecarMode"),
        submitterConfig=_object(backoffLimit=_integer(0)),
        submitterPodTemplate=_POD_TEMPLATE,
        suspend=_BOOL,
        ttlSecondsAfterFinished=_integer(0),
    ),
    "allOf": [
        _rule(_with(suspend={"const": True}), _SHUT_DOWN),
        _rule(_with(ttlSecondsAfterFinished={"minimum": 1}), _SHUT_DOWN),
        _rule(
            _with(submissionMode={"const": "SidecarMode"}),
            {
                **_without("submitterPodTemplate", "submitterConfig"),
                **_at("rayClusterSpec.headGroupSpec.template.spec.restartPolicy", {"const": "Never"}),
            },
        ),
    ],
}
_QUEUE = "kueue.x-k8s.io/queue-name"
_QUEUED: Schema = {
    "allOf": [
        _at("metadata.labels", _with(**{_QUEUE: _NAME})),
        _at("spec", _SHUT_DOWN),
        _at("spec.rayClusterSpec.workerGroupSpecs", {"maxItems": 7}),
        _at("spec.rayClusterSpec.workerGroupSpecs[].groupName", {"not": {"const": "head"}}),
    ]
}
RAYJOB: Schema = {
    **_resource("ray.io/v1", "RayJob", "spec", spec=_JOB),
    "allOf": [
        # A label of DNS (RFC 1035).
        _at("metadata.name", {"maxLength": 47, "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}),
        _rule(_with(metadata=_with(labels={"required": [_QUEUE]})), _QUEUED),
    ],
}
"""A RayJob that an executor can submit, and the rules of Kueue for one with a queue."""

# -- Kueue --

_KUEUE = "kueue.x-k8s.io/v1beta2"
_EFFECTS = _one_of("NoSchedule PreferNoSchedule NoExecute")
_QUOTAS = _object(
    "name nominalQuota",
    borrowingLimit=_AMOUNT,
    lendingLimit=_AMOUNT,
    name=_STRING,
    nominalQuota=_AMOUNT,
)
_FLAVOR = _object("name resources", name=_NAME, resources=_list(_QUOTAS, minItems=1, maxItems=64))
_STOP = _one_of("None Hold HoldAndDrain")
_SHARE = _object(weight=_AMOUNT)
_SEARCH = _one_of("MayStopSearch TryNextFlavor")
_CLUSTER_QUEUE: Schema = {
    **_object(
        admissionChecksStrategy=_object(
            "admissionChecks",
            admissionChecks=_list(
                _object("name", name=_STRING, onFlavors=_list(_NAME, maxItems=64)), minItems=1, maxItems=64
            ),
        ),
        admissionScope=_object(
            "admissionMode",
            admissionMode=_one_of("UsageBasedAdmissionFairSharing NoAdmissionFairSharing"),
        ),
        cohortName=_NAME,
        fairSharing=_SHARE,
        flavorFungibility={
            **_object(
                preference=_one_of("BorrowingOverPreemption PreemptionOverBorrowing"),
                whenCanBorrow=_SEARCH,
                whenCanPreempt=_SEARCH,
            ),
            "dependentSchemas": {
                "preference": _with(
                    whenCanBorrow={"const": "TryNextFlavor"}, whenCanPreempt={"const": "TryNextFlavor"}
                )
            },
        },
        namespaceSelector=kubernetes_schema("io.k8s.apimachinery.pkg.apis.meta.v1.LabelSelector"),
        preemption={
            **_object(
                borrowWithinCohort=_object(
                    maxPriorityThreshold=_integer(), policy=_one_of("Never LowerPriority")
                ),
                reclaimWithinCohort=_one_of("Never LowerPriority Any"),
                withinClusterQueue=_one_of("Never LowerPriority LowerOrNewerEqualPriority"),
            ),
            "allOf": [
                _rule(
                    _with(borrowWithinCohort=_with(policy={"const": "LowerPriority"})),
                    _with(reclaimWithinCohort={"not": {"const": "Never"}}),
                )
            ],
        },
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
    "allOf": [
        _rule(
            _without("cohortName"),
            _at("resourceGroups[].flavors[].resources[]", _without("borrowingLimit", "lendingLimit")),
        )
    ],
}
_TOLERATION: Schema = {
    "allOf": [
        kubernetes_schema("io.k8s.api.core.v1.Toleration"),
        {"properties": {"operator": _one_of("Equal Exists"), "effect": _EFFECTS}},
        _rule(_without("key"), _with(operator={"const": "Exists"})),
        _rule(_with(operator={"const": "Exists"}), _without("value")),
        _rule(_with(tolerationSeconds={}), _with(effect={"const": "NoExecute"})),
    ]
}
_TAINT: Schema = {
    "allOf": [kubernetes_schema("io.k8s.api.core.v1.Taint"), {"properties": {"effect": _EFFECTS}}]
}
KUEUE: Mapping[str, Schema] = {
    "ClusterQueue": _resource(_KUEUE, "ClusterQueue", "spec", spec=_CLUSTER_QUEUE),
    "LocalQueue": _resource(
        _KUEUE,
        "LocalQueue",
        "spec",
        spec=_object("clusterQueue", clusterQueue=_NAME, fairSharing=_SHARE, stopPolicy=_STOP),
    ),
    "ResourceFlavor": _resource(
        _KUEUE,
        "ResourceFlavor",
        spec={
            **_object(
                nodeLabels={**_STRINGS, "maxProperties": 8},
                nodeTaints=_list(_TAINT, maxItems=8),
                tolerations=_list(_TOLERATION, maxItems=8),
                topologyName=_NAME,
            ),
            "dependentSchemas": {"topologyName": _with(nodeLabels={"minProperties": 1})},
        },
    ),
    "WorkloadPriorityClass": _resource(
        _KUEUE,
        "WorkloadPriorityClass",
        "value",
        description={"type": "string", "maxLength": 2048},
        value=_integer(),
    ),
}
"""Objects of Kueue, by their kind."""
