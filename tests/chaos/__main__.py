"""`make chaos`: kills at every point of every stage and at random moments; a table of what became of the
runs.

    python -m tests.chaos [--kills 200] [--seed 0] [--folder .rlhf/chaos] [--table docs/chaos.md]

Results are kept in the folder as they come, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.harness import STAGES, Case, Golden, Result, run_case

PREFACE = """# Kills of a run

Each row summarises runs of one stage of `tests/assets/tiny.yaml`, with the real DeepSpeed, Ray, vLLM and
MLflow on the CPU. Each run gets one to three SIGKILLs. The same command is run again until it succeeds.

- **at a point**: the process that reaches a `failpoint(...)` of the code is killed there: the command, the
  stage, a training rank, a Ray worker or an engine. Points and passes (first, middle, last) are drawn at
  random until there are enough kills, so not all of them occur.
- **a random process**: a random process is killed at a random time. The servers of Ray are included.
- **same bits**: all files of the artifact, all metrics in it, all values of all metrics in MLflow (each
  once) and all files of the run there equal those of an undisturbed run. The record of rollouts is compared
  by its rows, because its files end where the stage was interrupted. Times and rates are not compared, and
  neither are the contents of figures and of the report.
- **recovery**: seconds from the kill until a process that was started after it reaches the same point, or
  until the end of the run if none does. Most of it is the start of processes.

Runs that ended before a kill took place are not counted.

"""
NEGATIVE = Path(__file__).parent / "forget_kl"
"""On PYTHONPATH, it leaves the KL coefficient out of what a checkpoint restores."""


def main(given: list[str] | None = None) -> int:
    """0 if every case ended well in the same bits, and the negative control did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="at least this many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(".rlhf/chaos"))
    parser.add_argument("--table", type=Path, help="write the table to this Markdown file")
    arguments = parser.parse_args(given)
    folder = arguments.folder.resolve()
    rows = _rows(folder)
    if (done := _kills(rows)) < arguments.kills or not any(row["negative"] for row in rows):
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        print(f"golden run; {done} kills so far", flush=True)
        golden = Golden(work)
        if not any(row["negative"] for row in rows):
            _note(folder, run_case(golden, negative_control(), work / "case"), negative=True)
            shutil.rmtree(work / "case")
        names = {row["case"] for row in rows}
        for case in cases(golden.points, arguments.seed):
            if _kills(rows := _rows(folder)) >= arguments.kills:
                break
            if case.name not in names:
                _note(folder, run_case(golden, case, work / "case"), negative=False)
                shutil.rmtree(work / "case")
        shutil.rmtree(work)
    text = table(_rows(folder))
    print(text)
    if arguments.table:
        arguments.table.write_text(
            f'{PREFACE}{text}\nMade by `make chaos ARGS="--table {arguments.table}"`.\n'
        )
    rows = _rows(folder)
    well = [row["ended"] and row["same"] and not row["left"] for row in rows]
    return 0 if all(row["negative"] != good for row, good in zip(rows, well, strict=True)) else 1


def cases(points: Mapping[str, Mapping[str, int]], seed: int) -> Iterator[Case]:
    """First, middle and last pass of every point, each with two more kills in what follows; every third case
    is one at random moments instead. In an order that has all stages early.
    """
    chance = random.Random(seed)
    enumerated: list[Case] = []
    for stage in STAGES:
        for point, most in sorted(points[stage].items()):
            for nth in sorted({1, (most + 1) // 2, most}):
                more = [
                    f"{chance.choice(sorted(points[stage]))}:{chance.randint(1, 2)}:kill" for _ in range(2)
                ]
                entries = dict.fromkeys([f"{point}:{nth}:kill", *more])
                enumerated.append(Case(stage, tuple(entries), seed=chance.randrange(2**31)))
    chance.shuffle(enumerated)
    for number, case in enumerate(enumerated):
        yield case
        if number % 2:
            shares = tuple(chance.uniform(0.1, 1.0) for _ in range(2))
            yield Case(case.stage, random=shares, seed=chance.randrange(2**31))
    while True:
        shares = tuple(chance.uniform(0.1, 1.0) for _ in range(3))
        yield Case(chance.choice(STAGES), random=shares, seed=chance.randrange(2**31))


def negative_control() -> Case:
    """A run that forgets part of its state must not end in the same bits, or nothing here can be believed."""
    path = ":".join([str(NEGATIVE), *filter(None, sys.path)])
    return Case("ppo", points=("ppo.after_update:3:kill",), environment=(("PYTHONPATH", path),))


# -- results --


def _note(folder: Path, result: Result, *, negative: bool) -> None:
    row = {
        "case": result.case.name,
        "stage": result.case.stage,
        "random": bool(result.case.random),
        "negative": negative,
        "ended": result.ended,
        "same": result.same,
        "commands": result.commands,
        "kills": [asdict(kill) for kill in result.kills],
        "left": result.left,
        "why": result.why,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    verdict = "same bits" if result.same else "ended, OTHER BITS" if result.ended else "DID NOT END"
    print(
        f"{time.strftime('%H:%M:%S')} {row['case']}: {len(result.kills)} kills, {result.commands} commands,"
        f" {verdict}"
        + ("" if result.kills else ", NOT COUNTED: it ended before a kill")
        + (f", left: {result.left}" if result.left else "")
        + (f"\n  {result.why[-600:]}" if result.why else ""),
        flush=True,
    )


def _rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _kills(rows: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(row["kills"]) for row in rows if not row["negative"])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: by stage and kind of kill."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["kills"] and not row["negative"]:
            groups[row["stage"], "a random process" if row["random"] else "at a point"].append(row)
            groups["all", ""].append(row)
    lines = [
        "| stage | kill | runs | kills | reached the end | same bits | recovery, median | 95th percentile |",
        "|---|---|---|---|---|---|---|---|",
    ]
    order = {stage: number for number, stage in enumerate([*STAGES, "all"])}
    for (stage, kind), group in sorted(groups.items(), key=lambda item: (order[item[0][0]], item[0][1])):
        seconds = sorted(kill["recovery"] for row in group for kill in row["kills"])
        middle = f"{statistics.median(seconds):.1f} s" if seconds else ""
        high = f"{seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))]:.1f} s" if seconds else ""
        ended, same = sum(row["ended"] for row in group), sum(row["same"] for row in group)
        lines.append(
            f"| {stage} | {kind} | {len(group)} | {len(seconds)} | {ended} | {same} | {middle} | {high} |"
        )
    negative = [row for row in rows if row["negative"]]
    for row in negative:
        verdict = (
            "ends in the same bits: the comparison is worth nothing" if row["same"] else "noticed: other bits"
        )
        lines.append(f"\nNegative control (the KL coefficient left out of what is restored): {verdict}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
