"""A bundle: a set of files in the store that exists completely or not at all. Artifacts and checkpoints are
bundles.

    {prefix}/manifest.json      written last, and only if absent: the folder, and size and sha256 of each file
    {prefix}/{folder}/...       the files; each attempt has its own folder, so that a writer that was believed
                                dead cannot change a byte of what its successor has committed
    {prefix}/damaged-*.json     the manifest of a bundle that was found damaged, with the reason

Files without a manifest do not exist for readers. They are leftovers, or an attempt is uploading them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlhf_core.errors import CorruptArtifact, InputError, ModelError, StoreError
from rlhf_core.storage.store import Store, check_key
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.files import existing_parent, json_sha256, read_json, replacing, write_json
from rlhf_core.system.machine import machine

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

SCHEMA = 1
MANIFEST = "manifest.json"
DAMAGED = "damaged-"
_TICK_SECONDS = 5.0
_THREADS = min(8, os.cpu_count() or 1)
"""Files that are hashed, uploaded or downloaded at the same time."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a bundle."""

    path: str
    """Relative to the bundle's folder."""
    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents of a bundle."""

    prefix: str
    """Key of the bundle."""
    folder: str
    """Name of the folder with the files, below `prefix`."""
    files: tuple[FileEntry, ...]
    body: Mapping[str, Any]
    """Other entries: kind and origin of the bundle."""

    @property
    def data(self) -> str:
        """Key of the folder with the files."""
        return f"{self.prefix}/{self.folder}"

    @property
    def copy_name(self) -> str:
        """Name of the folder of a local copy."""
        # `artifacts.parse_artifact_copy` and `StoredArtifact.copy_name` know this form.
        return f"{self.prefix.replace('/', '-')}-{self.digest[:12]}"

    @property
    def digest(self) -> str:
        """sha256 over names, sizes and hashes of the files, without the record. The same content always has
        the same digest.
        """
        return digest_of(self.files)


# -- hashes --


def digest_of(files: Sequence[FileEntry]) -> str:
    """Return the `Manifest.digest` of these files.

    It is in the keys of later stages. What is recorded depends on settings that are in no key, and where the
    parts of the record end depends on when the stage was stopped.
    """
    return json_sha256([asdict(entry) for entry in files if not is_record(entry.path)])


def hash_file(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_folder(folder: Path, *, skip: Callable[[str], bool] = lambda path: False) -> tuple[FileEntry, ...]:
    """Return an entry for every file below `folder`, sorted by path.

    Raises InputError for links and for names that the store does not accept.
    """
    found = []
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            relative = check_key(path.relative_to(folder).as_posix())
            # `os.walk` does not enter links to folders, whose files would be left out without a word.
            if path.is_symlink():
                raise InputError(
                    f"{path} is a symbolic link; only plain files can be stored: copy what it points to."
                )
            if name not in folders and not skip(relative):
                found.append((relative, path))
    found.sort()
    return tuple(
        in_parallel(lambda file: FileEntry(file[0], file[1].stat().st_size, hash_file(file[1])), found)
    )


class FileDigests:
    """sha256 of local files. A file is read again only if it has changed.

    Args:
        file: Keeps them for other processes, if its folder exists; None: only this object knows them.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._known: dict[str, str] = {}
        """By path: inode, size and time of change, and the sha256."""
        if file is not None:
            self._known = {path: str(known) for path, known in (read_json(file) or {}).items()}

    def of(self, folder: Path) -> dict[str, str]:
        """Return the sha256 of each file below `folder` by its relative path; links are followed."""
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [path.relative_to(folder).as_posix() for path in files]
        return dict(zip(names, self.of_files(files), strict=True))

    def of_files(self, files: Sequence[Path]) -> list[str]:
        """Return the sha256 of files; links are followed."""
        before = dict(self._known)
        found = in_parallel(self._digest, [file.absolute() for file in files])
        if self._file is not None and self._known != before and self._file.parent.is_dir():
            # Without files that are gone: the list would grow with each model that was ever used.
            present = {path: known for path, known in self._known.items() if Path(path).exists()}
            with suppress(OSError):  # without it, the files are read again
                write_json(self._file, present)
        return found

    def _digest(self, path: Path) -> str:
        # Before the file is read: a change in the meantime is then found at the next call.
        status = path.stat()
        stamp = f"{status.st_ino} {status.st_size} {status.st_ctime_ns} "
        known = self._known.get(str(path), "")
        if not known.startswith(stamp):
            # A second change within one tick of the file system's clock would have the same stamp.
            is_settled = time.time() - status.st_ctime > _TICK_SECONDS
            known = stamp + hash_file(path)
            if is_settled or self._file is None:
                self._known[str(path)] = known
        return known.removeprefix(stamp)


