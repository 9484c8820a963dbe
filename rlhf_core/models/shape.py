"""Sizes and parameter counts of a decoder-only model, from its `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from rlhf_core.config.pipeline import TinyModel
from rlhf_core.errors import ModelError

_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

# Names that the families have for the same thing.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_k")
_OF_AN_EXPERT = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
_OF_A_DENSE_LAYER = ("intermediate_size_mlp", "intermediate_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_EVERY = ("decoder_sparse_step", "interleave_moe_layer_step")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP of a layer."""

    number: int
    active: int
    """Experts of a token."""
    intermediate: int
    """Width of an expert."""
    shared: int
    """Width of the MLP that all tokens have next to their experts; 0 for none."""
    layers: int
    """Layers that have experts. The others have an MLP."""


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta networks in place of the attention of some layers. They have a state of constant size and
    no KV cache.
    """

    key: int
    """Width of all keys, and of all queries."""
    value: int
    """Width of all values."""
    heads: int
    """Heads of values."""
    kernel: int
    """Tokens of the convolution."""
    layers: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped-query attention, gated MLPs or experts, and norms."""

    hidden: int
    intermediate: int
    """Width of an MLP, or of the experts of a token if that is larger."""
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
    gated_output: bool = False
    """Whether the output of the attention has a gate, which `q_proj` computes too (Qwen3-Next)."""
    dense: int = 0
    """Width of the MLP of layers without experts; 0 for `intermediate`."""
    experts: Experts | None = None
    linear_attention: LinearAttention | None = None
    per_layer: int = 0
    """Width of the embedding that each layer has of its own for the tokens (Gemma 3n); 0 for none."""

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def cached_layers(self) -> int:
        """Layers with a KV cache."""
        return self.layers - (self.linear_attention.layers if self.linear_attention is not None else 0)

    @cached_property
    def _modules(self) -> list[tuple[str, int, int, int]]:
        """(name, layers, inputs, outputs) of the linear layers. Experts are not among them, because
        transformers has all experts of a layer in one tensor.
        """
        attention = self.cached_layers
        modules = [
            ("q_proj", attention, self.hidden, self.query * (2 if self.gated_output else 1)),
            ("k_proj", attention, self.hidden, self.kv),
            ("v_proj", attention, self.hidden, self.kv),
            ("o_proj", attention, self.query, self.hidden),
        ]
        if (linear := self.linear_attention) is not None:
            modules += [
                ("in_proj_qkv", linear.layers, self.hidden, 2 * linear.key + linear.value),
                ("in_proj_z", linear.layers, self.hidden, linear.value),
                ("in_proj_a", linear.layers, self.hidden, linear.heads),
                ("in_proj_b", linear.layers, self.hidden, linear.heads),
                ("out_proj", linear.layers, linear.value, self.hidden),
            ]
        widths = [(self.layers, self.dense or self.intermediate)]
        if (experts := self.experts) is not None:
            widths = [(self.layers - experts.layers, widths[0][1]), (experts.layers, experts.shared)]
        for layers, width in widths:
            if layers and width:
                modules += [
                    ("gate_proj", layers, self.hidden, width),
                    ("up_proj", layers, self.hidden, width),
                    ("down_proj", layers, width, self.hidden),
                ]
        return modules

    @property
    def linear_layers(self) -> list[str]:
        """Names of the linear layers of the decoder, as in an adapter's targets."""
        return list(dict.fromkeys(name for name, *_ in self._modules))

    def adapter_parameters(self, r: int, targets: Sequence[str] | None) -> int:
        """Return the parameters of LoRA's A and B on `targets` in every layer; None: on all linear layers.

        Raises ModelError for a target that is not a linear layer.
        """
        unknown = set(targets or ()) - set(self.linear_layers)
        if unknown:
            raise ModelError(
                f"lora.targets: must be some of {', '.join(self.linear_layers)}; got"
                f" {', '.join(sorted(unknown))}"
            )
        wanted = targets or self.linear_layers
        parameters = 0
        for name, layers, inputs, outputs in self._modules:
            if name in wanted:
                parameters += layers * r * (inputs + outputs)
        return parameters

    @cached_property
    def linear_parameters(self) -> int:
        """Parameters of all linear layers of the decoder, which QLoRA quantizes."""
        return sum(layers * inputs * outputs for _, layers, inputs, outputs in self._modules)

    @cached_property
    def _small_parameters(self) -> int:
        """Parameters of biases, norms, routers and convolutions in all layers."""
        attention, linear = self.cached_layers, self.linear_attention
        found = 2 * self.hidden * self.layers
        if self.qkv_bias:
            found += attention * (self.query + 2 * self.kv)
        if self.output_bias:
            found += attention * self.hidden
        if self.mlp_bias:
            found += self.layers * (2 * self.intermediate + self.hidden)
        if self.qk_norm:
            # One weight vector for the queries and one for the keys, which all heads share.
            found += attention * 2 * self.head_dim
        if linear is not None:
            mixed = 2 * linear.key + linear.value
            # As in Qwen3NextGatedDeltaNet of transformers: the convolution, `dt_bias` and `A_log` of each
            # head, and the weight of the norm of a head.
            found += linear.layers * (linear.kernel * mixed + 2 * linear.heads + linear.value // linear.heads)
        if self.experts is not None:
            found += self.experts.layers * self.experts.number * self.hidden
        return found

    @property
    def _per_expert(self) -> int:
        """Parameters of one expert in each layer that has them."""
        if self.experts is None:
            return 0
        return 3 * self.hidden * self.experts.intermediate * self.experts.layers

    @property
    def mlp_rows(self) -> int:
        """Rows of `hidden` numbers in the largest tensor of a layer's MLP or experts."""
        experts = self.experts
        return self.intermediate if experts is None else 2 * experts.number * experts.intermediate

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding, and of a language-model head that is not tied to it."""
        return self.vocabulary * self.hidden

    @cached_property
    def backbone_parameters(self) -> int:
        """Parameters of the model without its language-model head."""
        experts = self._per_expert * (self.experts.number if self.experts is not None else 0)
        # Embeddings of the layers, their projection, and a gate and a projection in each.
        per_layer = self.layers * self.per_layer * (self.vocabulary + 3 * self.hidden)
        decoder = self.linear_parameters + self._small_parameters + experts + per_layer
        return decoder + self.embedding_parameters + self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that compute a token: all but those of the experts that it does not have."""
        if self.experts is None:
            return self.parameters
        return self.parameters - self._per_expert * (self.experts.number - self.experts.active)

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


def count_in_words(parameters: int) -> str:
    """Return a number of parameters in words.

    >>> count_in_words(444_352), count_in_words(1_235_814_400)
    ('444 thousand', '1.24 billion')
    """
    for size, word in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if parameters >= size:
            return f"{parameters / size:.3g} {word}"
    return str(parameters)


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
        tied=True,
    )


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a decoder from the content of its `config.json`, or of that of a multimodal model.

    Norms and biases that only some families have are a small part of a model, and are not all counted. An MLP
    without a gate counts as one with a gate, which has half as many parameters again.

    Raises ModelError if a size is missing, and neither written there nor a default of transformers.
    """
    written = text_settings(config)
    if not _has_sizes(written):
        # Files of the hub leave out what is a default of the class, such as the heads of Gemma 3.
        written = with_defaults(written)
    if not _has_sizes(written):
        missing = [name for name in (*_REQUIRED, "intermediate_size") if not size_of(written, name)]
        raise ModelError(
            f"config.json: {', '.join(missing)} must be integers above 0; use a decoder-only architecture, or"
            " `rlhf run`, which does not need the memory of a model"
        )
    family = str(written.get("model_type", "llama"))
    hidden, layers, heads = (size_of(written, name) for name in _REQUIRED[:3])
    experts, dense = _experts(written), size_of(written, *_OF_A_DENSE_LAYER)
    active = 0 if experts is None else experts.active * experts.intermediate + experts.shared
    linear = _linear_attention(written)
    attention_bias = bool(written.get("attention_bias", False))
    return ModelShape(
        hidden=hidden,
        intermediate=max(active, dense if experts is None or experts.layers < layers else 0),
        layers=layers,
        heads=heads,
        kv_heads=size_of(written, "num_key_value_heads") or heads,
        head_dim=size_of(written, "head_dim") or hidden // heads,
        vocabulary=size_of(written, "vocab_size"),
        # Defaults of each family, which its config.json often leaves out.
        tied=bool(written.get("tie_word_embeddings", family.startswith("gemma"))),
        qkv_bias=attention_bias or family.startswith("qwen2"),
        output_bias=attention_bias,
        mlp_bias=bool(written.get("mlp_bias", False)),
        qk_norm=family.startswith(("qwen3", "gemma3", "gemma4")),
        gated_output=bool(written.get("attn_output_gate", linear is not None)),
        dense=dense,
        experts=experts,
        linear_attention=linear,
        per_layer=size_of(written, "hidden_size_per_layer_input"),
    )


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings`, those of a text model, with the defaults of its configuration in transformers. If
    transformers does not know its type, they are returned as they are.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    # Loading such a model fails with a better message than is possible here. Transformers raises an error of
    # huggingface_hub for a value of the wrong type.
    with suppress(KeyError, TypeError, ValueError, StrictDataclassError):
        return text_settings(AutoConfig.for_model(**settings).to_dict())
    return dict(settings)


def text_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the language model in `settings`, a config.json.

    A multimodal model has them in `text_config`, except whether the head is tied to the embedding.
    """
    text = settings.get("text_config")
    if not isinstance(text, dict):
        return dict(settings)
    tied = {name: settings[name] for name in ("tie_word_embeddings",) if name in settings}
    return {**settings, **text, **tied}


