"""`rlhf champions`, `rollback` and `promote`, and their Prefect flows, on a real registry.

- the history is printed with reasons; a rollback moves the alias and says so; typed again it says
  that nothing changed
- what cannot be done ends with exit code 2 and a message that names the way out
- the flows have typed parameters, show the history as a table, and notify once; a restarted flow run
  notifies also if the move was made before
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import ParameterTypeError

from flows import champion
from rlhf_cli import main as cli
from rlhf_core.ops.servers import servers
from rlhf_core.tracking.champion_log import Move, append
from rlhf_core.tracking.database import ensure_database
from rlhf_core.tracking.mlflow_client import Mlflow
from tests.support.champions import make_champion


@pytest.fixture
def model(database: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A model whose champions were the versions 1 and 2."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    mlflow, name = Mlflow(f"sqlite:///{database}", "commands"), f"commands-{abs(hash(request.node.name))}"
    mlflow.ensure_model(name, "")
    for version, previous in (("1", None), ("2", "1")):
        mlflow.create_version(name, source="/x", run_id=None, tags={}, description="")
        move = Move(1e9 + int(version), "crowned", version, previous, f"it won {version}")
        make_champion(mlflow, name, move)
    return name


def rlhf(*arguments: str) -> int:
    return cli.main(list(arguments))


def test_without_a_name_the_champions_of_all_models_are_printed(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mlflow, "all_model_names", lambda _: [model] * 101)
    assert rlhf("champions") == 0
    assert capsys.readouterr().out.count(f"{model}: champion is version 2\n") == 101


def test_commands_print_the_history_and_a_rollback_can_be_repeated(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rlhf("champions", model) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{model}: champion is version 2",
        "  2001-09-09 01:46  version 1 promoted automatically: it won 1",
        "  2001-09-09 01:46  version 2 promoted automatically: it won 2",
    ]
    assert rlhf("champions", model, "--json") == 0
    found = json.loads(capsys.readouterr().out)[model]
    assert found["champion"] == "2"
    assert [(move["version"], move["reason"]) for move in found["history"]] == [
        ("1", "it won 1"),
        ("2", "it won 2"),
    ]
    assert rlhf("rollback", model, "--reason", "it insults people") == 0
    assert "rolled back from version 2 to 1: it insults people" in capsys.readouterr().out
    assert rlhf("rollback", model, "--reason", "it insults people") == 0
    made = r"this rollback was made at [\d-]+ [\d:]+ UTC"
    further = "to go back further use --to or another reason"
    assert re.fullmatch(f"{model}: nothing changed: {made}; {further}\n", capsys.readouterr().out)
    assert rlhf("promote", model, "2", "--reason", "it does not") == 2
    error = capsys.readouterr().err
    assert "was revoked: it insults people" in error and "remove the tag rlhf.revoked" in error
    assert rlhf("champions") == 0
    assert f"{model}: champion is version 1" in capsys.readouterr().out


def test_a_refusal_is_shown_with_its_reason(
    model: str, database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow = Mlflow(f"sqlite:///{database}", "commands")
    for reason in ("win rate 0.469 is below 0.5", "it lost"):
        tags = {"rlhf.gate_reason": reason}
        mlflow.create_version(model, source="/x", run_id=None, tags=tags, description="")
    # Its decision is the move of the history. A refused version that a person has revoked stays one.
    mlflow.tag_version(model, "2", {"rlhf.gate_reason": "it won 2"})
    mlflow.tag_version(model, "4", {"rlhf.revoked": "it insults people"})
    assert rlhf("champions", model) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "refused" in line] == lines[3:], "the history is sorted by time"
    refused, revoked = lines[3:]
    assert revoked.endswith("version 4 refused: it lost")
    now = f"{datetime.now(UTC):%Y-%m}"
    assert re.fullmatch(rf"  {now}-\d\d \d\d:\d\d  version 3 refused: win rate 0\.469 is below 0\.5", refused)
    assert rlhf("champions", model, "--json") == 0
    found, _ = json.loads(capsys.readouterr().out)[model]["refused"]
    assert (found["version"], found["reason"]) == ("3", "win rate 0.469 is below 0.5")


def test_a_winner_whose_registration_was_killed_is_no_refusal(
    model: str, database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow = Mlflow(f"sqlite:///{database}", "commands")
    tags = {"rlhf.gate_reason": "win rate 0.7", "rlhf.gate_wins": "True"}
    mlflow.create_version(model, source="/x", run_id=None, tags=tags, description="")
    assert rlhf("champions", model) == 0
    out = capsys.readouterr().out
    assert "version 3 decided, not finished (run it again): win rate 0.7" in out and "refused" not in out


def test_a_change_on_the_command_line_names_the_deployment_that_emits_an_event(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "no event was emitted; the deployment rlhf-rollback/rollback does the same with one"
    monkeypatch.setattr(servers, "are_up", lambda home: True)
    assert rlhf("rollback", model, "--reason", "it insults people") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [line]
    assert rlhf("rollback", model, "--reason", "it insults people") == 0
    assert "event" not in capsys.readouterr().out, "nothing was changed"


def test_a_registry_without_models_is_no_empty_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    database = tmp_path / "mlflow.db"
    ensure_database(database)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    assert rlhf("champions") == 0
    assert "no registered models yet" in capsys.readouterr().out


def test_a_model_without_champion_and_moves_outside_of_the_history(
    model: str, database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow = Mlflow(f"sqlite:///{database}", "commands")
    append(mlflow, model, 0, Move(2e9, "crowned", "1", "9", "r"))
    rlhf("champions", model)
    assert "by hand" not in capsys.readouterr().out, "only finished moves count"
    mlflow.set_alias(model, "champion", "1")
    rlhf("champions", model)
    shown = capsys.readouterr().out
    assert (
        "warning: the alias `champion` was moved by hand: the history says version 2, and version 1" in shown
    )
    assert rlhf("rollback", model, "--reason", "it insults people", "--to", "none") == 0
    assert "rolled back from version 1 to no champion: it insults people" in capsys.readouterr().out
    assert rlhf("champions", model) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{model}: no champion"


def test_unknown_names_and_folders_are_input_errors(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rlhf("champions", "nobody") == 2
    assert "has no registered model 'nobody'" in capsys.readouterr().err
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert rlhf("rollback", model, "--reason", "r", "--home", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"error: this folder has no runs (--home): there is no database of MLflow at {tmp_path}/mlflow.db"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    assert rlhf("rollback", model, "--reason", "r", "--home", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: tracking.uri (or MLFLOW_TRACKING_URI): there is no database of")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mysql+none://me:canary@host/db")
    assert rlhf("champions", model) == 2
    error = capsys.readouterr().err
    assert "is no address of a database" in error and "canary" not in error
    assert not list(tmp_path.iterdir()), "nothing is created"


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """The events that flows emit: name, resource, version. Without a server, Prefect would start one for the
    first event, which would run until the end of this process.
    """
    events: list[tuple[str, str, str]] = []

    def emit(event: str, resource: str, *, version: str, reason: str) -> None:
        events.append((event, resource, version))

    monkeypatch.setattr(champion, "emit", emit)
    return events


def test_flows_do_the_same_and_show_the_history(
    model: str, emitted: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[dict[str, Any]] = []
    sent: list[tuple[str, str]] = []
    monkeypatch.setattr(champion, "create_table_artifact", lambda **table: tables.append(table))
    monkeypatch.setattr(champion, "notify", lambda subject, body: sent.append((subject, body)))
    for _ in range(2):
        assert champion.rollback.fn(model, "it insults people") == "1"
    assert sent == [(f"{model} rolled back to version 1", "it insults people")]
    assert emitted == [("policy.rolled-back", f"model.{model}", "1")]
    [table, again] = tables
    assert again == table
    assert [(row["version"], row["action"]) for row in table["table"]] == [
        ("1", "rolled back"), ("2", "promoted automatically"), ("1", "promoted automatically"),
    ]  # fmt: skip
    times = [datetime.fromisoformat(f"{row['time (UTC)']}+00:00") for row in table["table"]]
    assert times == sorted(times, reverse=True)
    assert abs(datetime.now(UTC) - times[0]) < timedelta(minutes=10)
    form = json.dumps(champion.promote.parameters.model_dump())
    assert champion.promote.parameters.required == ["model", "version", "reason"]
    assert "Number of the version" in form


def test_a_flow_run_that_is_restarted_sends_its_notification(
    model: str, database: Path, emitted: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed between the move and the notification."""
    sent: list[str] = []
    monkeypatch.setattr(champion, "create_table_artifact", lambda **table: None)
    monkeypatch.setattr(champion, "notify", lambda subject, body: sent.append(f"{subject}: {body}"))
    assert rlhf("rollback", model, "--reason", "it insults people") == 0
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "2")
    champion.rollback.fn(model, "it insults people")
    assert sent == [f"{model} rolled back to version 1: it insults people"]
    champion.promote.fn(model, "1", "it insults people")
    assert len(sent) == 1, "the last move was no promotion"
    assert rlhf("rollback", model, "--to", "none", "--reason", "all do") == 0
    version = Mlflow(f"sqlite:///{database}", "commands").create_version(
        model, source="/s", run_id=None, tags={}, description=""
    )
    assert rlhf("promote", model, version.version, "--reason", "it is polite") == 0
    champion.promote.fn(model, version.version, "another reason")
    assert len(sent) == 1, "another call promoted it"
    champion.promote.fn(model, version.version, "it is polite")
    assert sent[1:] == [f"{model} version {version.version} promoted: it is polite"]
    assert emitted == [
        ("policy.rolled-back", f"model.{model}", "1"),
        ("policy.promoted", f"model.{model}", version.version),
    ]


@pytest.mark.parametrize("parameters", [{"model": "a b"}, {"version": "x"}, {"reason": ""}])
def test_forms_refuse_wrong_values(parameters: dict[str, str]) -> None:
    given = {"model": "demo-policy", "version": "1", "reason": "because"} | parameters
    with pytest.raises(ParameterTypeError, match=next(iter(parameters))):
        champion.promote.validate_parameters(given)
