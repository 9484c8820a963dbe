"""The stage `register` with `register.votes`, on MLflow with SQLite.

- with a margin, a candidate waits for votes, and with votes that do not refuse it becomes champion: first
  against its SFT model, then against the champion in a match
- the same match continues its test at the same level
- a file of another page does not count, one that was changed or is no file of votes is refused
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError
from rlhf_core.evaluation.check import check_votes
from rlhf_core.evaluation.match import MatchResult
from rlhf_core.evaluation.review import Opponent, load_blind_pairs, page_digest
from rlhf_core.evaluation.statistics import Comparison, Interval
from rlhf_core.run.external_inputs import external_digests
from rlhf_core.stages import register
from rlhf_core.testing import stage_context
from rlhf_core.types import ArtifactRef, Lineage

PAIRS = 60


def sample(number: int) -> dict[str, str]:
    answers = {"sft": f"bad {number}", "champion": f"fair {number}", "ppo": f"good {number}"}
    return {"prompt_id": f"p{number}", "prompt": f"Prompt {number}", "winner": "ppo", **answers}


def played(*_: Any) -> MatchResult:
    comparison = Comparison(Interval(1.0, 0.9, 1.0), (1.0,) * PAIRS)
    samples = tuple(map(sample, range(PAIRS)))
    ids = tuple(row["prompt_id"] for row in samples)
    return MatchResult("gold", "g", ids, comparison, None, {}, samples)


def saved(folder: Path, samples: Path, opponent: Opponent, wins: int) -> str:
    """Write a file of votes with so many wins of the policy, and return its path."""
    pairs = load_blind_pairs(samples, opponent)
    votes = ["1" if pair.policy_first == (i < wins) else "2" for i, pair in enumerate(pairs)]
    content = {"format": "rlhf-review-1", "page": page_digest(pairs), "saved": 1, "votes": votes}
    file = folder / f"votes-{opponent}-{wins}.json"
    file.write_text(json.dumps(content))
    return str(file)


@pytest.fixture
def run(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[dict[str, Any], Path]]:
    """Registers a policy, and returns `registration.json` and the samples of its match."""
    monkeypatch.setattr(register, "run_match", played)

    def register_policy(policy: str, *votes: str, changed: bool = False) -> tuple[dict[str, Any], Path]:
        (tmp_path / policy / "policy").mkdir(parents=True, exist_ok=True)
        (tmp_path / policy / "policy" / "model.safetensors").write_text(policy)
        verdicts = {"wins": PAIRS, "losses": 0, "ties": 0}
        content = {
            "win_rate": {"mean": 1.0}, "verdicts": verdicts, "judge": "gold", "judge_digests": {"gold": "g"}
        }  # fmt: skip
        (tmp_path / "evaluate").mkdir(exist_ok=True)
        (tmp_path / "evaluate" / "evaluation.json").write_text(json.dumps(content))
        lines = "".join(json.dumps(sample(i)) + "\n" for i in range(PAIRS))
        (tmp_path / "evaluate" / "samples.jsonl").write_text(lines)
        tree = {
            "run": {"home": str(tmp_path), "name": hashlib.sha256(str(tmp_path).encode()).hexdigest()[:9]},
            "tracking": {"uri": f"sqlite:///{database}"},
            "register": {"votes": list(votes), "votes_margin": 0.2},
            "evaluate": {"bootstrap": 200},
        }
        config = PipelineConfig.model_validate_json(json.dumps(tree))
        refs = {
            stage: ArtifactRef(stage, "k" * 16, f"{policy}-{stage}", f"{tmp_path}/{policy}")
            for stage in ("data", "sft", "reward", "ppo", "evaluate")
        }
        sources = {name: digest for name, digest in external_digests(config).items() if "register" in name}
        assert len(sources) == len(votes)
        context = stage_context(
            tmp_path / f"stage-{policy}-{len(votes)}",
            inputs={"ppo": tmp_path / policy, "evaluate": tmp_path / "evaluate"},
            lineage=Lineage(refs),
            sources=dict.fromkeys(sources, "other") if changed else sources,
        )
        result = register.run(config, context)
        facts = json.loads((context.output / "registration.json").read_text())
        return facts | {"metrics": result.metrics}, context.output / "match_samples.jsonl"

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
    assert facts["reason"].endswith("; people may prefer the champion")
    facts, _ = run("two", liked, against_sft)
    assert facts["champion"] and facts["rule"] == "match", facts["reason"]
    assert facts["match"]["votes"]["mean"] == pytest.approx(2 / 3) and facts["votes"]["votes"] == PAIRS
    assert facts["reason"].partition("(level ")[2] == level.partition("; register.votes_margin")[0]
    assert "votes of a page" not in caplog.text
    other = json.loads(Path(liked).read_text()) | {"page": "f" * 64}
    (tmp_path / "other.json").write_text(json.dumps(other))
    facts, _ = run("three", str(tmp_path / "other.json"))
    assert (facts["champion"], facts["rule"]) == (False, "votes")
    assert "register.votes.0 has votes of a page" in caplog.text


def test_files_that_are_no_votes_or_were_changed_are_refused(run: Any, tmp_path: Path) -> None:
    run("one")
    votes = saved(tmp_path, tmp_path / "evaluate" / "samples.jsonl", "sft", 40)
    with pytest.raises(ConfigError, match=r"register\.votes\.0 was changed after the run began"):
        run("one", votes, changed=True)
    (tmp_path / "other.json").write_text("{}")
    for path, words in ((tmp_path / "other.json", "a review page saved"), (tmp_path / "missing", "missing")):
        tree = {"register": {"votes": [votes, str(path)]}}
        [finding] = check_votes(PipelineConfig.model_validate_json(json.dumps(tree)))
        assert str(finding).startswith("register.votes.1: ") and words in str(finding)
