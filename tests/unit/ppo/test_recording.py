"""The record of a PPO run with scripted engines and models; experience and rewards are computed as on real
ranks.

- each row has what engine, models and rewards said of this response
- the record of a run that is killed at any moment and continues is that of an undisturbed run, also with
  staleness and with filtering
- a group that filtering replaced is kept, with its rewards and the reason
- the levels have the columns that they name; without the record, metrics and updates are the same
- what the limit leaves out does not depend on kills, also if the first step is too large
- once the record is full, nothing is fetched or computed for it
- a table of samples has the responses with their exact scores and KL, with and without a record
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from typing_extensions import override

from rlhf_core.config.load import config_from_tree
from rlhf_core.config.pipeline import RecordConfig, RecordLevel
from rlhf_core.ppo import controller as controller_module
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.training.batch import RolloutColumns, RowColumns, row_columns
from rlhf_core.ppo.training.rank_rows import ExperienceInputs
from rlhf_core.record.reader import read_rollouts
from rlhf_core.record.schema import COLUMNS, includes
from rlhf_core.record.writer import RecordWriter
from rlhf_core.rewards.compose import RewardComposer
from rlhf_core.testing import RecordingMetrics, stage_context
from rlhf_core.testing.engines import Reply, Request, ScriptedEngine
from rlhf_core.testing.trainer import ScriptedTrainer
from rlhf_core.types import PromptExample
from tests.support.scripted_fleet import ScriptedEngineActor, ScriptedFleet, ScriptedRank

PROMPTS = [PromptExample(f"p{i}", f"question {i}", (1, i), {}, "ab"[i % 2]) for i in range(10)]
STEPS = 5
PPO: dict[str, Any] = {
    "prompts_per_step": 4, "minibatches": 2, "steps": STEPS, "checkpoint_every": 2, "evaluate_every": 0,
    "publish": "last", "weight_sync": {"canary": False}, "score_clip": None, "missing_eos_penalty": 0.25,
    "max_kl": 1e6,
    "rewards": [
        {"type": "token_share", "below": 50, "weight": 2.0},
        {"type": "length", "target": 4, "tolerance": 3, "normalize": "batch"},
    ],
}  # fmt: skip
GRPO = {"algorithm": "grpo", "samples_per_prompt": 2}


def numbers(name: str, tokens: Sequence[int], version: int = 0) -> np.ndarray[Any, Any]:
    """Numbers that follow from the name and the response."""
    seed = hashlib.sha256(repr((name, list(tokens), version)).encode()).digest()[:8]
    noise = np.random.default_rng(int.from_bytes(seed, "big"))
    return noise.normal(-1, 0.1, len(tokens)).astype(np.float32)


def respond(request: Request) -> Reply:
    noise = np.random.default_rng([request.seed, request.sample_index])
    # Some groups have equal rewards.
    length = 3 if request.seed % 3 == 0 else int(noise.integers(1, 9))
    low = 0 if request.seed % 3 else 60
    return Reply(tuple(noise.integers(low, 100, length).tolist()), finished=length != 3)


class Models(ScriptedRank):
    """A rank whose models answer with `numbers`."""

    trained = 0
    kept = 0
    """Experiences whose advantages were returned."""

    @override
    def make_experience(self, inputs: ExperienceInputs, *objects: RowColumns) -> Any:
        self.kept += inputs.keep_advantages
        return super().make_experience(inputs, *objects)

    def _columns(self, names: dict[str, str], share: Any, chunks: Sequence[RolloutColumns]) -> Any:
        _, responses = self.received(share, chunks).tokens()
        rows = {
            column: [numbers(name, response.tolist(), self.trained) for response in responses]
            for column, name in names.items()
        }
        return None, row_columns([len(response) for response in responses], **rows)

    @override
    def logprobs(self, role: Any, with_entropy: bool, share: Any, *chunks: RolloutColumns) -> Any:
        names = {"logprobs": role} | ({"entropy": "entropy"} if with_entropy else {})
        return self._columns(names, share, chunks)

    @override
    def values(self, share: Any, *chunks: RolloutColumns) -> Any:
        return self._columns({"values": "values"}, share, chunks)

    @override
    def update_policy(self, *_given: Any, **_options: Any) -> dict[str, float]:
        self.trained += 1
        return {"loss": float(self.trained)}

    @override
    def update_critic(self, *_given: Any) -> dict[str, float]:
        self.trained += 1
        return {}

    @override
    def load_checkpoint(self, role: Any, folder: str, scratch: str) -> None:
        self.trained = int(Path(folder).parent.name.removeprefix("step-"))


class CountingFleet(ScriptedFleet):
    """Counts the results that the controller waits for, by their names."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.waits: Counter[str] = Counter()

    @override
    def wait(self, pending: Any, what: str) -> Any:
        self.waits[what] += len(pending)
        return super().wait(pending, what)


