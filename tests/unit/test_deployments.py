"""The files in deployments/, read as their tools read them.

compose.yaml    valid by the Compose Specification; names agree; the worker and MLflow have a bucket each;
                ports are on loopback; secrets come from deployments/.env; settings of Prefect and MLflow and
                options of MLflow's server are those of the locked versions
Kubernetes      valid by the schemas of Kubernetes, and for KubeRay and Kueue by those that
                tests/support/deployment_schemas.py has; names agree between the files; pods are not root,
                have few rights, and have shared memory; Ray's version is that of the lock
Prefect         the deployment's parameters load, and its variables are those of the work pool
Dockerfile      not root, packages by hash only, all copied files exist
Slurm           the script is valid, and Ray's options and variables exist
requirements    cluster.txt completes the lock with `ray[default]`, and is no part of it
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.utils.quantity import parse_quantity
from kubernetes_validate import ValidationError, validate
from prefect.utilities.templating import apply_values

from rlhf_core.config.load import load_config
from rlhf_core.executors.follow import Waits
from tests.support.deployment_schemas import (
    KUBERNETES,
    KUEUE,
    RAYJOB,
    compose_schema,
    kubernetes_schema,
    problems,
)

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENTS = ROOT / "deployments"
KUBERNETES_FILES = DEPLOYMENTS / "kubernetes"
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|AUTH_STRING|ACCESS_KEY|CONNECTION_URL|STORE_URI")
VARIABLE = re.compile(r"\$\{(\w+)[^}]*\}")


def load(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def packages(file: str) -> dict[str, str]:
    """Return the versions of a lock, by normalized name."""
    text = (ROOT / "requirements" / file).read_text(encoding="utf-8")
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


# -- compose.yaml --


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = load(DEPLOYMENTS / "compose.yaml")
    return content


def environments(compose: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, service in compose["services"].items():
        for variable, value in service.get("environment", {}).items():
            yield name, variable, str(value)


def test_compose_names_what_it_defines(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert set(service.get("depends_on", {})) <= set(compose["services"]), name
        assert set(service["networks"]) <= set(compose["networks"]), name
        assert {config["source"] for config in service.get("configs", ())} <= set(compose["configs"]), name
        assert {volume.partition(":")[0] for volume in service.get("volumes", ())} <= set(compose["volumes"])
    assert set(compose["services"]) == {"postgres", "s3", "buckets", "mlflow", "prefect", "deploy", "worker"}


def test_leases_of_flow_runs_outlive_the_container_of_prefect(compose: dict[str, Any]) -> None:
    server = compose["services"]["prefect"]
    storage = server["environment"]["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"]
    assert storage == "prefect.server.concurrency.lease_storage.filesystem"
    [volume] = server["volumes"]
    assert server["environment"]["PREFECT_HOME"].startswith(f"{volume.partition(':')[2]}/")


def test_compose_is_valid_by_the_specification(compose: dict[str, Any]) -> None:
    assert problems(compose, compose_schema()) == []
    wrong = {"services": {"s3": {"image": "a", "health_check": {}}}}
    [problem] = problems(wrong, compose_schema())
    assert problem.startswith("$.services.s3: ") and "health_check" in problem


def test_the_worker_and_mlflow_have_a_bucket_each(compose: dict[str, Any]) -> None:
    identities = json.loads(compose["configs"]["s3"]["content"])["identities"]
    actions = {tuple(identity["credentials"][0].values()): identity["actions"] for identity in identities}
    assert len(actions) == len(identities)
    buckets = {}
    for name in ("worker", "mlflow", "buckets"):
        environment = compose["services"][name]["environment"]
        keys = [
            VARIABLE.findall(environment[f"AWS_{what}"]) for what in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
        ]
        buckets[name] = actions[tuple(f"${{{key}}}" for [key] in keys)]
    rights = ("Read", "Write", "List", "Tagging")
    assert buckets["worker"] == [f"{right}:rlhf" for right in rights]
    assert buckets["mlflow"] == [f"{right}:mlflow" for right in rights]
    assert buckets["buckets"] == ["Admin"]


def test_who_waits_for_health_waits_for_a_service_that_reports_it(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        for other, rule in service.get("depends_on", {}).items():
            if rule["condition"] == "service_healthy":
                assert "healthcheck" in services[other], (name, other)
            else:
                assert services[other]["restart"] == "no", f"{other} ends, and {name} waits for that"


def test_ports_are_on_loopback_and_stores_have_none(compose: dict[str, Any]) -> None:
    published = {
        name: service["ports"] for name, service in compose["services"].items() if "ports" in service
    }
    assert published == {"mlflow": ["127.0.0.1:5000:5000"], "prefect": ["127.0.0.1:4200:4200"]}
    for name in ("postgres", "s3"):
        assert compose["services"][name]["networks"] == ["internal"]
    assert compose["networks"]["internal"] == {"internal": True}


def test_postgres_is_healthy_when_its_databases_exist(compose: dict[str, Any]) -> None:
    """During the start, a temporary server answers at the socket, and not by TCP."""
    assert "--host=127.0.0.1" in compose["services"]["postgres"]["healthcheck"]["test"]


def test_secrets_come_from_the_env_file(compose: dict[str, Any]) -> None:
    for service, variable, value in environments(compose):
        if SECRET.search(variable):
            assert VARIABLE.search(value), f"{service}: {variable} has its value in the file"
    text = (DEPLOYMENTS / "compose.yaml").read_text(encoding="utf-8")
    example = (DEPLOYMENTS / "compose.env.example").read_text(encoding="utf-8")
    offered = set(re.findall(r"^(\w+)=", example, re.MULTILINE))
    assert set(VARIABLE.findall(text)) == offered
    assert not re.search(r"(PASSWORD|SECRET|TOKEN|ACCESS)\w*=\S", example), "the example has no secrets"
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "deployments/.env" in ignored


def test_our_containers_are_restricted(compose: dict[str, Any]) -> None:
    ours = [service for service in compose["services"].values() if "RLHF_IMAGE" in service["image"]]
    assert len(ours) == 5
    user = next(rest for word, rest in instructions() if word == "USER").split(":")
    for service in ours:
        # Compose refuses a file with `content` for a container that is read-only.
        assert service["read_only"] is ("configs" not in service)
        # A tmpfs has the mode of the image's folder, and belongs to root if no owner is given.
        [home] = [mount for mount in service["tmpfs"] if mount.startswith("/home/rlhf:")]
        assert {f"uid={user[0]}", f"gid={user[1]}"} <= set(home.partition(":")[2].split(","))
        assert service["cap_drop"] == ["ALL"]
        assert "user" not in service, "the image's user is not root"
    assert compose["services"]["worker"]["shm_size"] == "16gb"


def test_prefect_can_write_the_files_of_its_page(compose: dict[str, Any]) -> None:
    """It copies them out of its package when it starts. If it cannot, it has no page."""
    service = compose["services"]["prefect"]
    folder = Path(service["environment"]["PREFECT_UI_STATIC_DIRECTORY"])
    assert any(folder.is_relative_to(mount.partition(":")[0]) for mount in service["tmpfs"])


def test_conditional_writes_of_the_s3_server_are_atomic(compose: dict[str, Any]) -> None:
    """Since the release after 4.16 (seaweedfs/seaweedfs#8800)."""
    version = compose["services"]["s3"]["image"].partition(":")[2].split(".")
    assert [int(part) for part in version] > [4, 16]


def test_settings_are_those_of_the_locked_versions(compose: dict[str, Any]) -> None:
    import mlflow.environment_variables as mlflow_variables
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_valid_setting_names

    mlflow_names = {value.name for value in vars(mlflow_variables).values() if hasattr(value, "name")} | {
        "MLFLOW_BACKEND_STORE_URI"
    }
    known = set(_get_valid_setting_names(Settings))
    for service, variable, _ in environments(compose):
        if variable.startswith("PREFECT_"):
            assert variable in known, (service, variable)
        if variable.startswith("MLFLOW_"):
            assert variable in mlflow_names, (service, variable)


def test_the_options_of_mlflows_server_exist(compose: dict[str, Any]) -> None:
    from mlflow.cli import server

    options = {option: parameter for parameter in server.params for option in parameter.opts}
    program, command, *given = compose["services"]["mlflow"]["command"]
    assert (program, command) == ("mlflow", "server")
    assert {word.partition("=")[0] for word in given} <= set(options)
    assert options["--backend-store-uri"].envvar == "MLFLOW_BACKEND_STORE_URI"
    apps = {entry.name for entry in importlib.metadata.entry_points(group="mlflow.app")}
    assert "basic-auth" in apps


# -- Kubernetes --


def load_all(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES_FILES / file).read_text(encoding="utf-8")))


