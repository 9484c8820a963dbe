"""Several rounds.

- each round adds the samples of all earlier rounds to the sources of the configuration, and nothing else
- without pairs in the configuration none are added; without rows there is no next round
- every round is one run of the pipeline, and its configuration is valid
- the table has a line per round, by the best measure that there is; rounds that end at `sample` have the
  scores of its answers
"""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import load_config
from rlhf_core.errors import GateFailed, InputError
from rlhf_core.ops.rounds import round_overrides, rounds_table, run_rounds

DEMO = "deployments/configs/demo.yaml"
KEYS = ("a" * 16, "b" * 16, "c" * 16)


def summary_of(number: int, best: int = 5, pairs: int = 4, **more: Any) -> dict[str, Any]:
    stages = {"sample": {"key": KEYS[number - 1]}}
    return {
        "stages": stages,
        "sample": {"best": best, "pairs": pairs, "policy": "ppo"},
        "run": f"demo-{number}",
        **more,
    }


def artifact(number: int) -> str:
    return f"artifact://sample/{KEYS[number - 1]}"


def test_the_first_round_only_switches_the_samples_on() -> None:
    assert round_overrides(PipelineConfig(), ()) == ["sample={}"]
    assert round_overrides(load_config(DEMO, ["sample.answers=8"]), ()) == []


def test_a_round_has_the_samples_of_all_earlier_ones() -> None:
    given = ["sample={}", "data.sft=[{path: synthetic}, {path: more.jsonl}]"]
    overrides = round_overrides(load_config(DEMO, given), [summary_of(1), summary_of(2)])
    config = load_config(DEMO, [*given, *overrides])
    assert [source.path for source in config.data.sft] == [
        "synthetic", "more.jsonl", f"{artifact(1)}/best.jsonl", f"{artifact(2)}/best.jsonl"
    ]  # fmt: skip
    assert [source.path for source in config.data.preference] == [
        "synthetic", f"{artifact(1)}/pairs.jsonl", f"{artifact(2)}/pairs.jsonl"
    ]  # fmt: skip
    before = load_config(DEMO, given)
    assert config.model_copy(update={"data": before.data}) == before
    assert config.data.prompts == before.data.prompts


def test_the_defaults_of_the_sources_are_kept() -> None:
    """A file that has no section `data` has the demo task, and an override adds to it."""
    config = load_config(DEMO, round_overrides(load_config(DEMO), [summary_of(1)]))
    assert [source.path for source in config.data.sft] == ["synthetic", f"{artifact(1)}/best.jsonl"]


def test_without_pairs_only_demonstrations_are_added() -> None:
    rewards = ["ppo.rewards=[{type: well_formed}]", "reward.enabled=false", "data.preference=[]"]
    config = load_config(DEMO, rewards)
    assert round_overrides(config, [summary_of(1)]) == [
        "sample={}", f"data.sft.1.path={artifact(1)}/best.jsonl", "data.sft.1.labelled_by=reward"
    ]  # fmt: skip
    with pytest.raises(GateFailed):
        round_overrides(config, [summary_of(1, best=0)])


@pytest.mark.parametrize(("best", "pairs"), [(0, 3), (3, 0)])
def test_an_empty_file_is_not_added(best: int, pairs: int) -> None:
    overrides = round_overrides(PipelineConfig(), [summary_of(1, best, pairs), summary_of(2)])
    assert any("/best.jsonl" in each and KEYS[0] in each for each in overrides) == bool(best)
    assert any("/pairs.jsonl" in each and KEYS[0] in each for each in overrides) == bool(pairs)
    first = 2 if best else 1
    assert f"data.sft.{first}.path={artifact(2)}/best.jsonl" in overrides


@pytest.mark.parametrize("judge", ["reward", "judge_model", "language_model"])
def test_sampled_rows_name_their_judge(judge: str) -> None:
    given = ["reward.judge={}", f"sample.judge={judge}", "evaluate.language_model={path: judge}"]
    overrides = round_overrides(load_config(DEMO, given), [summary_of(1)])
    data = load_config(DEMO, [*given, *overrides]).data
    assert [source.labelled_by for source in (*data.sft, *data.preference)] == [None, judge, None, judge]


