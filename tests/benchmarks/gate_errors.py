"""How often the gate crowns a policy that is no better than the champion, over many retrainings, and how
often one that is better: the rule before decision 18 (the 95 % interval of the win rate above one half, every
time) and the present one.

    python -m tests.benchmarks.gate_errors
"""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np

from rlhf_core.tracking.gate import Gate


def crowned_at_least_once(
    chance: np.random.Generator,
    *,
    runs: int,
    matches: int,
    prompts: int,
    ties: float,
    gate: Gate,
    rate: float = 0.5,
) -> tuple[float, float]:
    """(share by the old rule, by the present one) of `runs` in which at least one of `matches` candidates
    took the place of the champion. `rate`: of the candidates' wins among the prompts that are no tie; `ties`:
    share of those.
    """
    tied = chance.binomial(prompts, ties, (runs, matches))
    wins = chance.binomial(prompts - tied, rate)
    losses = prompts - tied - wins
    mean = (wins + 0.5 * tied) / prompts
    error = np.sqrt(((wins + 0.25 * tied) / prompts - mean**2) / prompts)
    old = (mean - 1.96 * error > 0.5).any(axis=1)
    levels = np.array([gate.level(number) for number in range(1, matches + 1)])
    new = (wins >= _needed(prompts, levels)[wins + losses, np.arange(matches)]).any(axis=1)
    return float(old.mean()), float(new.mean())


def _needed(prompts: int, levels: np.ndarray) -> np.ndarray:
    """(prompts + 1, levels): the fewest wins among so many decided prompts whose p-value is at most the
    level.
    """
    needed = np.full((prompts + 1, len(levels)), prompts + 1)
    for decided in range(prompts + 1):
        # Verdicts.p_value for each number of wins, summed from the top.
        tails = accumulate(math.comb(decided, wins) for wins in range(decided, -1, -1))
        p_values = np.array([tail / (1 << decided) for tail in tails])[::-1]
        enough = p_values[:, None] <= levels
        some = enough.any(axis=0)
        needed[decided, some] = enough.argmax(axis=0)[some]
    return needed


def main() -> None:
    gate, chance = Gate(0.5), np.random.default_rng(0)
    print("chance that at least one of the candidates becomes champion, 4,000 simulations, 10 % ties")
    print("| win rate without ties | prompts | matches | interval above 1/2 | exact test, alpha spent |")
    print("|---|---|---|---|---|")
    for rate in (0.5, 0.6, 0.65, 0.7):
        for prompts in (128, 512):
            for matches in (1, 10, 52):
                old, new = crowned_at_least_once(
                    chance, runs=4000, matches=matches, prompts=prompts, ties=0.1, gate=gate, rate=rate
                )
                print(f"| {rate:.2f} | {prompts} | {matches} | {old:.3f} | {new:.3f} |")


if __name__ == "__main__":
    main()