def in_parallel(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return the results in order. Raises the error of the first item that fails.

    A stop does not wait for a transfer: the threads are daemons, unlike those of `ThreadPoolExecutor`.
    """
    # The end of `with` is `terminate`, which does not wait for threads that are in the middle of a call.
    with ThreadPool(_THREADS) as pool:
        # Not `map`, which waits for all items before it raises an error.
        return list(pool.imap(call, items))


def weights_sha256(folder: Path, stored: Mapping[str, str] | None = None) -> str:
    """Return the sha256 of a model's weights.

    It is that of the single weights file, or that over the sorted lines `name:sha256` of several. `stored`
    has the sha256 of files that are in the store and need not be in the folder, by name. Raises ModelError if
    there is no weights file.
    """
    digests = {name: digest for name, digest in (stored or {}).items() if is_weights(name)}
    for path in folder.glob("*.safetensors"):
        if path.name not in digests:
            digests[path.name] = hash_file(path)
    if not digests:
        raise ModelError(
            f"{folder} has no .safetensors file; a model folder must have its weights in that format."
        )
    if len(digests) == 1:
        return next(iter(digests.values()))
    # With the names, so that two shards with exchanged names are not the same model.
    lines = "".join(f"{name}:{digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def is_weights(path: str) -> bool:
    """Return whether a file has weights of a model. All other files of an artifact are small."""
    return path.endswith(".safetensors")


def is_record(path: str) -> bool:
    """Return whether a file is a part of the record of rollouts (`rlhf_core.record`)."""
    return path.startswith("record/")


# -- writing --


def commit(
    store: Store,
    bundle: Manifest,
    source: Path,
    *,
    may_commit: Callable[[], None],
    files_elsewhere: Sequence[FileEntry] = (),
    wait_for_uploads: Callable[[], None] | None = None,
) -> Manifest | None:
    """Store local files as a bundle; return its manifest, or None if another writer's bundle is there.

    Raises StoreError if the store fails or its disk is too small; then nothing is visible.

    Args:
        store: The store to write to.
        bundle: Its local files, and all other entries. No other bundle with this prefix may use its folder.
        source: Local folder with the files. They may share disk blocks with the store, so they must never be
            written to again.
        may_commit: Called directly before the manifest is written; raises if the bundle must not appear.
        files_elsewhere: Further files of the bundle, which other hosts upload.
        wait_for_uploads: Returns when these hosts have uploaded them; None if they have.
    """
    # Hosts with a common folder report the same files.
    manifest = replace(bundle, files=merged(files_elsewhere, bundle.files))
    prefix = bundle.prefix
    existing = _existing(store, prefix)
    # With the same folder, it was committed before. For example, a kill came before the outbox was emptied.
    if existing is not None and existing.folder == bundle.folder:
        return existing
    if existing is not None:
        return None
    is_complete = False
    try:
        upload(store, source, bundle.files, bundle.data)
        if wait_for_uploads is not None:
            wait_for_uploads()
        # Look for files that the store has lost before the manifest is created: afterwards it is final.
        missing = find_damage(store, manifest)
        if not missing:
            # As late as possible: a later attempt may have taken over during the upload.
            may_commit()
            is_complete = True
    except FileNotFoundError as error:
        # For example, another writer deleted the folder while it was filled, see below.
        missing = str(error)
    finally:
        folder = store.local_path(manifest.data)
        if not is_complete and folder is not None:
            # Frees the disk. In a bucket the next clean-up deletes the files.
            shutil.rmtree(folder, ignore_errors=True)
    if missing:
        # The first writer that commits deletes all leftovers, which includes the files of a later attempt
        # that is still uploading.
        if _existing(store, prefix) is not None:
            may_commit()  # files of an earlier attempt are deleted, too: it has to know that it is superseded
            return None
        raise StoreError(f"The store did not keep {missing}; the same command tries again.")
    failpoint("bundle.uploaded")
    if store.put_if_absent(f"{prefix}/{MANIFEST}", encode(manifest)):
        failpoint("bundle.committed")
        return manifest
    # Two processes can upload the same bundle of an outbox: then what the other one has committed is this
    # one's as well.
    existing = _existing(store, prefix)
    if existing is not None and existing.folder == bundle.folder:
        return existing
    store.delete_prefix(manifest.data)
    return None


def merged(*parts: Sequence[FileEntry]) -> tuple[FileEntry, ...]:
    """Return the files of all parts, each once, in the order of a manifest."""
    by_path = {entry.path: entry for part in parts for entry in part}
    return tuple(by_path[path] for path in sorted(by_path))


def _existing(store: Store, prefix: str) -> Manifest | None:
    """Return the intact bundle at `prefix`; a damaged one is marked as such."""
    manifest = None
    try:
        manifest = read(store, prefix)
        if manifest is not None:
            check_files(store, manifest)
        return manifest
    except CorruptArtifact as error:
        # A damaged manifest that stays would block the new one, which is created only if there is none.
        record = mark_damaged(store, prefix, error.message, manifest)
        log.error("%s It is marked as damaged: %s", error.message, record)
        return None


def upload(store: Store, source: Path, files: Sequence[FileEntry], target: str) -> None:
    """Copy `files` of the local folder `source` to the folder `target` of the store. Raises CorruptArtifact
    if what a bucket gets differs from an entry.
    """
    folder = store.local_path(target)
    # On one disk the files are linked and need no space.
    if folder is not None and not on_one_disk(source, folder):
        require_free(folder, sum(entry.size for entry in files), store.uri(target))

    def put(entry: FileEntry) -> None:
        store.put_file(source / entry.path, f"{target}/{entry.path}", link=True, sha256=entry.sha256)

    in_parallel(put, files)


# -- manifests --


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, with a checksum over all of it."""
    content = {
        "schema": SCHEMA,
        "folder": manifest.folder,
        "digest": manifest.digest,
        **manifest.body,
        "files": [asdict(entry) for entry in manifest.files],
    }
    # Without a final newline: the loss of the last byte must be detectable, too.
    return json.dumps({**content, "checksum": json_sha256(content)}, indent=1, allow_nan=False).encode()


def read(store: Store, prefix: str) -> Manifest | None:
    """Return the manifest of a bundle; None if there is no bundle.

    Raises CorruptArtifact if it was changed.
    """
    key = f"{prefix}/{MANIFEST}"
    raw = store.read_bytes(key)
    if raw is None:
        return None
    try:
        return parse(prefix, raw, store.uri(key))
    except CorruptArtifact:
        # A second read, because a single bad answer of a server must not mark a bundle as damaged.
        again = store.read_bytes(key)
        if again is None or again == raw:
            raise
        return parse(prefix, again, store.uri(key))


def check_body(manifest: Manifest, shape: type[BaseModel]) -> None:
    """Raise CorruptArtifact, with the name of the entry, unless the body of a manifest has this shape."""
    try:
        # Otherwise pydantic takes the text "8" for a number, and readers of `body` get the text.
        shape.model_validate(manifest.body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part)[:80] for part in first["loc"])
        message = f"The manifest of {manifest.prefix} has a wrong entry {name}: {first['msg']}."
        raise CorruptArtifact(message) from error


