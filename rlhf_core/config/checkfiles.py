"""Looks at a model's folder; loads nothing and runs nothing.

Every function yields findings: an `InputError` for what would make the run fail, a text for what the user
should know.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.redact import shown
from rlhf_core.errors import ConfigError, InputError, ModelError, checking
from rlhf_core.system.files import UnfitFile, open_regular, read_bounded

Finding = InputError | str

DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
POINTER = b"version https://git-lfs"
MAX_TEMPLATE_BYTES = 2**20
JSON_LIMIT = 256 << 20
"""Maximum size of a model's JSON file in bytes. Tokenizers with large vocabularies have about 30 MB."""
HEADER_LIMIT = 16 << 20
"""Maximum size of a safetensors header in bytes, enough for about 100,000 tensors."""
TENSOR_LIMIT = 1 << 48
"""Maximum number of elements of a tensor, far above that of existing models."""
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of the safetensors data types that use whole bytes."""
_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
"""Fields of a config.json that must be integers if they are present."""


def guarded(field: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield `findings`. An exception raised while finding them becomes one more finding about `field`."""
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
    path: str,
    revision: str | None,
    tokens: int,
    needs_template: bool,
    sdpa: bool,
    head_sizes: Sequence[int] | None,
) -> Iterator[Finding]:
    """The base model. `tokens`: longest sequence it must hold; `needs_template`: the tokenizer's chat
    template is used; `sdpa`: attention is to be plainly causal; `head_sizes`: heads that the engines can
    compute, None for any.
    """
    if not is_local(path) and HUB_ID.fullmatch(path):
        if revision is None:
            yield (
                f"model.path: {path} is no local folder, so it is read from the Hugging Face hub; "
                "pin model.revision to a commit, or a later run may read another one"
            )
        return
    folder = Path(path)
    if not exists(path):
        yield ModelError(
            f"model.path: model path not found: {path[:200]}; correct it, or give a hub id as owner/name"
        )
    elif not folder.is_dir():
        yield ModelError(
            f"model.path: must be a folder in Hugging Face layout; got the file {path}; give its folder"
        )
    elif not any(folder.iterdir()):
        yield ModelError(
            f"model.path: {path} is empty; it must hold config.json, a tokenizer and *.safetensors"
        )
    else:
        yield from _model_folder(folder, tokens, needs_template, sdpa, head_sizes)


