"""The benchmarks of training through the real DeepSpeed, with tiny models.

- each prints its numbers, and writes them to the file of `--out`
- our steps and the plain ones train
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks import throughput, utilisation
from tests.support.prepared_ranks import spawn
from tests.support.tiny_llama import save_tiny_benchmark_model


def printed(program: Callable[[int, Path], None], folder: Path) -> str:
    """Run a program in a process of its own, because DeepSpeed joins only one group. Return its output."""
    spawn(in_child, (program, folder), 1)
    return (folder / "stdout").read_text()


def in_child(number: int, program: Callable[[int, Path], None], folder: Path) -> None:
    with (folder / "stdout").open("w") as file, redirect_stdout(file):
        program(number, folder)


def small_throughput(_number: int, folder: Path) -> None:
    """Run `throughput` with few short rows, and write whether each plain step has changed its model."""
    module: Any = throughput
    module.ROWS, module.ROW, module.PAIRS, module.RESPONSES = 4, 16, 2, 4
    module.PROMPT, module.RESPONSE, module.MICRO_BATCH = 4, 4, 32
    module.make_model = save_tiny_benchmark_model
    trained: list[bool] = []
    plain_step = throughput.plain_step

    def watched(model: Any, *arguments: Any) -> None:
        before = next(model.parameters()).detach().clone()
        plain_step(model, *arguments)
        trained.append(not torch.equal(before, next(model.parameters())))

    module.plain_step = watched
    throughput.main(["--rounds", "1", "--out", str(folder / "new" / "throughput.json")])
    (folder / "trained.json").write_text(json.dumps(trained))


def small_utilisation(_number: int, folder: Path) -> None:
    out = str(folder / "new" / "utilisation.json")
    utilisation.main(["--device", "cpu", "--small", "--rounds", "1", "--out", out])


def test_training_throughput_ends_with_its_table_and_file(tmp_path: Path) -> None:
    shown = printed(small_throughput, tmp_path)
    out = tmp_path / "new" / "throughput.json"
    assert shown.splitlines()[-1] == f"json: {out}"
    found = json.loads(out.read_text())["training_throughput"]
    assert found.pop("threads") == 1
    assert list(found) == ["sft", "reward", "ppo"]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    for stage, row in found.items():
        assert row["rounds"] == 1 and min(row.values()) > 0
        numbers = [f"{row['tokens_per_s']:.0f}", f"{row['plain_tokens_per_s']:.0f}", f"{row['ratio']:.2f}"]
        assert [stage, *numbers] in rows
    # Two rounds, of which one is not counted. Both models of PPO take a step for each of four minibatches.
    assert json.loads((tmp_path / "trained.json").read_text()) == [True] * 2 * (1 + 1 + 2 * 4)


def test_utilisation_prints_what_its_file_has(tmp_path: Path) -> None:
    shown = printed(small_utilisation, tmp_path)
    found = json.loads((tmp_path / "new" / "utilisation.json").read_text())
    # Libraries print before it.
    assert json.loads(shown[shown.index("{\n") :]) == found
    assert (found["device"], found["sft"]["length"], found["ppo"]["length"]) == ("cpu", 128, 128)
    assert found["sft"]["tokens_per_s"] > 0 and found["ppo"]["tokens_per_s"] > 0
    assert "utilisation" not in found["sft"], "the peak of this CPU is not known"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_utilisation_says_how_to_try_it_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        utilisation.main([])
    assert "torch finds no GPU; --device cpu --small tries the program" in capsys.readouterr().err
