"""`rlhf tune` with finished stages and scripted steps of PPO.

- candidates are the configuration, one engine for each core whatever `run.threads` is, and both with
  staleness; none that is refused or is the configuration already
- on GPUs they are the fastest settings of the plan, each with another placement; the measured fastest is
  written, also if the plan's is another
- the fastest candidate is written with the user's overrides; an existing file is never overwritten
- a candidate that fails is left out; if none runs, nothing is written
- the table shows problems and overrides without markup
- the first step is not counted, and with staleness the last one is not either
- all stages that PPO reads are made before, and it gets the length limits of their data
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from rlhf_cli.before import _table
from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import Limits
from rlhf_core.config.keys import stage_inputs
from rlhf_core.config.load import load_config
from rlhf_core.errors import InfrastructureError, InputError
from rlhf_core.ops.tune import Trial, Tuned, candidates, tune
from rlhf_core.pipeline import StageName
from rlhf_core.run.pipeline_run import PipelineRun
from rlhf_core.storage.artifacts import Provenance
from rlhf_core.types import ArtifactRef, StageContext
from tests.support.scripted_machine import ScriptedMachine, on_machine

LIMITS = Limits(prompt=20, response=30, text=40, new=30)
PHASES = ("rollout", "scoring", "training", "sync")


@pytest.fixture
def file(tmp_path: Path, database: Path) -> Iterator[Path]:
    """A configuration, on a machine with two cores."""
    path = tmp_path / "c.yaml"
    path.write_text(
        f"run: {{home: {tmp_path / 'home'}, device: cpu, threads: 1}}\n"
        f"tracking: {{uri: 'sqlite:///{database}'}}\n"
        "ppo: {prompts_per_step: 8, minibatches: 2}\n"
    )
    with on_machine(ScriptedMachine(cores=2)):
        yield path


def found(file: Path, *overrides: str) -> list[tuple[str, ...]]:
    return candidates(load_config(file, overrides), file, overrides)


def test_on_cpus_candidates_have_more_engines_and_staleness_where_allowed(file: Path) -> None:
    stale, engines = "ppo.staleness=1", "ppo.engine.count=2"
    assert found(file) == [(), (engines,), (stale,), (engines, stale)]
    assert found(file, engines) == [(), (stale,)]
    assert found(file, stale) == [(), (engines,)]
    assert found(file, "ppo.colocate=all") == [()]


def test_the_demo_is_tried_with_an_engine_for_each_core(file: Path) -> None:
    demo = Path("deployments/configs/demo.yaml")
    assert ("ppo.engine.count=2",) in candidates(load_config(demo), demo, [])


def test_several_placements_of_the_plan_are_measured_on_gpus(file: Path, tmp_path: Path) -> None:
    measured: list[PipelineConfig] = []

    def train(config: PipelineConfig, context: StageContext) -> None:
        measured.append(config)
        # The third one is the fastest, which is the second of the plan.
        seconds = 1.0 if len(measured) == 3 else 2.0
        for step in range(1, config.ppo.steps + 1):
            context.metrics.log_metrics({"timing/step": seconds}, step)

    with on_machine(ScriptedMachine(cores=16, gpus=["NVIDIA H100 80GB HBM3"] * 8)):
        overrides = ("run.device=cuda", "ppo.staleness=1", "ppo.engine.count=1")
        publish_inputs(load_config(file, overrides))
        split, *others = [each for each in found(file, *overrides) if each]
        assert 1 <= len(others) <= 2
        out = tmp_path / "tuned.yaml"
        tuned = tune(file, overrides, out, train)
        assert [trial.changes for trial in tuned.trials] == [(), split, *others]
        layouts = {
            (ppo.policy_deepspeed.ranks, ppo.critic_deepspeed.ranks, ppo.engine.count)
            for ppo in (config.ppo for config in measured[1:])
        }
        assert len(layouts) == 1 + len(others)
        assert tuned.best.changes == others[0]
        assert load_config(out) == load_config(file, [*overrides, *others[0]])


def publish_inputs(config: PipelineConfig) -> None:
    """Publish the artifacts that PPO reads, as finished stages do."""
    run = PipelineRun(config, "")
    made: dict[StageName, ArtifactRef] = {}
    for stage in stage_inputs(config, "ppo"):
        out = Path(config.run.home) / "out" / stage
        out.mkdir(parents=True)
        (out / "file").write_text(stage)
        (out / "data_card.json").write_text(json.dumps({"limits": LIMITS._asdict()}))
        made[stage] = run.artifacts.publish(stage, run.spec(stage, made).key, out, Provenance())


class Steps:
    """Steps of PPO that take these seconds, for each candidate. The earlier stages are finished."""

    def __init__(self, file: Path, **seconds: list[float]) -> None:
        self._seconds = seconds
        self.steps: list[int] = []
        publish_inputs(load_config(file))

    def train(self, config: PipelineConfig, context: StageContext) -> None:
        assert {name: (folder / "file").read_text() for name, folder in context.inputs.items()} == {
            "data": "data", "sft": "sft", "reward": "reward"
        }  # fmt: skip
        ppo = config.ppo
        self.steps.append(ppo.steps)
        seconds = self._seconds[f"e{ppo.engine.count}s{ppo.staleness}"]
        for step, value in enumerate(seconds, start=1):
            context.metrics.log_metrics({"timing/step": value, "timing/rollout": value / 2}, step)
        if len(seconds) < ppo.steps:
            raise InfrastructureError("too little memory")


def test_the_fastest_candidate_is_written(file: Path, tmp_path: Path) -> None:
    stages = Steps(
        file,
        e1s0=[0.1, 5, 6, 7], e1s1=[9, 2, 3, 4, 0.1], e2s0=[1, 1], e2s1=[1, 4, 4, 4, 4],
    )  # fmt: skip
    out = tmp_path / "tuned.yaml"
    tuned = tune(file, ["ppo.minibatches=4"], out, stages.train)
    assert stages.steps == [4, 4, 5, 5]
    assert [trial.seconds for trial in tuned.trials] == [6, None, 3, 4]
    assert tuned.trials[1].problem == "too little memory"
    assert tuned.best.changes == ("ppo.staleness=1",) and tuned.best.phases["rollout"] == 1.5
    written = load_config(out)
    assert written == load_config(file, ["ppo.minibatches=4", "ppo.staleness=1"])
    with pytest.raises(InputError, match=r"--out: must be a new file; got .*tuned\.yaml"):
        tune(file, [], out)


def test_with_more_staleness_whole_groups_of_steps_count(file: Path, tmp_path: Path) -> None:
    seconds = {f"{name}s2": [9, 9, 1, 3, 2, 6, 0.1, 0.1] for name in ("e1", "e2")}
    stages = Steps(file, **seconds)
    tuned = tune(file, ["ppo.staleness=2"], tmp_path / "tuned.yaml", stages.train)
    assert stages.steps == [8, 8]
    assert [trial.seconds for trial in tuned.trials] == [3, 3], "the median of 2 and 4"


def test_nothing_is_written_if_no_candidate_runs(file: Path, tmp_path: Path) -> None:
    stages = Steps(file, e1s0=[1], e1s1=[1], e2s0=[1], e2s1=[1])
    out = tmp_path / "tuned.yaml"
    with pytest.raises(InputError, match="no candidate of ppo runs; as configured: too little memory"):
        tune(file, [], out, stages.train)
    assert not out.exists()


def test_all_stages_that_ppo_reads_are_made_before(file: Path, tmp_path: Path) -> None:
    publish_inputs(load_config(file, ["reward.judge={}"]))
    read: list[set[str]] = []

    def train(config: PipelineConfig, context: StageContext) -> None:
        read.append(set(context.inputs))
        raise InfrastructureError("enough")

    with pytest.raises(InputError, match="enough"):
        tune(file, ["reward.judge={}"], tmp_path / "tuned.yaml", train)
    assert all(names == {"data", "sft", "reward", "judge"} for names in read)


def test_ppo_gets_the_length_limits_of_its_data(file: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text("".join(f'{{"prompt": "Say {i}."}}\n' for i in range(40)))
    own = f"[{{path: {tmp_path / 'own.jsonl'}}}]"
    overrides = [f"data.prompts={own}", "data.sft=[{path: synthetic}]", "data.preference=[{path: synthetic}]"]
    publish_inputs(load_config(file, overrides))
    limits = []

    def train(config: PipelineConfig, context: StageContext) -> None:
        limits.append(config.limits)
        raise InfrastructureError("enough")

    with pytest.raises(InputError, match="enough"):
        tune(file, overrides, tmp_path / "tuned.yaml", train)
    assert set(limits) == {LIMITS}


def test_the_table_has_no_markup() -> None:
    trials = (Trial(("a=[b]",), None, {}, "no [/x] in [red]"), Trial((), 1.0, dict.fromkeys(PHASES, 0.25)))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(_table(Tuned(trials, trials[1], Path("tuned.yaml"))))
    shown = console.export_text()
    assert "a=[b]" in shown and "no [/x] in [red]" in shown
    assert "as configured" in shown and "0.250" in shown
