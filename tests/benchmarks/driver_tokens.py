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

`ray` is a table of its own: what Ray needs itself. Real actors take the place of an engine, of one of
64 ranks of both groups, and of the actor of the rewards. They exchange the objects of a step, and read
each number once, but compute nothing:

    put          the engine returns its chunks
    ranks        references to policy and critic, which get the chunks there and return columns: policy
                 (two), reference and critic
    experience   the policy rank gets these columns, and the critic its returns
    scores       references to the actor of the rewards, which returns no texts
    texts        the same with texts of four bytes a token
    driver       the driver gets the chunks (texts on one host, record)
    freed        the driver gives the references up

CPU seconds are those of all threads of driver, actors, and Ray's daemons (raylet and GCS), without what they
need while nothing is sent. One rank with its eight chunks is measured. A step is that times its ranks. The
same tokens in eight times as many chunks tell what a chunk costs, and responses of four times the length what
a token costs. All is on one host: no byte passes through a network.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from rlhf_core.cluster.rpc import Actor, ParticipantSpec, Pending, RemoteActor, as_argument, fetch, rpc
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.pipeline import RecordConfig, TimeoutsConfig
from rlhf_core.config.rewards import PythonReward
from rlhf_core.data.tokenizer import Decoder
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.recording import StepRows
from rlhf_core.ppo.sampling.reward_actor import ResponseRows, RewardActor, RewardSettings
from rlhf_core.ppo.sampling.rollouts import RewardInputs
from rlhf_core.ppo.sampling.schedule import StoredRollouts
from rlhf_core.ppo.training.batch import (
    Places,
    RolloutBatch,
    RolloutColumns,
    RolloutHeader,
    RowColumns,
    SentShare,
    offsets_of,
)
from rlhf_core.ppo.training.rank_rows import RankBatch
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
ROWS_OF_RANK, CHUNKS_OF_RANK, SAMPLES = 256, 8, 4
"""A rank of 64 in a step of 16,384 responses."""
SHARES = ((8192, 1), (8192, 8), (32_768, 1))
"""What `ray` measures: tokens of a response, and into how many parts the chunks of a step are divided."""
ROUNDS, IDLE_SECONDS, FREE_SECONDS, WAIT = 10, 5.0, 1.5, 300
"""Ray frees objects once a second."""
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


def chunk_of(noise: np.random.Generator, rows: int, length: int, samples: int = 1) -> RolloutColumns:
    """Return random responses of this length, `samples` to each prompt."""
    ids = (VOCABULARY ** noise.random(rows * length)).astype(np.int32)
    logprobs = noise.normal(-1, 0.5, rows * length).astype(np.float32)
    prompts = rows // samples
    return RolloutColumns(
        samples,
        np.full(prompts * PROMPT, 9, np.int32),
        offsets_of([PROMPT] * prompts),
        ids,
        logprobs,
        offsets_of([length] * rows),
    )


def step(responses: int, length: int) -> tuple[Any, RolloutBatch]:
    """Return a fleet that holds a batch of responses of this length, and the batch."""
    noise = np.random.default_rng(0)
    chunks: list[Any] = []
    for start in range(0, responses, CHUNK):
        chunks.append(Pending(chunk_of(noise, min(CHUNK, responses - start), length)))
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


# -- what Ray needs itself --


class EngineOfRay(Actor):
    """Returns the same chunks again and again, as an engine returns what it has sampled."""

    @rpc("start")
    def prepare(self, chunks: int, rows: int, length: int) -> None:
        noise = np.random.default_rng(0)
        self._chunks = [chunk_of(noise, rows, length, SAMPLES) for _ in range(chunks)]
        lengths = np.full(chunks * rows, length, np.int32)
        self._header = RolloutHeader(lengths, lengths < 0, np.zeros(len(lengths), np.int64))

    @rpc()
    def sample(self) -> tuple[RolloutHeader, *tuple[RolloutColumns, ...]]:
        return self._header, *self._chunks


class RankOfRay(Actor):
    """Takes and returns the objects of a rank."""

    @rpc("start")
    def prepare(self, rows: int, length: int) -> None:
        self._rows = [np.zeros(rows * length, np.float32) for _ in range(2)]
        self._offsets = offsets_of([length] * rows)

    @rpc()
    def columns(
        self, names: Sequence[str], share: SentShare | int, *chunks: RolloutColumns
    ) -> tuple[None, RowColumns]:
        """Keep and read the chunks if the call brings them, and return columns with these names."""
        if isinstance(share, SentShare):
            self._batch = RankBatch(share, chunks)
            for array in chain(*self._batch.tokens(), self._batch.rollout_logprobs()):
                array.max()
        return None, self._new(names)

    @rpc()
    def read(self, names: Sequence[str], *objects: RowColumns) -> tuple[None, RowColumns]:
        """Read columns of models, and return columns with these names."""
        for array in chain.from_iterable(each.values.values() for each in objects):
            array.max()
        return None, self._new(names)

    def _new(self, names: Sequence[str]) -> RowColumns:
        # Arrays of their own: one array under two names would be sent once.
        return RowColumns(self._offsets, dict(zip(names, self._rows, strict=False)))

    @rpc()
    def forget(self) -> None:
        del self._batch


