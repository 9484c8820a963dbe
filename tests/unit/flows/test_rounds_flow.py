"""The flow `rlhf-rounds` and the command `rlhf rounds`.

- each round calls the pipeline with the overrides of the user and those of the round
- rounds that need votes of people end without an error, with one notification, a state of their own and
  exit code 4; Prefect returns what the flow has made, and the table has the rows of the votes
- an error before a round is a notification; that of a round is sent by the round's own flow
- the command checks the configuration of the first round, which reuses the check, and prints the table
- without a server, the command runs the rounds without the flow, to the same end
- a number of rounds below 1 is an error before anything starts
"""

from __future__ import annotations

import os
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from flows import rounds as rounds_flow
from flows.notify import notify_failure
from flows.rounds import end_of_rounds, rounds, run_rounds_with
from rlhf_cli.main import main
from rlhf_cli.runs import print_end
from rlhf_core.errors import DataError, RLHFError, VotesNeeded
from rlhf_core.evaluation.review import AnswersToPrompt, SampledAnswer
from rlhf_core.ops import rounds as direct
from rlhf_core.ops.review import open_review, record_votes
from rlhf_core.ops.rounds import Rounds, check_first_round, run_rounds_of_file
from rlhf_core.run.checks import reuse_or_check
from tests.support.prefect_api import PrefectApi
from tests.support.sampled_run import made_run, save_votes

DEMO = "deployments/configs/demo.yaml"
NO_ROWS = {"best": 0, "pairs": 0, "policy": "ppo"}
EVALUATION = {
    "gold_reward": {"sft": {"mean": -2.0}, "ppo": {"mean": -1.0}},
    "policies": {"ppo": {"win_rate": {"mean": 0.7}}},
}


def summary_of(number: int) -> dict[str, Any]:
    return {
        "stages": {"sample": {"key": f"{number:016x}"}},
        "sample": {"best": 5, "pairs": 4, "policy": "ppo"},
        "evaluate": EVALUATION,
        "run": f"demo-{number}",
        "where": {"report": f"/store/{number}/report.html"},
    }


def test_each_round_is_a_run_of_the_pipeline() -> None:
    calls: list[Any] = []

    def pipeline(**parameters: Any) -> dict[str, Any]:
        calls.append(parameters)
        return summary_of(len(calls))

    done = run_rounds_with(pipeline, DEMO, 2, ("ppo.steps=3",), "sample")
    assert end_of_rounds(done) is done
    assert [each["run"] for each in done.summaries] == ["demo-1", "demo-2"]
    artifact = f"artifact://sample/{1:016x}"
    assert calls == [
        {"config": DEMO, "overrides": ("ppo.steps=3", "sample={}"), "until": "sample"},
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
            "until": "sample",
        },
    ]
    assert rounds.on_crashed_hooks == [notify_failure]


def test_rounds_that_need_votes_end_without_an_error(
    tmp_path: Path, api: PrefectApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = (SampledAnswer("red", None, True), SampledAnswer("blue", None, True))
    prompts = [AnswersToPrompt(f"p{number}", f"Prompt {number}", answers) for number in range(3)]
    summaries = [
        made_run(tmp_path, f"demo-{number}", prompts, f"{number:016x}", sample=NO_ROWS, where={})
        for number in (1, 2)
    ]
    calls: list[tuple[str, ...]] = []

    def pipeline(config: str, overrides: tuple[str, ...], until: str) -> dict[str, Any]:
        assert until == "register"
        calls.append(overrides)
        return summaries[len(calls) - 1]

    review = open_review("demo-1", str(tmp_path), "sample")
    record_votes(review, save_votes(tmp_path / "votes.json", review.pairs, ["1", "2", "tie"]))
    monkeypatch.setattr(rounds_flow, "rlhf", pipeline)
    done = rounds(DEMO, 3, ("sample.judge=people", f"run.home={tmp_path}"))  # a run of Prefect's engine
    assert isinstance(done, Rounds) and len(calls) == 2
    assert [each["run"] for each in done.summaries] == ["demo-1", "demo-2"]
    assert [state["type"] for state in api.states] == ["RUNNING", "COMPLETED"]
    assert (api.states[-1]["name"], api.states[-1]["message"]) == ("Votes needed", done.votes_needed)
    assert api.messages == [("demo-seed0-a1 needs votes", done.votes_needed)]
    capsys.readouterr()
    assert print_end(done) == 4
    printed = capsys.readouterr().out
    cells = [line.split("│")[-4:-1] for line in printed.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in row] for row in cells]
    assert rows == [["0", "0", "demo-1"], ["0", "0", "demo-2"]], printed
    assert done.votes_needed is not None and done.votes_needed in printed
    assert f"rlhf review demo-2 --home {tmp_path} --of sample --votes FILE" in printed


