"""Checkpoints: the resumable states of one stage, `{store}/checkpoints/{stage key}/step-%08d/` (layout:
`bundles`).

    save     hash -> (bucket: outbox -> upload behind the training) -> files, sizes checked -> manifest -> newest.json
             -> old ones pruned
    latest   what an earlier attempt could not upload -> newest manifest -> every hash -> a local folder
             damaged: set aside, said loudly, the one before is used; none left: an error, never a silent
             fresh start

`newest.json` names the step that was committed last: a manifest that vanishes is missed by it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from rlhf_core.errors import ConfigError, CorruptArtifact
from rlhf_core.storage import bundles
from rlhf_core.storage.bundles import MANIFEST, Manifest, checksum_of
from rlhf_core.storage.fencing import Fence
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.space import require_free
from rlhf_core.storage.store import Store
from rlhf_core.storage.versions import versions

log = logging.getLogger(__name__)

LAST_SECONDS = 10.0
"""How long the end of a stage waits for an upload; the rest of it waits in the outbox for the next attempt.
"""

_ANY = re.compile(r"/step-(\d{8,})/")
_COMMITTED = re.compile(rf"/step-(\d{{8,}})/{re.escape(MANIFEST)}$")
_NEWEST = "newest.json"
_NOT_CODE = {"threads", "git", "ray", "datasets", "mlflow", "prefect"}
"""Of what a checkpoint was made with: what decides about no bit (`code` is a digest of the sources), and the
threads, which the user sets.
"""


class CheckpointStore:
    """`Checkpoints` of types.py. One thread calls it; at most one upload goes on behind its back."""

    def __init__(
        self,
        store: Store,
        stage_key: str,
        work: Path,
        keep: int,
        fence: Fence | None = None,
        *,
        keep_best: int = 0,
        outbox: Outbox | None = None,
        allow_fresh_start: bool = False,
        allow_other_code: bool = False,
        settings: Mapping[str, str] | None = None,
        tell: Callable[[Literal["resumed", "checkpoint"], int], None] = lambda event, step: None,
    ) -> None:
        """`work`: local folder for downloads. `keep`: newest whole checkpoints that stay, at least 1.
        `keep_best`: of the others, those with the highest scores. `fence`: None only in tests and tools,
        where nobody else writes. `outbox`: given, uploads go on behind the training. `allow_fresh_start`:
        train from the beginning where only damage is left. `allow_other_code`: go on from what other code or
        versions wrote. `settings`: those that decide about bits by rounding alone; others than a checkpoint's
        are told. `tell` hears the step of a checkpoint that is used, and of each that is committed.
        """
        self._store = store
        self._root = f"checkpoints/{stage_key}"
        self._work = work
        self._keep = max(1, keep)
        self._keep_best = keep_best
        self._fence = fence
        self._outbox = outbox
        self._allow_fresh_start = allow_fresh_start
        self._allow_other_code = allow_other_code
        self._settings = dict(settings or {})
        self._tell = tell
        self._upload: _Upload | None = None
        self._earlier = 0.0
        self._opened = time.monotonic()

    @property
    def seconds(self) -> float:
        """That the work so far took, over all attempts; what was lost after a checkpoint does not count."""
        return self._earlier + time.monotonic() - self._opened

    def latest(self) -> tuple[int, Path] | None:
        """(step, verified local folder) of the newest whole checkpoint; None when none was ever committed.

        A damaged one is set aside, said loudly, and the one before it is used. Raises CorruptArtifact if none
        is left, ConfigError if other code wrote it and that is not allowed.
        """
        self._deliver_waiting()
        steps, newest = self._steps(), self._newest()
        if newest is None and steps:
            log.warning(
                "%s/%s is missing; the manifests say which is the newest.",
                self._store.uri(self._root),
                _NEWEST,
            )
        if newest is not None and newest > max(steps, default=-1):
            log.error(
                "The checkpoint of step %d in %s is gone: it has no manifest.",
                newest,
                self._store.uri(self._root),
            )
        for step in steps:
            prefix = self._prefix(step)
            manifest = None
            try:
                manifest = bundles.read(self._store, prefix)
                if manifest is None:
                    continue
                if manifest.body.get("step") != step:
                    raise CorruptArtifact(f"{self._store.uri(prefix)} has the manifest of another step.")
                self._compare(step, manifest.body)
                folder = bundles.fetch(self._store, manifest, self._work)
                self._earlier = float(manifest.body.get("seconds", 0.0))
                self._tell("resumed", step)
                return step, folder
            except CorruptArtifact as error:
                if not self._store.exists(f"{prefix}/{MANIFEST}"):
                    continue  # pruned by a later attempt while we read it
                newest = step if newest is None else newest
                self._set_aside(step, error, manifest)
        if newest is not None:
            self._start_anew(newest)
        return None

    def _compare(self, step: int, body: Mapping[str, Any]) -> None:
        """Refuse what other code wrote, or only say so: the stage would go on, but perhaps not in the same
        bits.
        """
        then, now = body.get("settings") or {}, self._settings
        if other := [
            f"{name} {then[name]} -> {now.get(name)}" for name in then if then[name] != now.get(name)
        ]:
            log.warning(
                "The checkpoint of step %d was made with other settings (%s): what follows is the same but"
                " for rounding.",
                step,
                ", ".join(other),
            )
        then, now = body.get("made_with") or {}, _made_with()
        changed = [name for name in then if then[name] != now.get(name)]
        if not changed:
            return
        told = ", ".join(f"{name} {then[name]} -> {now.get(name)}" for name in changed)
        if not self._allow_other_code and not set(changed) <= _NOT_CODE:
            raise ConfigError(
                f"store.allow_other_code: the checkpoint of step {step} to continue from was made with other"
                f" code ({told}); go back to that, or set it to true to go on, perhaps not in the same bits"
            )
        log.warning("The checkpoint of step %d was made with other versions (%s).", step, told)

    def prepare(self, step: int, folder: Path, size: int) -> None:
        """Make `folder` empty for the checkpoint of `step`. Raises StoreError unless its disk has `size`
        bytes free.
        """
        shutil.rmtree(folder, ignore_errors=True)
        require_free(folder, size, f"The checkpoint of step {step}")
        folder.mkdir(parents=True)

    def save(
        self, step: int, folder: Path, score: float | None = None, *, known: Mapping[int, float] | None = None
    ) -> None:
        """Commit a local folder as the checkpoint of `step`. The folder is consumed.

        `score`: higher is better, for `keep_best`. `known` has the scores of earlier checkpoints by step that
        became known after those checkpoints were saved. Raises Superseded if a later attempt holds the stage
        key, and StoreError if the store fails. With background uploads, a StoreError can also refer to the
        previous save. Earlier checkpoints are not affected.
        """
        started = time.monotonic()
        if self._outbox is None:
            self._may_commit()
        # DeepSpeed leaves a script in each of its checkpoints; nobody shall ever run one from a bucket.
        files = bundles.hash_folder(folder, skip=lambda path: path.endswith(".py"))
        name = f"{self._fence.attempt:06d}-{uuid.uuid4().hex[:6]}" if self._fence else uuid.uuid4().hex[:12]
        prefix = self._prefix(step)
        body = {
            "step": step,
            "score": score if score is not None and math.isfinite(score) else None,
            "known_scores": {str(step): score for step, score in (known or {}).items()},
            "seconds": round(self.seconds, 1),
            "made_with": _made_with(),
            "settings": self._settings,
        }
        if self._outbox is None:
            manifest = bundles.commit(
                self._store, prefix, folder, files, folder=name, body=body, may_commit=self._may_commit
            )
            self._committed(step, manifest)
        else:
            self._outbox.add(prefix, folder, files, folder=name, body=body)
            if self._upload is not None:
                self._upload.result()
            self._upload = _Upload(step, lambda: self._deliver(step))
        shutil.rmtree(folder)
        megabytes = sum(entry.size for entry in files) / 1e6
        log.info("checkpoint of step %d: %.1f MB, %.2f s", step, megabytes, time.monotonic() - started)

    def best(self, known: Mapping[int, float] | None = None) -> str | None:
        """Return the address of the checkpoint with the highest score, or None if none has a score. `known`
        is as in `save`.
        """
        scored = self._scored(self._steps(), known or {})
        return self._store.uri(self._prefix(max(scored)[1])) if scored else None

    def finish(self) -> None:
        """Wait a little for the last upload and say so if it is unfinished or failed. Raises nothing."""
        if self._upload is not None:
            self._upload.report(LAST_SECONDS)

    def clear(self) -> None:
        """Delete all checkpoints: the stage's artifact is published. Those found damaged stay."""
        if self._upload is not None:
            self._upload.report(None)
        if self._outbox is not None:
            self._outbox.discard_all(self._root)
        self._store.delete([f"{self._root}/{_NEWEST}"])
        for step in self._steps(committed=False):
            bundles.remove(self._store, self._prefix(step))

    def _deliver_waiting(self) -> None:
        """Upload what an earlier attempt on this machine could not."""
        for prefix in self._outbox.waiting(self._root) if self._outbox is not None else []:
            step = int(prefix.rsplit("-", 1)[-1])
            log.info("uploading the checkpoint of step %d, which an earlier attempt left", step)
            self._deliver(step)

    def _deliver(self, step: int) -> None:
        assert self._outbox is not None
        self._committed(step, self._outbox.deliver(self._prefix(step), self._may_commit))

    def _committed(self, step: int, manifest: Manifest | None) -> None:
        if manifest is None:
            log.warning("Step %d: the existing one is kept, or this one was damaged on its way.", step)
            return
        self._store.put_bytes(f"{self._root}/{_NEWEST}", _pointer(step))
        self._tell("checkpoint", step)
        self._prune()

    def _newest(self) -> int | None:
        """The step that `newest.json` names; None without such a file, -1 if it is damaged, which is said."""
        key = f"{self._root}/{_NEWEST}"
        raw = self._store.read_bytes(key)
        if raw is None:
            return None
        try:
            content = json.loads(raw)
            if content.pop("checksum") != checksum_of(content):
                raise ValueError("checksum")
            return int(content["step"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            log.error(
                "%s is damaged; the manifests alone say which checkpoint is the newest.", self._store.uri(key)
            )
            return -1

    def _start_anew(self, newest: int) -> None:
        where = self._store.uri(self._root)
        if newest >= 0:
            # Also where the first checkpoint of all was damaged before it was named.
            self._store.put_if_absent(f"{self._root}/{_NEWEST}", _pointer(newest))
        if not self._allow_fresh_start:
            raise CorruptArtifact(
                f"No whole checkpoint is left in {where}: all that were committed are damaged or gone."
                " Restore one there (what was set aside is named in its damaged-*.json), or add"
                " store.allow_fresh_start=true to the command to train this stage from its beginning."
            )
        log.error(
            "No whole checkpoint is left in %s: the stage starts anew, as store.allow_fresh_start says.",
            where,
        )

    def _set_aside(self, step: int, error: CorruptArtifact, judged: Manifest | None = None) -> None:
        kept = bundles.quarantine(self._store, self._prefix(step), error.message, judged)
        log.error("The checkpoint of step %d is damaged: %s It is set aside: %s", step, error.message, kept)

    def _steps(self, *, committed: bool = True) -> list[int]:
        """Steps with a manifest, or with any file at all, newest first."""
        pattern = _COMMITTED if committed else _ANY
        matches = (pattern.search(key) for key in self._store.list(self._root))
        return sorted({int(match[1]) for match in matches if match}, reverse=True)

    def _prune(self) -> None:
        """Delete what is neither among the newest nor among the best, leftovers without a manifest as well."""
        steps = self._steps()
        newest, older = steps[: self._keep], steps[self._keep :]
        if len(newest) < self._keep:
            return
        scored = [(score, step) for score, step in self._scored(steps, {}) if step in older]
        best = {step for _, step in sorted(scored, reverse=True)[: self._keep_best]}
        gone = [s for s in self._steps(committed=False) if s < newest[-1] and s not in best]
        for step in gone:
            bundles.remove(self._store, self._prefix(step))
        if gone:
            log.info("checkpoints kept: steps %s; removed: %d", sorted({*newest, *best}), len(gone))

    def _scored(self, steps: list[int], known: Mapping[int, float]) -> list[tuple[float, int]]:
        """Return (score, step) of the checkpoints with a readable manifest and a score.

        A score is stored in the checkpoint's own manifest, in a later manifest or in `known`.
        """
        found: dict[int, float] = {}
        later: dict[int, float] = {}
        readable = set()
        for step in steps if self._keep_best else []:
            try:
                manifest = bundles.read(self._store, self._prefix(step))
            except CorruptArtifact as error:
                self._set_aside(step, error)
                continue
            if manifest is None:
                continue
            readable.add(step)
            if isinstance(score := manifest.body.get("score"), float):
                found[step] = score
            later |= {int(earlier): score for earlier, score in manifest.body.get("known_scores", {}).items()}
        return [(score, step) for step, score in (found | later | dict(known)).items() if step in readable]

    def _prefix(self, step: int) -> str:
        return f"{self._root}/step-{step:08d}"

    def _may_commit(self) -> None:
        if self._fence is not None:
            self._fence.check()


def _pointer(step: int) -> bytes:
    content = {"step": step}
    return json.dumps({**content, "checksum": checksum_of(content)}).encode()


class _Upload:
    """One upload behind the training. A daemon: a process that must end does not wait for a bucket."""

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        self._step = step
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"upload-{step}", daemon=True)
        self._thread.start()

    def result(self) -> None:
        """Wait to the end; raises what the upload met."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def report(self, seconds: float | None) -> None:
        """Wait at most so long; an upload that is unfinished or failed becomes a line in the log."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning(
                "The upload of the checkpoint of step %d is unfinished; the same command finishes it.",
                self._step,
            )
        elif self._error is not None:
            log.warning("The checkpoint of step %d was not uploaded: %s", self._step, self._error)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error


def _made_with() -> dict[str, str]:
    """What decides about bits besides configuration and data."""
    return {**versions(), "threads": os.environ.get("OMP_NUM_THREADS", "")}
