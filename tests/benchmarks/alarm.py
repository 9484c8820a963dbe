"""What `ppo.publish: best` and the guard `overoptimization` achieve without a KL penalty and with it.

    python -m tests.benchmarks.alarm --curves .rlhf/bench/alarm.jsonl.gz

Runs the demo without a KL penalty ("over") and as it is ("sound"), both with a second reward model and more
held-out prompts, until PPO. Both kinds of one seed share the data, the SFT model and both reward models.
Finished stages below `--home` are reused. `--curves` gets the evaluations of all runs, with the scores of
each prompt. `--replay` reads that file and trains nothing, so a changed rule is judged in seconds:

    python -m tests.benchmarks.alarm --curves .rlhf/bench/alarm.jsonl.gz --replay

The code of `rlhf_core` decides about the present rule; `RULES` has others for comparison. `--set` changes
settings of the data or the models in all runs. Another judge of the same pairs leaves the policies as they
are:

    python -m tests.benchmarks.alarm --curves .rlhf/bench/long.jsonl.gz --set reward.judge.epochs=6

    gain          largest rise of the true reward over that of the SFT model's responses
    share         rise of the true reward at a version, divided by the gain
    fall          fall of the true reward from its largest value so far, divided by the gain

With fewer evaluations or prompts (`--every`, and the table of sizes) these three remain those of all
evaluations and prompts, because they are what the policies are and not what the rules see.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from rlhf_core.config.load import load_config
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.ppo_sections import LIMITS
from rlhf_core.ppo.watching.guards import (
    CORRELATION,
    CORRELATION_ERROR,
    KL,
    correlation,
    divergence,
    divergence_of_last,
)
from rlhf_core.ppo.watching.selection import HeldOutResult, Selection, paired_change
from tests.support.arguments import positive

CONFIG = Path(__file__).parents[2] / "deployments" / "configs" / "demo.yaml"
COMMON = (
    "data.synthetic.prompts=1440",
    "data.eval_fraction=0.3",
    "reward.judge={}",
    "ppo.publish=best",
    "ppo.evaluate_every=1",
    "ppo.evaluate_prompts=400",
)
KINDS: Mapping[str, tuple[str, ...]] = {
    "over": ("ppo.kl.coef=0", "ppo.max_kl=1000", "ppo.steps=24"),
    "sound": (),
}
"""Overrides by kind. The demo is sound as it is."""
COLUMNS = ("reward_model", "judge", "gold", "kl", "length")
LEVEL = 0.05
"""Probability of an alarm in a whole run without a fall, for the rules that are tests."""
SIZES = tuple((prompts, every) for prompts in (400, 128, 64) for every in (1, 2, 3, 5))
"""(held-out prompts, steps between evaluations) of the table of sizes."""
LARGEST_FALL, SMALLEST_SHARE = 0.1, 0.8
"""An alarm is in time up to this fall. A published version is good from this share."""


@dataclass(frozen=True)
class Run:
    """The evaluations of one run. `columns[version][name]` is (prompts,)."""

    kind: str
    seed: int
    metrics: dict[int, dict[str, float]]
    columns: dict[int, dict[str, np.ndarray]]
    whole: Run | None = None
    """The run with all evaluations and prompts; None: this one."""

    @property
    def versions(self) -> list[int]:
        return sorted(self.metrics)

    def gold(self, version: int) -> float:
        return float(np.nanmean((self.whole or self).columns[version]["gold"]))

    @property
    def gain(self) -> float:
        return self.gold(self.peak) - self.gold(self.versions[0])

    @property
    def peak(self) -> int:
        return max((self.whole or self).versions, key=lambda version: (self.gold(version), -version))

    def share(self, version: int) -> float:
        return (self.gold(version) - self.gold(self.versions[0])) / self.gain

    def fall(self, version: int) -> float:
        until = [self.gold(other) for other in (self.whole or self).versions if other <= version]
        return (max(until) - self.gold(version)) / self.gain

    def until(self, version: int) -> Run:
        """Return the run up to an evaluation."""
        return self._keep([other for other in self.versions if other <= version])

    def every(self, steps: int) -> Run:
        """Return the run with fewer evaluations, which do not change the training."""
        return self._keep([v for v in self.versions if v % steps == 0 or v == self.versions[-1]])

    def parts(self, prompts: int) -> list[Run]:
        """Return the runs that evaluations with fewer prompts would have recorded, one for each part."""
        count = len(self.columns[self.versions[0]]["gold"])
        return [self._part(slice(first, first + prompts)) for first in range(0, count - prompts + 1, prompts)]

    def _part(self, prompts: slice) -> Run:
        columns = {
            version: {name: values[prompts] for name, values in found.items()}
            for version, found in self.columns.items()
        }
        metrics = {}
        for version, found in columns.items():
            value, error = correlation(found["reward_model"].tolist(), found["judge"].tolist())
            measured = {KL: float(np.nanmean(found["kl"])), CORRELATION: value, CORRELATION_ERROR: error}
            metrics[version] = {**self.metrics[version], **measured}
        return Run(self.kind, self.seed, metrics, columns, self.whole or self)

    def _keep(self, kept: Sequence[int]) -> Run:
        return Run(
            self.kind,
            self.seed,
            {other: self.metrics[other] for other in kept},
            {other: self.columns[other] for other in kept},
            self.whole or self,
        )


Rule = Callable[[Run], bool]
"""Returns whether the last evaluation raises the alarm."""


def overrides(kind: str, seed: int) -> list[str]:
    return [f"run.seed={seed}", *COMMON, *KINDS[kind]]


def command(home: Path, kind: str, seed: int, own: Sequence[str] = ()) -> list[str]:
    """Return the command that runs one kind until PPO, with further overrides `own`."""
    run = [sys.executable, "-m", "rlhf_cli.main", "run", str(CONFIG), f"run.home={home}"]
    return [*run, *overrides(kind, seed), *own, "--until", "ppo"]


def train(home: Path, kind: str, seed: int, own: Sequence[str] = ()) -> Run:
    """Run one kind until PPO, and return its evaluations."""
    line = command(home, kind, seed, own)
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(line)} ended with code {done.returncode}")
    summary = json.loads(Path(done.stdout.splitlines()[-1].removeprefix("summary: ")).read_text())
    artifact = home / "store" / summary["stages"]["ppo"]["artifact"]
    metrics = {row.pop("version"): row for row in read_lines(artifact / "evaluations.jsonl")}
    columns = {row.pop("version"): row for row in read_lines(artifact / "evaluations_by_prompt.jsonl")}
    for row in metrics.values():
        del row["best"]
    return Run(kind, seed, metrics, {version: as_arrays(row) for version, row in columns.items()})


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def as_arrays(row: Mapping[str, Sequence[float | None]]) -> dict[str, np.ndarray]:
    """Convert the columns of one version; None becomes NaN."""
    return {name: np.array(row[name], dtype=np.float64) for name in COLUMNS if name in row}


def save(runs: Sequence[Run], path: Path) -> None:
    """Write one line for each evaluation. Scores are rounded to four digits after the point."""
    with gzip.open(path, "wt") as file:
        for run in runs:
            for version in run.versions:
                columns = {
                    name: [None if math.isnan(value) else round(value, 4) for value in values.tolist()]
                    for name, values in run.columns[version].items()
                }
                row = {"kind": run.kind, "seed": run.seed, "version": version}
                file.write(json.dumps({**row, "metrics": run.metrics[version], "columns": columns}) + "\n")


def load(path: Path) -> list[Run]:
    runs: dict[tuple[str, int], Run] = {}
    with gzip.open(path, "rt") as file:
        for row in map(json.loads, file):
            run = runs.setdefault((row["kind"], row["seed"]), Run(row["kind"], row["seed"], {}, {}))
            run.metrics[row["version"]] = row["metrics"]
            run.columns[row["version"]] = as_arrays(row["columns"])
    return list(runs.values())


# -- rules --


def present(run: Run) -> bool:
    """The guard of `rlhf_core`."""
    return divergence(run.metrics, LIMITS["overoptimization"].default) is not None


def one_evaluation(run: Run) -> bool:
    """The present rule, but its conditions in one evaluation are enough."""
    return divergence_of_last(run.metrics, LIMITS["overoptimization"].default) is not None


def falls(run: Run, values: Callable[[Run, int], np.ndarray]) -> bool:
    """Whether the mean of `values`, of each prompt, is lower in the last evaluation than in an earlier one of
    a trained policy: one-sided tests, paired by prompt.

    Evaluation v = 1, 2, ... makes less than v tests at `LEVEL` / (v^2 (v + 1)) each. In a run of any length
    these add up to less than `LEVEL`.
    """
    _, *earlier, last = run.versions
    count = len(earlier) + 1
    limit = NormalDist().inv_cdf(LEVEL / (count**2 * (count + 1)))
    after = values(run, last).tolist()
    changes = [paired_change(values(run, version).tolist(), after) for version in earlier]
    return any(change < limit * error for change, error in changes)


def agreement(run: Run) -> bool:
    """The present rule without the condition on the KL."""
    metrics = {version: {**run.metrics[version], KL: float(version**2)} for version in run.versions}
    return divergence(metrics, LIMITS["overoptimization"].default) is not None


def gold_agreement(run: Run) -> bool:
    """The rule `agreement` with the true reward in place of the judge."""
    return agreement(judged_by_gold(run))


def gold_present(run: Run) -> bool:
    """The guard with the true reward in place of the judge."""
    return present(judged_by_gold(run))


def judged_by_gold(run: Run) -> Run:
    """Return the run with the correlations that the true reward has as judge."""
    metrics = {}
    for version in run.versions:
        known = [run.columns[version][name].tolist() for name in ("reward_model", "gold")]
        value, error = correlation(*known)
        metrics[version] = {**run.metrics[version], CORRELATION: value, CORRELATION_ERROR: error}
    return replace(run, metrics=metrics)


def moves(run: Run) -> bool:
    """The guard without the condition on the agreement: it warns at no other step, whatever the judge is."""
    metrics = {
        version: {
            **run.metrics[version],
            CORRELATION: float(version == run.versions[0]),
            CORRELATION_ERROR: 0.0,
        }
        for version in run.versions
    }
    return divergence(metrics, LIMITS["overoptimization"].default) is not None


def gold_falls(run: Run) -> bool:
    """The true reward falls: the rule `paired` with a perfect judge."""
    return falls(run, lambda run, version: run.columns[version]["gold"])


def paired(run: Run) -> bool:
    """The judge's mean falls."""
    return falls(run, lambda run, version: run.columns[version]["judge"])


