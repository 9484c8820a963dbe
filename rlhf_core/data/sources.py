"""Reads rows from files, folders, `s3://` and the Hugging Face hub, and computes digests of the sources.

A malformed row is returned as `BadRow` with its line and reason. A file that is unusable as a whole raises
one DataError. Byte-order marks, CRLF and blank lines are accepted.

The key of a stage contains the digest of each source. `Contents` has the digest of every file of a source.
`read_rows` compares each file that it opens with its digest. A file that grows or is replaced in the meantime
causes an error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, TypeVar, cast

from rlhf_core.config.address import (
    BASE_STAGES,
    Address,
    AddressKind,
    base_of,
    is_hub_model,
    is_reference,
    parse_address,
    s3_problem,
)
from rlhf_core.config.data import SETS, Source
from rlhf_core.config.pipeline import PipelineConfig, StoreConfig
from rlhf_core.data.files import BadRow, Row, files_of_split, is_data_file, list_files, read_file
from rlhf_core.data.hub import resolve_revision
from rlhf_core.data.synthetic import VERSION as SYNTHETIC_VERSION
from rlhf_core.data.templates import read_chat_template
from rlhf_core.errors import DataError, ModelError, StoreError, StoreUnavailable
from rlhf_core.storage.bundles import FileDigests
from rlhf_core.storage.s3 import S3_LIMITS, filesystem, run_bounded, s3_endpoint, with_retries
from rlhf_core.system.files import open_regular
from rlhf_core.system.home import Home

_CHUNK = 2**20
_CHANGED = (
    "was changed after {}: its content no longer matches the stage's key; nothing was stored; run again when"
    " no other process writes to it, or use a copy"
)
_AWS = StoreConfig()
_T = TypeVar("_T")
_AnySource = TypeVar("_AnySource", bound=Source)


def address_of(source: Source) -> Address:
    """Return the address of a source: its `path`, and the folder `subset` in it unless it is on the hub."""
    address = parse_address(source.path)
    if source.subset is None or address.kind not in ("local", "s3"):
        return address
    return parse_address(f"{source.path.rstrip('/')}/{source.subset}")


def short_name(source: Source) -> str:
    """Return a short name of a source, for `PairExample.source`, the data card and metrics."""
    address = address_of(source)
    if address.kind in ("synthetic", "hub"):
        return source.path if source.subset is None else f"{source.path}/{source.subset}"
    name = address.text.rstrip("/").rsplit("/", 1)[-1]
    if address.kind == "local" and name in ("", ".", ".."):
        return address.path.resolve().name or "/"
    return name


@dataclass(frozen=True)
class Contents:
    """Digests of a source at one point in time."""

    digest: str
    """sha256 over names and contents of the source's files. For a hub data set: id, commit and split."""
    files: Mapping[str, str] = field(default_factory=dict)
    """sha256 of each local file or object by its address, in reading order. Empty for other kinds of sources.
    """


def read_rows(
    source: Source, store: StoreConfig = _AWS, contents: Contents | None = None
) -> Generator[Row | BadRow]:
    """Yield every row of `source` in order, at most `source.limit`. `only_split` is applied.

    `store` has the settings for buckets, including the time for which failures are retried. `contents` are
    the expected contents of the files; with None, they are not checked. Raises DataError if a file is
    missing, unusable or changed, and StoreUnavailable if a bucket does not answer.
    """
    kind = address_of(source).kind
    if kind == "synthetic":
        raise ValueError("the synthetic task is generated, not read: see rlhf_core.data.synthetic.generate")

    def is_kept(row: Row | BadRow) -> bool:
        return isinstance(row, BadRow) or not source.only_split or row.data.get("split") == source.split

    rows = _read_hub(source) if kind == "hub" else _read_files(source, kind, store, contents)
    with closing(rows):  # also if `limit` ends the reading, so that a changed file is still detected
        yield from islice(filter(is_kept, rows), source.limit)


def source_contents(config: PipelineConfig) -> dict[str, Contents]:
    """Return the contents of each data source by its field, such as `data.sft[0]`. Missing files raise
    DataError.
    """
    return {name: _contents(source, config.store) for name, source in _data_sources(config).items()}


