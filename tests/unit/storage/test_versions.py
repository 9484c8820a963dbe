"""The versions that are recorded with artifacts, checkpoints and runs.

- CUDA or ROCm, NCCL and the driver are read from files: torch is not imported and no GPU is initialized
- what is not there is not named: a build for CPUs has none of them
- another driver does not prevent resuming, another CUDA does
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_core.config import devices
from rlhf_core.storage import checkpoints
from rlhf_core.storage import versions as module
from rlhf_core.storage.versions import gpu_versions, versions

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


def installed(
    monkeypatch: pytest.MonkeyPatch, folder: Path, build: str, driver: str = "", nccl: str = ""
) -> None:
    """Give `gpu_versions` a torch with this `version.py`, a driver, and a package of NCCL."""
    (folder / "version.py").write_text(build)
    (folder / "driver").write_text(f"{driver}\n")
    monkeypatch.setattr(
        devices, "find_spec", lambda name: SimpleNamespace(origin=str(folder / "__init__.py"))
    )
    monkeypatch.setattr(module, "_DRIVERS", {"NVIDIA": folder / ("driver" if driver else "none")})

    def version(name: str) -> str:
        if nccl and name == "nvidia-nccl-cu13":
            return nccl
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.metadata, "version", version)


def test_cuda_nccl_and_driver_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, tmp_path, CUDA_BUILD, driver="580.95.05", nccl="2.29.7")
    assert gpu_versions() == {"cuda": "13.0", "nccl": "2.29.7", "gpu_driver": "NVIDIA 580.95.05"}


def test_rocm_is_named_in_place_of_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, tmp_path, ROCM_BUILD, nccl="2.29.7")
    assert gpu_versions() == {"rocm": "7.1.52802"}


def test_a_machine_without_torch_and_gpus_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, tmp_path, CUDA_BUILD)
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    assert gpu_versions() == {}


def test_installed_torch_is_read_without_importing_it() -> None:
    code = (
        "import sys; from rlhf_core.storage.versions import gpu_versions, versions\n"
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
