"""Rollouts of PPO next to bare vLLM, in turns on the same engines: `python -m tests.benchmarks.rollout`.

The model of `ppo_iteration.py`. "bare" is vLLM's `LLM.generate` on all engines at the same time, each with
its share of the prompts, without log-probabilities, seeds and text. "seeds" and "seeds, logprobs" are the
same with a part of the sampling parameters of a rollout, and with all of them; vLLM's own code returns the
log-probabilities. "rollout" is what a step of PPO waits for: the call of the engines, the transfer, and the
batch.

`--eos-share 0.02` ends responses at random, after 50 tokens on average.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhf_core.cluster.rpc import Pending, fetch
from rlhf_core.config.placement import PPOSettings
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.sampling.rollouts import Collector, assign
from rlhf_core.rewards.compose import RewardComposer
from rlhf_core.types import PromptExample
from tests.benchmarks.ppo_iteration import VOCABULARY, make_model
from tests.support.arguments import positive
from tests.support.demo_data import config_with_demo_data as config_from_tree
from tests.support.small_ppo import ROLES


def _bare(actor: Any, prompts: list[list[int]], options: dict[str, Any], seeds: bool) -> int:
    """Sample with vLLM alone, inside an engine's process. Returns the number of tokens."""
    from vllm import SamplingParams, TokensPrompt

    llm = actor._engine.llm
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    ours = vars(scheduler).pop("update_from_output")
    try:
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
            [SamplingParams(**options, seed=seed if seeds else None) for seed in range(len(prompts))],
            use_tqdm=False,
        )
    finally:
        scheduler.update_from_output = ours
    return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)


class Bench:
    """Started engines, and the two ways to sample with them."""

    def __init__(self, args: argparse.Namespace, fleet: Fleet, prompts: list[PromptExample]) -> None:
        self._args = args
        self._fleet = fleet
        self._prompts = prompts

    def bare(self, **options: Any) -> int:
        """Sample the prompts with vLLM's `generate` on all engines. Returns the number of tokens."""
        args = self._args
        stop = [] if args.eos_share == 0 else list(range(2, 2 + round(args.eos_share * VOCABULARY)))
        sampling = {
            "n": args.samples,
            "max_tokens": args.new_tokens,
            "temperature": 1.0,
            "detokenize": False,
            "stop_token_ids": stop,
            **options,
        }
        seeds = bool(sampling.pop("seeds", False))
        calls = []
        for index, share in enumerate(assign([len(p.input_ids) for p in self._prompts], args.engines)):
            tokens = [list(self._prompts[i].input_ids) for i in share]
            handle = self._fleet.engines.actor(index).handle
            calls.append(Pending[int](handle.__ray_call__.remote(_bare, tokens, sampling, seeds)))
        return sum(fetch(calls, 3600))

    def timed(self, call: Callable[[], int]) -> tuple[float, float]:
        """Return tokens per second and per CPU second of the engines."""
        before = self._engine_cpu_seconds()
        start = time.monotonic()
        tokens = call()
        seconds = time.monotonic() - start
        return tokens / seconds, tokens / (self._engine_cpu_seconds() - before)

    def _engine_cpu_seconds(self) -> float:
        usage = self._fleet.usage()[-self._args.engines :]
        return sum(process.cpu_seconds for process in usage)


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return medians over the rounds."""
    make_model(work / "model", positions=args.prompt_tokens + args.new_tokens)
    if args.eos_share:
        file = work / "model" / "config.json"
        config_of_model = json.loads(file.read_text())
        config_of_model["eos_token_id"] = list(range(2, 2 + round(args.eos_share * VOCABULARY)))
        file.write_text(json.dumps(config_of_model))
    engine: dict[str, Any] = {"count": args.engines, "max_num_seqs": args.max_num_seqs}
    for setting in args.engine:
        name, _, value = setting.partition("=")
        engine[name] = json.loads(value)
    config = config_from_tree(
        {
            "run": {"device": "cpu", "name": "bench", "threads": args.engines},
            "model": {"path": str(work / "model")},
            "data": {"max_prompt_tokens": args.prompt_tokens},
            "ppo": {
                "algorithm": "reinforce_pp",
                "prompts_per_step": args.prompts,
                "samples_per_prompt": args.samples,
                "max_new_tokens": args.new_tokens,
                "minibatches": 1,
                "engine": engine,
                "rewards": [{"type": "token_share", "below": VOCABULARY // 2}],
            },
        },
        "bench",
    )
    rng = random.Random(0)
    prompts = [
        PromptExample(f"p{i}", "", tuple(rng.randrange(100, VOCABULARY) for _ in range(args.prompt_tokens)))
        for i in range(args.prompts)
    ]
    with (
        RewardComposer(config.ppo.rewards, score_clip=None) as composer,
        Fleet(PPOSettings.of(config), "cpu", dict.fromkeys(ROLES, work / "model"), 0) as fleet,
    ):
        fleet.sync(0)
        bench = Bench(args, fleet, prompts)
        collector = Collector(config.ppo, fleet, prompts, lambda ids: "", composer, 0)

        ways: dict[str, Callable[[int], int]] = {
            "bare": lambda _: bench.bare(),
            "seeds": lambda _: bench.bare(seeds=True),
            "seeds, logprobs": lambda _: bench.bare(seeds=True, logprobs=0, flat_logprobs=True),
            "rollout": lambda step: int(collector.collect(step, 0).lengths_B.sum()),
        }
        rows = []
        for step in range(1, args.rounds + 2):
            rows.append({name: bench.timed(partial(way, step)) for name, way in ways.items()})
        rows = rows[1:]  # the first one warms up
    result = {}
    for name in ways:
        result[name] = {
            "tokens_per_s": statistics.median(row[name][0] for row in rows),
            "share_of_bare": statistics.median(row[name][0] / row["bare"][0] for row in rows),
            "tokens_per_cpu_s": statistics.median(row[name][1] for row in rows),
            "share_of_bare_cpu": statistics.median(row[name][1] / row["bare"][1] for row in rows),
        }
    return {"rollout": result, "rounds": args.rounds}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=positive, default=9, help="counted rounds (default 9)")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a step (default 64)")
    parser.add_argument("--samples", type=int, default=1, help="responses to each (default 1)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="default 64")
    parser.add_argument("--new-tokens", type=int, default=64, help="default 64")
    parser.add_argument("--engines", type=int, default=2, help="of one thread each (default 2)")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="default 256")
    parser.add_argument("--eos-share", type=float, default=0.0, help="share of ids that end a response")
    parser.add_argument(
        "--engine", action="append", default=[], help="another field of ppo.engine, such as name=true"
    )
    parser.add_argument("--out", type=Path, default=Path(".rlhf/bench/rollout.json"), help="the JSON file")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = run(args, Path(folder))
    table = Table(title=f"Rollout next to bare vLLM, medians of {args.rounds}")
    for column in ("way", "tokens/s", "of bare", "tokens/CPU s", "of bare"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, row in result["rollout"].items():
        table.add_row(
            name,
            f"{row['tokens_per_s']:.0f}",
            f"{row['share_of_bare']:.3f}",
            f"{row['tokens_per_cpu_s']:.0f}",
            f"{row['share_of_bare_cpu']:.3f}",
        )
    Console().print(table)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"json: {args.out}")


if __name__ == "__main__":
    main()