def parse(prefix: str, raw: bytes, uri: str) -> Manifest:
    """Return the manifest that `encode` wrote. Raises CorruptArtifact, with its `uri`, for anything else."""
    try:
        content = json.loads(raw)
        checksum = content.pop("checksum")
        # Judged at the end, because another schema has a message of its own.
        intact = checksum == json_sha256(content)
        schema, folder, digest = content.pop("schema"), content.pop("folder"), content.pop("digest")
        if schema != SCHEMA:
            raise CorruptArtifact(f"{uri} has schema {schema!r}; this version reads {SCHEMA}.")
        files = tuple(FileEntry(**entry) for entry in content.pop("files"))
        # The names become paths of a download, and must not lead out of its folder.
        for path in (folder, *(entry.path for entry in files)):
            check_key(path)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InputError) as error:
        raise CorruptArtifact(
            f"{uri} is not a manifest ({type(error).__name__}: {str(error)[:80]})."
        ) from error
    if len({entry.path for entry in files}) < len(files):
        raise CorruptArtifact(f"{uri} lists a file twice.")
    manifest = Manifest(prefix, folder, files, content)
    if not intact or digest != manifest.digest:
        raise CorruptArtifact(f"{uri} does not have its own checksum: it was changed after it was written.")
    return manifest


# -- reading --


