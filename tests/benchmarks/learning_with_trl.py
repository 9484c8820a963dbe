"""Score by step of this pipeline's GRPO and PPO, and of TRL's, from the same model with the same budget:

    python -m tests.benchmarks.learning_with_trl --model MODEL --texts TEXTS.jsonl --trl trl-env/bin/python

The reward counts some words in the response. All runs have the same prompts, the first tokens of the texts,
and the same learning rate, batch and number of steps (`BUDGET`). `ppo_iteration_trl.py` says how to make the
environment of TRL; without `--trl` only this pipeline is trained. One run is made at a time.

Ends with `json: PATH`, a file with the score of each step of each run.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhf_core.config.load import config_from_tree
from rlhf_core.types import PromptExample
from tests.support.arguments import positive
from tests.support.demo_data import with_demo_data
from tests.support.small_ppo import small_ppo

BUDGET: dict[str, Any] = {
    "responses": 64,
    "minibatches": 4,
    "new_tokens": 64,
    "prompt_tokens": 16,
    "learning_rate": 3e-4,
    "betas": (0.9, 0.95),
    "max_grad_norm": 1.0,
    "temperature": 1.0,
    "words": ["happy", "smiled", "laughed", "fun", "love", "joy", "glad"],
    "cap": 8,
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"samples": 8, "kl_coef": 0.0, "lam": 1.0, "value_clip": 0.2},
    "ppo": {"samples": 1, "kl_coef": 0.05, "lam": 0.95, "value_clip": 0.2},
}


def prompts_of(model: Path, texts: Path, tokens: int) -> list[PromptExample]:
    """Return the first tokens of each text. Those whose text has other tokens are left out, because TRL's
    GRPO gets the text.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for number, line in enumerate(texts.read_text().splitlines()):
        ids = tokenizer.encode(json.loads(line)["text"])[:tokens]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if len(ids) == tokens and tokenizer.encode(text) == ids:
            prompts.append(PromptExample(f"p{number}", text, tuple(ids)))
    return prompts


def tree_of(model: Path, algorithm: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the configuration of one run of this pipeline."""
    own = ALGORITHMS[algorithm]
    optimizer = {
        "learning_rate": BUDGET["learning_rate"],
        "betas": list(BUDGET["betas"]),
        "max_grad_norm": BUDGET["max_grad_norm"],
        "schedule": "constant",
        "warmup_ratio": 0.0,
    }
    tree = {
        "run": {"device": "cpu", "threads": 1, "seed": seed, "name": "learning"},
        "model": {"path": str(model)},
        "data": {"max_prompt_tokens": BUDGET["prompt_tokens"], "max_response_tokens": BUDGET["new_tokens"]},
        "ppo": {
            "algorithm": algorithm,
            "steps": steps,
            "prompts_per_step": BUDGET["responses"] // own["samples"],
            "samples_per_prompt": own["samples"],
            "minibatches": BUDGET["minibatches"],
            "max_new_tokens": BUDGET["new_tokens"],
            "temperature": BUDGET["temperature"],
            "policy": optimizer,
            "critic": optimizer,
            "kl": {"coef": own["kl_coef"]},
            "lam": own["lam"],
            "value_clip": own["value_clip"],
            "rewards": [{"type": "keywords", "words": BUDGET["words"], "cap": BUDGET["cap"]}],
        },
    }
    return with_demo_data(tree)


def train(model: Path, prompts: list[PromptExample], algorithm: str, seed: int, steps: int) -> dict[str, Any]:
    """Train with this pipeline and return the metrics of each step."""
    from tokenizers import Tokenizer

    config = config_from_tree(tree_of(model, algorithm, seed, steps), "learning")
    decode = Tokenizer.from_file(str(model / "tokenizer.json")).decode
    shown = {"score": "objective/scores", "kl": "objective/kl", "explained": "value/explained_variance"}
    with (
        tempfile.TemporaryDirectory() as folder,
        small_ppo(config, model, Path(folder), prompts, decode=decode) as controller,
    ):
        rows = [controller.iterate() for _ in range(steps)]
    return {name: [row[key] for row in rows] for name, key in shown.items() if key in rows[0]}


def train_trl(
    python: Path, model: Path, prompts: list[PromptExample], algorithm: str, seed: int, steps: int
) -> dict[str, Any]:
    """Train with TRL and return the scores of each step."""
    settings = {
        **BUDGET,
        **ALGORITHMS[algorithm],
        "algorithm": algorithm,
        "model": str(model),
        "seed": seed,
        "steps": steps,
        "texts": [prompt.prompt for prompt in prompts],
        "ids": [list(prompt.input_ids) for prompt in prompts],
    }
    script = Path(__file__).with_name("learning_trl.py")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.json"
        file.write_text(json.dumps(settings))
        output = subprocess.run([python, script, file], check=True, stdout=subprocess.PIPE, text=True).stdout
    return {"score": json.loads(output.splitlines()[-1])}


def table_of(runs: dict[str, dict[str, Any]], steps: int) -> Table:
    """Return the mean scores of all runs at some steps."""
    shown = sorted({1, *range(3, steps, 2), steps})
    table = Table(title="mean score of the responses of a step")
    table.add_column("")
    for step in shown:
        table.add_column(str(step), justify="right")
    for name, run in runs.items():
        table.add_row(name, *(f"{run['score'][step - 1]:.2f}" for step in shown))
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a causal language model")
    parser.add_argument("--texts", type=Path, required=True, help="JSON lines with a field `text`")
    parser.add_argument("--trl", type=Path, help="Python of an environment with TRL")
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=positive, default=2, help="default 2")
    parser.add_argument("--steps", type=positive, default=12, help="default 12")
    parser.add_argument("--out", type=Path, default=Path(".rlhf/bench/learning_with_trl.json"), help="file")
    args = parser.parse_args(arguments)
    prompts = prompts_of(args.model, args.texts, BUDGET["prompt_tokens"])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    runs: dict[str, dict[str, Any]] = {}
    for algorithm in args.algorithms:
        for seed in range(args.seeds):
            same = (args.model, prompts, algorithm, seed, args.steps)
            runs[f"{algorithm}, seed {seed}"] = train(*same)
            # After each run: the next one can take long.
            args.out.write_text(json.dumps(runs, indent=2) + "\n")
            if args.trl is not None:
                runs[f"TRL {algorithm}, seed {seed}"] = train_trl(args.trl, *same)
                args.out.write_text(json.dumps(runs, indent=2) + "\n")
    console = Console()
    console.print(table_of(runs, args.steps))
    console.print(f"json: {args.out}", soft_wrap=True)


if __name__ == "__main__":
    logging.getLogger("rlhf_core").setLevel(logging.WARNING)
    main()
