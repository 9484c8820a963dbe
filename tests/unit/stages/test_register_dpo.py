"""The stage `register` with `register.policy: dpo`, on MLflow with SQLite.

- the version is the policy of DPO: its files, digest, evaluation, regression sets and votes; also if there is
  no policy of PPO
- `rlhf serve` and the model card read the same policy, with the precisions of its evaluation
- the policy of PPO remains the default, with the tags and facts of earlier releases
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import stage_inputs
from rlhf_core.errors import CorruptArtifact
from rlhf_core.evaluation.policy_files import POLICY_STAGE, PolicyFiles
from rlhf_core.ops.publish import model_card
from rlhf_core.ops.serve import serve_command
from rlhf_core.pipeline import StageName
from rlhf_core.run.registered_policies import load_registered
from rlhf_core.stages import register
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.bundles import weights_sha256
from rlhf_core.storage.store import open_store
from rlhf_core.testing import stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.tracking.mlflow_client import Mlflow
from rlhf_core.types import ArtifactRef, Lineage
from tests.support.tiny_llama import save_tiny_llama
from tests.support.word_tokenizer import word_tokenizer

TOKENIZER = word_tokenizer(["a b c"])


def interval(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}


def regression(ppo: float, dpo: float) -> dict[str, Any]:
    return {
        "sums": {
            "sft": interval(0.5),
            "ppo": interval(0.5 + ppo),
            "dpo": interval(0.5 + dpo),
            "difference": {"ppo": interval(ppo), "dpo": interval(dpo)},
            "margin": 0.1,
        }
    }


EVALUATION = {
    "policies": {
        "ppo": {
            "win_rate": interval(0.4),
            "win_rate_length_controlled": interval(0.41),
            "verdicts": {"wins": 40, "losses": 60, "ties": 0},
            "kl": interval(9.0),
            "judge_trained_on": True,
        },
        "dpo": {
            "win_rate": interval(0.9),
            "win_rate_length_controlled": interval(0.85),
            "verdicts": {"wins": 90, "losses": 10, "ties": 0},
            "kl": interval(2.0),
            "judge_trained_on": False,
        },
    },
    "win_rate_ppo_over_dpo": interval(0.3),
    "gold_reward": {"sft": interval(0.1), "ppo": interval(0.2), "dpo": interval(0.7)},
    "judge": "gold",
    "judge_digests": {"gold": "synthetic-1"},
    "regression": regression(ppo=-0.3, dpo=0.2),
}
"""PPO's policy loses against the SFT model and fails a regression set. DPO's wins."""
OF_PPO = {"win_rate_ppo_over_dpo", "ppo"}
METRICS = {"win_rate/mean": 0.4, "win_rate_dpo/mean": 0.9, "kl": 9.0, "kl_dpo": 2.0}


def without_ppo(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `evaluation.json` of a pipeline without PPO."""
    return {
        name: without_ppo(value) if isinstance(value, dict) else value
        for name, value in numbers.items()
        if name not in OF_PPO
    }


Run = Callable[..., tuple[dict[str, Any], PipelineConfig, Mlflow]]


@pytest.fixture
def run(tmp_path: Path, database: Path) -> Run:
    """Registers a policy, and returns `registration.json`, the configuration and the registry."""

    def register_policy(
        policy: str, evaluation: dict[str, Any] | None = None, **sections: Any
    ) -> tuple[dict[str, Any], PipelineConfig, Mlflow]:
        tree = {
            "run": {"home": str(tmp_path / "home"), "name": f"n{abs(hash(tmp_path))}", "device": "cpu"},
            "tracking": {"uri": f"sqlite:///{database}"},
            "register": {"policy": policy},
            "dpo": {"enabled": True},
            **sections,
        }
        config = PipelineConfig.model_validate_json(json.dumps(tree))
        store = ArtifactStore(open_store(config), tmp_path / "cache")
        refs: dict[StageName, ArtifactRef] = {}
        stages: tuple[StageName, ...] = ("data", "sft", "dpo", "ppo", "evaluate")
        for number, stage in enumerate(stages):
            folder = tmp_path / "made" / stage
            made = config.model_dump(mode="json", by_alias=True)
            metrics: dict[str, float] = {}
            attributes: dict[str, str] = {}
            if stage == "data":
                write_data_artifact(folder, tokenizer=TOKENIZER)
            elif stage == "evaluate":
                folder.mkdir(parents=True)
                content = EVALUATION if evaluation is None else evaluation
                (folder / "evaluation.json").write_text(json.dumps(content))
                (folder / "samples.jsonl").write_text("")
                metrics = METRICS
            else:
                save_tiny_llama(folder / ("model" if stage == "sft" else "policy"), number, vocab_size=64)
                if stage != "sft":
                    attributes = {"weights_sha256": weights_sha256(folder / "policy")}
                if stage == "dpo":
                    # An earlier run with another precision of the engines made it.
                    made["ppo"]["engine"]["dtype"] = "float32"
                    (folder / "adapter").mkdir()
                    (folder / "adapter" / "adapter_config.json").write_text('{"r": 8}')
            provenance = Provenance(config=made, metrics=metrics, attributes=attributes)
            refs[stage] = store.publish(stage, "a" * 16, folder, provenance)
        inputs = stage_inputs(config, "register")
        lineage = {stage: refs[stage] for stage in inputs if stage in refs}
        fetched: dict[str, Path] = {stage: store.fetch(ref) for stage, ref in lineage.items()}
        context = stage_context(
            tmp_path / f"stage-{policy}",
            inputs=fetched,
            lineage=Lineage(lineage),
        )
        register.run(config, context)
        facts = json.loads((context.output / "registration.json").read_text())
        return facts, config, Mlflow(f"sqlite:///{database}", "x")

    return register_policy


