"""The iteration of `ppo_iteration.py` in float32, in bfloat16 and with `ppo.staleness=1`, that of bare loops,
and that of TRL, in turns.

    python -m tests.benchmarks.comparison --trl trl-env/bin/python

`ppo_iteration_trl.py` says how to make the environment; without `--trl` the ratios are those to bare loops
(`ppo_iteration_bare.py`). A round runs each case once, in a process of its own. Ratios are those of the same
round, and the table has the median over the rounds. A second table compares the CPU seconds of each part with
the arithmetic limit: those that its matrix products need at the rate of a core, which is measured.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks.bfloat16 import processor, products
from tests.benchmarks.ppo_iteration import operations
from tests.support.arguments import positive

CASES = {
    "float32": [],
    "bfloat16": ["--dtype", "bfloat16"],
    "staleness 1": ["--staleness", "1"],
}
BARE = "bare loops"
TRL = "TRL, float32"


def ours(options: list[str], work: Path) -> dict[str, Any]:
    """Run `ppo_iteration.py` and return its JSON. With staleness it does not measure CPU seconds."""
    file = work / "iteration.json"
    command = [sys.executable, "-m", "tests.benchmarks.ppo_iteration", *options, "--out", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads(file.read_text())["ppo_iteration"]
    return result


def trl(python: Path, options: list[str]) -> dict[str, Any]:
    """Run TRL's iteration and return its seconds and CPU seconds."""
    script = Path(__file__).with_name("ppo_iteration_trl.py")
    output = subprocess.run([python, script, *options], check=True, capture_output=True, text=True).stdout
    found = re.search(r"^seconds: ([\d.]+)  CPU seconds: ([\d.]+)$", output, re.MULTILINE)
    assert found, output
    return {"seconds": float(found[1]), "cpu_seconds": float(found[2])}


def bare(options: list[str]) -> dict[str, Any]:
    """Run the iteration by hand and return its JSON."""
    command = [sys.executable, "-m", "tests.benchmarks.ppo_iteration_bare", *options]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def parts_table(rounds: list[dict[str, Any]], rate: float) -> Table:
    """Return the CPU seconds of each part next to those that its matrix products need.

    Args:
        rounds: Results by case.
        rate: Operations per second of one core in float32.
    """
    table = Table(title=f"CPU seconds in float32; a core multiplies at {rate / 1e9:.0f} GFLOP/s")
    for column in ("", "limit", "float32", "share", BARE, "share"):
        table.add_column(column, justify="right" if column else "left")
    for part, count in operations().items():
        limit = count / rate
        cells = [f"{limit:.2f}"]
        for name in ("float32", BARE):
            seconds = statistics.median(row[name]["parts"][part]["cpu_seconds"] for row in rounds)
            cells += [f"{seconds:.2f}", f"{limit / seconds:.2f}"]
        table.add_row(part, *cells)
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl", type=Path, help="Python of an environment with TRL")
    parser.add_argument("--rounds", type=positive, default=3, help="default 3")
    parser.add_argument("--iterations", type=positive, default=7, help="of each case in a round (default 7)")
    parser.add_argument("--out", type=Path, default=Path(".rlhf/bench/comparison.json"), help="the JSON file")
    args = parser.parse_args(arguments)
    iterations = ["--iterations", str(args.iterations)]
    cases = [*CASES, BARE] + ([TRL] if args.trl else [])
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, args.rounds + 1):
            row = {}
            for name in cases:
                if name == TRL:
                    row[name] = trl(args.trl, iterations)
                elif name == BARE:
                    row[name] = bare(iterations)
                else:
                    row[name] = ours(iterations + CASES[name], Path(folder))
                seconds, cpu_seconds = row[name]["seconds"], row[name]["cpu_seconds"]
                print(f"round {number}, {name}: {seconds:.3f} s, {cpu_seconds:.3f} CPU s", flush=True)
            rounds.append(row)
    table = Table(title=f"PPO iteration, medians of {args.rounds} rounds")
    base = cases[-1]
    for column in ("", "seconds", "CPU seconds", f"of {base}", f"CPU of {base}"):
        table.add_column(column, justify="right" if column else "left")
    for name in cases:
        cells = []
        for key in ("seconds", "cpu_seconds"):
            cells.append(statistics.median(row[name][key] for row in rounds))
        for key in ("seconds", "cpu_seconds"):
            cells.append(statistics.median(row[name][key] / row[base][key] for row in rounds))
        table.add_row(name, *(f"{cell:.3f}" if cell else "" for cell in cells))
    table.caption = processor()
    Console().print(table)
    torch.set_num_threads(1)
    rate = products(2048, 256, 688)["float32"] * 1e9
    Console().print(parts_table(rounds, rate))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({"processor": processor(), "rate": rate, "rounds": rounds}, indent=2) + "\n"
    )
    print(f"json: {args.out}")


if __name__ == "__main__":
    main()
