"""A model's folder in Hugging Face layout, read without loading the model and without running its code.

config.json     sizes of the model (`ModelFolder.config`, `ModelFolder.shape`)
tokenizer.json  or another tokenizer, and tokenizer_config.json with the chat template
*.safetensors   model.safetensors, or shards with model.safetensors.index.json (`ModelFolder.tensors`)

The functions `check_...` yield findings for the preflight: an `InputError` for what would make the run fail,
and a text for what the user should know. They import neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf_core.config.address import BaseModelAddress, base_of, is_hub_model
from rlhf_core.config.data import Limits
from rlhf_core.config.pipeline import CPU_HEAD_SIZES, PipelineConfig, runs_on_gpu, section_of
from rlhf_core.config.redact import shown
from rlhf_core.config.training import DeepSpeedConfig, LoraConfig
from rlhf_core.errors import ConfigError, Finding, ModelError, guarded
from rlhf_core.models.headers import BadHeader, read_header
from rlhf_core.models.shape import ModelShape, shape_from_config, tiny_shape
from rlhf_core.system.files import UnfitFile, exists, header_copy, read_bounded
from rlhf_core.system.machine import machine

_JSON_LIMIT = 256 << 20
"""Maximum size of a JSON file in bytes. Tokenizers with large vocabularies have about 30 MB."""
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
_LISTED = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_labels")
"""Fields for which transformers creates a list of as many layers or names, even if it loads no weights."""
_COUNTS = {**dict.fromkeys(_SIZES, 10**8), **dict.fromkeys(_LISTED, 10**4)}
"""Fields of a config.json that must be integers if they are present, with their maximum."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""Endings of the names of input embeddings."""
_LAYER_NUMBER = re.compile(r"\.(?:layers|h|blocks)\.(\d{1,6})\.")


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
        heads = self.text_config.get("num_attention_heads")
        return heads if type(heads) is int and heads > 0 else None

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
        """Sizes of the model. Raises ModelError for other architectures than those that can be counted."""
        return shape_from_config(self.config)

    def weight_files(self) -> list[Path]:
        """Return the files that transformers loads: model.safetensors, or the shards of its index.

        The files may be missing. Raises ModelError if the folder has neither, or if the index is invalid.
        """
        single, index = self.root / "model.safetensors", self.root / "model.safetensors.index.json"
        # Not `exists`: a link to nothing is reported as such, and not as a folder without weights.
        if os.path.lexists(single) or header_copy(single).exists():
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
        contents = f"only {pickled[0]}, whose loading can run code" if pickled else "no weights"
        return ModelError(
            f"model.path: {self.root} has {contents}; give model.safetensors, or shards with their index"
        )

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """Header entry of each tensor that transformers loads, by name. Damaged files have no entries."""
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
            except BadHeader:
                continue
        return entries

    @property
    def parameters(self) -> int:
        """Number of parameters in the files, for any architecture."""
        return sum(math.prod(entry["shape"]) for entry in self.tensors.values())

    @property
    def layer_names(self) -> set[str]:
        """Names of the modules with a matrix within the layers, such as `q_proj`: possible targets of LoRA.

        They are taken from the names of the weights, such as `model.layers.0.self_attn.q_proj.weight`.
        """
        names = set()
        for tensor, entry in self.tensors.items():
            parts = tensor.split(".")
            if len(entry["shape"]) == 2 and len(parts) > 2 and any(part.isdigit() for part in parts):
                names.add(parts[-2])
        return names


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file of limited size that holds an object. Raises UnreadableJSON."""
    try:
        content = json.loads(read_bounded(file, _JSON_LIMIT))
    except FileNotFoundError as error:
        # A link into a cache that was cleaned: its target is more useful than "has no config.json".
        reason = str(error) if file.is_symlink() else f"{file.parent} has no {file.name}"
        raise UnreadableJSON(reason) from error
    except UnfitFile as error:
        raise UnreadableJSON(str(error)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableJSON(f"{file} is not readable JSON ({str(error)[:80]})") from error
    if not isinstance(content, dict):
        raise UnreadableJSON(f"{file} is no JSON object")
    return content


def text_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the language model in `settings`, a config.json.

    A multimodal model has them in `text_config`.
    """
    text = settings.get("text_config")
    return {**settings, **text} if isinstance(text, dict) else dict(settings)


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


# -- checks --


def check_model(config: PipelineConfig) -> Iterator[Finding]:
    """Check the base model: its address and, for a local model, every file of its folder."""
    base = base_of(config, "sft")
    if base is None:
        return
    if base.is_hub:
        yield from base.unpinned()
        return
    path, folder = base.path, Path(base.path)
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
        yield from guarded("model.path", _folder(ModelFolder(folder), config))


