"""RayJobs, against a scripted API server over HTTP.

- a RayJob is the template with the name, the command and the resources of the stage, and is valid; Kueue
  gets a queue
- a template without a Ray cluster of its own is refused, and so is a field that the server does not know
- it is created once: after a lost answer the server says 409, which is a success
- 5xx, 410, 429 and lost connections are faults that may pass; 403 and 422 are errors of the user
- every status of KubeRay has a meaning
- deleting what is gone is no error
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_core.config.pipeline import StageResources
from rlhf_core.errors import ConfigError, InfrastructureError
from rlhf_core.executors.base import Job
from rlhf_core.executors.kuberay import KubeRayJobs, load_template, rayjob
from tests.support.deployment_schemas import RAYJOB, problems
from tests.support.scripted_kubernetes import PREFIX, ScriptedKubernetes

COMMAND = ["python", "-m", "rlhf_core.executors.remote", "s3://b/rlhf", "0" * 16, "1"]


def job(name: str = "rlhf-sft-1", **resources: Any) -> Job:
    return Job(name, "sft", COMMAND, StageResources(**resources))


def test_a_rayjob_has_the_resources_of_the_stage() -> None:
    asked = job(
        nodes=4,
        gpus_per_node=2,
        cpus_per_node=12,
        memory_per_node="96Gi",
        queue="training",
        priority="high",
        image="registry.test/rlhf@sha256:1",
        time_limit=3600,
    )
    template = load_template(asked)
    body = rayjob(asked, template)
    assert problems(body, RAYJOB) == []
    spec = body["spec"]
    assert body["metadata"]["name"] == "rlhf-sft-1"
    assert body["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert body["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert spec["suspend"] is True
    assert spec["entrypoint"] == "python -m rlhf_core.executors.remote s3://b/rlhf 0000000000000000 1"
    assert spec["activeDeadlineSeconds"] == 3600
    workers = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (4, 4, 4)
    container = workers["template"]["spec"]["containers"][0]
    amounts = {"cpu": "12", "memory": "96Gi", "nvidia.com/gpu": "2"}
    assert container["resources"] == {"requests": amounts, "limits": amounts}
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["image"] == container["image"] == "registry.test/rlhf@sha256:1"
    assert (
        head["resources"]
        == load_template(asked)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][
            0
        ]["resources"]
    ), "the head has no GPU and keeps the resources of the template"
    assert template == load_template(asked), "the template is not changed"


def test_without_settings_the_template_stays_as_it_is() -> None:
    body = rayjob(job(), load_template(job()))
    assert body["spec"]["suspend"] is False
    assert "activeDeadlineSeconds" not in body["spec"]
    assert "kueue.x-k8s.io/queue-name" not in body["metadata"]["labels"]


def test_a_head_without_gpu_stays_without_one_and_gpus_can_be_taken_away() -> None:
    workers = rayjob(job(gpus_per_node=0), load_template(job()))["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = workers[0]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert "nvidia.com/gpu" not in limits


@pytest.mark.parametrize("text", ["kind: Job\n", "- 1\n", "{"])
def test_a_template_that_is_no_rayjob_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.resources\.sft\.template"):
        load_template(job(template=str(file)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec", None),
        ("spec.rayClusterSpec", None),
        ("spec.rayClusterSpec.workerGroupSpecs", []),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.containers", []),
    ],
)
def test_a_template_without_a_cluster_of_its_own_is_refused(tmp_path: Path, path: str, value: Any) -> None:
    template = load_template(job())
    *parents, name = path.split(".")
    where = template
    for parent in parents:
        where = where[parent]
    where[name] = value
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(template))
    with pytest.raises(ConfigError, match=r"run\.resources\.sft\.template: .*job\.yaml must be a RayJob "):
        load_template(job(template=str(file)))


def test_a_field_that_the_server_does_not_know_is_not_dropped(api: ScriptedKubernetes) -> None:
    """An older KubeRay has no `authOptions`: without them the Ray cluster would accept everybody's jobs."""
    api.failures = [400]
    with pytest.raises(ConfigError, match=r"answers 400.*; correct the template"):
        KubeRayJobs(None).submit(job())
    assert api.requests == [f"POST {PREFIX}?fieldValidation=Strict"]


