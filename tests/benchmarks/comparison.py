"""The iteration of `ppo_iteration.py` in float32, in bfloat16 and with `ppo.staleness=1`, and that of TRL, in
turns.

    python -m tests.benchmarks.comparison --trl trl-env/bin/python

`ppo_iteration_trl.py` says how to make the environment. A round runs each case once, in a process of its own.
Ratios are those of the same round, and the table has the median over the rounds.
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

from rich.console import Console
from rich.table import Table

CASES = {
    "float32": [],
    "bfloat16": ["--dtype", "bfloat16"],
    "staleness 1": ["--staleness", "1"],
}
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


def processor() -> str:
    """Return the name of the processor and what it has for bfloat16."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = set(text.split())
    found = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    return f"{name[1] if name else 'unknown'}; bfloat16: {', '.join(found) or 'no instructions'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl", type=Path, required=True, help="Python of an environment with TRL")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--iterations", type=int, default=7, help="of each case in a round (default 7)")
    parser.add_argument("--out", type=Path, default=Path(".rlhf/bench/comparison.json"), help="the JSON file")
    args = parser.parse_args()
    iterations = ["--iterations", str(args.iterations)]
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, args.rounds + 1):
            row = {}
            for name in [*CASES, TRL]:
                if name == TRL:
                    row[name] = trl(args.trl, iterations)
                else:
                    row[name] = ours(iterations + CASES[name], Path(folder))
                seconds, cpu_seconds = row[name]["seconds"], row[name]["cpu_seconds"]
                print(f"round {number}, {name}: {seconds:.3f} s, {cpu_seconds:.3f} CPU s", flush=True)
            rounds.append(row)
    table = Table(title=f"PPO iteration, medians of {args.rounds} rounds")
    for column in ("", "seconds", "CPU seconds", "of TRL", "CPU of TRL"):
        table.add_column(column, justify="right" if column else "left")
    for name in [*CASES, TRL]:
        cells = []
        for key in ("seconds", "cpu_seconds"):
            cells.append(statistics.median(row[name][key] for row in rounds))
        for key in ("seconds", "cpu_seconds"):
            cells.append(statistics.median(row[name][key] / row[TRL][key] for row in rounds))
        table.add_row(name, *(f"{cell:.3f}" if cell else "" for cell in cells))
    table.caption = processor()
    Console().print(table)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"processor": processor(), "rounds": rounds}, indent=2) + "\n")
    print(f"json: {args.out}")


if __name__ == "__main__":
    main()