@pytest.mark.parametrize("case", ["configuration", "nothing for the next round", "round"])
def test_an_error_is_one_notification(case: str, tmp_path: Path, api: PrefectApi) -> None:
    def pipeline(**_parameters: Any) -> dict[str, Any]:
        if case == "round":
            raise DataError("no rows")
        return summary_of(1) | {"sample": NO_ROWS}

    config = str(tmp_path / "none.yaml") if case == "configuration" else DEMO
    with pytest.raises(RLHFError) as error:
        run_rounds_with(pipeline, config, 2, (f"run.home={tmp_path}",))
    if case == "round":
        assert api.messages == []
    else:
        assert api.messages == [("demo-seed0-a1 failed", f"{type(error.value).__name__}: {error.value}")]


@pytest.mark.parametrize("served", [True, False])
def test_the_first_round_reuses_the_check_of_the_command(
    served: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("ppo.steps=3", f"run.home={tmp_path}", f"store.url={tmp_path}/store")
    reused: list[bool] = []

    def check() -> None:
        checked = check_first_round(DEMO, given)
        assert checked.config.sample is not None and checked.config.ppo.steps == 3

        def pipeline(config: str, overrides: tuple[str, ...], until: str) -> dict[str, Any]:
            reused.append(reuse_or_check(config, overrides) is checked)
            return summary_of(1)

        if served:
            run_rounds_with(pipeline, DEMO, 1, given)
        else:
            monkeypatch.setattr(direct, "run_file", pipeline)
            run_rounds_of_file(DEMO, 1, given)

    copy_context().run(check)  # the check is remembered in the context
    assert reused == [True]


@pytest.mark.parametrize("voted", [True, False])
def test_without_a_server_the_command_runs_the_rounds_itself(
    voted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only a copy is changed by the command.
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    monkeypatch.setattr(os, "environ", environment)
    calls: list[Any] = []

    def run_file(config: str, overrides: tuple[str, ...], until: str) -> dict[str, Any]:
        calls.append((config, overrides[1:], until))
        return summary_of(len(calls))

    def rows_of_votes(*_: object) -> Path:
        if voted:
            return tmp_path / "rows.jsonl"
        raise VotesNeeded("open the page")

    monkeypatch.setattr(direct, "run_file", run_file)
    monkeypatch.setattr(direct, "rows_of_votes", rows_of_votes)
    given = ("sample.judge=people", f"store.url={tmp_path}/store")
    command = ["rounds", DEMO, *given, "--until", "sample", "--home", str(tmp_path)]
    assert copy_context().run(main, command) == (0 if voted else 4)
    assert len(calls) == (2 if voted else 1)
    assert calls[0] == (DEMO, given, "sample")
    printed = capsys.readouterr().out
    assert ("demo-2" in printed, "open the page" in printed) == (voted, not voted)


def test_the_table_of_the_rounds_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_end(Rounds([summary_of(1), summary_of(2), summary_of(3)]))
    printed = capsys.readouterr().out
    assert "gold reward on held-out prompts" in printed and "-2.000" in printed and "demo-3" in printed
    assert "report of demo-2: /store/2/report.html" in printed


def test_less_than_one_round_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rounds", DEMO, "--rounds", "0", f"run.home={tmp_path}/home"]) == 2
    assert "--rounds: must be at least 1; got 0" in capsys.readouterr().err
    assert not (tmp_path / "home").exists(), "nothing was started"
