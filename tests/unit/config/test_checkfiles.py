"""The look at a model's folder.

Locked here: whatever its files hold, it ends in findings that name the folder, and never fails in another way.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_core.config.checkfiles import check_model, tensors
from rlhf_core.errors import InputError
from tests.model_folder import model_folder

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
    st.dictionaries(st.sampled_from(["shape", "data_offsets", "dtype"]), JSON | st.lists(st.integers(0, 9), max_size=3)) | JSON,
    max_size=2,
)  # fmt: skip


def found(folder: Path) -> list[InputError | str]:
    tensors(folder)
    return list(check_model(str(folder), None, 128, True, True, (32, 64)))


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
@given(content=st.binary(max_size=80) | HEADERS.map(lambda tree: json.dumps(tree).encode()), framed=st.booleans())
def test_any_bytes_as_weights_end_in_findings(tmp_path: Path, content: bytes, framed: bool) -> None:
    folder = fresh(tmp_path)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content if framed else content)
    assert all(isinstance(finding, InputError) for finding in found(folder))


def fresh(tmp_path: Path) -> Path:
    shutil.rmtree(tmp_path / "m", ignore_errors=True)
    return model_folder(tmp_path / "m")
