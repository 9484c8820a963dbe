"""`rlhf why CONFIG`.

- a stage is said to run again exactly if its key is another one, for edits of every section, of files, of a
  model, of a template, of the code's versions, and of what is in no key
- the first reason names the field, the file or the version
- a stage with a checkpoint continues, unless other code made the checkpoint
- without an artifact of the same name, the most similar one is compared
- nothing is written, and neither MLflow nor Prefect is imported
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_cli.main import main
from rlhf_core.config.keys import stages_made
from rlhf_core.config.load import load_config
from rlhf_core.ops.why import Outlook, forecast
from rlhf_core.pipeline import FIRST_STAGE, LAST_STAGE, STAGES, StageName
from rlhf_core.run.pipeline_run import PipelineRun
from rlhf_core.storage import checkpoints
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from rlhf_core.types import ArtifactRef

REWARD = "def reward(rows):\n    return [0.0 for _ in rows]\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration whose stages are all made, with data, a model, a template and a reward in files."""
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "base" / "model.safetensors").write_bytes(b"weights")
    source = {"path": str(tmp_path / "pairs.jsonl")}
    tree: dict[str, Any] = {
        "run": {"home": str(tmp_path / "home"), "name": "small"},
        "store": {"url": str(tmp_path / "store")},
        "tracking": {"uri": "http://127.0.0.1:5000"},
        "model": {"path": str(tmp_path / "base")},
        "data": {
            "sft": [source],
            "preference": [source],
            "prompts": [source],
            "chat_template": str(tmp_path / "chat.jinja"),
        },
        "ppo": {
            "rewards": [
                {"type": "model"},
                {"type": "python", "function": "mine:reward", "file": str(tmp_path / "reward.py")},
            ],
        },
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(tree))
    make(path)
    return path


def make(file: Path, *overrides: str, store: Path | None = None) -> set[StageName]:
    """Publish what a run would make, with other bits for each key. Return the stages that it would make."""
    config = load_config(file, overrides)
    run = PipelineRun(config, "")
    artifacts = ArtifactStore(Store(store or config.store_url), file.parent / "cache")
    tree = config.model_dump(mode="json", by_alias=True)
    made: dict[StageName, ArtifactRef] = {}
    new: set[StageName] = set()
    for stage in stages_made(config, FIRST_STAGE, LAST_STAGE):
        spec = run.spec(stage, made)
        ref = artifacts.find(stage, spec.key)
        if ref is None:
            new.add(stage)
            out = file.parent / "out"
            out.mkdir()
            (out / "file").write_text(spec.key)
            made_from = Provenance(parents=spec.inputs, config=tree, decided_by=spec.decided_by)
            ref = artifacts.publish(stage, spec.key, out, made_from)
        made[stage] = ref
    return new


def verdicts(found: list[Outlook]) -> dict[StageName, str]:
    return {each.stage: each.verdict for each in found}


def again(found: list[Outlook]) -> list[StageName]:
    return [each.stage for each in found if each.verdict != "reused"]


def reasons(found: list[Outlook], stage: StageName) -> str:
    [outlook] = [each for each in found if each.stage == stage]
    return "; ".join(outlook.reasons)


EDITS: list[tuple[str, dict[StageName, str]]] = [
    ("data.max_prompt_tokens=40", {"data": "data.max_prompt_tokens was"}),
    ("data.eval_fraction=0.2", {"data": "data.eval_fraction was 0.1 and is 0.2"}),
    ("model.head_dtype=float32", {"data": "model.head_dtype was"}),
    ("sft.epochs=7", {"sft": "sft.epochs was 1 and is 7"}),
    ("sft.optimizer.learning_rate=0.1", {"sft": "sft.optimizer.learning_rate was"}),
    ("reward.center=0.1", {"reward": "reward.center was 0.0 and is 0.1"}),
    ("reward.judge={}", {"reward": "reward.judge.fraction was unset", "judge": "no artifact of this stage"}),
    ("dpo.enabled=true", {"dpo": "no artifact of this stage"}),
    ("ppo.kl.coef=0.5", {"ppo": "ppo.kl.coef was 0.02 and is 0.5"}),
    ("ppo.steps=3", {"ppo": "ppo.steps was"}),
    ("sample={}", {"sample": "no artifact of this stage"}),
    ("evaluate.prompts=3", {"evaluate": "evaluate.prompts was"}),
    ("register.alpha=0.01", {"register": "register.alpha was 0.05 and is 0.01"}),
    ("tracking.uri=http://127.0.0.1:6000", {"register": "the tracking server was http://127.0.0.1:5000"}),
    ("run.seed=1", {"data": "run.seed was 0 and is 1", "register": "run.seed was"}),
    ("run.name=other", {"register": "the registered model was small-policy and is other-policy"}),
    ("run.home=elsewhere", {}),
    ("ppo.micro_batch_tokens=99", {}),
    ("record.level=none", {}),
    ("tracking.system_metrics=false", {}),
    ("run.timeouts.stall=99", {}),
]