def _has_sizes(settings: Mapping[str, Any]) -> bool:
    mlp = size_of(settings, *_OF_AN_EXPERT)
    return mlp > 0 and all(size_of(settings, name) for name in _REQUIRED)


def size_of(settings: Mapping[str, Any], *names: str) -> int:
    """Return the first of the fields that has an integer above 0, and 0 if none has."""
    found = (value for name in names if type(value := settings.get(name)) is int and value > 0)
    return next(found, 0)


def _experts(settings: Mapping[str, Any]) -> Experts | None:
    number, width = size_of(settings, *_EXPERTS), size_of(settings, *_OF_AN_EXPERT)
    if number < 2:
        return None
    # Some families say how wide the shared expert is, others how many there are of the usual width.
    shared = size_of(settings, "shared_expert_intermediate_size") or width * size_of(settings, *_SHARED)
    if "intermediate_size_mlp" in settings:
        shared = width  # Llama 4 always has one shared expert
    elif settings.get("enable_moe_block"):
        shared = size_of(settings, "intermediate_size")  # Gemma 4 adds the experts to its MLP
    layers = size_of(settings, "num_hidden_layers")
    kinds, indices = settings.get("mlp_layer_types"), settings.get("moe_layers")
    if isinstance(kinds, list):
        layers = kinds.count("sparse")
    elif isinstance(indices, list):
        layers = len(indices)
    else:
        only_mlp = settings.get("mlp_only_layers") or []
        layers = (layers - size_of(settings, "first_k_dense_replace")) // (size_of(settings, *_EVERY) or 1)
        layers -= len(only_mlp)
    return Experts(number, size_of(settings, *_ACTIVE) or 1, width, shared, layers)


def _linear_attention(settings: Mapping[str, Any]) -> LinearAttention | None:
    kinds, heads = settings.get("layer_types"), size_of(settings, "linear_num_value_heads")
    if not isinstance(kinds, list) or not heads:
        return None
    key = size_of(settings, "linear_num_key_heads") * size_of(settings, "linear_key_head_dim")
    value = heads * size_of(settings, "linear_value_head_dim")
    # 4 is the default of transformers.
    kernel = size_of(settings, "linear_conv_kernel_dim") or 4
    return LinearAttention(key, value, heads, kernel, kinds.count("linear_attention"))


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