def test_it_is_created_once_in_the_namespace_of_the_kubeconfig(api: ScriptedKubernetes) -> None:
    jobs = KubeRayJobs(None)
    jobs.submit(job())
    jobs.submit(job())  # 409
    assert api.requests == [f"POST {PREFIX}?fieldValidation=Strict"] * 2
    assert list(api.objects) == ["rlhf-sft-1"]


@pytest.mark.parametrize("failure", [500, 503, 429, 410, "drop", "drop after"])
def test_a_request_without_an_answer_is_a_fault_that_may_pass_and_creates_one_job(
    api: ScriptedKubernetes, failure: int | str
) -> None:
    api.failures = [failure]
    with pytest.raises(InfrastructureError):
        KubeRayJobs(None).submit(job())
    KubeRayJobs(None).submit(job())
    assert list(api.objects) == ["rlhf-sft-1"]


@pytest.mark.parametrize("status", [400, 401, 403, 422])
def test_what_only_the_user_can_correct_is_not_tried_again(api: ScriptedKubernetes, status: int) -> None:
    api.failures = [status]
    with pytest.raises(ConfigError, match=f"answers {status}"):
        KubeRayJobs(None).submit(job())
    assert api.count("POST") == 1


def test_without_a_cluster_the_message_names_the_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="set KUBECONFIG"):
        KubeRayJobs("team").submit(job())


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, "pending"),
        ({"jobDeploymentStatus": "Initializing"}, "pending"),
        ({"jobDeploymentStatus": "Suspended"}, "pending"),
        ({"jobDeploymentStatus": "Suspending"}, "pending"),
        ({"jobDeploymentStatus": "Waiting"}, "pending"),
        ({"jobDeploymentStatus": "Retrying"}, "pending"),
        ({"jobDeploymentStatus": "Running"}, "pending"),
        ({"jobDeploymentStatus": "Running", "jobStatus": "PENDING"}, "running"),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, "running"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, "succeeded"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, "stopped"),
        ({"jobDeploymentStatus": "Failed", "reason": "AppFailed"}, "failed"),
        ({"jobDeploymentStatus": "Failed", "reason": "SubmissionFailed"}, "failed"),
        ({"jobDeploymentStatus": "Failed", "reason": "PreRunningDeadlineExceeded"}, "failed"),
        ({"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded"}, "timed out"),
        ({"jobDeploymentStatus": "ValidationFailed", "reason": "ValidationFailed"}, "refused"),
        ({"jobDeploymentStatus": "ValidationFailed", "rayClusterName": "c1"}, "running"),
    ],
)
def test_every_status_has_a_meaning(api: ScriptedKubernetes, status: dict[str, str], state: str) -> None:
    jobs = KubeRayJobs(None)
    jobs.submit(job())
    api.statuses = [status]
    found = jobs.status("rlhf-sft-1")
    assert found.state == state
    assert all(word in found.message for name, word in status.items() if name != "rayClusterName")


def test_a_job_that_is_gone_is_missing(api: ScriptedKubernetes) -> None:
    assert KubeRayJobs(None).status("rlhf-sft-1").state == "missing"


@pytest.mark.parametrize("failure", [410, 500, "drop"])
def test_a_status_that_cannot_be_read_is_a_fault_that_may_pass(
    api: ScriptedKubernetes, failure: int | str
) -> None:
    api.failures = [failure]
    with pytest.raises(InfrastructureError):
        KubeRayJobs(None).status("rlhf-sft-1")


@pytest.mark.parametrize("failures", [[], [404], [410]])
def test_deleting_what_is_gone_is_no_error(api: ScriptedKubernetes, failures: list[int | str]) -> None:
    jobs = KubeRayJobs(None)
    jobs.submit(job())
    api.failures = list(failures)
    jobs.cancel("rlhf-sft-1")
    jobs.cancel("rlhf-sft-1")
    assert api.requests[-1] == f"DELETE {PREFIX}/rlhf-sft-1?propagationPolicy=Foreground"
