"""Every model, tokenizer or chat template that cannot be used gives one clear message.

Rules: each input of the tables ends `rlhf run` with exit code 2 and a message that names the field, the
file, what is wrong and a fix. What a folder shows without loading anything is refused before the start;
templates and tokenizers that only break when they are used, by the data stage. None of them runs code of the
model.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import demo_data
from tests.support.model_folder import model_folder, safetensors
from tests.support.tiny_llama import save_tiny_llama
from tests.unit.bad_input.bad_inputs import Bad, Command

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
CONFIG = {"max_position_embeddings": 256, "vocab_size": 8, "hidden_size": 64, "num_attention_heads": 2}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}


def header(content: Any, behind: int = 0) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + bytes(behind)


def index(**files: Any) -> dict[str, Any]:
    return {"model__safetensors": None, "model.safetensors.index.json": {"weight_map": files}}


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
FOLDERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no config": ({"config__json": None}, ("has no config.json",)),
    "a broken config": ({"config__json": b"{"}, ("config.json is not readable JSON",)),
    "a config that is a list": ({"config__json": []}, ("config.json is no JSON object",)),
    "a config in Latin-1": ({"config__json": b'{"a": "\xe9"}'}, ("config.json is not readable JSON",)),
    "a config nested deeply": ({"config__json": b"[" * 100_000}, ("config.json is not readable JSON",)),
    "capped attention": (
        {"config__json": {**CONFIG, "attn_logit_softcapping": 50.0}},
        ("caps its attention", "model.attention=eager"),
    ),
    "a window that is too short": (
        {"config__json": {**CONFIG, "sliding_window": 64}},
        ("window of 64 tokens", "are ", "lower data.max_prompt_tokens"),
    ),
    "no tokenizer": ({"tokenizer__json": None}, ("has no tokenizer", "copy it")),
    "a broken tokenizer": ({"tokenizer__json": b"{,}"}, ("tokenizer.json is not readable JSON",)),
    "no weights": ({"model__safetensors": None}, ("no weights", "give model.safetensors")),
    "pickled weights": ({"model__safetensors": None, "pytorch_model__bin": b"x"},
        ("pytorch_model.bin", "can run code")),
    "an empty shard": ({"model__safetensors": b""}, ("is not safetensors",)),
    "a pointer file": ({"model__safetensors": LFS}, ("Git LFS pointer",)),
    "HTML": ({"model__safetensors": b"<!DOCTYPE html><html>"}, ("looks like HTML",)),
    "XML": ({"model__safetensors": b"<?xml version='1.0'?><Error/>"}, ("looks like HTML",)),
    "a header of 2^60 bytes": ({"model__safetensors": struct.pack("<Q", 2**60) + b"{}"},
        ("is not safetensors",)),
    "a header that is no JSON": ({"model__safetensors": header(b"xx")}, ("is not safetensors",)),
    "a header that is a list": ({"model__safetensors": header([])}, ("is not safetensors",)),
    "an infinite offset": (
        {"model__safetensors": header(b'{"a": {"shape": [2], "data_offsets": [0, 1e999]}}', 8)},
        ("is not safetensors",),
    ),
    "a shape of 10^4000": (
        {"model__safetensors": header(
            b'{"a": {"dtype": "F32", "shape": [1%s], "data_offsets": [0, 8]}}' % (b"0" * 4000), 8)},
        ("is not safetensors",),
    ),
    "a negative shape": (
        {"model__safetensors": header({"a": TENSOR | {"shape": [-1, -2]}}, 8)},
        ("is not safetensors",),
    ),
    "an unknown data type": (
        {"model__safetensors": header({"a": TENSOR | {"dtype": "F999"}}, 8)},
        ("is not safetensors",),
    ),
    "bytes that are not the shape's": (
        {"model__safetensors": header({"a": TENSOR | {"shape": [3]}}, 8)},
        ("is not safetensors",),
    ),
    "a vocabulary of 8.0": ({"config__json": CONFIG | {"vocab_size": 8.0}},
        ("vocab_size must be an integer", "8.0")),
    "a width for each layer": ({"config__json": CONFIG | {"intermediate_size": [16, 16]}},
        ("intermediate_size has a value for each layer, as in Gemma 3n", "use another model")),
    "10^9 layers": ({"config__json": CONFIG | {"num_hidden_layers": 10**9}},
        ("num_hidden_layers must be an integer",)),
    "10^9 labels": ({"config__json": CONFIG | {"num_labels": 10**9}},
        ("num_labels must be an integer from 1 to 10000", "1000000000")),
    "10^9 layers under the name of GPT-2": ({"config__json": CONFIG | {"n_layer": 10**9}},
        ("n_layer must be an integer",)),
    "a hole between tensors": (
        {"model__safetensors": header({"a": TENSOR, "b": TENSOR | {"data_offsets": [12, 20]}}, 20)},
        ("is not safetensors",),
    ),
    "two tensors at one place": ({"model__safetensors": header({"a": TENSOR, "b": TENSOR}, 8)},
        ("is not safetensors",)),
    "a negative offset": (
        {"model__safetensors": header({"a": TENSOR | {"data_offsets": [-8, 0]}})},
        ("is not safetensors",),
    ),
    "metadata that are a list": ({"model__safetensors": header({"__metadata__": [], "a": TENSOR}, 8)},
        ("is not safetensors",)),
    "metadata with a number": (
        {"model__safetensors": header({"__metadata__": {"step": 1}, "a": TENSOR}, 8)},
        ("is not safetensors",),
    ),
    "no offsets": ({"model__safetensors": header({"a": {"shape": [2]}}, 8)}, ("is not safetensors",)),
    "a shape that is a number": ({"model__safetensors": header({"a": TENSOR | {"shape": 2}}, 8)},
        ("is not safetensors",)),
    "weights cut short": ({"model__safetensors": safetensors(a=[8])[:-1]}, ("cut short or damaged",)),
    "weights too long": ({"model__safetensors": safetensors(a=[8]) + b"x"}, ("cut short or damaged",)),
    "weights under another name": (
        {"model__safetensors": None, "weights__safetensors": safetensors(a=[8])},
        ("has weights.safetensors", "rename the file"),
    ),
    "a missing shard": (
        {**index(a="s1.safetensors", b="s2.safetensors"), "s1__safetensors": safetensors(a=[2])},
        ("lacks s2.safetensors", "1 of 2"),
    ),
    "a shard in another folder": (index(a="../m2/model.safetensors"),
        ("../m2/model.safetensors", "file of this folder")),
    "a shard anywhere": (index(a="/etc/passwd"), ("/etc/passwd", "file of this folder")),
    "a shard that is a number": (index(a=5), ("'5'", "file of this folder")),
    "a shard that is a pickle": (index(a="model.bin"), ("model.bin", "file of this folder")),
    "an index without a map": (
        {"model__safetensors": None, "model.safetensors.index.json": {"weight_map": []}},
        ("has no weight_map",),
    ),
    "a broken index": ({"model__safetensors": None, "model.safetensors.index.json": b"{"},
        ("is not readable JSON",)),
    "no chat template": ({"tokenizer_config__json": {}}, ("no chat template", "data.template=plain")),
    "heads the engines cannot compute": (
        {"config__json": CONFIG | {"num_attention_heads": 8}}, ("heads of size 8", "32, 64"),
    ),
    "a context that is too short": ({"config__json": CONFIG | {"max_position_embeddings": 64}},
        ("128 tokens", "context of 64")),
    "a context of a multimodal model that is too short": (
        {"config__json": {"text_config": CONFIG | {"max_position_embeddings": 64}}},
        ("128 tokens", "context of 64"),
    ),
    "positions that change with the batch": (
        {"config__json": {**CONFIG, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE}},
        ("longrope", "64 tokens (original_max_position_embeddings)", "are 128", "lower data.max_"),
    ),
    "positions of Phi-3's first files": (
        {"config__json": {**CONFIG, "rope_scaling": {
            "type": "su", "original_max_position_embeddings": 64}}},
        ("longrope", "64 tokens (original_max_position_embeddings)"),
    ),
    "positions of one type of layer": (
        {"config__json": {**CONFIG, "rope_parameters": {
            "full_attention": {**LONGROPE, "original_max_position_embeddings": 64}}}},
        ("longrope", "64 tokens (original_max_position_embeddings)"),
    ),
    "chunks that are too short": (
        {"config__json": {**CONFIG, "attention_chunk_size": 64}},
        ("chunks of 64 tokens (attention_chunk_size)", "are 128", "model.attention=eager"),
    ),
    "no model with a score": (
        {"config__json": {**CONFIG, "model_type": "olmoe"}},
        ("has the model_type olmoe, for which transformers has no model with a score", "reward.enabled=true",
         "ppo.algorithm=ppo", "use another model"),
    ),
    "no engine": (
        {"config__json": {**CONFIG, "model_type": "xglm"}},
        ("is a XGLMForCausalLM, which vLLM cannot sample from", "use another model"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("title", FOLDERS)
def test_a_model_folder_that_cannot_be_used_is_refused(command: Command, title: str) -> None:
    changes, words = FOLDERS[title]
    model_folder(command.folder / "m", **changes)
    assert command.complaint(Bad(title, f"model: {{path: ./m}}\n{demo_data.YAML}", words)).startswith(
        "model.path: "
    )


def test_an_adapter_for_engines_without_adapters_is_refused(command: Command) -> None:
    model_folder(command.folder / "m", config__json={**CONFIG, "model_type": "stablelm"})
    settings = (
        f"{demo_data.YAML}model: {{path: ./m}}\nppo: {{lora: {{r: 8}}, weight_sync: {{lora: adapter}}}}\n"
    )
    words = ("ppo.lora: vLLM has no adapters for StableLmForCausalLM", "set ppo.weight_sync.lora=merged")
    assert command.complaint(Bad("an adapter", settings, words)).startswith("ppo.lora: ")


PATHS = {
    "/nowhere/model": ("model path not found: /nowhere/model",),
    "./model": ("model path not found: ./model",),
    "../model": ("model path not found: ../model",),
    "~/nowhere": (f"model path not found: {Path.home()}/nowhere",),
    "a/b/c": ("model path not found: a/b/c",),
    "s3://bucket/model": ("model path not found",),
    "x" * 5000: ("model path not found",),
    "c.yaml": ("must be a folder", "the file c.yaml"),
    "empty": ("is empty", "config.json"),
}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:20])
def test_a_path_that_is_no_model_is_not_called_a_bad_repository_id(command: Command, path: str) -> None:
    (command.folder / "empty").mkdir()
    message = command.complaint(Bad(path, f"{demo_data.YAML}model: {{path: {path}}}", PATHS[path]))
    assert message.startswith("model.path: ")
    assert "Repo id" not in message


SMALL = demo_data.YAML.replace(
    "data: {", "data: {synthetic: {sft_examples: 20, pairs: 20, prompts: 20}, chat_template: t.jinja, "
)
EACH = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
TEMPLATES: dict[str, tuple[str | bytes, str]] = {
    "a loop that does not end": ("{% for m in messages %}", "TemplateSyntaxError"),
    "an unknown filter": ("{{ messages | nonsense }}", "TemplateAssertionError"),
    "an undefined variable": ("{{ messages.nowhere.further }}", "UndefinedError"),
    "a constant": ("hello", "does not render the user's message"),
    "nothing": ("{% if false %}x{% endif %}", "does not render the user's message"),
    "the classes of Python": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "the globals of a function": (
        "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
        "SecurityError",
    ),
    "an attribute by a filter": ("{{ messages | attr('__class__') | attr('__mro__') }}", "does not render"),
    "a format string": ("{{ '{0.__class__.__mro__}'.format(messages) }}", "SecurityError"),
    "a change of its input": ("{{ messages.append(1) }}" + EACH, "SecurityError"),
    "an import": ("{% import 'os' as os %}" + EACH, "refused it"),
    "an include": ("{% include '/etc/passwd' %}" + EACH, "refused it"),
    "a large range": ("{% for i in range(1000000000) %}x{% endfor %}", "OverflowError"),
    "nested ranges": (
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "needs over",
    ),
    "a recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "a large power": ("{{ 9**(9**9) }}", "needs over"),
    "a long string": ("{{ 'x' * 10000000000 }}", "MemoryError"),
    "a string that doubles": (
        "{% set s = namespace(x='x') %}{% for i in range(99) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
        "MemoryError",
    ),
    "a division by zero": ("\n\n{{ 1 / 0 }}", "ZeroDivisionError in its line 3"),
    "no answers": (
        "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}",
        "assistant",
    ),
    "a count in front": ("{{ messages | length }}" + EACH, "marks"),
    "its own error": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "its own error with an escape": ("{{ raise_exception('\x1b]0;x\x07') }}", "refused it"),
    "blanks": (" \n", "is empty"),
    "Latin-1": (b"caf\xe9 {{ messages }}", "UTF-8"),
    "a binary": (b"\x7fELF\x00\xff\xfe", "UTF-8"),
}


@pytest.mark.parametrize("title", TEMPLATES)
def test_a_chat_template_that_cannot_be_used_is_refused(
    command: Command, title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, word = TEMPLATES[title]
    # The time limit is in the way where another one is meant: filling the memory can take seconds.
    monkeypatch.setattr("rlhf_core.data.templates._TEMPLATE_SECONDS", 0.5 if word == "needs over" else 60)
    command.data_stage = True
    message = command.complaint(Bad(title, SMALL, (word, "data.chat_template"), files={"t.jinja": content}))
    assert message.count("\n") == 0
    assert not (command.folder / "ran").exists()


def test_a_vocabulary_that_is_too_small_for_single_bytes_is_refused(command: Command) -> None:
    command.data_stage = True
    settings = SMALL.replace("chat_template: t.jinja, ", "") + "model: {tiny: {vocab_size: 1}}\n"
    words = ("model.tiny.vocab_size must be at least 103", "got 1; raise it")
    command.complaint(Bad("a vocabulary of 1", settings, words))


def test_a_template_that_is_missing_or_a_folder_is_refused(command: Command) -> None:
    command.complaint(Bad("none", SMALL, ("data.chat_template", "file not found: t.jinja")))
    (command.folder / "t.jinja").mkdir()
    command.complaint(
        Bad("a folder", SMALL, ("data.chat_template", "t.jinja is a folder, not a regular file"))
    )


def tokenizer(
    change: Callable[[Any], Any] = lambda made: made, **names: str | None
) -> Callable[[Path], None]:
    """Writes a real tokenizer into a folder, with these names of its special tokens changed."""

    def write(folder: Path) -> None:
        from rlhf_core.data.tokenizer import train_tokenizer

        change(train_tokenizer(["a story of a fox. " * 3], 300)).save_pretrained(folder)
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text()) | names
        file.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
        config = folder / "config.json"
        config.write_text(json.dumps(CONFIG | json.loads(config.read_text()) | {"vocab_size": 512}))

    return write


def with_file(name: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tokenizer()(folder)
        (folder / name).write_bytes(content)

    return write


TOKENIZERS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no EOS": (tokenizer(eos_token=None), ("has no EOS token", "set eos_token")),
    "JSON that is no tokenizer": (
        with_file("tokenizer.json", b'{"model": {"type": "BPE"}}'),
        ("no tokenizer can be loaded",),
    ),
    "a class of its own": (
        with_file(
            "tokenizer_config.json",
            b'{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", null]}}',
        ),
        ("tokenizer",),
    ),
}


@pytest.mark.parametrize("title", TOKENIZERS)
def test_a_tokenizer_that_cannot_be_used_is_refused(command: Command, title: str) -> None:
    # Their imports take longer than any message may.
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401
    from transformers.utils import logging

    write, words = TOKENIZERS[title]
    command.data_stage = True
    logging.disable_progress_bar()  # a stage's go to its log
    folder = save_tiny_llama(command.folder / "m", vocab_size=512, max_position_embeddings=256)
    write(folder)
    (folder / "evil.py").write_text("open('ran', 'w')\n")
    command.captured.readouterr()  # what libraries print when they are imported
    command.complaint(
        Bad(title, SMALL.replace(", chat_template: t.jinja", "") + "model: {path: ./m}\n", words)
    )
    assert not (command.folder / "ran").exists()
