"""Locks: the names and signatures of `rlhf_core.algo` that code outside this repository imports, in order to
compare the results with those of other systems. Parameters with a default can be added at the end.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

from rlhf_core.algo import kl, losses

PAIRS = "policy_chosen_B, policy_rejected_B, ref_chosen_B, ref_rejected_B"
AGGREGATED = "aggregation='token-mean', denominator=None"

SIGNATURES = {
    "masking.masked_sum": "x, mask",
    "masking.masked_mean": "x, mask, denominator=None",
    "masking.masked_var": "x, mask, unbiased=True",
    "masking.masked_whiten": "x, mask, shift_mean=True, eps=1e-08",
    "logprobs.token_logprobs": "logits_BTV, labels_BT, temperature=1.0",
    "logprobs.token_entropy": "logits_BTV, temperature=1.0",
    "kl.kl_estimate": "logprobs, ref_logprobs, estimator",
    "kl.FixedKL": "coef",
    "kl.AdaptiveKL": "init, target, horizon",
    "advantages.token_rewards": "scores_B, kl_BT, mask_BT, kl_coef, score_clip=None",
    "advantages.gae": "rewards, values, mask, gamma, lam",
    "advantages.group_advantages": "scores_B, groups_B, kind, eps=1e-06",
    "advantages.returns_to_go": "rewards, mask, gamma",
    "losses.aggregate": "x, mask, mode, denominator=None",
    "losses.policy_loss": "logprobs, old_logprobs, advantages, mask, *, clip_low=0.2, clip_high=0.2,"
    f" dual_clip=None, weights=None, {AGGREGATED}",
    "losses.value_loss": f"values, old_values, returns, mask, *, clip=0.2, {AGGREGATED}",
    "losses.entropy_bonus": f"entropy, mask, *, {AGGREGATED}",
    "losses.kl_loss": f"logprobs, ref_logprobs, mask, estimator='k2', *, {AGGREGATED}",
    "losses.reward_model_loss": "chosen_B, rejected_B, margin_B=None, center=0.0",
    "losses.sft_loss": "logprobs, mask, denominator=None",
    "losses.dpo_loss": f"{PAIRS}, beta, label_smoothing=0.0",
    "importance.importance_weights": "old_logprobs, rollout_logprobs, mask, kind, low=0.0, high=2.0",
    "shaping.overlong_penalty": "lengths_B, max_length, buffer, factor",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_public_name_keeps_its_signature(name: str) -> None:
    module, attribute = name.split(".")
    signature = inspect.signature(getattr(importlib.import_module(f"rlhf_core.algo.{module}"), attribute))
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    shown = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    assert f"{shown[1:-1]}, ".startswith(f"{SIGNATURES[name]}, ")
    known = inspect.signature(eval(f"lambda {SIGNATURES[name]}: 0")).parameters
    assert all(p.default is not p.empty for p in parameters[len(known) :])


def test_public_results_and_controllers_keep_their_names() -> None:
    assert losses.PolicyLoss._fields[:3] == ("loss", "clip_fraction", "approx_kl")
    assert losses.ValueLoss._fields[:2] == ("loss", "clip_fraction")
    for controller in (kl.FixedKL(0.1), kl.AdaptiveKL(0.1, 6.0, 10000)):
        controller.load_state_dict(controller.state_dict())
        controller.update(6.0, 1)
        assert controller.coef == pytest.approx(0.1)