def bound(run: Run) -> bool:
    """A lower bound of the true reward falls.

    If the error e of the judge is sub-Gaussian with variance s^2 over the SFT model's responses, a policy
    whose KL to that model is K can raise its mean by at most s sqrt(2 K) (the variational formula of Donsker
    and Varadhan). So the true reward rises by at least the judge's rise minus that.
    """
    return falls(run, lower_bounds)


def lower_bounds(run: Run, version: int) -> np.ndarray:
    """Return values (prompts,) with the mean J - s sqrt(2 K) and, to first order, its standard error.

    J is the judge's mean. s^2 is half the variance of the difference of both models' scores over the SFT
    model's responses, which is the variance of an error if both have equal and independent ones.
    """
    first, now = run.columns[run.versions[0]], run.columns[version]
    error = float(np.nanstd(first["reward_model"] - first["judge"], ddof=1)) / math.sqrt(2)
    root = math.sqrt(max(float(np.nanmean(now["kl"])), 1e-6))
    return now["judge"] - error * math.sqrt(2) * (root + (now["kl"] - root**2) / (2 * root))


def length(run: Run) -> bool:
    """The present rule with the partial correlation of both scores, given the length of the response.

    An error of both models that follows the length is then no agreement.
    """
    metrics = {}
    for version in run.versions:
        value, error = partial_correlation(run.columns[version], "length")
        metrics[version] = {**run.metrics[version], CORRELATION: value, CORRELATION_ERROR: error}
    return divergence(metrics, LIMITS["overoptimization"].default) is not None


