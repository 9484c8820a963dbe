"""Score models: where the head reads, how it starts, what is stored with it.

- the score is read at the last real token, whatever pads the row
- a head made from a causal model has mean 0 and standard deviation 1/sqrt(h+1), and no bias
- statistics travel with the saved model and normalise to mean 0 and standard deviation 1
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.score import ScoreStatistics, load_score_model
from tests.tiny_llama import save_tiny_llama


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50}
    return save_tiny_llama(tmp_path_factory.mktemp("causal"), hidden_size=256, **shape)


def _load(folder: Path):  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    return load_score_model(folder, dtype="float32", attention="sdpa", device="cpu")


@torch.no_grad()
def test_the_score_is_read_at_the_last_real_token(causal: Path) -> None:
    model = _load(causal)
    short, long = TokenSequence.of((5, 6), (7,)), TokenSequence.of((1, 2, 3), (4, 5, 6, 7, 8))
    alone = model(collate([short], pad_id=0), "last")
    beside = model(collate([short, long], pad_id=0), "last")[:1]
    torch.testing.assert_close(alone, beside, rtol=0, atol=1e-5)
    other_pad = model(collate([short, long], pad_id=9), "last")[:1]
    torch.testing.assert_close(other_pad, beside, rtol=0, atol=1e-5)


@torch.no_grad()
def test_there_is_one_value_before_each_response_token(causal: Path) -> None:
    values = _load(causal)(collate([TokenSequence.of((5, 6), (7, 8, 9))], pad_id=0), "tokens")
    assert values.shape == (3,)


def test_a_new_head_starts_small_and_has_no_bias(causal: Path) -> None:
    head = _load(causal).lm.score
    assert head.bias is None
    # 256 draws: the sample's deviation is within a quarter of 1/sqrt(257) with near certainty.
    assert head.weight.std().item() == pytest.approx(1 / math.sqrt(257), rel=0.25)


def test_the_statistics_and_the_head_come_back_from_the_saved_model(causal: Path, tmp_path: Path) -> None:
    model = _load(causal)
    model.statistics = ScoreStatistics(2.0, 4.0)
    model.save(tmp_path)
    again = load_score_model(tmp_path, dtype="float32", attention="sdpa", device="cpu")
    assert again.statistics == ScoreStatistics(2.0, 4.0)
    torch.testing.assert_close(again.lm.score.weight, model.lm.score.weight)
    # (10 - 2) / 4 = 2
    assert again.statistics.normalize(torch.tensor([10.0])).item() == 2.0


@torch.no_grad()
def test_a_critic_made_from_a_reward_model_starts_on_the_scale_of_its_normalised_scores(causal: Path) -> None:
    reward, critic = _load(causal), _load(causal)
    reward.statistics = critic.statistics = ScoreStatistics(mean=-3.0, std=0.25)
    critic.fold_statistics()
    # The response's last token read as the value before one more token.
    batch = collate([TokenSequence.of((5, 6), (7, 8))], pad_id=0)
    longer = collate([TokenSequence.of((5, 6, 7, 8), (9,))], pad_id=0)
    normalised = reward.statistics.normalize(reward(batch, "last"))
    torch.testing.assert_close(critic(longer, "tokens"), normalised, rtol=1e-4, atol=1e-4)
    assert critic.statistics == ScoreStatistics()