def _folder(folder: ModelFolder, config: PipelineConfig) -> Iterator[Finding]:
    settings = folder.config
    yield from _fields(folder)
    attention = config.model.attention
    yield from length_problems(
        str(folder.root), folder.text_config, longest_sequence(config.limits), attention
    )
    head_size = folder.head_size
    if not runs_on_gpu(config) and head_size is not None and head_size not in CPU_HEAD_SIZES:
        yield ModelError(
            f"model.path: {folder.root} has attention heads of size {head_size}; vLLM on the CPU needs one of"
            f" {', '.join(map(str, CPU_HEAD_SIZES))}; use another model or a GPU"
        )
    yield from _arithmetic(folder, sdpa=attention == "sdpa")
    if "auto_map" in settings:
        yield f"model.path: {folder.root}/config.json names code (auto_map); code of a model is never run"
    needs_template = config.data.template == "chat" and config.data.chat_template is None
    yield from _tokenizer(folder, needs_template)
    yield from _weights(folder)


def longest_sequence(limits: Limits) -> int:
    """Return the number of tokens of the longest prompt and response that the model must hold."""
    return limits.prompt + max(limits.response, limits.new)


def length_problems(
    model: str, settings: Mapping[str, Any], tokens: int, attention: str
) -> Iterator[ConfigError]:
    """Yield the errors if sequences of `tokens` are too long for the model of `settings`, a config.json."""
    fix = "lower data.max_prompt_tokens, data.max_response_tokens or ppo.max_new_tokens"
    longest = f"the longest prompt and response are {tokens}"
    for field, limit in length_limits(settings, attention).items():
        if limit >= tokens:
            continue
        match field:
            case "max_position_embeddings":
                problem = f"{longest} tokens, but {model} has a context of {limit} ({field}); {fix}"
            case "original_max_position_embeddings":
                problem = (
                    f"{model} has positions of type longrope. If one sequence of a batch is longer than"
                    f" {limit} tokens ({field}), all sequences get other positions; {longest}; {fix}"
                )
            case "attention_chunk_size":
                problem = (
                    f"{model} attends within chunks of {limit} tokens ({field}), which {attention} does not"
                    f" compute here, but {longest}; {fix}, or set model.attention=eager"
                )
            case _:
                problem = (
                    f"{model} attends to a window of {limit} tokens ({field}), but {longest}; {fix}, or set"
                    " model.attention=eager"
                )
        yield ConfigError(f"model.path: {problem}")


def length_limits(settings: Mapping[str, Any], attention: str) -> dict[str, int]:
    """Return the maximum tokens of a sequence by the fields of `settings`, a config.json.

    Some limits are those of the model, others those of `attention`, which is `model.attention`.
    """
    limits = {
        "max_position_embeddings": settings.get("max_position_embeddings"),
        "original_max_position_embeddings": _longrope_border(settings),
    }
    if attention != "eager":  # it has a mask for the following
        limits["attention_chunk_size"] = settings.get("attention_chunk_size")
    # Qwen2 has a size in every config.json, and a second field for whether it is used.
    if attention == "sdpa" and settings.get("use_sliding_window", True):
        limits["sliding_window"] = settings.get("sliding_window")
    return {field: limit for field, limit in limits.items() if isinstance(limit, int)}


def _longrope_border(settings: Mapping[str, Any]) -> int | None:
    """Return the length above which positions of type longrope differ, or None for other types.

    The type `dynamic` changes above `max_position_embeddings`, which no sequence may exceed.
    """
    rope = settings.get("rope_parameters") or settings.get("rope_scaling")
    if not isinstance(rope, dict):
        return None
    # A model can have separate positions for each type of layer.
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        # `su` is the first name of this type, in files of Phi-3.
        if part.get("rope_type", part.get("type")) in ("longrope", "su"):
            border = settings.get("original_max_position_embeddings") or part.get(
                "original_max_position_embeddings"
            )
            return border if isinstance(border, int) else None
    return None


def vocabulary_problem(model: str, settings: Mapping[str, Any], tokens: int) -> ModelError | None:
    """Return the error if a tokenizer has more than the `vocab_size` tokens of `settings`, a config.json."""
    rows = settings.get("vocab_size")
    if not isinstance(rows, int) or tokens <= rows:
        return None
    return ModelError(
        f"model.path: {model}: the tokenizer has {tokens} tokens, but config.json says vocab_size"
        f" {rows}; the embedding would have no row for some; take the tokenizer of this model"
    )


