"""The environment of a stage's process."""

from __future__ import annotations

import importlib
import logging
import os

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.redact import LOG_FORMAT, ScrubbingFormatter
from rlhf_core.executors.spec import stage_environment


def test_stage_has_its_threads_and_no_prefect_variables() -> None:
    config = PipelineConfig.model_validate_json('{"run": {"threads": 3, "device": "cpu"}}')
    child = stage_environment(
        config, {"PATH": "/bin", "PREFECT__FLOW_RUN_ID": "x", "PREFECT_API_URL": "y", "OMP_NUM_THREADS": "9"}
    )
    assert not [name for name in child if name.startswith("PREFECT")]
    assert (child["PATH"], child["OMP_NUM_THREADS"], child["MKL_NUM_THREADS"]) == ("/bin", "3", "3")
    assert (child["DS_ACCELERATOR"], child["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
    assert (child["PYTHONHASHSEED"], child["RAY_USAGE_STATS_ENABLED"], child["TOKENIZERS_PARALLELISM"]) == (
        "0",
        "0",
        "false",
    )


def test_threads_sleep_while_they_wait() -> None:
    """On a busy machine, a step with two threads that spin takes several times as long."""
    assert stage_environment(PipelineConfig(), {})["OMP_WAIT_POLICY"] == "PASSIVE"


def test_memory_of_gpus_is_in_segments_that_grow() -> None:
    name = "PYTORCH_ALLOC_CONF"
    on_cpu, on_gpu = (config_from_tree({"run": {"device": device}}) for device in ("cpu", "cuda"))
    assert name not in stage_environment(on_cpu, {})
    assert stage_environment(on_gpu, {})[name] == "expandable_segments:True"
    given = {name: "max_split_size_mb:512"}
    assert stage_environment(on_gpu, given)[name] == given[name]


@pytest.mark.parametrize("kind", ["CUDA", "HIP"])
def test_ray_shows_each_process_its_own_gpu_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images for other programs let it show all of them, and every rank would use the first one."""
    module = importlib.import_module(f"ray._private.accelerators.{'nvidia' if kind == 'CUDA' else 'amd'}_gpu")
    manager = getattr(module, f"{'Nvidia' if kind == 'CUDA' else 'AMD'}GPUAcceleratorManager")
    name = f"RAY_EXPERIMENTAL_NOSET_{kind}_VISIBLE_DEVICES"
    monkeypatch.setenv(name, stage_environment(PipelineConfig(), {name: "1"})[name])
    monkeypatch.setenv(f"{kind}_VISIBLE_DEVICES", "0,1")
    manager.set_current_process_visible_accelerator_ids(["1"])
    assert os.environ[f"{kind}_VISIBLE_DEVICES"] == "1"


def test_zero_threads_means_all_available_cores() -> None:
    child = stage_environment(PipelineConfig(), {})
    assert child["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))


def test_ray_does_not_merge_the_lines_of_reward_sources() -> None:
    from ray._private.ray_logging import LogDeduplicator

    allowed = stage_environment(PipelineConfig(), {})["RAY_DEDUP_LOGS_ALLOW_REGEX"]
    shown: dict[str, int] = {}
    for name in ("rlhf_core.rewards.rules", "vllm"):
        line = ScrubbingFormatter(LOG_FORMAT).format(
            logging.LogRecord(name, logging.WARNING, "", 0, "an answer is empty", (), None)
        )
        ray = LogDeduplicator(5, allowed, None)
        batches = [
            batch for pid in ("1", "2") for batch in ray.deduplicate({"ip": "", "pid": pid, "lines": [line]})
        ]
        shown[name] = sum(len(batch["lines"]) for batch in batches)
    assert shown == {"rlhf_core.rewards.rules": 2, "vllm": 1}
