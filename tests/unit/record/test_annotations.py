"""Annotations of recorded rollouts, in a folder and in a bucket.

- what was written is read, with its further columns, and replaced by the same writer only
- a name that cannot be a file's, and the name of another writer, are errors
- the artifact itself does not change, and an artifact with other files has other annotations
- annotations are deleted with their artifact, also their copies
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.errors import InputError
from rlhf_core.ops.prune import remove, remove_copy, stale_copies
from rlhf_core.record.annotations import annotate, annotations_of, label_response
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.fencing import observe
from rlhf_core.storage.inventory import ArtifactName, read_artifact
from rlhf_core.system.home import Home
from rlhf_core.types import ArtifactRef
from tests.support.late_listings import LateListings
from tests.support.old_runs import OldRuns, key_of
from tests.support.scripted_store import ScriptedStore

DOCS = Path(__file__).resolve().parents[3] / "docs/record.md"
PPO = ArtifactName("ppo", key_of("run", "ppo"))


@pytest.fixture(params=[False, True], ids=["folder", "bucket"])
def artifacts(tmp_path: Path, request: pytest.FixtureRequest) -> ArtifactStore:
    store = ScriptedStore(tmp_path / "store", remote=request.param)
    OldRuns(store, tmp_path / "work").publish("run", "ppo")
    return ArtifactStore(store, tmp_path / "cache")


@pytest.fixture
def ref(artifacts: ArtifactStore) -> ArtifactRef:
    found = artifacts.find("ppo", PPO.key)
    assert found is not None
    return found


def rows(*scores: float) -> pa.Table:
    table = [{"kind": "ppo", "step": 1, "index": i, "score": score} for i, score in enumerate(scores)]
    return pa.Table.from_pylist(table)


def test_what_was_written_is_read_with_its_types(artifacts: ArtifactStore, ref: ArtifactRef) -> None:
    given = rows(0.1, float("nan")).append_column("reason", pa.array(["short", None]))
    address = annotate(artifacts, ref, "by-hand_1.0", given, "review")
    [(name, file)] = annotations_of(artifacts, ref).items()
    table = pq.read_table(file)
    assert (name, address.endswith("/by-hand_1.0.parquet")) == ("by-hand_1.0", True)
    assert table.schema.names == ["kind", "step", "index", "score", "reason"]
    types = [pa.string(), pa.int32(), pa.int32(), pa.float64(), pa.string()]
    assert table.schema.types == types
    assert table["score"].to_pylist()[0] == 0.1 and table["reason"].to_pylist() == ["short", None]
    assert artifacts.find("ppo", PPO.key) == ref  # whole, with the same digest


def test_the_same_writer_replaces_and_another_one_is_refused(
    artifacts: ArtifactStore, ref: ArtifactRef
) -> None:
    annotate(artifacts, ref, "gold", rows(1.0), "rescore")
    annotate(artifacts, ref, "gold", rows(2.0), "rescore")
    with pytest.raises(InputError, match=r"gold of ppo/.* is of rescore; choose another name"):
        annotate(artifacts, ref, "gold", rows(3.0), "review")
    assert pq.read_table(annotations_of(artifacts, ref)["gold"])["score"].to_pylist() == [2.0]


def test_a_label_that_a_listing_lacks_is_kept(artifacts: ArtifactStore, ref: ArtifactRef) -> None:
    late = LateListings(artifacts.store.url)
    late.hidden = "annotations"
    delayed = ArtifactStore(late, cache=artifacts.cache)
    for index in (0, 1):
        said = {"kind": "ppo", "step": 1, "index": index, "label": "hack", "note": ""}
        file = label_response(delayed, ref, "ann", said)
    assert pq.read_table(file)["index"].to_pylist() == [0, 1]


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "ä", "a" * 65, "a\n"])
def test_a_name_that_is_no_file_name_everywhere_is_refused(
    artifacts: ArtifactStore, ref: ArtifactRef, name: str
) -> None:
    with pytest.raises(InputError, match="name of an annotation"):
        annotate(artifacts, ref, name, rows(1.0), "rescore")


def test_an_artifact_with_other_files_has_other_annotations(
    artifacts: ArtifactStore, ref: ArtifactRef
) -> None:
    annotate(artifacts, ref, "gold", rows(1.0), "rescore")
    assert annotations_of(artifacts, replace(ref, digest="0" * 64)) == {}


def test_the_example_of_the_page_runs(artifacts: ArtifactStore, ref: ArtifactRef) -> None:
    _, example = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    exec(example, {"artifacts": artifacts, "ref": ref, "rows": rows(1.0)})
    assert list(annotations_of(artifacts, ref)) == ["by-hand"]


def test_annotations_are_deleted_with_their_artifact(
    artifacts: ArtifactStore, ref: ArtifactRef, tmp_path: Path
) -> None:
    annotate(artifacts, ref, "gold", rows(1.0), "rescore")
    artifacts.fetch(ref)
    annotations_of(artifacts, ref)
    store = artifacts.store
    artifact = read_artifact(store, PPO)
    assert artifact is not None
    assert remove(store, artifact, observe(store, [PPO.key])[PPO.key], Home.of(tmp_path / "home"))
    for copy in stale_copies(store, artifacts.cache, []):
        remove_copy(store, copy)
    assert store.list(f"artifacts/{PPO}") == []
    assert list(artifacts.cache.glob("*")) == []
