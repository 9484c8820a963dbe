"""Match of a candidate against the champion. Models are scripted; store and tokenizer are real.

- both answer the prompts of the evaluation, and its judge decides each prompt; a language model is asked in
  both orders
- the champion's reward model compares the same answers, unless it is the judge itself; a pair to which one
  of both gives NaN is left out
- the champion is loaded with the settings of its own run (base and adapter, or the merge); a policy of DPO
  plays like one of PPO, with the settings of its evaluation
- the record has the answers of both with the verdicts, also those of regression sets and by the champion's
  reward model
- the win rate is also given for each data source, up to a number of sources
- both also answer the prompts of regression sets, which are in the artifact of the evaluation
- the match is skipped, with a reason, if the champion is not in this store, has another tokenizer, or
  cannot be served; failures of the system are raised, so that the stage is tried again
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.data.dataset import write
from rlhf_core.data.synthetic import gold_reward
from rlhf_core.errors import StoreError
from rlhf_core.evaluation import match
from rlhf_core.evaluation.match import MatchSkipped
from rlhf_core.evaluation.statistics import length_controlled
from rlhf_core.pipeline import StageName
from rlhf_core.record.reader import read_rollouts
from rlhf_core.stages.register import match_record
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.engines import ScriptedEngine
from rlhf_core.types import Lineage, PromptExample, StageContext
from tests.support.chat_server import ChatServer, prefer_longer
from tests.support.match_models import (
    BAD,
    FAILURES,
    GOOD,
    PROMPTS,
    TOKENIZER,
    policy,
    prompts_of,
    reward_model,
)


@pytest.mark.parametrize(("says", "rate"), [(BAD, 1.0), (GOOD, 0.5)])
def test_judge_of_the_evaluation_decides_each_prompt(
    says: str, rate: float, config: PipelineConfig, context: StageContext, champion: Any
) -> None:
    result = match.run_match(config, context, champion(says)[1])
    assert (result.comparison.win_rate.mean, len(result.comparison.preferences)) == (rate, len(PROMPTS))
    longer_by = [len(TOKENIZER.encode(GOOD)) - len(TOKENIZER.encode(says))] * len(PROMPTS)
    controlled = length_controlled(result.comparison.preferences, longer_by, 0.95)
    assert result.length_controlled == controlled
    assert match_record(result).length_controlled == controlled.to_json()
    sample = {"prompt_id": "p0", "prompt": PROMPTS[0], "ppo": GOOD, "champion": says}
    assert result.samples[0] == sample | {"winner": "ppo" if rate == 1.0 else "tie"}


def test_the_record_has_all_answers_and_the_verdicts(
    config: PipelineConfig, context: StageContext, champion: Any, scripted: list[ScriptedEngine]
) -> None:
    result = match.run_match(config, context, champion(BAD)[1])
    rows = read_rollouts(context.output).to_pylist()
    requests = [request for engine in scripted for request in engine.requests]
    assert [row["model"] for row in rows] == ["ppo"] * len(PROMPTS) + ["champion"] * len(PROMPTS)
    for index, (row, request) in enumerate(zip(rows, requests, strict=True)):
        said = (request.model / "says").read_text()
        assert (row["kind"], row["index"], row["prompt_set"]) == ("match", index, "held-out")
        assert (row["prompt_id"], row["seed"]) == (request.prompt.prompt_id, request.seed)
        assert TOKENIZER.decode(row["response_ids"], skip_special_tokens=True) == said
        assert row["score"] == pytest.approx(gold_reward(request.prompt.prompt, said, row["finished"]))
    verdicts = [row["preference/champion"] for row in rows]
    assert verdicts == [*result.comparison.preferences, *[None] * len(PROMPTS)]


def test_the_win_rate_is_given_for_each_source(
    config: PipelineConfig, context: StageContext, champion: Any
) -> None:
    opponent = champion(BAD)[1]
    assert match.run_match(config, context, opponent).by_source == {}, "there is one source"

    two = prompts_of("s0", "s1")
    write(context.inputs["data"], "prompts", "eval", two)
    assert match.run_match(config, context, opponent).by_source == {"s0": 1.0, "s1": 1.0}
    # p3 was not compared
    assert match._by_source(two[:4], ("p0", "p1", "p2"), (1.0, 0.0, 0.5)) == {"s0": 0.75, "s1": 0.0}
    for count in (match.MOST_SOURCES, match.MOST_SOURCES + 1):
        many = [PromptExample(f"p{i}", "", (), source=f"s{i}") for i in range(count)]
        found = match._by_source(many, [prompt.prompt_id for prompt in many], [1.0] * count)
        assert len(found) == (count if count == match.MOST_SOURCES else 0)


def test_a_language_model_decides_each_prompt(
    config: PipelineConfig, context: StageContext, champion: Any
) -> None:
    with ChatServer(prefer_longer) as server:
        tree = config.model_dump(mode="json", by_alias=True)
        judge = {"url": server.url, "model": "m"}
        tree["evaluate"]["language_model"] = judge
        judged = PipelineConfig.model_validate_json(json.dumps(tree))
        result = match.run_match(judged, context, champion(BAD)[1])
    assert (result.judge, result.comparison.win_rate.mean) == ("language_model", 1.0)
    assert result.judge_digest is not None and len(result.prompt_ids) == len(PROMPTS)


@pytest.mark.parametrize("judge", ["rules", "reward_model"])
def test_rules_or_the_candidates_reward_model_decide(
    judge: str, config: PipelineConfig, context: StageContext, champion: Any, tmp_path: Path
) -> None:
    tree = config.model_dump(mode="json", by_alias=True)
    tree["ppo"]["rewards"] = [{"type": "model"}, {"type": "keywords", "words": ["rotten"]}]
    tree["evaluate"]["judge"] = judge
    inputs = {**context.inputs, "reward": reward_model(tmp_path / "reward", BAD)}
    with_reward = replace(context, inputs=inputs)
    result = match.run_match(
        PipelineConfig.model_validate_json(json.dumps(tree)), with_reward, champion(BAD)[1]
    )
    assert (result.judge, result.comparison.win_rate.mean) == (judge, 0.0)
    assert len(result.comparison.preferences) == len(PROMPTS)


def test_a_masked_score_is_no_defeat(
    config: PipelineConfig, context: StageContext, champion: Any, tmp_path: Path
) -> None:
    (tmp_path / "r.py").write_text(
        "def f(samples):\n    return [float('nan') if s.prompt_id == 'p0' and 'kind' in s.response else 1.0"
        " for s in samples]\n"
    )
    masked = {"type": "python", "function": "r:f", "file": str(tmp_path / "r.py"), "on_error": "mask"}
    tree = config.model_dump(mode="json", by_alias=True)
    tree["ppo"]["rewards"] = [{**masked, "retries": 0}, {"type": "keywords", "words": ["rotten"]}]
    tree["evaluate"]["judge"] = "rules"
    tree["reward"]["enabled"] = False
    result = match.run_match(PipelineConfig.model_validate_json(json.dumps(tree)), context, champion(BAD)[1])
    assert result.prompt_ids == tuple(f"p{i}" for i in range(1, len(PROMPTS)))
    assert len(result.comparison.preferences) == len(PROMPTS) - 1


@pytest.fixture
def against_reward_model(
    config: PipelineConfig, context: StageContext, champion: Any, tmp_path: Path
) -> Callable[[str, bool], match.MatchResult]:
    """Plays against a champion whose reward model likes what it says, and can give NaN to an answer. That of
    the candidate is another one, or the same.
    """

    def play(
        judge: str, is_same: bool, cannot_score: str | None = None, **evaluate: Any
    ) -> match.MatchResult:
        tree = config.model_dump(mode="json", by_alias=True)
        tree["evaluate"] |= {"judge": judge, **evaluate}
        tags = champion(BAD)[1] | {"eval.judge": "reward_model"}
        store = ArtifactStore(Store(config.store_url), tmp_path / "cache")
        theirs = reward_model(tmp_path / "theirs", BAD, cannot_score)
        ref = store.publish("reward", "d" * 16, theirs, Provenance())
        tags |= {"rlhf.reward.key": ref.key, "rlhf.reward.digest": ref.digest}
        own = store.fetch(ref) if is_same else reward_model(tmp_path / "reward", GOOD)
        other = replace(ref, digest="e" * 64)
        ours = replace(
            context,
            inputs={**context.inputs, "reward": own},
            lineage=Lineage({"reward": ref if is_same else other}, None),
        )
        return match.run_match(PipelineConfig.model_validate_json(json.dumps(tree)), ours, tags)

    return play


@pytest.mark.parametrize("judge", ["reward_model", "gold"])
def test_champions_reward_model_scores_the_same_answers(judge: str, against_reward_model: Any) -> None:
    result = against_reward_model(judge, False)
    assert result.by_champion_model is not None and result.judge == judge
    assert (result.comparison.win_rate.mean, result.by_champion_model.win_rate.mean) == (1.0, 0.0)
    assert match_record(result).outcomes[0] == "p0 1 -1"
    recorded = match_record(result)
    assert (recorded.away_win_rate, recorded.away_log_evidence) == (0.0, 0.0)
    theirs = result.by_champion_model
    tied = replace(theirs, preferences=(0.5, *theirs.preferences[1:]))
    assert match_record(replace(result, by_champion_model=tied)).away_ties == 1


@pytest.mark.parametrize("judge", ["gold", "reward_model", "language_model"])
def test_pairs_that_one_reward_model_cannot_score_are_compared_by_neither(
    judge: str, config: PipelineConfig, context: StageContext, against_reward_model: Any, tmp_path: Path
) -> None:
    odd = "It is kind and warm"
    assert len({TOKENIZER.encode(text)[-1] for text in (odd, GOOD, BAD)}) == 3
    (context.inputs["ppo"] / "policy" / "says").write_text(json.dumps({"": GOOD, "p3": odd}))
    with ChatServer(prefer_longer) as server:
        language_model = {"url": server.url, "model": "m"}
        settings = {"language_model": language_model} if judge == "language_model" else {}
        result = against_reward_model(judge, False, cannot_score=odd, **settings)
        assert not any(odd in json.dumps(request) for request in server.requests)
    assert result.prompt_ids == tuple(f"p{i}" for i in range(8) if i != 3)
    assert len(result.comparison.preferences) == len(result.by_champion_model.preferences) == 7
    assert match_record(result).outcomes[3] == "p4 1 -1"
    rows = read_rollouts(context.output).to_pylist()
    scores = [row["reward/judge_of_champion"] for row in rows]
    expected = [math.nan if i == 3 else 0.0 for i in range(8)] + [1.0] * 8
    assert scores == pytest.approx(expected, abs=1e-4, nan_ok=True)
    preferences = {row["prompt_id"]: row["preference/champion"] for row in rows if row["model"] == "ppo"}
    verdicts = dict(zip(result.prompt_ids, result.comparison.preferences, strict=True))
    assert preferences == verdicts | {"p3": None}


@pytest.mark.parametrize(("judge", "outcomes"), [("reward_model", "p0 -1"), ("gold", "p0 1 -1")])
def test_a_judge_that_both_have_compares_once(judge: str, outcomes: str, against_reward_model: Any) -> None:
    result = against_reward_model(judge, True)
    assert (result.by_champion_model is None) == (judge == "reward_model")
    assert match_record(result).outcomes[0] == outcomes


BF16 = {"policy_deepspeed": {"dtype": "bfloat16"}, "engine": {"dtype": "bfloat16"}}
LORA = {**BF16, "lora": {"r": 8}}
NF4 = {**BF16, "lora": {"r": 8, "quantize": "nf4"}}


@pytest.mark.parametrize(
    ("candidate", "theirs", "apart"),
    [
        pytest.param({}, LORA, True, id="candidate without LoRA, champion with"),
        pytest.param(LORA, NF4, False, id="candidate with LoRA, champion nf4"),
        pytest.param(LORA, {"lora": {"r": 8}}, False, id="candidate bfloat16, champion float32"),
        pytest.param(
            LORA, {**LORA, "weight_sync": {"lora": "merged"}}, False, id="champion merged by its settings"
        ),
    ],
)
def test_champion_is_loaded_with_its_own_settings(
    candidate: Any,
    theirs: Any,
    apart: bool,
    config: PipelineConfig,
    context: StageContext,
    tmp_path: Path,
    scripted: list[ScriptedEngine],
) -> None:
    def settings(ppo: Any) -> PipelineConfig:
        tree = config.model_dump(mode="json", by_alias=True)
        return PipelineConfig.model_validate_json(json.dumps({**tree, "ppo": ppo}))

    made = settings(theirs).model_dump(mode="json", by_alias=True)
    store = ArtifactStore(Store(settings({}).store_url), tmp_path / "cache")
    folders = {"data": tmp_path / "d", "sft": tmp_path / "s", "ppo": tmp_path / "p"}
    write_data_artifact(folders["data"], tokenizer=TOKENIZER)
    policy(folders["sft"] / "model", BAD)
    policy(folders["ppo"] / "policy", BAD)
    for ppo in (folders["ppo"], context.inputs["ppo"]):
        (ppo / "adapter").mkdir()
        (ppo / "adapter" / "adapter_config.json").write_text('{"r": 8}')
    tags: dict[str, str] = {}
    fetched = {}
    for stage in ("data", "sft", "ppo"):
        ref = store.publish(stage, "c" * 16, folders[stage], Provenance(config=made))
        tags |= {f"rlhf.{stage}.key": ref.key, f"rlhf.{stage}.digest": ref.digest}
        fetched[stage] = store.fetch(ref)
    policy(tmp_path / "sft" / "model", GOOD)
    inputs = {**context.inputs, "sft": tmp_path / "sft"}
    ours = replace(context, inputs=inputs)
    match.run_match(settings(candidate), ours, tags)
    _, engine = scripted
    model = fetched["sft"] / "model" if apart else fetched["ppo"] / "policy"
    assert {request.model for request in engine.requests} == {model}
    assert list(engine.adapters.values()) == ([fetched["ppo"] / "adapter"] if apart else [])


def test_policies_of_dpo_and_ppo_meet_in_a_match(
    context: StageContext, tmp_path: Path, scripted: list[ScriptedEngine]
) -> None:
    tree = {
        "run": {"device": "cpu", "home": str(tmp_path)},
        "evaluate": {"prompts": 8, "bootstrap": 200},
        "dpo": {"enabled": True, "lora": {"r": 8}},
        "ppo": {"engine": {"dtype": "bfloat16"}},
        "register": {"policy": "dpo", "min_prompts": 8},
    }
    config = PipelineConfig.model_validate_json(json.dumps(tree))
    made = config.model_dump(mode="json", by_alias=True)
    # The run that trained the champion had another precision than the one that evaluated it.
    other = made | {"ppo": made["ppo"] | {"engine": made["ppo"]["engine"] | {"dtype": "float32"}}}
    store = ArtifactStore(Store(config.store_url), tmp_path / "cache")
    write_data_artifact(tmp_path / "d", tokenizer=TOKENIZER)
    policy(tmp_path / "s" / "model", BAD)
    policy(tmp_path / "o" / "policy", BAD)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "evaluation.json").write_text("{}")
    for folder in (tmp_path / "o", tmp_path / "dpo"):
        (folder / "adapter").mkdir(parents=True)
        (folder / "adapter" / "adapter_config.json").write_text('{"r": 8}')
    tags, fetched = {"rlhf.policy_stage": "dpo"}, {}
    folders: dict[StageName, str] = {"data": "d", "sft": "s", "dpo": "o", "evaluate": "e"}
    for stage, name in folders.items():
        run_config = other if stage == "dpo" else made
        ref = store.publish(stage, "c" * 16, tmp_path / name, Provenance(config=run_config))
        tags |= {f"rlhf.{stage}.key": ref.key, f"rlhf.{stage}.digest": ref.digest}
        fetched[stage] = store.fetch(ref)
    policy(tmp_path / "dpo" / "policy", BAD)
    policy(tmp_path / "sft" / "model", GOOD)
    inputs = {**context.inputs, "sft": tmp_path / "sft", "dpo": tmp_path / "dpo"}
    del inputs["ppo"]
    result = match.run_match(config, replace(context, inputs=inputs), tags)
    assert result.comparison.win_rate.mean == 1.0
    assert (result.samples[0]["dpo"], result.samples[0]["winner"]) == (GOOD, "dpo")
    assert "ppo" not in result.samples[0]
    candidate, champion = scripted
    assert list(candidate.adapters.values()) == [tmp_path / "dpo" / "adapter"]
    assert list(champion.adapters.values()) == [fetched["dpo"] / "adapter"]
    assert {request.model for request in champion.requests} == {fetched["sft"] / "model"}
    with pytest.raises(MatchSkipped, match=r"its tag rlhf\.policy_stage must be ppo or dpo; got sft"):
        match.run_match(config, replace(context, inputs=inputs), tags | {"rlhf.policy_stage": "sft"})


def test_regression_sets_compare_the_candidate_with_the_champion(
    context: StageContext, config: PipelineConfig, champion: Any, tmp_path: Path
) -> None:
    """Only the champion's answers end with a letter that the set wants."""
    sets = [{"name": "ending", "path": "x.jsonl", "reward": {"type": "format", "pattern": ".*l[.]"}}]
    tree = config.model_dump(mode="json", by_alias=True)
    tree["evaluate"]["regression"] = sets
    asked = PipelineConfig.model_validate_json(json.dumps(tree))
    folder = tmp_path / "evaluate" / "regression" / "ending"
    folder.mkdir(parents=True)
    write(folder, "prompts", "eval", [PromptExample("r", "Say it.", (1, 2))])
    inputs = {**context.inputs, "evaluate": tmp_path / "evaluate"}
    result = match.run_match(asked, replace(context, inputs=inputs), champion(BAD)[1])
    assert result.regression == {"ending": {"mean": -1.0, "low": -1.0, "high": -1.0, "margin": 0.02}}
    assert len(result.prompt_ids) == len(PROMPTS) and result.comparison.win_rate.mean == 1.0
    scores = read_rollouts(context.output, ["model", "prompt_set", "score"]).to_pylist()
    of_set = [(row["model"], row["score"]) for row in scores if row["prompt_set"] == "ending"]
    assert of_set == [("ppo", 0.0), ("champion", 1.0)]
    assert match.run_match(config, context, champion(BAD)[1]).regression == {}


