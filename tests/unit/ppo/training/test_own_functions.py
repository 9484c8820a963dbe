"""The seams `ppo.loss` and `ppo.advantages`.

- the examples of docs/own-loss.md run: the one of GSPO is the built-in loss, to rounding
- each built-in loss reaches the update with its clip
- the functions are executed from the content that was read, and what they return is checked
- with the defaults no stage key changes; a function's content is part of the key of `ppo`
- a missing file or function is found before a run
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.algo.advantages import AdvantageInputs
from rlhf_core.algo.losses import (
    LossInputs,
    aggregate,
    clipped_weight_loss,
    policy_loss,
    sequence_policy_loss,
)
from rlhf_core.config.keys import result_settings
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import ConfigError, InputError
from rlhf_core.ppo.training.experience import own_advantages_of
from rlhf_core.ppo.training.loss_step import loss_of
from rlhf_core.rewards.check import check_rewards
from rlhf_core.run.external_inputs import reward_code_digests

PAGE = Path(__file__).resolve().parents[4] / "docs" / "own-loss.md"
LOSS, ADVANTAGES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
GRPO = {"algorithm": "grpo", "samples_per_prompt": 2}


def section(**ppo: Any) -> PPOConfig:
    return config_from_tree({"ppo": {**GRPO, **ppo}}, "test").ppo


def written(folder: Path, code: str, name: str) -> dict[str, str]:
    file = folder / f"my_{name}.py"
    file.write_text(code)
    return {"type": "python", "file": str(file), "function": f"my_{name}:{name}"}


def inputs() -> LossInputs:
    generator = torch.Generator().manual_seed(1)
    old, new, ref = torch.randn(3, 3, 4, generator=generator) * 0.1 - 1
    lengths_B = torch.tensor([4, 2, 1])
    mask_BT = torch.arange(4) < lengths_B.unsqueeze(1)
    advantages_BT = torch.tensor([[1.0], [-1.0], [0.5]]).expand(3, 4)
    weights_BT = torch.rand(3, 4, generator=generator)
    zeros = torch.zeros(3, 4)
    old, new, ref, advantages_BT, weights_BT = (
        torch.where(mask_BT, x, zeros) for x in (old, new, ref, advantages_BT, weights_BT)
    )
    return LossInputs(
        new.requires_grad_(), old, ref, advantages_BT, weights_BT, mask_BT, "seq-mean-token-mean", 3.0
    )


def test_the_example_of_the_page_is_the_built_in_loss(tmp_path: Path) -> None:
    own = loss_of(section(loss=written(tmp_path, LOSS, "loss")))
    built_in = loss_of(section(loss={"type": "gspo"}))
    of_user, of_package = inputs(), inputs()
    loss, metrics = own(of_user)
    expected, _ = built_in(of_package)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(of_user.logprobs_BT.grad, of_package.logprobs_BT.grad)
    assert list(metrics) == ["user/ratio"]


@pytest.mark.parametrize(
    ("loss", "compute", "clip"),
    [
        (None, policy_loss, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
        ({"type": "gspo", "clip_high": 0.01}, sequence_policy_loss, {"clip_low": 3e-4, "clip_high": 0.01}),
        ({"type": "cispo", "clip_high": 0.01}, clipped_weight_loss, {"clip_low": 1.0, "clip_high": 0.01}),
    ],
)
def test_a_built_in_loss_gets_its_clip(loss: Any, compute: Any, clip: dict[str, float]) -> None:
    given = inputs()
    expected = compute(
        given.logprobs_BT,
        given.old_logprobs_BT,
        given.advantages_BT,
        given.mask_BT,
        weights=given.weights_BT,
        aggregation="seq-mean-token-mean",
        denominator=3.0,
        **clip,
    )
    result, metrics = loss_of(section(loss=loss))(given)
    assert torch.equal(result, expected.loss)
    assert torch.equal(metrics["clipped"], expected.clip_fraction)


def test_the_mean_of_the_inputs_is_that_of_the_whole_step() -> None:
    given = inputs()
    expected = aggregate(given.weights_BT, given.mask_BT, "seq-mean-token-mean", 3.0)
    assert torch.equal(given.mean(given.weights_BT), expected)


def test_gspo_averages_over_responses_unless_an_aggregation_is_set() -> None:
    assert section(algorithm="rloo", loss={"type": "gspo"}).loss_sum == "seq-mean-token-mean"
    assert section(loss={"type": "gspo"}, aggregation="token-mean").loss_sum == "token-mean"


def test_the_content_that_was_read_is_executed(tmp_path: Path) -> None:
    given = written(tmp_path, "def loss(inputs):\n    return 1 / 0\n", "loss")
    loss, _ = loss_of(section(loss=given), LOSS.encode())(inputs())
    assert loss.isfinite()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("inputs.logprobs_BT.sum()", "must return a loss and a dict of metrics"),
        ("inputs.logprobs_BT, {}", r"must return a scalar with gradient; got torch.Size\(\["),
        ("inputs.old_logprobs_BT.sum(), {}", "must return a scalar with gradient"),
    ],
)
def test_what_a_loss_returns_is_checked(tmp_path: Path, result: str, message: str) -> None:
    own = loss_of(section(loss=written(tmp_path, f"def loss(inputs):\n    return {result}\n", "loss")))
    with pytest.raises(InputError, match=message):
        own(inputs())


def test_the_advantages_of_the_page_compare_with_the_best_sample(tmp_path: Path) -> None:
    own = own_advantages_of(section(advantages=written(tmp_path, ADVANTAGES, "advantages")))
    assert own is not None
    scores_B = torch.tensor([1.0, 3.0, 0.5, torch.nan])
    given = AdvantageInputs(
        scores_B, torch.tensor([0, 0, 1, 1]), torch.full((4,), 5), torch.ones(4, dtype=torch.bool)
    )
    advantages_B, metrics = own(given)
    assert advantages_B[:3].tolist() == [-2.0, 0.0, 0.0]
    assert metrics == {"behind": 0.75}
    assert own_advantages_of(section()) is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("inputs.scores_B", "must return advantages and a dict of metrics"),
        ("inputs.scores_B[:1], {}", r"must return a tensor \(2,\)"),
        ("inputs.scores_B / 0, {}", "must return finite advantages"),
    ],
)
def test_what_advantages_return_is_checked(tmp_path: Path, result: str, message: str) -> None:
    code = f"def advantages(inputs):\n    return {result}\n"
    own = own_advantages_of(section(advantages=written(tmp_path, code, "advantages")))
    assert own is not None
    ones = torch.ones(2)
    with pytest.raises(InputError, match=message):
        own(AdvantageInputs(ones, ones, ones, ones))


def test_advantages_need_an_algorithm_without_a_critic(tmp_path: Path) -> None:
    given = written(tmp_path, ADVANTAGES, "advantages")
    with pytest.raises(ConfigError, match=r"ppo\.advantages replaces those of an algorithm that compares"):
        section(algorithm="ppo", advantages=given)


def test_the_defaults_are_not_part_of_a_key() -> None:
    assert {"loss", "advantages"}.isdisjoint(result_settings(section()))
    settings = result_settings(section(loss={"type": "cispo"}))
    assert settings["loss"] == {"type": "cispo", "clip_low": 1.0, "clip_high": 4.0}


def test_the_content_of_a_function_is_part_of_the_key(tmp_path: Path) -> None:
    def digests(code: str) -> dict[str, str]:
        given = written(tmp_path, code, "loss")
        ppo = {**GRPO, "loss": given, "advantages": {**given, "function": "my_loss:advantages"}}
        return reward_code_digests(config_from_tree({"ppo": ppo}, "test"))

    first, second = digests(LOSS), digests(ADVANTAGES)
    assert set(first) == {"ppo.loss", "ppo.advantages"}
    assert first["ppo.loss"] != second["ppo.loss"]


def test_a_missing_function_is_found_before_a_run(tmp_path: Path) -> None:
    given = written(tmp_path, ADVANTAGES, "loss")
    config = config_from_tree({"ppo": {**GRPO, "rewards": [{"type": "gold"}], "loss": given}}, "test")
    found = [str(finding) for finding in check_rewards(config)]
    assert any(text.startswith("ppo.loss.function:") and "no function loss" in text for text in found)
    with pytest.raises(ConfigError, match=r"ppo\.loss\.function: my_loss:loss cannot be loaded"):
        loss_of(config.ppo)
