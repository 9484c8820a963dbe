"""One PPO iteration of the standard shape, on the real stack: `make bench`.

Llama, hidden 256, intermediate 688, 4 layers, 4 heads, vocabulary 2048, untied embeddings, float32; 64
prompts of 64 tokens, 64 new tokens, 4 minibatches, 1 epoch, a critic of the same size, a reference model, and
a rule reward: the share of token ids below 1024. Seconds are medians over the counted iterations; CPU seconds
are of all processes. `--dtype bfloat16` computes policy, critic, reference and engines in bfloat16.

Next to the CPU seconds of a part is its limit: what the part needs at least on one core of this machine, at
the rate of matrix products and the memory bandwidth that are measured after the run. The limit is the larger
of two: the operations of the matrix products, and the bytes that must be read and written (in the rollout all
weights for each token of a request; in the optimizer parameters, gradients and two moments; in the sync the
weights, once by the policy and once by each engine). Attention and activations are in none. `waiting` is the
time in which the cores had nothing to do.

Ends with `json: PATH`, a file with what the table shows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from rlhf_core.cluster.rpc import process_usage
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.placement import PPOSettings
from rlhf_core.models.linear import linear
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.rewards.compose import RewardComposer
from rlhf_core.types import PromptExample
from tests.support.arguments import positive
from tests.support.demo_data import with_demo_data
from tests.support.small_ppo import ROLES, local_context
from tests.support.tiny_llama import save_tiny_llama

VOCABULARY, PROMPT, RESPONSE, PROMPTS = 2048, 64, 64, 64
PHASES = ("rollout", "scoring", "training", "sync")
MINIBATCHES, ENGINES, THREADS = 4, 2, 2
LAYERS, HEAD = 4 * (4 * 256 * 256 + 3 * 256 * 688), 256 * VOCABULARY
"""Weights of the matrices of all layers, and of the matrix that makes logits."""


def make_model(folder: Path, positions: int = 256) -> None:
    """Random weights and no EOS, so every response has its full length."""
    save_tiny_llama(
        folder,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=1,
        dtype="float32",
    )


def iteration_tree(
    model: str, *, steps: int = 9, staleness: int = 0, dtype: str = "float32"
) -> dict[str, Any]:
    """Return the configuration of the iterations."""
    tree = {
        "run": {"device": "cpu", "name": "bench", "threads": THREADS},
        "model": {"path": model},
        "data": {"max_prompt_tokens": PROMPT},
        "ppo": {
            "steps": steps,
            "staleness": staleness,
            "prompts_per_step": PROMPTS,
            "colocate": "none",
            "max_new_tokens": RESPONSE,
            "minibatches": MINIBATCHES,
            "engine": {"count": ENGINES, "dtype": dtype},
            "policy_deepspeed": {"dtype": dtype},
            "critic_deepspeed": {"dtype": dtype},
            "policy": {"learning_rate": 1e-5},
            "critic": {"learning_rate": 1e-5},
            "rewards": [{"type": "token_share", "below": VOCABULARY // 2}],
        },
    }
    return with_demo_data(tree)


def operations() -> dict[str, float]:
    """Return the operations of the matrix products of each part with weights. Attention is not counted."""
    tokens, targets = PROMPTS * (PROMPT + RESPONSE), PROMPTS * RESPONSE
    language_model = 2.0 * (LAYERS * tokens + HEAD * targets)
    critic = 2.0 * LAYERS * tokens
    return {
        # The last token is not computed with.
        "rollout": 2.0 * (LAYERS * (tokens - PROMPTS) + HEAD * targets),
        "scoring": 2 * language_model + critic,
        "training": 3 * (language_model + critic),  # the backward pass costs twice the forward pass
    }


def core_rates(dtype: str) -> dict[str, float]:
    """Return the operations and the bytes of one core in a second: of a matrix product of the models' shape,
    and of a copy that does not fit into a cache. The fastest of seven.
    """
    kind: torch.dtype = getattr(torch, dtype)
    x = torch.randn(2048, 256).to(kind)
    weight = torch.randn(688, 256).to(kind)
    source, target = torch.ones(2, 2**25)
    torch.set_num_threads(1)
    product = _fastest(lambda: [linear(x, weight, None) for _ in range(8)]) / 8
    copy = _fastest(lambda: target.copy_(source))
    return {"operations": 2.0 * 2048 * 256 * 688 / product, "bytes": 2.0 * 4 * 2**25 / copy}


def _fastest(call: Callable[[], object]) -> float:
    # Without the time of other programs.
    return min(timeit.repeat(call, timer=time.process_time, number=1, repeat=7))


def limits(rates: dict[str, float], dtype: str) -> dict[str, float]:
    """Return the least CPU seconds of each part. Those of `training` are in three parts, which are measured
    together.
    """
    width = 2 if dtype == "bfloat16" else 4
    weights = width * (LAYERS + 2 * HEAD)  # with the embedding
    seconds = {name: count / rates["operations"] for name, count in operations().items()}
    decoded = RESPONSE * ENGINES * width * (LAYERS + HEAD) / rates["bytes"]
    # Both models; in float32: parameters, gradients and moments are read, all but gradients are written.
    optimizer = MINIBATCHES * 7 * 4.0 * (2 * LAYERS + 3 * HEAD) / rates["bytes"]
    return {
        "rollout": max(seconds["rollout"], decoded),
        "scoring": seconds["scoring"],
        "training": seconds["training"] + optimizer,
        "  forward": seconds["training"] / 3,
        "  backward": seconds["training"] * 2 / 3,
        "  optimizer": optimizer,
        "sync": (1 + ENGINES) * weights / rates["bytes"],
    }


class MeasuredController(PPOController):
    """A controller that also measures the CPU time of all processes in each phase."""

    @contextmanager
    @override
    def _timed(self, name: str) -> Iterator[None]:
        before = self._cpu_seconds()
        with super()._timed(name):
            yield
        self._add_timing(f"cpu/{name}", self._cpu_seconds() - before)

    def _cpu_seconds(self) -> float:
        return process_usage().cpu_seconds + sum(usage.cpu_seconds for usage in self._fleet.usage())


def run(
    iterations: int, warm_up: int, work: Path, staleness: int = 0, dtype: str = "float32"
) -> dict[str, Any]:
    """The measured iterations' medians. With `staleness`, iteration k + 1 is sampled during iteration k.
    `dtype` is the precision of models and engines.
    """
    # With staleness the last step would not sample a next one.
    steps = warm_up + iterations + staleness
    tree = iteration_tree(str(work / "model"), steps=steps, staleness=staleness, dtype=dtype)
    config = config_from_tree(tree, "bench")
    make_model(work / "model")
    rng = random.Random(0)
    prompts = [
        PromptExample(f"p{i}", "", tuple(rng.randrange(2, VOCABULARY) for _ in range(PROMPT)))
        for i in range(PROMPTS)
    ]
    folders = dict.fromkeys(ROLES, work / "model")
    with (
        RewardComposer(config.ppo.rewards, score_clip=config.ppo.score_clip) as composer,
        Fleet(PPOSettings.of(config), "cpu", folders, 0) as fleet,
    ):
        # Engines that sample answer afterwards, so with staleness the phases would wait for them.
        used = PPOController if staleness else MeasuredController
        controller = used(fleet, prompts, lambda ids: "", composer, local_context(work))
        controller.sync()
        rows = [controller.iterate() for _ in range(warm_up + iterations)][warm_up:]
        peaks = [usage.peak_bytes for usage in fleet.usage()]
    return _summary(rows, peaks)


def _summary(rows: list[dict[str, float]], peaks: list[int]) -> dict[str, Any]:
    def median(values: list[float]) -> float:
        return round(statistics.median(values), 4)

    seconds = {phase: median([row[f"timing/{phase}"] for row in rows]) for phase in PHASES}
    cpu = {phase: median([row.get(f"cpu/{phase}", 0.0) for row in rows]) for phase in PHASES}
    whole = median([row["timing/step"] for row in rows])
    tokens = PROMPTS * RESPONSE
    return {
        "ppo_iteration": {
            "seconds": whole,
            "cpu_seconds": median([sum(row.get(f"cpu/{phase}", 0.0) for phase in PHASES) for row in rows]),
            "fastest_seconds": round(min(row["timing/step"] for row in rows), 4),
            "iterations": len(rows),
            "parts": {phase: {"seconds": seconds[phase], "cpu_seconds": cpu[phase]} for phase in PHASES},
            "rollout_tokens_per_s": median([_rollout_rate(row) for row in rows]),
            "tokens_per_s": round(tokens / whole, 1),
            "peak_memory_bytes": {"largest_process": max(peaks), "all_workers": sum(peaks)},
            "utilisation": {
                name: median([row[name] for row in rows])
                for name in sorted(rows[-1])
                if name.startswith("utilisation/idle/") or name == "utilisation/data_wait"
            },
            "sync_gb_per_s": median([row["sync/gb_per_s"] for row in rows]),
            "logprob_gap": median([row["rollout/logprob_gap_mean"] for row in rows]),
        }
    }


def _rollout_rate(row: dict[str, float]) -> float:
    """Tokens per second; with staleness, those of the engines while they sample."""
    name = "rollout/tokens_per_s"
    return row[name if name in row else "utilisation/tokens_per_s/engines"]


def _table(result: dict[str, Any]) -> Table:
    iteration = result["ppo_iteration"]
    table = Table(title=f"PPO iteration, median of {iteration['iterations']}")
    for column in ("part", "seconds", "CPU seconds", "limit", "times the limit"):
        table.add_column(column, justify="left" if column == "part" else "right")
    least = iteration["limits"]
    for name in (*least, "whole"):
        row = iteration if name == "whole" else iteration["parts"].get(name)
        if name == "whole":
            limit = sum(least.get(phase, 0.0) for phase in PHASES)
        else:
            limit = least[name]
        cells = ["", "", f"{limit:.3f}", ""]
        if row is not None:
            cells[0] = f"{row['seconds']:.3f}"
            # With staleness they are not measured.
            if row["cpu_seconds"]:
                cells[1] = f"{row['cpu_seconds']:.3f}"
                cells[3] = f"{row['cpu_seconds'] / limit:.1f}"
        table.add_row(name, *cells, style="bold" if name == "whole" else "")
    if iteration["cpu_seconds"]:
        table.add_row("waiting", f"{max(0.0, iteration['seconds'] - iteration['cpu_seconds'] / THREADS):.3f}")
    rates = iteration["rates"]
    gib = {name: value / 2**30 for name, value in iteration["peak_memory_bytes"].items()}
    table.caption = (
        f"{iteration['rollout_tokens_per_s']:.0f} tokens/s in the rollout, {iteration['tokens_per_s']:.0f}"
        f" over the whole; peak memory {gib['largest_process']:.2f} GiB in one process,"
        f" {gib['all_workers']:.2f} GiB in all workers; a core has"
        f" {rates['operations'] / 1e9:.0f} GFLOP/s and {rates['bytes'] / 1e9:.1f} GB/s"
    )
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=positive, default=7, help="counted iterations (default 7)")
    # The first one has no shares of idle time and, with staleness, no rate of the engines.
    parser.add_argument("--warm-up", type=positive, default=2, help="iterations before them (default 2)")
    parser.add_argument(
        "--out", type=Path, default=Path(".rlhf/bench/ppo_iteration.json"), help="the JSON file"
    )
    parser.add_argument("--staleness", type=int, choices=(0, 1), default=0, help="ppo.staleness (default 0)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of models and engines"
    )
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = run(args.iterations, args.warm_up, Path(folder), args.staleness, args.dtype)
    rates = core_rates(args.dtype)
    result["ppo_iteration"] |= {"rates": rates, "limits": limits(rates, args.dtype)}
    Console().print(_table(result))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"json: {args.out}")


if __name__ == "__main__":
    main()
