"""The stage `evaluate` with scripted answers, and models whose outputs are known.

- both models answer the same prompts, and files, metrics and tracker agree with their scores
- the judge is the gold reward for synthetic prompts, else the reward model, else the rules; an unavailable
  judge is refused
- a prompt for which a reward source masks a failure is left out for both models and counted
- batch-normalised rules normalise both models' responses together
- both models are compared with the chosen answers of held-out pairs, by the same judge
- a regression set that failed is named in the report and in the facts of the result
- DPO's policy is a third column of all measures, and is compared with SFT model and PPO's policy
- without PPO, the numbers of DPO's policy have the same names and values, and nothing mentions PPO
- the second reward model judges without having trained the policy
- a language model is measured first; it decides wins and is named, or is refused before anything is sampled
- ranks and engines in other processes share one connection to Ray
- the same run gives the same bytes
- the record has every answer of all models with the numbers of the evaluation, also after an interrupted
  attempt; without a level nothing is recorded, and nothing else changes
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from rlhf_core.data.dataset import load_prompts, write
from rlhf_core.data.synthetic import gold_reward
from rlhf_core.errors import ConfigError, DataError, GateFailed
from rlhf_core.evaluation import plots
from rlhf_core.evaluation.statistics import length_controlled, wilson
from rlhf_core.record.reader import RECORD, read_rollouts
from rlhf_core.stages import evaluate
from rlhf_core.system.files import write_json
from rlhf_core.testing import RecordingMetrics, stage_context
from rlhf_core.testing.engines import Reply, Request, ScriptedEngine, scripted_engines
from rlhf_core.testing.ranks import RayCall, scripted_ranks
from rlhf_core.types import ArtifactRef, Lineage, PairExample, PromptExample, StageContext
from tests.support.chat_server import ChatServer, Respond, prefer_first, prefer_longer
from tests.support.evaluated_models import (
    LOGITS,
    OTHER_PROMPTS,
    PROMPTS,
    SCORES,
    TOKENIZER,
    WORDS,
    answer,
    by_token,
    log_ratio,
    tokens,
)
from tests.support.evaluation_config import RULES, config_of
from tests.support.known_models import save_last_token_scorer, save_unigram_policy


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of artifacts with the models of `LOGITS` and `SCORES`. The judge's scores are the opposite."""
    folder = tmp_path_factory.mktemp("models")
    save_unigram_policy(folder / "sft" / "model", by_token(LOGITS["model"]), len(TOKENIZER))
    for stage, name in (("ppo", "policy"), ("dpo", "dpo")):
        save_unigram_policy(folder / stage / "policy", by_token(LOGITS[name]), len(TOKENIZER))
    opposite = {word: -score for word, score in SCORES.items()}
    for stage, scores in (("reward", SCORES), ("judge", opposite)):
        save_last_token_scorer(folder / stage / "model", by_token(scores), len(TOKENIZER))
    return folder


