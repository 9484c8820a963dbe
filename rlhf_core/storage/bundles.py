"""A bundle: a set of files in the store that exists whole or not at all. Artifacts and checkpoints are
bundles.

    {prefix}/manifest.json          written last, create-only: names the folder, and size and sha256 of every file
    {prefix}/{folder}/...           the files; each attempt has a folder of its own, so that a writer wrongly thought
                                    dead cannot change a byte of what its successor has committed
    {prefix}/damaged-*.json         the manifest of a bundle that was found damaged, with the reason

What has no manifest is a leftover and does not exist for readers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.errors import CorruptArtifact, InputError, StoreError
from rlhf_core.storage.space import on_one_disk, require_free
from rlhf_core.storage.store import Store, check_key
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.files import TEMPORARY

log = logging.getLogger(__name__)

SCHEMA = 1
MANIFEST = "manifest.json"
_DAMAGED = "damaged-"


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
    """What a bundle holds."""

    prefix: str
    """Key of the bundle."""
    folder: str
    """Name of the folder with the files, below `prefix`."""
    files: tuple[FileEntry, ...]
    body: Mapping[str, Any]
    """The rest: what kind of bundle it is, where it comes from."""

    @property
    def data(self) -> str:
        """Key of the folder with the files."""
        return f"{self.prefix}/{self.folder}"

    @property
    def digest(self) -> str:
        """sha256 over names, sizes and hashes of the files: the same content has the same digest, whenever
        made.
        """
        return digest_of(self.files)


def digest_of(files: Sequence[FileEntry]) -> str:
    """`Manifest.digest` of these files."""
    return checksum_of([asdict(entry) for entry in files])


def hash_file(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_folder(folder: Path, *, skip: Callable[[str], bool] = lambda path: False) -> tuple[FileEntry, ...]:
    """Every file below `folder`, sorted by path. Raises InputError for links and names that cannot be stored."""
    entries = []
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            relative = check_key(path.relative_to(folder).as_posix())
            if path.is_symlink():
                raise InputError(
                    f"{path} is a symbolic link; only plain files can be stored: copy what it points to."
                )
            if name in folders or skip(relative):
                continue
            entries.append(FileEntry(relative, path.stat().st_size, hash_file(path)))
    return tuple(sorted(entries, key=lambda entry: entry.path))


def commit(
    store: Store,
    prefix: str,
    source: Path,
    files: Sequence[FileEntry],
    *,
    folder: str,
    body: Mapping[str, Any],
    may_commit: Callable[[], None],
) -> Manifest | None:
    """Store `files` of the local folder `source` as the bundle `prefix`; None if somebody else's manifest is
    there.

    `folder` must be a name that no other bundle here uses. `may_commit` is called last before the manifest
    and raises if the bundle must not appear. Shares disk blocks with `source` where it can: nobody may write
    to these files any more. Raises StoreError if the store fails or its disk is too small; nothing is visible
    then.
    """
    manifest = Manifest(prefix, folder, tuple(files), body)
    if (there := _in_the_way(store, prefix)) is not None:
        return there if there.folder == folder else None
    try:
        lost = _upload(store, source, manifest)
        if not lost:
            may_commit()
    except FileNotFoundError as error:
        lost = str(error)
    except BaseException:
        _drop(store, manifest)
        raise
    if lost:
        _drop(store, manifest)
        # Whoever commits first clears what lies beside it, also the files of a later attempt that is still at
        # it.
        if _in_the_way(store, prefix) is not None:
            return None
        raise StoreError(f"The store did not keep {lost}; the same command tries again.")
    failpoint("bundle.uploaded")
    if store.put_if_absent(f"{prefix}/{MANIFEST}", encode(manifest)):
        failpoint("bundle.committed")
        return manifest
    if (there := _in_the_way(store, prefix)) is not None and there.folder == folder:
        return there
    store.delete_prefix(manifest.data)
    return None


def _in_the_way(store: Store, prefix: str) -> Manifest | None:
    """The bundle that is there already; a damaged one is set aside."""
    manifest = None
    try:
        manifest = read(store, prefix)
        if manifest is not None and (wrong := wrong_files(store, manifest)):
            raise CorruptArtifact(f"{store.uri(prefix)} is damaged: {wrong}.")
        return manifest
    except CorruptArtifact as error:
        log.error("%s It is set aside: %s", error.message, quarantine(store, prefix, error.message, manifest))
        return None


def _upload(store: Store, source: Path, manifest: Manifest) -> str:
    """What the store did not keep (`wrong_files`); '' if all is there."""
    place = store.local_path(manifest.data)
    if place is not None and not on_one_disk(source, place):
        require_free(place, sum(entry.size for entry in manifest.files), f"{store.uri(manifest.prefix)}")
    for entry in manifest.files:
        store.put_file(source / entry.path, f"{manifest.data}/{entry.path}", link=True)
    return wrong_files(store, manifest)


def _drop(store: Store, manifest: Manifest) -> None:
    """Free the disk of what was not committed; in a bucket it goes with the next clean-up."""
    if (place := store.local_path(manifest.data)) is not None:
        shutil.rmtree(place, ignore_errors=True)


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, with a checksum over all of it."""
    content = {
        "schema": SCHEMA,
        "folder": manifest.folder,
        "digest": manifest.digest,
        **manifest.body,
        "files": [asdict(entry) for entry in manifest.files],
    }
    # Without a line's end: every byte counts, so that every cut is noticed.
    return json.dumps({**content, "checksum": checksum_of(content)}, indent=1, allow_nan=False).encode()


