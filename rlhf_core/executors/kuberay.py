"""A stage as a RayJob of KubeRay: a Ray cluster of its own that is deleted when the stage has ended.

The RayJob is made from a template (`deployments/kubernetes/rayjob.yaml`), in which only the fields that
`run.resources` sets are changed. Kueue admits it if a queue is set: it starts suspended and Kueue resumes it.
The address and the credentials of the API server are those of the pod's service account, or of KUBECONFIG.
"""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from rlhf_core.errors import ConfigError, InfrastructureError
from rlhf_core.executors.base import TEMPLATES, Job, JobState, JobStatus
from rlhf_core.system.files import shipped

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
_TYPE = {"group": "ray.io", "version": "v1", "plural": "rayjobs"}
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# By default, the client of Kubernetes waits for an answer without a limit.
_REQUEST_SECONDS = 30.0
_GPU = "nvidia.com/gpu"
_ENDED: dict[str, JobState] = {"Complete": "succeeded", "Failed": "failed"}


class KubeRayJobs:
    """RayJobs in one namespace."""

    title = "RayJob"
    holds_resources = True  # the Ray cluster exists until ttlSecondsAfterFinished is over

    def __init__(self, namespace: str | None) -> None:
        """RayJobs of a namespace; None for that of the service account or of the kubeconfig."""
        self._given_namespace = namespace

    def submit(self, job: Job) -> None:
        """Create the RayJob, unless one of this name exists already."""
        body = rayjob(job, load_template(job))
        # Strict: a field that this version of KubeRay does not know is an error. Without it, the server drops
        # the field, and without `authOptions` the Ray cluster would have no token.
        self._call(
            lambda: self._objects.create_namespaced_custom_object(
                **self._place, body=body, field_validation="Strict", **_LIMIT
            ),
            # An earlier request may have arrived, although it had no answer.
            accept={409},
        )

    def status(self, name: str) -> JobStatus:
        """Return the status of a RayJob."""
        found: dict[str, Any] | None = self._call(
            lambda: self._objects.get_namespaced_custom_object(**self._place, name=name, **_LIMIT),
            accept={404},
        )
        if found is None:
            return JobStatus("missing")
        status = found.get("status") or {}
        phase = status.get("jobDeploymentStatus", "")
        words = [phase, status.get("jobStatus"), status.get("reason"), status.get("message")]
        message = ", ".join(dict.fromkeys(str(word) for word in words if word))
        if phase == "Failed" and status.get("reason") == "DeadlineExceeded":
            return JobStatus("timed out", message)
        if phase == "Complete" and status.get("jobStatus") == "STOPPED":
            return JobStatus("stopped", message)
        # The operator does nothing more for a RayJob that it finds invalid. A job that runs goes on.
        if phase == "ValidationFailed":
            return JobStatus("running" if status.get("rayClusterName") else "refused", message)
        if phase in _ENDED:
            return JobStatus(_ENDED[phase], message)
        if phase == "Running" and not status.get("jobStatus"):
            # The Ray cluster runs. The operator tries for as long as it takes, and says so only in its log.
            return JobStatus("pending", f"{message}, KubeRay has not submitted the job to the Ray cluster")
        return JobStatus("running" if phase == "Running" else "pending", message)

    def cancel(self, name: str) -> None:
        """Delete a RayJob with its Ray cluster. One that does not exist is ignored."""
        # Foreground: the RayJob exists until its Ray cluster is deleted.
        self._call(
            lambda: self._objects.delete_namespaced_custom_object(
                **self._place, name=name, propagation_policy="Foreground", **_LIMIT
            ),
            accept={404, 410},
        )

    def log_tail(self, name: str) -> str:
        """Return nothing: the message of the status has the end of the output."""
        return ""

    @cached_property
    def _api(self) -> client.ApiClient:
        settings = client.Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config(client_configuration=settings)
            else:
                config.load_kube_config(_kubeconfig(), client_configuration=settings)
        except (ConfigException, OSError) as error:
            raise ConfigError(
                f"run.executor: kuberay needs a service account or a kubeconfig; {error}; set KUBECONFIG"
            ) from error
        settings.retries = False  # the follower asks again
        return client.ApiClient(settings)

    @property
    def _objects(self) -> client.CustomObjectsApi:
        return client.CustomObjectsApi(self._api)

    @cached_property
    def _place(self) -> dict[str, str]:
        return {**_TYPE, "namespace": self._given_namespace or _current_namespace()}

    def _call(self, request: Callable[[], Any], accept: Collection[int]) -> Any:
        """Send a request, and return None for an answer with one of the statuses `accept`."""
        try:
            return request()
        except ApiException as error:
            status = error.status or 0
            if status in accept:
                return None
            words = " ".join(str(error.body or error.reason).split())[:500]
            text = f"the Kubernetes API server answers {status}: {words}"
            # 410: the server has lost its history and is asked again; 429: it is busy.
            if status in (408, 410, 429) or status >= 500 or status == 0:
                raise InfrastructureError(text) from error
            raise ConfigError(
                f"{self.title}: {text}; correct the template, the rights or run.resources"
            ) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise InfrastructureError(f"the Kubernetes API server does not answer: {error}") from error