@pytest.fixture
def context(models: Path, tmp_path: Path) -> StageContext:
    inputs = {name: tmp_path / name for name in ("data", "sft", "reward", "ppo")}
    for name in ("sft", "reward", "ppo", "dpo", "judge"):
        shutil.copytree(models / name, tmp_path / name)
    TOKENIZER.save_pretrained(inputs["data"] / "tokenizer")
    rows = [{"step": s, "objective/kl": s / 10, "objective/scores": s / 5} for s in range(1, 11)]
    (inputs["ppo"] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("prompts", "pairs", "sft"):
        for split in ("train", "eval"):
            write(inputs["data"], name, split, [])
    (inputs["data"] / "data_card.md").write_text("# Data\n\nTwo **sets**\n")
    lineage = Lineage({"sft": ArtifactRef("sft", "0" * 16, "d" * 64, "uri")})
    return stage_context(tmp_path, inputs=inputs, lineage=lineage)


@pytest.fixture
def figures_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing, which takes most of the time of an evaluation. Tests of what a page does not say draw."""
    monkeypatch.setattr(plots, "to_png", lambda _figure: b"")
    monkeypatch.setattr(plots, "to_image", lambda _figure: plots.Image(1.0, 1.0, "", ()))


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    """Engines that give the answers of `answer`."""

    def respond(request: Request) -> Reply:
        model = "dpo" if request.model.parent.name == "dpo" else request.model.name
        return Reply(tokens(answer(model, request.prompt.prompt)), finished=model == "policy")

    with scripted_engines(respond) as started:
        yield started


@pytest.fixture
def scripted(engines: list[ScriptedEngine], context: StageContext) -> Callable[[list[str]], None]:
    """A function that sets the prompts. At first they are `PROMPTS`."""

    def use(texts: list[str], sources: Sequence[str] = ("a.jsonl",)) -> None:
        chosen = [sources[i % len(sources)] for i in range(len(texts))]
        examples = [PromptExample(f"p{i}", text, (1, 2), {}, chosen[i]) for i, text in enumerate(texts)]
        write(context.inputs["data"], "prompts", "eval", examples)

    use(PROMPTS)
    return use


def read(context: StageContext) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((context.output / "evaluation.json").read_text())
    return document


def table(numbers: dict[str, Any], policy: str = "ppo") -> dict[str, Any]:
    found: dict[str, Any] = numbers["policies"][policy]
    return found


def test_files_metrics_and_tracker_agree_with_the_scores(scripted: Any, context: StageContext) -> None:
    result = evaluate.run(config_of(), context)
    found = read(context)
    gold = [gold_reward(p, answer("policy", p), True) for p in PROMPTS[:6]]
    assert found["gold_reward"]["ppo"]["mean"] == pytest.approx(sum(gold) / 6)
    # All six won: Wilson's interval, 1 / (1 + 1.96^2 / 6)
    own = table(found)
    assert own["win_rate"] == {"mean": 1.0, "low": pytest.approx(0.6097, abs=1e-4), "high": 1.0}
    assert own["verdicts"] == {"wins": 6, "losses": 0, "ties": 0} and own["judge_trained_on"] is False
    assert (found["judge"], found["inconsistent"], found["prompts"]) == ("gold", 0.0, 6)
    assert own["kl"]["mean"] == pytest.approx(fmean(log_ratio("policy", p) for p in PROMPTS[:6]), rel=1e-4)
    assert found["eos_rate"] == {"sft": 0.0, "ppo": 1.0} and own["eos_rate_difference"]["low"] == 1.0
    assert found["over_chosen"] is None  # there are no pairs
    assert found["lengths"]["sft"]["mean"] == 5.0
    assert set(found["rules"]) == {"length", "well_formed"}
    assert result.metrics["gold_reward/ppo/mean"] == found["gold_reward"]["ppo"]["mean"]
    assert result.metrics["win_rate/high"] == 1.0 and result.metrics["length/sft"] == 5.0
    tracker = context.metrics
    assert isinstance(tracker, RecordingMetrics)
    assert tracker.rows == [(0, {f"eval/{name}": value for name, value in result.metrics.items()})]
    assert tracker.flushes == 1 and tracker.files == ["report.html"]
    assert {f"{name}.png" for name in tracker.figures} == {
        p.name for p in (context.output / "figures").iterdir()
    }
    rows = [json.loads(line) for line in (context.output / "samples.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS[:4]
    assert {row["winner"] for row in rows} == {"ppo"}
    assert rows[0]["scores"]["sft"]["rule/length"] == 0.25  # 1 - |5 - 20| / 20
    assert [shown.prompt for shown in tracker.answers] == PROMPTS[:6]
    first = tracker.answers[0]
    assert list(first.answers) == ["PPO", "SFT"] and first.answers["PPO"] == answer("policy", PROMPTS[0])
    assert (first.judge, first.assessments["winner"]) == ("gold", "PPO")
    assert first.assessments["gold"] == gold[0]
    change = gold[0] - rows[0]["scores"]["sft"]["gold"]
    assert first.assessments["change"] == pytest.approx(change) and change > 0
    document = (context.output / "report.html").read_text()
    assert "d" * 64 in document and "<strong>sets</strong>" in document


@pytest.mark.usefixtures("figures_are_left_out")
def test_both_models_are_compared_with_chosen_answers(scripted: Any, context: StageContext) -> None:
    """The pair's prompts are a held-out one and one that only the pair has."""
    evaluate.run(config_of(), context)
    before = read(context)
    chosen = [tokens("The small fox sleeps in the garden."), tokens("It is rotten and dull.")]
    pairs = [
        PairExample(name, prompt, (1, 2), ids, (0,), "a")
        for name, prompt, ids in zip(("p0", "q"), (PROMPTS[0], PROMPTS[7]), chosen, strict=True)
    ]
    write(context.inputs["data"], "pairs", "eval", pairs)
    for file in (context.output / "figures").iterdir():
        file.unlink()
    (context.output / "figures").rmdir()
    result = evaluate.run(config_of(), context)
    found = read(context)
    scores = [gold_reward(PROMPTS[0], "The small fox sleeps in the garden.", True)]
    scores.append(gold_reward(PROMPTS[7], "It is rotten and dull.", True))
    expected = [gold_reward(p, answer("policy", p), True) for p in (PROMPTS[0], PROMPTS[7])]
    assert all(policy > own for policy, own in zip(expected, scores, strict=True))
    assert found["over_chosen"]["win_rate"]["ppo"]["mean"] == 1.0
    assert result.metrics["win_rate_over_chosen/ppo/mean"] == 1.0
    assert found["over_chosen"]["win_rate"]["sft"]["mean"] < 1.0
    assert {name: value for name, value in found.items() if name != "over_chosen"} == {
        name: value for name, value in before.items() if name != "over_chosen"
    }
    assert "Win rate over the data&#39;s answers" in (context.output / "report.html").read_text()


@pytest.mark.parametrize(("pattern", "fell"), [(".*dull[.]", True), (".*voice[.]", False)])
@pytest.mark.usefixtures("figures_are_left_out")
def test_regression_sets_are_in_report_metrics_and_facts(
    pattern: str, fell: bool, scripted: Any, context: StageContext, tmp_path: Path
) -> None:
    """The SFT model says that all is dull, and the policy ends with a voice."""
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    item = {"name": "words", "path": str(file), "reward": {"type": "format", "pattern": pattern}}
    result = evaluate.run(config_of(evaluate={"prompts": 6, "bootstrap": 200, "regression": [item]}), context)
    found = read(context)["regression"]["words"]
    assert found["difference"]["ppo"]["mean"] == result.metrics["regression/words/difference/mean"]
    assert found["difference"]["ppo"]["mean"] == (-1.0 if fell else 1.0) and found["prompts"] == len(PROMPTS)
    page = (context.output / "report.html").read_text()
    assert ("because regression sets failed: words" in page) == fell
    assert result.attributes.get("fallen", "").startswith("words -1.000") == fell
    assert (context.output / "regression" / "words" / "prompts_eval.parquet").is_file()


@pytest.mark.usefixtures("figures_are_left_out")
def test_related_prompts_and_several_answers_count_once(
    scripted: Any, context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluated(**settings: Any) -> dict[str, Any]:
        shutil.rmtree(context.output)
        context.output.mkdir()
        evaluate.run(config_of(**settings), context)
        return read(context)

    alone = evaluated()
    twice = evaluated(evaluate={"prompts": 6, "bootstrap": 200, "samples": 4, "answers_per_prompt": 2})
    # The scripted engines give the same answer again.
    for name in ("win_rate", "verdicts"):
        assert table(twice)[name] == table(alone)[name], name
    assert twice["prompts"] == alone["prompts"]
    assert twice["answers_per_prompt"] == 2 and "answers_per_prompt" not in alone
    assert twice["gold_reward"]["ppo"]["mean"] == pytest.approx(alone["gold_reward"]["ppo"]["mean"])
    rows = [json.loads(line) for line in (context.output / "samples.jsonl").read_text().splitlines()]
    assert len({row["prompt_id"] for row in rows}) == len(rows) == 4
    page = (context.output / "report.html").read_text()
    assert "6 held-out prompts, the same" in page and "2 responses each" in " ".join(page.split())

    def grouped(*arguments: Any) -> list[PromptExample]:
        prompts = load_prompts(*arguments)
        return [replace(prompt, group=f"group {i // 2}") for i, prompt in enumerate(prompts)]

    monkeypatch.setattr(evaluate, "load_prompts", grouped)
    found = evaluated()
    assert table(found)["verdicts"] == {"wins": 3, "losses": 0, "ties": 0} and found["prompts"] == 6
    assert table(found)["win_rate"] == wilson(1.0, 3, 0.95).to_json()
    assert "3 groups of 6 held-out prompts" in (context.output / "report.html").read_text()


@pytest.mark.usefixtures("figures_are_left_out")
def test_the_record_has_every_answer_with_the_numbers_of_the_evaluation(
    scripted: Any, engines: list[ScriptedEngine], context: StageContext, tmp_path: Path
) -> None:
    """A reward has no value for the second prompt if the answer ended, as those of PPO's policy do."""
    scripted(PROMPTS, ("a.jsonl", "b.jsonl"))
    (tmp_path / "r.py").write_text(
        "def f(samples):\n    return [float('nan') if s.prompt_id == 'p1' and s.finished else 1.0 for s in"
        " samples]\n"
    )
    masked = {"type": "python", "function": "r:f", "file": str(tmp_path / "r.py"), "retries": 0}
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:2]))
    item = {"name": "words", "path": str(file), "reward": {"type": "format", "pattern": ".*dull[.]"}}
    three = replace(context, inputs={**context.inputs, "dpo": tmp_path / "dpo"})
    settings = {"prompts": 4, "samples": 4, "bootstrap": 200, "answers_per_prompt": 2, "regression": [item]}
    evaluate.run(
        config_of(
            [masked | {"on_error": "mask", "name": "own"}, *RULES], evaluate=settings, dpo={"enabled": True}
        ),
        three,
    )
    found, rows = read(three), read_rollouts(three.output).to_pylist()
    assert {(row["kind"], row["step"]) for row in rows} == {("evaluation", 0)}
    assert [row["index"] for row in rows] == list(range(3 * 2 * (4 + 2)))
    names = {"sft": "model", "ppo": "policy", "dpo": "dpo"}
    requests = {request.prompt.prompt_id: request for engine in engines for request in engine.requests}
    for row in rows:
        request = requests[row["prompt_id"]]
        assert row["response_ids"] == list(tokens(answer(names[row["model"]], request.prompt.prompt)))
        assert (row["seed"], row["prompt_ids"]) == (request.seed, list(request.prompt.input_ids))
        assert row["finished"] == (row["model"] == "ppo")
    held_out = [row for row in rows if row["prompt_set"] == "held-out"]
    assert [row["prompt_id"] for row in held_out] == [f"p{i}" for i in range(4)] * 6
    assert [row["source"] for row in held_out] == ["a.jsonl", "b.jsonl"] * 12
    assert [row["group"] for row in held_out] == [0, 1, 2, 3] * 6
    for row in held_out:
        request, unscored = requests[row["prompt_id"]], row["prompt_id"] == "p1"
        text = answer(names[row["model"]], request.prompt.prompt)
        gold = gold_reward(request.prompt.prompt, text, row["finished"])
        assert row["reward/gold"] == gold and row["score"] == pytest.approx(gold)
        assert math.isnan(row["reward/own"]) == (unscored and row["model"] == "ppo")
        over_sft, over_dpo = (row[f"preference/{model}"] for model in ("sft", "dpo"))
        assert over_sft == (None if unscored or row["model"] == "sft" else 1.0)
        assert over_dpo == (1.0 if row["model"] == "ppo" and not unscored else None)
    for policy in ("ppo", "dpo"):
        of_policy = [row["kl"] for row in held_out if row["model"] == policy and row["prompt_id"] != "p1"]
        assert fmean(of_policy) == pytest.approx(table(found, policy)["kl"]["mean"])
    for model, mean in (("sft", 1.0), ("ppo", 0.0), ("dpo", found["regression"]["words"]["dpo"]["mean"])):
        scores = [row["score"] for row in rows if row["prompt_set"] == "words" and row["model"] == model]
        assert scores == [mean] * 4
    samples = [json.loads(line) for line in (three.output / "samples.jsonl").read_text().splitlines()]
    assert [sample["prompt_id"] for sample in samples] == ["p0", "p2", "p3", "p0"]
    for sample in samples:
        for model, scores in sample["scores"].items():
            row = next(
                row for row in held_out if (row["model"], row["prompt_id"]) == (model, sample["prompt_id"])
            )
            for name, value in scores.items():
                assert row[f"reward/{name.removeprefix('rule/')}"] == value


