"""Checkpoints: the resumable states of one stage, `{store}/checkpoints/{stage key}/step-%08d/` (see
`bundles`).

    save     hash -> (bucket: outbox -> upload in the background) -> files, sizes checked -> manifest
             -> newest.json -> older checkpoints are deleted
    latest   pending uploads of an earlier attempt -> newest manifest -> every hash -> a local folder
             damaged: marked as such, logged as an error, and the one before is used; none left: an error,
             never a silent fresh start

`latest` decides which checkpoint of a stage key is resumed: its manifest, versions and files must match (see
`docs/reliability.md`). The number of ranks and the contents are checked by `TrainingEngine.load_checkpoint`.
`newest.json` names the step that was committed last, so that the loss of a manifest is noticed.

On a cluster each host has a part of a checkpoint (`HostParts`): the hosts hash and upload their files at the
same time, and this process commits one manifest of them all. Such a checkpoint is in no outbox: after a kill,
the next attempt may run on other hosts, and could not put the parts together.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from rlhf_core.config.pipeline import StoreConfig
from rlhf_core.errors import ConfigError, CorruptArtifact
from rlhf_core.storage import bundles
from rlhf_core.storage.bundles import MANIFEST, FileEntry, Manifest
from rlhf_core.storage.fencing import Fence
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store
from rlhf_core.storage.versions import versions
from rlhf_core.system.files import json_sha256
from rlhf_core.system.waiting import in_background
from rlhf_core.types import checkpoint_prefix

log = logging.getLogger(__name__)

# A stage that is asked to stop has 20 s in all (`executors.child.TERM_SECONDS`), also for the end of its step
# (decision 6).
LAST_SECONDS = 10.0
"""How long the end of a stage waits for an upload. The next attempt uploads the rest from the outbox."""

_ANY = re.compile(r"/step-(\d{8,})/")
_NEWEST = "newest.json"
# Below every step, so that it names no checkpoint as gone. It still shows that there was one: without an
# intact one, `latest` needs `allow_fresh_start`.
_DAMAGED_POINTER = -1
"""Stands for the step in a `newest.json` that cannot be read."""
_ONLY_LOGGED = {"threads", "git", "ray", "datasets", "mlflow", "prefect", "gpu_driver"}
"""Differences that do not prevent resuming: versions that do not affect results, the driver of the GPUs, and
the threads, which the user sets. `code`, a digest of what can change numbers, is not one of them.
"""


class CheckpointBody(BaseModel):
    """The entries of a manifest of a checkpoint. Those of earlier releases lack some, and have others."""

    step: int
    seconds: float = 0.0
    made_with: dict[str, str] = {}
    settings: dict[str, str] = {}


class HostParts(Protocol):
    """The parts of checkpoints on the other hosts of a stage.

    Every folder has the same path on all hosts. None of the methods does anything before the stage has
    processes on other hosts.
    """

    def prepare(self, folder: Path, size: int, unsharded: int | None) -> None:
        """Create the empty `folder` on each host. Raises StoreError unless its disk has space for what the
        ranks there write of a checkpoint; see `Checkpoints.prepare`.
        """

    def bytes_here(self, size: int, unsharded: int | None) -> int:
        """Return how many bytes of a checkpoint the ranks of this host write at most."""

    def add(self, folder: Path, target: str) -> Callable[[], Sequence[Sequence[FileEntry]]]:
        """Start to hash the files of `folder`, which is consumed, for the folder `target` of the store. The
        result waits for the end and returns the files of each host that has some.
        """

    def upload(self, target: str) -> Callable[[], None]:
        """Start to upload what `add` took for `target`. The result waits for the end and raises its error."""

    def fetch(self, manifest: Manifest, work: Path) -> Callable[[], None]:
        """Start to fetch what the ranks of each host need. The result waits for the end."""

    def needed_here(self, manifest: Manifest) -> Callable[[str], bool]:
        """Return whether the ranks of this host need a file."""


class CheckpointStore:
    """Implements `Checkpoints` of types.py. For one thread; at most one upload runs in the background."""

    def __init__(
        self,
        store: Store,
        stage_key: str,
        work: Path,
        store_settings: StoreConfig,
        fence: Fence | None = None,
        *,
        outbox: Outbox | None = None,
        hosts: HostParts | None = None,
        settings: Mapping[str, str] | None = None,
        on_event: Callable[[Literal["resumed", "checkpoint"], int], None] = lambda event, step: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the checkpoints of a stage; nothing is read yet.

        Args:
            store: The store with the checkpoints.
            stage_key: Key of the stage.
            work: Local folder for downloads.
            store_settings: How many checkpoints to keep, and from which to resume.
            fence: The right to commit; None only for a sole writer, such as a tool.
            outbox: If given, uploads run in the background.
            hosts: The other hosts of the stage, if it runs on a cluster.
            settings: Settings that change results by rounding only; a change since the checkpoint is logged.
            on_event: Called with the step of a checkpoint that is resumed from, and of each that is
                committed.
            clock: Seconds from any start, for `seconds`.
        """
        self._store = store
        self._root = checkpoint_prefix(stage_key)
        self._work = work
        self._store_settings = store_settings
        self._fence = fence
        self._outbox = outbox
        self._hosts = hosts
        self._settings = dict(settings or {})
        self._on_event = on_event
        self._background_upload: tuple[int, Future[None]] | None = None
        """Step and end of the last upload."""
        self._earlier_seconds = 0.0
        self._clock = clock
        self._opened = clock()

    @property
    def seconds(self) -> float:
        """Duration of the work that the next checkpoint contains, over all attempts."""
        return self._earlier_seconds + self._clock() - self._opened

    def latest(self) -> tuple[int, Path] | None:
        """Return (step, verified local folder) of the newest intact checkpoint; None if none was ever
        committed.

        A damaged one is marked as such and logged as an error, and the one before it is used. Raises
        CorruptArtifact if none is left, and ConfigError if other code wrote it and that is not allowed.
        """
        # First, because a checkpoint that is still pending is newer than those that the store has.
        self._upload_pending()
        steps, newest = self._steps(), self._newest()
        # By its key, because the listing may lack it.
        if newest is not None and newest >= 0 and newest not in steps and self._is_committed(newest):
            steps = sorted([*steps, newest], reverse=True)
        uri = self._store.uri(self._root)
        if newest is None and steps:
            log.warning("%s/%s is missing; the manifests say which is the newest.", uri, _NEWEST)
        if newest is not None and newest > max(steps, default=-1):
            log.error("The checkpoint of step %d in %s is gone: it has no manifest.", newest, uri)
        for step in steps:
            manifest = None
            try:
                manifest = self._read(step)
                if manifest is None:
                    continue
                # Before the fetch: a refusal must not wait for a download.
                self._check_compatible(step, manifest.body)
                folder = self._fetch(manifest)
                self._earlier_seconds = float(manifest.body.get("seconds", 0.0))
                self._on_event("resumed", step)
                return step, folder
            except CorruptArtifact as error:
                if not self._is_committed(step):
                    continue  # a later attempt deleted it while it was read
                # Without newest.json, the damaged checkpoint shows that there was one: no silent fresh start.
                newest = step if newest is None else newest
                self._mark_damaged(step, error, manifest)
        if newest is not None:
            self._require_fresh_start_allowed(newest)
        elif self._fence is not None and self._fence.attempt > 1:
            log.warning("there is no checkpoint yet: attempt %d starts at step 1", self._fence.attempt)
        return None

    def newest(self) -> tuple[int, str] | None:
        """Return the step of the newest checkpoint whose manifest can be read, and the other code because of
        which it is not continued, or an empty text. None without a checkpoint. Nothing is fetched.
        """
        found = self._newest_readable()
        if found is None:
            return None
        step, manifest = found
        changed = _changes(manifest.body.get("made_with") or {}, _made_with())
        return step, ", ".join(changed.values()) if self._refuses(changed) else ""

    def stored_seconds(self) -> float:
        """Return the duration of the work in the newest checkpoint; 0 without one. Nothing is fetched."""
        found = self._newest_readable()
        return 0.0 if found is None else float(found[1].body.get("seconds", 0.0))

    def _newest_readable(self) -> tuple[int, Manifest] | None:
        for step in self._steps():
            try:
                manifest = self._read(step)
            except CorruptArtifact:
                continue
            if manifest is not None:
                return step, manifest
        return None

    def _fetch(self, manifest: Manifest) -> Path:
        """Return the verified local folder, on all hosts, with the files that their ranks need."""
        if self._hosts is None:
            return bundles.fetch(self._store, manifest, self._work)
        wait_for_others = self._hosts.fetch(manifest, self._work)
        folder = bundles.fetch(self._store, manifest, self._work, self._hosts.needed_here(manifest))
        wait_for_others()
        return folder

    def _check_compatible(self, step: int, body: Mapping[str, Any]) -> None:
        """Compare the checkpoint's code, versions and settings with the present ones.

        Raises ConfigError for other code or versions, unless `allow_other_code`; other differences are
        logged.
        """
        settings = _changes(body.get("settings") or {}, self._settings)
        if settings:
            log.warning(
                "The checkpoint of step %d was made with other settings (%s): what follows is the same but"
                " for rounding.",
                step,
                ", ".join(settings.values()),
            )
        changed = _changes(body.get("made_with") or {}, _made_with())
        if not changed:
            return
        described = ", ".join(changed.values())
        if self._refuses(changed):
            raise ConfigError(
                f"store.allow_other_code: the checkpoint of step {step} to continue from was made with other"
                f" code ({described}); go back to that, or set it to true to continue, perhaps with other"
                " bits"
            )
        log.warning(
            "The checkpoint of step %d was made with other versions or threads (%s).", step, described
        )

    def _refuses(self, changed: Mapping[str, str]) -> bool:
        """Return whether a checkpoint is not continued whose code and versions have changed so."""
        return not self._store_settings.allow_other_code and not set(changed) <= _ONLY_LOGGED

    def prepare(
        self, step: int, folder: Path, size: int, unsharded: int | None = None, *, own: int = 0
    ) -> None:
        """Prepare a checkpoint.

        Args:
            step, folder, size, unsharded, own: See `Checkpoints.prepare`.
        """
        shutil.rmtree(folder, ignore_errors=True)
        here = size if self._hosts is None else self._hosts.bytes_here(size, unsharded)
        bundles.require_free(folder, here + own, f"The checkpoint of step {step}")
        folder.mkdir(parents=True)
        if self._hosts is not None:
            self._hosts.prepare(folder, size, unsharded)

    def save(self, step: int, folder: Path) -> None:
        """Commit a local folder as the checkpoint of `step`. The folder is consumed.

        Raises Superseded if a later attempt holds the stage key, and StoreError if the store fails. With
        background uploads, a StoreError can also refer to the previous save. Earlier checkpoints are not
        affected.

        Args:
            step: The step, which no committed checkpoint has.
            folder: Local folder with the files.
        """
        started = self._clock()
        # With an outbox, the checkpoint is on the local disk before the store is asked for anything.
        if self._outbox is None:
            self._may_commit()
        # With random digits, because `bundles.commit` takes a bundle in a folder of the same name for this
        # one: a step that is saved twice would pass for a commit that is repeated.
        name = f"{self._fence.attempt:06d}-{uuid.uuid4().hex[:6]}" if self._fence else uuid.uuid4().hex[:12]
        prefix = self._prefix(step)
        # Before the files of this host are hashed, so that all hosts hash at the same time.
        wait_for_others = None if self._hosts is None else self._hosts.add(folder, f"{prefix}/{name}")
        # DeepSpeed adds a script to each of its checkpoints. Programs are never stored in a bucket.
        files = bundles.hash_folder(folder, skip=lambda path: path.endswith(".py"))
        parts = () if wait_for_others is None else wait_for_others()
        body = {
            "step": step,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 1),
            "made_with": _made_with(),
            "settings": self._settings,
        }
        bundle = Manifest(prefix, name, files, body)
        if self._outbox is None:
            self._commit(step, bundle, folder, parts)
        elif parts:
            # Aside, because the next checkpoint is written to `folder` while this one is uploaded.
            aside = folder.rename(folder.with_name(name))
            self._in_background(step, lambda: self._commit(step, bundle, aside, parts))
        else:
            # Before the wait for the previous upload, so that an error of it does not lose this checkpoint.
            self._outbox.add(bundle, folder)
            shutil.rmtree(folder)
            self._in_background(step, lambda: self._upload(step))
        megabytes = sum(entry.size for entry in files) / 1e6
        log.info("checkpoint of step %d: %.1f MB, %.2f s", step, megabytes, self._clock() - started)

    def finish(self, seconds: float | None = LAST_SECONDS) -> None:
        """Wait for the last upload for at most `seconds`, or for its end, and log if it is unfinished or
        failed.

        Raises nothing.
        """
        if self._background_upload is None:
            return
        step, upload = self._background_upload
        wait([upload], seconds)
        if not upload.done():
            then = "continues from the one before"
            if self._outbox is not None and self._outbox.manifest(self._prefix(step)) is not None:
                then = "finishes it"
            log.warning(
                "The upload of the checkpoint of step %d is unfinished; the same command %s.", step, then
            )
        elif upload.exception() is not None:
            log.warning("The checkpoint of step %d was not uploaded: %s", step, upload.exception())

    def clear(self) -> None:
        """Delete all checkpoints, after the stage's artifact was published. Damaged ones stay."""
        # Without a limit, because the upload would add files again after the deletion.
        self.finish(None)
        if self._outbox is not None:
            self._outbox.discard_all(self._root)
        # First. After a kill in between, `latest` would report the step that it names as lost.
        self._store.delete([f"{self._root}/{_NEWEST}"])
        for step in self._steps(committed=False):
            bundles.remove(self._store, self._prefix(step))

    def _upload_pending(self) -> None:
        """Upload the checkpoints that an earlier attempt on this machine could not upload."""
        if self._outbox is None:
            return
        for prefix in self._outbox.pending(self._root):
            step = int(prefix.rsplit("-", 1)[-1])
            log.info("uploading the checkpoint of step %d, which an earlier attempt left", step)
            self._upload(step)

    def _upload(self, step: int) -> None:
        """Upload a pending checkpoint."""
        assert self._outbox is not None
        self._committed(step, self._outbox.upload(self._prefix(step), self._may_commit))

    def _commit(
        self, step: int, bundle: Manifest, folder: Path, parts: Sequence[Sequence[FileEntry]]
    ) -> None:
        """Commit the files of `folder`, which is consumed, with the parts that other hosts upload."""
        wait_for_uploads = None
        if parts:
            assert self._hosts is not None
            wait_for_uploads = self._hosts.upload(bundle.data)
        manifest = bundles.commit(
            self._store,
            bundle,
            folder,
            may_commit=self._may_commit,
            files_elsewhere=bundles.merged(*parts),
            wait_for_uploads=wait_for_uploads,
        )
        shutil.rmtree(folder)
        self._committed(step, manifest)

    def _in_background(self, step: int, upload: Callable[[], None]) -> None:
        """Start an upload after the end of the previous one, whose error is raised."""
        if self._background_upload is not None:
            # Without a limit of its own: `store.retry_seconds` bounds each call of the upload.
            self._background_upload[1].result()
        self._background_upload = step, in_background(upload)

    def _committed(self, step: int, manifest: Manifest | None) -> None:
        if manifest is None:
            log.warning("Step %d: the existing one is kept, or this one was damaged on its way.", step)
            return
        self._store.put_bytes(f"{self._root}/{_NEWEST}", _pointer(step))
        self._on_event("checkpoint", step)
        self._prune()

    def _newest(self) -> int | None:
        """Return the step in `newest.json`; None without such a file, `_DAMAGED_POINTER` if it is damaged."""
        key = f"{self._root}/{_NEWEST}"
        raw = self._store.read_bytes(key)
        if raw is None:
            return None
        try:
            content = json.loads(raw)
            if content.pop("checksum") != json_sha256(content):
                raise ValueError("checksum")
            return int(content["step"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            log.error(
                "%s is damaged; the manifests alone say which checkpoint is the newest.", self._store.uri(key)
            )
            return _DAMAGED_POINTER

    def _require_fresh_start_allowed(self, newest: int) -> None:
        """Raise CorruptArtifact unless the stage may start from its beginning although it had checkpoints."""
        uri = self._store.uri(self._root)
        if newest != _DAMAGED_POINTER:
            # The very first checkpoint may have been damaged before `newest.json` was written.
            self._store.put_if_absent(f"{self._root}/{_NEWEST}", _pointer(newest))
        if not self._store_settings.allow_fresh_start:
            raise CorruptArtifact(
                f"No intact checkpoint is left in {uri}: all that were committed are damaged or gone."
                " Restore one there (each damaged-*.json describes a damaged one), or add"
                " store.allow_fresh_start=true to the command to train this stage from its beginning."
            )
        log.error(
            "No intact checkpoint is left in %s: the stage starts from its beginning, because"
            " store.allow_fresh_start is set.",
            uri,
        )

    def _mark_damaged(self, step: int, error: CorruptArtifact, manifest: Manifest | None = None) -> None:
        record = bundles.mark_damaged(self._store, self._prefix(step), error.message, manifest)
        log.error(
            "The checkpoint of step %d is damaged: %s It is marked as such: %s", step, error.message, record
        )

    def _steps(self, *, committed: bool = True) -> list[int]:
        """Return the steps with a manifest, or those with any file, newest first."""
        listed = set(self._store.list(self._root))
        matches = (_ANY.search(key) for key in listed)
        steps = sorted({int(match[1]) for match in matches if match}, reverse=True)
        if not committed:
            return steps
        # A listing may lack a manifest and have the files beside it.
        return [step for step in steps if self._manifest(step) in listed or self._is_committed(step)]

    def _is_committed(self, step: int) -> bool:
        return self._store.exists(self._manifest(step))

    def _read(self, step: int) -> Manifest | None:
        """Return the manifest of a checkpoint; None if it has none. Raises CorruptArtifact."""
        manifest = bundles.read(self._store, self._prefix(step))
        if manifest is not None:
            bundles.check_body(manifest, CheckpointBody)
            if manifest.body["step"] != step:
                raise CorruptArtifact(f"{self._store.uri(manifest.prefix)} has the manifest of another step.")
        return manifest

    def _prune(self) -> None:
        """Delete all checkpoints but the newest ones, and older leftovers without a manifest."""
        newest = self._steps()[: self._store_settings.keep_checkpoints]
        if len(newest) < self._store_settings.keep_checkpoints:
            return
        # Later files without a manifest may be an upload of this attempt.
        deleted = [step for step in self._steps(committed=False) if step < newest[-1]]
        for step in deleted:
            bundles.remove(self._store, self._prefix(step))
        if deleted:
            log.info("checkpoints kept: steps %s; removed: %d", sorted(newest), len(deleted))

    def _prefix(self, step: int) -> str:
        return f"{self._root}/step-{step:08d}"

    def _manifest(self, step: int) -> str:
        return f"{self._prefix(step)}/{MANIFEST}"

    def _may_commit(self) -> None:
        if self._fence is not None:
            self._fence.check()


def _pointer(step: int) -> bytes:
    content = {"step": step}
    return json.dumps({**content, "checksum": json_sha256(content)}).encode()


def _made_with() -> dict[str, str]:
    """Return what determines the bits of a result, other than configuration and data."""
    # Sums on a CPU can depend on the number of threads, and other versions of a library can add in another
    # order.
    return {**versions(), "threads": os.environ.get("OMP_NUM_THREADS", "")}


def _changes(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return `name then -> now`, by name, for each value of `then` that differs in `now`."""
    changes = {}
    for name, value in then.items():
        if value != now.get(name):
            changes[name] = f"{name} {value} -> {now.get(name)}"
    return changes