def partial_correlation(columns: Mapping[str, np.ndarray], given: str) -> tuple[float, float]:
    """Return the correlation of both scores after a linear regression on `given`, and its standard error."""
    design = np.stack([np.ones_like(columns[given]), columns[given]], axis=1)
    scores = np.stack([columns["reward_model"], columns["judge"]], axis=1)
    weights = np.linalg.lstsq(design, scores, rcond=None)[0]
    left = scores - design @ weights
    return correlation(left[:, 0].tolist(), left[:, 1].tolist())


RULES: Mapping[str, Rule] = {
    "present": present,
    "one_evaluation": one_evaluation,
    "agreement": agreement,
    "paired": paired,
    "bound": bound,
    "length": length,
    "gold_present": gold_present,
    "gold_agreement": gold_agreement,
    "gold_falls": gold_falls,
}
"""The last three see the true reward. They show what a perfect judge would bring."""


# -- results --


@dataclass(frozen=True)
class Result:
    run: Run
    chosen: int | None
    """Version that `publish: best` chooses, if the rule takes the place of the guard."""
    alarms: list[int]
    """Versions whose evaluation raises the alarm."""

    @property
    def first(self) -> int | None:
        return self.alarms[0] if self.alarms else None

    @property
    def in_time(self) -> bool:
        """Whether the first alarm comes before the largest fall. Only for runs without a KL penalty."""
        return self.first is not None and self.run.fall(self.first) < LARGEST_FALL


