"""Several rounds of the pipeline: each one trains with the answers of the policies of earlier rounds.

    round 1   the configuration, with the stage `sample`
    round k   data.sft         + best.jsonl of the stage `sample` of each earlier round
              data.preference  + pairs.jsonl of the stage `sample` of each earlier round

Both have the mark `labelled_by`, so that the pairs do not train the second reward model. With
`sample.judge: people` the rows are those of votes, and have no mark:

    round k ends -> page of the stage `sample` -> votes -> `rlhf review` -> preference rows -> round k + 1

Nothing waits: the command ends after round k, and goes on when it is started again and finds the rows.

Each round is one run of the pipeline with a key of its own, so finished rounds are reused and an interrupted
one is continued. Held-out prompts are the same in all rounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.evaluate import SampleConfig
from rlhf_core.config.load import config_from_tree, load_config
from rlhf_core.errors import GateFailed, InputError, VotesNeeded, checking
from rlhf_core.evaluation.measures import MEASURES, titles_of
from rlhf_core.ops.api import run_file, run_pipeline
from rlhf_core.ops.review import open_review, votes_command
from rlhf_core.pipeline import END_OF_ROUND, EndOfRound
from rlhf_core.run.checks import CheckedConfig, load_and_check, remember_check
from rlhf_core.run.references import resolve_kept

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Rounds:
    """What became of the rounds."""

    summaries: list[dict[str, Any]]
    """Summaries of the finished rounds."""
    votes_needed: str | None = None
    """What people must do before the next round; None if all rounds are finished."""


def run_rounds(
    config: PipelineConfig,
    rounds: int,
    *,
    tags: Mapping[str, str] | None = None,
    until: EndOfRound = END_OF_ROUND,
    run: Callable[..., dict[str, Any]] = run_pipeline,
) -> list[dict[str, Any]]:
    """Run the pipeline several times and return the summary of each round.

    Args:
        config: The configuration of the first round.
        rounds: Number of rounds.
        tags: Tags of the MLflow runs.
        until: The last stage of each round.
        run: Runs a round and returns its summary, as `run_pipeline` does.

    Raises:
        GateFailed: The policy of a round gave nothing for the next one.
        VotesNeeded: People have not voted on the samples of a round (`sample.judge: people`). The same call
            continues when they have.
        InputError, RLHFError: See `run_pipeline`.
    """
    check_rounds(rounds)
    # Each round is the first configuration with further overrides, so that no round inherits from another
    # one.
    tree = config.model_dump(mode="json", by_alias=True)

    def run_round(overrides: Sequence[str]) -> dict[str, Any]:
        return run(config_from_tree(tree, "the configuration", overrides), tags=tags, until=until)

    done = each_round(config, rounds, run_round)
    if done.votes_needed is not None:
        raise VotesNeeded(done.votes_needed)
    return done.summaries


def run_rounds_of_file(
    config: str, number: int, overrides: Sequence[str], until: EndOfRound = END_OF_ROUND
) -> Rounds:
    """Run the rounds of a configuration file as the flow `rlhf-rounds` does.

    Args:
        config: YAML file.
        number: Number of rounds.
        overrides: Fields to override in all rounds.
        until: Last stage of each round.

    Raises the errors of `run_rounds`, except VotesNeeded.
    """

    def run_round(own: Sequence[str]) -> dict[str, Any]:
        return run_file(config, (*overrides, *own), until=until)

    return each_round(load_config(config, overrides), number, run_round)


def each_round(
    config: PipelineConfig, number: int, run_round: Callable[[Sequence[str]], dict[str, Any]]
) -> Rounds:
    """Call `run_round` with the overrides of each round, until votes of people are needed.

    Args:
        config: The configuration of the first round.
        number: Number of rounds.
        run_round: Runs a round and returns its summary.
    """
    summaries: list[dict[str, Any]] = []
    # Versions of references by their numbers: a policy of an earlier round can become the champion that
    # `model.path` refers to. They are the same for rounds that were interrupted and are continued.
    resolved, kept = resolve_kept(config, "rounds")
    try:
        with kept.until_finished():
            for _ in range(number):
                summaries.append(run_round((*resolved.pins, *round_overrides(config, summaries))))
    except VotesNeeded as needed:
        return Rounds(summaries, needed.message)
    return Rounds(summaries)


def check_rounds(rounds: int) -> None:
    """Raise InputError unless there is at least one round."""
    if rounds < 1:
        raise InputError(f"--rounds: must be at least 1; got {rounds}; 2 compares two policies")


def check_first_round(path: str, overrides: Sequence[str], until: EndOfRound = END_OF_ROUND) -> CheckedConfig:
    """Check the configuration of the first round, and have the round reuse this check.

    Args:
        path: YAML file.
        overrides: Fields to override in all rounds.
        until: Last stage of each round.

    Raises:
        InputError: Everything that is wrong with the configuration.
        StoreUnavailable: The store does not answer.
    """
    config = load_config(path, overrides)
    with checking(path):
        resolved, _ = resolve_kept(config, "rounds")
    # The overrides exactly as the flow gives them to the first round.
    first = (*overrides, *resolved.pins, *round_overrides(config, ()))
    checked = load_and_check(path, first, until=until)
    remember_check(checked)
    return checked


def round_overrides(config: PipelineConfig, earlier: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the overrides of the round after `earlier`.

    Without a section `sample` in the configuration, its defaults are used. Pairs are added only if the
    configuration has pairs.

    Args:
        config: The configuration of the first round.
        earlier: Summaries of the rounds before.

    Raises:
        GateFailed: The policy of the last round gave nothing for the next one.
        VotesNeeded: People have not voted on the samples of a round.
    """
    overrides = []
    if config.sample is None:
        overrides.append("sample={}")
    judge = (config.sample or SampleConfig()).judge
    demonstrations, pairs = len(config.data.sft), len(config.data.preference)
    has_pairs, trains_sft = pairs > 0, config.sft.enabled
    if earlier and not has_pairs and not trains_sft:
        raise GateFailed(
            "sft.enabled is false and data.preference has no pairs, so that nothing learns from the samples"
            " and a next round would be the same; add pairs, or set sft.enabled=true"
        )
    # Samples of all earlier rounds: policies forget what only earlier rounds had (Llama 2).
    for number, summary in enumerate(earlier, start=1):
        if config.labels_by_people:
            file = rows_of_votes(config, number, summary)
            if trains_sft:
                overrides += _preferred_answers(f"data.sft.{demonstrations}", file)
                demonstrations += 1
            if has_pairs:
                overrides.append(f"data.preference.{pairs}.path={_text(file)}")
                pairs += 1
            continue
        artifact = f"artifact://sample/{summary['stages']['sample']['key']}"
        rows = summary["sample"]
        if not (trains_sft and rows["best"]) and not (has_pairs and rows["pairs"]):
            raise GateFailed(
                f"round {number}: the stage sample has {rows['best']} demonstrations and {rows['pairs']}"
                " pairs, so a next round would be the same; raise sample.answers or ppo.max_new_tokens, or"
                " lower sample.min_score"
            )
        if trains_sft and rows["best"]:
            overrides += _source(f"data.sft.{demonstrations}", f"{artifact}/best.jsonl", judge)
            demonstrations += 1
        if has_pairs and rows["pairs"]:
            overrides += _source(f"data.preference.{pairs}", f"{artifact}/pairs.jsonl", judge)
            pairs += 1
    return overrides


