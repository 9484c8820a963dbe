"""Reward by step of every algorithm over three seeds, in one figure:

    python -m tests.benchmarks.learning_curves

The run is the one of the learning tests. Ends with `figure: PATH`; the curves' numbers are next to it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean

from tests.integration.learning import ALGORITHMS, reward_curve
from tests.support.arguments import positive


def main(arguments: list[str] | None = None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(".rlhf/bench/learning_curves.png"), help="the figure"
    )
    parser.add_argument("--steps", type=positive, default=20, help="PPO steps (default 20)")
    args = parser.parse_args(arguments)
    curves: dict[str, list[list[float]]] = {}
    for algorithm in ALGORITHMS:
        for seed in range(3):
            with tempfile.TemporaryDirectory() as folder:
                curves.setdefault(algorithm, []).append(
                    reward_curve(algorithm, seed, Path(folder), steps=args.steps)
                )
    figure, axes = plt.subplots(2, 3, sharex=True, sharey=True, figsize=(9, 5), layout="constrained")
    for axis, (algorithm, seeds) in zip(axes.flat, curves.items(), strict=True):
        for curve in seeds:
            axis.plot(range(1, len(curve) + 1), curve, color="tab:blue", alpha=0.35)
        axis.plot(
            range(1, args.steps + 1), [mean(at) for at in zip(*seeds, strict=True)], color="tab:blue", lw=2
        )
        axis.set_title(algorithm, fontsize=10)
        axis.grid(alpha=0.3)
    figure.supxlabel("step")
    figure.supylabel("reward (share of wanted tokens)")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
    args.out.with_suffix(".json").write_text(json.dumps(curves) + "\n")
    print(f"figure: {args.out}")


if __name__ == "__main__":
    main()