def judge_rule(run: Run, rule: Rule) -> Result:
    """Replay the evaluations in order."""
    alarms = [version for version in run.versions[1:] if rule(run.until(version))]
    return Result(run, published(run, min(alarms, default=None)), alarms)


def published(run: Run, first_alarm: int | None) -> int | None:
    """Return the version that `publish: best` chooses with this alarm in place of the guard."""
    own = [*overrides(run.kind, run.seed), "ppo.publish_min_agreement=0"]
    ppo = load_config(CONFIG, own).ppo
    before = [version for version in run.versions if first_alarm is None or version < first_alarm]
    if len(before) < 2:
        before = run.versions[:2]  # the first trained version is the best also if it raises the alarm
    return best_of(run, before, ppo)


def best_of(run: Run, versions: Sequence[int], ppo: PPOConfig) -> int | None:
    """Return the version that `Selection` chooses of these evaluations."""
    selection = Selection(ppo)
    for version in versions:
        columns = run.columns[version]
        objectives = (columns["judge"] - ppo.kl.coef * columns["kl"]).tolist()
        selection.add(version, HeldOutResult(run.metrics[version], objectives))
    return selection.best


def table_of_over(results: Sequence[Result]) -> str:
    """Markdown: one row for each run without a KL penalty."""
    lines = [
        "| seed | gain | at step | share at the last step | published step: share | warning: share, fall"
        " | in time |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        run, first = result.run, result.first
        chosen = "none" if result.chosen is None else f"{result.chosen}: {run.share(result.chosen):.2f}"
        warning = "none" if first is None else f"{first}: {run.share(first):.2f}, {run.fall(first):.2f}"
        cells = [
            f"{run.seed}",
            f"{run.gain:.2f}",
            f"{run.peak}",
            f"{run.share(run.versions[-1]):.2f}",
            chosen,
            warning,
            "yes" if result.in_time else "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_sound(results: Sequence[Result]) -> str:
    """Markdown: one row for each run with the demo's KL penalty."""
    lines = ["| seed | gain | published step: share | warnings at |", "|---|---|---|---|"]
    for result in results:
        run = result.run
        chosen = "none" if result.chosen is None else f"{result.chosen}: {run.share(result.chosen):.2f}"
        warnings = ", ".join(map(str, result.alarms)) or "none"
        lines.append(f"| {run.seed} | {run.gain:.2f} | {chosen} | {warnings} |")
    return "\n".join(lines)


def table_of_sizes(runs: Sequence[Run]) -> str:
    """Markdown: the same runs with fewer prompts and evaluations, for two rules.

    Columns: how often the published policy has less than `SMALLEST_SHARE` of the gain; how often the warning
    is in time without a KL penalty; how often a sound run has one.
    """
    rules = ("present", "one_evaluation")
    named = [
        f"{rule}: {what}" for rule in rules for what in ("published too low", "in time", "sound with warning")
    ]
    lines = [f"| prompts | every | {' | '.join(named)} |", "|---" * (2 + len(named)) + "|"]
    for prompts, every in SIZES:
        parts = [part.every(every) for run in runs for part in run.parts(prompts)]
        cells = [f"{prompts}", f"{every}"]
        for rule in rules:
            results = [judge_rule(part, RULES[rule]) for part in parts]
            over = [result for result in results if result.run.kind == "over"]
            sound = [result for result in results if result.run.kind == "sound"]
            low = [result for result in results if not is_good(result)]
            cells.append(f"{len(low)} of {len(results)}")
            cells.append(f"{sum(result.in_time for result in over)} of {len(over)}")
            cells.append(f"{sum(bool(result.alarms) for result in sound)} of {len(sound)}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_movement(runs: Sequence[Run]) -> str:
    """Markdown: the steps at which the guard warns if its judge has lost all agreement."""
    lines = ["| kind | seed | steps at which the guard can warn | first fall of a tenth of the gain |"]
    lines.append("|---" * 4 + "|")
    for run in runs:
        steps = ", ".join(map(str, judge_rule(run, moves).alarms)) or "none"
        fall = next((f"{version}" for version in run.versions if run.fall(version) >= LARGEST_FALL), "none")
        lines.append(f"| {run.kind} | {run.seed} | {steps} | {fall} |")
    return "\n".join(lines)


def is_good(result: Result) -> bool:
    """Return whether the published policy has enough of the gain."""
    return result.chosen is not None and result.run.share(result.chosen) >= SMALLEST_SHARE


def counts(results: Sequence[Result]) -> str:
    """Describe how often the aims are met."""
    over = [result for result in results if result.run.kind == "over"]
    sound = [result for result in results if result.run.kind == "sound"]
    good = sum(map(is_good, over))
    worse = sum(result.run.share(result.run.versions[-1]) < 1 for result in over)
    return (
        f"Without KL: the last policy is worse than the best in {worse} of {len(over)} runs; the published"
        f" one has at least {SMALLEST_SHARE:g} of the gain in {good}; the warning comes before a fall of"
        f" {LARGEST_FALL:g} of the gain in {sum(result.in_time for result in over)}. With KL: a warning in"
        f" {sum(bool(result.alarms) for result in sound)} of {len(sound)} runs."
    )


def curve(run: Run) -> str:
    """Markdown: what the rules see, and the true reward, by version.

    `shared error` is the correlation of both models' scores that the true reward does not explain.
    """
    lines = [
        "| step | gold | judge | reward model | length | sqrt(KL) | correlation | given length | of both with"
        " gold | shared error |",
        "|---" * 10 + "|",
    ]
    for version in run.versions:
        columns = run.columns[version]
        known = {name: values.tolist() for name, values in columns.items()}
        means = [np.nanmean(columns[name]) for name in ("gold", "judge", "reward_model")]
        cells = [
            f"{version}",
            *(f"{mean:.2f}" for mean in means),
            f"{np.nanmean(columns['length']):.1f}",
            f"{math.sqrt(max(run.metrics[version][KL], 0.0)):.2f}",
            f"{correlation(known['reward_model'], known['judge'])[0]:.2f}",
            f"{partial_correlation(columns, 'length')[0]:.2f}",
            f"{correlation(known['reward_model'], known['gold'])[0]:.2f},"
            f" {correlation(known['judge'], known['gold'])[0]:.2f}",
            f"{partial_correlation(columns, 'gold')[0]:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--home", type=Path, default=Path(".rlhf/bench/alarm"), help="run.home of the runs")
    parser.add_argument("--curves", type=Path, default=Path(".rlhf/bench/alarm.jsonl.gz"))
    parser.add_argument("--replay", action="store_true", help="read --curves and train nothing")
    parser.add_argument("--every", type=positive, default=1, help="steps between the evaluations that count")
    parser.add_argument("--over", type=int, nargs="*", default=[0, 1, 2, 3], help="seeds without KL penalty")
    parser.add_argument("--sound", type=int, nargs="*", default=[0, 1, 2], help="seeds of the demo as it is")
    parser.add_argument("--set", nargs="*", default=[], help="further overrides, not of ppo")
    args = parser.parse_args(arguments)
    if args.replay and not args.curves.exists():
        parser.error(f"--replay: {args.curves} does not exist; without --replay the runs write it")
    if args.replay:
        runs = load(args.curves)
    else:
        wanted = [("over", seed) for seed in args.over] + [("sound", seed) for seed in args.sound]
        runs = [train(args.home, kind, seed, args.set) for kind, seed in wanted]
        args.curves.parent.mkdir(parents=True, exist_ok=True)
        save(runs, args.curves)
    print(f"## Sizes\n\n{table_of_sizes(runs)}\n")
    runs = [run.every(args.every) for run in runs]
    print(f"## Movement\n\n{table_of_movement(runs)}\n")
    for name, rule in RULES.items():
        results = [judge_rule(run, rule) for run in runs]
        print(f"## Rule: {name}\n")
        print(table_of_over([result for result in results if result.run.kind == "over"]), end="\n\n")
        print(table_of_sound([result for result in results if result.run.kind == "sound"]), end="\n\n")
        print(counts(results), end="\n\n")
    for run in runs:
        print(f"## {run.kind}, seed {run.seed}\n\n{curve(run)}\n")


if __name__ == "__main__":
    main()
