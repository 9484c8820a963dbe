"""Sizes and parameter counts of a decoder-only model, from its `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from rlhf_core.config.pipeline import TinyModel
from rlhf_core.errors import ModelError

_FAMILIES = ("gemma", "llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose parameters are counted. The tests compare the counts with transformers for each."""
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


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
        """(inputs, outputs) of each linear layer of a decoder layer, by the name in an adapter's targets."""
        return {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.kv),
            "v_proj": (self.hidden, self.kv),
            "o_proj": (self.query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        weights = sum(inputs * outputs for inputs, outputs in self.linear_layers.values())
        biases = 0
        if self.qkv_bias:
            biases += self.query + 2 * self.kv
        if self.output_bias:
            biases += self.hidden
        if self.mlp_bias:
            biases += 2 * self.intermediate + self.hidden
        norms = 2 * self.hidden
        if self.qk_norm:
            # One weight vector for the queries and one for the keys, which all heads share.
            norms += 2 * self.head_dim
        return weights + biases + norms

    def adapter_parameters(self, r: int, targets: Sequence[str] | None) -> int:
        """Return the parameters of LoRA's A and B on `targets` in every layer; None: on all linear layers.

        Raises ModelError for a target that is not a linear layer.
        """
        layers = self.linear_layers
        unknown = set(targets or ()) - set(layers)
        if unknown:
            raise ModelError(
                f"lora.targets: must be some of {', '.join(layers)}; got {', '.join(sorted(unknown))}"
            )
        return self.layers * sum(r * sum(layers[name]) for name in targets or layers)

    @cached_property
    def linear_parameters(self) -> int:
        """Parameters of all linear layers of the decoder, which QLoRA quantizes."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linear_layers.values())

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding, and of a language-model head that is not tied to it."""
        return self.vocabulary * self.hidden

    @cached_property
    def backbone_parameters(self) -> int:
        """Parameters of the model without its language-model head."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the causal language model."""
        if self.tied:
            return self.backbone_parameters
        return self.backbone_parameters + self.embedding_parameters

    @property
    def score_parameters(self) -> int:
        """Parameters of the reward model or the critic: a backbone and one output."""
        return self.backbone_parameters + self.hidden


def tiny_shape(tiny: TinyModel) -> ModelShape:
    """Return the shape of the model from scratch."""
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


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model from the content of its `config.json`.

    Raises ModelError for other architectures than those whose parameters can be counted.
    """
    missing = [name for name in _REQUIRED if not isinstance(config.get(name), int) or config[name] < 1]
    if missing:
        raise ModelError(
            f"config.json: {', '.join(missing)} must be integers above 0; use a decoder-only architecture"
        )
    family = config.get("model_type", "llama")
    if family not in _FAMILIES:
        raise ModelError(
            f"config.json: model_type must be one of {', '.join(_FAMILIES)}, whose memory can be counted; got"
            f" {family}; `rlhf run` accepts others too, and does not check their memory"
        )
    heads = config["num_attention_heads"]
    attention_bias = bool(config.get("attention_bias", False))
    return ModelShape(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        # Defaults of each family, which its config.json often leaves out.
        tied=bool(config.get("tie_word_embeddings", family == "gemma")),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
    )


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return configurations of public models by the id on the hub, so that `rlhf plan` needs no download.

    Each is the part of the model's `config.json` on the hub that `shape_from_config` reads. The tests compare
    the number of parameters with that of the published weights.
    """
    models: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("known_shapes.json").read_text())
    return models


def known_shape(name: str) -> ModelShape | None:
    """Return the shape of a model by its id on the hub, with or without the owner, in any case."""
    wanted = name.lower()
    for known, settings in known_models().items():
        names = {known.lower(), known.partition("/")[2].lower()}
        if wanted in names | {each.removesuffix("-base").removeprefix("meta-") for each in names}:
            return shape_from_config(settings)
    return None
