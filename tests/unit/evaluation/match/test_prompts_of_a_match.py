"""Prompts of a match of a candidate against the champion.

- prompts that one of both, or a model before it, was trained on are left out with their groups; if too few
  are left, nothing is sampled; if so, or if the data of a model before cannot be read, there is no match
- a tokenizer that was loaded and saved again is the same one
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.data.dataset import sft_prompts, write
from rlhf_core.data.messages import Message
from rlhf_core.data.templates import Encoder
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.evaluation import match
from rlhf_core.evaluation.match import MatchSkipped
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.testing.engines import ScriptedEngine
from rlhf_core.types import PairExample, PromptExample, SFTExample, StageContext
from tests.support.match_models import (
    BAD,
    GOOD,
    PROMPTS,
    TOKENIZER,
    data_of_run,
    least,
)
from tests.support.scripted_store import ScriptedStore


def test_training_prompts_of_the_champion_are_left_out(
    config: PipelineConfig, context: StageContext, champion: Any
) -> None:
    tags = champion(BAD, seen=["p0", "p5", "another"], in_pairs=["p6"])[1]
    result = match.run_match(least(config, 5), context, tags)
    assert result.prompt_ids == ("p1", "p2", "p3", "p4", "p7")
    assert len(result.comparison.preferences) == 5
    words = "only 5 held-out prompts are left that neither policy was trained on, and register.min_prompts=6"
    with pytest.raises(MatchSkipped, match=words):
        match.run_match(least(config, 6), context, tags)


def test_a_match_of_too_few_prompts_is_not_run(
    config: PipelineConfig, context: StageContext, champion: Any, scripted: list[ScriptedEngine]
) -> None:
    """Its outcome would be known, which spends a level, although the refusal is certain."""
    tags = champion(BAD)[1]
    with pytest.raises(MatchSkipped, match="only 8 held-out prompts are left, and"):
        match.run_match(least(config, 9), context, tags)
    assert not scripted, "nothing is sampled"


def test_without_a_prompt_that_is_left_there_is_no_match(
    config: PipelineConfig, context: StageContext, champion: Any
) -> None:
    tags = champion(BAD, seen=[f"p{i}" for i in range(len(PROMPTS))])[1]
    with pytest.raises(MatchSkipped, match="no held-out prompt is left that neither policy was trained on"):
        match.run_match(least(config, 0), context, tags)


def test_prompts_of_demonstrations_and_of_the_models_before_are_left_out(
    config: PipelineConfig, context: StageContext, champion: Any, tmp_path: Path
) -> None:
    """The champion began from a model, whose data had samples of another run; the candidate from a third."""
    held_out = [PromptExample(f"p{i}", text, (1, 10 + i)) for i, text in enumerate(PROMPTS)]
    write(context.inputs["data"], "prompts", "eval", held_out)
    demonstrations = [
        SFTExample((1, 10, 5, 6), (0, 0, 1, 1)),
        SFTExample((1, 11), (0, 1)),  # its prompt is another one
        SFTExample((1, 10, 3, 7, 12), (0, 0, 1, 0, 1)),  # of two turns
    ]
    sampled = data_of_run(config, tmp_path, "a" * 16, {"sft": demonstrations})
    source = {"path": str(sampled / "best.jsonl")}
    data = config.model_dump(mode="json")["data"]
    prompts = {"prompts": [PromptExample("p3", "", ())]}
    base = data_of_run(config, tmp_path, "b" * 16, prompts, data=data | {"sft": [source]})
    third = data_of_run(config, tmp_path, "e" * 16, {"prompts": [PromptExample("p5", "", ())]})
    tags = champion(BAD, seen=["p7"], path=str(base))[1]

    alone = match.run_match(least(config, 1), context, tags)
    assert alone.prompt_ids == ("p1", "p2", "p4", "p5", "p6")
    copy = str(tmp_path / f"artifacts-sample-{'e' * 16}-{'0' * 12}" / "policy")
    for path in (str(third / "policy"), copy):
        ours = least(config, 1, model={"path": path})
        assert match.run_match(ours, context, tags).prompt_ids == ("p1", "p2", "p4", "p6")

    for judge in (str(third / "model"), None):
        reward = config.model_dump(mode="json")["reward"] | {"judge": judge and {"path": judge}}
        found = match.run_match(least(config, 1, reward=reward), context, tags)
        assert ("p5" in found.prompt_ids) is (judge is None)

    shutil.rmtree(third.parent)
    with pytest.raises(MatchSkipped, match=f"the data of sample/{'e' * 16}, which it was made from, are not"):
        match.run_match(ours, context, tags)


@pytest.mark.parametrize(
    "seen",
    [
        {"prompts": [PromptExample("another", "", (), group="g0")]},
        {"pairs": [PairExample("another", "", (), (), (), group="g0")]},
        {"sft": [SFTExample((1, 5), (0, 1), group="g0")]},
        {"prompts": [PromptExample("p4", "", (), group="by the group of an earlier run")]},
        {"sft": [SFTExample((1, 14, 5), (0, 0, 1))]},  # of an earlier version: the tokens of p4
    ],
)
def test_prompts_of_a_group_with_a_training_prompt_are_left_out(
    seen: Any, config: PipelineConfig, context: StageContext, champion: Any, tmp_path: Path
) -> None:
    """The held-out prompts p0, p2, p4 and p6 are one group."""
    held_out = [
        PromptExample(f"p{i}", text, (1, 10 + i), group=f"g{i % 2 and i}") for i, text in enumerate(PROMPTS)
    ]
    write(context.inputs["data"], "prompts", "eval", held_out)
    base = data_of_run(config, tmp_path, "a" * 16, seen)
    result = match.run_match(least(config, 1), context, champion(BAD, path=str(base))[1])
    assert result.prompt_ids == ("p1", "p3", "p5", "p7")


def test_a_base_model_can_be_a_copy_from_the_bucket_of_another_project(
    config: PipelineConfig, context: StageContext, champion: Any, tmp_path: Path
) -> None:
    """Its data are looked for in the store that it was copied from."""
    bucket = tmp_path / "bucket"
    tree = config.model_dump(mode="json", by_alias=True) | {"store": {"url": str(bucket)}}
    theirs = PipelineConfig.model_validate_json(json.dumps(tree))
    data_of_run(theirs, tmp_path, "a" * 16, {"prompts": [PromptExample("p3", "", ())]})
    artifacts = ArtifactStore(ScriptedStore(bucket, remote=True), tmp_path / "copies")
    ref = artifacts.find("sample", "a" * 16)
    assert ref is not None
    path = artifacts.address(ref, "best.jsonl", local=True)
    assert str(bucket) not in path
    ours, tags = least(config, 1, model={"path": path}), champion(BAD)[1]
    assert "p3" not in match.run_match(ours, context, tags).prompt_ids
    (record,) = (tmp_path / "copies").glob("*.store")
    record.unlink()
    with pytest.raises(MatchSkipped, match=f"the data of sample/{'a' * 16}, which it was made from, are not"):
        match.run_match(ours, context, tags)


def test_match_is_skipped_if_the_store_of_a_model_before_refuses_access(
    config: PipelineConfig, context: StageContext, champion: Any, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.symlink_to(old)
    base = str(old / "artifacts" / "ppo" / ("a" * 16))
    reason = f"the data of ppo/{'a' * 16}, which it was made from, cannot be read .*leads to itself"
    with pytest.raises(MatchSkipped, match=reason):
        match.run_match(config, context, champion(BAD, path=base)[1])
    ours = least(config, 1, model={"path": base})
    with pytest.raises(MatchSkipped, match=f"the candidate was trained on are not known: {reason}"):
        match.run_match(ours, context, champion(BAD, key="d" * 16)[1])


def test_tokenizers_that_were_saved_again_are_the_same(
    config: PipelineConfig, context: StageContext, champion: Any, tmp_path: Path
) -> None:
    """The base model of the candidate is a policy of an earlier run, whose tokenizer was loaded and saved."""
    held_out = [PromptExample(f"p{i}", text, (1, 10 + i)) for i, text in enumerate(PROMPTS)]
    write(context.inputs["data"], "prompts", "eval", held_out)
    base = data_of_run(config, tmp_path, "a" * 16, {"sft": [SFTExample((1, 12, 5), (0, 0, 1))]})
    for own in (context.inputs["data"] / "tokenizer", context.inputs["ppo"] / "policy"):
        load_tokenizer(str(own)).save_pretrained(own)
    ours = least(config, 1, model={"path": str(base)})
    result = match.run_match(ours, context, champion(BAD)[1])
    assert set(result.prompt_ids) == {f"p{i}" for i in range(len(PROMPTS))} - {"p2"}


def test_demonstrations_of_a_conversation_have_the_prompts_of_the_policy() -> None:
    """A prompt of PPO has the tokens that a conversation has before the answer."""
    encoder = Encoder(TOKENIZER, "chat", "the test")
    asked, said = Message("user", PROMPTS[0]), Message("assistant", GOOD)
    again = Message("user", PROMPTS[1])
    whole = encoder.conversation([asked, said, again, said])
    found = list(sft_prompts(SFTExample(whole.ids, whole.mask)))
    assert found == [encoder.prompt([asked]), encoder.prompt([asked, said, again])]
