"""Processes that compete for one stage key, and holders that were wrongly considered dead.

Tested here:
- if several processes claim and publish at the same time, one artifact remains and verifies; the others get
  it, or an error that names the holder of the key;
- a holder that was suspended during a save changes nothing after its successor has committed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.errors import Superseded
from rlhf_core.storage import bundles
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.fencing import Fence
from rlhf_core.storage.store import Store
from tests.support.checkpoints import keep
from tests.support.claims import claim

PROCESSES, ROUNDS = 4, 25
SUPERSEDED = 7
POINTS = ("between files", "before the fence", "before the manifest")


def race(root: Path, number: int, barrier: Any, answers: Any) -> None:
    """Claim and publish in every round; answer with (round, digest or 'superseded', attempt)."""
    store = Store(root / "store")
    artifacts = ArtifactStore(store, root / "cache")
    for turn in range(ROUNDS):
        out = root / f"out-{number}-{turn}"
        out.mkdir()
        (out / "model.safetensors").write_text(f"process {number}")
        barrier.wait(60)
        fence = claim(store, f"k{turn}")
        try:
            ref = artifacts.publish("ppo", f"k{turn}", out, Provenance(), fence=fence)
            answers.put((turn, ref.digest, fence.attempt))
        except Superseded:
            answers.put((turn, "superseded", fence.attempt))


def test_one_of_many_concurrent_publishers_wins(tmp_path: Path, summary_lines: list[str]) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(PROCESSES), context.Queue()
    processes = [context.Process(target=race, args=(tmp_path, n, barrier, answers)) for n in range(PROCESSES)]
    for process in processes:
        process.start()
    seen = [answers.get(timeout=120) for _ in range(PROCESSES * ROUNDS)]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    artifacts = ArtifactStore(Store(tmp_path / "store"), tmp_path / "cache")
    for turn in range(ROUNDS):
        ref = artifacts.find("ppo", f"k{turn}")
        assert ref is not None
        artifacts.fetch(ref)
        mine = [answer for answer in seen if answer[0] == turn]
        assert {digest for _, digest, _ in mine} <= {ref.digest, "superseded"}
        assert sorted(attempt for _, _, attempt in mine) == [1, 2, 3, 4]
    outcomes = Counter(
        "superseded" if digest == "superseded" else "published or found" for _, digest, _ in seen
    )
    summary_lines.append(
        f"{PROCESSES} processes x {ROUNDS} races for a key: one artifact each; {dict(outcomes)}"
    )


def state(folder: Path, text: str) -> Path:
    folder.mkdir()
    for name in ("rank0.pt", "rank1.pt"):
        (folder / name).write_text(f"{name} {text}")
    return folder


def stale_holder(root: Path, point: str) -> int:
    """Save step 1 and stop at `point`."""
    store = Store(root / "store")
    calls: Counter[str] = Counter()

    def stop_before(owner: Any, name: str, nth: int) -> None:
        plain = getattr(owner, name)

        def stopped(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            if calls[name] == nth:
                os.kill(os.getpid(), signal.SIGSTOP)
            return plain(*args, **kwargs)

        setattr(owner, name, stopped)

    saver = CheckpointStore(store, "k", root / "work", keep(2), claim(store, "k"))
    stop_before(*{
        "between files": (Store, "put_file", 2),
        "before the fence": (Fence, "check", 2),
        "before the manifest": (Store, "put_if_absent", 1),
    }[point])  # fmt: skip
    try:
        saver.save(1, state(root / "stale", "stale"))
    except Superseded:
        return SUPERSEDED
    return 0


@pytest.mark.parametrize("point", POINTS)
def test_superseded_holder_changes_nothing(tmp_path: Path, point: str) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.test_fencing_processes", str(tmp_path), point]
    )
    try:
        deadline = time.monotonic() + 60
        while psutil.Process(holder.pid).status() != psutil.STATUS_STOPPED:
            assert holder.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        store = Store(tmp_path / "store")
        successor = CheckpointStore(store, "k", tmp_path / "work", keep(2), claim(store, "k"))
        assert successor.latest() is None
        successor.save(1, state(tmp_path / "new", "new"))
        before = bundles.read(store, "checkpoints/k/step-00000001")
        holder.send_signal(signal.SIGCONT)
        # The last moment: the fence is passed, but the manifest is there already and is created only once.
        assert holder.wait(60) == (0 if point == "before the manifest" else SUPERSEDED)
    finally:
        holder.kill()
        holder.wait()
    assert bundles.read(store, "checkpoints/k/step-00000001") == before
    found = CheckpointStore(store, "k", tmp_path / "work", keep(2), claim(store, "k")).latest()
    assert found is not None
    assert [(found[1] / name).read_text() for name in ("rank0.pt", "rank1.pt")] == [
        "rank0.pt new",
        "rank1.pt new",
    ]


if __name__ == "__main__":
    sys.exit(stale_holder(Path(sys.argv[1]), sys.argv[2]))
