"""Cost of data by the number of its rows, in CPU seconds: `python -m tests.benchmarks.data_scale [PART ...]`.

drift    comparing a data artifact with that of the champion, `--rows` rows in each of three sets
steps    an optimizer step of SFT without its model, of 10,000 and of `--rows` rows
encode   the stage `data` from the first rows that are encoded to the last ones, next to `encode_batch` of
         tokenizers for the same conversations and prompts, rendered before
parts    the stage `data` with all its parts to encode, with none, with a new file of 1 %, and after `KILLS`
         kills at random moments, which must give the same bytes and leave no process; CPU seconds with those
         of all its processes, and the peak memory of the stage itself
memory   the stage `data` with `--rows` rows in each set, and with a tenth of them: CPU seconds with those
         of all its processes, peak memory of the stage itself, and what each row adds to it.
         `--rows 1000000 --short` are a million rows of each kind
open     a training rank opens `--rows` pairs of 300 tokens and reads `STEPS` batches of them: the first one
         of a host, and `RANKS` more at the same time, with the memory of all of them together

digest   the digest of a base model of `MEGABYTES`, for the first time and again in the same home
bucket   an artifact of `MEGABYTES` is published to a bucket of moto and fetched, next
         to boto3, with the bytes that are read from files

Texts are sentences of this documentation in random order, prompts of about 100 tokens and responses of 180.
With `--short` they are words, and rows have 20 to 60 tokens.
`--tokenizer` is a folder with a tokenizer and its chat template; the default is trained on the texts.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.training import SFTConfig
from rlhf_core.data import parts as encoding
from rlhf_core.data import prepare
from rlhf_core.data.dataset import open_pairs
from rlhf_core.data.sources import model_digest, source_contents
from rlhf_core.data.tokenizer import load_tokenizer, train_tokenizer
from rlhf_core.models.batching import TokenSequence
from rlhf_core.ops.drift_measures import statistics_of_new_rows
from rlhf_core.seeds import epoch_batch
from rlhf_core.stages.training import Objective, Training, train_epochs
from rlhf_core.storage import bundles
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.bundles import hash_file
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store
from rlhf_core.system.processes import free_port, python_module
from rlhf_core.system.serving import responds
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.trainer import ScriptedTrainer, single_rank
from rlhf_core.types import ArtifactRef, PairExample, PromptExample, SFTExample

DOCS = Path(__file__).parents[2] / "docs"
STEPS = 200
"""Measured optimizer steps."""
FEW_ROWS = 10_000
MEGABYTES = 128
RANKS = 2
"""Ranks of a host."""
KILLS = 10
SHORT = False
"""The option `--short`."""
GONE_SECONDS = 60.0
"""Time after which a process of a killed stage has to be gone."""


def texts(seed: int | str, sentences: int) -> Iterator[str]:
    """Yield texts without end, with `--short` of as many words as the others have sentences."""
    pages = " ".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    found = [part.strip() for part in re.split(r"(?<=[.:])\s+", pages) if 20 < len(part) < 200]
    # The stage refuses rows with thoughts.
    found = [part for part in found if "<think>" not in part]
    if SHORT:
        found = sorted(set(re.findall("[a-z]{3,12}", pages)))
    rng = random.Random(seed)
    while True:
        yield " ".join(rng.choices(found, k=rng.randint(sentences // 2, sentences * 3 // 2)))


def seconds_of(work: Callable[[], object]) -> float:
    """Return the CPU seconds of all threads of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def tokenizer_of(folder: Path | None) -> Any:
    """Return the tokenizer of the option."""
    if folder is not None:
        return load_tokenizer(str(folder), None)
    source = texts(0, 8)
    return train_tokenizer([next(source) for _ in range(200)], 2048)


# -- parts --


