"""Fixtures of the tests of matches. Models are scripted; store and tokenizer are real."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store
from rlhf_core.testing import stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.engines import Reply, Request, ScriptedEngine, scripted_engines
from rlhf_core.types import PairExample, PromptExample, StageContext
from tests.support.match_models import FAILURES, GOOD, TOKENIZER, Tags, policy, prompts_of


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    tree = {"run": {"device": "cpu", "home": str(tmp_path)}, "evaluate": {"prompts": 8, "bootstrap": 200}}
    tree["register"] = {"min_prompts": 1}
    return PipelineConfig.model_validate_json(json.dumps(tree))


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    """Context of a candidate that says good things."""
    policy(tmp_path / "ppo" / "policy", GOOD)
    write_data_artifact(tmp_path / "data", eval_prompts=prompts_of("a.jsonl"), tokenizer=TOKENIZER)
    return stage_context(tmp_path, inputs={name: tmp_path / name for name in ("ppo", "data")})


@pytest.fixture
def champion(config: PipelineConfig, tmp_path: Path) -> Callable[..., tuple[Path, Tags]]:
    """Publishes one that says something: its folder, and the tags of its version.

    `seen` and `in_pairs` are ids of the prompts that the policy and its reward model were trained on, `path`
    is its base model.
    """

    def publish(
        says: str,
        seen: Sequence[str] = (),
        in_pairs: Sequence[str] = (),
        key: str = "c" * 16,
        path: str | None = None,
        **data: str,
    ) -> tuple[Path, Tags]:
        store = ArtifactStore(Store(config.store_url), tmp_path / "cache")
        made = config.model_dump(mode="json", by_alias=True)
        made["data"] |= data
        made["model"]["path"] = path
        tags: dict[str, str] = {}
        for stage in ("data", "ppo"):
            policy(tmp_path / "out" / "policy", says)
            if stage == "data":
                write_data_artifact(
                    tmp_path / "out",
                    prompts=[PromptExample(name, "", ()) for name in seen],
                    pairs=[PairExample(name, "", (), (), ()) for name in in_pairs],
                    tokenizer=TOKENIZER,
                )
            ref = store.publish(stage, key, tmp_path / "out", Provenance(config=made))
            tags |= {f"rlhf.{stage}.key": ref.key, f"rlhf.{stage}.digest": ref.digest}
        return store.fetch(ref) / "policy", tags

    return publish


@pytest.fixture(autouse=True)
def scripted() -> Iterator[list[ScriptedEngine]]:
    """Models that give the text in their file `says`. JSON there has a text by prompt, and at "" that of the
    others.
    """

    def respond(request: Request) -> Reply:
        text = (request.model / "says").read_text()
        if text.startswith("{"):
            by_prompt = json.loads(text)
            text = by_prompt.get(request.prompt.prompt_id, by_prompt[""])
        if text in FAILURES:
            raise FAILURES[text]
        return Reply(TOKENIZER.encode(text, add_special_tokens=False))

    with scripted_engines(respond) as started:
        yield started
