"""`rlhf review` on a run in a store, with MLflow on SQLite.

- the page is written for a run by its name or its summary, with the policy of `register.policy`
- votes are kept, recorded once and become rows
- votes are recorded in the tracker of the run, also if it reused the evaluation of another one
- win rate of all recorded files, people and their agreement are printed and logged; a person counts once
- prompts that are more than one message have no row
- runs without evaluation, and files that are no votes, are input errors
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import main as cli
from rlhf_core.config import PipelineConfig
from rlhf_core.data.dataset import write
from rlhf_core.data.messages import Message
from rlhf_core.data.templates import Encoder
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.ops.review import _tracker, open_review
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store
from rlhf_core.tracking.mlflow_client import Mlflow
from rlhf_core.types import PromptExample

TEXTS = [f"Tell me about a small {animal}." for animal in ("fox", "cat", "dog", "bear")]
SAMPLES = [
    {"prompt_id": f"p{i}", "prompt": text, "sft": f"bad {i}", "ppo": f"good {i}", "winner": "ppo"}
    | {"dpo": f"other {i}", "winner_dpo": "sft"}
    for i, text in enumerate(TEXTS)
]


@pytest.fixture
def run(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The summary of a run in `tmp_path`. The last prompt has a system message."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    config = PipelineConfig.model_validate({"run": {"home": str(tmp_path), "name": "small"}})
    store = ArtifactStore(Store(config.store_url), tmp_path / "cache")
    tree = config.model_dump(mode="json", by_alias=True)
    made = Provenance(config=tree)
    tokenizer = train_tokenizer(TEXTS, 300)
    encoder = Encoder(tokenizer, "chat")
    prompts = []
    for i, text in enumerate(TEXTS):
        messages = [Message("user", text)] if i < 3 else [Message("system", "x"), Message("user", text)]
        prompts.append(PromptExample(f"p{i}", text, encoder.prompt(messages)))
    tokenizer.save_pretrained(tmp_path / "data" / "tokenizer")
    write(tmp_path / "data", "prompts", "eval", prompts)
    (tmp_path / "evaluate").mkdir()
    lines = "".join(json.dumps(sample) + "\n" for sample in SAMPLES)
    (tmp_path / "evaluate" / "samples.jsonl").write_text(lines)
    stages = {
        stage: {"artifact": store.publish(stage, "c" * 16, tmp_path / stage, made).uri}
        for stage in ("data", "evaluate")
    }
    mlflow_run = Mlflow(f"sqlite:///{database}", "review").create_run("small", {}).run_id
    summary = {
        "run": "small-seed0",
        "stages": stages,
        "mlflow_run_id": mlflow_run,
        "tracking_uri": f"sqlite:///{database}",
    }
    file = tmp_path / "runs" / "small-seed0" / "summary.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(summary))
    return file


def saved_votes(run: Path, choices: dict[str, str]) -> Path:
    """Write a file of votes: `sft`, `ppo` or `tie` by prompt."""
    home = run.parent.parent.parent
    review = open_review("small-seed0", str(home))
    page = review.write_page(None)[0].read_text()
    votes = []
    for pair in review.pairs:
        choice = choices.get(pair.sample["prompt_id"])
        policy, other = ("1", "2") if pair.policy_first else ("2", "1")
        votes.append({"ppo": policy, "sft": other, "tie": "tie", None: None}[choice])
    digest = page.split('data-page="')[1][:64]
    content = {"format": "rlhf-review-1", "page": digest, "saved": 1700000000000, "votes": votes}
    file = home / "votes.json"
    file.write_text(json.dumps(content))
    return file


def rlhf(*arguments: Any) -> int:
    return cli.main(list(map(str, arguments)))


def test_votes_are_counted_recorded_once_and_become_preferences(
    run: Path, database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = run.parent.parent.parent
    assert rlhf("review", "small-seed0", "--home", home) == 0
    assert f"4 pairs: open {run.parent}/review/against-sft.html" in capsys.readouterr().out
    votes = saved_votes(run, {"p0": "ppo", "p1": "sft", "p2": "tie", "p3": "ppo"})
    for _ in range(2):
        assert rlhf("review", run, "--votes", votes, "--home", home) == 0
        out = capsys.readouterr().out
        assert "win rate of the policy over the SFT model: 0.625" in out
        assert "on 4 pairs" in out and "recorded: 1 files, 1 people, 4 votes" in out
        assert "agreement with the judge of the run: 0.625" in out
        assert "2 preference rows for data.preference" in out, "the fourth prompt is a conversation"
    [file] = (run.parent / "review").glob("labels-*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(rows, key=lambda row: str(row["prompt"])) == [
        {"prompt": TEXTS[1], "chosen": "bad 1", "rejected": "good 1"},
        {"prompt": TEXTS[0], "chosen": "good 0", "rejected": "bad 0"},
    ]
    mlflow = Mlflow(f"sqlite:///{database}", "review")
    run_id = json.loads(run.read_text())["mlflow_run_id"]
    points = mlflow._client.get_metric_history(run_id, "review/against_sft/win_rate/mean")
    assert [point.value for point in points] == [0.625]
    assert len(mlflow._client.list_artifacts(run_id, "review")) == 2


def test_the_win_rate_of_all_recorded_files_is_printed_and_logged(
    run: Path, database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = run.parent.parent.parent
    first = {"p0": "ppo", "p1": "ppo", "p2": "tie"}
    given = [(first, "Ann", 5), ({"p0": "ppo", "p1": "sft"}, "Bob", 9), ({**first, "p2": "ppo"}, "ann", 7)]
    for choices, person, saved in [*given, given[1]]:
        file = saved_votes(run, choices)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"person": person, "saved": saved}))
        assert rlhf("review", run, "--votes", file, "--home", home) == 0
    lines = capsys.readouterr().out.splitlines()
    rates = [line for line in lines if line.startswith("win rate")]
    assert rates[0].endswith("0.833 [0.310, 0.982] on 3 pairs")
    assert rates[2].startswith("win rate of the policy over the SFT model: 0.833 [") and rates[3] == rates[2]
    people = [line for line in lines if line.startswith("recorded")]
    assert people[0] == "recorded: 1 files, 1 people, 3 votes"
    # Ann's last file replaces her first one. Both agree on the first pair only.
    assert people[2] == people[3] == "recorded: 3 files, 2 people, 5 votes"
    agreement = [line.partition("of people: ")[2] for line in lines if line.startswith("agreement")]
    assert agreement[0] == "none, because no pair has votes of two people"
    assert agreement[2] == agreement[3] == "0.500 on 2 pairs"
    mlflow = Mlflow(f"sqlite:///{database}", "review")
    run_id = json.loads(run.read_text())["mlflow_run_id"]
    points = mlflow._client.get_metric_history(run_id, "review/against_sft/win_rate/mean")
    assert [point.value for point in points] == pytest.approx([2.5 / 3, 2 / 3, 2.5 / 3])
    last = mlflow._client.get_run(run_id).data.metrics
    assert last["review/against_sft/people"] == 2
    assert last["review/against_sft/agreement_of_people"] == 0.5


@pytest.mark.parametrize(("policy", "shown"), [("dpo", "other"), ("ppo", "good"), (None, "good")])
def test_the_page_has_the_policy_that_is_registered(policy: str | None, shown: str, run: Path) -> None:
    """The run ended before `register`. The summary need not name the policy."""
    summary = json.loads(run.read_text())
    run.write_text(json.dumps(summary if policy is None else summary | {"policy": policy}))
    pairs = open_review("small-seed0", str(run.parent.parent.parent)).pairs
    assert sorted(pair.sample[pair.policy] for pair in pairs) == [f"{shown} {i}" for i in range(4)]


@pytest.mark.parametrize("where", ["another tracker", "the database in run.home"])
def test_votes_are_recorded_in_the_tracker_of_the_run(
    where: str, run: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation was reused. Its own run had the tracker of the variable, or none."""
    home = run.parent.parent.parent
    summary = json.loads(run.read_text())
    if where == "another tracker":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home}/unused.db")
    else:
        shutil.copy(database, home / "mlflow.db")
        summary["tracking_uri"] = None
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home}/unused.db")
        database = home / "mlflow.db"
    run.write_text(json.dumps(summary))
    assert rlhf("review", run, "--votes", saved_votes(run, {"p0": "ppo"}), "--home", home) == 0
    mlflow = Mlflow(f"sqlite:///{database}", "review")
    assert mlflow._client.get_metric_history(summary["mlflow_run_id"], "review/against_sft/votes")
    assert not (home / "unused.db").exists()


