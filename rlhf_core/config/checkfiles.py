"""Looks at a model's folder; loads nothing and runs nothing.

Every function yields findings: an `InputError` for what would make the run fail, a text for what the user should know.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.redact import shown
from rlhf_core.errors import ConfigError, InputError, ModelError, checking

Finding = InputError | str

DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
POINTER = b"version https://git-lfs"
MAX_TEMPLATE_BYTES = 2**20


def guarded(field: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """`findings`, and whatever exception looking for them ends in as one more, about `field`."""
    try:
        with checking(field):
            yield from findings
    except InputError as error:
        yield error


def is_local(path: str) -> bool:
    """True if a path is meant as one of this machine, not as a hub id or an address."""
    if "://" in path:
        return path.startswith("file://")
    return (
        path.startswith(("/", "./", "../", "~"))
        or path.lower().endswith((*DATA_SUFFIXES, ".txt", ".gz"))
        or exists(path)
    )


def exists(path: str) -> bool:
    """Whether there is such a file or folder; False for what cannot be a path."""
    try:
        return Path(path).exists()
    except (OSError, ValueError, RuntimeError):
        return False


def check_model(
    path: str, revision: str | None, tokens: int, needs_template: bool, sdpa: bool, head_sizes: Sequence[int] | None
) -> Iterator[Finding]:
    """The base model. `tokens`: longest sequence it must hold; `needs_template`: the tokenizer's chat template is used;
    `sdpa`: attention is to be plainly causal; `head_sizes`: heads that the engines can compute, None for any."""
    if not is_local(path) and HUB_ID.fullmatch(path):
        if revision is None:
            yield (
                f"model.path: {path} is no local folder, so it is read from the Hugging Face hub; "
                "pin model.revision to a commit, or a later run may read another one"
            )
        return
    folder = Path(path)
    if not exists(path):
        yield ModelError(f"model.path: model path not found: {path[:200]}; correct it, or give a hub id as owner/name")
    elif not folder.is_dir():
        yield ModelError(f"model.path: must be a folder in Hugging Face layout; got the file {path}; give its folder")
    elif not any(folder.iterdir()):
        yield ModelError(f"model.path: {path} is empty; it must hold config.json, a tokenizer and *.safetensors")
    else:
        yield from _model_folder(folder, tokens, needs_template, sdpa, head_sizes)


def _model_folder(
    folder: Path, tokens: int, needs_template: bool, sdpa: bool, head_sizes: Sequence[int] | None
) -> Iterator[Finding]:
    shape, problem = _read_json(folder / "config.json")
    if problem:
        yield ModelError(f"model.path: {problem}; the folder must be in Hugging Face layout")
        return
    context = shape.get("max_position_embeddings")
    if isinstance(context, int) and context < tokens:
        yield ConfigError(
            f"model.path: the longest prompt and response are {tokens} tokens, but {folder} has a context of {context} "
            f"(max_position_embeddings); lower data.max_prompt_tokens, data.max_response_tokens or ppo.max_new_tokens"
        )
    head = _head_size(shape)
    if head_sizes is not None and head is not None and head not in head_sizes:
        yield ModelError(
            f"model.path: {folder} has attention heads of size {head}; vLLM on the CPU needs one of "
            f"{', '.join(map(str, head_sizes))}; use another model or a GPU"
        )
    yield from _arithmetic(folder, shape, tokens, sdpa)
    if "auto_map" in shape:
        yield f"model.path: {folder}/config.json names code (auto_map); code of a model is never run"
    yield from _tokenizer(folder, shape.get("vocab_size"), needs_template)
    rows: set[int] = set()
    yield from _weights(folder, rows)
    vocabulary = shape.get("vocab_size")
    for count in sorted(rows):
        if isinstance(vocabulary, int) and count != vocabulary:
            yield ModelError(
                f"model.path: {folder}: the embedding has {count} rows, but config.json says vocab_size {vocabulary}; "
                "they must be equal; take weights and config.json from the same model"
            )


def _arithmetic(folder: Path, shape: dict[str, Any], tokens: int, sdpa: bool) -> Iterator[Finding]:
    """What a model computes beyond plain causal attention and a plain head, and training here would leave out."""
    for name, without in (("final_logit_softcapping", None), ("logits_scaling", 1.0), ("logit_scale", 1.0)):
        if shape.get(name) not in (None, without):
            yield ModelError(
                f"model.path: {folder} scales or caps its logits ({name} is {shape[name]}), which training here leaves out; "
                "use a model whose logits are its head's, such as Llama, Qwen or Mistral"
            )
    window = shape.get("sliding_window") if shape.get("use_sliding_window", True) else None
    if sdpa and isinstance(window, int) and window < tokens:
        yield ConfigError(
            f"model.path: {folder} attends to a window of {window} tokens (sliding_window), but the longest prompt and response "
            f"are {tokens}; lower data.max_prompt_tokens, data.max_response_tokens or ppo.max_new_tokens, or set "
            "model.attention=eager"
        )
    if sdpa and shape.get("attn_logit_softcapping") is not None:
        yield ConfigError(
            f"model.path: {folder} caps its attention scores (attn_logit_softcapping is {shape['attn_logit_softcapping']}), "
            "which sdpa does not compute; set model.attention=eager"
        )


def _head_size(shape: dict[str, Any]) -> int | None:
    given, width, heads = shape.get("head_dim"), shape.get("hidden_size"), shape.get("num_attention_heads")
    if isinstance(given, int):
        return given
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None


def _tokenizer(folder: Path, vocabulary: Any, needs_template: bool) -> Iterator[Finding]:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    if not any((folder / name).is_file() for name in names):
        yield ModelError(
            f"model.path: {folder} has no tokenizer ({', '.join(names)}); copy it from where the model is from"
        )
        return
    if (folder / "tokenizer.json").is_file():
        content, problem = _read_json(folder / "tokenizer.json")
        if problem:
            yield ModelError(f"model.path: {problem}; fetch it again")
        elif isinstance(vocabulary, int) and (size := _token_count(content)) > vocabulary:
            yield ModelError(
                f"model.path: {folder}: the tokenizer has {size} tokens, but config.json says vocab_size {vocabulary}; "
                "the embedding would have no row for some; take the tokenizer of this model"
            )
    settings, _ = _read_json(folder / "tokenizer_config.json")
    has_template = settings.get("chat_template") or (folder / "chat_template.jinja").is_file()
    if needs_template and not has_template:
        yield ModelError(
            f"model.path: the tokenizer of {folder} has no chat template; set data.chat_template to a Jinja file, "
            "or data.template=plain"
        )


def _token_count(content: dict[str, Any]) -> int:
    """1 + the highest token id of a `tokenizer.json`."""
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    highest = -1
    if isinstance(vocabulary, dict):
        highest = max((index for index in vocabulary.values() if isinstance(index, int)), default=-1)
    elif isinstance(vocabulary, list):
        highest = len(vocabulary) - 1
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            highest = max(highest, token["id"])
    return highest + 1


def _weights(folder: Path, rows: set[int]) -> Iterator[Finding]:
    """Checks every safetensors file by its header; adds the row counts of input embeddings to `rows`."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content, problem = _read_json(index)
        named = content.get("weight_map")
        if problem or not isinstance(named, dict):
            yield ModelError(f"model.path: {problem or f'{index} has no weight_map'}; fetch it again")
            return
        names = sorted({str(name) for name in named.values()})
        strange = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
        if strange:
            yield ModelError(
                f"model.path: {index} names {shown(strange[0])}, but each of its shards must be a *.safetensors file of "
                "this folder; take the index from where the model is from"
            )
            return
        files = [folder / name for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            yield ModelError(
                f"model.path: {folder} lacks {missing[0]} ({len(missing)} of {len(files)} shards); fetch them"
            )
        files = [file for file in files if file.is_file()]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files and not index.is_file():
        other = next((file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind)), None)
        has = f"only {other}, whose loading can run code" if other else "no weights"
        yield ModelError(f"model.path: {folder} has {has}; give *.safetensors")
    for file in files:
        header, problem = safetensors_header(file)
        if problem:
            yield ModelError(f"model.path: {file}: {problem}; fetch it again")
        for name, entry in header.items():
            if name.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")):
                rows.update(entry["shape"][:1])