def read(store: Store, prefix: str) -> Manifest | None:
    """The manifest of a bundle, None if there is no such bundle. Raises CorruptArtifact if it is not as it
    was written.
    """
    key = f"{prefix}/{MANIFEST}"
    raw = store.read_bytes(key)
    if raw is None:
        return None
    try:
        return parse(prefix, raw, store.uri(key))
    except CorruptArtifact:
        # One bad answer must not condemn a bundle.
        again = store.read_bytes(key)
        if again is None or again == raw:
            raise
        return parse(prefix, again, store.uri(key))


def parse(prefix: str, raw: bytes, where: str) -> Manifest:
    """The manifest that `encode` wrote. Raises CorruptArtifact, with `where` it lies, for anything else."""
    try:
        content = json.loads(raw)
        checksum = content.pop("checksum")
        intact = checksum == checksum_of(content)
        schema, folder, digest = content.pop("schema"), content.pop("folder"), content.pop("digest")
        if schema != SCHEMA:
            raise CorruptArtifact(f"{where} has schema {schema!r}; this version reads {SCHEMA}.")
        files = tuple(FileEntry(**entry) for entry in content.pop("files"))
        for path in (folder, *(entry.path for entry in files)):
            check_key(path)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InputError) as error:
        raise CorruptArtifact(
            f"{where} is not a manifest ({type(error).__name__}: {str(error)[:80]})."
        ) from error
    if len({entry.path for entry in files}) < len(files):
        raise CorruptArtifact(f"{where} lists a file twice.")
    manifest = Manifest(prefix, folder, files, content)
    if not intact or digest != manifest.digest:
        raise CorruptArtifact(f"{where} does not have its own checksum: it was changed after it was written.")
    return manifest


def wrong_files(store: Store, manifest: Manifest) -> str:
    """The first file in the store that is missing, of another size or not in the manifest, described; '' if
    there is none. Hidden files do not count: file systems and file managers leave them.
    """
    sizes = dict(store.sizes(manifest.data))
    for entry in manifest.files:
        size = sizes.pop(f"{manifest.data}/{entry.path}", None)
        if size is None:
            return f"{store.uri(manifest.data)}/{entry.path}, which is missing"
        if size != entry.size:
            return f"{store.uri(manifest.data)}/{entry.path} ({size} bytes instead of {entry.size})"
    for key in sorted(sizes):
        if not key.rsplit("/", 1)[-1].startswith("."):
            return f"{store.uri(key)}, which is not in the manifest"
    return ""


def verify(folder: Path, manifest: Manifest) -> None:
    """Raises CorruptArtifact, naming the file, unless `folder` holds exactly the manifest's files, bit by
    bit.
    """
    expected = {entry.path: entry for entry in manifest.files}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_dir() or relative in expected or path.name.startswith(".")):
            raise CorruptArtifact(f"{path} is not in the manifest of {manifest.prefix}.")
    for entry in manifest.files:
        path = folder / entry.path
        if not path.is_file():
            raise CorruptArtifact(f"{path} is missing.")
        if (size := path.stat().st_size) != entry.size:
            raise CorruptArtifact(f"{path} has {size} bytes; its manifest says {entry.size}.")
        if hash_file(path) != entry.sha256:
            raise CorruptArtifact(f"{path} does not have the sha256 of its manifest.")


