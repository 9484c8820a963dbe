"""Temporary files of a stage lie in folders of its own, but what torch has compiled is for all stages of this
user.

- a folder whose path is too long for the sockets in it is passed over
- compiled programs of a folder that somebody else made, or can write to, are not loaded

The reaper itself:

- it closes all descriptors of the stage, also with high numbers
- a request to stop that arrives together with the end of the stage is not sent to the pid of the stage
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.run import reaper


def use_for_temporary_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)  # which keeps the first result of `gettempdir`


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files; the test's own is too long for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    use_for_temporary_files(folder, monkeypatch)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = dict(os.environ)
    yield folder
    os.environ.clear()
    os.environ.update(before)
    shutil.rmtree(folder)


@pytest.mark.parametrize("ray_elsewhere", [False, True])
def test_temporary_folders_are_private_and_torch_finds_what_it_compiled(
    ray_elsewhere: bool, usual: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it where it is imported
    ray = usual / "r" if ray_elsewhere else usual
    monkeypatch.setenv("RAY_TMPDIR", str(ray)) if ray_elsewhere else None
    folders = reaper._create_scratch_folders()
    assert [Path(folder).parent for folder in folders] == [usual, ray]
    assert (tempfile.gettempdir(), os.environ["TMPDIR"], os.environ["RAY_TMPDIR"]) == (folders[0], *folders)
    assert all(os.stat(folder).st_mode & 0o077 == 0 for folder in folders)
    compiled = Path(cache_dir())
    assert compiled == usual / f"rlhf-compiled-{os.getuid()}" and compiled.stat().st_mode & 0o077 == 0
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    use_for_temporary_files(usual, monkeypatch)
    reaper._create_scratch_folders()
    assert Path(cache_dir()) == compiled, "the next stage finds it"


def test_long_paths_are_not_used_for_sockets(usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = usual / ("x" * 60)
    deep.mkdir()
    use_for_temporary_files(deep, monkeypatch)
    folders = reaper._create_scratch_folders()
    try:
        assert [os.path.dirname(folder) for folder in folders] == ["/tmp", "/tmp"]
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == deep
    finally:
        for folder in folders:
            shutil.rmtree(folder)


def _link(folder: Path) -> None:
    folder.symlink_to("/etc")


def _foreign(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)


def _open(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _file(folder: Path) -> None:
    folder.touch()


def _movable(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.parent.chmod(0o777)


@pytest.mark.parametrize("plant", [_link, _open, _file, _movable, _foreign])
def test_compiled_code_writable_by_others_is_not_loaded(
    plant: object, usual: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if plant is _foreign and os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    folder = usual / f"rlhf-compiled-{os.getuid()}"
    plant(folder)  # type: ignore[operator]
    own, _ = reaper._create_scratch_folders()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == os.path.join(own, "compiled")
    assert "is not a folder of this user alone" in capfd.readouterr().err


STAGE_WITH_HIGH_DESCRIPTOR = """
import fcntl, os, time
from rlhf_core.run.reaper import fork_reaper

pipe = fcntl.fcntl(os.pipe()[1], fcntl.F_DUPFD, 300)
fork_reaper(os.getppid(), 5.0, 60.0)
deadline = time.monotonic() + 10
while os.path.exists(f"/proc/{os.getppid()}/fd/{pipe}") and time.monotonic() < deadline:
    time.sleep(0.05)
print(sorted(map(int, os.listdir(f"/proc/{os.getppid()}/fd"))))
"""


def test_reaper_keeps_no_descriptor_of_the_stage(usual: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STAGE_WITH_HIGH_DESCRIPTOR], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[0, 1, 2]\n"


REAPER_OF_ENDED_STAGE = """
import os, signal
from rlhf_core.run import reaper

signal.pthread_sigmask(signal.SIG_BLOCK, reaper._WATCHED)
stage = os.fork()
if stage == 0:
    os._exit(7)
os.waitid(os.P_PID, stage, os.WEXITED | os.WNOWAIT)
os.kill(os.getpid(), signal.SIGTERM)
print(reaper._watch(stage, os.getppid(), 20.0, 60.0))
"""


def test_request_to_stop_is_not_sent_to_a_stage_that_has_ended() -> None:
    """The kernel delivers SIGTERM before SIGCHLD. The reaper collects the stage, and then no process has its
    pid.
    """
    done = subprocess.run(
        [sys.executable, "-c", REAPER_OF_ENDED_STAGE], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("7\n", "")
