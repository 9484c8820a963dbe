"""Settings that are seldom meant are warned of, with field, value and fix; what is usual is not.

- each doubtful setting is one warning; the same setting fixed is none
- the defaults and every shipped profile raise none
- what follows from other settings that are not set: horizon, limit, penalty, weights, aggregation
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.consistency import check_consistency, deepspeed_sections, unusual_settings
from rlhf_core.config.load import config_from_tree, load_config
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.ppo_sections import default_evaluation_interval
from rlhf_core.errors import ConfigError
from rlhf_core.evaluation.check import check_judge
from rlhf_core.preflight import check
from tests.support.demo_data import GENERATED

PROFILES = sorted((Path(__file__).resolve().parents[3] / "deployments" / "configs").glob("*.yaml"))
TARGET = {"target": 6.0}
BF16: dict[str, Any] = {"policy_deepspeed": {"dtype": "bfloat16"}, "engine": {"dtype": "bfloat16"}}
# What is set, words of the warning, and the change that mends it.
DOUBTFUL: list[tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]] = [
    (
        {"kl": {"estimator": "k3"}},
        ("ppo.kl.estimator: k3 in the reward", "for k1"),
        {"kl": {"estimator": "k1"}},
    ),
    ({"kl": {"estimator": "k2"}}, ("ppo.kl.estimator: k2",), {"kl": {"estimator": "k2", "place": "loss"}}),
    ({"kl": {"estimator": "abs"}}, ("ppo.kl.estimator: abs",), {"kl": {}}),
    (
        {"steps": 10, "publish": "average", "ema_decay": 0.99999},
        ("ppo.ema_decay: 0.99999", "a weight of 1 in", "makes 40 optimizer steps", "use at most 0.94406"),
        {"steps": 10, "publish": "average", "ema_decay": 0.94406},
    ),
    (
        {"kl": {"place": "loss", "estimator": "k3"}},
        ("ppo.kl.estimator: k3 in the loss", "for k2"),
        {"kl": {"place": "loss"}},
    ),
    (
        {"kl": {"place": "loss", "estimator": "abs"}},
        ("ppo.kl.estimator: abs in the loss",),
        {"kl": {"place": "loss", "estimator": "k2"}},
    ),
    (
        BF16 | {"lora": {}, "weight_sync": {"lora": "merged"}},
        ("ppo.weight_sync.lora: merged", "bfloat16", "ppo.published_loss_limit (0.1)"),
        BF16 | {"lora": {}},
    ),
    (
        {"policy_deepspeed": {"dtype": "bfloat16"}, "lora": {}, "weight_sync": {"lora": "merged"}},
        ("ppo.weight_sync.lora: merged", "rounded to bfloat16,"),
        {"lora": {}, "weight_sync": {"lora": "merged"}},
    ),
    (BF16 | {"lora": {"r": 600}}, ("ppo.lora.r: 600", "use at most 512"), BF16 | {"lora": {"r": 512}}),
    (
        BF16 | {"lora": {"quantize": "nf4"}},
        ("ppo.lora.quantize: nf4", "leave it out"),
        {"lora": {"quantize": "nf4"}},
    ),
    (
        {"lora": {}, "policy": {"learning_rate": 1e-6}},
        ("ppo.policy.learning_rate: 1e-06 is that of all parameters", "use 1e-05, or leave it out (1e-05)"),
        {"lora": {}, "policy": {"learning_rate": 2e-6}},
    ),
    (
        {"lora": {}, "critic": {"learning_rate": 4e-6}},
        ("ppo.critic.learning_rate: 4e-06", "use 4e-05, or leave it out (5e-05)"),
        {"lora": {}, "algorithm": "reinforce_pp", "critic": {"learning_rate": 4e-6}},
    ),
    (
        {"guards": {"overoptimization": "stop"}},
        ("ppo.guards.overoptimization: stop has no effect", "add reward.judge={}"),
        {"guards": {"overoptimization": "warn"}},
    ),
    (
        {"algorithm": "reinforce_pp", "guards": {"blind_critic": "stop"}},
        ("ppo.guards.blind_critic: stop has no effect", "ppo.algorithm=reinforce_pp"),
        {"guards": {"blind_critic": "stop"}},
    ),
    (
        {"rewards": [{"type": "relevance", "weight": 0}]},
        ("ppo.rewards: all weights are 0", "give a source a weight"),
        {"rewards": [{"type": "relevance", "weight": 0}, {"type": "repetition", "weight": 1}]},
    ),
    (
        {"max_new_tokens": 65},
        ("ppo.max_new_tokens: 65", "data.max_response_tokens (64)"),
        {"max_new_tokens": 64},
    ),
]


def test_the_reward_model_in_ppo_has_the_settings_of_the_critic() -> None:
    """Also without a critic."""
    tree = {"ppo": {"algorithm": "grpo", "samples_per_prompt": 4}}
    assert "ppo.critic_deepspeed" in dict(deepspeed_sections(config_from_tree(tree, "test")))
    rules = {"ppo": {**tree["ppo"], "rewards": [{"type": "relevance"}]}, "reward": {"enabled": False}}
    fields = [field for field, _ in deepspeed_sections(config_from_tree(rules, "test"))]
    assert fields == ["sft.deepspeed", "ppo.policy_deepspeed"]


def warnings_of(ppo: dict[str, Any]) -> list[str]:
    # The demo holds out few prompts.
    data = {**GENERATED, "prompts": [{"path": "x.jsonl"}], "max_response_tokens": 64}
    return list(
        unusual_settings(config_from_tree({"run": {"device": "cpu"}, "data": data, "ppo": ppo}, "test"))
    )


@pytest.mark.parametrize(("ppo", "words", "fixed"), DOUBTFUL, ids=[words[0] for _, words, _ in DOUBTFUL])
def test_a_doubtful_setting_is_one_warning_and_mended_none(
    ppo: dict[str, Any], words: tuple[str, ...], fixed: dict[str, Any]
) -> None:
    (warning,) = warnings_of(ppo)
    assert all(word in warning for word in words), warning
    assert warnings_of(fixed) == []


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"evaluate": {"temperature": 0.5}}, ("evaluate.temperature is 0.5", "ppo.temperature=1")),
        (
            {"ppo": {"publish": "best", "evaluate_prompts": 20}, "evaluate": {"prompts": 100}},
            ("ppo.publish is best", "add reward.judge={}"),
        ),
        ({"evaluate": {"judge": "reward_model"}}, ("evaluate.judge is the reward", "use reward.judge={}")),
        ({"evaluate": {"prompts": 49}}, ("evaluate.prompts: 49", "register.min_prompts (50)")),
        ({"data": {"max_eval": 49}}, ("data.max_eval: 49", "register.min_prompts (50)")),
    ],
)
def test_plan_and_run_show_warnings_of_other_sections(tree: dict[str, Any], words: tuple[str, ...]) -> None:
    (warning,) = unusual_settings(config_from_tree({"run": {"device": "cpu"}, **tree}, "test"))
    assert all(word in warning for word in words), warning


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"ppo": {"rewards": [{"type": "model"}]}}, ("(reward model)", "add reward.judge={}")),
        ({"reward": {"enabled": False}, "ppo": {"rewards": [{"type": "relevance"}]}}, ("(rules)",)),
        ({"register": {"policy": "dpo"}, "dpo": {"enabled": True}}, ("(reward model)",)),
        ({"reward": {"judge": {}}}, None),
        ({"ppo": {"rewards": [{"type": "relevance"}]}}, None),
        ({"data": {}}, None),  # the demo's true reward judges
    ],
)
def test_a_judge_that_refuses_every_policy_is_warned_of(
    tree: dict[str, Any], words: tuple[str, ...] | None
) -> None:
    register = {"independent_judge": True, **tree.pop("register", {})}
    base = {
        "run": {"device": "cpu"},
        "register": register,
        "data": {**GENERATED, "prompts": [{"path": "x.jsonl"}]},
    }
    found = [str(each) for each in check_judge(config_from_tree({**base, **tree}, "test"))]
    if words is None:
        assert found == []
    else:
        (warning,) = found
        assert all(word in warning for word in ("no candidate can become champion", *words)), warning
    base["register"] = {"independent_judge": False}
    base.pop("data")
    assert list(check_judge(config_from_tree(base, "test"))) == []


@pytest.mark.parametrize(
    ("labels", "settings", "warned"),
    [
        (("reward", "reward"), {}, True),
        (("reward", None), {}, False),
        (("reward",), {"min_agreement": None}, False),
        (("reward",), {"weight": 0.0}, False),
    ],
)
def test_a_grader_is_not_measured_without_pairs_of_people(
    labels: tuple[str | None, ...], settings: dict[str, Any], warned: bool
) -> None:
    grader = {"type": "language_model", "url": "http://one/v1", "model": "m"}
    tree = {
        "run": {"device": "cpu"},
        "data": {"preference": [{"path": "synthetic", "labelled_by": label} for label in labels]},
        "ppo": {"rewards": [{"type": "model"}, grader | settings]},
    }
    config = config_from_tree(tree, "test")
    found = [text for text in unusual_settings(config) if "ppo.rewards: the agreement of m with" in text]
    assert len(found) == warned
    assert not any(isinstance(finding, ConfigError) for finding in check_consistency(config))


@pytest.mark.parametrize(
    ("model", "weight", "warned"), [("m", 1.0, True), ("n", 1.0, False), ("m", 0.0, False)]
)
def test_a_judge_that_is_also_a_reward_is_named(model: str, weight: float, warned: bool) -> None:
    tree = {
        "run": {"device": "cpu"},
        "data": GENERATED,
        "ppo": {
            "rewards": [
                {"type": "model"},
                {"type": "language_model", "url": "http://one/v1", "model": "m", "weight": weight},
            ]
        },
        "evaluate": {"language_model": {"url": "http://two/v1", "model": model}},
    }
    found = [text for text in unusual_settings(config_from_tree(tree, "test")) if "is also a reward" in text]
    assert len(found) == warned


def test_the_precision_in_which_a_start_is_saved_is_checked_although_it_is_not_trained() -> None:
    sft = {"enabled": False, "deepspeed": {"dtype": "float16"}}
    start = config_from_tree({"model": "an/instruct-model", "data": GENERATED, "sft": sft}, "test")
    problems = [str(finding) for finding in check_consistency(start)]
    assert any("sft.deepspeed.dtype: float16 needs sft.deepspeed.zero_stage" in text for text in problems)


def test_rules_may_score_responses_of_any_length() -> None:
    assert warnings_of({"max_new_tokens": 65, "rewards": [{"type": "relevance"}]}) == []


def test_run_shows_warnings(tmp_path: Path) -> None:
    tree = {"run": {"device": "cpu", "home": str(tmp_path)}, "ppo": {"kl": {"estimator": "k3"}}}
    assert any("ppo.kl.estimator: k3" in warning for warning in check(config_from_tree(tree, "test")))


def test_no_held_out_prompts_are_refused() -> None:
    message = r"data.eval_fraction: must be from 0.001 to 0.9 \(held-out prompts measure the models"
    with pytest.raises(ConfigError, match=message):
        config_from_tree({"data": {"eval_fraction": 0}}, "test")


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_no_shipped_profile_is_doubtful(profile: Path) -> None:
    assert (
        list(unusual_settings(load_config(profile, ["run.device=cpu", "ppo.weight_sync.backend=auto"]))) == []
    )


def ppo(**fields: Any) -> PPOConfig:
    return config_from_tree({"run": {"device": "cpu"}, "ppo": fields}, "test").ppo


def test_the_horizon_lets_the_coefficient_change_by_one_percent_a_step() -> None:
    assert 0.2 * 256 / ppo(prompts_per_step=256, kl=TARGET).kl_horizon == pytest.approx(0.01)
    assert ppo(kl=TARGET | {"horizon": 777}).kl_horizon == 777


def test_the_limit_of_the_kl_follows_its_target() -> None:
    assert ppo(teacher={"path": "./teacher"}).kl_limit == math.inf
    assert [ppo(kl=TARGET).kl_limit, ppo().kl_limit, ppo(kl=TARGET, max_kl=7.0).kl_limit] == [
        30.0,
        100.0,
        7.0,
    ]


def test_evaluations_are_a_tenth_of_the_run_apart() -> None:
    for steps, sync_every in itertools.product(range(1, 3000), (1, 2, 3, 4, 7, 16)):
        assert default_evaluation_interval(steps, sync_every) % sync_every == 0
    found = [default_evaluation_interval(steps, 1) for steps in (9, 100, 119, 199, 239, 1000)]
    assert found == [1, 10, 10, 15, 20, 100]


def test_default_intervals_are_multiples_of_the_steps_between_syncs() -> None:
    found = [ppo(steps=50, staleness=n) for n in (0, 1, 3, 16)]
    assert [each.evaluation_interval for each in found] == [5, 5, 6, 16]
    assert [each.checkpoint_interval for each in found] == [10, 10, 12, 16]
    assert ppo(steps=50, checkpoint_every=4).checkpoint_interval == 4


def test_a_cut_response_pays_where_a_reward_model_scores_it() -> None:
    rule = [{"type": "relevance"}]
    assert [ppo().eos_penalty, ppo(rewards=rule).eos_penalty, ppo(missing_eos_penalty=0.5).eos_penalty] == [
        1,
        0,
        0.5,
    ]
    assert ppo(overlong={"buffer": 8}).eos_penalty == 0


@pytest.mark.parametrize(
    ("trainer", "engine", "kind"),
    [
        ("float32", "float32", "none"),
        ("bfloat16", "bfloat16", "truncate"),
        ("float32", "bfloat16", "truncate"),
    ],
)
def test_outside_float32_the_gap_to_the_engines_is_weighed(trainer: str, engine: str, kind: str) -> None:
    precision: dict[str, Any] = {"policy_deepspeed": {"dtype": trainer}, "engine": {"dtype": engine}}
    assert ppo(**precision).used_importance == kind
    assert ppo(**precision, importance="mask").used_importance == "mask"


@pytest.mark.parametrize(
    ("algorithm", "loss_sum", "divisor"),
    [("ppo", "token-mean", 1), ("grpo", "seq-mean-token-mean", 1), ("dr_grpo", "seq-mean-token-sum", 64)],
)
def test_the_algorithm_has_an_aggregation_of_its_own(algorithm: str, loss_sum: str, divisor: int) -> None:
    own = ppo(algorithm=algorithm, samples_per_prompt=2)
    assert (own.loss_sum, own.loss_divisor) == (loss_sum, divisor)
    section = ppo(algorithm=algorithm, samples_per_prompt=2, aggregation="token-sum")
    assert (section.loss_sum, section.loss_divisor) == ("token-sum", 1)
