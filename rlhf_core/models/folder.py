"""A model's folder in Hugging Face layout, read without loading the model and without running its code.

config.json     sizes of the model (`ModelFolder.config`, `ModelFolder.shape`)
tokenizer.json  or another tokenizer, and tokenizer_config.json with the chat template
*.safetensors   model.safetensors, or shards with model.safetensors.index.json (`ModelFolder.tensors`)

Neither torch nor transformers is imported.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from rlhf_core.config.address import BaseModelAddress, base_of, is_hub_model
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.redact import shown
from rlhf_core.errors import ModelError
from rlhf_core.models.shape import ModelShape, shape_from_config, size_of, text_settings, tiny_shape
from rlhf_core.system.files import LFS_POINTER, UnfitFile, exists, open_regular, read_bounded

_JSON_LIMIT = 256 << 20
"""Maximum size of a JSON file in bytes. Tokenizers with large vocabularies have about 30 MB."""


_TEXT_PARTS = ("model.language_model.", "language_model.")
"""Beginnings of the names of the language model's tensors in the files of a multimodal model."""

Tensor = TypeVar("Tensor")


class UnreadableJSON(ValueError):
    """The file is missing, too large or no JSON object. The message names it."""


class ModelFolder:
    """A model's folder. Its files are read when they are needed, once."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file of the folder. Raises UnreadableJSON."""
        return read_json_object(self.root / name)

    @property
    def has_config(self) -> bool:
        """Whether the folder has a config.json, as the folder of every model."""
        return (self.root / "config.json").is_file()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json. Raises ModelError."""
        try:
            return self.read_json("config.json")
        except UnreadableJSON as error:
            raise ModelError(f"model.path: {error}; the folder must be in Hugging Face layout") from error

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """`text_settings` of config.json. Raises ModelError."""
        return text_settings(self.config)

    @property
    def attention_heads(self) -> int | None:
        """Number of attention heads, or None if config.json does not have it."""
        return size_of(self.text_config, "num_attention_heads") or None

    @property
    def head_size(self) -> int | None:
        """Size of an attention head, or None if config.json does not have it."""
        head_size, width = self.text_config.get("head_dim"), self.text_config.get("hidden_size")
        if isinstance(head_size, int):
            return head_size
        if isinstance(width, int) and self.attention_heads is not None:
            return width // self.attention_heads
        return None

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model. Raises ModelError if one is missing."""
        return shape_from_config(self.config)

    def weight_files(self) -> list[Path]:
        """Return the files that transformers loads: model.safetensors, or the shards of its index.

        The files may be missing. Raises ModelError if the folder has neither, or if the index is invalid.
        """
        single, index = self.root / "model.safetensors", self.root / "model.safetensors.index.json"
        # Not `exists`: a link to nothing is reported as such, and not as a folder without weights.
        if os.path.lexists(single):
            return [single]
        if not index.is_file():
            raise self._no_weights()
        try:
            shards = read_json_object(index).get("weight_map")
        except UnreadableJSON as error:
            raise ModelError(f"model.path: {error}; fetch it again") from error
        if not isinstance(shards, dict):
            raise ModelError(f"model.path: {index} has no weight_map; fetch it again")
        names = sorted({str(name) for name in shards.values()})
        for name in names:
            # The index is untrusted: a name could lead out of the folder, or to a pickle.
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelError(
                    f"model.path: {index} names {shown(name)}, but each of its shards must be a"
                    " *.safetensors file of this folder; take the index from where the model is from"
                )
        return [self.root / name for name in names]

    def _no_weights(self) -> ModelError:
        """Return the error for a folder that contains neither `model.safetensors` nor an index of shards."""
        unused = sorted(file.name for file in self.root.glob("*.safetensors"))
        if unused:
            return ModelError(
                f"model.path: {self.root} has {unused[0]}, but neither model.safetensors nor"
                " model.safetensors.index.json, so its weights would not be loaded; rename the file, or fetch"
                " the index of the shards"
            )
        pickled = [file.name for kind in ("*.bin", "*.pt", "*.pth") for file in self.root.glob(kind)]
        contents = "no weights"
        if pickled:
            contents = f"only {pickled[0]}, whose loading can run code"
        return ModelError(
            f"model.path: {self.root} has {contents}; give model.safetensors, or shards with their index"
        )

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """`read_header` of all tensors of the text model. Damaged files have no entries."""
        return text_tensors(self._entries)

    @property
    def left_out(self) -> dict[str, Any]:
        """`read_header` of the tensors that are not of the text model (`text_tensors`)."""
        entries = self._entries
        used = set(text_tensors({name: name for name in entries}).values())
        return {name: entry for name, entry in entries.items() if name not in used}

    @cached_property
    def _entries(self) -> dict[str, Any]:
        """`read_header` of all files. Damaged ones have no entries."""
        entries: dict[str, Any] = {}
        if not exists(self.root):
            return entries
        try:
            files = self.weight_files()
        except ModelError:
            return entries
        for file in files:
            try:
                entries.update(read_header(file))
            # `models.check` names damaged files. Estimates that are made before must not fail.
            except BadHeader:
                continue
        return entries

    @property
    def parameters(self) -> int:
        """Number of parameters in the files, for any architecture."""
        return sum(math.prod(entry["shape"]) for entry in self.tensors.values())

    @property
    def chat_template(self) -> str:
        """Text of the chat template, or of several with names; "" without one."""
        file = self.root / "chat_template.jinja"
        # Before the field of tokenizer_config.json, as in transformers: a folder can have both.
        if file.is_file():
            return file.read_text(encoding="utf-8", errors="replace")
        try:
            return str(self.read_json("tokenizer_config.json").get("chat_template") or "")
        except UnreadableJSON:
            return ""

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_template)

    @property
    def layer_names(self) -> set[str]:
        """Names of the modules with a matrix within the layers, such as `q_proj`: possible targets of LoRA.

        They are taken from the names of the weights, such as `model.layers.0.self_attn.q_proj.weight`.
        """
        names = set()
        for tensor, entry in self.tensors.items():
            parts = tensor.split(".")
            # Norms have vectors, and names without a number are outside of the layers.
            if len(entry["shape"]) == 2 and len(parts) > 2 and any(part.isdigit() for part in parts):
                names.add(parts[-2])
        return names


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file of limited size that holds an object. Raises UnreadableJSON."""
    try:
        content = json.loads(read_bounded(file, _JSON_LIMIT))
    except FileNotFoundError as error:
        # A link into a cache that was cleaned: its target is more useful than "has no config.json".
        reason = f"{file.parent} has no {file.name}"
        if file.is_symlink():
            reason = str(error)
        raise UnreadableJSON(reason) from error
    except UnfitFile as error:
        raise UnreadableJSON(str(error)) from error
    # RecursionError: `json` recurses into nested lists, and the file may come from anywhere.
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableJSON(f"{file} is not readable JSON ({str(error)[:80]})") from error
    if not isinstance(content, dict):
        raise UnreadableJSON(f"{file} is no JSON object")
    return content


class BadHeader(ValueError):
    """The file is not a complete safetensors file. The message is a predicate without the file's name."""


