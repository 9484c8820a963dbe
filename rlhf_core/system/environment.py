"""Environment variables that every process of a stage has, on every host."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.system.processes import SAFE_PATH


def _has_intel_cpu() -> bool:
    try:
        # By the maker's name, because MKL itself decides by it: on other CPUs it runs its AVX2 code, which
        # has no strict mode.
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

STAGE_PROCESS = {
    **{name: value for name, value in NO_TELEMETRY.items() if not name.startswith("PREFECT_")},
    **STRICT_MKL,
    **SAFE_PATH,
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS is not deterministic
    # The output of a stage is a log, to which a bar would add each of its redraws.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # A notebook sets it to a backend of its kernel, which a child process inherits; one with windows needs a
    # display.
    "MPLBACKEND": "Agg",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait stall each other on a busy machine
    "PYTHONFAULTHANDLER": "1",  # a crash in C code writes stacks to the log
    "PYTHONHASHSEED": "0",  # the same order of sets in all processes
    "PYTHONUNBUFFERED": "1",  # what a process prints before it is killed is in the log
    # Each actor sees its own GPU only. Images for other programs let Ray show all of them.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "0",
    # Ray merges lines of several processes that differ in digits only, but not those of reward sources.
    "RAY_DEDUP_LOGS_ALLOW_REGEX": r" rlhf_core\.rewards",
    # A stage forks to render a template (decision 53). Threads of a tokenizer would be lost in the fork,
    # which the library answers with a warning.
    "TOKENIZERS_PARALLELISM": "false",
    # A pickle can run code. This also holds where DeepSpeed calls torch.load with weights_only=False.
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
}
"""Variables of every process of a stage. Those of Prefect are left out, because no such process uses it."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

WITH_GPU = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Rows differ in shape, so that fixed segments would become fragmented. Not for processes that share memory
by CUDA IPC, whose export of such segments needs a system call that containers forbid.
"""

# With DS_ACCELERATOR, DeepSpeed does not import the packages of all other accelerators to find one, nor warn
# that it has found none.
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
