"""A small registered policy: artifacts in a store, and a version of a registered model that names them."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.bundles import weights_sha256
from rlhf_core.storage.store import Store
from rlhf_core.tracking.champion_log import Move
from rlhf_core.tracking.champions import WEIGHTS
from rlhf_core.tracking.mlflow_client import Mlflow
from tests.support.champions import make_champion
from tests.support.demo_data import GENERATED
from tests.support.tiny_llama import save_tiny_llama

OF_PPO = {
    "win_rate": {"mean": 0.75, "low": 0.7, "high": 0.8},
    "verdicts": {"wins": 90, "losses": 30, "ties": 8},
    "kl": {"mean": 3.0, "low": 2.5, "high": 3.5},
    "judge_trained_on": True,
}
EVALUATION = {"policies": {"ppo": OF_PPO}, "confidence": 0.95, "judge": "reward_model"}
TEXT = "Tell me about a small fox in the garden."


def register_policy(
    mlflow: Mlflow,
    model: str,
    store: Path | str,
    work: Path,
    number: int,
    base: str | None = None,
    positions: int = 64,
) -> str:
    """Publish the artifacts of a policy, register it as champion, and return the digest of its weights.

    Args:
        mlflow: The registry.
        model: Name of the registered model.
        store: Folder or URL of the store.
        work: Folder for files that are not in the store.
        number: Seed of the weights; the number of the version if policies are registered in order.
        base: `model.path` of its run.
        positions: Context length in tokens.
    """
    config = PipelineConfig.model_validate_json(
        json.dumps({"data": {**GENERATED, "sft": [{"path": "/rows/a|b.jsonl"}]}})
    )
    made = config.model_dump(mode="json", by_alias=True)
    made["model"]["path"] = base
    artifacts = ArtifactStore(Store(store), work / "cache")
    tokenizer = train_tokenizer([TEXT] * 3, 300)
    tags = {"rlhf.gate": "match", "rlhf.gate_reason": f"it won {number}"}
    for stage in ("data", "ppo", "evaluate"):
        out = work / f"{number}" / stage
        out.mkdir(parents=True)
        if stage == "ppo":
            policy = save_tiny_llama(
                out / "policy",
                number,
                vocab_size=len(tokenizer),
                eos_token_id=tokenizer.eos_token_id,
                max_position_embeddings=positions,
            )
            tokenizer.save_pretrained(policy)
            tags[WEIGHTS] = weights_sha256(policy)
        elif stage == "data":
            sources = [{"field": "data.sft[0]", "path": "/rows/a|b.jsonl", "digest": "d" * 64}]
            (out / "data_card.json").write_text(json.dumps({"sources": sources}))
        else:
            (out / "evaluation.json").write_text(json.dumps(EVALUATION))
        key = f"{number:x}".rjust(16, "0")
        ref = artifacts.publish(stage, key, out, Provenance(config=made))
        tags |= {f"rlhf.{stage}.key": ref.key, f"rlhf.{stage}.digest": ref.digest}
        if stage == "ppo":
            source = f"{ref.uri}/policy"
    mlflow.ensure_model(model, "")
    version = mlflow.create_version(model, source=source, run_id=None, tags=tags, description="")
    champion = mlflow.by_alias(model, "champion")
    previous = champion.version if champion else None
    make_champion(mlflow, model, Move(1e9 + number, "crowned", version.version, previous, f"it won {number}"))
    return tags[WEIGHTS]
