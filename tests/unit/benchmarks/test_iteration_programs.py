"""The programs of one PPO iteration, with scripted engines and trainers, and their comparison.

- each ends with its seconds, and those of TRL and of the bare loops have the form that the comparison reads
- all have the same shapes
- the comparison runs each case once in each round, with options that the programs know, and ends with its
  tables and file

TRL is replaced, so that its own options are not checked.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.benchmarks import comparison, ppo_iteration, ppo_iteration_bare
from tests.benchmarks.ppo_iteration import PHASES

PROMPTS, PROMPT, RESPONSE = 8, 6, 4


class LLM:
    """Samples random tokens in place of vLLM."""

    def __init__(self, model: str, **options: Any) -> None:
        from vllm.engine.arg_utils import EngineArgs

        EngineArgs(model, **options)  # raises TypeError for what vLLM does not know

    def generate(self, prompts: Sequence[Any], params: Any, use_tqdm: bool) -> list[Any]:
        def output(prompt: Any) -> SimpleNamespace:
            assert len(prompt["prompt_token_ids"]) == PROMPT
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * params.max_tokens)])

        return [output(prompt) for prompt in prompts]


def use_processor(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Trainer:
    """Stands for TRL's trainer: it scores the prompts with its reward model, and ends each step."""

    def __init__(
        self, *, args: Any, reward_model: Any, train_dataset: Any, callbacks: Any, **_rest: Any
    ) -> None:
        self._steps = args.total_episodes // (args.per_device_train_batch_size * 4)
        self._rewards, self._rows, self._callbacks = reward_model, train_dataset, callbacks

    def train(self) -> None:
        assert len(self._rows) >= self._steps * 64
        low = torch.full((1, 128), 5)
        [hidden] = self._rewards.backbone(low).hidden_states
        # Tokens of the prompt do not count.
        assert self._rewards.score(hidden)[0, [63, 95, 127], 0].tolist() == [0.0, 0.5, 1.0]
        for _ in range(self._steps):
            use_processor(0.01)
            for callback in self._callbacks:
                callback.on_step_end()


@pytest.fixture
def scripted_vllm(monkeypatch: pytest.MonkeyPatch, tiny_model: None) -> None:
    """Let the bare loops train on short responses of a scripted engine."""
    monkeypatch.setattr("vllm.LLM", LLM)
    for name, value in (("PROMPTS", PROMPTS), ("PROMPT", PROMPT), ("RESPONSE", RESPONSE)):
        monkeypatch.setattr(ppo_iteration_bare, name, value)


@pytest.fixture
def trl_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The program of TRL's iteration, with a scripted TRL, which is not in this environment."""
    name = "tests.benchmarks.ppo_iteration_trl"
    trl = ModuleType("trl.experimental.ppo")
    vars(trl).update(PPOConfig=SimpleNamespace, PPOTrainer=Trainer)
    for package in ("trl", "trl.experimental"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, trl.__name__, trl)
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    del sys.modules[name]


def measured(row: dict[str, float]) -> dict[str, Any]:
    others = ("rollout/tokens_per_s", "sync/gb_per_s", "rollout/logprob_gap_mean")
    return ppo_iteration._summary([row | dict.fromkeys(others, 1.0)], [2**30])


def scripted_run(
    iterations: int, warm_up: int, work: Path, staleness: int = 0, dtype: str = "float32"
) -> dict[str, Any]:
    """Return the result of an iteration of 4 s in float32 and 2 s in bfloat16."""
    seconds = {"float32": 1.0, "bfloat16": 0.5}[dtype]
    row = {f"timing/{phase}": seconds for phase in PHASES} | {"timing/step": 4 * seconds}
    if not staleness:
        row |= {f"cpu/{phase}": 2 * seconds for phase in PHASES}
    return measured(row)


def test_the_iteration_ends_with_its_table_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ppo_iteration, "run", scripted_run)
    out = tmp_path / "new" / "iteration.json"
    ppo_iteration.main(["--out", str(out)])
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == f"json: {out}"
    assert "│ whole │ 4.000 │ 8.000 │" in " ".join(shown.split())
    assert json.loads(out.read_text())["ppo_iteration"]["seconds"] == 4.0
    ppo_iteration.main(["--out", str(out), "--staleness", "1"])
    assert "│ whole │ 4.000 │ │" in " ".join(capsys.readouterr().out.split()), "CPU seconds are not measured"


