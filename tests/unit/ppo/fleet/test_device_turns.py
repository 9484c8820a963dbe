"""Engines and trainers that use the devices in turns. Both are scripted; the states that DeepSpeed
moves are real.

- an engine that sleeps has no restarts
- engines sleep before the trainers load; in a step: weights, sync, states away, KV cache, sampling, sleep,
  states back, training
- the one that needs memory waits until the other one has given it back
- with level 0 nothing is called
- an evaluation takes turns in the same way, and the engines get the weights again after it
- training with states that were moved to host memory and back has the same bits, under ZeRO 2 and 3; a
  checkpoint may be written and weights may be sent while they are away
- settings that do not go with it are refused with a fix
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typing_extensions import override

from rlhf_core.cluster.rpc import Pending, RemoteActor
from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import load_config
from rlhf_core.config.placement import Group
from rlhf_core.config.training import DeepSpeedConfig, OptimizerConfig
from rlhf_core.engines.distributed import Rank, join, leave
from rlhf_core.engines.sync.sender import SyncReport
from rlhf_core.errors import WorkerDied
from rlhf_core.evaluation.during_ppo import HeldOutEvaluation
from rlhf_core.models.shape import known_shape
from rlhf_core.ops.plan.plan import fastest_settings
from rlhf_core.ops.plan.speed import step_time
from rlhf_core.planning.hardware import parse_gpus
from rlhf_core.planning.search import compare_memory
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.fleet.engine_actor import EngineActor
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.fleet.worker import ModelWorker
from rlhf_core.ppo.sampling.schedule import SynchronousRollouts
from rlhf_core.ppo.training.batch import RolloutBatch
from rlhf_core.ppo.watching.selection import OBJECTIVE, HeldOutResult, Selection
from rlhf_core.testing import RecordingMetrics
from tests.integration.deepspeed_memory import small_model, train
from tests.support.scripted_fleet import ScriptedFleet

SHARDED = {"zero_stage": 2, "ranks": 1}
TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
PRODUCTION = Path(__file__).parents[4] / "deployments" / "configs" / "production.yaml"


class _Actor:
    """Notes the calls when they are made; their results are there when they are waited for."""

    def __init__(self, name: str, done: list[str]) -> None:
        self._name, self._done = name, done

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Any:
            shown = " ".join([method, *(arg for arg in args if isinstance(arg, str) and arg in PARTS)])
            self._done.append(f"{self._name} {shown}")
            return SimpleNamespace(bytes=1, seconds=1.0, version=0, checksum="")

        return SimpleNamespace(remote=remote)


PARTS = ("weights", "kv_cache")


class Turns(ScriptedFleet):
    """A started fleet on GPUs, whose engines and trainers write down their calls.

    Args:
        level: `ppo.engine.sleep_level`.
    """

    def __init__(self, level: int) -> None:
        ppo = {
            "colocate": "all", "policy_deepspeed": SHARDED, "critic_deepspeed": SHARDED, "evaluate_every": 1,
            "engine": {"sleep_level": level},
        }  # fmt: skip
        self.done: list[str] = []
        self.broken: str | None = None
        """A wait whose description contains this fails."""
        super().__init__(PipelineConfig.model_validate({"ppo": ppo}), device="cuda")
        self._start_actors()

    @override
    def _start_rank(self, group: Group, rank: int) -> RemoteActor[ModelWorker]:
        return RemoteActor(_Actor("trainer", self.done))

    @override
    def _start_engine(self, index: int, starts_before: int) -> RemoteActor[EngineActor]:
        return RemoteActor(_Actor("engine", self.done))

    @override
    def _connect(self) -> None:
        """Do nothing: weights go nowhere."""

    @override
    def wait(self, pending: Sequence[Pending[Any]], what: str) -> list[Any]:
        if self.broken is not None and self.broken in what:
            raise WorkerDied(f"engine 0 has died, while waiting for {what}")
        self.done.append("wait")
        return [("127.0.0.1", 1) if "start" in what else call.reference for call in pending]

    @override
    def sync(self, version: int) -> SyncReport:
        # The real one, unlike that of `ScriptedFleet`.
        return Fleet.sync(self, version)


def calls(done: list[str]) -> list[str]:
    """Return the calls that matter, with `wait` where the next one is made after the one before has ended."""
    kept = [entry for entry in done if not any(word in entry for word in ("listen", "usage", "layout"))]
    done.clear()
    found: list[str] = []
    for entry in kept:
        if entry != "wait" or (found and found[-1].startswith(("engine", "trainer"))):
            found.append(entry)
    return found


def step(fleet: Fleet, done: list[str]) -> None:
    """The engines' part of a step of the controller, and its training."""
    controller: Any = PPOController.__new__(PPOController)
    controller._fleet, controller._ppo = fleet, fleet.settings.ppo
    controller.completed_steps = 0

    def collect(step: int, version: int) -> SimpleNamespace:
        done.append("sample")
        return SimpleNamespace(version=version)

    collector: Any = SimpleNamespace(collect=collect)
    controller._rollouts = SynchronousRollouts(fleet.settings.ppo, fleet, [], collector)
    fleet.sync(0)
    done.append("checkpoint")
    controller.collect()
    done.append("train")


