"""Temporary files of a stage lie in folders of its own, but what torch has compiled is for all stages."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from rlhf_core.stages import guard


@pytest.mark.parametrize("ray_elsewhere", [False, True])
def test_temporary_folders_are_private_and_torch_finds_what_it_compiled(
    ray_elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    usual, ray = tmp_path / "usual", tmp_path / "ray"
    usual.mkdir()
    monkeypatch.setenv("TMPDIR", str(usual))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("RAY_TMPDIR", str(ray)) if ray_elsewhere else monkeypatch.delenv("RAY_TMPDIR", raising=False)
    compiled = Path(default_cache_dir())
    assert compiled.parent == usual
    folders = guard._take_scratch()
    assert [Path(folder).parent for folder in folders] == [usual, ray if ray_elsewhere else usual]
    assert (tempfile.gettempdir(), os.environ["TMPDIR"], os.environ["RAY_TMPDIR"]) == (folders[0], *folders)
    assert all(os.stat(folder).st_mode & 0o077 == 0 for folder in folders)
    assert Path(default_cache_dir()).resolve() == compiled, "its name is torch's own"
