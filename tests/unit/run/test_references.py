"""References in place of paths.

- a champion is the folder of its verified weights; the digest in the keys changes with the champion only
- files of artifacts are local paths, or s3:// addresses if the store is a bucket
- unknown names, versions, stages, keys and files, malformed references and paths that leave the artifact are
  errors that name the field; all are reported at once
- policy and judge can start from a champion, with the same digests and errors
- a champion that is an adapter is refused
- check, Python API, retraining, plan and tune resolve them; the MLflow run has them as tags
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.cluster.base_model import copied_base_models
from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import load_config
from rlhf_core.data.sources import model_digests, source_digests
from rlhf_core.errors import ConfigError
from rlhf_core.evaluation.policy_files import PolicyFiles
from rlhf_core.ops import api, tune
from rlhf_core.ops.plan.plan import make_plan
from rlhf_core.ops.retraining import Retraining
from rlhf_core.run import registered_policies
from rlhf_core.run.checks import CheckedConfig, load_and_check
from rlhf_core.run.external_inputs import external_digests, external_marks
from rlhf_core.run.references import reference_marks, resolve
from rlhf_core.storage.artifacts import ArtifactCopy, ArtifactStore, Provenance
from rlhf_core.storage.bundles import weights_sha256
from rlhf_core.storage.store import Store
from rlhf_core.tracking.champions import rollback
from rlhf_core.tracking.mlflow_client import Mlflow
from rlhf_core.types import ArtifactRef
from tests.support.demo_data import GENERATED, config_with_demo_data
from tests.support.registered_policy import register_policy

MODEL = "referenced-policy"
KEY = "0123456789abcdef"
ROW = json.dumps({"prompt": "Name a colour.", "completion": "red"}) + "\n"


@pytest.fixture
def home(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    return tmp_path / "home"


@pytest.fixture(scope="module")
def champions(database: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of the weights of two versions, of which the second is champion."""
    mlflow, folder = Mlflow(f"sqlite:///{database}", "referenced"), tmp_path_factory.mktemp("referenced")
    return [register_policy(mlflow, MODEL, folder / "store", folder, number) for number in (1, 2)]


def publish(url: str | Path, home: Path, text: str = ROW) -> ArtifactRef:
    out = home.parent / "out"
    (out / "inner").mkdir(parents=True)
    (out / "best.jsonl").write_text(text)
    (out / "inner" / "more.jsonl").write_text(text)
    return ArtifactStore(Store(url), home / "cache").publish("sample", KEY, out, Provenance())


def config_of(home: Path, **sections: Any) -> PipelineConfig:
    return config_with_demo_data({"run": {"home": str(home), "device": "cpu"}, **sections}, "test")


def with_model(home: Path, text: str, **more: Any) -> PipelineConfig:
    return config_of(home, model={"path": text, **more})


def with_judge(home: Path, text: str, **more: Any) -> PipelineConfig:
    return config_of(home, reward={"judge": {"path": text, **more}})


def with_source(home: Path, text: str) -> PipelineConfig:
    return config_of(home, data={**GENERATED, "sft": [{"path": "synthetic"}, {"path": text}]})


# -- models --


def test_a_champion_is_its_verified_folder(home: Path, champions: list[str]) -> None:
    for text, number in (
        (f"champion:{MODEL}", 2),
        (f"registry://{MODEL}/1", 1),
        (f"registry://{MODEL}/2", 2),
    ):
        found = resolve(with_model(home, text))
        assert found.config.model.path is not None
        assert weights_sha256(Path(found.config.model.path)) == champions[number - 1]
        [reference] = found.references
        assert (reference.field, reference.text) == ("model.path", text)
        assert reference.origin == f"{MODEL} version {number}"
        assert found.tags == {
            "rlhf.reference.model.path": f"{text} = {MODEL} version {number}",
            "rlhf.base": f"registry://{MODEL}/{number}",
        }
        assert found.overrides == [f'model.path="{found.config.model.path}"']
        pinned = [f'model.path="registry://{MODEL}/2"'] if text.startswith("champion:") else []
        assert found.pins == pinned


def test_the_judge_can_start_from_a_champion(home: Path, champions: list[str]) -> None:
    digests = []
    for text, number in ((f"champion:{MODEL}", 2), (f"registry://{MODEL}/1", 1)):
        found = resolve(with_judge(home, text))
        judge = found.config.reward.judge
        assert judge is not None and judge.path is not None and found.config.model.path is None
        assert weights_sha256(Path(judge.path)) == champions[number - 1]
        assert found.overrides == [f'reward.judge.path="{judge.path}"']
        assert found.tags == {"rlhf.reference.reward.judge.path": f"{text} = {MODEL} version {number}"}
        pinned = [f'reward.judge.path="registry://{MODEL}/2"'] if text.startswith("champion:") else []
        assert found.pins == pinned
        digests.append(external_digests(found.config)["reward.judge.path"])
        model = resolve(with_model(home, text)).config
        assert digests[-1] == model_digests(model)["model"], "the same digest as for model.path"
    assert digests[0] != digests[1]


