"""The summary of a run, and its tables.

- the summary has the documented fields, and nothing that was not measured
- the table of results has the promotion with its reason, the judge, and DPO next to PPO
- implicit rewards of DPO that both fall are named
- a stage has one time, and a second one only with its name
- durations are readable, and cells of Markdown are escaped
"""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from rlhf_core.executors.spec import StageRecord
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.run.summary import (
    duration,
    headline_metrics,
    outcome,
    result_table,
    results,
    run_markdown,
    stage_markdown,
    stage_table,
    summarize,
    verdict,
)
from rlhf_core.tracking.mlflow_client import MAIN_METRICS
from rlhf_core.types import ArtifactRef

EVALUATION = {
    f"{name}/{part}": value
    for name, values in (
        ("gold_reward/sft", (0.1, 0.0, 0.2)),
        ("gold_reward/ppo", (1.1, 1.0, 1.2)),
        ("gold_reward/difference", (1.0, 0.9, 1.1)),
        ("win_rate", (0.8, 0.7, 0.9)),
    )
    for part, value in zip(("mean", "low", "high"), values, strict=True)
} | {"kl": 3.5}


def ref(stage: StageName, **metrics: float) -> ArtifactRef:
    return ArtifactRef(stage, "a" * 16, f"digest-{stage}", f"/store/{stage}", metrics)


def records(*stages: StageName) -> dict[StageName, StageRecord]:
    metrics: dict[str, dict[str, float]] = {
        "reward": {**ACCURACY, "accuracy_exchanged": 0.6, "margin": 1.0},
        "evaluate": EVALUATION,
    }
    return {
        stage: StageRecord(ref(stage, **metrics.get(stage, {})), 2.5, stage == "data") for stage in stages
    }


ACCURACY = {"accuracy": 0.9, "accuracy_low": 0.85, "accuracy_high": 0.94}
IDENTITY = {"mlflow_run_id": "m1", "run": "demo-seed0", "pipeline_key": "k", "where": {"logs": "/logs"}}


def test_the_summary_has_the_documented_fields() -> None:
    made = records(*STAGES)
    made["ppo"] = StageRecord(
        ArtifactRef("ppo", "b" * 16, "d", "/store/ppo", {}, None, {"weights_sha256": "abc"}), 60.0, False
    )
    summary = summarize(made, 123.456, IDENTITY)
    assert summary["seconds"] == 123.46
    assert summary["stages"]["data"]["reused"] is True
    assert summary["stages"]["ppo"]["seconds"] == 60.0
    assert summary["stages"]["ppo"]["artifact"] == "/store/ppo"
    assert summary["stages"]["ppo"]["key"] == "b" * 16
    assert summary["reward"] == {**ACCURACY, "accuracy_exchanged": 0.6}
    assert ("reward model, held-out accuracy", "0.900  [0.850, 0.940]") in results(summary)
    assert ("the same, prompts exchanged", "0.600") in results(summary), "of an earlier release"
    assert summary["evaluate"]["gold_reward"]["ppo"] == {"mean": 1.1, "low": 1.0, "high": 1.2}
    table = {"win_rate": {"mean": 0.8, "low": 0.7, "high": 0.9}, "kl": 3.5}
    assert summary["evaluate"]["policies"] == {"ppo": table}
    assert summary["evaluate"]["gold_reward"]["difference"]["ppo"]["low"] == 0.9
    assert summary["weights_sha256"] == "abc"
    assert summary["mlflow_run_id"] == "m1"


def test_the_summary_has_the_rows_of_the_stage_sample() -> None:
    sampled = ref("sample", pairs=7.0, best=9.0)
    summary = summarize({"sample": StageRecord(sampled, 1.0, False)}, 1.0, IDENTITY)
    assert summary["sample"] == {"pairs": 7, "best": 9, "policy": "ppo", "rl_algorithm": "PPO"}
    assert ("sampled pairs, demonstrations, PPO", "7, 9") in results(summary)
    sampled = replace(sampled, attributes={"policy": "sft"})
    summary = summarize({"sample": StageRecord(sampled, 1.0, False)}, 1.0, IDENTITY)
    assert summary["sample"]["policy"] == "sft"
    assert ("sampled pairs, demonstrations, SFT", "7, 9") in results(summary)
    assert "sample" not in summarize({}, 1.0, IDENTITY)


