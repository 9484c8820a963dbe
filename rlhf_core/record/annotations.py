"""Annotations: what somebody adds to recorded rollouts later, such as the scores of another reward.

    {artifact}/annotations-{digest}/{name}.parquet      kind, step, index, score, further columns

An annotation is a file beside the folder of its artifact, which never changes. `kind`, `step` and `index` are
those of the record, which a reader joins with it. An artifact that is made again with other files has other
annotations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.errors import InputError
from rlhf_core.storage.artifacts import ArtifactStore, annotations_copy
from rlhf_core.types import ArtifactRef, annotations_folder, artifact_prefix

KEYS = pa.schema([("kind", pa.string()), ("step", pa.int32()), ("index", pa.int32())])
"""Columns that identify a response."""
SCORE = pa.field("score", pa.float64())
LABELS = pa.schema([*KEYS, SCORE, ("label", pa.string()), ("note", pa.string())])
"""Columns of an annotation with texts, which has no scores if a person wrote it."""

# A name is that of a file and the end of a key: it must not lead out of its folder, nor hide the file.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WRITER = b"rlhf.writer"


def check_name(name: str) -> str:
    """Return `name`. Raises InputError if it cannot be that of an annotation."""
    if _NAME.fullmatch(name) is None:
        raise InputError(
            f"the name of an annotation has 1 to 64 letters, digits, '.', '_' and '-', the first a letter or"
            f" digit; got {name[:80]!r}; choose another"
        )
    return name


def annotate(artifacts: ArtifactStore, ref: ArtifactRef, name: str, rows: pa.Table, writer: str) -> str:
    """Write an annotation of an artifact, and return its address. It replaces one that `writer` has written.

    Args:
        artifacts: Has the artifact.
        ref: The artifact.
        name: Name of the annotation.
        rows: Columns `kind`, `step`, `index`, `score`, and any others. Each response has at most one row.
        writer: The command, such as `rescore`.

    Raises:
        InputError: The name cannot be used, or another writer has used it.
    """
    former = annotations_of(artifacts, ref, check_name(name)).get(name)
    if former is not None and (by := _writer(former)) != writer:
        raise InputError(f"the annotation {name} of {ref.kind}/{ref.key} is of {by}; choose another name")
    # The columns that all annotations have come first, and each file says who wrote it.
    fields = [*KEYS, SCORE, *(field for field in rows.schema if field.name not in (*KEYS.names, SCORE.name))]
    schema = pa.schema(fields, {_WRITER: writer.encode()})
    key = f"{_folder(ref)}/{name}.parquet"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "rows.parquet"
        # Cast, because pyarrow joins no int64 of a reader's table with the int32 of the record.
        pq.write_table(rows.select(schema.names).cast(schema), file, compression="zstd")
        artifacts.store.put_file(file, key)
    return artifacts.store.uri(key)


def label_response(artifacts: ArtifactStore, ref: ArtifactRef, person: str, said: Mapping[str, Any]) -> Path:
    """Write what a person says about a response, in place of what this person has said about it before, and
    return the annotation of this name.

    `said` has `kind`, `step`, `index`, `label` and `note`. If both texts are empty, nothing is left of it.
    Raises InputError if the name cannot be used, or another writer has used it.
    """
    former = annotations_of(artifacts, ref, check_name(person)).get(person)
    rows = [] if former is None else pq.read_table(former).to_pylist()
    rows = [row for row in rows if any(row[name] != said[name] for name in KEYS.names)]
    if said["label"] or said["note"]:
        rows.append(dict(said))
    annotate(artifacts, ref, person, pa.Table.from_pylist(rows, LABELS), "a person")
    return annotations_of(artifacts, ref, person)[person]


def annotations_of(artifacts: ArtifactStore, ref: ArtifactRef, name: str | None = None) -> Mapping[str, Path]:
    """Return a local Parquet file for each annotation of an artifact, or for the one of this name. Those in a
    bucket are copied each time.

    Raises InputError for a file that `annotate` has not written.
    """
    store, files = artifacts.store, {}
    copies = annotations_copy(artifacts.cache / f"artifacts-{ref.kind}-{ref.key}-{ref.digest[:12]}")
    if name is None:
        keys = store.list(_folder(ref))
    else:
        # Not from a listing, which can be late: what is written next would replace what it lacks.
        own = f"{_folder(ref)}/{name}.parquet"
        keys = [own] if store.exists(own) else []
    for key in keys:
        file = store.local_path(key)
        if file is None:
            file = copies / PurePosixPath(key).name
            store.get_file(key, file)
        _writer(file)
        files[file.stem] = file
    return files


def _writer(file: Path) -> str:
    """Return who wrote an annotation. Raises InputError if the file is none."""
    try:
        return str((pq.read_schema(file).metadata or {})[_WRITER].decode())
    except (pa.ArrowInvalid, KeyError) as error:
        raise InputError(f"{file} is no annotation of this project; move it to another folder") from error


def _folder(ref: ArtifactRef) -> str:
    return f"{artifact_prefix(ref.kind, ref.key)}/{annotations_folder(ref.digest)}"
