"""The reaper: a small process between the flow and its stage that ends all processes of the stage.

    flow --(SIGTERM, or its death)--> reaper --(SIGINT)--> stage --> Ray's daemons, actors, training ranks

The kernel gives every orphaned descendant to the reaper ("child subreaper"), so that it finds all of them, in
any session and under any name: Ray's agents outlive their driver's SIGKILL by half a minute and hide
their environment. Temporary files (sockets of engines and ranks, Ray's sockets and logs) are in private
folders, which the reaper removes as well; the output of actors is in the stage's log.

    stage ends           descendants get `LEFTOVER_SECONDS` to end, then SIGKILL; the reaper returns the
                         stage's exit code
    SIGTERM to reaper    SIGINT to the stage, `stop_seconds` to clean up, then SIGKILL to all descendants
    a second one         SIGKILL of all at once
    flow dies            SIGKILL of all at once: no process uses the result
    stage is suspended   by a SIGSTOP, for `suspend_seconds`: SIGKILL; no thread of its own could report that
    reaper dies          the kernel kills the stage

SIGINT and not SIGTERM: while Ray starts, the stage's handler of SIGTERM is Ray's, which ends the process on
the spot.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import stat
import sys
import tempfile
import time

import psutil

from rlhf_core.system.processes import die_with_parent

LEFTOVER_SECONDS = 5.0
"""How long descendants may outlive the stage. Ray's daemons need 2 s after a normal end."""
_STOPPING_SECONDS = 2.0
"""The same, if the stage was asked to stop or the flow has died."""
# A process in an uninterruptible wait, as on a network disk that is
# gone, does not end by SIGKILL. The reaper then ends without it.
_KILL_SECONDS = 5.0
_PR_SET_CHILD_SUBREAPER = 36
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The kernel keeps a blocked SIGCHLD for `sigtimedwait`, although it drops one that is not blocked by default.
_WATCHED = {signal.SIGCHLD, *_REQUESTS}


def fork_reaper(flow: int, stop_seconds: float, suspend_seconds: float) -> None:
    """Fork. The new process is the stage, and this function returns in it. The calling process becomes its
    reaper and never returns.

    The reaper exits with the exit code of the stage, or with 128 + n if signal n ended the stage. To be
    called before any thread exists.

    Args:
        flow: Pid of the flow. The stage ends if this process ends.
        stop_seconds: How long the stage may take to stop.
        suspend_seconds: How long the stage may be suspended.
    """
    reaper = os.getpid()
    # Before the fork: the stage inherits the variables, and the reaper removes the folders.
    scratch = _create_scratch_folders()
    # A fork does not inherit these two settings: they are the reaper's alone.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # SIGTERM and not SIGKILL: if the flow dies, the reaper must live until it has ended all others.
    die_with_parent(signal.SIGTERM)()
    # Blocked before the fork: a signal waits for `sigtimedwait`, and does not end the reaper.
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    die_with_reaper = die_with_parent(signal.SIGKILL)
    stage = os.fork()
    if stage:
        # The pipe of the events is the stage's: its end must mean the stage's end.
        os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        code = _watch(stage, flow, stop_seconds, suspend_seconds)
        for folder in scratch:
            shutil.rmtree(folder, ignore_errors=True)
        # Not sys.exit: exit handlers and buffers of before the fork are also those of the stage.
        os._exit(code)
    die_with_reaper()
    # If the reaper died before the line above, the kernel sends no signal.
    if os.getppid() != reaper:
        os._exit(128 + signal.SIGKILL)
    # The stage has inherited the mask, with which no request to stop would reach it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)