def test_match_is_skipped_without_the_champions_artifacts(
    config: PipelineConfig, context: StageContext, champion: Any
) -> None:
    tags = champion(BAD)[1]
    others = [{}, *({**tags, name: "f" * len(value)} for name, value in tags.items())]
    for other in others:
        with pytest.raises(MatchSkipped, match="artifact is not in this store"):
            match.run_match(config, context, other)


def test_match_is_skipped_for_other_tokenizers_or_damaged_weights(
    config: PipelineConfig, context: StageContext, champion: Any, tmp_path: Path
) -> None:
    folder, tags = champion(BAD)
    for name in ("tokenizer.json", "chat_template.jinja"):
        own = tmp_path / "ppo" / "policy" / name
        whole = own.read_text()
        own.write_text(whole + " ")
        with pytest.raises(MatchSkipped, match="another tokenizer or template"):
            match.run_match(config, context, tags)
        own.write_text(whole)
    (folder / "says").write_text("rot")
    with pytest.raises(MatchSkipped, match="its ppo artifact is not in this store"):
        match.run_match(config, context, tags)


def test_match_is_skipped_for_another_template(
    config: PipelineConfig, context: StageContext, champion: Any
) -> None:
    with pytest.raises(MatchSkipped, match="another tokenizer or template"):
        match.run_match(config, context, champion(BAD, template="plain")[1])


def test_store_errors_are_raised(config: PipelineConfig, context: StageContext, champion: Any) -> None:
    tags = champion(BAD)[1]
    store = Path(config.store_url)
    shutil.rmtree(store)
    store.symlink_to(store)  # too many levels of symbolic links
    with pytest.raises(StoreError):
        match.run_match(config, context, tags)


@pytest.mark.parametrize("says", FAILURES)
def test_match_is_skipped_if_the_champion_cannot_be_served(
    says: str, config: PipelineConfig, context: StageContext, champion: Any
) -> None:
    tags = champion(says)[1]
    error = FAILURES[says]
    if says in ("OLD", "BAD MODEL"):
        reason = rf"it cannot be served here \({type(error).__name__}: {error}\)"
        with pytest.raises(MatchSkipped, match=reason):
            match.run_match(config, context, tags)
    else:
        with pytest.raises(type(error)) as raised:
            match.run_match(config, context, tags)
        assert raised.value is error, "the stage is tried again"
    (context.inputs["ppo"] / "policy" / "says").write_text(says)
    with pytest.raises(type(error)):
        match.run_match(config, context, tags)
