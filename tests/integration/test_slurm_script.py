"""Slurm's batch script on two hosts, with the real `ray symmetric-run`. `srun` and `scontrol` are scripts.

- a job of two nodes forms one Ray cluster, and its command runs on the first node, once all have joined
- the exit code of the command is that of the job, and nothing of Ray is left on the first node; the other one
  ends when its Ray has missed the head for a minute
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import ROOT, Host, missing_right, start_hosts, wait_until

_MISSING = missing_right()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))]

SCRIPT = ROOT / "deployments" / "slurm" / "rlhf.sbatch"
SCONTROL = "#!/bin/bash\nprintf 'host-1\\nhost-2\\n'\n"
# Runs the command on the first host, and leaves it and its environment to NODE, which runs it on the second.
SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
export -p > /tmp/shared/environment
printf '%q ' "$@" > /tmp/shared/command.new
mv /tmp/shared/command.new /tmp/shared/command
SLURM_NODEID=0 exec "$@"
"""
NODE = """
source /tmp/shared/environment
export SLURM_NODEID=1
eval "exec $(cat /tmp/shared/command)"
"""
COMMAND = """
import os, ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
place = ray.remote(lambda: ray.util.get_node_ip_address())
ran = [ray.get(place.options(resources={f"node:{node}": 0.01}, num_cpus=0).remote()) for node in nodes]
print("nodes", sorted(nodes), "ran on", sorted(ran), flush=True)
raise SystemExit(7)
"""
# `ray stop` ends the Ray processes of all hosts that it sees: a host gets process numbers of its own.
ALONE = ("unshare", "--pid", "--fork", "--mount-proc")


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as shared,
        start_hosts(2, shared=Path(shared)) as hosts,
    ):
        for name, content in (("srun", SRUN), ("scontrol", SCONTROL)):
            (Path(shared) / name).write_text(content)
            (Path(shared) / name).chmod(0o755)
        for host in hosts:
            # Ray finds its own address on the way to the internet.
            route = ["ip", "-n", host.namespace, "route", "add", "default", "dev", "eth0"]
            subprocess.run(route, check=True)
        yield hosts


def test_a_job_of_two_nodes_is_one_ray_cluster(hosts: list[Host]) -> None:
    first, second = hosts
    path = f"/tmp/shared:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        "PATH": path,
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "host-[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "RAY_ADDRESS": "10.77.0.9:1",  # of the flow
    }
    job = first.start(*ALONE, "bash", SCRIPT, sys.executable, "-c", COMMAND, log="job", **environment)
    shared = first.shared
    assert shared is not None
    wait_until(lambda: (shared / "command").exists(), 60, lambda: first.output("job"))
    node = second.start(*ALONE, "bash", "-c", NODE, log="node", PATH=path)
    code = job.wait(240)
    output = first.output("job")
    expected = ["10.77.0.1", "10.77.0.2"]
    assert f"nodes {expected} ran on {expected}" in output, output + second.output("node")
    assert code == 7
    assert node.wait(120) == 0, second.output("node")
    for host in hosts:
        left = subprocess.run(
            ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True
        )
        assert left.stdout.split() == []
