"""The look at a model's folder.

Rules: whatever its files hold, it ends in findings that name the folder, and never fails in another
way.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_core.errors import InputError
from rlhf_core.models.check import check_model
from rlhf_core.models.folder import ModelFolder
from tests.support.demo_data import config_with_demo_data as config_from_tree
from tests.support.model_folder import model_folder

QUIET = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
FILES = {
    "config.json": (
        "max_position_embeddings",
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "head_dim",
        "auto_map",
    ),
    "tokenizer.json": ("model", "added_tokens"),
    "tokenizer_config.json": ("chat_template",),
    "model.safetensors.index.json": ("weight_map",),
}
HEADERS = st.dictionaries(
    st.sampled_from(["a", "embed_tokens.weight", "__metadata__"]),
    st.dictionaries(st.sampled_from(["shape", "data_offsets", "dtype"]),
        JSON | st.lists(st.integers(0, 9), max_size=3)) | JSON,
    max_size=2,
)  # fmt: skip


def found(folder: Path) -> list[InputError | str]:
    assert isinstance(ModelFolder(folder).tensors, dict)
    return list(check_model(config_from_tree({"run": {"device": "cpu"}, "model": {"path": str(folder)}})))


@QUIET
@given(data=st.data(), name=st.sampled_from(sorted(FILES)))
def test_any_json_in_any_file_ends_in_findings(tmp_path: Path, data: st.DataObject, name: str) -> None:
    folder = fresh(tmp_path)
    content: Any = {key: data.draw(JSON) for key in data.draw(st.sets(st.sampled_from(FILES[name])))}
    text = json.dumps(content if data.draw(st.integers(0, 4)) else data.draw(JSON))
    (folder / name).write_text(text)
    for finding in found(folder):
        message = finding if isinstance(finding, str) else finding.message
        assert message.startswith("model.path: ") and "\n" not in message


@QUIET
@given(
    content=st.binary(max_size=80) | HEADERS.map(lambda tree: json.dumps(tree).encode()), framed=st.booleans()
)
def test_any_bytes_as_weights_end_in_findings(tmp_path: Path, content: bytes, framed: bool) -> None:
    folder = fresh(tmp_path)
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(content)) + content if framed else content
    )
    assert all(isinstance(finding, InputError) for finding in found(folder))


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "a FIFO": (os.mkfifo, "is a pipe (FIFO), not a regular file"),
    "a folder": (Path.mkdir, "is a folder, not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a regular file"),
    "a link to nothing": (
        lambda path: path.symlink_to("../blobs/1234"),
        "is a link to ../blobs/1234, which does not exist",
    ),
    "a link to itself": (lambda path: path.symlink_to(path), "is a link that leads to itself"),
}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize(("make", "says"), SPECIAL.values(), ids=SPECIAL)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(
    tmp_path: Path, name: str, make: Callable[[Path], object], says: str
) -> None:
    folder = fresh(tmp_path)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    messages = [finding.message for finding in found(folder) if isinstance(finding, InputError)]
    assert len(messages) == 1
    assert says in messages[0] or (name == "tokenizer.json" and "has no tokenizer" in messages[0])


def test_a_header_of_60_mb_is_refused(tmp_path: Path) -> None:
    folder = fresh(tmp_path)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", 60_000_000))
        stream.truncate(60_000_100)
    (finding,) = found(folder)
    assert isinstance(finding, InputError)
    assert "is not safetensors" in finding.message


def fresh(tmp_path: Path) -> Path:
    shutil.rmtree(tmp_path / "m", ignore_errors=True)
    return model_folder(tmp_path / "m")