def no_text(_ids: Sequence[int]) -> str:
    return ""


def four_bytes(ids: Sequence[int]) -> str:
    return "word" * len(ids)


class PartsOfRay:
    """CPU seconds of the parts of a step, by kind of process. `actors` are the process ids of all actors."""

    def __init__(self, actors: Sequence[int]) -> None:
        daemons = psutil.Process().children()
        self._processes = {
            "driver": [psutil.Process().pid],
            "actors": list(actors),
            "daemons": [each.pid for each in daemons if each.name() in ("raylet", "gcs_server")],
        }
        self.seconds: dict[str, dict[str, float]] = {}
        before = self._cpu_seconds()
        time.sleep(IDLE_SECONDS)
        after = self._cpu_seconds()
        self._idle = {kind: (after[kind] - before[kind]) / IDLE_SECONDS for kind in before}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add what the processes need inside this context."""
        before, started = self._cpu_seconds(), time.monotonic()
        yield
        after, passed = self._cpu_seconds(), time.monotonic() - started
        used = self.seconds.setdefault(name, dict.fromkeys(self._idle, 0.0))
        for kind, idle in self._idle.items():
            used[kind] += after[kind] - before[kind] - idle * passed

    def _cpu_seconds(self) -> dict[str, float]:
        return {kind: sum(map(_clock, pids)) for kind, pids in self._processes.items()}


def _clock(pid: int) -> float:
    """Return the CPU seconds of a process, in nanoseconds: `cpu_times` counts in hundredths of a second."""
    return time.clock_gettime((~pid << 3) | 2)  # as glibc's `clock_getcpuclockid`


class ShareOfRay:
    """The actors and objects of one rank's share of a step.

    Args:
        folder: For the heartbeats of the actors.
        divided: Into how many parts the chunks of a step are divided.
        length: Tokens of a response.
    """

    def __init__(self, folder: Path, divided: int, length: int) -> None:
        self._folder = folder
        self._chunks = CHUNKS_OF_RANK * divided
        rows = ROWS_OF_RANK // self._chunks
        places = Places(np.repeat(np.arange(self._chunks), rows), np.tile(np.arange(rows), self._chunks))
        prompts = [PromptExample(f"p{row}", "question", (9,) * PROMPT) for row in range(len(places))]
        self._share = SentShare(0, places, [[row] for row in range(len(places))])
        self._responses = ResponseRows(places, np.ones(len(places), np.bool_), prompts, None)
        self._engine = self._start(EngineOfRay, "engine")
        self._policy, self._critic = self._start(RankOfRay, "policy"), self._start(RankOfRay, "critic")
        self._rewards = self._start(RewardActor, "rewards")
        calls = [self._engine.call(EngineOfRay.prepare, self._chunks, rows, length)]
        calls += [rank.call(RankOfRay.prepare, len(places), length) for rank in (self._policy, self._critic)]
        fetch(calls, WAIT)

    def _start(self, kind: type[Any], name: str) -> RemoteActor[Any]:
        import ray

        participant = ParticipantSpec(name, self._folder, TimeoutsConfig())
        return RemoteActor(ray.remote(kind).options(num_cpus=0).remote(participant))

    def processes(self) -> list[int]:
        """Return the ids of the actors' processes."""
        actors = (self._engine, self._policy, self._critic, self._rewards)
        own_id: list[Pending[int]] = [
            Pending(each.handle.__ray_call__.remote(lambda _self: os.getpid())) for each in actors
        ]
        return fetch(own_id, WAIT)

    def exchange(self, parts: PartsOfRay) -> None:
        """Let the objects of a step go from process to process, and add what this costs to `parts`."""
        with parts.part("put"):
            header, chunks = self._engine.call_parts(1 + self._chunks, EngineOfRay.sample)
            fetch([header], WAIT)
        sent = list(map(as_argument, chunks))
        policy, critic, columns = self._policy, self._critic, RankOfRay.columns
        with parts.part("ranks"):
            calls = [
                policy.call_parts(2, columns, ["logprobs", "entropy"], self._share, *sent),
                policy.call_parts(2, columns, ["logprobs"], self._share.batch),
                critic.call_parts(2, columns, ["values"], self._share, *sent),
            ]
            fetch([message for message, _ in calls], WAIT)
        with parts.part("experience"):
            objects = [as_argument(found) for _, found_of_call in calls for found in found_of_call]
            sums, returns = policy.call_parts(2, RankOfRay.read, ["returns"], *objects)
            trained, _ = critic.call_parts(2, RankOfRay.read, [], *map(as_argument, returns))
            fetch([sums, trained], WAIT)
        for name, decode in (("scores", no_text), ("texts", four_bytes)):
            fetch([self._rewards.call(RewardActor.open, RewardSettings((), decode, threads=1))], WAIT)
            with parts.part(name):
                fetch([self._rewards.call(RewardActor.texts, self._responses, *sent)], WAIT)
        with parts.part("driver"):
            for fetched in fetch(chunks, WAIT):
                fetched.response_ids.max()
                fetched.logprobs.max()
            del fetched
        with parts.part("freed"):
            fetch([rank.call(RankOfRay.forget) for rank in (policy, critic)], WAIT)
            del header, chunks, sent, calls, objects, sums, returns, trained
            time.sleep(FREE_SECONDS)


