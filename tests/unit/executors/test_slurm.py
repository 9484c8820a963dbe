"""Batch jobs of Slurm, with its commands as scripts on PATH.

- `sbatch` gets the resources of the stage as its options, and each job is submitted once
- the output goes to a folder that the nodes have: below a store that is a folder, or /tmp
- every state of `squeue` and `sacct` has a meaning; a job that has left the queue is looked up in accounting
- no variable, hidden partition or other day hides a job
- what `sbatch` refuses is an error of the user; a controller that does not answer is a fault that may pass
- the batch script runs the stage's command on the first node, with the address of the job's Ray cluster; the
  name by which the first node calls itself does not matter; Ray gets the variables of the script, and none of
  a surrounding job
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import StageResources
from rlhf_core.errors import ConfigError, InfrastructureError
from rlhf_core.executors.base import Job
from rlhf_core.executors.follow import open_scheduler
from rlhf_core.executors.slurm import SlurmJobs
from tests.support.scripted_slurm import ScriptedSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedSlurm]:
    scripted = ScriptedSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", scripted.path)
    yield scripted
    scripted.close()


@pytest.fixture
def jobs(tmp_path: Path) -> SlurmJobs:
    return SlurmJobs(tmp_path / "output")


def job(*command: str, **resources: Any) -> Job:
    return Job("rlhf-sft-1", "sft", command or ("true",), StageResources(**resources))


def wait_for_end(jobs: SlurmJobs) -> None:
    deadline = time.monotonic() + 20
    while jobs.status("rlhf-sft-1").is_active and time.monotonic() < deadline:
        time.sleep(0.05)
    assert jobs.status("rlhf-sft-1").state == "succeeded", jobs.log_tail("rlhf-sft-1")


def test_sbatch_gets_the_resources_of_the_stage(slurm: ScriptedSlurm, jobs: SlurmJobs) -> None:
    slurm.hold()
    asked = {"nodes": 2, "gpus_per_node": 8, "cpus_per_node": 96, "memory_per_node": "900Gi"}
    names = {"queue": "gpu,long", "priority": "high", "account": "nlp"}
    jobs.submit(job("python", "-m", "x", **asked, **names, time_limit=7200))
    [folder] = slurm.jobs()
    arguments = json.loads((folder / "args").read_text())
    output = arguments.pop(next(i for i, word in enumerate(arguments) if word.startswith("--output=")))
    assert output.endswith("/output/rlhf-sft-1.out")
    assert arguments == [
        "--parsable",
        "--job-name=rlhf-sft-1",
        "--dependency=singleton",
        "--nodes=2",
        "--gpus-per-node=8",
        "--cpus-per-task=96",
        "--mem=900G",
        "--partition=gpu,long",
        "--qos=high",
        "--account=nlp",
        "--time=120",
        "deployments/slurm/rlhf.sbatch",
        "python",
        "-m",
        "x",
    ]


@pytest.mark.parametrize("is_bucket", [False, True])
def test_output_goes_to_a_folder_that_the_nodes_have(
    slurm: ScriptedSlurm, tmp_path: Path, is_bucket: bool
) -> None:
    slurm.hold()
    store = "s3://models/rlhf" if is_bucket else str(tmp_path / "mounted")
    run = {"executor": "slurm", "home": str(tmp_path / "home")}
    config = PipelineConfig.model_validate({"run": run, "store": {"url": store}})
    open_scheduler(config, "sft").submit(job())
    [folder] = slurm.jobs()
    [output] = [word for word in json.loads((folder / "args").read_text()) if word.startswith("--output=")]
    file = Path(output.removeprefix("--output="))
    assert file.parent == (Path("/tmp") if is_bucket else tmp_path / "mounted" / "jobs" / "slurm")
    assert file.parent.is_dir()
    name = f"rlhf-{uuid.uuid4().hex}"
    of_this_host = file.parent / f"{name}.out"
    of_this_host.write_text("a file of this host")
    try:
        tail = open_scheduler(config, "sft").log_tail(name)
    finally:
        of_this_host.unlink()
    assert tail == ("" if is_bucket else "a file of this host")


@pytest.mark.parametrize("state", ["pending", "succeeded"])
def test_a_job_is_submitted_once(slurm: ScriptedSlurm, jobs: SlurmJobs, state: str) -> None:
    """Also if it has ended: its request may have had no answer."""
    if state == "pending":
        slurm.hold()
    jobs.submit(job("true"))
    deadline = time.monotonic() + 20
    while jobs.status("rlhf-sft-1").state != state and time.monotonic() < deadline:
        time.sleep(0.05)
    assert jobs.status("rlhf-sft-1").state == state
    jobs.submit(job("true"))
    assert len(slurm.jobs()) == 1


def test_the_batch_script_runs_the_command_with_the_address_of_its_cluster(
    slurm: ScriptedSlurm, jobs: SlurmJobs
) -> None:
    jobs.submit(job("bash", "-c", 'echo "at $RAY_ADDRESS" ${#RAY_AUTH_TOKEN} $RAY_AUTH_MODE', nodes=2))
    wait_for_end(jobs)
    assert jobs.log_tail("rlhf-sft-1") == "at 127.0.0.1:24711 64 token\n"
    calls = [json.loads(line) for line in (slurm.folder / "calls.jsonl").read_text().splitlines()]
    other, head = [call[: call.index("--")] for call in calls if call[0] == "ray"]
    assert other[:6] == ["ray", "symmetric-run", "--address", "127.0.0.1:24711", "--min-nodes", "2"]
    assert [*other, "--include-dashboard=false"] == head


def test_the_batch_script_gives_ray_its_environment(
    slurm: ScriptedSlurm, jobs: SlurmJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the user's jobs inherit nothing. The cluster of the flow is not that of the job."""
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    jobs.submit(job("bash", "-c", "echo ${#RAY_AUTH_TOKEN} $RAY_TMPDIR $RAY_ADDRESS"))
    wait_for_end(jobs)
    assert jobs.log_tail("rlhf-sft-1") == "64 /tmp/rlhf-4711 127.0.0.1:24711\n"