def finished(champion: str = "True", **attributes: str) -> dict[str, Any]:
    """Return the summary of a run with all stages."""
    numbers = EVALUATION | {"length/sft": 20.0, "length/ppo": 25.0, "eos_rate/ppo": 0.9}
    facts = {"model": "demo", "version": "3", "champion": champion, "rule": "match", "reason": "won"}
    made = records(*(stage for stage in STAGES if stage != "sample"))
    made["evaluate"] = StageRecord(replace(ref("evaluate", **numbers), attributes=attributes), 2.5, False)
    made["register"] = StageRecord(replace(ref("register"), attributes=facts), 2.5, False)
    return summarize(made, 100.0, IDENTITY | {"policy": "ppo"})


@pytest.mark.parametrize(("champion", "end"), [("True", "champion"), ("False", "not promoted")])
def test_one_line_has_the_win_rate_the_kl_and_the_promotion(champion: str, end: str) -> None:
    line = f"win rate 80.0 % [70.0, 90.0], KL 3.5, {end}"
    summary = finished(champion)
    assert verdict(summary) == line
    assert f"\n\n**{line}**\n" in run_markdown(summary)
    summary["evaluate"]["policies"]["ppo"]["judge_trained_on"] = True
    assert verdict(summary) == f"{line}, judged by the reward of its training"
    summary["evaluate"]["policies"]["dpo"] = summary["evaluate"]["policies"]["ppo"]
    assert verdict(summary | {"policy": "dpo"}) == f"{line}, judged by the pairs of its training"
    assert verdict(summarize(records("data"), 1.0, IDENTITY)) == ""


def test_the_first_rows_are_the_promotion_and_the_win_rate() -> None:
    names = [name for name, _ in results(finished(judge="rules"))]
    assert names[:4] == [
        "promotion", "reason", "win rate, PPO over SFT (judge: rules)", "KL to the SFT model",
    ]  # fmt: skip
    assert names[-1] == "the same, prompts exchanged"


def test_tables_name_the_algorithm_that_ran() -> None:
    summary = finished(rl_algorithm="GRPO", judge="rules", judge_trained_on="True")
    names = [name for name, _ in results(summary)]
    assert "win rate, GRPO over SFT (judge: rules, which GRPO was trained on)" in names
    assert not any("PPO" in name for name in names)


def test_the_main_metrics_of_a_run_are_about_ten() -> None:
    numbers = headline_metrics(finished())
    assert numbers == pytest.approx(
        {
            "win_rate": 0.8, "win_rate_low": 0.7, "kl": 3.5, "gold_reward": 1.1, "length_ratio": 1.25,
            "eos_rate": 0.9, "reward_accuracy": 0.9, "champion": 1.0, "hours": 2.5 * (len(STAGES) - 2) / 3600,
        }
    )  # fmt: skip
    assert set(numbers) <= set(MAIN_METRICS), "the columns of MLflow's list"
    assert finished("False")["registration"]["champion"] is False
    assert headline_metrics(finished("False"))["champion"] == 0.0
    assert outcome({"stages": {}}) == [("promotion", "not registered in this run")]
    shown = dict(outcome(finished("False")))
    assert "not promoted" in shown["promotion"] and shown["all stages"].endswith((" s", " min"))
    assert shown["reward model, held-out accuracy"] == "0.900  [0.850, 0.940]"
    assert shown["the same, prompts exchanged"] == "0.600"


@pytest.mark.parametrize(("champion", "outcome"), [("False", "not promoted"), ("True", "champion")])
def test_result_table_has_the_promotion_with_its_reason(champion: str, outcome: str) -> None:
    facts = {
        "model": "demo",
        "version": "3",
        "champion": champion,
        "rule": "match",
        "reason": "won <b>[x](y)",
    }
    made = ArtifactRef("register", "b" * 16, "d", "/store/r", {}, None, facts)
    summary = summarize({"register": StageRecord(made, 1.0, False)}, 1.0, IDENTITY)
    assert results(summary) == [("promotion", f"demo version 3: {outcome}"), ("reason", "won <b>[x](y)")]
    page = run_markdown(summary)
    assert r"| reason | won &lt;b&gt;\[x\]\(y\) |" in page
    above = page.index("\n\nwon &lt;b&gt;\\[x\\]\\(y\\)\n\n")
    assert above < page.index("| result |"), "the reason is also a paragraph"