def objects() -> list[dict[str, Any]]:
    files = ("base.yaml", "worker.yaml", "secret.example.yaml")
    return [item for file in files for item in load_all(file)]


def kueue() -> list[dict[str, Any]]:
    return load_all("kueue.yaml")


def rayjob() -> dict[str, Any]:
    content: dict[str, Any] = load(KUBERNETES_FILES / "rayjob.yaml")
    return content


def job_manifest() -> dict[str, Any]:
    content = json.loads((KUBERNETES_FILES / "workpool.json").read_text(encoding="utf-8"))
    manifest: dict[str, Any] = content["job_configuration"]["job_manifest"]
    return manifest


def pods() -> dict[str, dict[str, Any]]:
    cluster = rayjob()["spec"]["rayClusterSpec"]
    [worker] = [item for item in objects() if item["kind"] == "Deployment"]
    return {
        "head": cluster["headGroupSpec"]["template"]["spec"],
        "ranks": cluster["workerGroupSpecs"][0]["template"]["spec"],
        "worker": worker["spec"]["template"]["spec"],
        "flow": job_manifest()["spec"]["template"]["spec"],
    }


@pytest.mark.parametrize("item", objects(), ids=lambda item: f"{item['kind']}-{item['metadata']['name']}")
def test_an_object_is_valid(item: dict[str, Any]) -> None:
    validate(item, KUBERNETES, strict=True)
    with pytest.raises(ValidationError, match="Additional properties"):
        validate({**item, "specs": {}}, KUBERNETES, strict=True)


