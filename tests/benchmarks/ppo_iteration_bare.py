"""The iteration of `ppo_iteration.py` by hand, in one process: `LLM.generate` of vLLM, and loops of PyTorch
with transformers' own models.

    python -m tests.benchmarks.ppo_iteration_bare

The same shapes, minibatches and threads as `ppo_iteration_trl.py`, computed with none of this project's
modules. It has no advantages, no reward and no weight sync: the losses have random numbers in their place,
and the engine keeps its weights. Prints median seconds and CPU seconds of an iteration, and ends with a JSON
line of the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from tests.benchmarks.ppo_iteration import PROMPT, PROMPTS, RESPONSE, VOCABULARY, make_model
from tests.benchmarks.throughput import plain_model, plain_optimizer, plain_step
from tests.support.arguments import positive

MINIBATCHES, CLIP = 4, 0.2


class Iteration:
    """The models, and the parts of an iteration."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
            max_model_len=PROMPT + RESPONSE, max_num_seqs=PROMPTS, generation_config="vllm",
            enable_prefix_caching=False,
        )  # fmt: skip
        self.policy, self.reference = plain_model("policy", folder), plain_model("policy", folder)
        self.critic = plain_model("value", folder)
        self.optimizers = plain_optimizer(self.policy), plain_optimizer(self.critic)
        self.prompts = torch.randint(2, VOCABULARY, (PROMPTS, PROMPT))
        self.ids = torch.empty(0)
        self.old: tuple[torch.Tensor, torch.Tensor]

    def rollout(self) -> None:
        from vllm import SamplingParams, TokensPrompt

        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids in self.prompts.tolist()],
            SamplingParams(max_tokens=RESPONSE, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        responses = torch.tensor([list(output.outputs[0].token_ids) for output in outputs])
        self.ids = torch.cat([self.prompts, responses], dim=1)

    @torch.no_grad()
    def scoring(self) -> None:
        logprobs = self._logprobs(self.policy, self.ids)
        self._logprobs(self.reference, self.ids)
        self.old = logprobs, self._values(self.ids)

    def training(self) -> None:
        size = PROMPTS // MINIBATCHES
        old_logprobs, old_values = self.old
        advantages, returns = torch.randn(2, PROMPTS, RESPONSE)
        for part in (slice(start, start + size) for start in range(0, PROMPTS, size)):
            ratio = (self._logprobs(self.policy, self.ids[part]) - old_logprobs[part]).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.min(ratio * advantages[part], clipped * advantages[part]).mean()
            plain_step(self.policy, self.optimizers[0], iter([loss]))
            values = self._values(self.ids[part])
            near = old_values[part] + (values - old_values[part]).clamp(-CLIP, CLIP)
            errors = torch.max((values - returns[part]) ** 2, (near - returns[part]) ** 2)
            plain_step(self.critic, self.optimizers[1], iter([0.5 * errors.mean()]))

    @staticmethod
    def _logprobs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """(n, RESPONSE)"""
        logits = model(input_ids=ids, logits_to_keep=RESPONSE + 1, use_cache=False).logits[:, :-1]
        chosen: torch.Tensor = logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None])
        return chosen.squeeze(-1)

    def _values(self, ids: torch.Tensor) -> torch.Tensor:
        """(n, RESPONSE)"""
        values: torch.Tensor = self.critic(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1, 0]
        return values


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=positive, default=7, help="counted iterations (default 7)")
    parser.add_argument("--warm-up", type=int, default=2, help="iterations before them (default 2)")
    parser.add_argument("--threads", type=int, default=2, help="of torch and vLLM (default 2)")
    args = parser.parse_args(arguments)
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCHDYNAMO_DISABLE": "1",
    }
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()  # new heads are meant to be new
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        iteration = Iteration(Path(folder))
    parts: dict[str, Callable[[], None]] = {
        "rollout": iteration.rollout,
        "scoring": iteration.scoring,
        "training": iteration.training,
    }
    torch.set_num_threads(args.threads)  # vLLM may have set it
    rows: list[dict[str, tuple[float, float]]] = []
    for _ in range(args.warm_up + args.iterations):
        row = {}
        for name, part in parts.items():
            wall, cpu = time.monotonic(), time.process_time()
            part()
            row[name] = (time.monotonic() - wall, time.process_time() - cpu)
        rows.append(row)
    counted = rows[args.warm_up :]
    whole = [
        statistics.median(sum(seconds[i] for seconds in row.values()) for row in counted) for i in (0, 1)
    ]
    print(f"seconds: {whole[0]:.3f}  CPU seconds: {whole[1]:.3f}")
    medians = {
        name: {
            "seconds": statistics.median(row[name][0] for row in counted),
            "cpu_seconds": statistics.median(row[name][1] for row in counted),
        }
        for name in parts
    }
    print(json.dumps({"seconds": whole[0], "cpu_seconds": whole[1], "parts": medians}))


if __name__ == "__main__":
    main()