class Killed(BaseException):
    """Ends an attempt as a kill does: nothing is saved."""


@dataclass
class Run:
    """The attempts of a stage.

    Args:
        folder: Of checkpoints and outputs.
        level: Of the record; None for a run without.
        ppo: Section `ppo`.
        max_bytes: Of the record.
    """

    folder: Path
    level: RecordLevel | None = "logprobs"
    ppo: dict[str, Any] = field(default_factory=dict)
    max_bytes: int = 10**9
    attempts: int = 0

    def __post_init__(self) -> None:
        self.metrics = RecordingMetrics()
        self.work: Counter[str] = Counter()
        """What the controller waited for in the last attempt, and `kept` of the policy's rank."""

    def attempt(self) -> pa.Table | None:
        """Run the remaining steps. Return the record."""
        self.attempts += 1
        config = config_from_tree({"ppo": PPO | self.ppo}, "test")
        roles: Any = ("policy", "reference", "critic") if config.ppo.uses_critic else ("policy", "reference")
        fleet = CountingFleet(
            config,
            ranks={role: [Models({role: ScriptedTrainer()}, config)] for role in roles},
            engines=[ScriptedEngineActor(ScriptedEngine(respond)) for _ in range(2)],
        )
        context = stage_context(self.folder, metrics=self.metrics)
        record = None
        if self.level is not None:
            parts = self.folder / f"parts-{self.attempts}"
            record = RecordWriter(parts, "ppo", RecordConfig(level=self.level, max_bytes=self.max_bytes))
        with fleet, RewardComposer(config.ppo.rewards) as composer:
            fleet.sync(0)
            made = PPOController(
                fleet, PROMPTS, lambda ids: " ".join(map(str, ids)), composer, context, record=record
            )
            made.run()
            [policy] = fleet._ranks["policy"]
            assert isinstance(policy, Models)
            self.work = fleet.waits + Counter(kept=policy.kept)
            output = self.folder / f"output-{self.attempts}"
            made.save_record(output)
        return read_rollouts(output) if list(output.glob("record/*")) else None


def undisturbed(folder: Path, level: RecordLevel = "logprobs", ppo: dict[str, Any] | None = None) -> pa.Table:
    return Run(folder, level, ppo or {}).attempt()


