"""Laws of the paths below `run.home`:

- a home is absolute, wherever the working folder is; asking for a path creates nothing
- a home that cannot be created is an InputError that names it
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import InputError
from rlhf_core.system.home import Home


def test_home_is_absolute_and_asking_for_paths_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = Home.of("here")
    assert home.path == tmp_path / "here"
    assert home.run("demo") == tmp_path / "here" / "runs" / "demo"
    assert home.stacks("ppo", "ab", 3) == tmp_path / "here" / "stacks" / "ppo-ab-000003"
    assert home.store == tmp_path / "here" / "store" and PipelineConfig().store_url == ".rlhf/store"
    assert list(home.run_states()) == []
    assert not home.path.exists()


def test_home_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=f"run.home: the folder {tmp_path}/file/home cannot be made"):
        Home(tmp_path / "file" / "home").make()
