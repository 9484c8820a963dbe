"""What is started before the stage `ppo` has its inputs, without Ray's processes:

- nothing on a cluster or on GPUs
- a process in which Ray does not start ends after `run.timeouts.start`; one in which it starts does not
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.pipeline import STAGES

_START = """
import ctypes, sys, time
import ray
from rlhf_core.config import PipelineConfig
from rlhf_core.cluster.connect import start_ray

def hang(**options):
    ctypes.PyDLL(None).sleep(600)  # holds Python's lock

ray.init = hang if sys.argv[1] == "hangs" else lambda **options: None
start_ray(PipelineConfig.model_validate({"run": {"device": "cpu", "timeouts": {"start": 0.5}}}))
time.sleep(1.0)
print("waits")
"""


@pytest.mark.parametrize(("address", "device"), [("10.0.0.1:1", "cpu"), ("", "cuda")])
def test_nothing_is_started_on_a_cluster_or_on_gpus(
    address: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setitem(sys.modules, "ray", None)  # an import of Ray raises
    STAGES["ppo"].prepare(PipelineConfig.model_validate({"run": {"device": device}}))


@pytest.mark.parametrize("ray", ["starts", "hangs"])
def test_only_a_process_in_which_ray_hangs_ends_after_the_time_limit(ray: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", _START, ray]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if ray == "starts":
        assert (ended.returncode, ended.stdout) == (0, "waits\n"), ended.stderr
    else:
        assert (ended.returncode, ended.stdout) == (1, ""), ended.stderr
        assert "in hang" in ended.stderr