def _fields(folder: ModelFolder) -> Iterator[Finding]:
    """Check fields of config.json for impossible values, and for settings that affect more than the model."""
    for name, most in _COUNTS.items():
        value = folder.text_config.get(name)
        if value is not None and (type(value) is not int or not 0 < value <= most):
            yield ModelError(
                f"model.path: {folder.root}/config.json: {name} must be an integer from 1 to {most}; got"
                f" {shown(str(value))}; take config.json from where the model is from"
            )
    for name in ("_attn_implementation", "attn_implementation"):
        value = folder.config.get(name)
        if value is not None:
            yield (
                f"model.path: {folder.root}/config.json asks for attention {shown(str(value))} ({name}); it"
                " is ignored: model.attention decides"
            )
    rope, theta = folder.text_config.get("rope_parameters"), folder.text_config.get("rope_theta")
    newer = rope.get("rope_theta", theta) if isinstance(rope, dict) else theta
    if theta is not None and newer != theta:
        # Earlier versions of transformers read the first field, and version 5 reads the second.
        yield ModelError(
            f"model.path: {folder.root}/config.json: rope_theta is {shown(str(theta))}, but"
            f" rope_parameters.rope_theta is {shown(str(newer))}; remove the wrong one"
        )
    if (folder.root / "adapter_config.json").exists():
        yield ModelError(
            f"model.path: {folder.root} holds an adapter (adapter_config.json), which would be loaded over"
            " the weights; merge it into the model and give that folder"
        )


def _arithmetic(folder: ModelFolder, *, sdpa: bool) -> Iterator[Finding]:
    """Check for operations beyond plain causal attention, which training would leave out."""
    settings = folder.text_config
    # Eager attention of transformers caps its scores.
    if sdpa and settings.get("attn_logit_softcapping") is not None:
        yield ConfigError(
            f"model.path: {folder.root} caps its attention scores (attn_logit_softcapping is"
            f" {settings['attn_logit_softcapping']}), which sdpa does not compute; set model.attention=eager"
        )


def _tokenizer(folder: ModelFolder, needs_template: bool) -> Iterator[Finding]:
    if not any((folder.root / name).is_file() for name in _TOKENIZER_FILES):
        yield ModelError(
            f"model.path: {folder.root} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); copy it from where"
            " the model is from"
        )
        return
    if (folder.root / "tokenizer.json").is_file():
        try:
            tokens = _token_count(folder.read_json("tokenizer.json"))
        except UnreadableJSON as error:
            yield ModelError(f"model.path: {error}; fetch it again")
        else:
            problem = vocabulary_problem(str(folder.root), folder.text_config, tokens)
            if problem is not None:
                yield problem
    if needs_template and not _has_chat_template(folder):
        yield ModelError(
            f"model.path: the tokenizer of {folder.root} has no chat template; set data.chat_template to a"
            " Jinja file, or data.template=plain"
        )


def _has_chat_template(folder: ModelFolder) -> bool:
    if (folder.root / "chat_template.jinja").is_file():
        return True
    try:
        return bool(folder.read_json("tokenizer_config.json").get("chat_template"))
    except UnreadableJSON:
        return False


def _token_count(content: dict[str, Any]) -> int:
    """Return 1 + the highest token id of a `tokenizer.json`."""
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    highest = -1
    if isinstance(vocabulary, dict):
        highest = max((index for index in vocabulary.values() if isinstance(index, int)), default=-1)
    elif isinstance(vocabulary, list):  # of a Unigram tokenizer, in the order of the ids
        highest = len(vocabulary) - 1
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            highest = max(highest, token["id"])
    return highest + 1


def _weights(folder: ModelFolder) -> Iterator[Finding]:
    """Check the header of every weight file, and the numbers of layers and embeddings against config.json."""
    try:
        files = folder.weight_files()
    except ModelError as error:
        yield error
        return
    is_sharded = files != [folder.root / "model.safetensors"]
    missing = [file.name for file in files if not file.exists()]
    if is_sharded and missing:
        yield ModelError(
            f"model.path: {folder.root} lacks {missing[0]} ({len(missing)} of {len(files)} shards); fetch"
            " them"
        )
        files = [file for file in files if file.exists()]
    tensors: dict[str, Any] = {}
    for file in files:
        try:
            tensors.update(read_header(file))
        except BadHeader as problem:
            yield ModelError(f"model.path: {file}: {problem}; fetch it again")
    yield from _layer_count(folder, tensors)
    vocabulary = folder.text_config.get("vocab_size")
    rows = {
        axis for name, entry in tensors.items() if name.endswith(_EMBEDDINGS) for axis in entry["shape"][:1]
    }
    for count in sorted(rows):
        if isinstance(vocabulary, int) and count != vocabulary:
            yield ModelError(
                f"model.path: {folder.root}: the embedding has {count} rows, but config.json says vocab_size"
                f" {vocabulary}; they must be equal; take weights and config.json from the same model"
            )


