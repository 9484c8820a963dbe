"""The rows of the record of one PPO step (`rlhf_core.record.schema`).

    batch        tokens and log-probabilities of the engines, rewards, what filtering replaced
    experience   scores, KL, and references to what the ranks computed

The columns of tokens are fetched from the ranks and engines, 8 to 36 bytes for each token. Nothing is
computed, but at the level `all` the log-probabilities after the update.

Axes: `B` responses, `T` tokens of one response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_core.config.pipeline import RecordLevel
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.training.batch import FloatArray, IntArray, RolloutBatch, RolloutColumns, offsets_of
from rlhf_core.ppo.training.experience import shaped_scores
from rlhf_core.ppo.update import Experience
from rlhf_core.record.schema import NUMBERS, REWARD, TOKENS, WEIGHTED, includes, schema_of
from rlhf_core.rewards.compose import weighted_sum

KIND = "ppo"


@dataclass(frozen=True)
class StepRows:
    """Makes the rows of one step.

    Args:
        fleet: Has the tokens of the batch.
        ppo: Section `ppo`.
        step: Number of the step.
        weights: Digest of the weights of the last sync.
    """

    fleet: Fleet
    ppo: PPOConfig
    step: int
    weights: str | None = None

    def table(
        self, batch: RolloutBatch, experience: Experience, level: RecordLevel, *, trained: bool
    ) -> pa.Table:
        """Return a row for each response of the batch, and then one for each that was replaced.

        Args:
            batch: The batch of the step. It has rewards.
            experience: Its experience.
            level: The columns.
            trained: Whether the step was not skipped. With `all`, the policy has its weights.
        """
        assert batch.rewards is not None
        # All chunks at once: the rows of the record are in the order of the batch, and each chunk has rows of
        # many places.
        chunks = self.fleet.wait(batch.chunks, "rollouts")
        of_step = None if trained else "skipped"
        rows = self._rows(batch, chunks, 0, level) | {
            "score": experience.scores_B.numpy(),
            "kl": experience.kl_B,
            "excluded": [of_step if scored else "unscored" for scored in experience.scored_B.tolist()],
            **self._weighted(batch),
        }
        if includes(level, "logprobs"):
            rows |= self._of_ranks(experience)
        if includes(level, "all"):
            rows |= self._after_update(batch, experience)
        schema = schema_of(level, batch.rewards.by_source)
        tables = [_table(rows, schema)]
        start = len(batch)
        for replaced in batch.filtered:
            assert replaced.rewards is not None
            total = replaced.rewards.total
            scores_B = shaped_scores(replaced.lengths_B, replaced.finished_B, total, self.ppo)
            without = {"score": scores_B.numpy(), "excluded": ["filtered"] * len(replaced)}
            tables.append(_table(self._rows(replaced, chunks, start, level) | without, schema))
            start += len(replaced)
        return pa.concat_tables(tables)

    def _rows(
        self, batch: RolloutBatch, chunks: Sequence[RolloutColumns], start: int, level: RecordLevel
    ) -> dict[str, Any]:
        """Return what is known of responses before they are trained on. The first one has the number
        `start`.
        """
        assert batch.rewards is not None
        index_B = np.arange(start, start + len(batch), dtype=np.int32)
        places = [(chunks[number], row) for number, row in batch.places]
        rows = {
            "kind": [KIND] * len(batch),
            "step": np.full(len(batch), self.step, np.int32),
            "index": index_B,
            "group": index_B // self.ppo.samples_per_prompt,
            "prompt_id": [prompt.prompt_id for prompt in batch.prompts],
            "source": [prompt.source for prompt in batch.prompts],
            "prompt_ids": _lists([chunk.prompt(row) for chunk, row in places]),
            "response_ids": _lists([chunk.response(row) for chunk, row in places]),
            "finished": batch.finished_B,
            "policy_version": np.full(len(batch), batch.version, np.int32),
            # With staleness, an older version has sampled it.
            "weights": None if self.ppo.staleness else [self.weights] * len(batch),
            "seed": batch.seeds_B,
            "total": batch.rewards.total,
            "ensemble_std": batch.rewards.ensemble_std or None,
            **{f"{REWARD}{name}": values for name, values in batch.rewards.by_source.items()},
        }
        if includes(level, "logprobs"):
            rows["rollout_logprobs"] = _lists([chunk.rollout_logprobs(row) for chunk, row in places])
        return rows

    def _weighted(self, batch: RolloutBatch) -> dict[str, Any]:
        """Return the part of each source in the total. Normalisation is over the final batch, so replaced
        responses have none.
        """
        assert batch.rewards is not None
        by_source = batch.rewards.by_source
        found = {}
        for source in self.ppo.rewards:
            part = weighted_sum([source], by_source, len(batch), self.ppo.score_clip)
            found[f"{WEIGHTED}{source.used_name}"] = part
        return found

    def _of_ranks(self, experience: Experience) -> dict[str, Any]:
        rows = {
            "old_logprobs": _lists(experience.old.gather("logprobs")),
            "ref_logprobs": _lists(experience.ref.gather("logprobs")),
        }
        if experience.values is not None:
            rows["values"] = _lists(experience.values.gather("values"))
        return rows

    def _after_update(self, batch: RolloutBatch, experience: Experience) -> dict[str, Any]:
        new = self.fleet.logprobs("policy", batch, with_entropy=False)
        advantages = experience.returns.gather("advantages")
        if experience.whitening is not None:
            # The ranks whiten a copy of their own before the exchange (`rank_rows.policy_samples`), with the
            # same rounding.
            advantages = [experience.whitening.apply(row) for row in advantages]
        rows = {"new_logprobs": _lists(new.gather("logprobs")), "advantages": _lists(advantages)}
        if experience.values is not None:
            rows["returns"] = _lists(experience.returns.gather("returns"))
        return rows


def _lists(rows: Sequence[FloatArray] | Sequence[IntArray]) -> pa.ListArray:
    """Return one list for each row."""
    offsets, elements = offsets_of([len(row) for row in rows]), pa.array(np.concatenate(rows))
    kind = TOKENS if pa.types.is_integer(elements.type) else NUMBERS
    # Lists of Arrow have offsets of 32 bits.
    return pa.ListArray.from_arrays(offsets.astype(np.int32), elements, type=kind)


def _table(rows: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    """Return the columns of `schema`. Those that `rows` lacks are null."""
    count = len(rows["index"])
    columns = []
    for field in schema:
        values = rows.get(field.name)
        if values is None:
            columns.append(pa.nulls(count, field.type))
        elif isinstance(values, pa.Array):
            columns.append(values)
        else:
            columns.append(pa.array(values, field.type))
    return pa.Table.from_arrays(columns, schema=schema)
