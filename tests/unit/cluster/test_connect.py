"""The connection to a running cluster. The processes of Ray are scripted here.

- ranks get the environment of the stage, also in a job that was submitted with an environment of its own
- the process keeps its handler of SIGTERM, which Ray replaces
- such a job keeps its metadata, and its processes do not import from its working folder
"""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.cluster.connect import connect, rank_environment
from rlhf_core.config import PipelineConfig

SUBMITTED = {
    "runtime_env": {"env_vars": {"OF_THE_JOB": "1", "PYTHONHASHSEED": "7"}},
    "metadata": {"job_submission_id": "rlhf-sft-1"},
}


class Connected(Exception):
    """Ends `ray.init` where it would connect."""


@pytest.fixture
def job_configs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gets the configuration of the job with which Ray would connect."""
    found: list[Any] = []

    def connect_driver(*_args: Any, job_config: Any, **_named: Any) -> None:
        found.append(job_config)
        raise Connected

    def node(*_args: Any, **_named: Any) -> SimpleNamespace:
        return SimpleNamespace(webui_url="", session_name="")

    monkeypatch.setattr("ray._private.node.Node", node)
    monkeypatch.setattr("ray._private.worker._global_node", None)
    monkeypatch.setattr("ray._private.worker.connect", connect_driver)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:1")
    monkeypatch.setenv("RAY_OVERRIDE_JOB_RUNTIME_ENV", "0")
    return found


@pytest.mark.parametrize("submitted", [None, SUBMITTED])
def test_ranks_get_the_environment_of_the_stage(
    job_configs: list[Any], submitted: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if submitted is not None:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(submitted))
    config = PipelineConfig.model_validate({"run": {"env": {"NCCL_DEBUG": "INFO"}}})
    # Ray replaces the signal handlers of a main thread only.
    with ThreadPoolExecutor(1) as thread, pytest.raises(Connected):
        thread.submit(connect, 1, "cpu", config.run).result()
    [job] = job_configs
    expected = rank_environment(config.run, "cpu")
    assert expected["PYTHONHASHSEED"] == "0" and expected["NCCL_DEBUG"] == "INFO"
    of_job = {} if submitted is None else {"OF_THE_JOB": "1"}
    assert job.runtime_env["env_vars"] == {**of_job, **expected}
    assert job.metadata == ({} if submitted is None else SUBMITTED["metadata"])
    assert job._client_job, "otherwise Ray adds the working folder to the search path of its workers"


@pytest.mark.parametrize("address", ["", "10.0.0.1:1"])
def test_the_process_keeps_its_handler_of_sigterm(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_options: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def handler(*_arguments: Any) -> None:
        """Do nothing."""

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setenv("RAY_ADDRESS", address)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        connect(1, "cpu")
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
