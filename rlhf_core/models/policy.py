"""The policy (and the reference): a Hugging Face causal language model that returns log-probabilities of
labels.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhf_core.algo.logprobs import token_entropy, token_logprobs
from rlhf_core.config.base import HEAD_CHUNK
from rlhf_core.config.training import LoraConfig, Packing
from rlhf_core.errors import ModelError
from rlhf_core.models.architectures import without_model_and_head
from rlhf_core.models.batching import TokenBatch
from rlhf_core.models.linear import use_float32_head, use_onednn
from rlhf_core.models.saving import WeightStream, save_model
from rlhf_core.models.selftest import tested, without_dropout
from rlhf_core.models.sharded import Shards
from rlhf_core.models.weights import (
    load_pretrained,
    loading_options,
    model_config,
    model_errors,
    refuse_non_finite,
    self_test_context,
)

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class TokenOutputs(NamedTuple):
    """Results for the selected tokens."""

    logprobs_N: torch.Tensor
    """(N,) log p(label), float32."""
    entropy_N: torch.Tensor | None
    """(N,) entropy of the distribution, float32; None if it was not requested."""


class Policy(nn.Module):
    """Wraps a causal LM so that one `forward`, through DeepSpeed's hooks too, gives log-probabilities.

    The language-model head runs on the selected positions only, so prompts and padding cost no logits. The
    logits of many positions are computed in parts of at most `head_chunk`.

    Args:
        lm: The causal LM.
        head_chunk: Largest number of logits that are computed at once. Those of one token always are.
    """

    lora: LoraConfig | None = None
    """The adapter, if there is one (`models.adapters`)."""
    packs = True
    """Whether sequences can share a row (`models.selftest`)."""

    def __init__(self, lm: Any, head_chunk: int = HEAD_CHUNK) -> None:
        super().__init__()
        self.lm = lm
        self._head_chunk = head_chunk

    def forward(
        self, batch: TokenBatch, temperature: float = 1.0, with_entropy: bool = False
    ) -> TokenOutputs:
        inputs = batch.model_inputs(self.lm.config._attn_implementation)
        hidden_BLH = self.lm.model(**inputs).last_hidden_state
        # Positions and not a mask: the number of its tokens would have to be read from the GPU.
        hidden_NH = hidden_BLH.flatten(0, 1).index_select(0, batch.select_N)
        # A row of logits has the size of the vocabulary, so that the limit is one of memory.
        rows = max(1, self._head_chunk // self.lm.config.get_text_config().vocab_size)
        parts = self._parts(len(hidden_NH), rows)
        if parts <= 1:
            return self._of_labels(hidden_NH, batch.labels_N, temperature, with_entropy)
        # Slices beyond the end are empty, where another rank has more parts.
        outputs = []
        for part in range(parts):
            output = checkpoint(
                self._of_labels,
                hidden_NH[part * rows : (part + 1) * rows],
                batch.labels_N[part * rows : (part + 1) * rows],
                temperature,
                with_entropy,
                use_reentrant=False,
                # The head draws no random numbers.
                preserve_rng_state=False,
            )
            outputs.append(output)
        entropy = torch.cat([output.entropy_N for output in outputs]) if with_entropy else None
        return TokenOutputs(torch.cat([output.logprobs_N for output in outputs]), entropy)

    def _of_labels(
        self, hidden_NH: torch.Tensor, labels_N: torch.Tensor, temperature: float, with_entropy: bool
    ) -> TokenOutputs:
        # The head is called as a module, so that the hooks of ZeRO-3 gather its weight.
        logits_NV = logits_of(self.lm.lm_head(hidden_NH), self.lm.config.get_text_config())
        entropy = token_entropy(logits_NV, temperature) if with_entropy else None
        return TokenOutputs(token_logprobs(logits_NV, labels_N, temperature), entropy)

    def _parts(self, tokens: int, rows: int) -> int:
        """Return how often the head is called. Where ZeRO-3 gathers its weight for each call, it is called as
        often on every rank.
        """
        parts = math.ceil(tokens / rows)
        if not hasattr(self.lm.lm_head.weight, "ds_id") or not dist.is_initialized():
            return parts
        most = torch.tensor(parts, device=self.lm.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def save(self, folder: Path, weights: WeightStream | None = None) -> None:
        """Write the model in Hugging Face layout, with `weights` or with its own, if they are whole."""
        save_model(self.lm, folder, weights)


def load_policy(
    folder: Path | str,
    *,
    dtype: str,
    attention: str,
    device: str,
    revision: str | None = None,
    quantize: str | None = None,
    pack: Packing = "auto",
    head_dtype: str = "model",
    shards: Shards | None = None,
) -> Policy:
    """Load a pretrained causal LM, or create random weights if the folder only contains a `config.json` (seed
    torch first).

    Args:
        folder: A model folder, or a hub id.
        dtype: Data type of the weights, a name of `DTYPES`.
        attention: transformers' name of the implementation.
        device: Device of a quantized model.
        revision: Commit or branch of a hub id.
        quantize: `nf4` stores linear layers in 4 bits (`models.weights`).
        pack: Whether rows hold several sequences (`models.selftest`).
        head_dtype: Precision of the logits. With `float32`, they are not rounded to `dtype`.
        shards: Cuts the parameters while they are read (`models.sharded`); loading is then a collective
            operation. Random and quantized weights are not cut.

    Raises:
        ModelError: If the weights do not match the model, or if the self-test fails.
    """
    from transformers import AutoModelForCausalLM

    if is_config_only(folder) or quantize is not None:
        shards = None
    with model_errors(folder):
        config = model_config(folder, attention=attention, revision=revision)
        if is_config_only(folder):
            lm = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], trust_remote_code=False)
        else:
            options = {"dtype": DTYPES[dtype], **loading_options(quantize, DTYPES[dtype], device)}
            lm = load_pretrained(
                AutoModelForCausalLM, folder, config, revision=revision, shards=shards, **options
            )
    if not hasattr(lm, "lm_head") or not hasattr(lm, "model"):
        raise ModelError(f"model.path: {without_model_and_head(type(lm).__name__)}")
    policy = Policy(use_onednn(without_dropout(lm)).to(device))
    if head_dtype == "float32":
        use_float32_head(lm)
    refuse_non_finite(folder, lm)
    # After all changes of classes and precision, because the test is of the model as it will be trained.
    with self_test_context(folder, lm, shards):
        policy.packs = tested(_checked(lm), pack)
    return policy


def logits_of(head_output: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the logits (..., V) of a model from the output (..., V) of its head.

    | field of `config` | models | logits |
    |---|---|---|
    | `logits_scaling` | Granite | divided by it |
    | `logit_scale` | Cohere | multiplied by it |
    | `final_logit_softcapping` | Gemma 2 | `cap * tanh(output / cap)` |

    Other models return the output itself. As transformers computes it, in the data type of the output.
    """
    scaling, scale = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    cap = getattr(config, "final_logit_softcapping", None)
    logits = head_output
    if scaling is not None:
        logits = logits / scaling
    if scale is not None:
        logits = logits * scale
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


@torch.no_grad()
def _checked(lm: Any) -> Any:
    """Return `lm`. `Policy` calls only its head and `logits_of`, so ModelError is raised if the model's own
    logits are others.
    """
    training = lm.training
    lm.eval()
    config = lm.config.get_text_config()
    ids = torch.arange(8, device=lm.device).remainder(config.vocab_size)[None]
    own = lm(input_ids=ids).logits.float()
    computed = logits_of(lm.lm_head(lm.model(input_ids=ids).last_hidden_state), config).float()
    lm.train(training)
    if not torch.allclose(own, computed, rtol=1e-4, atol=1e-6):
        raise ModelError(
            f"model.path: {type(lm).__name__} changes the output of its `lm_head` in a way that training here"
            " would leave out, or ignores a field of config.json that scales or caps logits (logits_scaling,"
            " logit_scale, final_logit_softcapping); use another architecture, such as Llama, Qwen or Mistral"
        )
    return lm


def is_config_only(folder: Path | str) -> bool:
    """Return whether `path` is a local folder with a `config.json` but without weights."""
    path = Path(folder)
    # Nor an index of shards: a folder that has lost its weights must not get random ones.
    return (path / "config.json").is_file() and not any(path.glob("*.safetensors*"))
