"""Environment variables that every process of a stage has, on every host."""

from __future__ import annotations

from pathlib import Path


def _has_intel_cpu() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


STRICT_MKL = {"MKL_CBWR": "AUTO,STRICT"} if _has_intel_cpu() else {}
"""On Intel's CPUs: without it, bits of products depend more on the alignment of memory (decision 5)."""

NO_TELEMETRY = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

STAGE_SETTINGS = {
    **STRICT_MKL,
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS is not deterministic
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "MPLBACKEND": "Agg",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
}

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

WITH_GPU = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Rows differ in shape, so that fixed segments would become fragmented. Not for processes that share memory
by CUDA IPC, whose export of such segments needs a system call that containers forbid.
"""

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
