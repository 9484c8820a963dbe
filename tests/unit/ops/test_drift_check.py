"""A run compares its data with those of the champion before SFT.

- nothing is compared without the section, without a champion, with the same data, or if SFT is done
- a limit that stops ends the run if the champion's data are in another store
- values above `warn` are logged, above `stop` they end the run; the page and the measures are written
- agreement with the champion's reward model says why it was not measured; it has an interval, and few pairs
  with the same accuracy do not cross a limit
- a comparison that fails ends the run only if there is a limit in `stop`
- the section changes no key of a pipeline or a stage
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import DriftConfig
from rlhf_core.data.dataset import load_pairs, write
from rlhf_core.errors import CorruptArtifact, GateFailed, StageFailed, StageTimedOut
from rlhf_core.evaluation.statistics import difference_of_shares
from rlhf_core.ops.drift import _request, compare_with_champion, findings
from rlhf_core.ops.drift_measures import Drift, DriftRequest, agreement
from rlhf_core.run.pipeline_run import PipelineRun
from rlhf_core.storage.artifacts import Provenance
from rlhf_core.tracking.mlflow_client import ModelVersion
from rlhf_core.types import ArtifactRef
from tests.support.data_artifact import TEXTS, data_artifact
from tests.support.known_models import save_last_token_scorer

OTHER_TEXTS = [text.replace("fox", "cow").replace("birds", "goats") for text in TEXTS]


def pipeline(tmp_path: Path, database: Path, drift: dict[str, Any] | None, **settings: float) -> PipelineRun:
    name = "-".join(tmp_path.parts[-2:])[-40:].strip("_-.").lower()
    tree = {
        "run": {"home": str(tmp_path / "home"), "name": name, **settings},
        "tracking": {"uri": f"sqlite:///{database}"},
        "drift": drift,
    }
    run = PipelineRun(PipelineConfig.model_validate_json(json.dumps(tree)), "test.yaml")
    run.folder.mkdir(parents=True, exist_ok=True)
    run.ensure_parent()
    return run


def publish(
    run: PipelineRun, key: str, texts: list[str], config: PipelineConfig | None = None
) -> ArtifactRef:
    folder = data_artifact(run.home.path / key, texts)
    made = (config or run.config).model_dump(mode="json", by_alias=True)
    return run.artifacts.publish("data", key * 16, folder, Provenance(config=made))


def make_champion(run: PipelineRun, data: ArtifactRef) -> None:
    model, mlflow = run.config.registered_model, run.tracking.mlflow
    tags = {"rlhf.data.key": data.key, "rlhf.data.digest": data.digest}
    mlflow.ensure_model(model, "")
    version = mlflow.create_version(model, source="/x", run_id=None, tags=tags, description="")
    mlflow.set_alias(model, "champion", version.version)


def test_nothing_is_compared_without_other_data_of_a_champion(tmp_path: Path, database: Path) -> None:
    run = pipeline(tmp_path, database, {"stop": {"vocabulary": 0.3}})
    old, new = publish(run, "a", TEXTS), publish(run, "b", OTHER_TEXTS)
    assert compare_with_champion(run, new) is None  # no champion
    make_champion(run, old)
    assert compare_with_champion(run, old) is None  # the same data
    assert compare_with_champion(pipeline(tmp_path, database, None), new) is None
    publish_sft(run, new)
    assert compare_with_champion(run, new) is None  # SFT is done
    assert not (run.folder / "drift.md").exists()


def publish_sft(run: PipelineRun, data: ArtifactRef) -> None:
    out = run.home.path / "sft"
    out.mkdir()
    run.artifacts.publish("sft", run.spec("sft", {"data": data}).key, out, Provenance())


def test_a_limit_stops_a_run_if_the_data_of_the_champion_are_in_another_store(
    tmp_path: Path, database: Path
) -> None:
    run = pipeline(tmp_path, database, {"stop": {"vocabulary": 0.3}})
    new = publish(run, "b", OTHER_TEXTS)
    make_champion(run, ArtifactRef("data", "a" * 16, "d", "/data"))
    with pytest.raises(GateFailed, match=r"version 1 are not in this store .* set drift=null once"):
        compare_with_champion(run, new)
    assert compare_with_champion(pipeline(tmp_path, database, {}), new) is None


def test_drift_warns_and_stops_with_a_page(
    tmp_path: Path, database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"warn": {"lengths": 0.001}, "stop": {"vocabulary": 0.3, "agreement": 0.2}}
    run = pipeline(tmp_path, database, limits)
    old, new = publish(run, "a", TEXTS), publish(run, "b", [*OTHER_TEXTS, *["A long text. " * 20] * 5])
    make_champion(run, old)
    with caplog.at_level(logging.WARNING):
        report = compare_with_champion(run, new)
    assert report is not None
    champion = f"{run.config.registered_model} version 1"
    assert f"drift from the data of {champion}: lengths 0." in caplog.text
    said = run.remarks[f"drift from {champion}"]
    assert "above drift.warn.lengths=0.001" in said and "above drift.stop.vocabulary=0.3" in said
    assert "drift.stop.agreement has no effect" in caplog.text
    page = (run.folder / "drift.md").read_text()
    assert page.startswith("# Data drift: stop") and "no reward model of the champion" in page
    assert json.loads((run.folder / "drift.json").read_text())["champion"] == champion
    message = r"vocabulary 0\.\d+ \(\S+\), above drift\.stop\.vocabulary=0\.3; .*the page is .*drift\.md"
    with pytest.raises(GateFailed, match=message):
        report.raise_stop()


@pytest.mark.parametrize("cause", ["ends", "hangs", "damaged"])
def test_a_comparison_that_fails_ends_the_run_only_with_a_limit(
    cause: str,
    tmp_path: Path,
    database: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Python imports this module when it starts.
    script = {"ends": "import os; os._exit(7)", "hangs": "import time; time.sleep(60)", "damaged": ""}[cause]
    (tmp_path / "sitecustomize.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seconds = 1.0 if cause == "hangs" else 60.0
    for stop in ({}, {"vocabulary": 0.3}):
        run = pipeline(tmp_path / str(len(stop)), database, {"stop": stop}, stage_timeout=seconds)
        old, new = publish(run, "a", TEXTS), publish(run, "b", OTHER_TEXTS)
        make_champion(run, old)
        if cause == "damaged":
            file = next(Path(old.uri).rglob("*.parquet"))
            file.chmod(0o600)
            file.write_bytes(bytes(file.stat().st_size))
        if not stop:
            assert compare_with_champion(run, new) is None
            assert "drift is not measured: " in caplog.text
        else:
            error = (
                CorruptArtifact if cause == "damaged" else StageTimedOut if cause == "hangs" else StageFailed
            )
            with pytest.raises(error) as raised:
                compare_with_champion(run, new)
            assert raised.type is error


@pytest.mark.parametrize(
    ("accuracy", "texts", "settings", "note"),
    [
        (0.75, TEXTS, {}, ""),
        (None, TEXTS, {}, "this store has no reward model of the champion"),
        (0.75, OTHER_TEXTS, {}, "the champion has another tokenizer or template"),
        (0.75, TEXTS, {"data": {"template": "plain"}}, "the champion has another tokenizer or template"),
        (0.75, TEXTS, {"run": {"executor": "ray"}}, "models run on a cluster"),
        (0.75, TEXTS, {"reward": {"deepspeed": {"zero_stage": 3}}}, "trained with ZeRO-3"),
        (0.75, TEXTS, {"reward": {"enabled": False}}, "reward.enabled is false"),
        (
            0.75,
            TEXTS,
            {"drift": {"warn": {"agreement": None}}},
            "drift.warn.agreement and drift.stop.agreement",
        ),
    ],
)
def test_agreement_is_measured_where_the_reward_model_can_be_used(
    accuracy: float | None, texts: list[str], settings: dict[str, Any], note: str, tmp_path: Path
) -> None:
    """`accuracy` is that of the champion's reward model; None if it is not in the store."""
    home = {"home": str(tmp_path / "home")}
    if settings.get("reward") == {"enabled": False}:
        settings = {**settings, "ppo": {"rewards": [{"type": "repetition"}]}}
    before = PipelineConfig.model_validate_json(json.dumps({"run": home}))
    tree = {**settings, "run": {**home, **settings.get("run", {})}}
    run = PipelineRun(PipelineConfig.model_validate_json(json.dumps(tree)), "test.yaml")
    old, new = publish(run, "a", TEXTS, before), publish(run, "b", texts)
    tags = {}
    if accuracy is not None:
        (tmp_path / "reward" / "model").mkdir(parents=True)
        (tmp_path / "reward" / "model" / "config.json").write_text("{}")
        made = run.config.model_dump(mode="json", by_alias=True)
        origin = Provenance(config=made, metrics={"accuracy": accuracy})
        ref = run.artifacts.publish("reward", "c" * 16, tmp_path / "reward", origin)
        tags = {"rlhf.reward.key": ref.key, "rlhf.reward.digest": ref.digest}
    request = _request(run, ModelVersion("1", tags), old, new, "fox version 1", tmp_path / "drift.json")
    assert note in request.note and (request.reward_model is None) == bool(note)
    if not note:
        assert request.reward_model is not None
        assert (Path(request.reward_model) / "config.json").is_file() and request.accuracy == accuracy


