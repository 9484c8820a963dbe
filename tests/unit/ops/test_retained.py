"""The versions that keep their artifacts, on a real registry.

- champions, those of the history that are not revoked, aliases, and versions of other programs do, under any
  name of a model; refused and revoked ones do not
- what `rlhf rollback` chooses without `--to`, again and again, is always kept
- all pages are read; an answer that contradicts itself is an error, as is no answer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import InfrastructureError, InputError
from rlhf_core.ops.prune import retained
from rlhf_core.storage.inventory import ArtifactName
from rlhf_core.storage.store import Store
from rlhf_core.tracking import mlflow_client
from rlhf_core.tracking.champions import rollback
from rlhf_core.tracking.mlflow_client import Mlflow
from rlhf_core.types import ArtifactRef
from tests.support.old_runs import INPUTS, MODEL, OldRuns, key_of, names


@pytest.fixture
def mlflow(new_home: Callable[[Path], Path], tmp_path: Path) -> Mlflow:
    return Mlflow(f"sqlite:///{new_home(tmp_path / 'home')}/mlflow.db", "pruned")


@pytest.fixture
def runs(mlflow: Mlflow, tmp_path: Path) -> OldRuns:
    return OldRuns(Store(tmp_path / "store"), tmp_path / "work", mlflow)


def made(run: str) -> Any:
    """The artifacts of a run that no store has."""
    return {stage: ArtifactRef(stage, key_of(run, stage), "d" * 64, "s3://b/x") for stage in INPUTS}


def of_runs(*runs: str) -> set[ArtifactName]:
    """What the versions of these runs name: all but `register`."""
    return {name for run in runs for name in names(made(run)) if name.stage != "register"}


def test_champions_of_the_history_and_aliases(mlflow: Mlflow, runs: OldRuns) -> None:
    for run in ("first", "refused", "second", "third", "marked", "newest"):
        version = runs.register(run, made(run))
        if run in ("first", "second", "third"):
            runs.crown(version)
    mlflow.set_alias(MODEL, "demo-of-march", "5")
    found = retained(mlflow)
    assert found.versions.keys() == of_runs("first", "second", "third", "marked", "newest")
    assert found.registered == {
        (MODEL, run) for run in ("first", "refused", "second", "third", "marked", "newest")
    }
    rollback(mlflow, MODEL, "it insults people")
    assert retained(mlflow).versions.keys() == of_runs("first", "second", "marked", "newest")
    # The newest version is `candidate`, until there is a newer one.
    runs.register("other", made("other"))
    assert retained(mlflow).versions.keys() == of_runs("first", "second", "marked", "other")


def test_whatever_a_rollback_chooses_was_kept(mlflow: Mlflow, runs: OldRuns) -> None:
    for run in ("a", "b", "c", "d"):
        runs.crown(runs.register(run, made(run)))
    runs.register("same as d", {**made("same as d"), "ppo": made("d")["ppo"]})
    for number in range(3):
        kept = retained(mlflow).versions.keys()
        move = rollback(mlflow, MODEL, f"reason {number}").move
        chosen = next(each for each in mlflow.versions(MODEL) if each.version == move.version)
        assert ArtifactName("ppo", chosen.tags["rlhf.ppo.key"]) in kept
    with pytest.raises(InputError, match="no earlier champion that is not revoked"):
        rollback(mlflow, MODEL, "reason 3")


def test_every_registered_model_counts(mlflow: Mlflow, runs: OldRuns) -> None:
    runs.crown(runs.register("one", made("one")))
    runs.crown(runs.register("two", made("two"), "other-name"), "other-name")
    mlflow.ensure_model("of-another-program", "")
    key = "3" * 16
    for source in (f"s3://bucket/x/artifacts/ppo/{key}/000001/policy", "/models/unrelated"):
        mlflow.create_version("of-another-program", source=source, run_id=None, tags={}, description="")
    found = retained(mlflow)
    assert found.versions.keys() == {*of_runs("one", "two"), ArtifactName("ppo", key)}
    assert ("other-name", "two") in found.registered


def test_all_pages_are_read(mlflow: Mlflow, runs: OldRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_client, "_MODELS_PER_CALL", 2)
    for number in range(5):
        runs.register(f"run {number}", made(f"run {number}"), f"model-{number}")
    assert len(mlflow.all_model_names()) == 5
    assert retained(mlflow).versions.keys() == of_runs(*(f"run {number}" for number in range(5)))


@pytest.mark.parametrize("name", ["bob's model", 'the "best" model', 'bob\'s "best"', "back\\slash\\"])
def test_names_of_models_of_other_programs_can_have_quotes(mlflow: Mlflow, name: str) -> None:
    mlflow.ensure_model(name, "")
    mlflow.create_version(name, source="s3://b/x", run_id=None, tags={"a": "b"}, description="")
    assert retained(mlflow).registered == {(name, "")}


def test_an_answer_that_contradicts_itself_is_an_error(
    mlflow: Mlflow, runs: OldRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("one", "two"):
        runs.crown(runs.register(run, made(run)))
    complete = mlflow.versions(MODEL)
    monkeypatch.setattr(mlflow, "versions", lambda name: [each for each in complete if each.version == "1"])
    with pytest.raises(InfrastructureError, match=f"version 2 of {MODEL} has an alias, and is not listed"):
        retained(mlflow)
    unset: Any = None
    monkeypatch.setattr(mlflow, "versions", lambda name: [replace(complete[0], tags=unset)])
    with pytest.raises(InfrastructureError):
        retained(mlflow)


def test_no_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(InfrastructureError, match="did not list the versions of its models"):
        retained(Mlflow("http://127.0.0.1:9", "pruned"))
