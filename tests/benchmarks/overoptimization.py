"""Over-optimisation on the demo's task: the reward model's score and the true reward by PPO step, without and
with KL.

    python -m tests.benchmarks.overoptimization --out docs/overoptimization.md

Runs `deployments/configs/overoptimization.yaml` as it is, and again with the demo's `ppo.kl.coef`; the second
run reuses the data, the SFT model and the reward model of the first. Writes a page with a table, and the
figure next to it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rlhf_core.config.load import load_config

CONFIG = Path(__file__).parents[2] / "deployments" / "configs" / "overoptimization.yaml"
WITHOUT, WITH = 0.0, 0.05
"""`ppo.kl.coef`: the configuration's and the demo's."""
WINDOW = 5
"""Steps that are averaged: the rewards of one step are means over 128 responses."""
PAGE = """# Over-optimisation

A reward model is an approximation. A policy that is trained against it for long enough finds responses that
the reward model scores too high (Gao et al. 2022, "Scaling Laws for Reward Model Overoptimization"). On the
demo's task the true ("gold") reward is known, so this can be measured.

The configuration is [overoptimization.yaml](../deployments/configs/overoptimization.yaml): the demo with
{pairs} noisy preference pairs, {epochs} epochs of SFT and {steps} PPO steps, without a KL penalty
(`ppo.kl.coef: 0`) and with the demo's (`ppo.kl.coef: 0.05`). Both runs share the SFT model and
the reward model, whose accuracy on held-out pairs is {accuracy:.3f}.

![Without a KL penalty the score of the reward model rises while the true reward falls]({figure})

Means of {window} steps, seed {seed}; `ppo.kl.coef` in parentheses. Score: mean of the reward model over the
responses of a step. Gold: the true reward of the same responses. KL: mean per response, in nats, against the
SFT model.

{table}

{findings}

Written by `python -m tests.benchmarks.overoptimization --out docs/overoptimization.md`.
"""


@dataclass(frozen=True)
class Curve:
    """One value per PPO step, means of the last `WINDOW` steps (fewer at the start)."""

    score: list[float]
    gold: list[float]
    kl: list[float]

    @property
    def peak(self) -> int:
        """The step, from 0, where the true reward is highest."""
        return max(range(len(self.gold)), key=self.gold.__getitem__)

    @property
    def fall(self) -> float:
        """Decrease of the true reward from its peak to the end."""
        return self.gold[self.peak] - self.gold[-1]

    @property
    def rise(self) -> float:
        """Increase of the reward model's score from the peak of the true reward to the end."""
        return self.score[-1] - self.score[self.peak]


def run(home: Path, coef: float, seed: int) -> tuple[Curve, float]:
    """The curve of one run, and its reward model's accuracy on held-out pairs. Finished stages below `home`
    are reused.
    """
    settings = [f"run.home={home}", f"run.seed={seed}", f"ppo.kl.coef={coef:g}"]
    line = [sys.executable, "-m", "rlhf_cli.main", "run", str(CONFIG), *settings]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(line)} ended with code {done.returncode}")
    summary = json.loads(Path(done.stdout.splitlines()[-1].removeprefix("summary: ")).read_text())
    metrics = home / "store" / summary["stages"]["ppo"]["artifact"] / "metrics.jsonl"
    steps = [json.loads(row) for row in metrics.read_text().splitlines()]
    names = ("rewards/model/mean", "rewards/gold/mean", "objective/kl")
    return Curve(*(smooth([step[name] for step in steps]) for name in names)), summary["reward"]["accuracy"]


def smooth(values: Sequence[float]) -> list[float]:
    """Each value's mean with the `WINDOW` - 1 before it."""
    return [mean(values[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(values))]


def table(without: Curve, with_kl: Curve) -> str:
    """Markdown: every `WINDOW`-th step."""
    names = [f"{name} ({coef:g})" for coef in (WITHOUT, WITH) for name in ("score", "gold", "KL")]
    lines = [f"| step | {' | '.join(names)} |", "|---|---|---|---|---|---|---|"]
    for step in range(WINDOW, len(without.gold) + 1, WINDOW):
        cells = [
            f"{values[step - 1]:.2f}"
            for curve in (without, with_kl)
            for values in (curve.score, curve.gold, curve.kl)
        ]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


def findings(curve: Curve, name: str) -> str:
    """Describe one curve in a sentence."""
    return (
        f"{name}, the true reward is highest at step {curve.peak + 1} ({curve.gold[curve.peak]:.2f}) and "
        f"{curve.gold[-1]:.2f} at the end, {curve.fall:.2f} lower; the score of the reward model rises by "
        f"{curve.rise:.2f} in the same steps, and the KL reaches {curve.kl[-1]:.1f}."
    )


def draw(curves: dict[str, Curve], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(curves), sharey=True, figsize=(9, 3.6), layout="constrained")
    for axis, (name, curve) in zip(axes, curves.items(), strict=True):
        steps = range(1, len(curve.gold) + 1)
        axis.plot(steps, curve.score, color="tab:orange", label="score of the reward model")
        axis.plot(steps, curve.gold, color="tab:blue", label="true reward")
        axis.axvline(curve.peak + 1, color="tab:blue", lw=1, ls=":")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("PPO step")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"reward, means of {WINDOW} steps")
    axes[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(".rlhf/bench/overoptimization.md"), help="the page")
    parser.add_argument(
        "--home", type=Path, default=Path(".rlhf/bench/overoptimization"), help="run.home of the runs"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    config = load_config(CONFIG, [])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    without, accuracy = run(args.home, WITHOUT, args.seed)
    with_kl, _ = run(args.home, WITH, args.seed)
    names = f"Without KL (`ppo.kl.coef: {WITHOUT:g}`)", f"With KL (`ppo.kl.coef: {WITH:g}`)"
    figure = args.out.with_suffix(".png")
    draw(
        {name.replace("`", ""): curve for name, curve in zip(names, (without, with_kl), strict=True)}, figure
    )
    page = PAGE.format(
        pairs=config.data.synthetic.pairs,
        epochs=config.sft.epochs,
        steps=config.ppo.steps,
        accuracy=accuracy,
        window=WINDOW,
        seed=args.seed,
        figure=figure.name,
        table=table(without, with_kl),
        findings="\n\n".join([findings(without, names[0]), findings(with_kl, names[1])]),
    )
    args.out.write_text(page)
    print(f"page: {args.out}, figure: {figure}")


if __name__ == "__main__":
    main()