@pytest.mark.parametrize(("edit", "expected"), EDITS, ids=[edit for edit, _ in EDITS])
def test_a_stage_runs_again_exactly_if_its_key_is_another_one(
    file: Path, edit: str, expected: Mapping[StageName, str]
) -> None:
    agrees_with_a_run(file, expected, edit)


def agrees_with_a_run(file: Path, expected: Mapping[StageName, str], *edits: str) -> None:
    """Compare a forecast with the keys of a run in a copy of the store, and its reasons with `expected`."""
    found = forecast(str(file), edits)
    copy = file.parent / "copy"
    shutil.copytree(file.parent / "store", copy)
    assert set(again(found)) == make(file, *edits, store=copy)
    assert set(verdicts(found).values()) <= {"reused", "runs"}
    for stage, reason in expected.items():
        assert reason in reasons(found, stage)
    assert bool(again(found)) == bool(expected)
    if again(found):
        assert again(found)[0] == next(iter(expected)), "the first stage that runs has a reason of its own"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "pairs.jsonl",
            '{"prompt": "a", "chosen": "c", "rejected": "b"}\n',
            {"data": "the content of data.sft[0] (pairs.jsonl) has changed (sha256"},
        ),
        ("chat.jinja", "{{ messages[0] }}", {"data": "data.chat_template (chat.jinja) has changed"}),
        (
            "base/model.safetensors",
            "other weights",
            {"data": "the content of model (base) has changed", "sft": "the content of model (base) has"},
        ),
        ("reward.py", REWARD.replace("0.0", "1.0"), {"ppo": "ppo.rewards.1 (reward.py) has changed"}),
    ],
)
def test_a_changed_file_is_named(
    file: Path, name: str, content: str, expected: Mapping[StageName, str]
) -> None:
    (file.parent / name).write_text(content)
    agrees_with_a_run(file, expected)