def test_without_rows_there_is_no_next_round() -> None:
    with pytest.raises(GateFailed, match="round 2: the stage sample has 0 demonstrations and 0 pairs"):
        round_overrides(PipelineConfig(), [summary_of(1), summary_of(2, 0, 0)])


def test_every_round_is_a_run_of_the_pipeline() -> None:
    configs: list[PipelineConfig] = []

    def run_pipeline(config: PipelineConfig, *, tags: Any, until: str) -> dict[str, Any]:
        configs.append(config)
        assert tags == {"team": "a"} and until == "sample"
        return summary_of(len(configs))

    config = load_config(DEMO, ["sample.answers=8"])
    summaries = run_rounds(config, 3, tags={"team": "a"}, until="sample", run=run_pipeline)
    assert [each["run"] for each in summaries] == ["demo-1", "demo-2", "demo-3"]
    assert configs[0] == config
    assert [len(each.data.sft) for each in configs] == [len(each.data.preference) for each in configs] == [
        1, 2, 3
    ]  # fmt: skip
    assert all(each.sample == config.sample for each in configs)
    with pytest.raises(InputError, match="--rounds: must be at least 1; got 0"):
        run_rounds(config, 0, run=run_pipeline)


@pytest.mark.parametrize(
    ("measures", "title"),
    [
        (("reward_model", "gold_reward"), "gold reward"),
        (("rules/length", "reward_model"), "reward model"),
        (("rules/length",), "length"),
        ((), "score"),
    ],
)
def test_the_table_shows_scores_and_win_rates_by_the_measure_of_the_run(
    measures: tuple[str, ...], title: str
) -> None:
    scores = {"sft": {"mean": -2.5}, "ppo": {"mean": 1.25}}
    evaluate = dict.fromkeys(measures, scores) | {"policies": {"ppo": {"win_rate": {"mean": 0.75}}}}
    console = Console(width=140)
    with console.capture() as capture:
        console.print(rounds_table([summary_of(1, evaluate=evaluate), summary_of(2, evaluate=evaluate)]))
    text = capture.get()
    assert f"{title} on held-out prompts" in text and "demo-1" in text and "demo-2" in text
    assert ("-2.500" in text and "1.250" in text) == bool(measures) and "0.750" in text


def printed(summaries: list[dict[str, Any]], width: int = 140) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(rounds_table(summaries))
    return capture.get()


def test_the_table_has_the_registered_policy_and_says_whose_answers_the_rows_are() -> None:
    scores = {"sft": {"mean": -2.5}, "ppo": {"mean": 1.25}, "dpo": {"mean": 0.5}}
    rates = {"ppo": {"win_rate": {"mean": 0.75}}, "dpo": {"win_rate": {"mean": 0.625}}}
    evaluate = {"gold_reward": scores, "policies": rates}
    summary = summary_of(1, evaluate=evaluate, policy="dpo") | {"run": "tiny-seed0-0f9348b7"}
    summary["sample"]["policy"] = "sft"
    text = printed([summary], width=80)
    assert "pairs, best: answers of SFT" in text and "…" not in text
    assert " DPO " in text and "0.500" in text and "0.625" in text and "PPO" not in text
    summary = summary_of(1, evaluate=evaluate, policy="ppo")
    text = printed([summary])
    assert "answers of PPO" in text and "1.250" in text and "0.750" in text and "DPO" not in text


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"score_mean": 0.25, "score_best": 0.75}, ("score on training prompts", "0.250", "0.750")),
        ({"score_mean": 0.25, "gold_mean": 1.5, "gold_best": 2.5}, ("gold reward on", "1.500", "2.500")),
        ({}, ("score on training prompts", " - ")),
    ],
)
def test_the_table_of_rounds_that_end_at_sample_has_the_scores_of_the_answers(
    metrics: dict[str, float], words: tuple[str, ...]
) -> None:
    summary = summary_of(1)
    summary["stages"]["sample"]["metrics"] = metrics
    text = printed([summary])
    assert all(word in text for word in words) and "win rate" not in text