def test_a_flows_job_is_valid() -> None:
    pool = json.loads((KUBERNETES_FILES / "workpool.json").read_text(encoding="utf-8"))
    values = {name: field.get("default") for name, field in pool["variables"]["properties"].items()}
    validate(apply_values(job_manifest(), values), KUBERNETES, strict=True)


def test_a_wrong_field_of_a_pod_is_found() -> None:
    pod = {"containers": [{"name": "a", "securityContext": {"runAsNonroot": True}}]}
    [problem] = problems(pod, kubernetes_schema("io.k8s.api.core.v1.PodSpec"))
    assert problem.startswith("$.containers[0].securityContext: ") and "runAsNonroot" in problem


def test_the_rayjob_is_valid() -> None:
    body = rayjob()
    assert problems(body, RAYJOB) == []
    [group] = body["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    group["maxreplicas"] = 1
    del group["template"]["spec"]["containers"]
    found = problems(body, RAYJOB)
    path = "$.spec.rayClusterSpec.workerGroupSpecs[0]"
    assert sorted(line.partition(":")[0] for line in found) == [path, f"{path}.template.spec"]


@pytest.mark.parametrize("item", kueue(), ids=lambda item: f"{item['kind']}-{item['metadata']['name']}")
def test_an_object_of_kueue_is_valid(item: dict[str, Any]) -> None:
    assert problems(item, KUEUE[item["kind"]]) == []
    assert problems({**item, "specs": {}}, KUEUE[item["kind"]]) != []


def test_the_rayjob_ends_by_itself_and_leaves_retries_to_the_flow() -> None:
    spec = rayjob()["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    # A flow that cannot reach the scheduler reads the end of the log, from the head pod, during this time.
    # The GPUs of a job without an outcome are reserved until then.
    assert Waits().unreachable < spec["ttlSecondsAfterFinished"] <= 600
    assert spec["backoffLimit"] == 0
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    for lock in ("cpu.txt", "gpu.txt"):
        assert spec["rayClusterSpec"]["rayVersion"] == packages(lock)["ray"]


def test_pods_are_not_root_and_ranks_have_shared_memory() -> None:
    for name, pod in pods().items():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] == 10001, name
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
    for name in ("head", "ranks"):
        pod = pods()[name]
        assert pod["automountServiceAccountToken"] is False
        assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
        [memory] = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
        assert memory["medium"] == "Memory"


def test_names_agree_between_the_files() -> None:
    names = {(item["kind"], item["metadata"]["name"]) for item in objects()}
    pool = json.loads((KUBERNETES_FILES / "workpool.json").read_text(encoding="utf-8"))
    defaults = {name: field.get("default") for name, field in pool["variables"]["properties"].items()}
    for name, pod in pods().items():
        account = pod["serviceAccountName"].replace("{{ service_account_name }}", "rlhf-flow")
        assert ("ServiceAccount", account) in names, name
        [source] = pod["containers"][0]["envFrom"]
        assert ("Secret", source["secretRef"]["name"]) in names, name
    assert defaults["service_account_name"] == "rlhf-flow"
    assert defaults["namespace"] == "rlhf"
    images = {pod["containers"][0]["image"] for pod in pods().values()} - {"{{ image }}"}
    assert images == {defaults["image"]}


def test_a_flow_has_the_rights_that_the_executor_uses() -> None:
    [role] = [item for item in objects() if (item["kind"], item["metadata"]["name"]) == ("Role", "rlhf-flow")]
    rights = {
        (resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }
    assert rights == {("rayjobs", verb) for verb in ("create", "get", "delete")}


@pytest.mark.parametrize("name", ["kuberay-operator", "kuberay"], ids=["helm", "kustomize"])
def test_the_operator_may_submit_the_job(name: str) -> None:
    """Its pods have these labels. It submits the job through the port of the dashboard."""
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/component": "kuberay-operator"}
    [policy] = [item for item in objects() if item["kind"] == "NetworkPolicy"]
    admitted = [
        port["port"]
        for rule in policy["spec"]["ingress"]
        for source in rule["from"]
        if source["podSelector"]["matchLabels"].items() <= labels.items() and "namespaceSelector" in source
        for port in rule["ports"]
    ]
    assert admitted == [8265]


def test_the_worker_watches_what_its_role_allows() -> None:
    [role] = [
        item for item in objects() if (item["kind"], item["metadata"]["name"]) == ("Role", "rlhf-worker")
    ]
    watched = {
        resource for rule in role["rules"] if "watch" in rule["verbs"] for resource in rule["resources"]
    }
    assert {"pods", "jobs"} <= watched
    environment = {entry["name"]: entry for entry in pods()["worker"]["containers"][0]["env"]}
    namespaces = environment["PREFECT_INTEGRATIONS_KUBERNETES_OBSERVER_NAMESPACES"]
    assert namespaces["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"


def test_pods_of_a_queued_cluster_may_run_where_kueue_sends_them() -> None:
    """Kueue gives a pod the first flavor whose quota has all its requests, and its labels and tolerations."""
    items = kueue()
    specs = {
        item["metadata"]["name"]: item.get("spec", {}) for item in items if item["kind"] == "ResourceFlavor"
    }
    [queue] = [item for item in items if item["kind"] == "ClusterQueue"]
    [group] = queue["spec"]["resourceGroups"]
    for flavor in group["flavors"]:
        assert [each["name"] for each in flavor["resources"]] == group["coveredResources"]
    given = {}
    for name in ("head", "ranks"):
        pod = pods()[name]
        requests = pod["containers"][0]["resources"]["requests"]
        for flavor in group["flavors"]:
            quotas = {each["name"]: each["nominalQuota"] for each in flavor["resources"]}
            if all(parse_quantity(quotas[what]) >= parse_quantity(asked) for what, asked in requests.items()):
                given[name] = flavor["name"]
                break
        tolerated = [*pod.get("tolerations", []), *specs[given[name]].get("tolerations", [])]
        on_gpu_nodes = "nvidia.com/gpu.present" in specs[given[name]].get("nodeLabels", {})
        assert not on_gpu_nodes or "nvidia.com/gpu" in [each["key"] for each in tolerated], name
    assert given == {"head": "cpu-nodes", "ranks": "gpu-nodes"}


# -- Prefect --


def test_placeholders_of_the_work_pool_are_its_variables() -> None:
    pool = json.loads((KUBERNETES_FILES / "workpool.json").read_text(encoding="utf-8"))
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(pool["job_configuration"])))
    assert used == set(pool["variables"]["properties"])


def test_the_deployment_for_kubernetes_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.rlhf import rlhf

    [deployment] = load(KUBERNETES_FILES / "prefect.yaml")["deployments"]
    assert deployment["entrypoint"] == f"{rlhf.fn.__module__}.{rlhf.fn.__name__}"
    parameters = deployment["parameters"]
    assert set(parameters) <= set(inspect.signature(rlhf.fn).parameters)
    monkeypatch.chdir(ROOT)
    config = load_config(parameters["config"], parameters["overrides"])
    assert config.run.executor == "kuberay"
    [queue] = [item for item in kueue() if item["kind"] == "LocalQueue"]
    resources = config.run.resources.of("ppo")
    assert (resources.queue, resources.namespace) == (
        queue["metadata"]["name"],
        queue["metadata"]["namespace"],
    )
    assert (resources.gpus_per_node, config.run.resources.of("data").gpus_per_node) == (8, 0)
    pool = json.loads((KUBERNETES_FILES / "workpool.json").read_text(encoding="utf-8"))
    assert set(deployment["work_pool"]["job_variables"]) <= set(pool["variables"]["properties"])
    [step] = [next(iter(step)) for step in deployment["pull"]]
    module, _, function = step.rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))