_LIMIT = {"_request_timeout": _REQUEST_SECONDS}


def _kubeconfig() -> str | None:
    """Return KUBECONFIG, which the library reads only when it is imported."""
    return os.environ.get("KUBECONFIG")


def _current_namespace() -> str:
    if _NAMESPACE_FILE.is_file():
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    try:
        _, active = config.list_kube_config_contexts(_kubeconfig())
    except (ConfigException, OSError):
        return "default"
    namespace: str = active["context"].get("namespace", "default")
    return namespace


def load_template(job: Job) -> dict[str, Any]:
    """Return the template of `job`. Raises ConfigError if it is no RayJob with a cluster of its own."""
    file = shipped(job.resources.template or TEMPLATES["kuberay"])
    field = f"run.resources.{job.stage}.template"
    try:
        loaded: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{field}: {file} cannot be read: {error}; name a RayJob in YAML") from error
    try:
        cluster = loaded["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]):
            group["template"]["spec"]["containers"][0]
        if loaded["spec"].get("clusterSelector") or loaded["spec"].get("submissionMode") == "InteractiveMode":
            raise TypeError("clusterSelector and submissionMode: InteractiveMode start no job of their own")
    except (IndexError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{field}: {file} must be a RayJob with spec.rayClusterSpec, with containers of a head and of a"
            f" worker group; {type(error).__name__}: {error}; compare it with {TEMPLATES['kuberay']}"
        ) from error
    return loaded


def rayjob(job: Job, template: dict[str, Any]) -> dict[str, Any]:
    """Return the RayJob of `job`: the template with its name, command and resources."""
    body = copy.deepcopy(template)
    resources = job.resources
    metadata, spec = body.setdefault("metadata", {}), body["spec"]
    metadata["name"] = job.name
    metadata.pop("namespace", None)  # the address of the request has it
    labels = metadata.setdefault("labels", {})
    labels["rlhf/stage"] = job.stage
    if resources.priority is not None:
        labels[PRIORITY_LABEL] = resources.priority
    if resources.queue is not None:
        labels[QUEUE_LABEL] = resources.queue
        spec["suspend"] = True  # Kueue resumes it when the whole cluster fits
    spec["entrypoint"] = shlex.join(job.command)
    if resources.time_limit is not None:
        spec["activeDeadlineSeconds"] = resources.time_limit
    cluster = spec["rayClusterSpec"]
    workers = cluster["workerGroupSpecs"][0]
    # All three: KubeRay moves `replicas` between the two others.
    for name in ("replicas", "minReplicas", "maxReplicas"):
        workers[name] = resources.nodes or 1
    for group in (cluster["headGroupSpec"], workers):
        container = group["template"]["spec"]["containers"][0]
        if resources.image is not None:
            container["image"] = resources.image
        if group is workers:
            _set_limits(
                container, resources.cpus_per_node, resources.memory_per_node, resources.gpus_per_node
            )
    return body


def _set_limits(container: dict[str, Any], cpus: int | None, memory: str | None, gpus: int | None) -> None:
    """Set requests and limits to the same values, so that a pod is not evicted for what others use."""
    values = {"cpu": cpus, "memory": memory, _GPU: gpus}
    resources = container.setdefault("resources", {})
    for kind in ("requests", "limits"):
        amounts = resources.setdefault(kind, {})
        amounts.update({name: str(value) for name, value in values.items() if value is not None})
        if gpus == 0:
            del amounts[_GPU]
