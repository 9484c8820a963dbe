"""Reading rows from files, folders, `s3://` and the Hugging Face hub, and digests of what was read.

A malformed row comes out as `BadRow` with its line and reason; a file that is unusable as a whole raises one
DataError. Byte-order marks, CRLF and blank lines are accepted.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, Literal, TypeVar, cast

from rlhf_core.config.checkdata import suffix_of
from rlhf_core.config.checkfiles import DATA_SUFFIXES
from rlhf_core.config.data import Source
from rlhf_core.config.pipeline import PipelineConfig, StoreConfig
from rlhf_core.data.files import BadRow, Row, numbered, read_file
from rlhf_core.data.hub import resolve_revision
from rlhf_core.data.synthetic import VERSION as SYNTHETIC_VERSION
from rlhf_core.data.tokenizer import is_local_model
from rlhf_core.errors import DataError, ModelError, StoreError, StoreUnavailable
from rlhf_core.storage.s3 import filesystem, patiently

_CHUNK = 2**20
_AWS = StoreConfig()
_T = TypeVar("_T")

Kind = Literal["synthetic", "local", "s3", "hub"]


def kind_of(path: str) -> Kind:
    """What `path` names. A missing local path is `local`, not a hub id: by its prefix, its suffix or its shape."""
    if path == "synthetic":
        return "synthetic"
    if path.startswith("s3://"):
        return "s3"
    if (
        path.startswith(("/", "./", "../", "~", "file://"))
        or path.lower().endswith(DATA_SUFFIXES)
        or Path(path).exists()
    ):
        return "local"
    is_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path) is not None
    return "hub" if is_id else "local"


def source_name(source: Source) -> str:
    """Short name of a source, for `PairExample.source` and the data card."""
    return source.path if kind_of(source.path) in ("synthetic", "hub") else source.path.rstrip("/").rsplit("/", 1)[-1]


def read_rows(source: Source, store: StoreConfig = _AWS) -> Iterator[Row | BadRow]:
    """Every row of `source` in order, at most `source.limit`; `only_split` is applied.

    `store`: the server of buckets, and for how long its failures are sat out. Raises DataError where a whole file is
    missing or unusable, StoreUnavailable where a bucket does not answer.
    """
    kind = kind_of(source.path)
    if kind == "synthetic":
        raise ValueError("the synthetic task is generated, not read: see rlhf_core.data.synthetic.generate")
    rows = _read_hub(source) if kind == "hub" else _read_files(source.path, kind, store)
    kept = (
        row for row in rows if isinstance(row, BadRow) or not source.only_split or row.data.get("split") == source.split
    )
    yield from islice(kept, source.limit)


def source_digests(config: PipelineConfig) -> dict[str, str]:
    """sha256 of the data sources, the chat template and the base model, by name: for the keys of what reads them.

    Hub sources are named by id, commit and split. Missing files raise DataError or ModelError.
    """
    digests: dict[str, str] = {}
    for name in ("sft", "preference", "prompts"):
        sources: tuple[Source, ...] = getattr(config.data, name)
        for index, source in enumerate(sources):
            digests[f"data.{name}[{index}]"] = _source_digest(source, config.store)
    if config.data.chat_template is not None:
        path = Path(config.data.chat_template)
        if not path.is_file():
            raise ModelError(f"data.chat_template: file not found: {path}; give a Jinja file")
        digests["data.chat_template"] = _stream_digest(path.open("rb"))
    if config.model.path is not None:
        digests["model"] = _model_digest(config.model.path, config.model.revision)
    return digests


def pinned(config: PipelineConfig) -> PipelineConfig:
    """`config` with the commits that hub names mean now: what is read later is what the digests were made from."""

    def commit_of(source: Source) -> Source:
        if kind_of(source.path) != "hub":
            return source
        return source.model_copy(update={"revision": resolve_revision(source.path, "dataset", source.revision)})

    data = {name: tuple(map(commit_of, getattr(config.data, name))) for name in ("sft", "preference", "prompts")}
    model = {}
    if config.model.path is not None and not is_local_model(config.model.path):
        model = {"revision": resolve_revision(config.model.path, "model", config.model.revision)}
    return config.model_copy(
        update={"data": config.data.model_copy(update=data), "model": config.model.model_copy(update=model)}
    )


def _source_digest(source: Source, store: StoreConfig) -> str:
    kind = kind_of(source.path)
    if kind == "synthetic":
        return f"synthetic@{SYNTHETIC_VERSION}"
    if kind == "hub":
        return f"hub:{source.path}@{resolve_revision(source.path, 'dataset', source.revision)}:{source.split}"
    parts = [
        f"{_relative(file, source.path)}\x1f{_stream_digest(_open(file, kind, store))}"
        for file in _list_files(source.path, kind, store)
    ]
    return hashlib.sha256("\x1e".join(parts).encode()).hexdigest()


def _model_digest(path: str, revision: str | None) -> str:
    if not is_local_model(path):
        return f"hub:{path}@{resolve_revision(path, 'model', revision)}"
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"model path not found: {path}; give an existing folder or a Hugging Face id (owner/name)")
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(folder).parts)
    )
    parts = [f"{file.relative_to(folder).as_posix()}\x1f{_stream_digest(file.open('rb'))}" for file in files]
    return hashlib.sha256("\x1e".join(parts).encode()).hexdigest()


def _relative(file: str, root: str) -> str:
    return file.removeprefix(root.rstrip("/")).lstrip("/") if file != root else ""


def _stream_digest(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    with stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# -- files ------------------------------------------------------------------------------------------------------


def _list_files(path: str, kind: Kind, store: StoreConfig) -> list[str]:
    """The file itself, or all supported files under a folder, sorted."""
    if kind == "s3":
        return _list_s3(path, store)
    place = Path(path.removeprefix("file://"))
    if place.is_file():
        return [str(place)]
    if not place.is_dir():
        raise DataError(
            f"file not found: {path}; give an existing file or folder, s3://bucket/key, or a Hugging Face dataset id"
        )
    files = sorted(
        str(file)
        for file in place.rglob("*")
        if file.is_file() and suffix_of(file.name) and not file.name.startswith(".")
    )
    if not files:
        raise DataError(f"no data file in folder {path}; supported are {', '.join(DATA_SUFFIXES)}")
    return files


@lru_cache(maxsize=4)
def _buckets(endpoint: str | None) -> Any:
    return filesystem(endpoint)


def _bucket(store: StoreConfig) -> Any:
    return _buckets(store.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3"))


def _list_s3(path: str, store: StoreConfig) -> list[str]:
    if not path.removeprefix("s3://").split("/", 1)[0]:
        raise DataError(f"s3 path without a bucket: {path}; write s3://bucket/key")

    def find() -> list[str]:
        bucket = _bucket(store)
        if bucket.isfile(path):
            return [path]
        return sorted(f"s3://{file}" for file in bucket.find(path.rstrip("/") + "/") if suffix_of(file))

    files = _asked(f"cannot list {path}", store, find)
    if not files:
        raise DataError(f"file not found: {path}; there is no such object, and no data file below it")
    return files


def _open(file: str, kind: Kind, store: StoreConfig) -> IO[bytes]:
    if kind == "s3":
        return _asked(f"cannot read {file}", store, lambda: _download(file, store))
    try:
        return Path(file).open("rb")
    except OSError as error:
        raise DataError(
            f"cannot read {file}: {error.strerror or error}; check that it exists and may be read"
        ) from error


def _asked(what: str, store: StoreConfig, call: Callable[[], _T]) -> _T:
    """The bucket's answer. Raises StoreUnavailable where its failure may pass: the data may be as they should."""
    try:
        return patiently(what, store.retry_seconds, call)
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{error.message}; correct its address, or wait until it answers") from error
    except (StoreError, FileNotFoundError) as error:
        words = error.message if isinstance(error, StoreError) else f"{what}: {error}"
        raise DataError(f"{words}; check bucket, endpoint and credentials") from error


def _download(file: str, store: StoreConfig) -> IO[bytes]:
    """The object in a temporary file: one plain request, where parquet's seeks would need ranges, which not every
    S3-compatible server answers."""
    copy = NamedTemporaryFile()  # noqa: SIM115  # the caller closes it, which deletes it
    try:
        _bucket(store).get_file(file, copy.name)
    except BaseException:
        copy.close()
        raise
    return cast("IO[bytes]", copy)


def _read_files(path: str, kind: Kind, store: StoreConfig) -> Iterator[Row | BadRow]:
    for file in _list_files(path, kind, store):
        with _open(file, kind, store) as stream:
            yield from read_file(file, stream)


def _read_hub(source: Source) -> Iterator[Row | BadRow]:
    import datasets

    try:
        data = datasets.load_dataset(source.path, split=source.split, revision=source.revision)
    except Exception as error:  # the hub client and the file readers below it raise many unrelated types
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"the Hugging Face dataset {source.path} (split {source.split}) cannot be loaded: {reason}; "
            "check the id, the split and the network, or give a file with a leading ./"
        ) from error
    yield from numbered(source.path, data)