def test_a_flow_in_a_job_gives_its_jobs_none_of_its_variables(
    slurm: ScriptedSlurm, jobs: SlurmJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun would take them for options."""
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet,mask_cpu:0x1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    jobs.submit(job("bash", "-c", "echo bind=${SLURM_CPU_BIND-} $SLURM_CONF"))
    wait_for_end(jobs)
    assert jobs.log_tail("rlhf-sft-1") == "bind= /etc/slurm/slurm.conf\n"


@pytest.mark.parametrize("command", ["squeue", "sacct"])
def test_variables_that_hide_jobs_are_not_used(
    slurm: ScriptedSlurm, jobs: SlurmJobs, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv(f"{command.upper()}_PARTITION", "other")
    slurm.hold()
    jobs.submit(job())
    [folder] = slurm.jobs()
    if command == "sacct":
        (folder / "left").touch()
    else:
        (slurm.bin / "sacct").unlink()
    assert jobs.status("rlhf-sft-1").state == "pending"


def test_jobs_of_hidden_partitions_are_found(slurm: ScriptedSlurm, jobs: SlurmJobs) -> None:
    slurm.hold()
    jobs.submit(job())
    [folder] = slurm.jobs()
    (folder / "hidden").touch()
    (slurm.bin / "sacct").unlink()
    assert jobs.status("rlhf-sft-1").state == "pending"


def test_jobs_that_ended_on_another_day_are_found_in_accounting(
    slurm: ScriptedSlurm, jobs: SlurmJobs
) -> None:
    slurm.hold()
    jobs.submit(job())
    [folder] = slurm.jobs()
    slurm.set_state(folder, "OUT_OF_MEMORY|OutOfMemory")
    (folder / "left").touch()
    (folder / "old").touch()
    assert jobs.status("rlhf-sft-1").state == "failed"


def test_the_name_of_a_cluster_is_no_job(slurm: ScriptedSlurm, jobs: SlurmJobs) -> None:
    """`squeue` prints it with SLURM_CLUSTERS."""
    slurm.hold()
    jobs.submit(job())
    [folder] = slurm.jobs()
    slurm.set_state(folder, "CLUSTER: gpus")
    assert jobs.status("rlhf-sft-1").state == "missing"
    slurm.set_state(folder, "CLUSTER: gpus\nCOMPLETED|None")
    assert jobs.status("rlhf-sft-1").state == "succeeded"


def test_the_path_of_the_output_is_taken_literally(slurm: ScriptedSlurm, tmp_path: Path) -> None:
    slurm.hold()
    SlurmJobs(tmp_path / "100%j").submit(job())
    [folder] = slurm.jobs()
    [output] = [word for word in json.loads((folder / "args").read_text()) if word.startswith("--output=")]
    assert output == f"--output={tmp_path}/100%%j/rlhf-sft-1.out"


@pytest.mark.parametrize(
    ("state", "meaning"),
    [
        ("PENDING|Resources", "pending"),
        ("CONFIGURING|None", "pending"),
        ("RUNNING|None", "running"),
        ("COMPLETING|None", "running"),
        ("RESIZING|None", "running"),
        ("SIGNALING|None", "running"),
        ("STAGE_OUT|None", "running"),
        ("A_STATE_OF_ANOTHER_VERSION|None", "running"),
        ("REQUEUE_HOLD|None", "pending"),
        ("SPECIAL_EXIT|None", "pending"),
        ("STOPPED|None", "pending"),
        ("BOOT_FAIL|None", "failed"),
        ("LAUNCH_FAILED|None", "failed"),
        ("COMPLETED|None", "succeeded"),
        ("FAILED|NonZeroExitCode", "failed"),
        ("NODE_FAIL|None", "failed"),
        ("OUT_OF_MEMORY|OutOfMemory", "failed"),
        ("TIMEOUT|TimeLimit", "timed out"),
        ("CANCELLED by 1000|None", "stopped"),
        ("PREEMPTED|None", "stopped"),
    ],
)
def test_every_state_has_a_meaning(slurm: ScriptedSlurm, jobs: SlurmJobs, state: str, meaning: str) -> None:
    slurm.hold()
    jobs.submit(job())
    [folder] = slurm.jobs()
    slurm.set_state(folder, state)
    found = jobs.status("rlhf-sft-1")
    assert found.state == meaning
    assert found.message.startswith(state.partition("|")[0])
    (folder / "left").touch()  # the queue, and is in accounting
    assert jobs.status("rlhf-sft-1") == found


def test_a_job_that_is_unknown_is_missing_with_and_without_accounting(
    slurm: ScriptedSlurm, jobs: SlurmJobs
) -> None:
    assert jobs.status("other").state == "missing"
    (slurm.bin / "sacct").unlink()
    assert jobs.status("other").state == "missing"


def test_what_sbatch_refuses_is_an_error_of_the_user(slurm: ScriptedSlurm, jobs: SlurmJobs) -> None:
    slurm.fail("sbatch", "sbatch: error: invalid partition specified: gpus")
    with pytest.raises(ConfigError, match="exit code 1: sbatch: error: invalid partition specified: gpus"):
        jobs.submit(job(queue="gpus"))


@pytest.mark.parametrize("command", ["sbatch", "squeue", "scancel"])
@pytest.mark.parametrize(
    "message",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "Batch job submission failed: Socket timed out on send/recv operation",
        "Batch job submission failed: Slurm backup controller in standby mode",
        "Batch job submission failed: Zero Bytes were transmitted or received",
        "fatal: Could not establish a configuration source",
    ],
)
def test_a_controller_that_does_not_answer_is_a_fault_that_may_pass(
    slurm: ScriptedSlurm, jobs: SlurmJobs, command: str, message: str
) -> None:
    slurm.fail(command, message)
    with pytest.raises(InfrastructureError, match=re.escape(message)):
        if command == "scancel":
            jobs.cancel("rlhf-sft-1")
        else:
            jobs.submit(job())


def test_without_slurm_the_message_names_the_command(
    jobs: SlurmJobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs the command squeue on PATH"):
        jobs.submit(job())


def test_a_script_that_does_not_exist_is_refused(slurm: ScriptedSlurm, jobs: SlurmJobs) -> None:
    with pytest.raises(ConfigError, match=r"run\.resources\.sft\.template"):
        jobs.submit(job(template="/none/x.sbatch"))


def test_cancel_ends_the_job(slurm: ScriptedSlurm, jobs: SlurmJobs) -> None:
    jobs.submit(job("sleep", "600"))
    jobs.cancel("rlhf-sft-1")
    jobs.cancel("rlhf-sft-1")
    assert jobs.status("rlhf-sft-1").state == "stopped"