def fetch(store: Store, manifest: Manifest, cache: Path) -> Path:
    """A verified local folder with the bundle's files: the store's own if it is local, else a copy in
    `cache`.

    Raises CorruptArtifact naming the file; for a remote store only after a second download gave the same.
    """
    if wrong := wrong_files(store, manifest):
        raise CorruptArtifact(f"{store.uri(manifest.prefix)} is damaged: {wrong}.")
    if (local := store.local_path(manifest.data)) is not None:
        local.mkdir(parents=True, exist_ok=True)
        verify(local, manifest)
        return local
    target = cache / f"{manifest.prefix.replace('/', '-')}-{manifest.digest[:12]}"
    if target.exists():
        try:
            verify(target, manifest)
            return target
        except CorruptArtifact as error:
            log.warning("The cached copy is thrown away: %s", error.message)
            shutil.rmtree(target)
    try:
        return _download(store, manifest, target)
    except CorruptArtifact as error:
        log.warning("Downloading once more: %s", error.message)
        return _download(store, manifest, target)


def _download(store: Store, manifest: Manifest, target: Path) -> Path:
    require_free(
        target.parent,
        sum(entry.size for entry in manifest.files),
        f"The copy of {store.uri(manifest.prefix)}",
    )
    temporary = target.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
    temporary.mkdir(parents=True)
    try:
        for entry in manifest.files:
            try:
                store.get_file(f"{manifest.data}/{entry.path}", temporary / entry.path, entry.size)
            except FileNotFoundError as error:
                raise CorruptArtifact(f"{store.uri(manifest.data)}/{entry.path} is missing.") from error
        try:
            verify(temporary, manifest)
        except CorruptArtifact as error:
            message = error.message.replace(str(temporary), store.uri(manifest.data))
            raise CorruptArtifact(message) from error
        try:
            temporary.rename(target)
        except OSError:
            # Another process was faster; its copy is as good as ours if it verifies.
            verify(target, manifest)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def quarantine(store: Store, prefix: str, reason: str, judged: Manifest | None = None) -> str:
    """Set a damaged bundle aside: its manifest becomes `damaged-*.json`, its files stay. Returns that file's
    address.

    `judged`: what was found damaged, where it could be read: another one, put in its place meanwhile, is left
    alone.
    """
    raw = store.read_bytes(f"{prefix}/{MANIFEST}") or b""
    if judged is not None and (there := _folder_named(raw)) not in (None, judged.folder):
        return f"already, {there} is in its place"
    name = f"{prefix}/{_DAMAGED}{hashlib.sha256(raw).hexdigest()[:12]}.json"
    record = {"reason": reason, "manifest": raw.decode("utf-8", errors="replace")}
    store.put_if_absent(name, json.dumps(record, indent=1).encode())
    store.delete([f"{prefix}/{MANIFEST}"])
    return store.uri(name)


def _folder_named(raw: bytes) -> str | None:
    """The folder of a manifest, as far as it can be read."""
    try:
        return str(json.loads(raw)["folder"])
    except (ValueError, KeyError, TypeError):
        return None


def remove(store: Store, prefix: str, *, keep: str = "") -> None:
    """Delete a bundle with all leftovers, or only the leftovers beside its folder `keep`. What was set aside
    stays.

    The manifest goes first: half deleted, a bundle is a leftover and not damaged.
    """
    keys = [key.removeprefix(f"{prefix}/") for key in store.list(prefix)]
    kept = {keep, *(_folder_of_damaged(store, f"{prefix}/{key}") for key in keys if key.startswith(_DAMAGED))}
    if not keep:
        store.delete([f"{prefix}/{MANIFEST}"])
    if kept == {""}:
        store.delete_prefix(prefix)
    if None in kept:
        return
    for folder in {key.split("/")[0] for key in keys if "/" in key} - kept:
        store.delete_prefix(f"{prefix}/{folder}")


def _folder_of_damaged(store: Store, key: str) -> str | None:
    """The folder that a set-aside manifest names; None if that cannot be told: then nothing may be deleted."""
    try:
        folder: str = json.loads(json.loads(store.read_bytes(key) or b"")["manifest"])["folder"]
    except (ValueError, KeyError, TypeError):
        return None
    return folder


def checksum_of(content: Any) -> str:
    """sha256 of JSON content, however it is written. Raises ValueError for numbers that are not finite."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