def regression_contents(config: PipelineConfig) -> dict[str, Contents]:
    """Return the contents of the sources of `evaluate.regression`, like `source_contents`."""
    return {name: _contents(source, config.store) for name, source in _regression_sources(config).items()}


def _data_sources(config: PipelineConfig) -> dict[str, Source]:
    return {f"data.{name}[{index}]": source for name, index, source in config.data.sources()}


def _regression_sources(config: PipelineConfig) -> dict[str, Source]:
    return {f"evaluate.regression[{index}]": each for index, each in enumerate(config.evaluate.regression)}


def source_digests(config: PipelineConfig) -> dict[str, str]:
    """Return the sha256 of the sources of data and regression sets, the chat template and the base model by
    name, for stage keys.

    Hub sources are named by id, commit and split. Missing files raise DataError or ModelError.
    """
    contents = source_contents(config) | regression_contents(config)
    return {name: source.digest for name, source in contents.items()} | model_digests(config)


def source_marks(config: PipelineConfig) -> dict[str, str]:
    """Return a mark of each source, the chat template and the base model, without reading their files.

    Equal marks mean that nothing was written in between: names, sizes and times of files, ETags of objects,
    commits of hub names. References have none (`rlhf_core.run.references.reference_marks`).
    """
    marks = template_digests(config)
    for name, source in (_data_sources(config) | _regression_sources(config)).items():
        if not is_reference(source.path):
            marks[name] = _mark(source, config.store)
    if config.model.path is not None and not is_reference(config.model.path):
        marks["model"] = model_mark(config.model.path, config.model.revision)
    return marks


def _mark(source: Source, store: StoreConfig) -> str:
    kind = address_of(source).kind
    if kind in ("synthetic", "hub"):
        return _contents(source, store).digest
    marks = []
    if kind == "s3":
        for file, found in _objects(source, store).items():
            marks.append(f"{file} {found.get('ETag')} {found.get('size')}")
        return "\n".join(marks)
    for file in _list_files(source, kind, store):
        state = Path(file).stat()
        # The inode as well: a file that replaces another one by a rename can have its size and its time.
        marks.append(f"{file} {state.st_ino} {state.st_size} {state.st_mtime_ns}")
    return "\n".join(marks)


def count_rows(config: PipelineConfig) -> int:
    """Return the number of rows of all data sources, also of those that cannot be used."""
    rows = 0
    for source in _data_sources(config).values():
        if address_of(source).kind != "synthetic":
            rows += sum(1 for _ in read_rows(source, config.store))
    return rows


def model_digests(config: PipelineConfig) -> dict[str, str]:
    """Return the digests of the chat template and the base model, if they are configured."""
    digests = template_digests(config)
    if config.model.path is not None:
        digests["model"] = model_digest(config.model.path, config.model.revision, config.run.home)
    return digests


def template_digests(config: PipelineConfig) -> dict[str, str]:
    """Return the digest of the chat template, if it is configured."""
    if config.data.chat_template is None:
        return {}
    return {"data.chat_template": hashlib.sha256(read_chat_template(config.data.chat_template)).hexdigest()}


def require_unchanged(now: Mapping[str, str], before: Mapping[str, str], config: PipelineConfig) -> None:
    """Raise DataError for each source, template or model whose digest differs from `before`.

    Names that are not in `before` are not compared.
    """
    paths = {"data.chat_template": config.data.chat_template}
    for stage in BASE_STAGES:
        if (base := base_of(config, stage)) is not None:
            paths[base.digest_name] = base.path
    for name, source in (_data_sources(config) | _regression_sources(config)).items():
        paths[name] = source.path
    changed = [name for name, digest in now.items() if before.get(name, digest) != digest]
    if changed:
        raise DataError(
            "\n".join(f"{name}: {paths[name]} {_CHANGED.format('the run began')}" for name in changed)
        )


