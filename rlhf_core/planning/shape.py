"""The shape of the model, from its `config.json`: what memory and time are calculated from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.errors import ModelError
from rlhf_core.system.files import read_bounded

_MAX_CONFIG_BYTES = 16 * 2**20
_FAMILIES = ("gemma", "llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose layers are counted here; transformers is asked for each of them in the tests."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped-query attention, gated MLPs and two norms a layer."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Norms on the queries and keys of each head (Qwen3)."""

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Name -> (inputs, outputs) of a decoder layer's linear layers, as an adapter's targets name them."""
        return {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.kv),
            "v_proj": (self.hidden, self.kv),
            "o_proj": (self.query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def layer_parameters(self) -> int:
        biases = self.qkv_bias * (self.query + 2 * self.kv) + self.output_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        norms = 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        return sum(i * o for i, o in self.linear_layers.values()) + biases + norms

    def adapter_parameters(self, r: int, targets: Sequence[str] | None) -> int:
        """Of LoRA's A and B on the targets of every layer; None: all linear layers. Raises ModelError for
        other names.
        """
        known = self.linear_layers
        if wrong := set(targets or ()) - set(known):
            raise ModelError(
                f"lora.targets: must be some of {', '.join(known)}; got {', '.join(sorted(wrong))}"
            )
        return self.layers * sum(r * sum(known[name]) for name in targets or known)

    @property
    def linear_parameters(self) -> int:
        """Of all linear layers of the decoder, which is what QLoRA quantizes."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linear_layers.values())

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def backbone_parameters(self) -> int:
        """Without the language-model head."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    @property
    def parameters(self) -> int:
        """Of the causal language model."""
        return self.backbone_parameters + (0 if self.tied else self.embedding_parameters)

    @property
    def score_parameters(self) -> int:
        """Of the reward model and the critic: a backbone and one output."""
        return self.backbone_parameters + self.hidden


def shape_of(config: PipelineConfig, given: Path | None = None, *, local: bool = False) -> ModelShape:
    """`given`: a `config.json` to use instead of the model's own, which the hub is asked for where there is
    no folder of that name, unless it must be `local`. Raises ModelError if there is none to be read.
    """
    if given is None and config.model.path is None:
        tiny = config.model.tiny
        return ModelShape(
            hidden=tiny.hidden_size,
            intermediate=tiny.intermediate_size,
            layers=tiny.layers,
            heads=tiny.heads,
            kv_heads=tiny.heads,
            head_dim=tiny.hidden_size // tiny.heads,
            vocabulary=tiny.vocab_size,
            tied=tiny.tie_embeddings,
        )
    return _from_json(_read(given or _config_file(config, local)))


def _config_file(config: PipelineConfig, local: bool) -> Path:
    assert config.model.path is not None
    file = Path(config.model.path) / "config.json"
    if file.is_file():
        return file
    if file.parent.exists() or config.model.path.startswith((".", "/")):
        raise ModelError(
            f"model.path: {config.model.path} has no config.json; give a model's folder or a hub id"
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(
            hf_hub_download(
                config.model.path, "config.json", revision=config.model.revision, local_files_only=local
            )
        )
    except Exception as error:
        raise ModelError(
            f"model.path: the shape of {config.model.path} cannot be read from the hub or its cache "
            f"({type(error).__name__}); give --model-config with a copy of its config.json"
        ) from error


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bounded(file, _MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: is no readable config.json: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file}: must hold an object; got {type(found).__name__}")
    return found


def _from_json(found: dict[str, Any]) -> ModelShape:
    wanted = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [name for name in wanted if not isinstance(found.get(name), int) or found[name] < 1]
    if missing:
        raise ModelError(
            f"config.json: {', '.join(missing)} must be integers above 0; use a decoder-only architecture"
        )
    family = found.get("model_type", "llama")
    if family not in _FAMILIES:
        raise ModelError(
            f"config.json: model_type must be one of {', '.join(_FAMILIES)}, whose memory can be counted; got"
            f" {family}"
        )
    heads, bias = found["num_attention_heads"], bool(found.get("attention_bias", False))
    return ModelShape(
        hidden=found["hidden_size"],
        intermediate=found["intermediate_size"],
        layers=found["num_hidden_layers"],
        heads=heads,
        kv_heads=found.get("num_key_value_heads") or heads,
        head_dim=found.get("head_dim") or found["hidden_size"] // heads,
        vocabulary=found["vocab_size"],
        tied=bool(found.get("tie_word_embeddings", family == "gemma")),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias,
        mlp_bias=bool(found.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
    )