@pytest.mark.parametrize("has_ppo", [True, False])
def test_the_policy_of_dpo_becomes_champion_and_is_served(has_ppo: bool, run: Run, tmp_path: Path) -> None:
    lora = {"enabled": True, "lora": {"r": 8}}
    ppo = {"enabled": has_ppo, "engine": {"dtype": "bfloat16"}}
    facts, config, mlflow = run("dpo", EVALUATION if has_ppo else without_ppo(EVALUATION), dpo=lora, ppo=ppo)
    assert (facts["champion"], facts["rule"], facts["policy"]) == (True, "first", "dpo"), facts["reason"]
    assert "win rate 0.900 over the SFT model on 100 prompts" in facts["reason"]
    assert "regression sets passed: sums" in facts["reason"]
    assert "/dpo/" in facts["source"] and facts["source"].endswith("/policy")

    policy = load_registered(mlflow, facts["model"], config.run.home)
    tags = policy.version.tags
    assert tags[POLICY_STAGE] == "dpo" and "rlhf.ppo.key" not in tags and tags["rlhf.dpo.key"] == "a" * 16
    assert (tags["eval.win_rate.mean"], tags["eval.kl"]) == ("0.9", "2")
    assert policy.weights == facts["weights_sha256"] == weights_sha256(policy.folder / "policy")
    # With the precision of the evaluation, not that of the run that trained it.
    sft = policy.stage("sft")
    assert sft is not None and policy.files == PolicyFiles(sft / "model", policy.folder / "adapter")
    assert "--dtype bfloat16" in " ".join(serve_command(policy, "127.0.0.1", 8000))

    card = model_card(policy)
    for words in (
        "tags:\n- rlhf\n- dpo\n",
        "then supervised fine-tuning and DPO (sigmoid, beta 0.1, learning rate 1e-06,"
        " epochs: at most 1, seed 0).",
        f"| dpo | `{'a' * 16}` |",
        "| win rate over the SFT model | 0.900 |",
        "| the same, length-controlled | 0.850 |",
        "(90 won, 10 lost, 0 tied)",
        "| gold reward | 0.7 |",
        "| KL to the SFT model | 2 |",
        "| regression set sums, change (passed) | +0.2 |",
    ):
        assert words in card, words
    assert "PPO" not in card and "was trained on the judge" not in card


def test_a_regression_set_of_the_policy_of_dpo_stops_it(run: Run) -> None:
    facts, _, _ = run("dpo", EVALUATION | {"regression": regression(ppo=0.2, dpo=-0.3)})
    assert (facts["champion"], facts["rule"]) == (False, "regression")


def test_the_policy_of_ppo_is_the_default(run: Run) -> None:
    facts, config, mlflow = run("ppo")
    assert (facts["champion"], facts["rule"]) == (False, "min_win_rate") and "policy" not in facts
    policy = load_registered(mlflow, f"{facts['model']}@candidate", config.run.home)
    assert not {POLICY_STAGE, "rlhf.dpo.key", "rlhf.sample.policy"} & set(policy.version.tags)
    assert policy.trained_by == "ppo" and "and PPO (`ppo`" in model_card(policy)


@pytest.mark.parametrize(("sampled", "tag"), [("ppo", None), ("sft", "sft")])
def test_a_version_names_the_model_whose_answers_were_sampled(
    sampled: str, tag: str | None, run: Run
) -> None:
    facts, config, mlflow = run("dpo", sample={"policy": sampled})
    tags = load_registered(mlflow, facts["model"], config.run.home).version.tags
    assert tags.get("rlhf.sample.policy") == tag


def test_an_evaluation_of_an_earlier_release_is_refused(run: Run) -> None:
    earlier = {name: value for name, value in EVALUATION.items() if name != "policies"}
    with pytest.raises(
        CorruptArtifact, match=r"no table policies\.dpo; the evaluate stage must be run again"
    ):
        run("dpo", earlier | {"win_rate_dpo": interval(0.9)})