def pinned(config: PipelineConfig) -> PipelineConfig:
    """Return `config` with the present commits of hub names, so that the data that is read later has the same
    digests.
    """

    def commit_of(source: _AnySource) -> _AnySource:
        if address_of(source).kind != "hub":
            return source
        return source.model_copy(
            update={"revision": resolve_revision(source.path, "dataset", source.revision)}
        )

    data: dict[str, Any] = {name: tuple(map(commit_of, getattr(config.data, name))) for name in SETS}
    regression = {"regression": tuple(map(commit_of, config.evaluate.regression))}
    commits = {}
    for stage in BASE_STAGES:
        base = base_of(config, stage)
        if base is not None and base.is_hub:
            commits[base.revision_field] = resolve_revision(base.path, "model", base.revision)
    return config.with_values(commits).model_copy(
        update={
            "data": config.data.model_copy(update=data),
            "evaluate": config.evaluate.model_copy(update=regression),
        }
    )


def _contents(source: Source, store: StoreConfig) -> Contents:
    kind = address_of(source).kind
    if kind == "synthetic":
        return Contents(f"synthetic@{SYNTHETIC_VERSION}")
    if kind == "hub":
        commit = resolve_revision(source.path, "dataset", source.revision)
        subset = "" if source.subset is None else f":{source.subset}"
        return Contents(f"hub:{source.path}@{commit}:{source.split}{subset}")
    files = {file: _stream_digest(_open(file, kind, store)) for file in _list_files(source, kind, store)}
    # Names relative to the source, so that a copy elsewhere, and another spelling of the path (`./a`, `a//b`,
    # file://), have the same digest. Local files are named by such a normal path.
    root = address_of(source).text if kind == "s3" else str(address_of(source).path)
    parts = [f"{_relative(file, root)}\x1f{digest}" for file, digest in files.items()]
    return Contents(hashlib.sha256("\x1e".join(parts).encode()).hexdigest(), files)


def model_mark(path: str, revision: str | None) -> str:
    """Return id and commit of a hub model, or name, inode, size and modification time of each file of a
    model's folder. No file is read.
    """
    if is_hub_model(path):
        return model_digest(path, revision)
    folder = Path(path)
    states = ((file.relative_to(folder).as_posix(), file.stat()) for file in _model_files(folder))
    return str(tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in states))


def model_digest(path: str, revision: str | None, home: str | None = None) -> str:
    """Return the sha256 over the files of a model's folder, or id and commit of a hub model. `home` is
    `run.home`, which keeps the digests of files.

    Raises ModelError if there is no such folder.
    """
    if is_hub_model(path):
        return f"hub:{path}@{resolve_revision(path, 'model', revision)}"
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(
            f"model path not found: {path}; give an existing folder or a Hugging Face id (owner/name)"
        )
    files, parts = _model_files(folder), []
    # Kept by inode, size and time: a model of hundreds of gigabytes would be read at each start.
    known = FileDigests(Home.of(home).digests if home is not None else None)
    for file, digest in zip(files, known.of_files(files), strict=True):
        parts.append(f"{file.relative_to(folder).as_posix()}\x1f{digest}")
    return hashlib.sha256("\x1e".join(parts).encode()).hexdigest()


def _model_files(folder: Path) -> list[Path]:
    files = []
    for file in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        # Without hidden files: the client of the hub keeps times of its downloads in `.cache` of the folder.
        if file.is_file() and not is_hidden:
            files.append(file)
    return sorted(files)


def _relative(file: str, root: str) -> str:
    return file.removeprefix(root.rstrip("/")).lstrip("/") if file != root else ""


def _stream_digest(stream: IO[bytes]) -> str:
    with stream:
        return _digest_from_start(stream)