def read_header(file: Path) -> dict[str, Any]:
    """Return data type and shape of each tensor by name, without its values. Raises BadHeader.

    The file is untrusted: `safetensors` compares each entry with the size of the file before anything is
    allocated for it.
    """
    try:
        with open_regular(file) as stream:
            start = stream.read(64)
    except FileNotFoundError as error:
        raise BadHeader(f"is missing ({error})") from error
    except UnfitFile as error:
        raise BadHeader(str(error).removeprefix(f"{file} ")) from error
    except OSError as error:
        raise BadHeader(f"cannot be read ({error.strerror})") from error
    if start.startswith(LFS_POINTER):
        raise BadHeader("is a Git LFS pointer, not weights")
    # A server may answer a download with a page about an error or a login.
    if start.lstrip()[:1] == b"<":
        raise BadHeader("is not safetensors (it looks like HTML)")
    from safetensors import SafetensorError, safe_open

    opened: Any
    try:
        # "numpy", because no values are read, and torch need not be imported.
        with safe_open(file, framework="numpy") as opened:
            found = {}
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                found[name] = {"dtype": part.get_dtype(), "shape": part.get_shape()}
            return found
    except (SafetensorError, OSError) as error:
        raise BadHeader(f"is not safetensors, cut short or damaged ({error})") from error


def text_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the text model, under the names that its own class in transformers has for them.

    The files of a multimodal model have them below `model.language_model.`, or below `language_model.` with
    the names of a whole model. What is not below it, such as a vision tower, is left out. The tensors of a
    text model are returned as they are.
    """
    if not any(name.startswith(_TEXT_PARTS) for name in tensors):
        return dict(tensors)
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("model.language_model."):
            named["model." + name.removeprefix("model.language_model.")] = tensor
        elif name.startswith(("language_model.", "lm_head.")):
            named[name.removeprefix("language_model.")] = tensor
    return named


def base_model_config(config: PipelineConfig, *, local_only: bool = False) -> dict[str, Any]:
    """Return the content of the config.json of `model.path`, which must be set. See `config_of_base`."""
    base = base_of(config, "sft")
    assert base is not None
    return config_of_base(base, local_only=local_only)


def config_of_base(base: BaseModelAddress, *, local_only: bool = False) -> dict[str, Any]:
    """Return the content of the config.json of a base model.

    With `local_only`, that of a hub model is read from the local cache, without a network request. Raises
    ModelError.
    """
    if not base.is_hub:
        return ModelFolder(base.path).config
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(base.path, "config.json", revision=base.revision, local_files_only=local_only)
        return read_json_object(Path(file))
    except Exception as error:  # the hub client raises many unrelated types
        raise ModelError(
            f"{base.field}: the config.json of {base.path} cannot be read from the hub or its cache"
            f" ({type(error).__name__}); check the id, the revision and the network"
        ) from error


def base_model_shape(
    config: PipelineConfig, given: Path | None = None, *, local_only: bool = False
) -> ModelShape:
    """Return the shape of the base model.

    Args:
        config: Configuration of the pipeline.
        given: A config.json to use instead of the base model's own.
        local_only: Read the config.json of a hub model from the local cache only.

    Raises ModelError if the shape cannot be read.
    """
    if given is not None:
        try:
            return shape_from_config(read_json_object(given))
        except UnreadableJSON as error:
            raise ModelError(
                f"{given}: is no readable config.json: {error}; give a copy of a model's config.json"
            ) from error
    if config.model.path is None:
        return tiny_shape(config.model.tiny)
    try:
        settings = base_model_config(config, local_only=local_only)
    except ModelError as error:
        if not is_hub_model(config.model.path):
            raise
        raise ModelError(f"{error.message}, or give --model-config with a copy of its config.json") from error
    return shape_from_config(settings)