def check_files(store: Store, manifest: Manifest) -> None:
    """Raise CorruptArtifact if names or sizes of the stored files differ from the manifest."""
    damage = find_damage(store, manifest)
    if damage:
        raise CorruptArtifact(f"{store.uri(manifest.prefix)} is damaged: {damage}.")


def find_damage(store: Store, manifest: Manifest) -> str:
    """Describe the first stored file that is missing, has another size or is not in the manifest; '' if none.

    Hidden files are ignored: file systems and file managers create them. A file that the listing lacks, or
    has with another size, is asked for by its key.
    """
    sizes = dict(store.sizes(manifest.data))
    for entry in manifest.files:
        key = f"{manifest.data}/{entry.path}"
        size = sizes.pop(key, None)
        if size != entry.size:
            size = store.size(key)
        if size is None:
            return f"{store.uri(key)}, which is missing"
        if size != entry.size:
            return f"{store.uri(key)} ({size} bytes instead of {entry.size})"
    # A file more can change what is loaded: transformers looks for an adapter_config.json in every model
    # folder.
    for key in sorted(sizes):
        if not key.rsplit("/", 1)[-1].startswith(".") and store.exists(key):
            return f"{store.uri(key)}, which is not in the manifest"
    return ""


def verify(folder: Path, manifest: Manifest, needed: Callable[[str], bool] = lambda path: True) -> None:
    """Raise CorruptArtifact, with the file's name, unless `folder` has exactly the manifest's files, bit by
    bit. Files that are not `needed` may be missing, and are not read.
    """
    for path in _foreign_files(folder, manifest):
        raise CorruptArtifact(f"{path} is not in the manifest of {manifest.prefix}.")
    in_parallel(
        lambda entry: _verify_file(folder / entry.path, entry, str(folder / entry.path)),
        [entry for entry in manifest.files if needed(entry.path)],
    )


def _foreign_files(folder: Path, manifest: Manifest) -> Iterator[Path]:
    """Yield the links below `folder`, and the files that are not in the manifest, without hidden files."""
    expected = {entry.path for entry in manifest.files}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_dir() or relative in expected or path.name.startswith(".")):
            yield path


def _verify_file(path: Path, entry: FileEntry, name: str) -> None:
    """Raise CorruptArtifact, with the `name` of the file, unless it has the content of its entry."""
    if not path.is_file():
        raise CorruptArtifact(f"{name} is missing.")
    size = path.stat().st_size
    if size != entry.size:
        raise CorruptArtifact(f"{name} has {size} bytes; its manifest says {entry.size}.")
    if hash_file(path) != entry.sha256:
        raise CorruptArtifact(f"{name} does not have the sha256 of its manifest.")


def fetch(
    store: Store, manifest: Manifest, cache: Path, needed: Callable[[str], bool] = lambda path: True
) -> Path:
    """Return a verified local folder with the bundle's files: that of a local store, else a copy in `cache`.

    Only the files that are `needed` are verified and copied; a copy that lacks some of them is completed.
    Raises CorruptArtifact with the file's name; for a remote store only if a second download fails, too.
    """
    check_files(store, manifest)
    local = store.local_path(manifest.data)
    if local is not None:
        try:
            # A local store has no folder for a bundle without files.
            local.mkdir(parents=True, exist_ok=True)
            verify(local, manifest, needed)
        except OSError as error:  # such as ESTALE: what the file has is not known
            raise StoreError(f"The store could not read {local}: {error}.") from error
        return local
    target = cache / manifest.copy_name
    files = [entry for entry in manifest.files if needed(entry.path)]
    try:
        _complete(store, manifest, target, files)
    except (CorruptArtifact, FileNotFoundError) as error:
        # One transfer may have damaged a file, or another process has deleted the copy in the meantime.
        log.warning("Downloading once more: %s", error)
        _complete(store, manifest, target, files)
    return target