def measure_ray(divided: int, length: int) -> dict[str, dict[str, float]]:
    """Return the CPU seconds of one rank's share of a step, by part and kind of process. See `ShareOfRay`."""
    import ray

    # Without the files that Ray uses instead of a store that is full.
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=1 << 30)
    try:
        with tempfile.TemporaryDirectory() as folder:
            share = ShareOfRay(Path(folder), divided, length)
            parts = PartsOfRay(share.processes())
            share.exchange(parts)  # each process maps the memory of the store
            parts.seconds.clear()
            for _ in range(ROUNDS):
                share.exchange(parts)
    finally:
        ray.shutdown()
    return {
        part: {kind: seconds / ROUNDS for kind, seconds in found.items()}
        for part, found in parts.seconds.items()
    }


def ray_table(responses: int) -> Table:
    """Measure `SHARES`, and return CPU seconds of a step by part."""
    found = [_in_process("ray", divided, length) for length, divided in SHARES]
    short, in_more_chunks, long = found
    (length, _), (_, divided), (longer, _) = SHARES
    ranks = responses / ROWS_OF_RANK
    table = Table(title=f"Ray in a step of {responses} responses of full length on {ranks:g} ranks, CPU s")
    for column in ("part", "tokens", "driver", "actors", "daemons", "all", "ns a token", "us a chunk"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part in short:
        of_tokens = _all(long[part]) - _all(short[part])
        of_chunks = _all(in_more_chunks[part]) - _all(short[part])
        a_token = of_tokens / (ROWS_OF_RANK * (longer - length)) * 1e9
        a_chunk = of_chunks / (CHUNKS_OF_RANK * (divided - 1)) * 1e6
        for tokens, seconds in ((length, short[part]), (longer, long[part])):
            cells = [f"{seconds[kind] * ranks:.2f}" for kind in ("driver", "actors", "daemons")]
            table.add_row(part, f"{tokens}", *cells, f"{_all(seconds) * ranks:.2f}", f"{a_token:.2f}",
                          f"{a_chunk:.0f}")  # fmt: skip
    gigabytes = [f"{8 * responses * tokens / 1e9:.1f}" for tokens in (length, longer)]
    table.caption = (
        f"measured: one of {ranks:g} ranks; all chunks of a step have {' and '.join(gigabytes)} GB, which"
        " cross the network once for each group, rewards and driver on other hosts"
    )
    return table


def _all(seconds: Mapping[str, float]) -> float:
    return sum(seconds.values())


def _in_process(part: str, number: int, length: int) -> Any:
    """Return what a case prints that is measured in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.driver_tokens"]
    command += ["--case", part, str(number), str(length)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=positive, default=16_384, help="of the step (default 16384)")
    parser.add_argument("--tokens", type=positive, default=TOKENS, help=f"of a case (default {TOKENS})")
    parser.add_argument("--ray", action="store_true", help="only the table of `ray`")
    parser.add_argument("--case", nargs=3, metavar=("PART", "RESPONSES", "LENGTH"))
    args = parser.parse_args(arguments)
    if args.case:
        part, number, length = args.case
        run = measure_ray if part == "ray" else partial(measure, part)
        print(json.dumps(run(int(number), int(length))))
        return
    console = Console(width=120)
    if args.ray:
        console.print(ray_table(args.responses))
        return
    table = Table(title=f"The driver in a step of {args.responses} responses of full length")
    for column in ("part", "tokens", "measured", "CPU s", "us a token", "peak GB", "of the function GB"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for length in LENGTHS:
        rows = max(16, args.tokens // length)
        for part in PARTS:
            found = _in_process(part, rows, length)
            factor = 1.0 if part == "samples" else math.ceil(args.responses / rows)
            child = f"{found['peak_of_child'] * factor / 1e9:.1f}" if part == "function" else ""
            table.add_row(
                part, f"{length}", f"1/{factor:g}", f"{found['cpu'] * factor:.2f}",
                "" if part == "samples" else f"{found['cpu'] / rows / length * 1e6:.3f}",
                f"{found['peak'] * factor / 1e9:.2f}", child,
            )  # fmt: skip
    table.caption = "one thread decodes; measured is the part of the step that was computed"
    console.print(table)
    console.print(ray_table(args.responses))


if __name__ == "__main__":
    main()
