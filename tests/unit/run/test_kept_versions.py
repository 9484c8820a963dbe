"""The versions of an unfinished run are kept.

- the champion moves between two attempts: the keys of the stages stay the same, until the run has finished
- other settings, another registry and rounds have versions of their own
- a version that was revoked in the meantime is not used
- an error that the same configuration would end with again keeps nothing
- a command that is refused, because another process makes a stage, leaves the versions of that process
- the command, the Python API, rounds and the polls of a retraining use the same versions
- the list of a champion reads none of its files
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import rounds as rounds_flow
from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import SETS
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import ConfigError, GateFailed, StageHeld, VotesNeeded
from rlhf_core.ops import api, rounds
from rlhf_core.ops.retraining import Retraining
from rlhf_core.run.checks import CheckedConfig, load_and_check
from rlhf_core.run.pipeline_run import open_run
from rlhf_core.run.references import resolve_kept
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.tracking.champions import promote, rollback
from rlhf_core.tracking.mlflow_client import Mlflow
from tests.support.registered_policy import register_policy

DEMO = "deployments/configs/demo.yaml"
MODEL = "kept-policy"


@pytest.fixture(scope="module")
def mlflow(database: Path, tmp_path_factory: pytest.TempPathFactory) -> Mlflow:
    mlflow, folder = Mlflow(f"sqlite:///{database}", "kept"), tmp_path_factory.mktemp("kept")
    for number in (1, 2):
        register_policy(mlflow, MODEL, folder / "store", folder, number)
    return mlflow


@pytest.fixture
def make_champion(mlflow: Mlflow) -> Callable[[str], None]:
    """Make a version champion. Each test begins with version 1."""
    champion = mlflow.by_alias(MODEL, "champion")
    assert champion is not None
    if champion.version != "1":
        promote(mlflow, MODEL, "1", "a test begins")

    def move(version: str) -> None:
        promote(mlflow, MODEL, version, "a test")

    return move


@pytest.fixture
def settings(mlflow: Mlflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.uri)
    lengths = ["data.max_prompt_tokens=16", "data.max_response_tokens=16", "ppo.max_new_tokens=16"]
    data = [f"data.{name}=[{{path: synthetic}}]" for name in SETS]
    return [
        f"run.home={tmp_path / 'home'}",
        f'model.path="champion:{MODEL}"',
        "run.device=cpu",
        *lengths,
        *data,
    ]


def attempt(settings: list[str], error: Exception | None = None) -> tuple[str, str]:
    """Start a run, which fails with `error`. Return the version of its model and the key of its first
    stage.
    """
    checked = load_and_check(DEMO, settings)
    key = ""
    try:
        with open_run(checked) as run:
            key = run.spec("data", {}).key
            if error is not None:
                raise error
    except (InterruptedError, GateFailed, StageHeld, VotesNeeded):
        assert error is not None
    return checked.reference_tags["rlhf.reference.model.path"].rpartition(" ")[2], key


def kept_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "home" / "references").glob("*"))


def test_a_run_continues_with_the_version_that_it_began_with(
    settings: list[str], make_champion: Callable[[str], None], tmp_path: Path
) -> None:
    first = attempt(settings, InterruptedError())
    make_champion("2")
    assert attempt([*settings, "run.stage_timeout=4000"], InterruptedError()) == first
    other = attempt([*settings, "run.seed=7"], InterruptedError())
    assert (first[0], other[0]) == ("1", "2"), "another run begins with the champion of its time"
    assert attempt(settings) == first, "this attempt finishes"
    assert len(kept_files(tmp_path)) == 1
    version, key = attempt(settings)
    assert version == "2" and key != first[1]
    assert attempt([*settings, "run.seed=7"]) == other and kept_files(tmp_path) == []


def test_a_run_without_references_that_move_keeps_nothing(
    settings: list[str], make_champion: Callable[[str], None], tmp_path: Path
) -> None:
    attempt([*settings, f"model.path=registry://{MODEL}/1"], InterruptedError())
    assert kept_files(tmp_path) == []


def test_an_error_that_would_come_again_keeps_nothing(
    settings: list[str], make_champion: Callable[[str], None], tmp_path: Path
) -> None:
    assert attempt(settings, GateFailed("drift"))[0] == "1"
    assert kept_files(tmp_path) == []
    make_champion("2")
    assert attempt(settings, InterruptedError())[0] == "2"


def test_rounds_that_need_votes_continue_with_their_version(
    settings: list[str], make_champion: Callable[[str], None]
) -> None:
    first = attempt(settings, VotesNeeded("vote"))
    make_champion("2")
    assert attempt(settings, InterruptedError()) == first


def test_a_command_that_is_refused_keeps_the_versions_of_the_run(
    settings: list[str], make_champion: Callable[[str], None]
) -> None:
    first = attempt(settings, InterruptedError())
    attempt(settings, StageHeld("another process makes it"))
    make_champion("2")
    assert attempt(settings, InterruptedError()) == first


def test_a_version_that_was_revoked_in_the_meantime_is_not_used(
    mlflow: Mlflow, settings: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = "kept-and-revoked"
    for number in (1, 2):
        register_policy(mlflow, model, tmp_path / "store", tmp_path, number)
    settings = [*settings, f'model.path="champion:{model}"']
    assert attempt(settings, InterruptedError())[0] == "2"
    rollback(mlflow, model, "bad")
    assert attempt(settings, InterruptedError())[0] == "1"
    assert f"model.path: registry://{model}/2 cannot be used any more: version 2" in caplog.text
    [file] = kept_files(tmp_path)
    file.write_text("[1]")
    assert attempt(settings)[0] == "1", "a file that cannot be read is none"


def test_the_python_api_continues_with_the_same_version(
    settings: list[str], make_champion: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[CheckedConfig] = []

    def interrupted(checked: CheckedConfig, *arguments: Any) -> Any:
        seen.append(checked)
        return open_run(checked, *arguments)

    def fail(*_arguments: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(api, "open_run", interrupted)
    monkeypatch.setattr(api, "run_with_retries", fail)
    for version in ("1", "2"):
        if version == "2":
            make_champion("2")
        with pytest.raises(InterruptedError):
            api.run_pipeline(config_of(settings))
    assert [each.reference_tags["rlhf.reference.model.path"][-1] for each in seen] == ["1", "1"]


def config_of(settings: list[str]) -> PipelineConfig:
    return config_from_tree({}, "test", settings)


def test_interrupted_rounds_continue_with_the_version_that_they_began_with(
    settings: list[str], make_champion: Callable[[str], None], tmp_path: Path
) -> None:
    models: list[str | None] = []
    interrupt = True

    def run_pipeline(config: PipelineConfig, **_more: Any) -> dict[str, Any]:
        models.append(config.model.path)
        if interrupt:
            raise InterruptedError
        key = {"sample": {"key": "a" * 16}}
        return {"stages": key, "sample": {"best": 5, "pairs": 4}, "run": "demo"}

    with pytest.raises(InterruptedError):
        rounds.run_rounds(config_of(settings), 2, run=run_pipeline)
    make_champion("2")
    attempt(settings)  # a run that finishes is not the rounds
    interrupt = False
    rounds.run_rounds(config_of(settings), 2, run=run_pipeline)
    assert models == [f"registry://{MODEL}/1"] * 3
    rounds.run_rounds(config_of(settings), 1, run=run_pipeline)
    assert models[3:] == [f"registry://{MODEL}/2"]
    assert kept_files(tmp_path) == []


def test_the_flow_of_rounds_continues_as_well(
    settings: list[str], make_champion: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pins: list[str] = []

    def rlhf(overrides: tuple[str, ...], **_more: Any) -> None:
        pins.extend(each for each in overrides if "registry" in each)
        raise InterruptedError

    monkeypatch.setattr(rounds_flow, "rlhf", rlhf)
    for version in ("1", "2"):
        if version == "2":
            make_champion("2")
        with pytest.raises(InterruptedError):
            rounds_flow.rounds.fn(DEMO, 2, tuple(settings))
    assert pins == [f'model.path="registry://{MODEL}/1"'] * 2


def test_a_check_reads_no_file_of_the_champion(
    settings: list[str], make_champion: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"data.sft.1.path=registry://{MODEL}/champion/data/data_card.json"
    config = config_of([*settings, source])
    with monkeypatch.context() as patch:
        patch.setattr(ArtifactStore, "fetch", lambda *_arguments: pytest.fail("files were read"))
        before = Retraining(config)._marks
        assert Retraining(config)._marks == before
        make_champion("2")
        after = Retraining(config)._marks
        assert after != before
        make_champion("1")
        assert Retraining(config)._marks == before
    with pytest.raises(ConfigError, match="no registered model 'nobody'"):
        Retraining(config_of([*settings, "model.path=champion:nobody"]))


def test_a_check_uses_the_version_that_the_retraining_will_continue_with(
    settings: list[str], make_champion: Callable[[str], None]
) -> None:
    config = config_of(settings)
    before = Retraining(config)._marks
    _, kept = resolve_kept(config)
    with pytest.raises(InterruptedError), kept.until_finished():
        raise InterruptedError
    make_champion("2")
    retraining = Retraining(config)
    assert retraining._marks == before and "0000000000000001" in str(retraining.config.model.path)
    with kept.until_finished():
        pass
    assert Retraining(config)._marks != before, (
        "the retraining has finished, and the new champion is another base"
    )