def _digest_from_start(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    stream.seek(0)
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
    stream.seek(0)
    return digest.hexdigest()


# -- files --


def _list_files(source: Source, kind: AddressKind, store: StoreConfig) -> list[str]:
    """Return the file or object itself, or the supported files of the split under a folder, sorted."""
    if kind == "s3":
        return list(_objects(source, store))
    return list(map(str, list_files(address_of(source), source.split)))


@lru_cache(maxsize=4)
def _buckets(endpoint: str | None) -> Any:
    return filesystem(endpoint)


def _bucket(store: StoreConfig) -> Any:
    return _buckets(s3_endpoint(store.endpoint))


def _objects(
    source: Source, store: StoreConfig, least_seconds: float = S3_LIMITS.least_seconds
) -> dict[str, Mapping[str, Any]]:
    """Return the listing's entry of the object, or of the data files of the split below it, by address and
    sorted.
    """
    path = address_of(source).text
    if problem := s3_problem(path):
        raise DataError(f"a data source {problem}")

    async def find() -> dict[str, Mapping[str, Any]]:
        bucket = _bucket(store)
        # The coroutines behind the public methods of s3fs, because `run_bounded` can cancel a coroutine.
        if await bucket._isfile(path):
            return {path: await bucket._info(path)}
        found = await bucket._find(path.rstrip("/") + "/", detail=True)
        below = {f"s3://{file}": entry for file, entry in sorted(found.items())}
        return {file: entry for file, entry in below.items() if is_data_file(_relative(file, path))}

    files = _request(
        f"cannot list {path}",
        store,
        lambda: run_bounded(_bucket(store), store.retry_seconds, find, least_seconds=least_seconds),
    )
    if not files:
        raise DataError(f"file not found: {path}; there is no such object, and no data file below it")
    names = {_relative(file, path): file for file in files}
    if "" in names:
        return files
    try:
        return {names[name]: files[names[name]] for name in files_of_split(list(names), source.split)}
    except DataError as error:
        raise DataError(f"{path}: {error.message}") from error


def _open(file: str, kind: AddressKind, store: StoreConfig) -> IO[bytes]:
    if kind == "s3":
        return _request(f"cannot read {file}", store, lambda: _download(file, store))
    try:
        return open_regular(file)
    except OSError as error:
        raise DataError(
            f"cannot read {file}: {error.strerror or error}; check that it exists and may be read"
        ) from error


def _request(what: str, store: StoreConfig, call: Callable[[], _T]) -> _T:
    """Return the result of `call`, a request to a bucket, with retries.

    Raises StoreUnavailable for a failure that may pass, and DataError for others.
    """
    try:
        return with_retries(what, store.retry_seconds, call)
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{error.message}; correct its address, or wait until it answers") from error
    except (StoreError, FileNotFoundError) as error:
        words = error.message if isinstance(error, StoreError) else f"{what}: {error}"
        raise DataError(f"{words}; check bucket, endpoint and credentials") from error


def _download(file: str, store: StoreConfig) -> IO[bytes]:
    """Download an object to a temporary file.

    Reading parquet from the bucket would need range requests, which not every S3-compatible server supports.
    """
    with ExitStack() as opened:
        copy = opened.enter_context(NamedTemporaryFile())
        _bucket(store).get_file(file, copy.name)
        opened.pop_all()  # the caller closes it, which deletes it
    return cast("IO[bytes]", copy)


def _read_files(
    source: Source, kind: AddressKind, store: StoreConfig, contents: Contents | None
) -> Generator[Row | BadRow]:
    """Yield the rows of each file. The file must not change while it is read, and must match `contents` if it
    is given.
    """
    digests = contents.files if contents is not None else dict.fromkeys(_list_files(source, kind, store))
    for file, expected in digests.items():
        with _open(file, kind, store) as stream, _unwritten(file, stream):
            # Of the open stream: the name can lead to another file by now.
            if expected is not None and _digest_from_start(stream) != expected:
                raise DataError(f"{file} {_CHANGED.format('its digest was taken')}")
            yield from read_file(file, stream)


@contextmanager
def _unwritten(file: str, stream: IO[bytes]) -> Generator[None]:
    """Raise DataError if the open file was modified in the meantime, also after another exception."""
    descriptor = os.dup(stream.fileno())  # the parsers close the stream
    try:
        before = os.fstat(descriptor)
        try:
            yield
        finally:
            # Also in place of an error of the parser: a file that is being written often ends within a row,
            # and then the writer is the reason and not the row.
            after = os.fstat(descriptor)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise DataError(f"{file} {_CHANGED.format('reading it began')}")
    finally:
        os.close(descriptor)


def _read_hub(source: Source) -> Generator[Row | BadRow]:
    import datasets

    try:
        data = datasets.load_dataset(source.path, source.subset, split=source.split, revision=source.revision)
    except Exception as error:  # the hub client and the file readers below it raise many unrelated types
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"the Hugging Face dataset {source.path} (split {source.split}) cannot be loaded: {reason}; "
            "check the id, the split and the network, or give a file with a leading ./"
        ) from error
    for index, row in enumerate(data, start=1):
        yield Row(source.path, index, row)