def test_a_row_has_what_was_said_of_its_response(tmp_path: Path) -> None:
    table = undisturbed(tmp_path, "all")
    assert table.num_rows == STEPS * 4
    rows = table.to_pylist()
    assert [(row["step"], row["index"]) for row in rows] == [(s, i) for s in range(1, 6) for i in range(4)]
    for row in rows:
        response, version = row["response_ids"], row["step"] - 1
        assert row["prompt_id"] == f"p{row['prompt_ids'][1]}" and row["group"] == row["index"]
        prompt = PROMPTS[row["prompt_ids"][1]]
        assert row["source"] == prompt.source
        reply = respond(Request(prompt, 0, row["seed"], 1.0, 64, Path(), None))
        assert (tuple(response), row["finished"]) == (tuple(reply.token_ids), reply.finished)
        assert (row["policy_version"], row["excluded"], row["ensemble_std"]) == (version, None, None)
        assert row["rollout_logprobs"] == [0.0] * len(response)
        assert row["old_logprobs"] == numbers("policy", response, version).tolist()
        assert row["ref_logprobs"] == numbers("reference", response).tolist()
        assert row["values"] == numbers("values", response, version).tolist()
        assert row["new_logprobs"] == numbers("policy", response, version + 1).tolist()
        kl = np.float64(row["old_logprobs"]) - np.float64(row["ref_logprobs"])
        assert row["kl"] == pytest.approx(kl.sum(), abs=1e-5)
        share = sum(token < 50 for token in response) / len(response)
        assert row["reward/token_share"] == pytest.approx(share)
        assert row["weighted/token_share"] == pytest.approx(2 * row["reward/token_share"])
        weighted = row["weighted/token_share"] + row["weighted/length"]
        assert row["total"] == pytest.approx(weighted, abs=1e-6)
        assert row["score"] == pytest.approx(row["total"] - 0.25 * (not row["finished"]), abs=1e-6)
    assert any(not row["finished"] for row in rows)
    first = [row for row in rows if row["step"] == 1]
    assert sum(row["weighted/length"] for row in first) == pytest.approx(0.0, abs=1e-6), "normalised"
    advantages = np.concatenate([row["advantages"] for row in first])
    assert advantages.mean() == pytest.approx(0.0, abs=1e-5), "whitened over the batch"


def moments(run: Run, monkeypatch: pytest.MonkeyPatch, kill: int | None) -> int:
    """Have `run` killed at a moment, counted from 0. Return the number of moments that were passed."""
    passed = 0

    def failpoint(name: str, *_acts: str) -> None:
        nonlocal passed
        passed += 1
        if passed - 1 == kill:
            raise Killed(name)

    monkeypatch.setattr(controller_module, "failpoint", failpoint)
    run.attempt()
    return passed


@pytest.mark.parametrize(
    "ppo",
    [{}, {"staleness": 1}, GRPO | {"dynamic_filtering": {"max_rounds": 2}},
     GRPO | {"dynamic_filtering": {"max_rounds": 2}, "staleness": 1}],
    ids=["synchronous", "staleness", "filtering", "filtering and staleness"],
)  # fmt: skip
def test_a_kill_at_any_moment_does_not_change_the_record(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ppo: dict[str, Any],
    sampled: Callable[[Sequence[int], int], list[int]],
) -> None:
    expected = undisturbed(tmp_path / "undisturbed", ppo=ppo)
    count = moments(Run(tmp_path / "counted", ppo=ppo), monkeypatch, None)
    assert count > 20
    for moment in sampled(range(count), 4):
        run = Run(tmp_path / str(moment), ppo=ppo)
        with pytest.raises(Killed):
            moments(run, monkeypatch, moment)
        found = run.attempt()
        assert found is not None
        # As text: NaN is not equal to itself.
        assert repr(found.to_pylist()) == repr(expected.to_pylist()), f"killed at moment {moment}"


def test_a_kill_records_nothing_if_the_first_step_was_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampled: Callable[[Sequence[int], int], list[int]]
) -> None:
    ppo = {"prompts_per_step": 2}
    recorded = undisturbed(tmp_path / "whole", ppo=ppo)
    # The last step has fewer tokens than the first, and the last checkpoint is before it.
    limit = recorded.filter(pc.field("step") == STEPS).nbytes
    count = moments(Run(tmp_path / "counted", ppo=ppo, max_bytes=limit), monkeypatch, None)
    for moment in sampled(range(count), 4):
        run = Run(tmp_path / str(moment), ppo=ppo, max_bytes=limit)
        with pytest.raises(Killed):
            moments(run, monkeypatch, moment)
        assert run.attempt() is None, f"killed at moment {moment}"


