"""bfloat16 next to float32 on this CPU, on one core: `python -m tests.benchmarks.bfloat16`.

Rates of matrix products with the shapes of `ppo_iteration.py`'s model, also those of torch's own float32
(decision 5), the time of its passes over 16 sequences of 128 tokens, and how far the log-probabilities of its
random weights are apart. Times are the smallest of several in turns, in CPU seconds.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from rlhf_core.models.batching import TokenBatch, TokenSequence, collate
from rlhf_core.models.linear import linear
from rlhf_core.models.policy import Policy, load_policy
from tests.benchmarks.ppo_iteration import VOCABULARY, make_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TORCH = "torch's float32"
SHAPES = ((2048, 256, 688), (2048, 688, 256), (1024, 256, 2048), (32, 256, 688))
"""(rows, inputs, outputs)"""
ROUNDS = 7


def fastest(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the CPU seconds of each call, by name."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.process_time()
            call()
            seconds[name].append(time.process_time() - start)
    return {name: min(values) for name, values in seconds.items()}


def processor() -> str:
    """Return the name of the processor and what it has for bfloat16."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = set(text.split())
    found = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    return f"{name[1] if name else 'unknown'}; bfloat16: {', '.join(found) or 'no instructions'}"


def products(rows: int, inputs: int, outputs: int) -> dict[str, float]:
    """Return 10^9 operations per second by type, and of torch's own float32."""
    repeats = max(1, 10**9 // (rows * inputs * outputs))
    calls: dict[str, Callable[[], object]] = {}
    for name, dtype in DTYPES.items():
        x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
        calls[name] = partial(_repeat, repeats, linear, x, weight, None)
        if name == "float32":
            calls[TORCH] = partial(_repeat, repeats, functional.linear, x, weight)
    operations = 2e-9 * rows * inputs * outputs * repeats
    return {name: operations / seconds for name, seconds in fastest(calls).items()}


def _repeat(count: int, call: Callable[..., object], *args: object) -> None:
    for _ in range(count):
        call(*args)


def _backward(model: Policy, batch: TokenBatch) -> None:
    model(batch).logprobs_N.mean().backward()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table(title="One core", caption=processor())
    for column in ("", *DTYPES, "ratio", TORCH):
        table.add_column(column, justify="right" if column else "left")
    for shape in SHAPES:
        rates = products(*shape)
        cells = [f"{rates[name]:.0f}" for name in DTYPES]
        rows, inputs, outputs = shape
        title = f"{rows} x {inputs} by {outputs}, GFLOP/s"
        ratio = rates["bfloat16"] / rates["float32"]
        table.add_row(title, *cells, f"{ratio:.2f}", f"{rates[TORCH]:.0f}")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        models = {name: load_policy(folder, dtype=name, attention="sdpa", device="cpu") for name in DTYPES}
    ids = torch.randint(2, VOCABULARY, (16, 128)).tolist()
    batch = collate([TokenSequence.of(row[:64], row[64:]) for row in ids], pad_id=0, pack=True)
    with torch.no_grad():
        forward = fastest({name: partial(model, batch) for name, model in models.items()})
        exact_N, rounded_N = (models[name](batch).logprobs_N for name in DTYPES)
    both = fastest({name: partial(_backward, model, batch) for name, model in models.items()})
    for title, seconds in (("forward, s", forward), ("forward and backward, s", both)):
        cells = [f"{seconds[name]:.3f}" for name in DTYPES]
        table.add_row(title, *cells, f"{seconds['bfloat16'] / seconds['float32']:.2f}")
    gap_N = (exact_N - rounded_N).abs()
    Console().print(table)
    print(f"log-probabilities differ by {gap_N.mean():.4f} on average, at most {gap_N.max():.4f}")


if __name__ == "__main__":
    main()
