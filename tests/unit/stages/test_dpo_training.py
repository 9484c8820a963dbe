"""DPO, for a model whose log-probabilities are known.

- loss, accuracy and implicit rewards are means over all pairs of all ranks, for any micro-batches, packed or
  padded, also where a rank has no pair
- rewards and accuracy are those of log-ratios for every loss; with `length_normalised` those of means over
  the tokens of a response
- the reference is the model before the first step, also after a checkpoint was loaded
- with `early_stop` it ends early, in the weights of the lowest loss
- a checkpoint has the negative held-out loss as its score; without held-out pairs there is none
- pairs are needed, and the key of the stage depends on what it uses only; `register` reads the policy that
  it registers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import is_enabled, pipeline_key, stage_inputs, stage_key
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.training import DPOConfig
from rlhf_core.engines.distributed import Rank
from rlhf_core.errors import ConfigError
from rlhf_core.evaluation.statistics import wilson
from rlhf_core.models.batching import TokenBatch
from rlhf_core.models.policy import TokenOutputs
from rlhf_core.stages.dpo import ReferencedPair, evaluate_dpo, train_dpo, train_step, with_reference
from rlhf_core.stages.training import Training
from rlhf_core.testing import RecordingMetrics, stage_context
from rlhf_core.testing.trainer import ScriptedTrainer, single_rank
from rlhf_core.types import PairExample

PAIRS = [
    PairExample("a", "", (1, 1), (1,), (4, 2)),
    PairExample("b", "", (1,), (5, 5, 5, 5), (3,)),
    PairExample("c", "", (1, 1, 1), (2,), (2,)),
]
REFERENCE = [(-0.3, -0.1), (-1.0, -1.0), (-0.2, -0.2)]
ROWS = [ReferencedPair(pair, sums) for pair, sums in zip(PAIRS, REFERENCE, strict=True)]
# A tenth of a nat for each unit of an id: chosen -0.1, -2.0, -0.2 and rejected -0.6, -0.3, -0.2. With beta 2
# the implicit rewards are 0.4, -2.0, 0.0 and -1.0, 1.4, 0.0, and their gaps 1.4, -3.4, 0.0.
GAPS = (1.4, -3.4, 0.0)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def expected(smoothing: float) -> dict[str, float]:
    losses = [-(1 - smoothing) * log_sigmoid(gap) - smoothing * log_sigmoid(-gap) for gap in GAPS]
    return {
        "loss": sum(losses) / 3,
        "accuracy": 1.5 / 3,
        "rewards/chosen": -1.6 / 3,
        "rewards/rejected": 0.4 / 3,
        "margin": -2.0 / 3,
    }


def tenths(batch: TokenBatch) -> TokenOutputs:
    return TokenOutputs(batch.labels_N / -10.0, None)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(("budget", "pack"), [(1000, False), (12, False), (12, True), (1, True)])
def test_metrics_are_means_over_the_pairs_of_all_ranks(
    budget: int, pack: bool, smoothing: float, on_two_ranks: Callable[[Callable[[Any], Any]], Any]
) -> None:
    config = DPOConfig(
        batch_size=3, beta=2.0, label_smoothing=smoothing, micro_batch_tokens=budget, pack=pack
    )

    def step(rank: Rank) -> Any:
        return train_step(ScriptedTrainer(rank=rank, forward=tenths), ROWS, config, 1, 0)

    trained = on_two_ranks(step)
    wanted = expected(smoothing)
    assert {name: trained[f"train/{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    held_out = on_two_ranks(
        lambda rank: evaluate_dpo(ScriptedTrainer(rank=rank, forward=tenths), ROWS, config, 0)
    )
    interval = wilson(wanted["accuracy"], 3, 0.95)
    wanted |= {"accuracy_low": interval.low, "accuracy_high": interval.high}
    assert held_out == pytest.approx({f"eval/{name}": value for name, value in wanted.items()}, rel=1e-5)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "robust"])
def test_rewards_and_accuracy_are_those_of_log_ratios_for_every_loss(
    loss: Any, pack: bool, on_two_ranks: Callable[[Callable[[Any], Any]], Any]
) -> None:
    smoothing = 0.2 if loss == "robust" else 0.0
    config = DPOConfig(batch_size=3, beta=2.0, loss=loss, label_smoothing=smoothing, pack=pack)
    losses = {
        "sigmoid": [-log_sigmoid(gap) for gap in GAPS],
        "robust": [(0.2 * log_sigmoid(-gap) - 0.8 * log_sigmoid(gap)) / 0.6 for gap in GAPS],
        "ipo": [(gap / 2.0 - 0.25) ** 2 for gap in GAPS],
    }
    wanted = expected(0.0) | {"loss": sum(losses[loss]) / 3}
    trained = on_two_ranks(
        lambda rank: train_step(ScriptedTrainer(rank=rank, forward=tenths), ROWS, config, 1, 0)
    )
    assert {name: trained[f"train/{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    held_out = on_two_ranks(
        lambda rank: evaluate_dpo(ScriptedTrainer(rank=rank, forward=tenths), ROWS, config, 0)
    )
    assert {name: held_out[f"eval/{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("budget", "pack"), [(1000, False), (1, True)])
def test_length_normalised_log_probabilities_are_means_over_the_tokens_of_a_response(
    budget: int, pack: bool, on_two_ranks: Callable[[Callable[[Any], Any]], Any]
) -> None:
    config = DPOConfig(beta=2.0, length_normalised=True, micro_batch_tokens=budget, pack=pack)
    found = on_two_ranks(
        lambda rank: with_reference(ScriptedTrainer(rank=rank, forward=tenths), PAIRS, config, 0)
    )
    # The sums -0.6 and -2.0 are of 2 and 4 tokens.
    means = [-0.1, -0.3, -0.5, -0.3, -0.2, -0.2]
    assert list(chain(*(row.reference for row in found))) == pytest.approx(means, rel=1e-5)
    rows = [ReferencedPair(pair, (0.0, 0.0)) for pair in PAIRS]
    trained = on_two_ranks(
        lambda rank: train_step(ScriptedTrainer(rank=rank, forward=tenths), rows, config, 1, 0)
    )
    gaps = [2 * (c - r) for c, r in zip(means[::2], means[1::2], strict=True)]
    assert trained["train/loss"] == pytest.approx(-sum(map(log_sigmoid, gaps)) / 3, rel=1e-5)
    assert trained["train/rewards/chosen"] == pytest.approx(2 * sum(means[::2]) / 3, rel=1e-5)


def test_the_gradient_is_that_of_the_mean_over_pairs() -> None:
    scale = torch.tensor(1.0, requires_grad=True)
    optimizer = torch.optim.SGD([scale])
    gradients = []

    class Backward(ScriptedTrainer):
        """Computes gradients."""

        @override
        def train_step(self, micro_losses: Iterator[torch.Tensor], total_steps: int) -> float:
            optimizer.zero_grad()
            for loss in micro_losses:
                loss.backward()
            assert scale.grad is not None
            gradients.append(scale.grad.item())
            return 1.0

    trainer = Backward(forward=lambda batch: TokenOutputs(scale * batch.labels_N / -10.0, None))
    with single_rank():
        for budget in (1000, 1):
            config = DPOConfig(batch_size=3, beta=2.0, micro_batch_tokens=budget)
            train_step(trainer, ROWS, config, 1, 0)
    # d loss / d gap = -sigmoid(-gap), and d gap / d scale = beta (chosen - rejected).
    slopes = [2 * 0.5, 2 * -1.7, 0.0]
    wanted = sum(-slope / (1 + math.exp(gap)) for slope, gap in zip(slopes, GAPS, strict=True)) / 3
    assert gradients == pytest.approx([wanted, wanted], rel=1e-5)


class Drifting(ScriptedTrainer):
    """Each step makes every token less likely by a nat."""

    def __call__(self, batch: TokenBatch) -> TokenOutputs:
        return TokenOutputs(batch.labels_N / -10.0 - self.steps_done, None)


def test_the_reference_is_the_model_before_the_first_step(tmp_path: Path) -> None:
    config = DPOConfig(batch_size=1, eval_every=1, checkpoint_every=1)
    metrics = RecordingMetrics()
    context = stage_context(tmp_path, metrics=metrics)

    def train(trainer: ScriptedTrainer) -> dict[str, float]:
        return train_dpo(trainer, PAIRS, PAIRS, config, Training("dpo", 0, 0, context.scratch, context))

    with single_rank():
        references = [row.reference for row in with_reference(Drifting(), PAIRS, config, 0)]
        assert list(chain(*references)) == pytest.approx([-0.1, -0.6, -2.0, -0.3, -0.2, -0.2])
        whole = train(Drifting())
        continued = train(Drifting())  # from the checkpoint of the second of three steps
    # After three steps, each token of a response lost three nats; 6 and 4 tokens in three pairs; beta is 0.1.
    assert whole["rewards/chosen"] == pytest.approx(-0.1 * 3 * 6 / 3)
    assert whole["rewards/rejected"] == pytest.approx(-0.1 * 3 * 4 / 3)
    assert {**continued, "tokens_per_s": 0} == {**whole, "tokens_per_s": 0}
    # With n nats lost the gaps of the three pairs are 0.1 n, -0.3 n and 0.
    losses = [-sum(log_sigmoid(0.1 * gap * n) for gap in (1, -3, 0)) / 3 for n in (1, 2)]
    assert metrics.column("eval/loss")[:2] == pytest.approx(losses)


def test_without_held_out_pairs_it_trains_to_the_end(tmp_path: Path) -> None:
    config = DPOConfig(batch_size=1, eval_every=1, checkpoint_every=1)
    context = stage_context(tmp_path)
    with single_rank():
        found = train_dpo(Drifting(), PAIRS, [], config, Training("dpo", 0, 0, context.scratch, context))
    assert found["pairs"] == 0 and math.isnan(found["accuracy"]) and math.isnan(found["eval_loss"])


def test_with_early_stop_the_weights_of_the_lowest_loss_remain(tmp_path: Path) -> None:
    stop = {"early_stop": {"every": 1, "patience": 2}}
    config = DPOConfig.model_validate({"batch_size": 1, "epochs": 3, **stop})
    context = stage_context(tmp_path)
    trainer = Drifting()
    with single_rank():
        found = train_dpo(trainer, PAIRS, PAIRS, config, Training("dpo", 0, 0, context.scratch, context))
    # Each step raises the loss, so the first of nine steps is the best one and two others follow.
    assert (found["best_step"], trainer.best_step, trainer.steps_done) == (1, 1, 3)
    assert trainer.restored_best


# -- configuration --


RULES_ONLY = {"reward": {"enabled": False}, "ppo": {"rewards": [{"type": "well_formed"}]}}


def config_of(dpo: dict[str, Any], **sections: Any) -> PipelineConfig:
    return config_from_tree({"dpo": dpo, **sections}, "test")


@pytest.mark.parametrize(
    ("dpo", "sections", "message"),
    [
        ({}, {"data": {"preference": []}, **RULES_ONLY}, "is true, but data.preference is empty"),
        ({"deepspeed": {"ranks": 9}, "batch_size": 8}, {}, "must be at most dpo.batch_size"),
        ({"label_smoothing": 0.5}, {}, "dpo.label_smoothing"),
        ({"loss": "robust"}, {}, "dpo.loss: robust needs dpo.label_smoothing"),
        ({"loss": "ipo", "label_smoothing": 0.1}, {}, "dpo.label_smoothing has no effect with dpo.loss=ipo"),
        ({"enabled": False}, {"register": {"policy": "dpo"}}, "got dpo, but dpo.enabled is false"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    dpo: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of({"enabled": True, **dpo}, **sections)


def test_without_the_stage_no_key_contains_it() -> None:
    plain, other, enabled = config_of({}), config_of({"beta": 0.5}), config_of({"enabled": True})
    assert not is_enabled(plain, "dpo") and "dpo" not in stage_inputs(plain, "evaluate")
    assert "dpo" in stage_inputs(enabled, "evaluate") and "dpo" not in stage_inputs(enabled, "register")
    assert pipeline_key(plain, {}) == pipeline_key(other, {}) != pipeline_key(enabled, {})


def test_the_registered_policy_is_an_input_of_register_and_the_other_is_not() -> None:
    ppo, dpo = (config_of({"enabled": True}, register={"policy": policy}) for policy in ("ppo", "dpo"))
    assert set(stage_inputs(ppo, "register")) - set(stage_inputs(dpo, "register")) == {"ppo"}
    assert set(stage_inputs(dpo, "register")) - set(stage_inputs(ppo, "register")) == {"dpo"}
    assert stage_inputs(ppo, "evaluate") == stage_inputs(dpo, "evaluate")
    plain = config_of({"enabled": True})
    assert stage_key(plain, "register", {}, {}) == stage_key(ppo, "register", {}, {})
    assert stage_key(plain, "register", {}, {}) != stage_key(dpo, "register", {}, {})


@pytest.mark.parametrize(
    ("sections", "changes"),
    [
        ({"reward": {"epochs": 3}}, False),
        ({"ppo": {"steps": 3}}, False),
        ({"dpo": {"enabled": True, "micro_batch_tokens": 9, "eval_every": 3}}, False),
        ({"dpo": {"enabled": True, "beta": 0.2}}, True),
        ({"dpo": {"enabled": True, "early_stop": None}}, False),
        ({"dpo": {"enabled": True, "early_stop": {}}}, True),
        ({"reward": {"judge": {}}}, True),
    ],
)
def test_the_key_depends_on_what_the_stage_uses(sections: dict[str, Any], changes: bool) -> None:
    before = config_of({"enabled": True})
    after = config_from_tree({"dpo": {"enabled": True}, **sections}, "test")
    same = stage_key(before, "dpo", {}, {}) == stage_key(after, "dpo", {}, {})
    assert same != changes


def test_halves_of_the_pairs_have_their_own_keys() -> None:
    keys = set()
    for fraction in (0.3, 0.5):
        config = config_of({"enabled": True}, reward={"judge": {"fraction": fraction}})
        keys.add(stage_key(config, "dpo", {}, {}))
    assert len(keys) == 2
