"""The registry: one version per policy, and a champion only by a better recorded evaluation. Real MLflow on
SQLite.

Locks: aliases, the levels of tests, which a deleted version does not give back, no second version of a
policy, lineage, the stage from its inputs to its file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import CorruptArtifact, RLHFError
from rlhf_core.pipeline import StageName
from rlhf_core.stages import register as register_stage
from rlhf_core.storage.bundles import weights_sha256
from rlhf_core.testing import stage_context
from rlhf_core.tracking import champions
from rlhf_core.tracking.champion_log import ENTRY, PromotionTest, append, log_of, read_log
from rlhf_core.tracking.gate import YEAR, Evaluation, Gate, Match, NoMatch, log_evidence
from rlhf_core.tracking.mlflow_client import Mlflow
from rlhf_core.tracking.registry import Candidate, register
from rlhf_core.types import ArtifactRef, Lineage, StageContext


@pytest.fixture
def mlflow(database: Path) -> Mlflow:
    return Mlflow(f"sqlite:///{database}", "registry")


GATE = Gate(0.5)
GOLD: dict[str, Any] = {"judge": "gold", "judge_digest": "synthetic-1"}


def won(wins: int, prompts: int = 100, skip: int = 0) -> Match:
    """Return a match with the losses first. `skip`: number of the first prompt."""
    outcomes = [-1] * (prompts - wins) + [1] * wins
    names = tuple(f"p{skip + index} {outcome}" for index, outcome in enumerate(outcomes))
    return Match(
        wins / prompts, 0.0, 1.0, prompts, wins, prompts - wins, **GOLD,
        log_evidence=log_evidence(outcomes), outcomes=names,
    )  # fmt: skip


def recorded_tests(mlflow: Mlflow, model: str, version: str) -> list[PromotionTest]:
    """Return the tests of a version, each with the last match that continued it."""
    tests = [test for test in read_log(mlflow, model).tests if test.version == version]
    return list({test.time: test for test in tests}.values())


def test_match_runs_only_for_candidates_that_pass_the_gate(mlflow: Mlflow) -> None:
    asked: list[Any] = []

    def run_match(tags: Any) -> Match:
        asked.append(tags["note"])
        return won(80)

    def enter(digest: str, win_rate: float) -> Any:
        return register(
            mlflow, "m6", candidate(digest, win_rate, note=digest), gate=GATE, run_match=run_match
        )

    enter("a", 0.8)
    enter("a", 0.8)
    enter("b", 0.4)
    assert asked == []
    done = enter("c", 0.6)
    assert asked == ["a"]
    assert (done.match, done.previous) == (won(80), "1")
    assert aliases(mlflow, "m6") == {"candidate": "3", "champion": "3"}
    # Killed after the alias moved, it says the same again, and runs no match.
    again = replace(done, created=False, match=replace(won(80), outcomes=()), already_champion=True)
    assert enter("c", 0.6) == again and not done.already_champion
    assert asked == ["a"]


def test_a_candidate_that_fell_on_a_regression_set_plays_no_match(mlflow: Mlflow) -> None:
    register(mlflow, "m8r", candidate("a"), gate=GATE)
    fell = {"math": {"mean": -0.1, "low": -0.2, "high": 0.0, "margin": 0.02}}
    other = candidate("b")
    other = replace(other, evaluation=replace(other.evaluation, regression=fell))
    done = register(mlflow, "m8r", other, gate=GATE, run_match=lambda tags: pytest.fail("was run"))
    assert (done.decision.rule, done.decision.champion) == ("regression", False)
    assert aliases(mlflow, "m8r") == {"candidate": "2", "champion": "1"}
    passed = {"math": {"mean": 0.1, "low": 0.0, "high": 0.2, "margin": 0.02}}
    match = replace(won(80), regression=passed)
    register(mlflow, "m8r", candidate("c"), gate=GATE, run_match=lambda tags: match)
    [*_, move] = champions.history(mlflow, "m8r")
    assert move.evidence is not None and move.evidence["regression"] == passed
    assert move.reason.endswith("; regression sets passed: math")


def test_new_champion_during_the_match_is_the_next_opponent(mlflow: Mlflow) -> None:
    asked: list[str] = []
    register(mlflow, "m7", candidate("a", note="a"), gate=GATE)

    def run_match(tags: Any) -> Match:
        asked.append(tags["note"])
        if tags["note"] == "a":
            register(mlflow, "m7", candidate("b", note="b"), gate=GATE, run_match=lambda tags: won(80))
        return won(50) if tags["note"] == "b" else won(80)

    done = register(mlflow, "m7", candidate("c", note="c"), gate=GATE, run_match=run_match)
    assert asked == ["a", "b"]
    assert (done.decision.champion, done.previous) == (False, "3")
    assert aliases(mlflow, "m7")["champion"] == "3"
    [first, second] = [recorded_tests(mlflow, "m7", version)[-1] for version in ("3", "2")]
    assert second.level < first.level and second.champion == "3"


def test_each_test_spends_of_the_budget_of_a_year(mlflow: Mlflow) -> None:
    now = 1e9

    def enter(digest: str, wins: int) -> Any:
        policy = candidate(digest, note=digest)
        match = won(wins)
        return register(mlflow, "m9", policy, gate=GATE, run_match=lambda tags: match, clock=lambda: now)

    enter("a", 0)
    levels = []
    for number in range(5):
        enter(f"b{number}", 50)
        levels.append(recorded_tests(mlflow, "m9", str(2 + number))[0].level)
    # A quarter of what is left of 1 %.
    assert levels == pytest.approx([0.0025 * 0.75**number for number in range(5)])
    # A match with strong evidence is decided at the next level; a new champion does not change what is left.
    assert enter("c", 80).decision.champion
    enter("d", 50)
    assert recorded_tests(mlflow, "m9", "8")[0].level == pytest.approx(0.0025 * 0.75**6)
    now += YEAR
    enter("e", 50)
    assert recorded_tests(mlflow, "m9", "9")[0].level == pytest.approx(0.0025)
    assert aliases(mlflow, "m9")["champion"] == "7"


def test_a_host_whose_clock_is_behind_the_last_tests_refuses_its_candidate(mlflow: Mlflow) -> None:
    def enter(digest: str, wins: int, now: float) -> Any:
        policy = candidate(digest, note=digest)
        return register(mlflow, "behind", policy, gate=GATE, run_match=lambda _: won(wins), clock=lambda: now)

    enter("a", 0, 1e9)
    for number in range(5):  # all that is available at once
        test = PromotionTest(1.1e9 + number, 0.0025, "1", None, 100, f"{number}", "7")
        append(mlflow, "behind", read_log(mlflow, "behind").last, test)
    done = enter("b", 80, 1.05e9)
    assert (done.decision.champion, done.decision.rule, done.decision.tested) == (False, "match", True)
    assert enter("c", 80, 1.1e9 + YEAR).decision.champion


def test_a_deleted_version_gives_back_nothing_of_the_budget(mlflow: Mlflow) -> None:
    def enter(digest: str, wins: int = 50) -> str:
        policy = candidate(digest, 0.8 if wins else 0.55)
        return register(mlflow, model, policy, gate=GATE, run_match=lambda tags: won(wins)).version

    model = "deleted first"
    for number in range(3):
        version = enter(f"f{number}", 0)
        level = recorded_tests(mlflow, model, version)[0].level
        assert level == pytest.approx(GATE.first_level(1 + number))
        mlflow._client.delete_model_version(model, version)
    model = "deleted later"
    enter("a")
    for number in range(4):
        version = enter(f"b{number}")
        level = recorded_tests(mlflow, model, version)[0].level
        assert level == pytest.approx(0.0025 * 0.75**number, rel=1e-4)
        mlflow._client.delete_model_version(model, version)


def test_a_test_of_an_earlier_release_counts_also_after_its_version_is_deleted(mlflow: Mlflow) -> None:
    def enter(digest: str) -> float:
        done = register(mlflow, model, candidate(digest), gate=GATE, run_match=lambda tags: won(50))
        return recorded_tests(mlflow, model, done.version)[0].level

    model = "recorded by an earlier release"
    for digest in "ab":
        enter(digest)
    tests = read_log(mlflow, model).tests
    mlflow._client.delete_registered_model(log_of(model))
    for test in tests:
        tag = f"rlhf.test.{round(test.time * 1e6):020d}.{test.version}"
        content = {name: value for name, value in asdict(test).items() if name != "version"}
        mlflow._client.set_registered_model_tag(model, tag, json.dumps(content))
    mlflow._client.delete_model_version(model, "2")
    assert enter("c") == pytest.approx(0.0025 * 0.75, rel=1e-4)
    assert enter("d") == pytest.approx(0.0025 * 0.75**2, rel=1e-4)


def test_a_match_with_more_prompts_continues_its_test(mlflow: Mlflow) -> None:
    def enter(match: Match) -> list[PromotionTest]:
        version = register(mlflow, "m11", candidate("b"), gate=GATE, run_match=lambda tags: match).version
        return recorded_tests(mlflow, "m11", version)

    register(mlflow, "m11", candidate("a"), gate=GATE)
    half = won(50)
    [first] = enter(half)
    assert first.prompts == 100
    [same] = enter(half)
    assert same == first, "asked again, it is the same test"
    longer = replace(half, prompts=102, outcomes=(*half.outcomes, "p100 1", "p101 -1"))
    [continued] = enter(longer)
    assert (continued.level, continued.time) == (first.level, first.time)
    assert continued.prompts == 102
    # Other prompts, other outcomes, or another judge are another test, which spends its own level.
    assert len(enter(won(50, skip=1))) == 2
    assert len(enter(won(51))) == 3
    assert len(enter(replace(longer, judge_digest="other"))) == 3, "not tested: not the champion's judge"
    assert enter(longer)[0].level == first.level


def test_the_first_champion_is_not_made_by_evaluating_one_policy_until_it_passes(mlflow: Mlflow) -> None:
    def enter(digest: str, win_rate: float) -> Any:
        return register(mlflow, "m14", candidate(digest, win_rate), gate=GATE)

    assert "level 0.025" in enter("a", 0.55).decision.reason
    assert "level 0.0083" in enter("a", 0.56).decision.reason
    assert "level 0.025" in enter("a", 0.55).decision.reason, "the same numbers are the same test"
    assert "level 0.0042" in enter("b", 0.57).decision.reason


def test_who_was_tested_during_the_match_counts(mlflow: Mlflow) -> None:
    def run_match(tags: Any) -> Match:
        register(mlflow, "m12", candidate("other"), gate=GATE, run_match=lambda tags: won(50))
        return won(50)

    register(mlflow, "m12", candidate("a"), gate=GATE)
    done = register(mlflow, "m12", candidate("c"), gate=GATE, run_match=run_match)
    assert recorded_tests(mlflow, "m12", done.version)[0].level == pytest.approx(0.0025 * 0.75, rel=1e-4)


def test_without_a_match_the_champion_stays(mlflow: Mlflow) -> None:
    register(mlflow, "m15", candidate("a"), gate=GATE)
    done = register(mlflow, "m15", candidate("b"), gate=GATE, run_match=lambda tags: NoMatch("it is gone"))
    assert (done.decision.champion, done.decision.rule, done.match) == (False, "no_match", None)
    assert "it is gone" in done.decision.reason
    assert recorded_tests(mlflow, "m15", "2") == [], "nothing was tested, so nothing is spent"


@pytest.mark.parametrize(
    "tag",
    [
        "no JSON",
        "[1]",
        "{}",
        "[" * 5000,
        '{"tests": 3}',
        '{"tests": {"1": {"e": 1}}}',
        '{"tests": [3]}',
        '{"tests": [{"time": "1", "level": "x", "champion": "1", "judge": "", "prompts": 1, "outcomes": 0}]}',
    ],
)
def test_an_entry_that_cannot_be_read_counts_as_no_test(mlflow: Mlflow, tag: str) -> None:
    model = f"edited {abs(hash(tag))}"
    for digest in "ab":
        policy = candidate(digest, note=digest)
        register(mlflow, model, policy, gate=GATE, run_match=lambda tags: won(50))
    for entry in mlflow.versions(log_of(model)):
        if json.loads(entry.tags[ENTRY])["tests"]:
            mlflow.tag_version(log_of(model), entry.version, {ENTRY: tag})
    register(mlflow, model, candidate("c", note="c"), gate=GATE, run_match=lambda tags: won(50))
    assert recorded_tests(mlflow, model, "3")[0].level == pytest.approx(0.0025)


def test_error_of_the_match_is_not_reported_as_mlflow(mlflow: Mlflow) -> None:
    def run_match(tags: Any) -> Match:
        raise RuntimeError("CUDA out of memory")

    register(mlflow, "m8", candidate("a"), gate=GATE)
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory$"):
        register(mlflow, "m8", candidate("b"), gate=GATE, run_match=run_match)


def candidate(digest: str, win_rate: float = 0.8, **tags: str) -> Candidate:
    wins = round(100 * win_rate)
    record = Evaluation(win_rate, wins, 100 - wins, **GOLD)
    return Candidate(f"/store/{digest}/policy", digest, None, tags, record)


def aliases(mlflow: Mlflow, model: str) -> dict[str, str | None]:
    found = {alias: mlflow.by_alias(model, alias) for alias in ("candidate", "champion")}
    return {alias: version.version if version else None for alias, version in found.items()}


def test_the_better_policy_becomes_champion_and_the_newest_is_the_candidate(mlflow: Mlflow) -> None:
    def enter(digest: str, wins: int) -> Any:
        return register(mlflow, "m1", candidate(digest), gate=GATE, run_match=lambda tags: won(wins))

    first = enter("a", 0)
    assert (first.version, first.created, first.previous) == ("1", True, None)
    assert aliases(mlflow, "m1") == {"candidate": "1", "champion": "1"}
    worse = enter("b", 40)
    assert (worse.version, worse.decision.champion, worse.previous) == ("2", False, "1")
    assert aliases(mlflow, "m1") == {"candidate": "2", "champion": "1"}
    better = enter("c", 80)
    assert aliases(mlflow, "m1") == {"candidate": "3", "champion": "3"}
    assert better.previous == "1"
    tags = {version.version: version.tags for version in mlflow.versions("m1")}
    assert [tags[version]["rlhf.gate"] for version in ("1", "2", "3")] == ["first", "match", "match"]
    assert tags["2"]["rlhf.gate_reason"] == worse.decision.reason, "without the advice, for the model card"
    assert worse.decision.text.endswith("no number of prompts is enough; train a better policy")
    assert "train a better" not in worse.decision.reason
    [start, last] = champions.history(mlflow, "m1")
    assert (start.version, start.previous, start.evidence) == ("1", None, None)
    assert (last.action, last.version, last.previous, last.state) == ("crowned", "3", "1", "done")
    assert last.reason == better.decision.reason and last.evidence == won(80).record()


def test_a_policy_below_the_gate_is_registered_but_no_champion(mlflow: Mlflow) -> None:
    done = register(mlflow, "m2", candidate("a", win_rate=0.4), gate=GATE)
    assert not done.decision.champion
    assert aliases(mlflow, "m2") == {"candidate": "1", "champion": None}


def test_the_same_policy_registered_again_makes_no_second_version(mlflow: Mlflow) -> None:
    register(mlflow, "m3", candidate("a", 0.4, note="old"), gate=GATE)
    again = register(mlflow, "m3", candidate("a", note="new"), gate=GATE)
    assert (again.version, again.created, again.decision.rule) == ("1", False, "first")
    [version] = mlflow.versions("m3")
    assert version.tags["note"] == "new"
    assert aliases(mlflow, "m3") == {"candidate": "1", "champion": "1"}


def test_a_registration_says_that_the_alias_was_moved_by_hand(
    mlflow: Mlflow, caplog: pytest.LogCaptureFixture
) -> None:
    register(mlflow, "m3h", candidate("a"), gate=GATE)
    register(mlflow, "m3h", candidate("b"), gate=GATE)
    assert "by hand" not in caplog.text
    mlflow.set_alias("m3h", "champion", "2")
    register(mlflow, "m3h", candidate("c"), gate=GATE)
    text = "m3h: the alias `champion` was moved by hand: the history says version 1, and version 2 has it"
    assert text in caplog.text


@pytest.mark.parametrize("present", [True, False], ids=["is champion", "was champion"])
def test_another_evaluation_of_a_champion_does_not_change_its_judge(mlflow: Mlflow, present: bool) -> None:
    model = f"m3j {present}"
    register(mlflow, model, candidate("a", 0.8, **{"eval.judge": "gold"}), gate=GATE)
    if not present:
        register(mlflow, model, candidate("b"), gate=GATE, run_match=lambda tags: won(80))
    rules: dict[str, Any] = {"judge": "rules", "judge_digest": "r"}

    def enter(digest: str) -> Any:
        policy = candidate(digest, 0.8, **{"eval.judge": "rules", "new": "added"})
        judged = replace(policy, evaluation=replace(policy.evaluation, **rules))
        return register(mlflow, model, judged, gate=GATE, run_match=lambda tags: replace(won(80), **rules))

    again = enter("a")
    assert again.already_champion == present and again.decision.rule == ("first" if present else "judge")
    tags = {version.version: version.tags for version in mlflow.versions(model)}["1"]
    assert (tags["eval.judge"], tags["new"]) == ("gold", "added")
    assert Evaluation.from_json(tags["rlhf.evaluation"]) == candidate("a").evaluation
    assert (enter("c").decision.rule, aliases(mlflow, model)["champion"]) == (
        "judge",
        "1" if present else "2",
    )


def test_second_run_repairs_missing_aliases(mlflow: Mlflow) -> None:
    class KilledAtAnAlias(Mlflow):
        def set_alias(self, name: str, alias: str, version: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        register(KilledAtAnAlias(mlflow.uri, "registry"), "m4", candidate("a"), gate=GATE)
    done = register(mlflow, "m4", candidate("a"), gate=GATE)
    assert (done.version, done.created) == ("1", False)
    assert aliases(mlflow, "m4") == {"candidate": "1", "champion": "1"}


def test_a_version_links_to_the_run_that_trained_it(mlflow: Mlflow) -> None:
    trained = mlflow.create_run("ppo", {"mlflow.user": "ada"})
    done = register(mlflow, "m.9", replace(candidate("linked"), run_id=trained.run_id), gate=GATE)
    assert mlflow._client.get_model_version("m.9", done.version).run_id == trained.run_id


def test_a_champion_without_a_recorded_evaluation_is_not_replaced(mlflow: Mlflow) -> None:
    mlflow.ensure_model("m5", "")
    foreign = mlflow.create_version("m5", source="/x", run_id=None, tags={}, description="")
    mlflow.set_alias("m5", "champion", foreign.version)
    done = register(mlflow, "m5", candidate("a"), gate=GATE)
    assert (done.decision.rule, done.decision.champion) == ("unknown", False)
    assert aliases(mlflow, "m5")["champion"] == foreign.version


def test_registry_that_is_down_is_a_retryable_error() -> None:
    with pytest.raises(RLHFError, match="did not register the model 'm'"):
        register(Mlflow("sqlite:////proc/nowhere/x.db", "e"), "m", candidate("a"), gate=GATE)


def context(tmp_path: Path, evaluation: str) -> StageContext:
    for name in ("ppo/policy", "evaluate", "out", "work"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "ppo" / "policy" / "model.safetensors").write_bytes(b"1")
    (tmp_path / "evaluate" / "evaluation.json").write_text(evaluation)
    refs: dict[StageName, ArtifactRef] = {
        "data": ArtifactRef("data", "d" * 16, "1" * 64, "/s/data"),
        "reward": ArtifactRef("reward", "r" * 16, "2" * 64, "/s/reward"),
        "ppo": ArtifactRef(
            "ppo",
            "p" * 16,
            "3" * 64,
            "/s/ppo",
            mlflow_run_id="not-in-this-tracker",
            attributes={"weights_sha256": weights_sha256(tmp_path / "ppo" / "policy")},
        ),
        "evaluate": ArtifactRef(
            "evaluate",
            "e" * 16,
            "4" * 64,
            "/s/evaluate",
            {
                "win_rate/mean": 0.75,
                "kl": 3.0,
                "rules/is it (short)?/ppo/mean": 0.5,
                **{f"by_source/a+b ({i})@2.jsonl/kl": 2.0 for i in range(1500)},
            },
        ),
    }
    return stage_context(
        tmp_path,
        inputs={"ppo": tmp_path / "ppo", "evaluate": tmp_path / "evaluate"},
        lineage=Lineage(inputs=refs, parent_run_id=None),
    )


OF_PPO = {
    "win_rate": {"mean": 0.75, "low": 0.7, "high": 0.8},
    "verdicts": {"wins": 90, "losses": 30, "ties": 8},
}
EVALUATION = {
    "policies": {"ppo": OF_PPO},
    "judge_digests": {"gold": "synthetic-1"},
    "confidence": 0.95,
    "gold_reward": {"sft": {"mean": 0.5}, "ppo": {"mean": 0.9, "low": 0.704, "high": 1.096}},
    "reward_model": None,
    "judge": "gold",
}


def test_the_stage_registers_the_policy_with_its_lineage(
    tmp_path: Path, database: Path, mlflow: Mlflow
) -> None:
    config = PipelineConfig.model_validate(
        {"run": {"home": str(tmp_path), "name": "stage"}, "tracking": {"uri": f"sqlite:///{database}"}}
    )
    result = register_stage.run(config, context(tmp_path, json.dumps(EVALUATION)))
    facts = json.loads((tmp_path / "output" / "registration.json").read_text())
    assert result.metrics == {"version": 1.0, "champion": 1.0}
    assert (facts["model"], facts["version"], facts["champion"], facts["rule"]) == (
        "stage-policy",
        "1",
        True,
        "first",
    )
    assert facts["source"] == "/s/ppo/policy"
    [version] = mlflow.versions("stage-policy")
    assert version.tags["rlhf.data.digest"] == "1" * 64
    assert version.tags["rlhf.ppo.key"] == "p" * 16
    assert version.tags["eval.win_rate.mean"] == "0.75"
    assert version.tags["eval.rules.is it _short__.ppo.mean"] == "0.5", (
        "MLflow refuses most signs in a tag's name"
    )
    assert len(version.tags) < 40, "the metrics of 1,500 data sources are not tags of the version"
    assert version.tags["rlhf.weights_sha256"] == result.attributes["weights_sha256"]
    # printf 1 | sha256sum
    assert (
        version.tags["rlhf.weights_sha256"]
        == "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"
    )
    record = Evaluation.from_json(version.tags["rlhf.evaluation"])
    assert record == Evaluation.of(EVALUATION, "ppo")
    assert (record.judge, record.judge_digest, record.verdicts.prompts) == ("gold", "synthetic-1", 128)


def test_the_stage_keeps_what_references_stood_for(tmp_path: Path, database: Path, mlflow: Mlflow) -> None:
    config = PipelineConfig.model_validate(
        {"run": {"home": str(tmp_path), "name": "based"}, "tracking": {"uri": f"sqlite:///{database}"}}
    )
    tags = {
        "rlhf.base": "registry://other-policy/3",
        "rlhf.reference.model.path": "champion:other-policy = other-policy version 3",
    }
    run = mlflow.create_run("based", {**tags, "rlhf.config": "based.yaml"})
    given = context(tmp_path, json.dumps(EVALUATION))
    assert given.lineage is not None
    register_stage.run(config, replace(given, lineage=replace(given.lineage, parent_run_id=run.run_id)))
    [version] = mlflow.versions("based-policy")
    assert tags.items() <= version.tags.items() and "rlhf.config" not in version.tags


def test_the_stage_asks_for_the_win_rate_of_its_configuration(tmp_path: Path, database: Path) -> None:
    config = PipelineConfig.model_validate(
        {
            "run": {"home": str(tmp_path), "name": "strict"},
            "tracking": {"uri": f"sqlite:///{database}"},
            "register": {"min_win_rate": 0.8},
        }
    )
    result = register_stage.run(config, context(tmp_path, json.dumps(EVALUATION)))
    assert (result.metrics["champion"], result.attributes["rule"]) == (0.0, "min_win_rate")


def test_the_stage_asks_for_an_independent_judge(tmp_path: Path, database: Path) -> None:
    config = PipelineConfig.model_validate(
        {
            "run": {"home": str(tmp_path), "name": "independent"},
            "tracking": {"uri": f"sqlite:///{database}"},
            "register": {"independent_judge": True},
        }
    )
    trained = {"ppo": OF_PPO | {"judge_trained_on": True}}
    content = EVALUATION | {"judge": "reward_model", "policies": trained}
    result = register_stage.run(config, context(tmp_path, json.dumps(content)))
    assert (result.metrics["champion"], result.attributes["rule"]) == (0.0, "judge")


def test_the_stage_refuses_an_evaluation_without_a_win_rate(tmp_path: Path) -> None:
    config = PipelineConfig.model_validate({"run": {"home": str(tmp_path)}})
    with pytest.raises((CorruptArtifact, RLHFError), match=r"evaluation\.json"):
        register_stage.run(config, context(tmp_path, "{}"))