@pytest.mark.parametrize(("accuracy", "loss"), [(0.75, 0.25), (0.4, 0.0)])
def test_agreement_is_the_loss_of_accuracy(accuracy: float, loss: float, tmp_path: Path) -> None:
    # All pairs of the champion have equal responses, and half of the others are right.
    scores = {number: 1.0 - 2.0 * (number % 2) for number in range(10)}
    model = save_last_token_scorer(tmp_path / "reward" / "model", scores, vocabulary=400)
    data = data_artifact(tmp_path / "data", TEXTS)
    shutil.copyfile(data / "pairs_train.parquet", data / "pairs_eval.parquet")
    champion = data_artifact(tmp_path / "champion", TEXTS)
    shutil.copyfile(champion / "pairs_train.parquet", champion / "pairs_eval.parquet")
    request = DriftRequest({}, "fox", str(champion), str(data), str(model), accuracy, "", "")
    config = PipelineConfig.model_validate({"run": {"device": "cpu"}})
    [found] = agreement(config, request)
    assert found.value == pytest.approx(loss)
    assert (found.changes[0].before, found.changes[0].after) == (accuracy, 0.5)
    interval = difference_of_shares(accuracy, len(TEXTS), 0.5, len(TEXTS), 0.95)
    assert (found.low, found.high) == (interval.low, interval.high)
    more = data_artifact(tmp_path / "more", TEXTS)
    pairs = load_pairs(data, "eval")
    new = [replace(pair, chosen_ids=(7, number)) for number, pair in enumerate(pairs[:10])]
    write(more, "pairs", "eval", [*pairs, *new])
    found, of_new = agreement(config, replace(request, data=str(more)))
    interval = difference_of_shares(accuracy, len(TEXTS), 0.5, 10, 0.95)
    assert (of_new.new_rows, of_new.low, of_new.high) == (10, interval.low, interval.high)
    assert found.place == f"{len(TEXTS) + 10} held-out pairs, {len(TEXTS)} of the champion"


def test_a_limit_of_agreement_is_not_crossed_by_chance() -> None:
    """Both sides have 50 pairs and an accuracy of 0.85."""
    pairs = 50
    shares = [math.comb(pairs, k) * 0.85**k * 0.15 ** (pairs - k) for k in range(pairs + 1)]
    limits = DriftConfig.model_validate({"stop": {"agreement": 0.1}})
    above = stopped = 0.0
    for before, after in itertools.product(range(pairs + 1), repeat=2):
        if before - after > 0.1 * pairs:
            share = shares[before] * shares[after]
            interval = difference_of_shares(before / pairs, pairs, after / pairs, pairs, 0.95)
            drift = Drift("agreement", interval.mean, "pairs", interval.low, interval.high)
            above += share
            stopped += share * (findings([drift], limits)[0].state == "stop")
    assert above == pytest.approx(0.061, abs=5e-4) and stopped < 0.001


def test_the_section_changes_no_key(tmp_path: Path, database: Path) -> None:
    with_it = pipeline(tmp_path, database, {"stop": {"lengths": 0.5}})
    without = pipeline(tmp_path, database, None)
    assert with_it.key == without.key
    assert with_it.spec("data", {}).key == without.spec("data", {}).key
