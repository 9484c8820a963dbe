"""The update of one rank with a model of two tables, compared with losses that are computed token by token.

- the loss uses each setting of the policy: unequal clips, dual clip, importance weights, entropy bonus, KL
  and its coefficient, aggregation
- new log-probabilities and entropy are computed at the sampling temperature
- the clip of the critic's values is used as configured
- the learning rate schedules of policy and critic count their own optimizer steps, the critic's with its
  warm-up
- the clip fraction counts the clipped tokens; splitting and packing change nothing
- between forward and backward pass no number is read, which would wait for a GPU
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_core.config.load import config_from_tree
from rlhf_core.models.batching import TokenBatch
from rlhf_core.models.policy import TokenOutputs
from rlhf_core.ppo.training.loss_step import (
    OptimizerStep,
    TrainSample,
    UpdateSettings,
    update_critic,
    update_policy,
)

VOCABULARY = 11
TEMPERATURE = 0.7
PROMPT = (1, 2)
RESPONSES = ((3, 4, 5), (6, 7), (8,))
RATIOS = ((0.5, 1.5, 5.0), (0.5, 1.5), (0.98,))
ADVANTAGES = ((-1.0, 2.0, -0.5), (0.75, -1.25), (1.5,))
# Held: 0.5 with A < 0 at 1 - 0.1, 1.5 with A > 0 at 1 + 0.3, 5.0 with A < 0 at 2 (the dual clip); the others
# are free.
WEIGHTS = ((0.5, 1.25, 2.0), (1.75, 0.25), (0.8,))
REFERENCE = ((-1.0, -2.0, -3.0), (-0.5, -1.5), (-2.5,))
OFFSETS = ((0.05, 0.4, -0.4), (0.4, -0.4), (-0.1,))
"""Of the new values from the old ones."""
RETURNS = ((0.1, -1.0, 2.0), (1.5, -2.0), (0.3,))
SEQUENCES = float(len(RESPONSES))
CUTS = pytest.mark.parametrize("micro_batches", [[[0, 1, 2]], [[2, 0], [], [1]]])


class Tables:
    """A bigram model behind the engine's interface: the next token, and the value, depend on the last token
    alone.
    """

    rank = SimpleNamespace(torch_device=torch.device("cpu"))
    grad_nonfinite = False

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.logits_VV = torch.randn(VOCABULARY, VOCABULARY, generator=generator).requires_grad_()
        self.values_V = torch.randn(VOCABULARY, generator=generator).requires_grad_()
        self.loss = 0.0
        self.total = 0

    def __call__(self, batch: TokenBatch, how: float | str, with_entropy: bool = False) -> Any:
        last_N = batch.input_ids_BL.flatten()[batch.select_N]
        if how == "tokens":
            return self.values_V[last_N]
        assert isinstance(how, float)
        logprobs_NV = torch.log_softmax(self.logits_VV[last_N] / how, dim=1)
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(1)
        of_labels_N = logprobs_NV.gather(1, batch.labels_N.unsqueeze(1)).squeeze(1)
        return TokenOutputs(of_labels_N, entropy_N if with_entropy else None)

    def train_step(self, losses: Iterator[torch.Tensor], total: int) -> float:
        self.total = total
        for loss in losses:
            self.loss += loss.item()
            loss.backward()
        return 1.0


def config(**ppo: Any) -> UpdateSettings:
    tree = {
        "temperature": TEMPERATURE,
        "clip_low": 0.1,
        "clip_high": 0.3,
        "dual_clip": 2.0,
        "value_clip": 0.25,
        "importance": "truncate",
        "aggregation": "seq-mean-token-sum",
        "entropy_coef": 0.05,
        "kl": {"place": "loss", "estimator": "k2"},
    }
    return UpdateSettings.of(config_from_tree({"ppo": {**tree, **ppo}}, "test").ppo)


def tokens() -> Iterator[tuple[int, int, int, int]]:
    """(response, place in it, last token, label)"""
    for i, response in enumerate(RESPONSES):
        for t, label in enumerate(response):
            yield i, t, (*PROMPT, *response)[t + 1], label


def engine_of(tables: Tables) -> Any:
    """Return the tables, typed as a `TrainingEngine`."""
    return tables


def samples(tables: Tables) -> list[TrainSample]:
    old: list[list[float]] = [[] for _ in RESPONSES]
    old_values: list[list[float]] = [[] for _ in RESPONSES]
    for i, t, last, label in tokens():
        new = torch.log_softmax(tables.logits_VV[last] / TEMPERATURE, dim=0)[label].item()
        old[i].append(new - math.log(RATIOS[i][t]))
        old_values[i].append(tables.values_V[last].item() - OFFSETS[i][t])
    rows = zip(RESPONSES, old, ADVANTAGES, REFERENCE, RETURNS, old_values, WEIGHTS, strict=True)
    return [TrainSample(PROMPT, ids, *(np.array(r, dtype=np.float32) for r in row)) for ids, *row in rows]


@CUTS
@pytest.mark.parametrize("pack", [True, False])
def test_the_policys_loss_is_the_one_written_out_here(micro_batches: list[list[int]], pack: bool) -> None:
    ppo, tables, written = config(pack=pack), Tables(), Tables()
    given = samples(tables)
    sums = update_policy(
        engine_of(tables), given, [OptimizerStep(micro_batches, SEQUENCES)], ppo, 0, kl_coef=0.2
    )

    loss = torch.zeros(())
    for i, t, last, label in tokens():
        logprobs_V = torch.log_softmax(written.logits_VV[last] / 0.7, dim=0)
        advantage, old = ADVANTAGES[i][t], float(given[i].old_logprobs[t])
        ratio = (logprobs_V[label] - old).exp()
        surrogate = torch.min(ratio * advantage, ratio.clamp(0.9, 1.3) * advantage)
        if advantage < 0:
            surrogate = surrogate.clamp(min=2.0 * advantage)
        entropy = -(logprobs_V.exp() * logprobs_V).sum()
        k2 = (logprobs_V[label] - REFERENCE[i][t]).square() / 2
        loss = loss - WEIGHTS[i][t] * surrogate - 0.05 * entropy + 0.2 * k2
    loss = loss / 3
    loss.backward()

    assert tables.loss == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(tables.logits_VV.grad, written.logits_VV.grad, rtol=1e-5, atol=1e-6)
    assert sums["clipped"] == pytest.approx(2.0)


@CUTS
@pytest.mark.parametrize("clip", [0.25, None])
@pytest.mark.parametrize("warming", [False, True])
def test_the_critics_loss_is_the_one_written_out_here(
    micro_batches: list[list[int]], clip: float | None, warming: bool
) -> None:
    tables, written = Tables(), Tables()
    given = samples(tables)
    steps = [OptimizerStep(micro_batches, SEQUENCES)]
    sums = update_critic(engine_of(tables), given, steps, config(value_clip=clip), 0, clip_values=not warming)
    clip = None if warming else clip

    loss, held = torch.zeros(()), 0
    for i, t, last, _ in tokens():
        value, wanted = written.values_V[last], RETURNS[i][t]
        old = float(given[i].old_values[t])
        error = (value - wanted).square()
        if clip is not None:
            near = (old + (value - old).clamp(-0.25, 0.25) - wanted).square()
            held += bool(near > error)
            error = torch.max(error, near)
        loss = loss + error / 2
    loss = loss / 3
    loss.backward()

    assert tables.loss == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(tables.values_V.grad, written.values_V.grad, rtol=1e-5, atol=1e-6)
    assert sums["clipped"] == pytest.approx(held)
    assert (held > 0) == (clip is not None)


def test_the_critic_schedule_includes_its_warm_up() -> None:
    ppo = config(steps=5, critic_warmup_steps=2, epochs=3, minibatches=4)
    steps = [OptimizerStep([[0, 1, 2]], SEQUENCES)]
    policy, critic = Tables(), Tables()
    update_policy(engine_of(policy), samples(policy), steps, ppo, 0)
    update_critic(engine_of(critic), samples(critic), steps, ppo, 0)
    assert (policy.total, critic.total) == ((5 - 2) * 3 * 4, 5 * 3 * 4)


WAITING = frozenset(
    (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "equal",
        "repeat_interleave",
    )
)


class Waits(TorchDispatchMode):
    """Stores the operations that wait for a GPU: `WAITING`, and indexing with a mask."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put_") else ()
        if name in WAITING or any(index is not None and index.dtype == torch.bool for index in indices):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Watched(Tables):
    """Tables whose micro-batches are watched from the forward pass to the end of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = Waits()

    def train_step(self, losses: Iterator[torch.Tensor], total: int) -> float:
        with self.waits:
            for loss in losses:
                loss.backward()
        return 1.0


@pytest.mark.parametrize("pack", [True, False])
def test_a_micro_batch_does_not_wait_for_the_gpu(pack: bool) -> None:
    ppo, steps = config(pack=pack), [OptimizerStep([[0, 1], [2], []], SEQUENCES)] * 2
    for update in (update_policy, update_critic):
        watched, tables = Watched(), Tables()
        found: dict[str, float] = update(engine_of(watched), samples(tables), steps, ppo, 0)
        assert watched.waits.found == []
        # The sums have the bits of numbers that are read and added up one by one.
        one_by_one: dict[str, float] = {}
        for micro_batch in ([0, 1], [2]) * 2:
            step = [OptimizerStep([micro_batch], SEQUENCES)]
            part: dict[str, float] = update(engine_of(tables), samples(tables), step, ppo, 0)
            for name, value in part.items():
                one_by_one[name] = one_by_one.get(name, 0.0) + value
        for name in one_by_one.keys() - {"grad_norm"}:
            assert found[name] == one_by_one[name]
        assert found["grad_norm"] == 2.0
