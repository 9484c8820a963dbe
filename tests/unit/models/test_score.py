"""Score models: where the head reads, how it starts, what is stored with it.

- the score is read at the last real token, whatever pads the row
- a head made from a causal model has mean 0 and standard deviation 1/sqrt(h+1), and no bias
- statistics of scores travel with the saved model and normalise to mean 0 and standard deviation 1
- the head of a model in bfloat16 computes in float32, with an adapter too, and folding statistics in rounds
  nothing
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rlhf_core.config.training import LoraConfig
from rlhf_core.models.adapters import add_adapter
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.score import ScoreStatistics, load_score_model
from tests.support.tiny_llama import save_tiny_llama


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50}
    return save_tiny_llama(tmp_path_factory.mktemp("causal"), hidden_size=256, **shape)


def _load(folder: Path, dtype: str = "float32"):  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    return load_score_model(folder, dtype=dtype, attention="sdpa", device="cpu")


@torch.no_grad()
def test_the_score_is_read_at_the_last_real_token(causal: Path) -> None:
    model = _load(causal)
    short, long = TokenSequence.of((5, 6), (7,)), TokenSequence.of((1, 2, 3), (4, 5, 6, 7, 8))
    alone = model(collate([short], pad_id=0), "last")
    with_longer = model(collate([short, long], pad_id=0), "last")[:1]
    torch.testing.assert_close(alone, with_longer, rtol=0, atol=1e-5)
    other_pad = model(collate([short, long], pad_id=9), "last")[:1]
    torch.testing.assert_close(other_pad, with_longer, rtol=0, atol=1e-5)


@torch.no_grad()
def test_there_is_one_value_before_each_response_token(causal: Path) -> None:
    values = _load(causal)(collate([TokenSequence.of((5, 6), (7, 8, 9))], pad_id=0), "tokens")
    assert values.shape == (3,)


def test_a_new_head_starts_small_and_has_no_bias(causal: Path) -> None:
    head = _load(causal).lm.score
    assert head.bias is None
    # 256 draws: the sample's deviation is within a quarter of 1/sqrt(257) with near certainty.
    assert head.weight.std().item() == pytest.approx(1 / math.sqrt(257), rel=0.25)


def test_scores_normalised_by_their_own_statistics_have_mean_0_and_standard_deviation_1() -> None:
    scores = torch.tensor([[0.0, 2.0], [4.0, 10.0]])
    # Mean 16 / 4; squared deviations 16 + 4 + 0 + 36 = 56, over 3.
    statistics = ScoreStatistics.of(scores)
    assert (statistics.mean, statistics.std) == pytest.approx((4.0, math.sqrt(56 / 3)))
    normalised = statistics.normalize(scores)
    assert (normalised.mean().item(), normalised.std().item()) == pytest.approx((0.0, 1.0), abs=1e-6)


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
    critic.has_new_head = False
    critic.become_critic(1.0)
    # The response's last token read as the value before one more token.
    batch = collate([TokenSequence.of((5, 6), (7, 8))], pad_id=0)
    longer = collate([TokenSequence.of((5, 6, 7, 8), (9,))], pad_id=0)
    normalised = reward.statistics.normalize(reward(batch, "last"))
    torch.testing.assert_close(critic(longer, "tokens"), normalised, rtol=1e-4, atol=1e-4)
    assert critic.statistics == ScoreStatistics()


# Two hundred responses, more than the 128 numbers that bfloat16 has between two powers of two.
MANY = collate([TokenSequence.of((5, 6), (7 + i % 40, 3 + i // 40)) for i in range(200)], pad_id=0)


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weight", [0.5, -3.0])
def test_a_critic_starts_on_the_scale_of_the_weighted_scores(causal: Path, dtype: str, weight: float) -> None:
    reward, critic = _load(causal, dtype), _load(causal, dtype)
    reward.statistics = critic.statistics = ScoreStatistics(mean=-3.0, std=0.25)
    critic.has_new_head = False
    critic.become_critic(weight)
    normalised = reward.statistics.normalize(reward(MANY, "tokens"))
    torch.testing.assert_close(critic(MANY, "tokens"), weight * normalised, rtol=1e-4, atol=1e-4)


def test_a_critic_without_a_reward_model_starts_with_values_of_0_and_learns(causal: Path) -> None:
    critic = _load(causal)
    assert critic.has_new_head
    critic.become_critic(1.0)
    values = critic(MANY, "tokens")
    assert not values.any()
    (values - 1).square().mean().backward()
    assert critic.lm.score.weight.grad.abs().sum() > 0


def test_a_saved_score_model_has_no_new_head(causal: Path, tmp_path: Path) -> None:
    _load(causal).save(tmp_path)
    assert not _load(tmp_path).has_new_head


@torch.no_grad()
def _exact(model, at: str = "last") -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
    """What the head makes of the model's own hidden states, in float64, and how far a sum in float32 may be
    off in whatever order: 256 products, 2^-24 of their absolute sum for each.
    """
    hidden = model.lm.model(**MANY.model_inputs("sdpa")).last_hidden_state.flatten(0, 1)
    chosen, weight = (
        hidden[MANY.last_S if at == "last" else MANY.select_N].double(),
        model.lm.score.weight.double(),
    )
    return (chosen @ weight.T).squeeze(1), 256 * 2**-24 * (chosen.abs() @ weight.abs().T).squeeze(1)


@torch.no_grad()
@pytest.mark.parametrize("lora", [None, LoraConfig(r=2)])
def test_bfloat16_leaves_as_many_different_scores_as_float32(causal: Path, lora: LoraConfig | None) -> None:
    model = add_adapter(_load(causal, "bfloat16"), lora)
    scores = model(MANY, "last")
    assert scores.dtype == torch.float32
    assert len(scores.unique()) == len(add_adapter(_load(causal), lora)(MANY, "last").unique()) == 200
    exact, bound = _exact(model)
    assert ((scores - exact).abs() <= bound).all()
    assert bound.max() < 2**-9 * scores.abs().max() / 4, "the bound separates bfloat16 from float32"


@torch.no_grad()
def test_a_critic_in_bfloat16_starts_with_the_normalised_scores_unrounded(causal: Path) -> None:
    critic = _load(causal, "bfloat16")
    exact, bound = _exact(critic, "tokens")
    critic.statistics = ScoreStatistics(mean=-3.0, std=0.3)
    critic.has_new_head = False
    critic.become_critic(1.0)
    # Twice: the division and the offset round in float32 as well.
    assert ((critic(MANY, "tokens") - (exact + 3.0) / 0.3).abs() <= 2 * bound / 0.3).all()
    # The weights take 2^-2 of 0.3, so that the optimizer's steps are as large as in float32, to a factor of
    # 2^0.5.
    assert critic.lm.score.weight.std().item() == pytest.approx(4 / math.sqrt(257), rel=0.25)


def test_gradients_reach_a_head_and_a_backbone_in_bfloat16(causal: Path) -> None:
    model = _load(causal, "bfloat16")
    model(MANY, "last").square().mean().backward()
    for parameter in (model.lm.score.weight, model.lm.model.norm.weight):
        assert parameter.grad.dtype == torch.bfloat16
        assert parameter.grad.abs().sum() > 0
