"""The loss of supervised fine-tuning, for a model whose log-probabilities are known.

- the losses of a step and of the held-out set are means over all target tokens of all ranks, for any
  distribution over sequences and micro-batches
- a saved model is evaluated from its files, in the precision of later stages
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config import PipelineConfig
from rlhf_core.config.training import SFTConfig
from rlhf_core.engines.distributed import Rank
from rlhf_core.models.batching import TokenBatch, TokenSequence
from rlhf_core.models.policy import TokenOutputs
from rlhf_core.stages.sft import evaluate_saved, evaluate_sft, train_step
from rlhf_core.testing.trainer import ScriptedTrainer
from tests.support.tiny_llama import save_tiny_llama

ROWS = [TokenSequence.of((1, 1), ids) for ids in ((8,), (2, 4), (1, 3, 5, 7), (6,), (9, 9, 9))]
# 8 + (2 + 4) + (1 + 3 + 5 + 7) + 6 + 27 = 63 over 1 + 2 + 4 + 1 + 3 = 11 tokens, a tenth of a nat for each.
LOSS = 6.3 / 11


def tenths(batch: TokenBatch) -> TokenOutputs:
    """A model whose loss at a token is a tenth of its id."""
    return TokenOutputs(batch.labels_N / -10.0, None)


@pytest.mark.parametrize(("budget", "pack"), [(1000, False), (6, False), (6, True)])
def test_loss_is_the_mean_over_the_tokens_of_all_ranks(
    budget: int, pack: bool, on_two_ranks: Callable[[Callable[[Any], Any]], Any]
) -> None:
    config = SFTConfig(batch_size=5, micro_batch_tokens=budget, pack=pack)

    def trainer(rank: Rank) -> ScriptedTrainer:
        return ScriptedTrainer(rank=rank, forward=tenths)

    step = on_two_ranks(lambda rank: train_step(trainer(rank), ROWS, config, 1, 0))
    assert step["train/loss"] == pytest.approx(LOSS)
    held_out = on_two_ranks(lambda rank: evaluate_sft(trainer(rank), ROWS, config, 0))
    assert held_out == pytest.approx({"eval/loss": LOSS, "eval/perplexity": math.exp(LOSS)})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_model_is_evaluated_in_the_precision_of_later_stages(dtype: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_tiny_llama(tmp_path, dtype="float32")
    config = PipelineConfig.model_validate_json(json.dumps({"sft": {"deepspeed": {"dtype": dtype}}}))
    found = evaluate_saved(config, tmp_path, ROWS, 0, "cpu")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    losses = []
    for row in ROWS:
        with torch.no_grad():
            logprobs = lm(torch.tensor([row.input_ids])).logits[0].float().log_softmax(-1)
        losses += [-logprobs[i - 1, row.input_ids[i]].item() for i in range(2, len(row))]
    assert found["eval/loss"] == pytest.approx(sum(losses) / 11, abs=1e-5 if dtype == "float32" else 1e-2)
