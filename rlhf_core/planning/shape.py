"""The shape of the model, from its `config.json`: what memory and time are calculated from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.errors import ModelError


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated MLPs (Llama, Qwen, Mistral, ...)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    attention_bias: bool = False

    @property
    def layer_parameters(self) -> int:
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + 2 * kv)
        biases = query + 2 * kv if self.attention_bias else 0
        return attention + biases + 3 * self.hidden * self.intermediate + 2 * self.hidden

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

    @property
    def kv_width(self) -> int:
        """Numbers that one token adds to the KV cache, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def shape_of(config: PipelineConfig, given: Path | None = None) -> ModelShape:
    """`given`: a `config.json` to use instead of the model's own. Raises ModelError if there is none to be read."""
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
    return _from_json(_read(given or _config_file(config)))


def _config_file(config: PipelineConfig) -> Path:
    assert config.model.path is not None
    local = Path(config.model.path).expanduser() / "config.json"
    if local.is_file():
        return local
    if local.parent.exists() or config.model.path.startswith((".", "/", "~")):
        raise ModelError(f"model.path: {config.model.path} has no config.json; give a model's folder or a hub id")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(config.model.path, "config.json", revision=config.model.revision))
    except Exception as error:
        raise ModelError(
            f"model.path: the shape of {config.model.path} cannot be read from the hub or its cache "
            f"({type(error).__name__}); give --model-config with a copy of its config.json"
        ) from error


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: is no readable config.json: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file}: must hold an object; got {type(found).__name__}")
    return found


def _from_json(found: dict[str, Any]) -> ModelShape:
    wanted = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [name for name in wanted if not isinstance(found.get(name), int)]
    if missing:
        raise ModelError(f"config.json: {', '.join(missing)} must be integers; use a decoder-only architecture")
    heads = found["num_attention_heads"]
    return ModelShape(
        hidden=found["hidden_size"],
        intermediate=found["intermediate_size"],
        layers=found["num_hidden_layers"],
        heads=heads,
        kv_heads=found.get("num_key_value_heads") or heads,
        head_dim=found.get("head_dim") or found["hidden_size"] // heads,
        vocabulary=found["vocab_size"],
        tied=bool(found.get("tie_word_embeddings", False)),
        attention_bias=bool(found.get("attention_bias", found.get("model_type") == "qwen2")),
    )
