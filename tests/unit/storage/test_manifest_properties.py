"""Properties of every manifest.

- any bytes, any edit and any JSON at the path of a manifest give the manifest that was written or one
  CorruptArtifact
- a manifest that names a file outside its folder is refused, also with a valid checksum
- a manifest is read as it was written
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.errors import CorruptArtifact, InputError
from rlhf_core.storage.bundles import FileEntry, Manifest, digest_of, encode, parse
from rlhf_core.storage.store import check_key
from rlhf_core.system.files import json_sha256

QUIET = settings(max_examples=200, deadline=None, derandomize=True, database=None)

FILES = (FileEntry("policy/config.json", 12, "a" * 64), FileEntry("metrics.jsonl", 0, "b" * 64))
WHOLE = Manifest(
    "artifacts/ppo/k", "000001", FILES, {"kind": "ppo", "metrics": {"kl": 0.5}, "facts": {"é": "\u2028"}}
)
RAW = encode(WHOLE)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def read(raw: bytes) -> Manifest | None:
    try:
        return parse(WHOLE.prefix, raw, "store/manifest.json")
    except CorruptArtifact as error:
        assert error.message.startswith("store/manifest.json") and "\n" not in error.message
        return None


def test_what_was_written_is_what_is_read() -> None:
    assert read(RAW) == WHOLE


@QUIET
@given(st.binary(max_size=60) | JSON.map(lambda tree: json.dumps(tree).encode()))
def test_any_bytes_are_no_manifest(raw: bytes) -> None:
    assert read(raw) is None


@QUIET
@given(st.integers(0, len(RAW)), st.integers(0, 30), st.binary(max_size=4))
def test_any_edit_is_noticed_unless_it_changes_nothing(at: int, length: int, new: bytes) -> None:
    # A blank between two words of JSON is such an edit.
    assert read(RAW[:at] + new + RAW[at + length :]) in (None, WHOLE)


@QUIET
@given(st.sampled_from(["schema", "folder", "digest", "kind", "files", "checksum", "metrics"]), JSON)
def test_any_manifest_field_value_is_handled(name: str, value: Any) -> None:
    content = json.loads(RAW)
    del content["checksum"]
    content[name] = value
    found = read(json.dumps({**content, "checksum": json_sha256(content)}).encode())
    assert found is None or found.files == FILES


PARTS = st.sampled_from(
    ["..", ".", "", "a", "/", "\\", "\0", "~", "a\n", ".tmp-x", "..\\", "%2e%2e", "C:", "x" * 300]
)


@QUIET
@given(parts=st.lists(PARTS, min_size=1, max_size=5), absolute=st.booleans())
def test_no_forged_path_leads_out_of_the_folder(parts: list[str], absolute: bool) -> None:
    path = "/" * absolute + "/".join(parts)
    entry = FileEntry(path, 0, "a" * 64)
    forged = {"schema": 1, "folder": "f", "digest": digest_of([entry]), "files": [entry.__dict__]}
    found = read(json.dumps({**forged, "checksum": json_sha256(forged)}).encode())
    if found is not None:
        assert not path.startswith("/") and ".." not in path.split("/") and "" not in path.split("/")
        assert check_key(path) == path
    else:
        try:
            check_key(path)
        except InputError:
            return
        raise AssertionError(f"{path!r} is a key, but its manifest was refused")