def test_result_table_names_a_model_whose_responses_never_end() -> None:
    made = ref("evaluate", **{"eos_rate/sft": 0.0, "eos_rate/ppo": 0.9})
    rows = dict(results(summarize({"evaluate": StageRecord(made, 1.0, False)}, 1.0, IDENTITY)))
    assert rows["responses that never end"].startswith("0.0% of the responses of the SFT model end with EOS")
    assert "PPO" not in rows["responses that never end"]


def test_result_table_names_judge_and_paired_difference() -> None:
    facts = {"judge": "reward model", "judge_trained_on": "True"}
    numbers = EVALUATION | {f"by_source/a.jsonl/win_rate/{part}": 0.5 for part in ("mean", "low", "high")}
    numbers |= {f"rules/length/sft/{part}": 0.25 for part in ("mean", "low", "high")}
    made = ArtifactRef("evaluate", "b" * 16, "d", "/store/e", numbers, None, facts)
    rows = dict(results(summarize({"evaluate": StageRecord(made, 1.0, False)}, 1.0, IDENTITY)))
    assert (
        rows["win rate, PPO over SFT (judge: reward model, which PPO was trained on)"]
        == "0.800  [0.700, 0.900]"
    )
    assert rows["gold reward, difference by prompt"] == "1.000  [0.900, 1.100]"
    assert rows["rule length, SFT"].startswith("0.250"), "not the length of the responses"
    assert not any("a.jsonl" in name for name in rows)


def test_result_table_has_the_agreement_of_a_language_model() -> None:
    agreement = {"mean": 0.7, "low": 0.6, "high": 0.8}
    numbers = {f"language_model/agreement/{part}": value for part, value in agreement.items()}
    facts = {"judge": "language model m_1[/b]", "judge_trained_on": "False"}
    made = ArtifactRef(
        "evaluate", "b" * 16, "d", "/store/e", EVALUATION | numbers | {"inconsistent": 0.25}, None, facts
    )
    summary = summarize({"evaluate": StageRecord(made, 1.0, False)}, 1.0, IDENTITY)
    rows = dict(results(summary))
    assert rows["win rate, PPO over SFT (judge: language model m_1[/b])"] == "0.800  [0.700, 0.900]"
    assert rows["judge, agreement with held-out pairs"] == "0.700  [0.600, 0.800]"
    assert rows["verdicts that change with the order (ties)"] == "0.250"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(result_table(summary))
    assert "language model m_1[/b])" in console.export_text(), "no markup"


def test_result_table_has_dpo_next_to_ppo() -> None:
    numbers = EVALUATION | {"kl_dpo": 1.5}
    controlled = "win_rate_ppo_over_dpo_length_controlled"
    for name in ("win_rate_ppo_over_dpo", controlled, "gold_reward/dpo", "gold_reward/ppo_minus_dpo"):
        numbers |= {f"{name}/mean": 0.6, f"{name}/low": 0.5, f"{name}/high": 0.7}
    summary = summarize({"evaluate": StageRecord(ref("evaluate", **numbers), 1.0, False)}, 1.0, IDENTITY)
    rows = dict(results(summary))
    for name in ("gold reward, DPO", "gold reward, PPO minus DPO by prompt", "win rate, PPO over DPO"):
        assert rows[name] == "0.600  [0.500, 0.700]"
    assert rows["the same, length-controlled"] == "0.600  [0.500, 0.700]"
    assert rows["KL to the SFT model, DPO"] == "1.5 nats per response"
    assert summary["evaluate"]["policies"]["dpo"] == {"kl": 1.5}