# -- Dockerfile, Slurm, requirements --


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOYMENTS / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines if line.strip()]


def test_the_image_is_not_root() -> None:
    users = [rest for word, rest in instructions() if word == "USER"]
    assert users == ["10001:10001"]
    assert instructions()[-1][0] == "CMD"


def test_the_image_has_the_program_of_kuberays_probes() -> None:
    """Before version 1.6 KubeRay adds probes to all Ray containers that run `wget` in them."""
    installed = [rest for word, rest in instructions() if word == "RUN" and "apt-get install" in rest]
    assert re.search(r"\bwget\b", installed[-1])


def test_packages_are_installed_by_hash() -> None:
    for word, rest in instructions():
        for command in rest.split("&&") if word == "RUN" else ():
            if re.search(r"pip (install|sync)", command):
                own = "--no-deps" in command and "--offline" in command
                assert "--require-hashes" in command or own, command
            if "apt-get install" in command:
                assert "--no-install-recommends" in command
                assert "rm -rf /var/lib/apt/lists/*" in rest
                continue
            assert not re.search(r"\b(curl|wget|sudo|ADD)\b", command)
    bases = [rest for word, rest in instructions() if word == "ARG" and rest.startswith("BASE=")]
    assert all(":" in base and not base.endswith("latest") for base in bases)
    for lock in ("cpu", "gpu"):
        assert (ROOT / "requirements" / f"{lock}.txt").is_file()