@pytest.mark.parametrize("stage", ["data", "sft", "reward", "ppo", "evaluate", "register"])
def test_another_version_of_a_stage_is_named(
    file: Path, stage: StageName, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = STAGES[stage].version
    monkeypatch.setitem(STAGES, stage, replace(STAGES[stage], version=version + 1))
    agrees_with_a_run(file, {stage: f"the version of the stage was {version} and is {version + 1}"})


def test_a_moved_folder_with_the_same_data_changes_nothing(file: Path) -> None:
    moved = file.parent / "moved"
    moved.mkdir()
    shutil.copy(file.parent / "pairs.jsonl", moved)
    agrees_with_a_run(file, {}, f"data.sft=[{{path: {moved}/pairs.jsonl}}]")


def test_later_stages_run_because_of_those_before(file: Path) -> None:
    found = forecast(str(file), ["reward.center=0.1", "ppo.kl.coef=0.5"])
    assert reasons(found, "ppo") == "reward runs; ppo.kl.coef was 0.02 and is 0.5"
    assert reasons(found, "register") == "reward, ppo, evaluate run"


def test_a_stage_that_was_made_with_other_inputs_names_them(file: Path) -> None:
    make(file, "sft.epochs=7")
    assert again(forecast(str(file), ["sft.epochs=7"])) == []
    found = forecast(str(file), ["reward.center=0.1"])
    assert again(found)[0] == "reward"
    assert "reward.center was 0.0 and is 0.1" in reasons(found, "reward")


def test_without_a_run_of_this_name_the_most_similar_one_is_compared(file: Path) -> None:
    make(file, "run.name=far", "reward.center=0.1", "reward.epochs=9", "reward.batch_size=2")
    found = forecast(str(file), ["run.name=new", "reward.epochs=8"])
    assert reasons(found, "reward") == "reward.epochs was 1 and is 8"


def unfinished(file: Path, *overrides: str) -> None:
    """Make the stages before PPO, and a checkpoint of its step 40."""
    config = load_config(file, overrides)
    make(file, *overrides)
    run = PipelineRun(config, "")
    refs: dict[StageName, ArtifactRef] = {}
    for stage in ("data", "sft", "reward"):
        ref = run.artifacts.find(stage, run.spec(stage, refs).key)
        assert ref is not None
        refs[stage] = ref
    key = run.spec("ppo", refs).key
    shutil.rmtree(Path(config.store_url) / "artifacts" / "ppo" / key)
    folder = file.parent / "state"
    folder.mkdir()
    (folder / "state").write_text("40")
    CheckpointStore(run.store, key, file.parent / "work", config.store).save(40, folder)


def test_a_stage_with_a_checkpoint_continues(file: Path) -> None:
    unfinished(file, "ppo.lam=0.9")
    found = forecast(str(file), ["ppo.lam=0.9"])
    assert verdicts(found)["ppo"] == "continues" and reasons(found, "ppo") == "from step 40"
    assert reasons(found, "evaluate").startswith("ppo runs")
    assert verdicts(forecast(str(file), ["ppo.lam=0.8"]))["ppo"] == "runs"


def test_a_checkpoint_of_other_code_stops_the_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished(file, "ppo.lam=0.9")
    monkeypatch.setattr(checkpoints, "versions", lambda: {"code": "0123456789ab"})
    found = forecast(str(file), ["ppo.lam=0.9"])
    assert verdicts(found)["ppo"] == "stops" and "-> 0123456789ab" in reasons(found, "ppo")
    found = forecast(str(file), ["ppo.lam=0.9", "store.allow_other_code=true"])
    assert verdicts(found)["ppo"] == "continues"


def test_a_reused_stage_that_misses_a_limit_stops_the_run(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifacts = ArtifactStore(Store(file.parent / "store"), file.parent / "cache")
    [reward] = artifacts.origins("reward")
    shutil.rmtree(file.parent / "store" / "artifacts" / "reward")
    (file.parent / "out").mkdir()
    poor = {"accuracy": 0.6, "accuracy_low": 0.55, "accuracy_high": 0.65}
    made = Provenance(config=reward.config, decided_by=reward.decided_by, metrics=poor)
    artifacts.publish("reward", reward.ref.key, file.parent / "out", made)
    found = forecast(str(file), ["reward.min_accuracy=0.9"])
    assert verdicts(found)["reward"] == "stops"
    assert "below reward.min_accuracy=0.9" in reasons(found, "reward")
    assert main(["why", str(file), "reward.min_accuracy=0.9"]) == 0
    assert capsys.readouterr().out.startswith("the run would stop at reward\n")


def test_a_damaged_artifact_is_made_again(file: Path) -> None:
    [data] = (file.parent / "store" / "artifacts" / "sft").rglob("file")
    data.chmod(0o600)
    data.write_text("cut")
    assert reasons(forecast(str(file)), "sft") == "its artifact is damaged"


def test_the_command_prints_each_stage_and_imports_nothing_heavy(file: Path) -> None:
    before = sorted(path for path in file.parent.rglob("*"))
    program = (
        "import sys; from rlhf_cli.main import main; code = main(sys.argv[1:]);"
        " heavy = {'mlflow', 'prefect', 'torch', 'ray', 'vllm'} & set(sys.modules); assert not heavy, heavy;"
        " sys.exit(code)"
    )
    command = [sys.executable, "-c", program, "why", str(file), "ppo.kl.coef=0.5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, data, *_ = done.stdout.splitlines()
    assert first == "ppo, evaluate, register would run" and data.split() == ["data", "reused"]
    assert "ppo       runs       ppo.kl.coef was 0.02 and is 0.5 (compared with" in done.stdout
    assert sorted(path for path in file.parent.rglob("*")) == before, "nothing is written"


def test_the_manifest_of_an_artifact_says_what_its_key_is_made_from(file: Path) -> None:
    [manifest] = (file.parent / "store" / "artifacts" / "ppo").rglob("manifest.json")
    decided_by = json.loads(manifest.read_text())["decided_by"]
    assert decided_by["config"]["ppo"]["kl"]["coef"] == 0.02 and "ppo.rewards.1" in decided_by["sources"]