def _model_folder(
    folder: Path, tokens: int, needs_template: bool, sdpa: bool, head_sizes: Sequence[int] | None
) -> Iterator[Finding]:
    shape, problem = _read_json(folder / "config.json")
    if problem:
        yield ModelError(f"model.path: {problem}; the folder must be in Hugging Face layout")
        return
    yield from _fields(folder, shape)
    context = shape.get("max_position_embeddings")
    if isinstance(context, int) and context < tokens:
        yield ConfigError(
            f"model.path: the longest prompt and response are {tokens} tokens, but {folder} has a context of"
            f" {context} (max_position_embeddings); lower data.max_prompt_tokens, data.max_response_tokens or"
            " ppo.max_new_tokens"
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
    yield from _weights(folder, rows, shape)
    vocabulary = shape.get("vocab_size")
    for count in sorted(rows):
        if isinstance(vocabulary, int) and count != vocabulary:
            yield ModelError(
                f"model.path: {folder}: the embedding has {count} rows, but config.json says vocab_size"
                f" {vocabulary}; they must be equal; take weights and config.json from the same model"
            )


def _fields(folder: Path, shape: dict[str, Any]) -> Iterator[Finding]:
    """Check fields of config.json for impossible values, and for settings that affect more than the model."""
    for name in _COUNTS:
        value = shape.get(name)
        if value is not None and (type(value) is not int or not 0 < value <= 10**8):
            yield ModelError(
                f"model.path: {folder}/config.json: {name} must be an integer from 1 to 10^8; got"
                f" {shown(str(value))}; take config.json from where the model is from"
            )
    for name in ("_attn_implementation", "attn_implementation"):
        if shape.get(name) is not None:
            yield (
                f"model.path: {folder}/config.json asks for attention {shown(str(shape[name]))} ({name}); it"
                " is ignored: model.attention decides"
            )
    if (folder / "adapter_config.json").exists():
        yield ModelError(
            f"model.path: {folder} holds an adapter (adapter_config.json), which would be loaded over the"
            " weights; merge it into the model and give that folder"
        )


def _arithmetic(folder: Path, shape: dict[str, Any], tokens: int, sdpa: bool) -> Iterator[Finding]:
    """What a model computes beyond plain causal attention and a plain head, and training here would leave
    out.
    """
    for name, without in (("final_logit_softcapping", None), ("logits_scaling", 1.0), ("logit_scale", 1.0)):
        if shape.get(name) not in (None, without):
            yield ModelError(
                f"model.path: {folder} scales or caps its logits ({name} is {shape[name]}), which training"
                " here leaves out; use a model whose logits are its head's, such as Llama, Qwen or Mistral"
            )
    window = shape.get("sliding_window") if shape.get("use_sliding_window", True) else None
    if sdpa and isinstance(window, int) and window < tokens:
        yield ConfigError(
            f"model.path: {folder} attends to a window of {window} tokens (sliding_window), but the longest"
            f" prompt and response are {tokens}; lower data.max_prompt_tokens, data.max_response_tokens or"
            " ppo.max_new_tokens, or set model.attention=eager"
        )
    if sdpa and shape.get("attn_logit_softcapping") is not None:
        yield ConfigError(
            f"model.path: {folder} caps its attention scores (attn_logit_softcapping is"
            f" {shape['attn_logit_softcapping']}), which sdpa does not compute; set model.attention=eager"
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
            f"model.path: {folder} has no tokenizer ({', '.join(names)}); copy it from where the model is"
            " from"
        )
        return
    if (folder / "tokenizer.json").is_file():
        content, problem = _read_json(folder / "tokenizer.json")
        if problem:
            yield ModelError(f"model.path: {problem}; fetch it again")
        elif isinstance(vocabulary, int) and (size := _token_count(content)) > vocabulary:
            yield ModelError(
                f"model.path: {folder}: the tokenizer has {size} tokens, but config.json says vocab_size"
                f" {vocabulary}; the embedding would have no row for some; take the tokenizer of this model"
            )
    settings, _ = _read_json(folder / "tokenizer_config.json")
    has_template = settings.get("chat_template") or (folder / "chat_template.jinja").is_file()
    if needs_template and not has_template:
        yield ModelError(
            f"model.path: the tokenizer of {folder} has no chat template; set data.chat_template to a Jinja"
            " file, or data.template=plain"
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


def _weights(folder: Path, rows: set[int], shape: dict[str, Any]) -> Iterator[Finding]:
    """Check the header of every safetensors file and add the row counts of input embeddings to `rows`.

    `shape` is the content of config.json.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if os.path.lexists(single):
        files = [single]
    elif index.is_file():
        content, problem = _read_json(index)
        named = content.get("weight_map")
        if problem or not isinstance(named, dict):
            yield ModelError(f"model.path: {problem or f'{index} has no weight_map'}; fetch it again")
            return
        names = sorted({str(name) for name in named.values()})
        strange = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
        if strange:
            yield ModelError(
                f"model.path: {index} names {shown(strange[0])}, but each of its shards must be a"
                " *.safetensors file of this folder; take the index from where the model is from"
            )
            return
        files = [folder / name for name in names]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            yield ModelError(
                f"model.path: {folder} lacks {missing[0]} ({len(missing)} of {len(files)} shards); fetch them"
            )
        files = [file for file in files if file.exists()]
    else:
        files = []
        yield _no_weights(folder)
    numbers: set[int] = set()
    for file in files:
        header, problem = safetensors_header(file)
        if problem:
            yield ModelError(f"model.path: {file}: {problem}; fetch it again")
        for name, entry in header.items():
            if found := _LAYER.search(name):
                numbers.add(int(found[1]))
            if name.endswith(
                ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
            ):
                rows.update(entry["shape"][:1])
    layers, predicting = shape.get("num_hidden_layers"), shape.get("num_nextn_predict_layers")
    allowed = (layers, layers + predicting) if type(layers) is int and type(predicting) is int else (layers,)
    if type(layers) is int and numbers and max(numbers) + 1 not in allowed:
        yield ModelError(
            f"model.path: {folder}: config.json says num_hidden_layers {layers}, but the weights have"
            f" {max(numbers) + 1}; take weights and config.json from the same model"
        )


def _no_weights(folder: Path) -> ModelError:
    """Return the error for a folder that contains neither `model.safetensors` nor an index of shards."""
    named = sorted(file.name for file in folder.glob("*.safetensors"))
    if named:
        return ModelError(
            f"model.path: {folder} has {named[0]}, but neither model.safetensors nor"
            " model.safetensors.index.json, so its weights would not be loaded; rename the file, or fetch"
            " the index of the shards"
        )
    other = next((file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind)), None)
    has = f"only {other}, whose loading can run code" if other else "no weights"
    return ModelError(f"model.path: {folder} has {has}; give model.safetensors, or shards with their index")


_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d{1,6})\.")


def safetensors_header(file: Path) -> tuple[dict[str, Any], str | None]:
    """(entry of each tensor, None), or ({}, what is wrong). Reads the header only."""
    try:
        stream = open_regular(file)
    except FileNotFoundError as error:
        return {}, f"is missing ({error})"
    except UnfitFile as error:
        return {}, str(error).removeprefix(f"{file} ")
    except OSError as error:
        return {}, f"cannot be read ({error.strerror})"
    with stream:
        size = os.fstat(stream.fileno()).st_size
        head = stream.read(64)
        if head.startswith(POINTER):
            return {}, "is a Git LFS pointer, not weights"
        if head.lstrip()[:1] == b"<":
            return {}, "is not safetensors (it looks like HTML)"
        length = int.from_bytes(head[:8], "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            return {}, f"is not safetensors (its header would be {length} bytes, the file is {size})"
        stream.seek(8)
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = 0
            for name, entry in header.items():
                problem = _entry_problem(entry)
                if problem is not None:
                    return {}, f"is not safetensors (tensor {shown(name)} {problem})"
                end = max(end, entry["data_offsets"][1])
        except (ValueError, AttributeError, LookupError, TypeError, OverflowError, RecursionError):
            return {}, "is not safetensors (its header is no JSON)"
    if size != 8 + length + end:
        return {}, f"has {size} bytes where its header says {8 + length + end}: cut short or damaged"
    return header, None


def _entry_problem(entry: Any) -> str | None:
    """Return the problem of a tensor's header entry, or None."""
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPE_BYTES:
        return f"has the unknown dtype {shown(str(dtype))}"
    if len(shape) > 16 or not all(type(axis) is int and 0 <= axis < TENSOR_LIMIT for axis in shape):
        return f"has the impossible shape {shown(str(shape)[:80])}"
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        return f"has {shown(str(offsets)[:80])} for its bytes, which are not those of its shape {shape}"
    return None


def _read_json(file: Path) -> tuple[dict[str, Any], str | None]:
    try:
        content = json.loads(read_bounded(file, JSON_LIMIT))
    except FileNotFoundError as error:
        return {}, f"{error}" if file.is_symlink() else f"{file.parent} has no {file.name}"
    except UnfitFile as error:
        return {}, str(error)
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{file} is not readable JSON ({str(error)[:80]})"
    return (content, None) if isinstance(content, dict) else ({}, f"{file} is no JSON object")


def attention_heads(folder: Path) -> int | None:
    """The number in `config.json`; None where there is no such number."""
    heads = _read_json(folder / "config.json")[0].get("num_attention_heads")
    return heads if type(heads) is int and heads > 0 else None


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
    """Return the header entries of the tensors that transformers loads, by name. Damaged files have no
    entries.

    The files are `model.safetensors`, or those of the index if that file does not exist.
    """
    files = [folder / "model.safetensors"]
    if not os.path.lexists(files[0]):
        named = _read_json(folder / "model.safetensors.index.json")[0].get("weight_map")
        names = {str(name) for name in named.values()} if isinstance(named, dict) else set()
        files = [folder / name for name in sorted(names)]
    return {name: entry for file in files for name, entry in safetensors_header(file)[0].items()}
