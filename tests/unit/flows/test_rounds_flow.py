"""The flow `rlhf-rounds` and the command `rlhf rounds`.

- each round calls the flow of the pipeline with the overrides of the user and those of the round
- an error before a round is a notification; that of a round is sent by the round's own flow
- the command checks the configuration of the first round and prints the table
- a number of rounds below 1 is an error before anything starts
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import rounds as module
from flows.notify import notify_failure
from rlhf_cli import rounds as rounds_command
from rlhf_cli import start
from rlhf_cli.main import main
from rlhf_core.errors import DataError, RLHFError
from rlhf_core.run import checks

DEMO = "deployments/configs/demo.yaml"
EVALUATION = {"gold_reward": {"sft": {"mean": -2.0}, "ppo": {"mean": -1.0}}, "win_rate": {"mean": 0.7}}


def summary_of(number: int) -> dict[str, Any]:
    return {
        "stages": {"sample": {"key": f"{number:016x}"}},
        "sample": {"best": 5, "pairs": 4},
        "evaluate": EVALUATION,
        "run": f"demo-{number}",
        "where": {"report": f"/store/{number}/report.html"},
    }


def test_each_round_is_a_run_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def rlhf(**parameters: Any) -> dict[str, Any]:
        calls.append(parameters)
        return summary_of(len(calls))

    monkeypatch.setattr(module, "rlhf", rlhf)
    summaries = module.rounds.fn(DEMO, 2, ("ppo.steps=3",))
    assert [each["run"] for each in summaries] == ["demo-1", "demo-2"]
    artifact = f"artifact://sample/{1:016x}"
    assert calls == [
        {"config": DEMO, "overrides": ("ppo.steps=3", "sample={}")},
        {
            "config": DEMO,
            "overrides": (
                "ppo.steps=3",
                "sample={}",
                f"data.sft.1.path={artifact}/best.jsonl",
                "data.sft.1.labelled_by=reward",
                f"data.preference.1.path={artifact}/pairs.jsonl",
                "data.preference.1.labelled_by=reward",
            ),
        },
    ]
    assert module.rounds.on_crashed_hooks == [notify_failure]


@pytest.mark.parametrize("case", ["configuration", "nothing for the next round", "round"])
def test_an_error_is_one_notification(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rlhf(**_parameters: Any) -> dict[str, Any]:
        if case == "round":
            raise DataError("no rows")
        return summary_of(1) | {"sample": {"best": 0, "pairs": 0}}

    sent: list[tuple[str, str]] = []
    monkeypatch.setattr(module, "notify", lambda subject, body: sent.append((subject, body)))
    monkeypatch.setattr(module, "runtime", SimpleNamespace(flow_run=SimpleNamespace(name="demo-seed0-a1")))
    monkeypatch.setattr(module, "rlhf", rlhf)
    config = str(tmp_path / "none.yaml") if case == "configuration" else DEMO
    with pytest.raises(RLHFError) as error:
        module.rounds.fn(config, 2, (f"run.home={tmp_path}",))
    if case == "round":
        assert sent == []
    else:
        assert sent == [("demo-seed0-a1 failed", f"{type(error.value).__name__}: {error.value}")]


def test_the_command_checks_and_prints_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def check_config(path: str, overrides: tuple[str, ...]) -> Any:
        seen["checked"] = (path, overrides)
        run = SimpleNamespace(home=str(tmp_path), name="demo", seed=0)
        return SimpleNamespace(config=SimpleNamespace(run=run))

    def rounds(**parameters: Any) -> list[dict[str, Any]]:
        seen["flow"] = parameters
        return [summary_of(1), summary_of(2), summary_of(3)]

    monkeypatch.setattr(checks, "check_config", check_config)
    monkeypatch.setattr(checks, "reuse_check", lambda checked: None)
    monkeypatch.setattr(start, "with_prefect", lambda config, call: call())
    monkeypatch.setattr(module, "rounds", rounds)
    assert main(["rounds", DEMO, "--rounds", "3", "ppo.steps=3"]) == 0
    assert seen["checked"] == (DEMO, ("ppo.steps=3", "sample={}"))
    assert seen["flow"] == {"config": DEMO, "number": 3, "overrides": ("ppo.steps=3",)}
    printed = capsys.readouterr().out
    assert "gold reward on held-out prompts" in printed and "-2.000" in printed and "demo-3" in printed
    assert "report of demo-2: /store/2/report.html" in printed


def test_too_few_rounds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rounds_command, "_run", lambda *_arguments: pytest.fail("it was started"))
    assert main(["rounds", DEMO, "--rounds", "0"]) == 2
    assert "--rounds: must be at least 1; got 0" in capsys.readouterr().err
