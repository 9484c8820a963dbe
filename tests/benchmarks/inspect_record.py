"""Times of the pages of `rlhf inspect`, and its memory: `python -m tests.benchmarks.inspect_record`.

The record is made of random tokens and numbers with the real writer, at the level `logprobs`. The pages are
served by another process, as `rlhf inspect` does, and asked for over HTTP: first while the texts are being
decoded in the background, and then again, with the CPU time of that process. The memory is its peak.

With `--browser CHROMIUM`, this program (`chromium-headless-shell`) opens the pages as well: the time is until
a page is loaded and laid out, without the start of the browser. `--screenshots FOLDER` keeps pictures of the
pages, 900 and 1600 pixels wide.

`--responses` and `--per-step` are the size, `--folder` keeps the record, or takes one that was kept.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import psutil
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from websockets.sync.client import connect

from rlhf_core.config.pipeline import RecordConfig
from rlhf_core.data.synthetic import FEELINGS, KIND, PLAIN, RUDE, SUBJECTS, THINGS, VERBS
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.ops.inspect.rollouts import RecordedRun
from rlhf_core.ops.inspect.server import serve
from rlhf_core.record.schema import schema_of
from rlhf_core.record.writer import RecordWriter

PROMPT, LONGEST = 16, 112
"""Tokens of a prompt, and of the longest response; the mean is 64."""
STEPS_IN_PART = 10
PAGES = {
    "steps": "steps",
    "responses": "responses",
    "sorted by the gap": "responses?sort=gap",
    "three ranges": "responses?min:step={half}&min:score=1&max:kl=2&sort=reward/gold",
    "one prompt": "responses?prompt=p17&sort=step",
    "text": "responses?text=calm+brave&min:score=1",
    "last of 50 on the page": "responses?offset={last}",
    "one response": "response?of=0,{half},3",
    "one with its neighbours": "response?of=0,{half},3&sort=reward/gold&min:score=1&at=40",
    "phrases": "phrases",
    "two scores": "scores?x=reward/model&y=reward/gold",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=1_000_000)
    parser.add_argument("--per-step", type=int, default=500)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--browser", type=Path)
    parser.add_argument("--screenshots", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve:
        serve({"ppo": [RecordedRun("random", arguments.serve)]}, 0, lambda url: print(url, flush=True))
        return
    steps = arguments.responses // arguments.per_step
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if not (folder / "record").is_dir():
            start = time.perf_counter()
            make_record(folder, steps, arguments.per_step)
            print(f"the record was written in {time.perf_counter() - start:.0f} s")
        size = sum(part.stat().st_size for part in (folder / "record").iterdir())
        print(f"{steps * arguments.per_step} responses, {size / 1e9:.2f} GB")
        measure(folder, steps, arguments.per_step, arguments.browser, arguments.screenshots)


def make_record(folder: Path, steps: int, per_step: int) -> None:
    """Write a record and a tokenizer, as an artifact of the stage `ppo` has them."""
    words = [*SUBJECTS, *KIND, *PLAIN, *RUDE, *THINGS, *VERBS, *FEELINGS]
    tokenizer = train_tokenizer([" ".join(words)] * 2, 600)
    tokenizer.save_pretrained(folder / "policy")
    ids = np.array([tokenizer.encode(f" {word}", add_special_tokens=False)[-1] for word in words], np.int32)
    rng = np.random.default_rng(0)
    schema = schema_of("logprobs", ["model", "gold"])
    with tempfile.TemporaryDirectory(dir=folder) as parts:
        writer = RecordWriter(Path(parts) / "parts", "ppo", RecordConfig(level="logprobs", max_bytes=10**12))
        for step in range(1, steps + 1):
            writer.add(step, _rows(rng, ids, step, per_step, schema))
            if step % STEPS_IN_PART == 0 or step == steps:
                writer.save(folder)


def _rows(rng: np.random.Generator, ids: np.ndarray, step: int, count: int, schema: pa.Schema) -> pa.Table:
    lengths = rng.integers(16, LONGEST + 1, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    old = -rng.exponential(1.0, offsets[-1]).astype(np.float32)
    noise = rng.normal(0, 1e-3, offsets[-1]).astype(np.float32)
    tokens = {
        "prompt_ids": (np.arange(count + 1, dtype=np.int32) * PROMPT, rng.choice(ids, count * PROMPT)),
        "response_ids": (offsets, rng.choice(ids, offsets[-1])),
        "rollout_logprobs": (offsets, old + noise),
        "old_logprobs": (offsets, old),
        "ref_logprobs": (offsets, old - 100 * noise),
        "values": (offsets, noise),
    }
    index = np.arange(count)
    scores = rng.normal(0, 1, (2, count))
    numbers = {
        "kind": ["ppo"] * count,
        "step": np.full(count, step),
        "index": index,
        "group": index,
        "prompt_id": [f"p{number}" for number in rng.integers(0, 20_000, count)],
        "finished": lengths < LONGEST,
        "policy_version": np.full(count, step - 1),
        "seed": rng.integers(0, 2**62, count),
        "total": scores[0],
        "score": scores[0],
        "kl": rng.exponential(2, count),
        "reward/model": scores[0],
        "weighted/model": scores[0],
        "reward/gold": scores[1],
        "weighted/gold": np.zeros(count),
    }
    columns = []
    for field in schema:
        if field.name in tokens:
            columns.append(pa.ListArray.from_arrays(*map(pa.array, tokens[field.name]), type=field.type))
        elif field.name in numbers:
            columns.append(pa.array(numbers[field.name], field.type))
        else:
            columns.append(pa.nulls(count, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def measure(
    folder: Path, steps: int, per_step: int, browser: Path | None = None, screenshots: Path | None = None
) -> None:
    """Print the times of the pages, and the memory of the server.

    Args:
        folder: The record.
        steps: Its steps.
        per_step: Responses of each step.
        browser: The program `chromium-headless-shell`; None: the pages are only asked for.
        screenshots: For a picture of each page; None: they are not kept.
    """
    command = [sys.executable, "-m", "tests.benchmarks.inspect_record", "--serve", str(folder)]
    table = Table("page", "while decoding", "after that", "CPU")
    start = time.perf_counter()
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child,
        httpx.Client(timeout=120) as web,
    ):
        try:
            assert child.stdout is not None
            url = child.stdout.readline().strip()
            server = psutil.Process(child.pid)
            print(f"ready after {time.perf_counter() - start:.1f} s, {_cpu(server):.1f} s of CPU time")
            places = {"half": max(1, steps // 2), "last": max(0, steps * per_step - 50)}
            pages = {name: f"{url}ppo/{page.format(**places)}" for name, page in PAGES.items()}
            first = {name: _seconds(web, page, server)[0] for name, page in pages.items()}
            # The note about the search is on the page until all texts are decoded.
            while "still being decoded" in web.get(pages["text"]).text:
                time.sleep(5)
            print(f"decoded after {time.perf_counter() - start:.0f} s")
            for name, page in pages.items():
                table.add_row(
                    name, *(f"{part:.2f} s" for part in (first[name], *_seconds(web, page, server)))
                )
            status = Path(f"/proc/{child.pid}/status").read_text()
            if browser is not None:
                _browse(browser, pages, server, screenshots)
        finally:
            child.terminate()
    [peak] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
    print(f"peak memory of the server: {peak / 2**20:.2f} GiB")
    Console().print(table)


class Browser:
    """A headless Chromium that is driven over its debugging protocol.

    Args:
        program: `chromium-headless-shell`.
    """

    def __init__(self, program: Path) -> None:
        self._profile = tempfile.TemporaryDirectory()
        self._numbers = itertools.count(1)
        command = [str(program), "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile.name}", "about:blank"],
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        assert self._process.stderr is not None
        lines = (re.search("ws://([^/]*)/", line) for line in self._process.stderr)
        address = next(found[1] for found in lines if found)
        [page] = [each for each in httpx.get(f"http://{address}/json").json() if each["type"] == "page"]
        self._socket = connect(page["webSocketDebuggerUrl"], max_size=2**27)
        self.ask("Page.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait()
        self._profile.cleanup()

    def ask(self, method: str, **parameters: Any) -> Any:
        """Send a command, and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        return self._until(lambda message: message.get("id") == number)["result"]

    def open(self, address: str) -> float:
        """Open a page, and return the seconds until it is loaded and laid out."""
        start = time.perf_counter()
        self.ask("Page.navigate", url=address)
        self._until(lambda message: message.get("method") == "Page.loadEventFired")
        self.ask("Runtime.evaluate", expression="document.documentElement.getBoundingClientRect().height")
        return time.perf_counter() - start

    def picture(self, width: int, file: Path) -> None:
        """Write a picture of the page in this width."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))

    def _until(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            message: dict[str, Any] = json.loads(self._socket.recv(timeout=120))
            if is_it(message):
                return message


def _browse(
    program: Path, pages: Mapping[str, str], server: psutil.Process, screenshots: Path | None
) -> None:
    """Print the times of the pages in a browser, and keep pictures of them."""
    table = Table("page in Chromium", "loaded", "CPU of the server")
    with Browser(program) as browser:
        for name, page in pages.items():
            before = _cpu(server)
            table.add_row(name, f"{browser.open(page):.2f} s", f"{_cpu(server) - before:.2f} s")
            if screenshots is not None:
                screenshots.mkdir(parents=True, exist_ok=True)
                for width in (900, 1600):
                    browser.picture(width, screenshots / f"{name.replace(' ', '-')}-{width}.png")
    Console().print(table)


def _seconds(web: httpx.Client, page: str, server: psutil.Process) -> tuple[float, float]:
    """Return the seconds until a page is there, and those of the server's CPU time."""
    start, before = time.perf_counter(), _cpu(server)
    web.get(page).raise_for_status()
    return time.perf_counter() - start, _cpu(server) - before


def _cpu(server: psutil.Process) -> float:
    times = server.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