def test_replaced_groups_are_kept(tmp_path: Path) -> None:
    table = undisturbed(tmp_path, ppo=GRPO | {"dynamic_filtering": {"max_rounds": 2}})
    rows = [row for row in table.to_pylist() if row["step"] == 2]
    trained, filtered = rows[:8], rows[8:]
    assert [row["index"] for row in rows] == list(range(len(rows)))
    assert [row["group"] for row in rows] == [index // 2 for index in range(len(rows))]
    assert filtered and {row["excluded"] for row in filtered} == {"filtered"}
    assert {row["excluded"] for row in trained} == {None}
    for row, other in zip(filtered[::2], filtered[1::2], strict=True):
        assert (row["group"], row["score"], row["seed"]) == (other["group"], other["score"], other["seed"])
        assert row["reward/token_share"] == 0.0 and row["kl"] is None and row["old_logprobs"] is None
        assert len(row["rollout_logprobs"]) == len(row["response_ids"]) == 3


def test_levels_have_their_columns_and_change_nothing(tmp_path: Path) -> None:
    def logged(run: Run) -> list[dict[str, float]]:
        """Return what each step logs, without what depends on the speed of the machine."""
        rows = [row for _, row in run.metrics.rows if "objective/kl" in row]
        timed = ("timing/", "rollout/tokens_per_s", "utilisation/", "sync/")
        return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]

    without = Run(tmp_path / "none", None)
    assert without.attempt() is None
    assert len(logged(without)) == STEPS
    levels: tuple[RecordLevel, ...] = ("rewards", "logprobs", "all")
    for level in levels:
        run = Run(tmp_path / level, level)
        table = run.attempt()
        assert table is not None
        rewards = [f"{kind}/{name}" for name in ("token_share", "length") for kind in ("reward", "weighted")]
        names = [column.name for column in COLUMNS if includes(level, column.level)]
        assert table.column_names == names + rewards
        assert logged(run) == logged(without)


def test_a_full_record_costs_nothing(tmp_path: Path) -> None:
    def work_of_record(steps: int, max_bytes: int) -> Counter[str]:
        """Return what the record of a run adds to its work."""
        without = Run(tmp_path / f"none-{steps}-{max_bytes}", None, {"steps": steps})
        full = Run(tmp_path / f"full-{steps}-{max_bytes}", "all", {"steps": steps}, max_bytes)
        without.attempt()
        full.attempt()
        return full.work - without.work

    first = work_of_record(1, 1)
    assert first["kept"] == 1 and first["rollouts"] and first["policy.logprobs"]
    assert work_of_record(STEPS, 1) == first
    assert work_of_record(STEPS, 10**9) == Counter({name: STEPS * n for name, n in first.items()})


@pytest.mark.parametrize("level", [None, "rewards"])
def test_a_table_of_samples_has_exact_numbers(tmp_path: Path, level: RecordLevel | None) -> None:
    run = Run(tmp_path, level)
    run.attempt()
    rows = run.metrics.tables["samples/step_000001"]
    assert len(rows) == 4
    for row in rows:
        assert list(row) == ["step", "prompt", "response", "score", "kl", "tokens", "finished"]
        response = [int(token) for token in row["response"].split()]
        assert row["tokens"] == len(response)
        old, ref = np.float64(numbers("policy", response)), np.float64(numbers("reference", response))
        assert row["kl"] == (old - ref).sum()


def test_without_a_critic_there_are_no_values_and_no_returns(tmp_path: Path) -> None:
    rows = undisturbed(tmp_path, "all", GRPO).to_pylist()
    assert {(row["values"], row["returns"]) for row in rows} == {(None, None)}
    assert all(len(row["advantages"]) == len(row["new_logprobs"]) for row in rows)