def test_a_champion_can_be_the_teacher(home: Path, champions: list[str]) -> None:
    found = resolve(config_of(home, ppo={"teacher": {"path": f"champion:{MODEL}"}}))
    teacher = found.config.ppo.teacher
    assert teacher is not None and weights_sha256(Path(teacher.path)) == champions[1]
    assert found.pins == [f'ppo.teacher.path="registry://{MODEL}/2"']
    other = resolve(config_of(home, ppo={"teacher": {"path": f"registry://{MODEL}/1"}})).config
    digests = [external_digests(config)["ppo.teacher.path"] for config in (found.config, other)]
    assert digests[0] != digests[1], "the weights are a part of the key"


def test_policy_and_judge_can_start_from_two_versions(home: Path, champions: list[str]) -> None:
    judge = {"judge": {"path": f"registry://{MODEL}/1"}}
    found = resolve(config_of(home, model={"path": f"champion:{MODEL}"}, reward=judge))
    assert [reference.field for reference in found.references] == ["model.path", "reward.judge.path"]
    assert found.tags["rlhf.base"] == f"registry://{MODEL}/2"
    digests = external_digests(found.config)
    assert digests["model"] != digests["reward.judge.path"]


def test_a_wrong_judge_is_named(home: Path, champions: list[str]) -> None:
    for text, problem in (
        ("champion:nobody", "no registered model 'nobody'"),
        (f"registry://{MODEL}/1/ppo/policy", "a model must be champion:NAME"),
    ):
        with pytest.raises(ConfigError, match=rf"^reward\.judge\.path: .*{problem}"):
            resolve(with_judge(home, text))
    with pytest.raises(ConfigError, match=r"reward\.judge\.revision is a commit of a hub model"):
        resolve(with_judge(home, f"champion:{MODEL}", revision="abc"))
    both = config_of(home, model={"path": "champion:nobody"}, reward={"judge": {"path": "champion:nobody"}})
    with pytest.raises(ConfigError, match=r"(?s)^model\.path: .*\nreward\.judge\.path: "):
        resolve(both)


def test_the_digest_changes_with_the_champion_only(home: Path, champions: list[str], database: Path) -> None:
    def digest() -> str:
        return model_digests(resolve(with_model(home, f"champion:{MODEL}-moved")).config)["model"]

    mlflow, folder = Mlflow(f"sqlite:///{database}", "moved"), home.parent / "moved"
    register_policy(mlflow, f"{MODEL}-moved", folder / "store", folder, 1)
    first = digest()
    assert digest() == first
    assert model_digests(resolve(with_model(home, f"registry://{MODEL}/1")).config)["model"] == first
    register_policy(mlflow, f"{MODEL}-moved", folder / "store", folder, 2)
    assert digest() != first
    rollback(mlflow, f"{MODEL}-moved", "a test")
    assert digest() == first


def test_a_configuration_without_references_is_not_touched(tmp_path: Path) -> None:
    config = config_of(tmp_path / "none", model={"path": "org/model"})
    found = resolve(config)
    assert found.config is config and found.references == () and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("champion:", "a model must be champion:NAME"),
        ("champion:a/b", "must have 1 to 100 letters"),
        ("champion:nobody", "no registered model 'nobody'"),
        (f"registry://{MODEL}", "a model must be champion:NAME"),
        (f"registry://{MODEL}/9", "has no version 9; its versions are 1, 2"),
        (f"registry://{MODEL}/1/ppo/policy", "a model must be champion:NAME"),
        ("artifact://ppo/policy", "must be champion:NAME"),
        (f"artifact://ppo/{KEY}/policy", "has no artifact ppo/0123456789abcdef"),
    ],
)
def test_a_wrong_model_is_named(text: str, problem: str, home: Path, champions: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(with_model(home, text))
    assert caught.value.message.startswith("model.path: ") and problem in caught.value.message


def test_a_model_without_champion_names_the_command(home: Path, database: Path) -> None:
    Mlflow(f"sqlite:///{database}", "empty").ensure_model("empty-policy", "")
    with pytest.raises(ConfigError, match=r"empty-policy has no version champion.*rlhf promote"):
        resolve(with_model(home, "champion:empty-policy"))


def test_without_a_database_nothing_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match=r"run\.home: there is no database of MLflow"):
        resolve(with_model(tmp_path / "home", "champion:x"))
    assert not (tmp_path / "home" / "mlflow.db").exists()