def _complete(store: Store, manifest: Manifest, target: Path, files: Sequence[FileEntry]) -> None:
    """Download `files` that the copy `target` lacks or has with other content.

    Several processes may do this at the same time: a file gets its name when it is verified.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in _foreign_files(target, manifest):
        log.warning("%s is deleted: it is not in the manifest of %s.", path, manifest.prefix)
        path.unlink(missing_ok=True)
    intact = in_parallel(lambda entry: _is_intact(target / entry.path, entry), files)
    lacking = [entry for entry, is_intact in zip(files, intact, strict=True) if not is_intact]
    fetch_files(store, manifest.data, lacking, target)
    for entry in files:
        # Another process may have deleted the copy, with the files that it had before.
        if not (target / entry.path).exists():
            raise CorruptArtifact(f"{target / entry.path} is missing.")


def _is_intact(path: Path, entry: FileEntry) -> bool:
    try:
        _verify_file(path, entry, str(path))
    except CorruptArtifact as error:
        if path.exists():
            log.warning("The cached copy is replaced: %s", error.message)
        return False
    return True


def fetch_files(store: Store, source: str, files: Sequence[FileEntry], folder: Path) -> None:
    """Copy `files` of the folder `source` of the store to the local `folder`, and verify them.

    Raises CorruptArtifact with the name of a file that is missing or has other content.
    """
    require_free(folder, sum(entry.size for entry in files), f"The copy of {store.uri(source)}")

    def fetch_file(entry: FileEntry) -> None:
        key = f"{source}/{entry.path}"
        with replacing(folder / entry.path) as temporary:
            try:
                store.get_file(key, temporary, entry.size)
            except FileNotFoundError as error:
                raise CorruptArtifact(f"{store.uri(key)} is missing.") from error
            _verify_file(temporary, entry, store.uri(key))

    in_parallel(fetch_file, files)


# -- damage and deletion --


def mark_damaged(store: Store, prefix: str, reason: str, damaged: Manifest | None = None) -> str:
    """Rename the manifest of a bundle to `damaged-*.json`, with the reason, and return that file's address.

    The bundle does not exist any more, and its files stay. `damaged` is the manifest that was found damaged,
    if it was readable: a bundle that another writer has committed in the meantime is not changed.
    """
    raw = store.read_bytes(f"{prefix}/{MANIFEST}") or b""
    if damaged is not None:
        folder = _folder_named(raw)
        if folder not in (None, damaged.folder):
            return f"already, {folder} is in its place"
    name = f"{prefix}/{DAMAGED}{hashlib.sha256(raw).hexdigest()[:12]}.json"
    record = {"reason": reason, "manifest": raw.decode("utf-8", errors="replace")}
    # The record first, under a name that follows from the content: after a kill in between, the manifest is
    # still there, and the next reader writes the same record.
    store.put_if_absent(name, json.dumps(record, indent=1).encode())
    store.delete([f"{prefix}/{MANIFEST}"])
    return store.uri(name)


def remove(store: Store, prefix: str, *, keep: str = "") -> None:
    """Delete a bundle with all leftovers, or only the leftovers next to its folder `keep`.

    Nothing but the manifest is deleted next to a bundle that was marked as damaged: a person may restore it.
    The manifest is deleted first, so that a partly deleted bundle is a leftover and not a damaged bundle.
    """
    names = {key.removeprefix(f"{prefix}/").split("/")[0] for key in store.list(prefix)}
    if not keep:
        store.delete([f"{prefix}/{MANIFEST}"])
    if any(name.startswith(DAMAGED) for name in names):
        return
    if not keep:
        store.delete_prefix(prefix)
        return
    for name in names - {keep, MANIFEST}:
        store.delete_prefix(f"{prefix}/{name}")


def _folder_named(raw: bytes | str) -> str | None:
    """Return the folder in a manifest that may be damaged; None if it cannot be read."""
    try:
        return str(json.loads(raw)["folder"])
    except (ValueError, KeyError, TypeError):
        return None


# -- disk space --


def require_free(folder: Path, size: int, what: str) -> None:
    """Raise StoreError, with both numbers, unless the disk of `folder` has `size` free bytes.

    `folder` need not exist yet. `what` is the beginning of the message, such as "The checkpoint of step 8".
    """
    existing = existing_parent(folder)
    free = machine().disk(existing).free
    if free < size:
        raise StoreError(
            f"{what} needs {readable_size(size)}, but {existing} has {readable_size(free)} free; free some"
            " space there and type the same command again. What was saved before is untouched."
        )


def bytes_below(folder: Path) -> int:
    """Return the size of all files below `folder`. Other processes may delete files at the same time."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(parent, name).stat().st_size
    return size


def on_one_disk(one: Path, other: Path) -> bool:
    """Return whether a file of one folder can be linked into the other. The folders need not exist yet."""
    # Two mounts of one disk have the same number and refuse links. `LocalFiles.put_file` then copies, and a
    # full disk is its error.
    return existing_parent(one).stat().st_dev == existing_parent(other).stat().st_dev


def readable_size(size: int) -> str:
    """Return a number of bytes in human-readable units."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