def test_all_packages_are_installed_in_the_image() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    text = (DEPLOYMENTS / "Dockerfile").read_text(encoding="utf-8")
    before = text.partition("--offline .")[0]
    assert all(f"COPY {name.rstrip('*')} " in before for name in packages)


def test_copied_files_exist_and_are_in_the_context() -> None:
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source in allowed, source


def test_the_batch_script_is_valid() -> None:
    script = DEPLOYMENTS / "slurm" / "rlhf.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)
    text = script.read_text(encoding="utf-8")
    from ray.scripts import symmetric_run
    from ray.scripts.scripts import start

    assert "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT" in inspect.getsource(symmetric_run)
    assert "export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300" in text

    known = {option for parameter in start.params for option in (*parameter.opts, *parameter.secondary_opts)}
    call = text[text.rindex("ray symmetric-run") : text.index("-- env")]
    of_all = set(re.findall(r"--[a-z-]+", call)) - {"--address", "--min-nodes"}
    of_head = set(re.findall(r"head=(--[a-z-]+)", text))
    assert (of_all, of_head) == ({"--disable-usage-stats"}, {"--include-dashboard"})
    assert of_all | of_head <= known
    # Ray refuses these on other nodes.
    [head_only] = re.findall(r"head_only_flags = \{(.*?)\}", inspect.getsource(start.callback), re.DOTALL)
    assert of_head <= set(re.findall(r'"(--[a-z-]+)"', head_only))
    assert not of_all & set(re.findall(r'"(--[a-z-]+)"', head_only))
    [srun] = re.findall(r"^exec srun (.*) \\$", text, re.MULTILINE)
    assert "--cpu-bind=none" in srun.split()
    assert "#SBATCH --mem=0\n" in text


def test_cluster_txt_completes_the_lock() -> None:
    cpu, cluster = packages("cpu.txt"), packages("cluster.txt")
    needed = [
        re.match(r"[\w.-]+", requirement)
        for requirement in importlib.metadata.requires("ray") or ()
        if 'extra == "default"' in requirement
    ]
    names = {re.sub(r"[-_.]+", "-", match[0]).lower() for match in needed if match is not None}
    assert names <= set(cpu) | set(cluster)
    assert "aiohttp-cors" not in cpu, "Ray on one machine would open the port of its job server"
    for name in set(cpu) & set(cluster):
        assert cpu[name] == cluster[name], name
