"""The experience that ranks make from chunks and columns of other ranks. The models are scripted; rows
and sums are computed as on real ranks.

- metrics, sums, whitening and the critic's returns have the same bits for any number of ranks of each
  group and for any size of chunks
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.ppo.training.batch import RolloutColumns, row_columns
from rlhf_core.ppo.training.rank_rows import ExperienceInputs, RankBatch, experience_of_rank
from rlhf_core.ppo.update import Updater, make_experience
from tests.support.scripted_fleet import ScriptedFleet, ScriptedRank
from tests.unit.ppo.fleet.test_fleet import chunked

COUNT = 40
LENGTHS = np.random.default_rng(0).integers(1, 30, COUNT).tolist()
PPO = config_from_tree(
    {"ppo": {"prompts_per_step": COUNT, "minibatches": 2, "whiten_advantages": True, "lam": 0.9}}, "test"
).ppo


def numbers_of(name: str, response: int) -> Any:
    """Numbers that follow from the name and the response."""
    noise = np.random.default_rng([len(name), ord(name[0]), response])
    return noise.normal(-2, 0.5, LENGTHS[response]).astype(np.float32)


class _Rank(ScriptedRank):
    def __init__(self) -> None:
        super().__init__()
        self.returns: dict[int, bytes] = {}
        self.values_seen: dict[int, bytes] = {}

    def _columns(self, names: dict[str, str], batch: RankBatch) -> Any:
        responses = [int(response[0]) for response in batch.tokens()[1]]
        rows = {column: [numbers_of(name, i) for i in responses] for column, name in names.items()}
        return None, row_columns([LENGTHS[i] for i in responses], **rows)

    def logprobs(self, role: str, with_entropy: bool, share: Any, *chunks: RolloutColumns) -> Any:
        names = {"logprobs": role} | ({"entropy": "entropy"} if with_entropy else {})
        return self._columns(names, self.received(share, chunks))

    def values(self, share: Any, *chunks: RolloutColumns) -> Any:
        return self._columns({"values": "values"}, self.received(share, chunks))

    def make_experience(self, inputs: ExperienceInputs, *objects: Any) -> Any:
        experience, sums = experience_of_rank(self.received(inputs.batch, ()), inputs, objects, PPO)
        returns = experience.columns.values["returns"]
        return sums, type(experience.columns)(experience.columns.offsets, {"returns": returns})

    def update_policy(self, *_args: Any, **_options: Any) -> dict[str, float]:
        return {}

    def update_critic(self, inputs: Any, _exchange: Any, _steps: Any, _clip: bool, *objects: Any) -> Any:
        for row, tokens in enumerate(self.received(inputs.batch, ()).tokens()[1]):
            response = int(tokens[0])
            for seen, places, name in (
                (self.returns, inputs.returns, "returns"),
                (self.values_seen, inputs.values, "values"),
            ):
                place = places.take(np.array([row]))
                seen[response] = objects[int(place.objects[0])].row(name, int(place.rows[0])).tobytes()
        return {}


def made(rows: int, **ranks: int) -> tuple[Any, ...]:
    """Return the bits of the experience, with chunks of `rows` responses and these ranks for each role."""
    config = config_from_tree({"ppo": {"prompts_per_step": COUNT, "minibatches": 2}}, "test")
    actors: Any = {role: [_Rank() for _ in range(count)] for role, count in ranks.items()}
    fleet = ScriptedFleet(config, ranks=actors)
    batch = chunked(LENGTHS, rows)
    experience = make_experience(
        fleet,
        batch,
        old=fleet.logprobs("policy", batch, with_entropy=True),
        ref=fleet.logprobs("reference", batch, with_entropy=False),
        values=fleet.values(batch),
        scores=[float("nan") if i == 7 else i / 10 for i in range(COUNT)],
        ppo=PPO,
        kl_coef=0.1,
    )
    Updater(PPO, fleet, 0).update(batch, experience, 1, 0.1)
    returns: dict[int, bytes] = {}
    values: dict[int, bytes] = {}
    for rank in actors["critic"]:
        returns |= rank.returns
        values |= rank.values_seen
    assert values == {i: numbers_of("values", i).tobytes() for i in range(COUNT)}
    bits = {name: value.hex() for name, value in experience.metrics.items()}
    return bits, experience.kl_B.tobytes(), experience.whitening, sorted(returns.items())


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("policy", "reference", "critic"), [(1, 1, 1), (2, 2, 2), (3, 1, 2), (2, 3, 1)])
def test_ranks_and_chunks_do_not_change_a_bit(policy: int, reference: int, critic: int, rows: int) -> None:
    expected = made(COUNT, policy=1, reference=1, critic=1)
    assert made(rows, policy=policy, reference=reference, critic=critic) == expected
