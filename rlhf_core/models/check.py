"""Checks of the base model before the start: what its folder shows without loading the model.

They yield an `InputError` for what would make the run fail, and a text for what the user should know. They
import neither torch nor transformers. The stage `data` compares weights and tokenizer with config.json
(`models.weights.check_headers`, `data.prepare`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.config.address import MODEL_PATH, TEACHER_PATH, BaseModelAddress, base_of, is_hub_model
from rlhf_core.config.data import Limits, fitted_limits
from rlhf_core.config.pipeline import CPU_HEAD_SIZES, PipelineConfig, runs_on_gpu, section_of
from rlhf_core.config.redact import shown
from rlhf_core.config.training import DeepSpeedConfig, LoraConfig
from rlhf_core.errors import ConfigError, Finding, ModelError, guarded
from rlhf_core.models.folder import BadHeader, ModelFolder, UnreadableJSON, config_of_base, read_header
from rlhf_core.models.shape import text_settings, tiny_shape
from rlhf_core.system.files import exists
from rlhf_core.system.machine import machine

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
_LISTED = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_labels")
"""Fields for which transformers creates a list of as many layers or names, even if it loads no weights."""
_COUNTS = {**dict.fromkeys(_SIZES, 10**8), **dict.fromkeys(_LISTED, 10**4)}
"""Fields of a config.json that must be integers if they are present, with their maximum."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


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
    # Eager attention of transformers caps its scores.
    cap = folder.text_config.get("attn_logit_softcapping")
    if attention == "sdpa" and cap is not None:
        yield ConfigError(
            f"model.path: {folder.root} caps its attention scores (attn_logit_softcapping is {cap}), which"
            " sdpa does not compute; set model.attention=eager"
        )
    if "auto_map" in settings:
        yield f"model.path: {folder.root}/config.json names code (auto_map); code of a model is never run"
    needs_template = config.data.template == "chat" and config.data.chat_template is None
    yield from _tokenizer(folder, needs_template)
    yield from _weights(folder)


def longest_sequence(limits: Limits) -> int:
    """Return the number of tokens of the longest prompt and response that the model must hold."""
    return limits.prompt + max(limits.response, limits.new)


def further_length_problems(config: PipelineConfig, base: BaseModelAddress) -> Iterator[ConfigError]:
    """Yield the errors if the sequences that a judge or teacher reads are too long for it. Limits that are
    null count as 1. Raises ModelError if its config.json cannot be read.
    """
    limits = fitted_limits(config.given_limits, Limits(1, 1, 1, 1), 2**31)
    longest = limits.prompt + limits.new if base.field == TEACHER_PATH else longest_sequence(limits)
    settings = text_settings(config_of_base(base))
    yield from length_problems(base.path, settings, longest, config.model.attention, base.field)


def length_problems(
    model: str, settings: Mapping[str, Any], tokens: int, attention: str, field: str = MODEL_PATH
) -> Iterator[ConfigError]:
    """Yield the errors if sequences are too long for a model.

    Args:
        model: Its path, for messages.
        settings: Its config.json.
        tokens: Length of the longest sequence.
        attention: transformers' name of the implementation.
        field: Configuration field of the path.
    """
    fix = "lower data.max_prompt_tokens, data.max_response_tokens or ppo.max_new_tokens"
    longest = f"the longest prompt and response are {tokens}"
    for name, limit in length_limits(settings, attention).items():
        if limit >= tokens:
            continue
        match name:
            case "max_position_embeddings":
                problem = f"{longest} tokens, but {model} has a context of {limit} ({name}); {fix}"
            case "original_max_position_embeddings":
                problem = (
                    f"{model} has positions of type longrope. If one sequence of a batch is longer than"
                    f" {limit} tokens ({name}), all sequences get other positions; {longest}; {fix}"
                )
            case "attention_chunk_size":
                problem = (
                    f"{model} attends within chunks of {limit} tokens ({name}), which {attention} does not"
                    f" compute here, but {longest}; {fix}, or set model.attention=eager"
                )
            case _:
                problem = (
                    f"{model} attends to a window of {limit} tokens ({name}), but {longest}; {fix}, or set"
                    " model.attention=eager"
                )
        yield ConfigError(f"{field}: {problem}")


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
    """Check fields of config.json for impossible values."""
    for name, most in _COUNTS.items():
        value = folder.text_config.get(name)
        if isinstance(value, list):
            yield ModelError(
                f"model.path: {folder.root}/config.json: {name} has a value for each layer, as in Gemma 3n,"
                " which is not supported; use another model"
            )
        # Not isinstance, which accepts `true` as an integer.
        elif value is not None and (type(value) is not int or not 0 < value <= most):
            yield ModelError(
                f"model.path: {folder.root}/config.json: {name} must be an integer from 1 to {most}; got"
                f" {shown(str(value))}; take config.json from where the model is from"
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
            folder.read_json("tokenizer.json")
        except UnreadableJSON as error:
            yield ModelError(f"model.path: {error}; fetch it again")
    if needs_template and not folder.has_chat_template:
        yield ModelError(
            f"model.path: the tokenizer of {folder.root} has no chat template; set data.chat_template to a"
            " Jinja file, or data.template=plain"
        )


def _weights(folder: ModelFolder) -> Iterator[Finding]:
    """Check the header of every weight file."""
    try:
        files = folder.weight_files()
    except ModelError as error:
        yield error
        return
    # A single file is there, or is a link to nothing, for which `read_header` has the better message.
    is_sharded = files != [folder.root / "model.safetensors"]
    missing = [file.name for file in files if not file.exists()]
    if is_sharded and missing:
        yield ModelError(
            f"model.path: {folder.root} lacks {missing[0]} ({len(missing)} of {len(files)} shards); fetch"
            " them"
        )
        files = [file for file in files if file.exists()]
    for file in files:
        try:
            read_header(file)
        except BadHeader as problem:
            yield ModelError(f"model.path: {file}: {problem}; fetch it again")


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
    trained: list[tuple[str, LoraConfig | None, list[DeepSpeedConfig]]] = []
    for stage, section in config.training_sections.items():
        trained.append((section_of(stage), section.lora, [section.deepspeed]))
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
    # There are no names if no file can be read, which `check_model` reports.
    if layers and unknown:
        yield ModelError(
            f"{field}.lora.targets: {model} has no {', '.join(unknown)} in its layers; it has"
            f" {', '.join(sorted(layers))}; name linear layers among them, or leave targets out"
        )
