"""What the driver of PPO does for each token of a step, by the length of the responses: `python -m
tests.benchmarks.driver_tokens`.

`driver_scale.py` measures what the driver does for each rank and response. This program measures what reads
tokens there, with the real code:

    text rewards   fetch and decode all responses, for functions, services and language models
    function       a Python reward that reads text and tokens of all samples, its process included
    record         rows of the level `logprobs`, with a critic, and their Parquet file
    rollout cache  the rollouts of `ppo.staleness` in a checkpoint
    samples        table of 16 responses, 120 metrics of a step, and MLflow on SQLite

Each case runs in a process of its own and has a part of the responses of a step, all of full length. Seconds
and memory of `--responses` are those of the part times a factor, because all but `samples` are proportional
to the tokens. Peak memory is without the columns of the engines and ranks, which are in Ray's object store,
and without what the process had before. Tokens are drawn by rank like words of a text (Zipf), from a
byte-level vocabulary of 131,072 tokens that `mistral_common` has.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from rlhf_core.cluster.rpc import Pending
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.pipeline import RecordConfig
from rlhf_core.config.rewards import PythonReward
from rlhf_core.data.tokenizer import Decoder
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.recording import StepRows
from rlhf_core.ppo.sampling.rollouts import RewardInputs
from rlhf_core.ppo.sampling.schedule import StoredRollouts
from rlhf_core.ppo.training.batch import Places, RolloutBatch, RolloutColumns, offsets_of
from rlhf_core.record.writer import RecordWriter
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.rewards.python_function import PythonFunction
from rlhf_core.tracking.mlflow_client import Mlflow
from rlhf_core.tracking.tracker import Tracking
from rlhf_core.types import PromptExample
from tests.support.arguments import positive

LENGTHS = (8192, 32_768)
TOKENS = 2**21
"""Tokens of a case."""
PROMPT, CHUNK, VOCABULARY, METRICS = 128, 8, 131_072, 120
FUNCTION = """
def score(samples):
    return [float(len(sample.response) + sample.response_ids[-1]) for sample in samples]
