"""The programs that kill runs and servers, with scripted kills.

- they go on until there are enough kills, and end with a table with the sums of all results so far
- a run that ended before a kill took place is not counted
- typed again, they keep the results that are there
- records of rollouts with the same rows are the same outcome, wherever their parts end
- the exit code is 1 if a run has other bits, does not end, or leaves processes, and if the negative control
  is not noticed
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rlhf_core.config.pipeline import RecordConfig
from rlhf_core.record.writer import RecordWriter
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store
from tests.chaos import __main__ as chaos
from tests.chaos import harness, servers
from tests.chaos.harness import STAGES, Case, Kill, Result
from tests.chaos.servers import KINDS, Trial


class Golden:
    """The points of an undisturbed run, which is not made."""

    made = 0

    def __init__(self, _work: Path, _stages: Any = STAGES) -> None:
        Golden.made += 1
        self.points = {stage: {f"{stage}.step": 4, "bundle.committed": 1} for stage in STAGES}


@pytest.fixture(autouse=True)
def no_golden_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Golden, "made", 0)
    monkeypatch.setattr(chaos, "Golden", Golden)
    monkeypatch.setattr(servers, "Golden", Golden)


def cases(done: list[Case], **wrong: Any) -> Callable[..., Result]:
    """Return a scripted `run_case`, of which the second case with the right environment has `wrong`."""

    def run_case(_golden: Golden, case: Case, folder: Path) -> Result:
        folder.mkdir(parents=True)
        done.append(case)
        if case.environment:  # the negative control
            return Result(case, ended=True, same="unnoticed" in wrong, commands=2, kills=[Kill("flow", 1.0)])
        kills = [Kill(point, 3.0) for point in case.points or ("engine",)]
        result = Result(case, ended=True, same=True, commands=2, kills=kills)
        if len(done) == 3:
            vars(result).update(wrong)
        return result

    return run_case


def test_the_kills_of_a_run_end_with_their_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Case] = []
    monkeypatch.setattr(chaos, "run_case", cases(done))
    page = tmp_path / "page.md"
    options = ["--folder", str(tmp_path / "chaos"), "--table", str(page)]
    assert chaos.main(["--kills", "6", *options]) == 0
    shown = capsys.readouterr().out
    kills = sum(len(case.points or ("engine",)) for case in done[1:])
    assert 6 <= kills <= 8 and done[0] == chaos.negative_control()
    assert {bool(case.random) for case in done} == {True, False}
    ended = f"| all |  | {len(done) - 1} | {kills} | {len(done) - 1} | {len(done) - 1} | 3.0 s | 3.0 s |"
    assert ended in shown and "noticed: other bits." in shown
    text = page.read_text()
    assert text.startswith("# Kills of a run") and ended in text and f'ARGS="--table {page}"' in text
    assert chaos.main(["--kills", "6", *options]) == 0
    assert Golden.made == 1, "there were enough kills"
    assert chaos.main(["--kills", str(kills + 1), *options]) == 0
    assert Golden.made == 2 and len({case.name for case in done}) == len(done), "a case was repeated"


def test_a_run_without_a_kill_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Case] = []
    monkeypatch.setattr(chaos, "run_case", cases(done, kills=[]))
    assert chaos.main(["--kills", "6", "--folder", str(tmp_path / "chaos")]) == 0
    shown = capsys.readouterr().out
    assert shown.count("NOT COUNTED: it ended before a kill") == 1
    # Neither the negative control nor the run without a kill.
    assert f"| all |  | {len(done) - 2} | " in shown


@pytest.mark.parametrize(
    "wrong", [{"same": False}, {"ended": False}, {"left": ["raylet"]}, {"unnoticed": True}], ids=str
)
def test_the_exit_code_tells_of_a_run_that_did_not_end_as_it_should(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "run_case", cases([], **wrong))
    assert chaos.main(["--kills", "6", "--folder", str(tmp_path)]) == 1


@pytest.mark.parametrize("same", [True, False])
def test_the_kills_of_servers_end_with_their_table(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []

    def trial(_golden: Golden, kind: str, folder: Path, database: str | None) -> Trial:
        assert database is None
        folder.mkdir(parents=True)
        tried.append(kind)
        return Trial(kind, "COMPLETED", same or kind != "flow", 2.0, 30.0, 2)

    monkeypatch.setattr(servers, "trial", trial)
    page = tmp_path / "page.md"
    options = ["--folder", str(tmp_path / "servers"), "--table", str(page)]
    assert servers.main(["--times", "1", "--only", "flow", *options]) == (0 if same else 1)
    assert tried == ["flow"]
    assert servers.main(["--times", "1", *options]) == (0 if same else 1)
    assert sorted(tried) == sorted(KINDS), "the first kind was not tried again"
    assert f"| flow | 1 | 1 | {int(same)} | 2.0 s | 2.0 s |" in capsys.readouterr().out
    assert page.read_text().count("\n") == 2 + len(KINDS)


def test_records_with_the_same_rows_are_the_same_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "_tracked", lambda home, key: {})

    def outcome_of(name: str, *parts: tuple[int, ...]) -> harness.Outcome:
        home = tmp_path / name
        record = RecordWriter(home / "parts", "ppo", RecordConfig())
        for number, steps in enumerate(parts):
            for step in steps:
                record.add(step, pa.table({"step": [step], "score": [float("nan")]}))
            record.save(home / f"saved-{number}")
        output = home / "output"
        record.save(output)
        (output / "metrics.jsonl").write_text("{}\n")
        artifacts = ArtifactStore(Store(str(home / "store")), cache=home / "cache")
        artifacts.publish("ppo", "0" * 16, output, Provenance())
        return harness.outcome(home, "ppo")

    undisturbed, stopped = outcome_of("undisturbed", (1, 2, 3)), outcome_of("stopped", (1,), (2, 3))
    assert harness.difference(undisturbed, stopped) == ""
    assert {"record", "metrics.jsonl"} <= set(stopped)
    assert harness.difference(undisturbed, outcome_of("other", (1, 2))) == "differs: record"