def test_engines_and_trainers_take_turns() -> None:
    fleet = Turns(2)
    done = fleet.done
    assert calls(done) == ["engine start_engine", "wait", "engine sleep", "wait", "trainer load", "wait"]
    step(fleet, done)
    assert calls(done) == [
        "trainer release_cache", "wait", "engine wake weights", "wait", "trainer send_weights", "wait",
        "checkpoint",
        "trainer offload_states", "wait", "engine wake kv_cache", "wait", "sample",
        "engine sleep", "wait", "trainer reload_states", "wait", "train",
    ]  # fmt: skip


def test_without_sleep_nothing_is_called() -> None:
    fleet = Turns(0)
    done = fleet.done
    assert calls(done) == ["engine start_engine", "wait", "trainer load", "wait"]
    step(fleet, done)
    assert calls(done) == ["trainer send_weights", "wait", "checkpoint", "sample", "train"]


def test_an_engine_that_sleeps_is_not_restarted() -> None:
    """It would measure a device that the trainers use."""
    Turns(0).engines.mark_all_dead("the sync broke")
    with pytest.raises(WorkerDied, match="engine 0 is lost after 0 restarts"):
        Turns(2).engines.mark_all_dead("the sync broke")


class Evaluation(HeldOutEvaluation):
    """Writes down that it samples and measures. There are no scores."""

    def __init__(self, fleet: Turns) -> None:
        self._fleet, self._prompts, self._done = fleet, [], fleet.done
        collector: Any = SimpleNamespace(sample=lambda *_: fleet.done.append("sample"))
        self._collector = collector

    @override
    def _measure(self, batch: RolloutBatch) -> Any:
        self._done.append("measure")
        return {}, [], {}


def test_an_evaluation_takes_turns() -> None:
    fleet = Turns(2)
    calls(fleet.done)
    with pytest.raises(KeyError, match="score"):
        Evaluation(fleet).evaluate(0)
    assert calls(fleet.done) == [
        "trainer offload_states", "wait", "engine wake kv_cache", "wait", "sample",
        "engine sleep", "wait", "trainer reload_states", "wait", "measure",
    ]  # fmt: skip


@pytest.mark.parametrize("level", (0, 2))
def test_the_engines_get_the_weights_again_after_an_evaluation(level: int) -> None:
    fleet = Turns(level)
    controller: Any = PPOController.__new__(PPOController)
    controller._fleet, controller._ppo, controller._timings = fleet, fleet.settings.ppo, {}
    controller.completed_steps, controller.selection = 3, Selection(fleet.settings.ppo)
    found = HeldOutResult({OBJECTIVE: 1.0}, [1.0])
    controller._evaluation = SimpleNamespace(evaluate=lambda _: found)
    controller._utilisation = SimpleNamespace(begin=lambda: None, sync_metrics=lambda _: {})
    controller._context = SimpleNamespace(metrics=RecordingMetrics())
    calls(fleet.done)
    controller._evaluate()
    assert ("trainer send_weights" in calls(fleet.done)) == (level > 0)


def test_an_engine_that_does_not_wake_ends_the_sync() -> None:
    fleet = Turns(1)
    fleet.broken = "weights"
    with pytest.raises(WorkerDied, match="weights"):
        fleet.sync(1)
    assert not any("send_weights" in entry for entry in fleet.done)


# -- states --


