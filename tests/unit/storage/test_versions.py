"""The versions that are recorded with artifacts, checkpoints and runs.

- CUDA or ROCm, NCCL and the driver are read from files: torch is not imported and no GPU is initialized
- what is not there is not named: a build for CPUs has none of them
- another driver does not prevent resuming, another CUDA does
- comments, docstrings and code that cannot change numbers do not prevent resuming, other code does
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.storage import checkpoints
from rlhf_core.storage import versions as versions_module
from rlhf_core.storage.versions import gpu_versions, versions
from tests.support.scripted_machine import ScriptedMachine

ROOT = Path(__file__).parents[3]

CUDA_BUILD = """\
from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '2.13.0+cu130'
debug = False
cuda: Optional[str] = '13.0'
git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'
hip: Optional[str] = None
"""
ROCM_BUILD = CUDA_BUILD.replace("'13.0'", "None").replace("hip: Optional[str] = None", "hip = '7.1.52802'")


NCCL = {"nvidia-nccl-cu13": "2.29.7"}


def test_cuda_nccl_and_driver_are_named(tmp_path: Path) -> None:
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia/version").write_text("580.95.05\n")
    machine = ScriptedMachine(torch="cuda", versions=NCCL, root=tmp_path)
    assert gpu_versions(machine) == {"cuda": "13.0", "nccl": "2.29.7", "gpu_driver": "NVIDIA 580.95.05"}


def test_rocm_is_named_in_place_of_cuda() -> None:
    assert gpu_versions(ScriptedMachine(torch="rocm", versions=NCCL)) == {"rocm": "7.1.52802"}


def test_a_machine_with_a_build_for_cpus_and_without_gpus_has_none() -> None:
    assert gpu_versions(ScriptedMachine(torch="cpu", versions=NCCL)) == {}


@pytest.mark.parametrize(
    ("build", "cuda", "hip"),
    [(CUDA_BUILD, "13.0", ""), (ROCM_BUILD, "", "7.1.52802"), (None, "", "")],
    ids=["cuda", "rocm", "no torch"],
)
def test_the_build_of_torch_is_read_from_its_file(
    tmp_path: Path, build: str | None, cuda: str, hip: str
) -> None:
    """In a process whose only packages are those of a folder."""
    if build is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
        (tmp_path / "torch" / "version.py").write_text(build)
    code = (
        f"import sys; sys.path += [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        "from rlhf_core.system.machine import Machine\n"
        "print([Machine().torch_built_with(name) for name in ('cuda', 'hip')])"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
    assert done.stdout == f"{[cuda, hip]}\n"


def test_installed_torch_is_read_without_importing_it() -> None:
    code = (
        "import sys; from rlhf_core.storage.versions import versions\n"
        "found = versions(); assert 'torch' not in sys.modules\n"
        "import torch; assert found.get('cuda') == torch.version.cuda\n"
        "assert found.get('rocm') == torch.version.hip"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_another_driver_can_resume_and_another_cuda_cannot() -> None:
    made = {**versions(), "cuda": "13.0", "gpu_driver": "NVIDIA 580.95.05"}
    driver = checkpoints._changes(made, {**made, "gpu_driver": "NVIDIA 590.10.01"})
    assert set(driver) <= checkpoints._ONLY_LOGGED and driver
    assert not set(checkpoints._changes(made, {**made, "cuda": "12.9"})) <= checkpoints._ONLY_LOGGED


SMALL = '"""Add numbers."""\n\n\ndef add(a: int) -> int:\n    """Return a + 1."""\n    return a + 1\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a package with the folders and the files of `rlhf_core`, whose digest is taken in its place.

    All files have the same short content.
    """
    copy = tmp_path / "rlhf_core"
    for file in (ROOT / "rlhf_core").rglob("*.py"):
        place = copy / file.relative_to(ROOT / "rlhf_core")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(SMALL)
    monkeypatch.setattr(versions_module, "_PACKAGE", copy)
    return copy


def test_comments_docstrings_and_formatting_do_not_change_the_digest_of_the_code(sources: Path) -> None:
    before, all_before = versions_module._code_digest(), versions_module.sources_digest()
    for file in sources.rglob("*.py"):
        file.write_text(SMALL.replace("Return", "Give").replace("\n\n\n", "\n\n\n\n# A comment.\n"))
    assert versions_module._code_digest() == before
    assert versions_module.sources_digest() != all_before


@pytest.mark.parametrize(
    "package", ["run", "tracking", "storage", "system", "planning", "testing", "record", "ppo/recording.py"]
)
def test_code_that_cannot_change_numbers_does_not_change_the_digest(sources: Path, package: str) -> None:
    before = versions_module._code_digest()
    files = list((sources / package).rglob("*.py")) or [sources / package]
    assert files[0].read_text() == SMALL
    for file in files:
        if file != sources / "system/environment.py":  # its variables select algorithms of libraries
            file.write_text(SMALL.replace("+ 1", "+ 2"))
    assert versions_module._code_digest() == before


@pytest.mark.parametrize(
    "file",
    [
        "algo/kl.py", "cluster/ranks.py", "config/training.py", "data/examples.py", "engines/deepspeed.py",
        "engines/sync/wire.py", "evaluation/during_ppo.py", "models/score.py", "ppo/training/experience.py",
        "rewards/rules.py", "seeds.py", "stages/sft.py", "system/environment.py", "types.py",
    ],
)  # fmt: skip
def test_one_changed_number_of_code_that_computes_changes_the_digest(sources: Path, file: str) -> None:
    before = versions_module._code_digest()
    assert (sources / file).read_text() == SMALL
    (sources / file).write_text(SMALL.replace("+ 1", "+ 2"))
    assert versions_module._code_digest() != before