def drift(rows: int, tokenizer: Any, folder: Path) -> list[tuple[str, str]]:
    """Compare a data artifact with itself."""
    prompts, answers = texts(1, 4), texts(2, 8)
    sft, pairs, asked = [], [], []
    for number in range(rows):
        prompt = tuple(tokenizer.encode(next(prompts)))
        chosen, rejected = tuple(tokenizer.encode(next(answers))), tuple(tokenizer.encode(next(answers)))
        mask = (0,) * len(prompt) + (1,) * len(chosen)
        sft.append(SFTExample(prompt + chosen, mask))
        pairs.append(PairExample(str(number), f"prompt {number}", prompt, chosen, rejected))
        asked.append(PromptExample(str(number), f"prompt {number}", prompt))
    data = write_data_artifact(folder / "data", sft=sft, pairs=pairs, prompts=asked, tokenizer=tokenizer)
    size = (data / "tokenizer" / "tokenizer.json").stat().st_size / 1e6
    seconds = seconds_of(lambda: statistics_of_new_rows(data, data))
    return [(f"3 x {rows} rows, tokenizer.json of {size:.1f} MB", f"{seconds:.2f} s")]


class Enough(Exception):
    """The measured steps are done."""


def steps(rows: int, _tokenizer: Any, folder: Path) -> list[tuple[str, str]]:
    """Make optimizer steps. The first one, which makes the order of its epoch, does not count."""
    found = []
    for count in (FEW_ROWS, rows):
        begun: list[float] = []

        def step(*_args: Any, begun: list[float] = begun) -> dict[str, float]:
            begun.append(time.process_time())
            if len(begun) > STEPS:
                raise Enough
            return {}

        objective: Objective[TokenSequence, SFTConfig] = Objective(
            step, lambda *_: {}, lambda row: len(row.input_ids), lambda _: {}
        )
        config = SFTConfig.model_validate({"batch_size": 128, "epochs": 8, "eval_every": 10**9})
        train = [TokenSequence((1, 2), (0, 1))] * count
        with single_rank():
            try:
                training = Training("sft", 0, 0, folder, None)
                train_epochs(ScriptedTrainer(), train, [], config, training, objective)
            except Enough:
                pass
        each = (begun[-1] - begun[1]) / (len(begun) - 2)
        found.append((f"one step of {count} rows", f"{1000 * each:.3f} ms"))
    return found


def encode(rows: int, tokenizer: Any, folder: Path) -> list[tuple[str, str]]:
    """Encode demonstrations, pairs and prompts of pairs, as the stage `data` does."""
    demonstrations, pairs = (
        list(map(json.loads, file.read_text().splitlines())) for file in write_sets(folder, rows, "a")
    )
    tokenizer.save_pretrained(folder / "model")
    config = configuration(folder)
    times: list[tuple[int, float]] = []
    (folder / "out").mkdir()
    prepared = prepare.read_and_encode(
        config,
        folder / "out",
        lambda done, _total: times.append((done, time.process_time())),
        source_contents(config),
    )
    first, last = times[0], times[-1]
    rate = (last[0] - first[0]) / (last[1] - first[1])
    conversations = list(rendered(prepared.encoder.tokenizer, demonstrations, pairs))
    backend = prepared.encoder.tokenizer.backend_tokenizer
    seconds = 0.0
    for start in range(0, len(conversations), 256):
        part = conversations[start : start + 256]
        seconds += seconds_of(partial(backend.encode_batch, part, add_special_tokens=False))
    alone = 3 * rows / seconds
    return [
        (f"stage data, 3 x {rows} rows", f"{rate:.0f} rows/s"),
        ("encode_batch", f"{alone:.0f} rows/s"),
        ("cost of the stage", f"{alone / rate:.2f} x"),
    ]


