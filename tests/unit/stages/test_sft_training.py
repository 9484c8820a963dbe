"""What supervised fine-tuning tells of its loss, with a model whose log-probabilities are known.

- the loss of a step and that of the held-out set are means over all target tokens: of all ranks, however
  unevenly they lie on sequences and micro-batches
- a saved model is evaluated from its files, in the precision in which later stages load it
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_core.config import PipelineConfig
from rlhf_core.config.training import SFTConfig
from rlhf_core.models.batching import TokenBatch, TokenSequence
from rlhf_core.models.policy import TokenOutputs
from rlhf_core.stages.sft import evaluate_saved, evaluate_sft, train_step
from tests.support.tiny_llama import save_tiny_llama

ROWS = [TokenSequence.of((1, 1), ids) for ids in ((8,), (2, 4), (1, 3, 5, 7), (6,), (9, 9, 9))]
# 8 + (2 + 4) + (1 + 3 + 5 + 7) + 6 + 27 = 63 over 1 + 2 + 4 + 1 + 3 = 11 tokens, a tenth of a nat for each.
LOSS = 6.3 / 11


class _Tenths:
    """An engine whose loss at a token is a tenth of its number."""

    optimizer = SimpleNamespace(param_groups=[{"lr": 1e-3}])
    skipped_steps = 0
    module = torch.nn.Module()

    def __init__(self, rank: Any) -> None:
        self.rank = rank

    def __call__(self, batch: TokenBatch) -> TokenOutputs:
        return TokenOutputs(batch.labels_N / -10.0, None)

    def train_step(self, losses: Iterator[torch.Tensor], _total: int) -> float:
        list(losses)
        return 1.0


@pytest.mark.parametrize(("budget", "pack"), [(1000, False), (6, False), (6, True)])
def test_the_loss_is_the_mean_over_the_tokens_of_all_ranks(
    budget: int, pack: bool, on_two_ranks: Callable[[Callable[[Any], Any]], Any]
) -> None:
    config = SFTConfig(batch_size=5, micro_batch_tokens=budget, pack=pack)
    step = on_two_ranks(lambda rank: train_step(_Tenths(rank), ROWS, config, 1, 0))  # type: ignore[arg-type]
    assert step["train/loss"] == pytest.approx(LOSS)
    held_out = on_two_ranks(lambda rank: evaluate_sft(_Tenths(rank), ROWS, config, 0))  # type: ignore[arg-type]
    assert held_out == pytest.approx({"eval/loss": LOSS, "eval/perplexity": math.exp(LOSS)})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_is_evaluated_in_the_precision_of_later_stages(dtype: str, tmp_path: Path) -> None:
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