def _layer_count(folder: ModelFolder, tensors: Mapping[str, Any]) -> Iterator[Finding]:
    layers = folder.text_config.get("num_hidden_layers")
    numbers = [int(match[1]) for match in map(_LAYER_NUMBER.search, tensors) if match is not None]
    if type(layers) is not int or not numbers:
        return
    allowed = [layers]
    # Layers for multi-token prediction are stored after the others, or not at all.
    predicting = folder.text_config.get("num_nextn_predict_layers")
    if type(predicting) is int:
        allowed.append(layers + predicting)
    count = max(numbers) + 1
    if count not in allowed:
        yield ModelError(
            f"model.path: {folder.root}: config.json says num_hidden_layers {layers}, but the weights have"
            f" {count}; take weights and config.json from the same model"
        )


def check_tensor_parallel(config: PipelineConfig) -> Iterator[Finding]:
    """Check that an engine's GPUs can share the attention heads of the model."""
    ways, path = config.ppo.engine.tensor_parallel, config.model.path
    heads: int | None = None
    if path is None:
        heads = config.model.tiny.heads
    elif exists(Path(path) / "config.json"):
        heads = ModelFolder(path).attention_heads
    if heads is None or heads % ways == 0:
        return
    fits = max(number for number in range(1, ways) if heads % number == 0)
    yield ConfigError(
        f"ppo.engine.tensor_parallel: must divide the {heads} attention heads of the model; got {ways};"
        f" use {fits}"
    )


def check_adapters(config: PipelineConfig) -> Iterator[Finding]:
    """Check that the model has the targets of each adapter, and that its quantization is possible."""
    ppo = config.ppo
    trained: list[tuple[str, LoraConfig | None, list[DeepSpeedConfig]]] = [
        (section_of(stage), section.lora, [section.deepspeed])
        for stage, section in config.training_sections.items()
    ]
    critic = [ppo.critic_deepspeed] if ppo.uses_critic else []
    if ppo.enabled:
        trained.append(("ppo", ppo.lora, [ppo.policy_deepspeed, *critic]))
    for field, lora, engines in trained:
        if lora is None:
            continue
        if lora.targets is not None:
            yield from guarded(f"{field}.lora.targets", _targets(field, lora.targets, config))
        if lora.quantize is None:
            continue
        rule = f"{field}.lora.quantize: {lora.quantize} needs"
        if not runs_on_gpu(config):
            yield ConfigError(f"{rule} a GPU; got 0 visible; leave it out")
        elif not machine().has_package("bitsandbytes"):
            yield ConfigError(
                f"{rule} bitsandbytes, which is not installed; install it, or leave quantize out"
            )
        if any(deepspeed.zero_stage == 3 for deepspeed in engines):
            yield ConfigError(f"{rule} zero_stage 0, 1 or 2: ZeRO cannot shard packed weights; got 3; use 2")
        has_other_weights = ppo.weight_sync.lora == "adapter" or ppo.colocate in ("none", "critic_reward")
        if field == "ppo" and has_other_weights:
            yield ConfigError(
                f"{rule} ppo.weight_sync.lora=merged and ppo.colocate=pairs, policy_reference or all,"
                " so that engines and reference have the policy's rounded weights; got"
                f" {ppo.weight_sync.lora or 'merged'} and {ppo.colocate}"
            )


def _targets(field: str, targets: tuple[str, ...], config: PipelineConfig) -> Iterator[Finding]:
    judge = config.reward.judge
    path = (judge.path if judge is not None and field == "reward.judge" else None) or config.model.path
    if path is not None and is_hub_model(path):
        return
    if path is None:
        model, layers = "the model from scratch", set(tiny_shape(config.model.tiny).linear_layers)
    else:
        model, layers = path, ModelFolder(path).layer_names
    unknown = sorted(set(targets) - layers)
    if layers and unknown:
        yield ModelError(
            f"{field}.lora.targets: {model} has no {', '.join(unknown)} in its layers; it has"
            f" {', '.join(sorted(layers))}; name linear layers among them, or leave targets out"
        )