def write_sets(folder: Path, rows: int, name: str) -> list[Path]:
    """Write demonstrations and pairs into the file `name` of each set, and return the two files."""
    prompts, answers = texts(f"{name} 1", 4), texts(f"{name} 2", 8)
    files = [folder / set_name / f"{name}.jsonl" for set_name in ("sft", "pairs")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
    with files[0].open("w") as demonstrations, files[1].open("w") as pairs:
        for _ in range(rows):
            demonstration = {"prompt": next(prompts), "completion": next(answers)}
            pair = {"prompt": next(prompts), "chosen": next(answers), "rejected": next(answers)}
            demonstrations.write(json.dumps(demonstration) + "\n")
            pairs.write(json.dumps(pair) + "\n")
    return files


def parts(rows: int, tokenizer: Any, folder: Path) -> list[tuple[str, str]]:
    """Run the stage again and again."""
    write_sets(folder, rows, "a")
    tokenizer.save_pretrained(folder / "model")
    seconds, peak, expected = _stage(folder, folder / "parts")
    again, _, same = _stage(folder, folder / "parts")
    assert same == expected, "parts that are read give other bytes"
    longest = _killed(folder, expected)
    before = set((folder / "parts").iterdir())
    write_sets(folder, max(1, rows // 100), "b")
    more = _stage(folder, folder / "parts")[0]
    after = set((folder / "parts").iterdir())
    return [
        (f"stage data, 3 x {rows} rows", f"{seconds:.1f} s"),
        ("its peak memory", f"{peak / 2**20:.0f} MiB"),
        ("with all parts", f"{again:.1f} s"),
        (f"the last process is gone after {KILLS} kills", f"{longest:.1f} s (wall)"),
        ("with a new file of 1 %", f"{more:.1f} s"),
        ("parts that it encodes", f"{len(after - before)} of {len(after)}"),
    ]


def memory(rows: int, tokenizer: Any, folder: Path) -> list[tuple[str, str]]:
    """Run the stage with few rows and with many."""
    peaks = []
    few = max(20, rows // 10)
    for count in (few, rows):
        here = folder / str(count)
        write_sets(here, count, "a")
        tokenizer.save_pretrained(here / "model")
        seconds, peak, _ = _stage(here, here / "parts")
        peaks.append(peak)
    grown = (peaks[1] - peaks[0]) / (3 * (rows - few))
    return [
        (f"stage data, 3 x {rows} rows", f"{seconds:.1f} s"),
        ("rows in a second", f"{3 * rows / seconds:.0f}"),
        (f"peak memory (with 3 x {few} rows {peaks[0] / 2**20:.0f} MiB)", f"{peaks[1] / 2**20:.0f} MiB"),
        ("what a row adds", f"{grown:.0f} bytes"),
    ]


def _stage(folder: Path, kept: Path) -> tuple[float, float, dict[str, str]]:
    """Return the CPU seconds of the stage and all its processes, its peak memory in bytes and the digests of
    its files.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_prepared, folder, kept).result()


def _prepared(folder: Path, kept: Path) -> tuple[float, float, dict[str, str]]:
    encoding.FEW_ROWS = 0
    with tempfile.TemporaryDirectory() as out:
        prepare.prepare(configuration(folder), Path(out), lambda *_: None, None, kept)
        files = sorted(each for each in Path(out).rglob("*") if each.is_file())
        digests = {str(file.relative_to(out)): hash_file(file) for file in files}
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(each.ru_utime + each.ru_stime for each in used)
    # Not `ru_maxrss`, which a process that was spawned has from the one that started it.
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return seconds, peak, digests


def _killed(folder: Path, expected: dict[str, str]) -> float:
    """Kill the stage at random moments, and let it end. Return the longest time until the processes of a
    killed one were gone. Raises AssertionError if they stay, or if the bytes are others.
    """
    rng, kept, longest = random.Random(0), folder / "killed", 0.0
    for _ in range(KILLS):
        process = multiprocessing.get_context("spawn").Process(target=_prepared, args=(folder, kept))
        process.start()
        before = len(list(kept.glob("*")))
        wanted = before + rng.randint(0, 3)
        while process.is_alive() and len(list(kept.glob("*"))) <= wanted:
            time.sleep(rng.random() / 10)
        others = psutil.Process(process.pid).children(recursive=True) if process.is_alive() else []
        process.kill()
        process.join()
        killed = time.monotonic()
        _, left = psutil.wait_procs(others, GONE_SECONDS)
        assert not left, left
        longest = max(longest, time.monotonic() - killed)
    assert _stage(folder, kept)[2] == expected, "a kill changes the bytes"
    return longest


def open_(rows: int, _tokenizer: Any, folder: Path) -> list[tuple[str, str]]:
    """Open pairs as training ranks of one host do, each in a process of its own."""
    rng = np.random.default_rng(0)
    few = [
        PairExample("", "Is it late?", tuple(prompt), tuple(chosen), tuple(rejected))
        for prompt, chosen, rejected in rng.integers(0, 2**17, (FEW_ROWS, 3, 100)).tolist()
    ]
    pairs = [replace(few[i % FEW_ROWS], prompt_id=str(i)) for i in range(rows)]
    data = write_data_artifact(folder / "data", pairs=pairs)
    (folder / "work").mkdir()
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        first, *_ = pool.apply(_opened, (data, folder / "work"))
    with context.Pool(RANKS, _share, (context.Barrier(RANKS),)) as pool:
        ranks = pool.starmap(_opened, [(data, folder / "work")] * RANKS, chunksize=1)
    opened, step = max(each[0] for each in ranks), max(each[1] for each in ranks)
    each = sum(size for *_, size in ranks) / (300 * rows)
    return [
        (f"first rank opens {rows} pairs", f"{first:.2f} s"),
        (f"each of {RANKS} ranks opens them", f"{opened:.4f} s"),
        ("rows of a step, batch 128", f"{1e3 * step:.2f} ms"),
        (f"memory of {RANKS} ranks together, a token", f"{each:.2f} bytes"),
    ]


_barrier: Any = None


def _share(barrier: Any) -> None:
    global _barrier  # of this process
    _barrier = barrier


def _opened(data: Path, work: Path) -> tuple[float, float, float]:
    """Return the CPU seconds until the pairs are open and those of the rows of a step, and the growth of this
    process in bytes with its share of common pages.
    """
    open_pairs(data, "eval", work)  # imports Arrow
    size, started = proportional_size(), time.process_time()
    rows = open_pairs(data, "train", work)
    opened = time.process_time()
    for step in range(STEPS):
        batch = [rows[i] for i in epoch_batch(len(rows), 128, 0, 0, step % (len(rows) // 128))]
    ended = time.process_time()
    for index in range(len(rows)):
        batch[0] = rows[index]  # as an epoch does: every page is mapped
    if _barrier is not None:
        _barrier.wait()
    return opened - started, (ended - opened) / STEPS, proportional_size() - size


def proportional_size() -> int:
    """Return the bytes of this process, with its share of pages that others have as well."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def configuration(folder: Path) -> PipelineConfig:
    """Return a configuration whose prompts are those of its pairs."""
    pairs, model = str(folder / "pairs"), folder / "model"
    model_config = {"model_type": "llama", "max_position_embeddings": 8192, "vocab_size": 2**20}
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **model_config}))
    sets = {"sft": [str(folder / "sft")], "preference": [pairs], "prompts": [pairs]}
    return config_from_tree({"model": {"path": str(model)}, "data": sets})


def rendered(
    tokenizer: Any, demonstrations: Sequence[dict[str, str]], pairs: Sequence[dict[str, str]]
) -> Iterator[str]:
    """Yield the conversations of all rows, and the prompts of the pairs."""

    def render(prompt: str, answer: str | None) -> str:
        messages = [{"role": "user", "content": prompt}]
        messages += [] if answer is None else [{"role": "assistant", "content": answer}]
        template = {"tokenize": False, "add_generation_prompt": answer is None}
        return str(tokenizer.apply_chat_template(messages, **template))

    for row in demonstrations:
        yield render(row["prompt"], row["completion"])
    for row in pairs:
        yield from (render(row["prompt"], row["chosen"]), render(row["prompt"], row["rejected"]))
        yield render(row["prompt"], None)


def digest(_rows: int, _tokenizer: Any, folder: Path) -> list[tuple[str, str]]:
    """Take the digest of a base model, whose files are older than `FileDigests` must see them."""
    for number in range(4):
        (folder / f"{number}.safetensors").write_bytes(os.urandom(2**20) * (MEGABYTES // 4))
    home = folder / ".home"
    home.mkdir()
    with mock.patch.object(bundles, "_TICK_SECONDS", 0.0):
        return [
            cost_of(what, lambda: model_digest(str(folder), None, str(home)))
            for what in ("digest of a base model", "the same again")
        ]


def bucket(_rows: int, _tokenizer: Any, folder: Path) -> list[tuple[str, str]]:
    """Publish and fetch an artifact, and upload and download a file of its size with boto3."""
    import boto3

    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    server = [*python_module("moto.server"), "-H", "127.0.0.1", "-p", str(port)]
    with mock.patch.dict(os.environ, keys), subprocess.Popen(server, stderr=subprocess.DEVNULL) as process:
        try:
            client = boto3.client("s3", endpoint_url=endpoint)
            while not responds(f"{endpoint}/moto-api/"):
                time.sleep(0.2)
            client.create_bucket(Bucket="measured")
            store = Store("s3://measured/store", endpoint)
            artifacts = ArtifactStore(store, folder / "cache", Outbox.of(store, folder / "outbox"))
            for name, count in (("first", 1), ("measured", MEGABYTES)):
                (folder / name).mkdir()
                (folder / name / "model.safetensors").write_bytes(os.urandom(2**20) * count)
            file = folder / "uploaded"  # `publish` deletes the other name
            file.hardlink_to(folder / "measured" / "model.safetensors")
            made: list[ArtifactRef] = []

            def publish(name: str) -> None:
                made.append(artifacts.publish("sft", f"{len(made):016x}", folder / name, Provenance(), None))

            publish("first")  # imports, and versions for the manifest
            artifacts.fetch(made[0])
            return [
                cost_of("publish", lambda: publish("measured")),
                cost_of("fetch", lambda: artifacts.fetch(made[1])),
                cost_of("boto3 upload_file", lambda: client.upload_file(str(file), "measured", "x")),
                cost_of(
                    "boto3 download_file",
                    lambda: client.download_file("measured", "x", str(folder / "downloaded")),
                ),
            ]
        finally:
            process.kill()


def cost_of(what: str, call: Callable[[], object]) -> tuple[str, str]:
    """Return the CPU seconds of a call for each GB, and what was read from files, of `MEGABYTES`."""

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    size = MEGABYTES * 2**20
    before = bytes_read()
    seconds = seconds_of(call)
    read = (bytes_read() - before) / size
    return f"{what}: {read:.2f} times its bytes are read", f"{seconds / size * 1e9:.2f} s a GB"


MEASURED = (drift, steps, encode, parts, memory, open_, digest, bucket)
PARTS = {part.__name__.rstrip("_"): part for part in MEASURED}


def main(arguments: list[str] | None = None) -> None:
    """Measure the parts, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rows", type=int, default=2000, help="rows of each set (default 2000)")
    parser.add_argument("--short", action="store_true", help="rows of 20 to 60 tokens")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer")
    args = parser.parse_args(arguments)
    global SHORT
    SHORT = args.short
    tokenizer = tokenizer_of(args.tokenizer)
    table = Table(title="CPU seconds of this process")
    for column in ("part", "what", "cost"):
        table.add_column(column, justify="right" if column == "cost" else "left")
    for name in args.parts or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            for what, cost in PARTS[name](args.rows, tokenizer, Path(folder)):
                table.add_row(name, what, cost)
    Console().print(table)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