def safetensors_header(file: Path) -> tuple[dict[str, Any], str | None]:
    """(entry of each tensor, None), or ({}, what is wrong). Reads the header only."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(64)
        if head.startswith(POINTER):
            return {}, "is a Git LFS pointer, not weights"
        if head.lstrip()[:1] == b"<":
            return {}, "is not safetensors (it looks like HTML)"
        length = int.from_bytes(head[:8], "little")
        if size < 8 or length > min(size - 8, 100_000_000):
            return {}, f"is not safetensors (its header would be {length} bytes, the file is {size})"
        stream.seek(8)
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = 0
            for entry in header.values():
                end = max(end, int(entry["data_offsets"][1]))
                entry["shape"] = [int(axis) for axis in entry["shape"]]
        except (ValueError, AttributeError, LookupError, TypeError, OverflowError, RecursionError):
            return {}, "is not safetensors (its header is no JSON)"
    if size != 8 + length + end:
        return {}, f"has {size} bytes where its header says {8 + length + end}: cut short or damaged"
    return header, None


def _read_json(file: Path) -> tuple[dict[str, Any], str | None]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}, f"{file.parent} has no {file.name}"
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{file} is not readable JSON ({str(error)[:80]})"
    return (content, None) if isinstance(content, dict) else ({}, f"{file} is no JSON object")


def writable(folder: Path) -> str | None:
    """What keeps `folder` from being made and written to, or None."""
    if "\0" in str(folder):
        return "a path has no NUL character"
    here = folder.absolute()
    while not exists(str(here)) and here != here.parent:
        here = here.parent
    if not here.is_dir():
        return f"{here} is a file"
    return None if os.access(here, os.W_OK | os.X_OK) else f"{here} is not writable for this user"


def tensors(folder: Path) -> dict[str, Any]:
    """Header entries of a local model's tensors, by name; none of files that are damaged."""
    files = folder.glob("*.safetensors") if folder.is_dir() else ()
    return {name: entry for file in files for name, entry in safetensors_header(file)[0].items()}