def test_the_variable_has_the_credentials_of_the_tracker(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = run.parent.parent.parent
    summary = json.loads(run.read_text())
    summary["tracking_uri"] = "http://127.0.0.1:9/mlflow"
    run.write_text(json.dumps(summary))
    review = open_review("small-seed0", str(home))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:pass@127.0.0.1:9/mlflow")
    assert _tracker(review).uri == "http://ann:pass@127.0.0.1:9/mlflow"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:pass@127.0.0.1:8/mlflow")
    assert _tracker(review).uri == "http://127.0.0.1:9/mlflow"


def test_what_cannot_be_reviewed_is_an_input_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = run.parent.parent.parent
    assert rlhf("review", "other", "--home", home) == 2
    assert "there is no finished run other" in capsys.readouterr().err
    assert rlhf("review", "small-seed0", "--home", home, "--votes", home / "missing.json") == 2
    assert "--votes: cannot read" in capsys.readouterr().err
    assert rlhf("review", "small-seed0", "--home", home, "--votes", run) == 2
    assert "must be a file that a review page saved" in capsys.readouterr().err
    assert rlhf("review", "small-seed0", "--home", home, "--against", "champion") == 2
    assert "has no stage register" in capsys.readouterr().err
    assert rlhf("review", "small-seed0", "--home", home, "--pairs", 5) == 2
    assert "--pairs: is for --of sample; got 5 for another page" in capsys.readouterr().err
    assert rlhf("review", run, "--output", "/dev/null/x/y.html", "--home", home) == 2
    assert "--output: the page /dev/null/x/y.html cannot be written (Not a dir" in capsys.readouterr().err
    summary = json.loads(run.read_text())
    del summary["stages"]["evaluate"]
    run.write_text(json.dumps(summary))
    assert rlhf("review", "small-seed0", "--home", home) == 2
    assert "has no stage evaluate" in capsys.readouterr().err