def test_a_reference_has_no_revision(home: Path, champions: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"model\.revision is a commit of a hub model"):
        resolve(with_model(home, f"champion:{MODEL}", revision="abc"))


def test_an_adapter_is_refused(home: Path, champions: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    load = registered_policies.load_registered

    def with_adapter(*arguments: Any) -> Any:
        policy = load(*arguments)
        return replace(policy, files=PolicyFiles(policy.files.model, policy.folder / "adapter"))

    monkeypatch.setattr(registered_policies, "load_registered", with_adapter)
    with pytest.raises(ConfigError, match=f"version 2 of {MODEL} is an adapter on its SFT model"):
        resolve(with_model(home, f"champion:{MODEL}"))


# -- sources --


def test_a_file_of_an_artifact_is_a_local_path(home: Path) -> None:
    publish(home / "store", home)
    for file in ("best.jsonl", "inner/more.jsonl"):
        found = resolve(with_source(home, f"artifact://sample/{KEY}/{file}"))
        path = found.config.data.sft[1].path
        assert Path(path).read_text() == ROW and path.endswith(file)
        assert found.config.data.sft[0].path == "synthetic"
        assert found.references[0].origin == f"artifact sample/{KEY}"
    copy = home.parent / "copy.jsonl"
    copy.write_text(ROW)
    digests = [
        source_digests(config)["data.sft[1]"] for config in (found.config, with_source(home, str(copy)))
    ]
    assert digests[0] == digests[1], "the key depends on the content, and not on the address"


def test_a_file_in_a_bucket_is_an_s3_address(s3_server: Any, home: Path) -> None:
    url = f"{s3_server.url}/references"
    ref = publish(url, home)
    config = config_of(
        home,
        store={"url": url, "endpoint": s3_server.endpoint},
        data={**GENERATED, "sft": [{"path": f"artifact://sample/{KEY}/best.jsonl"}]},
        model={"path": f"artifact://sample/{KEY}/inner"},
        run={"home": str(home), "device": "cpu", "executor": "slurm"},
    )
    found = resolve(config).config
    copy = ArtifactCopy("sample", KEY, ref.digest[:12], "inner", url)
    assert copied_base_models(found) == {"model.path": copy}, "what the hosts of a job fetch"
    assert found.data.sft[0].path == f"{ref.uri}/best.jsonl" and ref.uri.startswith(url)
    assert found.model.path is not None and (Path(found.model.path) / "more.jsonl").read_text() == ROW
    assert "data.sft[0]" in source_digests(found)


def test_a_file_of_a_version_is_that_of_its_run(home: Path, champions: list[str]) -> None:
    found = resolve(with_source(home, f"registry://{MODEL}/champion/data/data_card.json"))
    assert Path(found.config.data.sft[1].path).name == "data_card.json"
    assert found.references[0].origin == f"{MODEL} version 2, artifact data/{'2'.rjust(16, '0')}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"champion:{MODEL}", "a source must be artifact://STAGE/KEY/FILE"),
        (f"registry://{MODEL}/1", "a source must be artifact://STAGE/KEY/FILE"),
        (
            f"registry://{MODEL}/1/sample/best.jsonl",
            "version 1 of referenced-policy has no artifact of stage",
        ),
        (f"registry://{MODEL}/1/data/../../x", "without empty parts"),
        (f"artifact://sample/{KEY}", "must be artifact://STAGE/KEY/FILE"),
        (f"artifact://sampel/{KEY}/best.jsonl", "the stage must be one of data, sft"),
        ("artifact://sample/best/best.jsonl", "the key must be 16 hex digits"),
        (f"artifact://sample/{KEY[::-1]}/best.jsonl", "has no artifact sample/fedcba9876543210"),
        (f"artifact://sample/{KEY}/worst.jsonl", "it has best.jsonl, inner/more.jsonl; name one"),
        (f"artifact://sample/{KEY}/../{KEY}/best.jsonl", "without empty parts"),
        (f"artifact://sample/{KEY}//etc/passwd", "without empty parts"),
        (f"artifact://sample/{KEY}/./best.jsonl", "without empty parts"),
    ],
)
def test_a_wrong_source_is_named(text: str, problem: str, home: Path, champions: list[str]) -> None:
    publish(home / "store", home)
    with pytest.raises(ConfigError) as caught:
        resolve(with_source(home, text))
    assert caught.value.message.startswith("data.sft.1.path: ") and problem in caught.value.message