@pytest.mark.parametrize(
    ("chosen", "rejected", "shown"),
    [
        (0.4, -1.25, "0.400, -1.250"),
        (-0.5, -2.0, "-0.500, -2.000: both fall, so the policy moves to responses that are in no pair"),
    ],
)
def test_implicit_rewards_of_dpo_that_both_fall_are_named(chosen: float, rejected: float, shown: str) -> None:
    metrics = {"accuracy": 0.7, "margin": 1.5, "rewards/chosen": chosen, "rewards/rejected": rejected}
    summary = summarize({"dpo": StageRecord(ref("dpo", **metrics), 1.0, False)}, 1.0, IDENTITY)
    assert summary["dpo"] == {"chosen": chosen, "rejected": rejected, "accuracy": 0.7, "margin": 1.5}
    assert results(summary) == [
        ("DPO, held-out accuracy, margin", "0.700, 1.500"),
        ("DPO, implicit reward of chosen, of rejected", shown),
    ]
    metrics = headline_metrics(summary)
    assert (metrics["dpo_accuracy"], metrics["dpo_margin"]) == (0.7, 1.5)


def test_partial_summary_omits_other_stages() -> None:
    summary = summarize(records("data", "sft"), 3.0, IDENTITY)
    assert set(summary["stages"]) == {"data", "sft"}
    assert not {"reward", "evaluate", "weights_sha256"} & set(summary)
    assert results(summary) == []


def test_a_base_model_that_is_not_trained_is_named_in_the_row_of_sft() -> None:
    for metrics, named in (({"eos_rate": 0.5}, True), ({"eval_loss": 1.0}, False)):
        made: dict[StageName, StageRecord] = {"sft": StageRecord(ref("sft", **metrics), 1.0, False)}
        out = io.StringIO()
        Console(file=out, width=120).print(stage_table(summarize(made, 1.0, IDENTITY)))
        assert ("the base model, not trained" in out.getvalue()) == named


def test_incomplete_interval_is_not_reported() -> None:
    made = StageRecord(ref("evaluate", **{"win_rate/mean": 0.8, "kl": 1.0}), 1.0, False)
    assert summarize({"evaluate": made}, 1.0, IDENTITY)["evaluate"] == {
        "rl_algorithm": "PPO",
        "policies": {"ppo": {"kl": 1.0}},
    }


def test_markdown_shows_every_stage_and_escapes_cells() -> None:
    made = records(*STAGES)
    made["sft"] = StageRecord(ref("sft", **{"loss|x": 1.0}), 1.0, False)
    assert "| loss\\|x | 1 |" in stage_markdown("sft", made["sft"], {"MLflow": "http://m"})
    text = run_markdown(summarize(made, 100.0, IDENTITY))
    assert all(f"| {stage} |" in text for stage in STAGES)
    assert "| data | 2.5 s | reused |" in text, "its artifact does not say how long it took"
    assert r"win rate, PPO over SFT | 0.800 \[0.700, 0.900\]" in text


@pytest.mark.parametrize(
    ("continued", "reused", "made", "shown"),
    [
        (False, False, "99.0", "24.2 s"),
        (True, False, "13.5", "24.2 s"),
        (True, False, "61.0", "24.2 s of 61.0 s"),
        (False, True, "13.5", "made in 13.5 s"),
    ],
)
def test_a_stage_has_the_time_of_its_last_line_and_a_second_one_is_named(
    continued: bool, reused: bool, made: str, shown: str
) -> None:
    artifact = replace(ref("sft"), attributes={"seconds": made})
    stages: dict[StageName, StageRecord] = {"sft": StageRecord(artifact, 24.2, reused, continued)}
    assert f"| sft | {shown} |" in run_markdown(summarize(stages, 30.0, IDENTITY))


def test_run_without_new_artifacts_is_reported_as_reused() -> None:
    made = {stage: StageRecord(ref(stage), 0.5, True) for stage in STAGES}
    summary = summarize(made, 8.8, IDENTITY)
    assert run_markdown(summary).startswith("# Pipeline reused in 8.8 s\n")
    made["ppo"] = StageRecord(ref("ppo"), 0.5, False)
    assert run_markdown(summarize(made, 8.8, IDENTITY)).startswith("# Pipeline finished in 8.8 s\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (99.4, "99.4 s"), (99.6, "1 min 40 s"), (185.4, "3 min 05 s"), (7620.0, "2 h 07 min")],
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text