"""
Part = Callable[[Any, RolloutBatch, Path], Callable[[], object]]
"""Gets fleet, batch and folder, and returns what is measured."""


def decoder() -> Decoder:
    """Return a decoder with a byte-level vocabulary of ordinary size. It needs no merges."""
    import mistral_common
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel

    file = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    words = json.loads(file.read_text())["vocab"][:VOCABULARY]
    printable = sorted(ByteLevel.alphabet())
    # GPT-2's table: bytes that can be printed are themselves, the others follow at 256.
    of_byte = {ord(letter): letter for letter in printable if ord(letter) < 256}
    others = iter(letter for letter in printable if ord(letter) >= 256)
    of_byte |= {byte: next(others) for byte in range(256) if byte not in of_byte}
    names = ["".join(map(of_byte.__getitem__, base64.b64decode(word["token_bytes"]))) for word in words]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return Decoder(tokenizer, 0, 1, None)


def step(responses: int, length: int) -> tuple[Any, RolloutBatch]:
    """Return a fleet that holds a batch of responses of this length, and the batch."""
    noise = np.random.default_rng(0)
    chunks: list[Any] = []
    for start in range(0, responses, CHUNK):
        rows = min(CHUNK, responses - start)
        ids = (VOCABULARY ** noise.random(rows * length)).astype(np.int32)
        logprobs = noise.normal(-1, 0.5, rows * length).astype(np.float32)
        prompts = np.full(rows * PROMPT, 9, np.int32)
        offsets = offsets_of([length] * rows)
        chunks.append(
            Pending(RolloutColumns(1, prompts, offsets_of([PROMPT] * rows), ids, logprobs, offsets))
        )
    numbers = np.arange(responses)
    scores = noise.normal(size=responses).tolist()
    batch = RolloutBatch(
        chunks,
        Places(numbers // CHUNK, numbers % CHUNK),
        np.full(responses, length, np.int32),
        np.zeros(responses, np.bool_),
        [PromptExample(f"p{number}", "question", (9,) * PROMPT) for number in range(responses)],
        RewardBatch(scores, {"function": list(scores)}),
        seeds_B=numbers,
        numbers_B=numbers,
    )
    fleet = SimpleNamespace(
        wait=lambda pending, _what: [call.reference for call in pending],
        settings=SimpleNamespace(run=SimpleNamespace(threads=1)),
    )
    return fleet, batch


def texts(fleet: Any, batch: RolloutBatch, _folder: Path) -> Callable[[], object]:
    inputs = RewardInputs(fleet, batch, decoder().response)
    return lambda: inputs[0]


def function(fleet: Any, batch: RolloutBatch, folder: Path) -> Callable[[], object]:
    (folder / "mine.py").write_text(FUNCTION)
    inputs = RewardInputs(fleet, batch, decoder().response)
    inputs[0]  # decodes all
    call = PythonFunction(PythonReward(type="python", file=str(folder / "mine.py"), function="m:score"))
    return lambda: call(inputs)


def record(fleet: Any, batch: RolloutBatch, folder: Path) -> Callable[[], object]:
    import torch

    noise = np.random.default_rng(1)
    rows = [noise.normal(-1, 0.5, length).astype(np.float32) for length in batch.lengths_B.tolist()]
    ranks = SimpleNamespace(gather=lambda _name: rows)
    experience: Any = SimpleNamespace(
        scores_B=torch.zeros(len(batch)),
        kl_B=np.zeros(len(batch)),
        scored_B=np.ones(len(batch), np.bool_),
        old=ranks,
        ref=ranks,
        values=ranks,
    )
    ppo = config_from_tree(
        {"ppo": {"rewards": [{"type": "length", "target": 1, "tolerance": 1, "name": "function"}]}},
        "driver_tokens",
    ).ppo
    writer = RecordWriter(folder / "parts", "ppo", RecordConfig(max_bytes=10**15))

    def run() -> None:
        writer.add(1, StepRows(fleet, ppo, 1, "0").table(batch, experience, "logprobs", trained=True))
        writer.save(folder)

    return run


def cache(fleet: Any, batch: RolloutBatch, folder: Path) -> Callable[[], object]:
    return lambda: StoredRollouts(folder, batch.prompts, fleet).write(1, batch)


def samples(fleet: Any, batch: RolloutBatch, folder: Path) -> Callable[[], object]:
    tracking = Tracking(Mlflow(f"sqlite:///{folder}/mlflow.db", "driver"), folder / "spool")
    run = tracking.stage_run(tracking.parent_run("key", "driver"), "ppo", "0" * 16)
    numbers = np.zeros(len(batch))
    controller: Any = SimpleNamespace(
        _fleet=fleet, _decode=decoder().response, _context=SimpleNamespace(metrics=run)
    )
    experience: Any = SimpleNamespace(scores_B=numbers, kl_B=numbers)

    def log() -> None:
        PPOController._log_samples(controller, batch, experience, "samples", 1)
        run.log_metrics({f"part/metric_{number}": 1.0 for number in range(METRICS)}, 1)
        run.flush()
        assert not run.unsent

    return log


PARTS: dict[str, Part] = {
    "text rewards": texts,
    "function": function,
    "record": record,
    "rollout cache": cache,
    "samples": samples,
}


def measure(part: str, responses: int, length: int) -> dict[str, float]:
    """Return CPU seconds of this process and its children, and by how much the peak memory of each exceeds
    what it had before, in bytes.
    """
    fleet, batch = step(responses, length)
    others = psutil.Process().children()
    with tempfile.TemporaryDirectory() as folder:
        work = PARTS[part](fleet, batch, Path(folder))
        own = [child for child in psutil.Process().children() if child not in others]
        processes = [psutil.Process(), *own]
        cpu = sum(map(_cpu_seconds, processes))
        before = list(map(_new_peak, processes))
        work()
        cpu = sum(map(_cpu_seconds, processes)) - cpu
        # The kernel counts pages with a delay, so that a peak can be some pages below the memory before.
        peaks = [max(0.0, _peak(each) - start) for each, start in zip(processes, before, strict=True)]
        for process in own:
            process.kill()
    return {"cpu": cpu, "peak": peaks[0], "peak_of_child": sum(peaks[1:])}


def _cpu_seconds(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def _new_peak(process: psutil.Process) -> float:
    """Let the peak memory begin at the present memory, and return that."""
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    return _peak(process)


def _peak(process: psutil.Process) -> float:
    [line] = re.findall(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    return 1024.0 * int(line)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=positive, default=16_384, help="of the step (default 16384)")
    parser.add_argument("--tokens", type=positive, default=TOKENS, help=f"of a case (default {TOKENS})")
    parser.add_argument("--case", nargs=3, metavar=("PART", "RESPONSES", "LENGTH"))
    args = parser.parse_args(arguments)
    if args.case:
        part, responses, length = args.case
        print(json.dumps(measure(part, int(responses), int(length))))
        return
    table = Table(title=f"The driver in a step of {args.responses} responses of full length")
    for column in ("part", "tokens", "measured", "CPU s", "us a token", "peak GB", "of the function GB"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for length in LENGTHS:
        rows = max(16, args.tokens // length)
        for part in PARTS:
            command = [sys.executable, "-m", "tests.benchmarks.driver_tokens"]
            command += ["--case", part, str(rows), str(length)]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            factor = 1.0 if part == "samples" else math.ceil(args.responses / rows)
            child = f"{found['peak_of_child'] * factor / 1e9:.1f}" if part == "function" else ""
            table.add_row(
                part, f"{length}", f"1/{factor:g}", f"{found['cpu'] * factor:.2f}",
                "" if part == "samples" else f"{found['cpu'] / rows / length * 1e6:.3f}",
                f"{found['peak'] * factor / 1e9:.2f}", child,
            )  # fmt: skip
    table.caption = "one thread decodes; measured is the part of the step that was computed"
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