@pytest.mark.parametrize("option", ["--iterations", "--warm-up"])
def test_no_iteration_is_counted_before_the_processes_were_measured_once(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ppo_iteration.main([option, "0"])
    assert f"{option}: must be a whole number of at least 1; got '0'" in capsys.readouterr().err


@pytest.mark.usefixtures("scripted_vllm")
def test_the_bare_loops_end_with_the_parts_of_their_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    ppo_iteration_bare.main(["--iterations", "2", "--warm-up", "0", "--threads", "1"])
    *_, seconds, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert seconds == f"seconds: {found['seconds']:.3f}  CPU seconds: {found['cpu_seconds']:.3f}"
    assert set(found["parts"]) == set(PHASES) - {"sync"}
    assert all(part["seconds"] > 0 and part["cpu_seconds"] > 0 for part in found["parts"].values())


@pytest.mark.usefixtures("scripted_vllm")
def test_the_bare_loops_train_both_models(tmp_path: Path) -> None:
    from tests.support.tiny_llama import save_tiny_benchmark_model

    iteration = ppo_iteration_bare.Iteration(save_tiny_benchmark_model(tmp_path))
    before = [next(model.parameters()).detach().clone() for model in (iteration.policy, iteration.critic)]
    iteration.rollout()
    assert iteration.ids.shape == (PROMPTS, PROMPT + RESPONSE)
    iteration.scoring()
    iteration.training()
    after = [next(model.parameters()) for model in (iteration.policy, iteration.critic)]
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_the_iteration_of_trl_has_the_same_shapes_and_ends_with_its_seconds(
    trl_program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("VOCABULARY", "PROMPT", "RESPONSE", "PROMPTS"):
        assert getattr(trl_program, name) == getattr(ppo_iteration, name), name
    trl_program.main(["--iterations", "2", "--warm-up", "1"])
    *_, count, seconds = capsys.readouterr().out.splitlines()
    assert count == "iterations: 2"
    assert seconds.startswith("seconds: ") and "  CPU seconds: " in seconds


@contextmanager
def programs_in_this_process(
    monkeypatch: pytest.MonkeyPatch, trl: Callable[..., None]
) -> Iterator[list[list[str]]]:
    """Let the comparison call the real `main` of each program. Yields the arguments of the calls."""
    called: list[list[str]] = []
    mains = {
        "tests.benchmarks.ppo_iteration": ppo_iteration.main,
        "tests.benchmarks.ppo_iteration_bare": ppo_iteration_bare.main,
        "ppo_iteration_trl.py": trl,
    }

    def run(command: Sequence[Any], **_options: Any) -> SimpleNamespace:
        words = [str(word) for word in command]
        position = 2 if words[1] == "-m" else 1
        name = Path(words[position]).name
        called.append([name, *words[position + 1 :]])
        with redirect_stdout(io.StringIO()) as output:
            mains[name](words[position + 1 :])
        return SimpleNamespace(stdout=output.getvalue())

    monkeypatch.setattr(comparison, "subprocess", SimpleNamespace(run=run, DEVNULL=None))
    yield called


class BareIteration:
    """Parts of a bare iteration that take time and compute nothing."""

    def __init__(self, folder: Path) -> None:
        assert (folder / "config.json").exists()

    def rollout(self) -> None:
        use_processor(0.002)

    scoring = training = rollout


@pytest.mark.usefixtures("tiny_model")
@pytest.mark.parametrize("with_trl", [True, False])
def test_the_comparison_ends_with_its_tables_and_file(
    with_trl: bool,
    trl_program: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ppo_iteration, "run", scripted_run)
    monkeypatch.setattr(ppo_iteration_bare, "Iteration", BareIteration)
    monkeypatch.setattr(comparison, "products", lambda *_shape: {"float32": 100.0})
    out = tmp_path / "new" / "comparison.json"
    options = ["--trl", "trl-env/bin/python"] if with_trl else []
    with programs_in_this_process(monkeypatch, trl_program.main) as called:
        comparison.main([*options, "--rounds", "2", "--iterations", "1", "--out", str(out)])
    names = ["tests.benchmarks.ppo_iteration"] * 3 + ["tests.benchmarks.ppo_iteration_bare"]
    names += ["ppo_iteration_trl.py"] if with_trl else []
    assert [arguments[0] for arguments in called] == 2 * names
    assert all(arguments[1:3] == ["--iterations", "1"] for arguments in called)
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == f"json: {out}"
    table = " ".join(shown.split())
    assert "│ float32 │ 4.000 │ 8.000 │" in table and "│ bfloat16 │ 2.000 │ 4.000 │" in table
    assert "│ staleness 1 │ 4.000 │ │" in table, "its CPU seconds are not measured"
    assert "a core multiplies at 100 GFLOP/s" in table
    rounds = json.loads(out.read_text())["rounds"]
    cases = ["float32", "bfloat16", "staleness 1", "bare loops", *(["TRL, float32"] if with_trl else [])]
    assert [list(row) for row in rounds] == [cases] * 2