def test_all_problems_are_reported_at_once(home: Path, champions: list[str]) -> None:
    wrong = "artifact://sample/x/y"
    regression = {"name": "set", "path": wrong, "reward": {"type": "well_formed"}}
    config = config_of(
        home,
        model={"path": "champion:nobody"},
        data={name: [{"path": wrong}] for name in ("sft", "preference", "prompts")},
        evaluate={"regression": [regression]},
    )
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    fields = [line.split(": ")[0] for line in caught.value.message.split("\n")]
    assert fields == [
        "model.path", "data.sft.0.path", "data.preference.0.path", "data.prompts.0.path",
        "evaluate.regression.0.path",
    ]  # fmt: skip


# -- who resolves them --


def test_a_check_resolves_and_names_the_origin(home: Path) -> None:
    publish(home / "store", home)
    address = f"artifact://sample/{KEY}/best.jsonl"
    overrides = [f"run.home={home}", f"data.sft.1.path={address}"]
    checked = load_and_check("deployments/configs/demo.yaml", overrides)
    assert checked.config.data.sft[1].path.startswith(str(home))
    assert checked.overrides == tuple(overrides)
    assert checked.reference_tags == {"rlhf.reference.data.sft.1.path": f"{address} = artifact sample/{KEY}"}
    found = resolve(load_config("deployments/configs/demo.yaml", overrides))
    again = load_config("deployments/configs/demo.yaml", [*overrides, *found.overrides])
    assert again == found.config


def test_a_retraining_resolves_its_references_again(home: Path) -> None:
    publish(home / "store", home)
    retraining = Retraining(with_source(home, f"artifact://sample/{KEY}/best.jsonl"))
    assert retraining.config.data.sft[1].path.startswith(str(home))


def test_a_retraining_is_due_after_a_new_judge(home: Path, champions: list[str]) -> None:
    config = with_judge(home, f"champion:{MODEL}")
    assert "reward.judge.path" not in external_marks(config)
    moved = reference_marks(config, {"reward.judge.path": f"registry://{MODEL}/1"})
    assert reference_marks(config) != moved
    assert reference_marks(config)["reward.judge.path"].startswith(f"{MODEL} 2 ")


def test_the_python_api_resolves(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(home / "store", home)
    seen: list[CheckedConfig] = []

    def open_run(checked: CheckedConfig, *_arguments: Any) -> Any:
        seen.append(checked)
        raise InterruptedError

    monkeypatch.setattr(api, "open_run", open_run)
    with pytest.raises(InterruptedError):
        api.run_pipeline(with_source(home, f"artifact://sample/{KEY}/best.jsonl"), until="data")
    assert seen[0].config.data.sft[1].path.startswith(str(home))
    assert list(seen[0].reference_tags) == ["rlhf.reference.data.sft.1.path"]


def test_a_plan_reads_the_shape_of_a_champion_and_refuses_a_reference_that_leads_nowhere(
    home: Path, champions: list[str]
) -> None:
    lengths = ["data.max_prompt_tokens=16", "data.max_response_tokens=16", "ppo.max_new_tokens=16"]
    settings = [f"run.home={home}", *lengths]
    with pytest.raises(ConfigError, match=r"data\.sft\.1\.path"):
        make_plan("deployments/configs/demo.yaml", [*settings, "data.sft.1.path=artifact://sample/none/best"])
    plan = make_plan("deployments/configs/demo.yaml", [*settings, f'model.path="champion:{MODEL}"'])
    assert plan.config.model.path is not None and Path(plan.config.model.path, "config.json").is_file()
    plan = make_plan("deployments/configs/demo.yaml", [*settings, f'reward.judge.path="champion:{MODEL}"'])
    judge = plan.config.reward.judge
    assert judge is not None and judge.path is not None and Path(judge.path, "config.json").is_file()


def test_tune_measures_with_paths(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(home / "store", home)
    address = f"artifact://sample/{KEY}/best.jsonl"
    seen: list[str] = []

    def open_run(checked: CheckedConfig, *_arguments: Any) -> Any:
        seen.append(checked.config.data.sft[1].path)
        raise InterruptedError

    monkeypatch.setattr(tune, "open_run", open_run)
    overrides = [f"run.home={home}", f"data.sft.1.path={address}"]
    with pytest.raises(InterruptedError):
        tune.tune("deployments/configs/demo.yaml", overrides, home.parent / "tuned.yaml")
    assert seen and seen[0].startswith(str(home))