_SOCKET_PATH = 107
"""Maximum length of a Unix socket's path."""
_RAY_SOCKET = len("/r-12345678/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
_OTHER_SOCKET = len("/rlhf-12345678/01234567-0123-0123-0123-0123456789ab")
"""Path of an engine's socket: a UUID in the folder for temporary files."""


def _create_scratch_folders() -> tuple[str, str]:
    """Create private folders for the temporary files of this process and its descendants, and for Ray's.

    The default folder is shared by all users of the host, and files of a killed engine or rank stay there.
    """
    shared = tempfile.gettempdir()
    usual = tempfile.mkdtemp(prefix="rlhf-", dir=_short_enough(shared, _OTHER_SOCKET))
    # torch's default is below TMPDIR, which belongs to one
    # stage here: each stage would compile everything again.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _compile_cache(shared, usual))
    base = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # as Ray chooses it
    ray = tempfile.mkdtemp(prefix="r-", dir=_short_enough(base, _RAY_SOCKET))
    # Both: `gettempdir` above has stored its result in `tempfile.tempdir`.
    os.environ["TMPDIR"] = tempfile.tempdir = usual
    os.environ["RAY_TMPDIR"] = ray
    return usual, ray


def _short_enough(folder: str, rest: int) -> str:
    """Return `folder`, or /tmp if the paths of sockets in `folder` would be too long."""
    if len(os.fsencode(os.path.abspath(folder))) + rest > _SOCKET_PATH:
        return "/tmp"
    os.makedirs(folder, exist_ok=True)
    return folder


def _compile_cache(shared: str, own: str) -> str:
    """Return the folder for code that torch has compiled, which is kept for later stages.

    This code is loaded and executed. The name of the folder is predictable, and all users can write to
    `shared`. The folder is therefore only used if no other user can write to it. Otherwise compiled code is
    stored below the stage's folder `own` and removed with it.
    """
    folder = os.path.join(shared, f"rlhf-compiled-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.makedirs(folder, mode=0o700)
    if is_private_folder(folder):
        return folder
    sys.stderr.write(
        f"{folder} is not a folder of this user alone: what torch compiles is not kept; remove it\n"
    )
    return os.path.join(own, "compiled")


def is_private_folder(folder: str) -> bool:
    """Return whether `folder` is a real folder that no other user can write to or replace."""
    own, above = os.lstat(folder), os.stat(os.path.dirname(folder))
    return (
        stat.S_ISDIR(own.st_mode)
        and own.st_uid == os.getuid()
        and not own.st_mode & 0o022
        and above.st_uid in (0, os.getuid())
        and (not above.st_mode & 0o022 or bool(above.st_mode & stat.S_ISVTX))
    )


def _watch(stage: int, flow: int, stop_seconds: float, suspend_seconds: float) -> int:
    """Wait for the end of the stage, end all its descendants, and return the stage's exit code."""
    deadline = float("inf")
    suspended, before = 0.0, time.monotonic()
    code: int | None = None
    flow_lives = True
    while code is None and flow_lives and time.monotonic() < deadline:
        # A missed wake-up costs a second: the parent-death signal, for one, can come before the mask is set.
        signum = signal.sigtimedwait(_WATCHED, 1.0)
        code = _reap(stage)
        flow_lives = os.getppid() == flow
        # What suspended the stage may have suspended the reaper as well: that time does not count.
        passed, before = min(time.monotonic() - before, 2.0), time.monotonic()
        suspended = suspended + passed if code is None and _is_suspended(stage) else 0.0
        if suspended > suspend_seconds:
            sys.stderr.write(
                f"WorkerStuck: the stage's own process was suspended (SIGSTOP) for {suspended:.0f} s and is"
                " killed\n"
            )
            os.kill(stage, signal.SIGKILL)
        if signum is not None and signum.si_signo in _REQUESTS:
            # A second request is not given any time.
            deadline = time.monotonic() + (stop_seconds if deadline == float("inf") else 0.0)
            if code is None:  # otherwise another process can have its pid
                os.kill(stage, signal.SIGINT)
    stopping = deadline < float("inf") or not flow_lives
    if code is None:
        grace = 0.0
    elif stopping:
        grace = _STOPPING_SECONDS
    else:
        grace = LEFTOVER_SECONDS
    killed = _end_descendants(grace, stage)
    if killed and not stopping:
        sys.stderr.write(f"processes that outlived the stage were killed: {', '.join(killed)}\n")
    return 128 + signal.SIGKILL if code is None else code


def _is_suspended(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def _reap(stage: int) -> int | None:
    """Collect all children that have ended. Return the exit code of the stage if it is one of them.

    A stage that signal n ended has the exit code 128 + n.
    """
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            # -1: orphans of the stage too. As zombies they would still be children in `_end_descendants`.
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == stage:
                code = os.waitstatus_to_exitcode(status)
    # `waitstatus_to_exitcode` returns -n for signal n.
    if code is not None and code < 0:
        return 128 - code
    return code


def _end_descendants(grace_seconds: float, stage: int) -> list[str]:
    """Wait for all descendants to end, and kill those that live longer than `grace_seconds`.

    Returns the names of the killed processes without the stage itself.
    """
    # By pid, because each round finds a process again until the kernel has removed it.
    killed: dict[int, str] = {}
    kill_from = time.monotonic() + grace_seconds
    while time.monotonic() < kill_from + _KILL_SECONDS:
        _reap(stage)
        # Listed again in each round, because a process can fork before it is killed.
        left = psutil.Process().children(recursive=True)
        if not left:
            break
        if time.monotonic() >= kill_from:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    killed[process.pid] = process.name()
                    process.kill()
        time.sleep(0.05)
    return [name for pid, name in killed.items() if pid != stage]
