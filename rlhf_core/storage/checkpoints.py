"""Checkpoints: the resumable states of one stage, `{store}/checkpoints/{stage key}/step-%08d/` (layout: `bundles`)."""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from pathlib import Path

from rlhf_core.errors import CorruptArtifact
from rlhf_core.storage import bundles
from rlhf_core.storage.bundles import MANIFEST
from rlhf_core.storage.fencing import Fence
from rlhf_core.storage.store import Store

log = logging.getLogger(__name__)

_ANY = re.compile(r"/step-(\d{8,})/")
_COMMITTED = re.compile(rf"/step-(\d{{8,}})/{re.escape(MANIFEST)}$")


class CheckpointStore:
    """`Checkpoints` of types.py. Order of a save: files, sizes checked, manifest, then old ones are pruned."""

    def __init__(self, store: Store, stage_key: str, work: Path, keep: int, fence: Fence | None = None) -> None:
        """`work`: local folder for downloads. `keep`: whole checkpoints that stay, at least 1. `fence`: None only in
        tests and tools, where nobody else writes."""
        self._store = store
        self._root = f"checkpoints/{stage_key}"
        self._work = work
        self._keep = max(1, keep)
        self._fence = fence

    def latest(self) -> tuple[int, Path] | None:
        """(step, verified local folder) of the newest whole checkpoint; None when there is none.

        A damaged one is set aside, said loudly, and the one before it is used.
        """
        damaged = 0
        for step in self._steps():
            prefix = self._prefix(step)
            try:
                manifest = bundles.read(self._store, prefix)
                if manifest is None:
                    continue
                if manifest.body.get("step") != step:
                    raise CorruptArtifact(f"{self._store.uri(prefix)} has the manifest of another step.")
                return step, bundles.fetch(self._store, manifest, self._work)
            except CorruptArtifact as error:
                if not self._store.exists(f"{prefix}/{MANIFEST}"):
                    continue  # pruned by a later attempt while we read it
                damaged += 1
                kept = bundles.quarantine(self._store, prefix, error.message)
                log.error("The checkpoint of step %d is damaged: %s It is set aside: %s", step, error.message, kept)
        if damaged:
            log.error("No whole checkpoint is left in %s: the stage starts anew.", self._store.uri(self._root))
        return None

    def save(self, step: int, folder: Path) -> None:
        """Commit a local folder as the checkpoint of `step`; consumes it.

        Raises Superseded if a later attempt holds the stage key, RLHFError if the store fails; the checkpoints before
        are untouched then.
        """
        self._may_commit()
        # DeepSpeed leaves a script in each of its checkpoints; nobody shall ever run one from a bucket.
        files = bundles.hash_folder(folder, skip=lambda path: path.endswith(".py"))
        manifest = bundles.commit(
            self._store,
            self._prefix(step),
            folder,
            files,
            folder=f"{self._fence.attempt:06d}-{uuid.uuid4().hex[:6]}" if self._fence else uuid.uuid4().hex[:12],
            body={"step": step},
            may_commit=self._may_commit,
        )
        if manifest is None:
            log.warning("Step %d has a checkpoint already; the existing one is kept.", step)
        shutil.rmtree(folder)
        self._prune(self._steps()[self._keep - 1 :][:1])

    def clear(self) -> None:
        """Delete all checkpoints: the stage's artifact is published. Those found damaged stay."""
        for step in self._steps(committed=False):
            bundles.remove(self._store, self._prefix(step))

    def _steps(self, *, committed: bool = True) -> list[int]:
        """Steps with a manifest, or with any file at all, newest first."""
        pattern = _COMMITTED if committed else _ANY
        matches = (pattern.search(key) for key in self._store.list(self._root))
        return sorted({int(match[1]) for match in matches if match}, reverse=True)

    def _prune(self, oldest: list[int]) -> None:
        """Delete what is older than the step in `oldest`, leftovers without a manifest as well."""
        for step in self._steps(committed=False) if oldest else []:
            if step < oldest[0]:
                bundles.remove(self._store, self._prefix(step))

    def _prefix(self, step: int) -> str:
        return f"{self._root}/step-{step:08d}"

    def _may_commit(self) -> None:
        if self._fence is not None:
            self._fence.check()