def _preferred_answers(field: str, rows: Path) -> list[str]:
    """Return the overrides of a source with the answers that people preferred, as demonstrations."""
    return [
        f"{field}.path={_text(rows)}",
        f"{field}.format=completion",
        f"{field}.rename={{chosen: completion}}",
    ]


def _text(file: Path) -> str:
    # Values of overrides are YAML, and so is JSON. A bare path with `: ` or ` #` would be read otherwise.
    return json.dumps(str(file))


def _source(field: str, path: str, judge: str) -> list[str]:
    return [f"{field}.path={path}", f"{field}.labelled_by={judge}"]


def rows_of_votes(config: PipelineConfig, number: int, summary: Mapping[str, Any]) -> Path:
    """Write the labels of people about the samples of a finished round (`Review.rows`), and return the file.

    Args:
        config: The configuration of the rounds.
        number: Number of the round.
        summary: Summary of the round.

    Raises:
        VotesNeeded: There are no rows. The page is written, and the message has its address and the command
            that records votes.
        InputError: The round has no pair of answers that people could compare.
        CorruptArtifact: The answers are damaged.
    """
    review = open_review(summary["run"], config.run.home, "sample", config.store.endpoint)
    rows = review.rows()
    if not rows:
        page, shown = review.write_page(None)
        command = votes_command(review.run.name, config.run.home, "sample", config.store.endpoint)
        raise VotesNeeded(
            f"round {number} is finished, and round {number + 1} needs votes of people on {shown} pairs: open"
            f" {page} in a browser, vote and save the votes, run `{command}`, and start the"
            " rounds again in the same way"
        )
    return review.write_rows(rows)


