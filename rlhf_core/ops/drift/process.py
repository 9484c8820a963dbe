"""Measures drift in a process of its own: `python -m rlhf_core.ops.drift.process REQUEST.json`.

It holds both data sets in memory, and the champion's reward model. `compare` starts it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.data.dataset import load_pairs
from rlhf_core.data.tokenizer import load_decoder
from rlhf_core.evaluation.statistics import difference_of_shares, group_of
from rlhf_core.executors.spec import config_from_json
from rlhf_core.logs import log_to_stderr
from rlhf_core.ops.drift.measures import (
    Change,
    Drift,
    compare,
    compare_new_rows,
    statistics,
    statistics_of_new_rows,
    to_json,
)
from rlhf_core.system.files import write_json
from rlhf_core.types import PairExample


@dataclass(frozen=True)
class DriftRequest:
    """What is compared."""

    config: dict[str, Any]
    """Configuration of the run, as JSON."""
    champion: str
    """Name of the version."""
    champion_data: str
    """Folder of its data artifact."""
    data: str
    """Folder of the new data artifact."""
    reward_model: str | None
    """Folder of the champion's reward model; None if it is not used."""
    accuracy: float
    """Its accuracy on its own held-out pairs."""
    note: str
    """Why it is not used."""
    result: str
    """File that gets the measures."""

    def write(self, path: Path) -> None:
        """Write the file that `read` reads."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> DriftRequest:
        """Return the request in `path`."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def main(path: Path) -> None:
    """Measure what the request in `path` asks for."""
    request = DriftRequest.read(path)
    config = config_from_json(request.config)
    data = Path(request.data)
    champion = Path(request.champion_data)
    # Of both data artifacts only files are read, so that champions of earlier releases can be compared.
    before = statistics(champion)
    drifts = [*compare(before, statistics(data)), *agreement(config, request)]
    drifts += compare_new_rows(before, statistics_of_new_rows(champion, data))
    write_json(Path(request.result), {"champion": request.champion, "measures": to_json(drifts)})


def agreement(config: PipelineConfig, request: DriftRequest) -> list[Drift]:
    """Return how much less the champion's reward model agrees with the labels of the held-out pairs: of all,
    and of those that are not in the champion's data, if these are a part of them.

    The interval, at the level `evaluate.confidence`, is that of a difference of two shares of independent
    samples (Newcombe 1998, method 10). Pairs of the same prompt or group count as one trial.
    """
    if request.reward_model is None:
        return [Drift("agreement", None, note=request.note)]
    data = Path(request.data)
    pairs = load_pairs(data, "eval")
    if not pairs:
        return [Drift("agreement", None, note="there are no held-out pairs")]
    # Only here, because the other measures need no torch.
    from rlhf_core.engines.distributed import resolve_device
    from rlhf_core.stages.reward import evaluate_saved
    from rlhf_core.stages.training import is_correct

    device = resolve_device(config.run.device)
    _, scores_P2 = evaluate_saved(config, Path(request.reward_model), pairs, load_decoder(data).pad, device)
    correct = is_correct(scores_P2[:, 0] - scores_P2[:, 1]).tolist()
    champion = Path(request.champion_data)
    own = load_pairs(champion, "eval")
    # The tokenizer and the template are the same.
    known = set(map(_tokens, (*own, *load_pairs(champion, "train"))))
    new = [index for index, pair in enumerate(pairs) if _tokens(pair) not in known]
    trials = len(set(map(group_of, own)))

    def loss_on(indices: Sequence[int], new_rows: int | None = None) -> Drift:
        values = [correct[index] for index in indices]
        before, after = request.accuracy, sum(values) / len(values)
        of_new = len({group_of(pairs[index]) for index in indices})
        loss = difference_of_shares(before, trials, after, of_new, config.evaluate.confidence)
        category = "pairs with the higher score for the chosen response"
        place = f"{len(values)} held-out pairs, {len(own)} of the champion"
        change = Change(category, before, after)
        return Drift(
            "agreement", max(0.0, loss.mean), place, loss.low, loss.high, (change,), new_rows=new_rows
        )

    losses = [loss_on(range(len(pairs)))]
    # If all pairs are new, this would be the same number again.
    if 0 < len(new) < len(correct):
        losses.append(loss_on(new, len(new)))
    return losses


def _tokens(pair: PairExample) -> tuple[tuple[int, ...], ...]:
    return pair.prompt_ids, pair.chosen_ids, pair.rejected_ids


if __name__ == "__main__":
    log_to_stderr()
    main(Path(sys.argv[1]))
