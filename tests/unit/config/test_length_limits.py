"""Length limits, and the data that a base model needs.

- limits that are not given are what the data need within the context, shared by prompt and response
- only the demo has limits and data by default
- a model whose responses never end is named
"""

from __future__ import annotations

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import DEMO_LIMITS, GivenLimits, Limits, fitted_limits, never_ends
from rlhf_core.config.load import config_from_tree, load_config
from rlhf_core.errors import ConfigError

NOTHING = GivenLimits(None, None, None, None)


@pytest.mark.parametrize(
    ("given", "needed", "expected"),
    [
        # Everything fits.
        (NOTHING, (100, 200, 300), (100, 200, 300, 200)),
        # Both need more than half of 512.
        (NOTHING, (400, 400, 900), (256, 256, 512, 256)),
        # One needs less than half, and the other one gets the rest.
        (NOTHING, (100, 900, 1), (100, 412, 1, 412)),
        (NOTHING, (900, 100, 1), (412, 100, 1, 100)),
        # What is given stays, and the prompt leaves room for it.
        (GivenLimits(None, 300, None, None), (400, 9, 9), (212, 300, 9, 300)),
        (GivenLimits(300, None, None, None), (9, 400, 9), (300, 212, 9, 212)),
        (GivenLimits(None, None, None, 400), (200, 100, 9), (112, 100, 9, 400)),
        (GivenLimits(1, 2, 3, 4), (50, 60, 70), (1, 2, 3, 4)),
    ],
)
def test_limits_are_what_the_data_need_within_the_context(
    given: GivenLimits, needed: tuple[int, int, int], expected: tuple[int, int, int, int]
) -> None:
    assert fitted_limits(given, Limits(*needed, new=0), 512) == Limits(*expected)


def test_only_a_run_on_generated_data_alone_has_the_limits_of_the_demo() -> None:
    assert PipelineConfig().limits == DEMO_LIMITS
    sets = {name: [{"path": "mine.jsonl"}] for name in ("sft", "preference", "prompts")}
    own = config_from_tree({"data": {**sets, "max_text_tokens": 7}})
    assert own.given_limits == GivenLimits(None, None, 7, None)
    assert own.with_limits(Limits(1, 2, 3, 4)).limits == Limits(1, 2, 3, 4)


def test_a_model_from_scratch_with_own_data_gets_no_generated_ones() -> None:
    with pytest.raises(ConfigError, match=r"data\.prompts, data\.preference: missing"):
        config_from_tree({"data": {"sft": [{"path": "a.jsonl"}]}})
    with pytest.raises(ConfigError, match="path"):
        config_from_tree({}, "test", ["data.sft.0.limit=5", "model={path: m}"])


@pytest.mark.parametrize("own", ["data.sft.0.path=a.jsonl", "model.path=m", "run.seed=1"])
@pytest.mark.parametrize("override", ["data.prompts.0.limit=5", "data.prompts.0.rename={q: prompt}"])
def test_an_override_of_a_source_that_is_not_given_adds_no_generated_one(override: str, own: str) -> None:
    for overrides in ([override, own], [own, override]):
        with pytest.raises(ConfigError, match=r"data\.prompts\.0\.path: is required"):
            config_from_tree({}, "test", overrides)
    with pytest.raises(ConfigError, match=r"data\.prompts has 0 items; got index 1"):
        config_from_tree({}, "test", [own, "data.prompts.1.path=b.jsonl"])


def test_with_a_base_model_missing_data_are_an_error_and_never_generated() -> None:
    everything = "data.sft, data.prompts, data.preference: missing; only the demo"
    with pytest.raises(ConfigError, match=everything):
        config_from_tree({"model": {"path": "m"}})
    rules = {"reward": {"enabled": False}, "ppo": {"rewards": [{"type": "repetition"}]}}
    data = {"sft": [{"path": "a.jsonl"}], "prompts": [{"path": "synthetic"}]}
    config = config_from_tree({"model": {"path": "m"}, "data": data, **rules})
    assert config.data.preference == ()
    assert [source.path for source in config.data.prompts] == ["synthetic"], "it was written"
    with pytest.raises(ConfigError, match=r"data\.preference: missing"):
        config_from_tree({"model": {"path": "m"}, "data": data})


def test_an_item_that_is_added_to_a_missing_list_is_its_only_one() -> None:
    demo = "deployments/configs/demo.yaml"
    assert len(load_config("tests/assets/tiny.yaml", ["data.sft.1.path=x.jsonl"]).data.sft) == 2
    assert len(load_config(demo, ["model.path=m", "data.sft.1.path=x.jsonl"]).data.sft) == 2
    tree = {"data": {"prompts": [{"path": "p"}], "preference": [{"path": "q"}]}}
    overrides = ["data.sft.0.path=x.jsonl", "model.path=m"]
    assert [source.path for source in config_from_tree(tree, "test", overrides).data.sft] == ["x.jsonl"]


def test_a_model_that_never_ends_its_responses_is_named_with_a_fix() -> None:
    assert never_ends({"the SFT model": 0.05}) is None
    problem = never_ends({"the SFT model": 0.01, "the judge": 0.5})
    assert problem is not None
    assert problem.startswith("1.0% of the responses of the SFT model end with EOS; the others are cut at")
    assert "Raise ppo.max_new_tokens" in problem
    both = never_ends({"the SFT model": 0.01, "the PPO model": 0.0})
    assert both is not None
    assert "1.0% of the responses of the SFT model and 0.0% of those of the PPO model end with EOS" in both