@pytest.fixture(scope="module")
def rank() -> Iterator[Rank]:
    alone = Rank()
    join(alone)
    yield alone
    leave()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_states_moved_to_host_memory_train_to_the_same_bits(stage: Any, rank: Rank, tmp_path: Any) -> None:
    from rlhf_core.engines.deepspeed import TrainingEngine, offload_states, reload_states

    found = []
    for moves in (False, True):
        model = small_model("bfloat16", "cpu", **TINY)
        settings = DeepSpeedConfig(zero_stage=stage, dtype="bfloat16")
        engine = TrainingEngine(model, settings, OptimizerConfig(learning_rate=1e-3), rank)
        for lengths in ((32, 16), (16, 24)):
            train(engine, lengths, 1)
            if moves:
                offload_states(engine.engine)
                sent = {name: tensor.clone() for name, tensor in engine.weights()}
                engine.save_checkpoint(tmp_path / f"{lengths}")
                reload_states(engine.engine)
                assert all(torch.equal(sent[name], tensor) for name, tensor in engine.weights())
        found.append({name: tensor.clone() for name, tensor in engine.weights()})
        engine.close()
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# -- configuration and plan --


@pytest.mark.parametrize(
    ("ppo", "words"),
    [
        ({"colocate": "pairs"}, "use ppo.colocate=all"),
        ({"policy_deepspeed": {"zero_stage": 0}}, "zero_stage of at least 1"),
        ({"critic_deepspeed": {"zero_stage": 1, "offload": "optimizer"}}, "no offload"),
        ({"algorithm": "grpo", "samples_per_prompt": 2, "dynamic_filtering": {}}, "ppo.dynamic_filtering"),
        ({"lora": {"r": 8}, "weight_sync": {"lora": "adapter"}}, "use ppo.engine.sleep_level=1"),
    ],
)
def test_settings_that_do_not_go_with_sleep_are_refused(ppo: dict[str, Any], words: str) -> None:
    base = {
        "colocate": "all", "policy_deepspeed": SHARDED, "critic_deepspeed": SHARDED,
        "engine": {"sleep_level": 2},
    }  # fmt: skip
    PipelineConfig.model_validate({"ppo": base})
    with pytest.raises(ValueError, match=r"ppo\.engine\.sleep_level=2") as refused:
        PipelineConfig.model_validate({"ppo": {**base, **ppo}})
    assert words in str(refused.value)


def test_the_plan_counts_each_phase_and_finds_faster_settings() -> None:
    shape = known_shape("llama-3-8b")
    assert shape is not None
    hardware = parse_gpus("8xA100-80G")
    loads, seconds = {}, {}
    for level in (0, 1, 2):
        changes = [f"ppo.engine.sleep_level={level}", "ppo.engine.gpu_memory_utilization=0.7"]
        config = load_config(PRODUCTION, changes)
        verdict = compare_memory(config, shape, hardware)
        loads[level] = {load.phase: load for load in verdict.loads if load.stage == "ppo"}
        seconds[level] = step_time(config, shape, hardware)
        assert any(problem.stage == "ppo" for problem in verdict.problems) is (level == 0)
    assert set(loads[2]) == {"load", "score", "backward", "step", "sync", "rollout"}
    weights = 2 * shape.parameters
    # By hand: a sleeping engine has no weights and no cache; in a sync it has its weights.
    assert loads[2]["backward"].engine.weights == loads[2]["backward"].engine.cache == 0
    assert loads[2]["sync"].engine.weights == weights and loads[2]["sync"].engine.cache == 0
    assert loads[2]["rollout"].engine.cache > 20 * 2**30
    # ZeRO-3 of policy and critic: 8 of 12 bytes of a trained parameter move, and 2 of gradients and a bucket.
    moved = loads[2]["sync"].trainer.total - loads[2]["rollout"].trainer.total
    assert moved > (8 + 2) * 2 * 7.5e9 / 8
    assert loads[1]["rollout"].host == pytest.approx(loads[2]["rollout"].host + weights)
    assert seconds[2].sync - seconds[0].sync == pytest.approx(2 * moved / 12e9)
    assert seconds[1].sync > seconds[2].sync
    least, _ = fastest_settings(config, (), shape, hardware)["ppo"][0]
    assert least < seconds[0].total
