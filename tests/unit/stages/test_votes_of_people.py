"""The stage `register` with `register.votes`, on MLflow with SQLite.

- with a margin, a candidate waits for votes, and with votes that do not refuse it becomes champion: first
  against its SFT model, then against the champion in a match
- the match of an earlier registration is used again, and continues its test at the same level, unless the
  champion's judge was missing then and is there now, or the reverse
- a file of another page does not count, nor does one of a match that was not run; a warning says why
- a file that was changed, is damaged or is no file of votes is refused, before the start where it can be
- a file without votes is a warning; of two files of one page load the later one counts
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.data.synthetic import ADJECTIVES, SUBJECTS, VERBS, VERSION
from rlhf_core.errors import ConfigError
from rlhf_core.evaluation.check import check_votes
from rlhf_core.evaluation.review import Opponent, load_blind_pairs, page_digest
from rlhf_core.pipeline import StageName
from rlhf_core.run.external_inputs import external_digests
from rlhf_core.stages import register
from rlhf_core.stages.register import match_name
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.bundles import weights_sha256
from rlhf_core.storage.store import open_store
from rlhf_core.testing import stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.engines import Reply, Request, ScriptedEngine, scripted_engines
from rlhf_core.types import ArtifactRef, Lineage, PromptExample
from tests.support.word_tokenizer import word_tokenizer

PAIRS = 60


PROMPTS = [
    f"Tell me about a {adjective} {subject} on the hill." for subject in SUBJECTS for adjective in ADJECTIVES
]
assert len(PROMPTS) == PAIRS
KIND = ("It is kind and gentle.", "It is happy and warm.", "It is bright and sweet.")
POLICIES = {"one": 0, "two": 1, "three": 2, "four": 2}
"""Number of kind sentences in the answers of each policy."""


def answer(policy: str, prompt: str, match: int) -> str:
    """Return the answer in this match, from 1: in each match the answers are others, as they are on a GPU.

    The candidate has a bad answer to as many prompts as matches were run.
    """
    if PROMPTS.index(prompt) < match:
        return "It is rotten and dull."
    about = prompt.removeprefix("Tell me about a ").removesuffix(" on the hill.")
    return " ".join([f"The {about} {VERBS[match]} on the hill.", *KIND[: POLICIES[policy]]])


TOKENIZER = word_tokenizer([*PROMPTS, *KIND, *VERBS, "It is rotten and dull.", "The"])


def sample(number: int) -> dict[str, str]:
    answers = {"sft": f"bad {number}", "ppo": f"good {number}"}
    return {"prompt_id": f"p{number}", "prompt": f"Prompt {number}", "winner": "ppo", **answers}


def saved(folder: Path, samples: Path, opponent: Opponent, wins: int) -> str:
    """Write a file of votes with this many wins of the policy, and return its path."""
    pairs = load_blind_pairs(samples, opponent)
    votes = ["1" if pair.policy_first == (i < wins) else "2" for i, pair in enumerate(pairs)]
    content = {"format": "rlhf-review-1", "page": page_digest(pairs), "saved": 1, "votes": votes}
    file = folder / f"votes-{opponent}-{wins}.json"
    file.write_text(json.dumps(content))
    return str(file)


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    """Engines with the answers of the policies. A match starts that of the candidate first."""

    def respond(request: Request) -> Reply:
        policy = (request.model / "model.safetensors").read_text()
        is_candidate = len(started) % 2 == 1
        match = (len(started) + 1) // 2 if is_candidate else 0
        return Reply(TOKENIZER.encode(answer(policy, request.prompt.prompt, match), add_special_tokens=False))

    with scripted_engines(respond) as started:
        yield started


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    return PipelineConfig.model_validate_json(json.dumps({"run": {"home": str(tmp_path)}}))


@pytest.fixture
def run(
    tmp_path: Path, database: Path, engines: list[ScriptedEngine]
) -> Callable[..., tuple[dict[str, Any], Path]]:
    """Registers a policy, and returns `registration.json` and the samples of its match."""
    prompts = [PromptExample(f"p{i}", text, (1, 2)) for i, text in enumerate(PROMPTS)]
    write_data_artifact(tmp_path / "data", eval_prompts=prompts, tokenizer=TOKENIZER)
    content = {
        "policies": {"ppo": {"win_rate": {"mean": 1.0}, "verdicts": {"wins": PAIRS, "losses": 0, "ties": 0}}},
        "judge": "gold",
        "judge_digests": {"gold": f"synthetic-{VERSION}"},
    }
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "evaluate" / "evaluation.json").write_text(json.dumps(content))
    lines = "".join(json.dumps(sample(i)) + "\n" for i in range(PAIRS))
    (tmp_path / "evaluate" / "samples.jsonl").write_text(lines)

    def config_of(*votes: str) -> PipelineConfig:
        name = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:9]
        tree = {
            "run": {"home": str(tmp_path), "name": name, "device": "cpu"},
            "tracking": {"uri": f"sqlite:///{database}"},
            "register": {"votes": list(votes), "votes_margin": 0.2},
            "evaluate": {"bootstrap": 200, "samples": PAIRS},
        }
        return PipelineConfig.model_validate_json(json.dumps(tree))

    store = ArtifactStore(open_store(config_of()), tmp_path / "cache")
    made = Provenance(config=config_of().model_dump(mode="json", by_alias=True))
    data = store.publish("data", "d" * 16, tmp_path / "data", made)

    @cache
    def published(policy: str) -> dict[StageName, ArtifactRef]:
        key = policy.encode().hex().rjust(16, "0")
        TOKENIZER.save_pretrained(tmp_path / policy / "policy")
        (tmp_path / policy / "policy" / "model.safetensors").write_text(policy)
        weights = {"weights_sha256": weights_sha256(tmp_path / policy / "policy")}
        refs: dict[StageName, ArtifactRef] = {
            "data": data,
            "ppo": store.publish("ppo", key, tmp_path / policy, replace(made, attributes=weights)),
        }
        for stage in ("sft", "reward", "evaluate"):
            refs[stage] = ArtifactRef(stage, key, f"{policy}-{stage}", f"{tmp_path}/{policy}")
        return refs

    def register_policy(policy: str, *votes: str, changed: bool = False) -> tuple[dict[str, Any], Path]:
        config, refs = config_of(*votes), published(policy)
        sources = {name: digest for name, digest in external_digests(config).items() if "register" in name}
        assert len(sources) == len(votes)
        inputs = {"data": store.fetch(refs["data"]), "ppo": store.fetch(refs["ppo"])}
        context = stage_context(
            tmp_path / f"stage-{policy}-{len(votes)}",
            inputs={**inputs, "evaluate": tmp_path / "evaluate"},
            lineage=Lineage(refs),
            sources=dict.fromkeys(sources, "other") if changed else sources,
        )
        result = register.run(config, context)
        facts = json.loads((context.output / "registration.json").read_text())
        key = hashlib.sha256(f"{policy} {votes}".encode()).hexdigest()[:16]
        folder = store.fetch(store.publish("register", key, context.output, Provenance()))
        return facts | {"metrics": result.metrics}, folder / "match_samples.jsonl"

    return register_policy


def test_a_candidate_waits_for_the_votes_of_people(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluation = tmp_path / "evaluate" / "samples.jsonl"
    facts, _ = run("one")
    assert (facts["champion"], facts["rule"], facts["votes"]) == (False, "votes", None)
    against_sft = saved(tmp_path, evaluation, "sft", 40)
    assert run("one", saved(tmp_path, evaluation, "sft", 20))[0]["rule"] == "votes"
    facts, _ = run("one", against_sft)
    assert (facts["champion"], facts["rule"]) == (True, "first"), facts["reason"]
    assert facts["votes"]["mean"] == pytest.approx(2 / 3) and facts["votes"]["pairs"] == PAIRS
    assert facts["metrics"]["votes_against_sft/votes"] == PAIRS
    # The next candidate is compared with the first one.
    facts, samples = run("two")
    assert (facts["champion"], facts["rule"]) == (False, "votes")
    assert "`rlhf review --against champion`" in facts["reason"]
    level = facts["reason"].partition("(level ")[2]
    liked, disliked = (saved(tmp_path, samples, "champion", wins) for wins in (40, 10))
    facts, _ = run("two", disliked)
    assert (facts["champion"], facts["rule"]) == (False, "votes")
    assert "; people may prefer the champion; read the pairs" in facts["reason"]
    facts, _ = run("two", liked, against_sft)
    assert facts["champion"] and facts["rule"] == "match", facts["reason"]
    assert facts["match"]["votes"]["mean"] == pytest.approx(2 / 3) and facts["votes"]["votes"] == PAIRS
    assert facts["reason"].partition("(level ")[2] == level.partition("; register.votes_margin")[0]
    assert "not counted" not in caplog.text
    # Registered again as the champion: nothing is run.
    facts, _ = run("two", liked, against_sft)
    assert facts["champion"] and facts["votes"]["votes"] == PAIRS
    [warning] = [record.message for record in caplog.records if "not counted" in record.message]
    assert warning.startswith(f"register.votes.0: {liked} was not counted: no match was run, because ")
    assert warning.endswith("the policy is champion already")
    caplog.clear()
    run("four", saved(tmp_path, evaluation, "sft", 10), liked)
    assert "register.votes.1" in caplog.text and "no match was run, and it has votes" in caplog.text
    other = json.loads(Path(liked).read_text()) | {"page": "f" * 64}
    (tmp_path / "other.json").write_text(json.dumps(other))
    facts, _ = run("three", str(tmp_path / "other.json"))
    assert (facts["champion"], facts["rule"]) == (False, "votes")
    assert "register.votes.0: " in caplog.text and "was not counted: it has votes of a page" in caplog.text


def test_votes_count_for_the_match_they_are_about(
    run: Any, engines: list[ScriptedEngine], tmp_path: Path
) -> None:
    """On a GPU, the same match run again has other answers."""
    run("one")
    run("one", saved(tmp_path, tmp_path / "evaluate" / "samples.jsonl", "sft", 40))
    waits, samples = run("two")
    facts, _ = run("two", saved(tmp_path, samples, "champion", 40))
    assert (facts["champion"], facts["rule"], len(engines)) == (True, "match", 2), facts["reason"]
    assert facts["match"] == {**waits["match"], "votes": facts["match"]["votes"]}
    # Another policy, and the same one against another champion, have their own match.
    run("three")
    run("three", str(tmp_path / "votes-champion-40.json"))
    assert len(engines) == 4


def test_another_match_is_played_when_the_champions_judge_is_found_or_lost(
    config: PipelineConfig, tmp_path: Path
) -> None:
    store = ArtifactStore(open_store(config), tmp_path / "cache")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("")
    ref = store.publish("reward", "e" * 16, tmp_path / "model", Provenance())
    context = stage_context(tmp_path)
    missing = {"rlhf.reward.key": ref.key, "rlhf.reward.digest": "other"}
    present = missing | {"rlhf.reward.digest": ref.digest}

    def name(judge: str | None, tags: dict[str, str]) -> str:
        return match_name(config, context, tags if judge is None else tags | {"eval.judge": judge})

    for judge in ("reward_model", None):
        assert name(judge, missing) != name(judge, present), "other judges answered"
    assert name("gold", missing) == name("gold", present), "the reward model is no judge"
    assert name("reward_model", missing) == name("reward_model", {}), "none answered"


def test_files_that_are_no_votes_or_were_changed_are_refused(run: Any, tmp_path: Path) -> None:
    run("one")
    votes = saved(tmp_path, tmp_path / "evaluate" / "samples.jsonl", "sft", 40)
    with pytest.raises(ConfigError, match=r"register\.votes\.0 was changed after the run began"):
        run("one", votes, changed=True)
    short = changed(votes, "short", votes=["1"])
    with pytest.raises(ConfigError, match=rf"^register\.votes\.0: {short}: must have {PAIRS} votes.*got 1"):
        run("one", short)


def changed(original: str, name: str, /, **changes: Any) -> str:
    """Write a file with these changes next to a file of votes, and return its path."""
    file = Path(original).with_name(f"{name}.json")
    file.write_text(json.dumps(json.loads(Path(original).read_text()) | changes))
    return str(file)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "other"}, "must be a file that a review page saved"),
        ({"votes": ["1", "3"]}, "vote 2 must be 1, 2, tie or null; got '3'"),
        ({"votes": {}}, "votes must be a list"),
        ({"saved": None}, "saved must be a time"),
    ],
)
def test_damaged_files_are_found_before_the_start(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample(0)) + "\n")
    votes = saved(tmp_path, tmp_path / "samples.jsonl", "sft", 1)
    damaged = changed(votes, "damaged", **changes)
    [finding] = check_votes(given(votes, damaged))
    assert isinstance(finding, ConfigError)
    assert str(finding).startswith(f"register.votes.1: {damaged}: ") and words in str(finding)
    [finding] = check_votes(given(votes, str(tmp_path / "missing")))
    assert str(finding).startswith(f"register.votes.1: cannot read {tmp_path}/missing: ")
    assert list(check_votes(given(votes))) == []


def given(*votes: str) -> PipelineConfig:
    return PipelineConfig.model_validate_json(json.dumps({"register": {"votes": list(votes)}}))


def test_a_file_without_votes_is_a_warning_and_counts_as_none(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run("one")
    votes = saved(tmp_path, tmp_path / "evaluate" / "samples.jsonl", "sft", 40)
    empty = changed(votes, "empty", votes=[None] * PAIRS)
    [finding] = check_votes(given(votes, empty))
    assert isinstance(finding, str) and finding.startswith(f"register.votes.1: {empty} has no vote")
    facts, _ = run("one", empty)
    assert (facts["champion"], facts["rule"], facts["votes"]) == (False, "votes", None)
    assert f"register.votes.0: {empty} has no vote and does not count" in caplog.text


def test_the_later_file_of_one_page_load_counts(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run("one")
    votes = saved(tmp_path, tmp_path / "evaluate" / "samples.jsonl", "sft", 40)
    first = changed(votes, "first", session="a", votes=["tie"] * PAIRS)
    last = changed(votes, "last", session="a", saved=2)
    facts, _ = run("one", first, last)
    assert (facts["votes"]["votes"], facts["votes"]["mean"]) == (PAIRS, pytest.approx(2 / 3))
    assert f"register.votes.0: {first} does not count: another file" in caplog.text