def rounds_table(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """Return one line per round: its scores, its win rate and its new rows.

    The scores of rounds that end with the stage `sample` are those of its answers to training prompts.
    """
    from rich.table import Table

    columns_of = _sampled
    if "evaluate" in summaries[0]:
        columns_of = _evaluated
    title, columns = columns_of(summaries)
    sampled = summaries[0]["sample"]
    answered = titles_of(sampled.get("rl_algorithm", "PPO"))[sampled["policy"]]
    table = Table(title=title, caption=f"pairs, best: answers of {answered}")
    for column in ("round", *columns, "pairs", "best"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("run", no_wrap=True)
    for number, summary in enumerate(summaries, start=1):
        rows = summary["sample"]
        values = [values[number - 1] for values in columns.values()]
        table.add_row(str(number), *values, str(rows["pairs"]), str(rows["best"]), summary["run"])
    return table


def _evaluated(summaries: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, list[str]]]:
    """Return a title, and the columns with the results of the SFT model and the registered policy."""
    evaluations = [summary.get("evaluate", {}) for summary in summaries]
    measure = _measure(evaluations[0])
    name = (measure or "score").removeprefix("rules/").replace("_", " ")
    scores = [evaluation.get(measure, {}) for evaluation in evaluations]
    policy = summaries[0].get("policy", "ppo")
    titles = titles_of(evaluations[0].get("rl_algorithm", "PPO"))
    columns = {}
    for model in ("sft", policy):
        columns[titles[model]] = [_mean(each.get(model)) for each in scores]
    tables = [evaluation.get("policies", {}).get(policy, {}) for evaluation in evaluations]
    columns["win rate"] = [_mean(table.get("win_rate")) for table in tables]
    return f"{name} on held-out prompts", columns


def _sampled(summaries: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, list[str]]]:
    """Return a title, and the columns with the scores of the answers to training prompts."""
    metrics = [summary["stages"]["sample"].get("metrics", {}) for summary in summaries]
    measure, title = "score", "score"
    if "gold_mean" in metrics[0]:
        measure, title = "gold", "gold reward"
    columns = {}
    for header, name in (("all answers", f"{measure}_mean"), ("best answers", f"{measure}_best")):
        columns[header] = ["-" if name not in each else f"{each[name]:.3f}" for each in metrics]
    return f"{title} on training prompts", columns


def _measure(evaluation: Mapping[str, Any]) -> str | None:
    """Return the measure that the rounds are compared by; None if there is none."""
    rules = [name for name in evaluation if name.startswith("rules/")]
    return next((name for name in (*MEASURES, *rules) if name in evaluation), None)


def _mean(interval: Mapping[str, float] | None) -> str:
    return "-" if interval is None else f"{interval['mean']:.3f}"