def test_an_interrupted_attempt_does_not_change_the_record(
    scripted: Any, context: StageContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def killed(name: str) -> None:
        if name == "evaluate.measured":
            raise KeyboardInterrupt

    def attempt(name: str, **record: Any) -> Path:
        """Evaluate in the scratch folder of the attempt before. Return the output."""
        (tmp_path / name).mkdir()
        evaluate.run(config_of(record=record), replace(context, output=tmp_path / name))
        return tmp_path / name

    expected = read_rollouts(attempt("undisturbed"))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(evaluate, "failpoint", killed)
        attempt("killed")
    assert not (tmp_path / "killed" / RECORD).exists()
    assert read_rollouts(attempt("continued")).equals(expected) and expected.num_rows == 12
    without = attempt("without", level="none")
    assert not (without / RECORD).exists()
    for file in ("evaluation.json", "samples.jsonl", "report.html"):
        other = (tmp_path / "continued" / file).read_bytes()
        assert (without / file).read_bytes() == other, file


@pytest.mark.usefixtures("figures_are_left_out")
def test_each_measure_is_reported_by_source(scripted: Any, context: StageContext) -> None:
    scripted(PROMPTS, ("a.jsonl", "org/b"))
    result = evaluate.run(config_of(), context)
    sources = read(context)["by_source"]
    assert {name: numbers["prompts"] for name, numbers in sources.items()} == {"a.jsonl": 3, "org/b": 3}
    for first, numbers in zip((0, 1), sources.values(), strict=True):
        gold = [gold_reward(p, answer("policy", p), True) for p in PROMPTS[first:6:2]]
        assert numbers["gold_reward"]["ppo"]["mean"] == pytest.approx(sum(gold) / 3)
        ratios = [log_ratio("policy", p) for p in PROMPTS[first:6:2]]
        assert table(numbers)["kl"]["mean"] == pytest.approx(sum(ratios) / 3, rel=1e-4)
        assert table(numbers)["win_rate"]["mean"] == 1.0
        assert set(numbers["rules"]) == {"length", "well_formed"}
    assert result.metrics["by_source/org/b/kl"] == table(sources["org/b"])["kl"]["mean"]
    assert result.metrics["by_source/a.jsonl/prompts"] == 3


@pytest.mark.parametrize("known", [0, 2])
@pytest.mark.usefixtures("figures_are_left_out")
def test_failures_of_a_source_with_weight_0_exclude_no_prompt(
    scripted: Any, context: StageContext, tmp_path: Path, known: int
) -> None:
    """It has values for the first `known` prompts, or for none."""
    file = tmp_path / "watched.py"
    file.write_text(
        f"def f(samples):\n    return [float(s.prompt in {PROMPTS[:known]!r}) if s.prompt in"
        f" {PROMPTS[:known]!r} else float('nan') for s in samples]\n"
    )
    watched = {"type": "python", "function": "watched:f", "file": str(file), "weight": 0, "retries": 0}
    evaluate.run(config_of([*RULES, watched | {"name": "watched"}]), context)
    found = read(context)
    assert found["prompts"] == 6 and found["unscored"] == 0 and table(found)["verdicts"]["wins"] == 6
    assert set(found["rules"]) == {"length", "well_formed"} | ({"watched"} if known else set())
    if known:
        assert found["rules"]["watched"]["ppo"]["mean"] == 1.0
    rows = [json.loads(line) for line in (context.output / "samples.jsonl").read_text().splitlines()]
    assert ["rule/watched" in row["scores"]["ppo"] for row in rows] == [i < known for i in range(4)]


@pytest.mark.usefixtures("figures_are_left_out")
def test_exchanged_prompts_lower_the_gold_reward(scripted: Any, context: StageContext) -> None:
    result = evaluate.run(config_of([{"type": "model"}, {"type": "gold", "weight": 0}]), context)
    found = read(context)
    own, exchanged = found["gold_reward"], found["gold_reward_exchanged"]
    assert exchanged["ppo"]["mean"] < own["ppo"]["mean"] - 0.3
    assert exchanged["sft"]["mean"] == own["sft"]["mean"]  # its answer is always the same
    assert result.metrics["gold_reward_exchanged/ppo/mean"] == exchanged["ppo"]["mean"]
    assert "exchanged prompts" in (context.output / "report.html").read_text()
    # A gold reward that is only watched is no rule: gold is measured anyway.
    assert found["rules"] == {}


@pytest.mark.usefixtures("figures_are_left_out")
def test_batch_normalised_rules_use_one_batch_for_both_models(scripted: Any, context: StageContext) -> None:
    evaluate.run(
        config_of([{"type": "well_formed", "normalize": "batch"}], evaluate={"prompts": 4, "judge": "rules"}),
        context,
    )
    row = json.loads((context.output / "samples.jsonl").read_text().splitlines()[0])
    # well-formed: 0.75 for the SFT model (never ended), 1 for the policy; as one batch -1 and +1
    assert row["scores"]["sft"]["rules"] == pytest.approx(-1.0, abs=1e-6)
    assert row["scores"]["ppo"]["rules"] == pytest.approx(1.0, abs=1e-6)
    assert table(read(context))["win_rate"]["mean"] == 1.0


@pytest.mark.usefixtures("figures_are_left_out")
def test_masked_prompts_are_left_out_for_both_models(
    scripted: Any, context: StageContext, tmp_path: Path
) -> None:
    code = (
        "def f(samples):\n    return [float('nan') if s.prompt_id == 'p2' and s.finished else 1.0 for s in"
        " samples]\n"
    )
    (tmp_path / "r.py").write_text(code)
    reward = {
        "type": "python",
        "function": "r:f",
        "file": str(tmp_path / "r.py"),
        "retries": 0,
        "on_error": "mask",
    }
    result = evaluate.run(config_of([reward, *RULES]), context)
    found = read(context)
    assert (found["prompts"], found["unscored"], result.metrics["unscored"]) == (5, 1, 1)
    ratios = [log_ratio("policy", PROMPTS[i]) for i in (0, 1, 3, 4, 5)]
    assert table(found)["kl"]["mean"] == pytest.approx(sum(ratios) / 5, rel=1e-4)
    rows = [json.loads(line) for line in (context.output / "samples.jsonl").read_text().splitlines()]
    assert [row["prompt_id"] for row in rows] == ["p0", "p1", "p3", "p4"]


@pytest.mark.usefixtures("figures_are_left_out")
def test_reward_model_decides_without_a_gold_reward(scripted: Any, context: StageContext) -> None:
    scripted(OTHER_PROMPTS)
    evaluate.run(config_of(), context)
    found = read(context)
    assert found["judge"] == "reward_model" and found["gold_reward"] is None
    means = {model: found["reward_model"][model]["mean"] for model in ("sft", "ppo")}
    assert means == pytest.approx({"sft": SCORES["dull."], "ppo": SCORES["voice."]}, rel=1e-4)


@pytest.mark.usefixtures("figures_are_left_out")
def test_rules_decide_without_a_reward_model(scripted: Any, context: StageContext) -> None:
    scripted(OTHER_PROMPTS)
    without = replace(context, inputs={k: v for k, v in context.inputs.items() if k != "reward"})
    evaluate.run(config_of(reward={"enabled": False}), without)
    found = read(context)
    assert found["judge"] == "rules" and found["reward_model"] is None


@pytest.mark.parametrize(
    ("judge", "sections", "use"),
    [
        ("gold", {}, "use auto or reward_model or rules"),
        ("reward_model", {"reward": {"enabled": False}}, "use auto or rules"),
    ],
)
def test_unavailable_judge_is_refused(
    scripted: Any, context: StageContext, judge: str, sections: dict[str, Any], use: str
) -> None:
    scripted(["How are you?"])
    with pytest.raises(ConfigError, match=f"evaluate.judge .* got {judge}; {use}"):
        evaluate.run(config_of(evaluate={"judge": judge}, **sections), context)


def test_missing_held_out_prompts_are_an_error(scripted: Any, context: StageContext) -> None:
    scripted([])
    with pytest.raises(DataError, match="needs held-out prompts; got 0"):
        evaluate.run(config_of(), context)


@pytest.mark.parametrize(
    ("ranks", "number", "changes_classes"),
    [(1, 1, False), (2, 1, False), (1, 2, False), (1, 1, True)],
)
@pytest.mark.usefixtures("figures_are_left_out")
def test_ranks_and_engines_share_one_connection_to_ray(
    ranks: int,
    number: int,
    changes_classes: bool,
    scripted: Any,
    context: StageContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same engines sample both policies. Ranks load the reward model and both models for the KL."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if changes_classes:
        for folder in (context.inputs["sft"] / "model", context.inputs["ppo"] / "policy"):
            shutil.rmtree(folder)
            save_unigram_policy(folder, {}, len(TOKENIZER), "SmolLM3")
    settings = {"prompts": 6, "bootstrap": 200, "ranks": ranks, "engines": number}
    with scripted_ranks() as calls:
        evaluate.run(config_of(evaluate=settings), context)
    work = [RayCall("engine", number)] if number > 1 or changes_classes else []
    work += [RayCall("training rank", ranks)] * 3 if ranks > 1 else []
    assert calls == ([RayCall("connect", max(ranks, number)), *work, RayCall("disconnect")] if work else [])
    assert table(read(context))["win_rate"]["mean"] == 1.0


def test_same_run_gives_the_same_bytes(scripted: Any, context: StageContext, tmp_path: Path) -> None:
    again = stage_context(tmp_path / "again", inputs=context.inputs, lineage=context.lineage)
    for each in (context, again):
        evaluate.run(config_of(), each)
    names = sorted(str(p.relative_to(context.output)) for p in context.output.rglob("*") if p.is_file())
    assert "report.html" in names
    for name in names:
        assert (context.output / name).read_bytes() == (again.output / name).read_bytes(), name


@pytest.mark.parametrize("gold", [True, False])
def test_caption_mentions_overoptimisation_only_with_a_gold_reward(
    gold: bool, scripted: Any, context: StageContext
) -> None:
    rows = [{"step": s, "objective/kl": s / 10, "objective/scores": s / 5} for s in range(1, 11)]
    if gold:
        rows = [row | {"rewards/gold/mean": 1.0 - row["step"] / 20} for row in rows]
    (context.inputs["ppo"] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate.run(config_of(), context)
    document = (context.output / "report.html").read_text()
    assert ("Over-optimisation is where the true reward bends down" in document) == gold
    assert ("so this curve cannot show it" in document) != gold
    assert "this run does not know" not in document, "the task has a true reward"


@pytest.mark.usefixtures("figures_are_left_out")
def test_the_second_reward_model_judges(scripted: Any, context: StageContext, tmp_path: Path) -> None:
    """It prefers what the reward model does not."""
    assert context.lineage is not None
    inputs = {**context.lineage.inputs, "judge": ArtifactRef("judge", "1" * 16, "e" * 64, "uri")}
    judged = replace(
        context,
        inputs={**context.inputs, "judge": tmp_path / "judge"},
        lineage=replace(context.lineage, inputs=inputs),
    )
    config = config_of(
        [{"type": "model"}],
        reward={"judge": {}},
        evaluate={"prompts": 6, "bootstrap": 200, "judge": "judge_model"},
    )
    result = evaluate.run(config, judged)
    found = read(judged)
    assert (found["judge"], table(found)["judge_trained_on"]) == ("judge_model", False)
    assert found["judge_digests"]["judge_model"] == "e" * 64
    assert table(found)["win_rate"]["mean"] == 0.0
    assert found["reward_model"]["ppo"]["mean"] == pytest.approx(SCORES["voice."], rel=1e-4)
    assert found["judge_model"]["ppo"]["mean"] == pytest.approx(-SCORES["voice."], rel=1e-4)
    assert result.metrics["judge_model/ppo/mean"] == found["judge_model"]["ppo"]["mean"]
    page = (judged.output / "report.html").read_text()
    assert "a second reward model, trained with other pairs" in page and "Second reward model" in page


@pytest.mark.parametrize("respond", [prefer_longer, prefer_first])
@pytest.mark.usefixtures("figures_are_left_out")
def test_a_language_model_is_measured_first_and_then_decides(
    scripted: Any, engines: list[ScriptedEngine], context: StageContext, tmp_path: Path, respond: Respond
) -> None:
    pairs = [
        PairExample(f"p{i}", "Tell", (1,), tokens(words), tokens(words)[2:]) for i, words in enumerate(WORDS)
    ]
    write(context.inputs["data"], "pairs", "eval", pairs)
    write_json(context.inputs["data"] / "data_card.json", {"sources": []})
    with ChatServer(respond) as server:
        judge = {"url": server.url, "model": "big-judge"}
        config = config_of(
            run={"device": "cpu", "home": str(tmp_path)},
            evaluate={"prompts": 6, "bootstrap": 200, "samples": 4, "language_model": judge},
        )
        if respond is prefer_first:
            with pytest.raises(GateFailed, match=r"big-judge agrees with 0\.500 .*min_agreement"):
                evaluate.run(config, context)
            assert not engines, "nothing was sampled"
            return
        result = evaluate.run(config, context)
    found = read(context)
    assert (found["judge"], table(found)["judge_trained_on"], found["inconsistent"]) == (
        "language_model",
        False,
        0.0,
    )
    assert result.attributes["judge"] == "language model big-judge"
    assert table(found)["verdicts"] == {"wins": 6, "losses": 0, "ties": 0}
    model = found["language_model"]
    assert (model["agreement"]["mean"], model["pairs"], model["first"]) == (1.0, 20, 0.5)
    # Two for each of 20 pairs and 6 prompts, and for each model's answer and the chosen one to these prompts.
    assert (model["requests"], model["prompt_tokens"]) == (40 + 12 + 24, 760)
    assert found["over_chosen"]["win_rate"]["ppo"]["mean"] == 1.0
    assert set(found["judge_digests"]) == {"gold", "rules", "language_model"}
    assert result.metrics["language_model/agreement/mean"] == 1.0
    assert result.metrics["language_model/seconds"] > 0 and "seconds" not in model
    document = (context.output / "report.html").read_text()
    assert "the language model big-judge" in document and "preferred in both orders" in document


@pytest.mark.usefixtures("figures_are_left_out")
def test_the_policy_of_dpo_is_a_third_column(scripted: Any, context: StageContext, tmp_path: Path) -> None:
    scripted(PROMPTS, ("a.jsonl", "b.jsonl"))
    three = replace(context, inputs={**context.inputs, "dpo": tmp_path / "dpo"})
    result = evaluate.run(config_of(dpo={"enabled": True}), three)
    found = read(three)
    gold = {
        model: [gold_reward(p, answer(model, p), model == "policy") for p in PROMPTS[:6]]
        for model in ("model", "policy", "dpo")
    }
    means = {model: sum(values) / 6 for model, values in gold.items()}
    assert means["model"] < means["dpo"] < means["policy"]
    assert found["gold_reward"]["dpo"]["mean"] == pytest.approx(means["dpo"])
    assert found["gold_reward"]["ppo_minus_dpo"]["mean"] == pytest.approx(means["policy"] - means["dpo"])
    own = table(found, "dpo")
    assert found["win_rate_ppo_over_dpo"]["mean"] == own["win_rate"]["mean"] == 1.0
    over_sft = {"win_rate_dpo_length_controlled": own["win_rate_length_controlled"]}
    for name, ours, theirs in (("win_rate_dpo", "dpo", "model"), ("win_rate_ppo_over_dpo", "policy", "dpo")):
        longer_by = [len(tokens(answer(ours, p))) - len(tokens(answer(theirs, p))) for p in PROMPTS[:6]]
        expected = length_controlled([1.0] * 6, longer_by, 0.95).to_json()
        controlled = f"{name}_length_controlled"
        assert (found | over_sft)[controlled] == pytest.approx(expected)
        assert result.metrics[f"{name}_length_controlled/mean"] == pytest.approx(expected["mean"])
    kl = {model: fmean(log_ratio(model, p) for p in PROMPTS[:6]) for model in ("policy", "dpo")}
    assert table(found)["kl"]["mean"] == pytest.approx(kl["policy"], rel=1e-4)
    assert own["kl"]["mean"] == pytest.approx(kl["dpo"], rel=1e-4)
    assert found["eos_rate"] == {"sft": 0.0, "ppo": 1.0, "dpo": 0.0}
    assert found["lengths"]["dpo"]["mean"] == result.metrics["length/dpo"]
    assert set(found["distinct"]) == {"sft", "ppo", "dpo"} and "dpo" in found["rules"]["length"]
    assert result.metrics["win_rate_ppo_over_dpo/low"] == found["win_rate_ppo_over_dpo"]["low"]
    assert (
        result.metrics["kl_dpo"] == own["kl"]["mean"]
        and result.metrics["gold_reward/dpo/mean"] < means["policy"]
    )
    row = json.loads((three.output / "samples.jsonl").read_text().splitlines()[0])
    assert row["dpo"] == answer("dpo", PROMPTS[0]) and set(row["scores"]) == {"sft", "ppo", "dpo"}
    assert (row["winner"], row["winner_dpo"]) == ("ppo", "dpo")
    assert own["verdicts"] == {"wins": 6, "losses": 0, "ties": 0} and own["judge_trained_on"] is False
    difference = found["gold_reward"]["difference"]["dpo"]
    assert difference["mean"] == pytest.approx(means["dpo"] - means["model"])
    assert result.metrics["gold_reward/difference_dpo/mean"] == difference["mean"]
    assert set(found["by_source"]["a.jsonl"]["policies"]) == {"ppo", "dpo"}
    page = (three.output / "report.html").read_text()
    assert "Win rate of PPO over DPO" in page and "PPO minus DPO" in page and row["dpo"] in page


def test_the_numbers_of_dpo_are_the_same_without_ppo(
    scripted: Any, context: StageContext, tmp_path: Path
) -> None:
    scripted(PROMPTS, ("a.jsonl", "b.jsonl"))
    write(context.inputs["data"], "pairs", "eval", [PairExample("p0", PROMPTS[0], (1, 2), (4, 5), (0,), "a")])
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    item = {"name": "words", "path": str(file), "reward": {"type": "format", "pattern": ".*dull[.]"}}
    rewards = RULES[:1]  # the other one depends on all responses of the batch
    settings: dict[str, Any] = {
        "dpo": {"enabled": True},
        "evaluate": {"prompts": 6, "bootstrap": 200, "samples": 4, "regression": [item]},
    }
    three = replace(context, inputs={**context.inputs, "dpo": tmp_path / "dpo"})
    both = evaluate.run(config_of(rewards, **settings), three)
    expected = read(three)
    inputs = {name: folder for name, folder in three.inputs.items() if name != "ppo"}
    alone = replace(context, inputs=inputs, output=tmp_path / "alone", metrics=RecordingMetrics())
    alone.output.mkdir()
    off: dict[str, Any] = {"ppo": {"enabled": False, "rewards": rewards}, "register": {"policy": "dpo"}}
    result = evaluate.run(config_of(**settings, **off), alone)
    found = read(alone)
    own = set(result.metrics)
    assert result.metrics.items() <= both.metrics.items()
    assert {"win_rate_dpo/mean", "win_rate_dpo_length_controlled/mean", "kl_dpo", "eos_rate/dpo"} <= own
    assert {"win_rate_over_chosen/dpo/mean", "regression/words/difference_dpo/mean"} <= own
    assert result.metrics["by_source/a.jsonl/win_rate_dpo/mean"] == 1.0
    assert found["policies"] == {"dpo": table(expected, "dpo")}
    assert found["gold_reward"]["dpo"] == expected["gold_reward"]["dpo"]
    assert result.attributes["fallen_dpo"] == both.attributes["fallen_dpo"]
    assert result.attributes["judge_trained_on_dpo"] is False and "fallen" not in result.attributes
    files = {name: (alone.output / name).read_text() for name in ("evaluation.json", "samples.jsonl")}
    assert not any(
        "ppo" in text for text in (*files.values(), json.dumps([result.metrics, result.attributes]))
    )
    assert json.loads(files["samples.jsonl"].splitlines()[0])["winner_dpo"] == "dpo"
    page = (alone.output / "report.html").read_text().split("<h2>Lineage")[0]
    page = re.sub(r"<style>.*</style>|base64,[^\"]*", "", page, flags=re.DOTALL)
    assert "The DPO policy beats the SFT model" in page and "DPO wins 4, ties 0" in page
    assert "It is not promoted, because regression sets failed: words" in page and "PPO" not in page


def test_a_language_model_among_the_rewards_is_measured_without_ppo(
    scripted: Any, context: StageContext, tmp_path: Path
) -> None:
    pairs = [
        PairExample(f"q{i}", f"Question {i}?", (1, 2), tokens("good good 1"), tokens("good"), "a")
        for i in range(9)
    ]
    write(context.inputs["data"], "pairs", "eval", pairs)
    write_json(context.inputs["data"] / "data_card.json", {"sources": []})
    inputs = {**context.inputs, "dpo": tmp_path / "dpo"}
    del inputs["ppo"]
    with ChatServer(lambda question: "3" if "good 1" in question else "9") as server:
        grader = {"type": "language_model", "url": server.url, "model": "m"}
        config = config_of(
            run={"device": "cpu", "home": str(tmp_path / "home")},
            ppo={"enabled": False, "rewards": [grader]}, dpo={"enabled": True}, register={"policy": "dpo"},
        )  # fmt: skip
        with pytest.raises(GateFailed, match=r"evaluate: reward language_model \(m\) agrees with 0.000"):
            evaluate.run(config, replace(context, inputs=inputs))


def test_without_dpo_nothing_mentions_it(scripted: Any, context: StageContext) -> None:
    result = evaluate.run(config_of(), context)
    assert not any("dpo" in name for name in result.metrics)
    assert "dpo" not in (context.output / "evaluation.json").read_text()
    page = (context.output / "report.html").read_text()
    assert not any(text in page for text in (" DPO", ">DPO", "PPO minus"))
