"""A bucket behind a faulty network, and what is left of it.

Locks: 5xx, SlowDown, slow answers, resets, lost answers, cut requests and cut or short answers are survived,
and the artifact and the checkpoints have the right bytes afterwards; at no time is a partial one readable; an
outage beyond the bound, a full bucket, expired credentials and denied access are a StoreError that says what
to do, keep everything locally, and the next attempt uploads it; a permanent one is not tried twice; an upload
that nobody reads ends; a stage that is asked to stop during one does, and leaves nothing half; uploads behind
the training are as safe; preflight says what is wrong with the store in one message, and takes no outage for
a wrong configuration.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from botocore.retries.standard import ExponentialBackoff

from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import Source
from rlhf_core.config.load import load_config
from rlhf_core.config.pipeline import StoreConfig
from rlhf_core.data.sources import read_rows
from rlhf_core.errors import ConfigError, DataError, RLHFError, StoreError, StoreUnavailable
from rlhf_core.executors.child import TERM_SECONDS
from rlhf_core.executors.events import PARENT_VARIABLE, STOP_VARIABLE, Events
from rlhf_core.executors.spec import StageSpec
from rlhf_core.run import attempt as run
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.s3 import S3Limits
from rlhf_core.storage.store import Store
from rlhf_core.system.processes import EXIT_STOPPED
from rlhf_core.types import ArtifactRef, StageContext, StageResult
from tests.integration.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.support.attempts import attempt_with
from tests.support.checkpoints import keep
from tests.support.claims import claim

TINY = Path(__file__).parents[1] / "assets" / "tiny.yaml"
PARTS = 5 * 2**20
"""The smallest part that S3 takes: the artifact's weights need three."""


@pytest.fixture(scope="module")
def proxy(s3_server: Any) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3_server.endpoint) as server:
        yield server


@pytest.fixture
def url(s3_server: Any, tmp_path: Path) -> str:
    return f"{s3_server.url}/{tmp_path.name}"


QUICK = S3Limits(part_bytes=PARTS, read_seconds=1.0, first_pause=0.02)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    # The client's own pause between its two tries of a request: up to a second.
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0.02)


def every(period: int, fault: Fault) -> Callable[[int], Fault]:
    return lambda n: fault if n % period == 0 else ""


def burst(length: int, fault: Fault) -> Callable[[int], Fault]:
    return lambda n: fault if n <= length else ""


def mixed(n: int) -> Fault:
    kinds = ["500", "503", "reset", "lost answer", "cut request", "cut answer"]
    draw = random.Random(n)
    return draw.choice(kinds) if draw.random() < 0.25 else ""


PASSING: dict[str, Callable[[int], Fault]] = {
    "5xx, every 3rd": every(3, "500"),
    "SlowDown, burst of 9": burst(9, "503"),
    "SlowDown, every 2nd": every(2, "503"),
    "slower than the timeout, every 20th": every(20, "slow"),
    "reset, every 3rd": every(3, "reset"),
    "lost answer, every 3rd": every(3, "lost answer"),
    "cut request, every 3rd": every(3, "cut request"),
    "cut answer, every 3rd": every(3, "cut answer"),
    "short answer, every 10th": every(10, "short answer"),
    "all of them, a quarter of all": mixed,
}


WEIGHTS = random.Random(0).randbytes(2 * PARTS + 12345)


def artifact_folder(tmp_path: Path, weights: bytes) -> Path:
    folder = tmp_path / "out"
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "model.safetensors").write_bytes(weights)
    (folder / "card.md").write_text("card")
    return folder


def state(tmp_path: Path, step: int) -> Path:
    folder = tmp_path / f"state{step}"
    folder.mkdir()
    (folder / "rank0.pt").write_bytes(bytes([step]) * 4096)
    return folder


class Attempt:
    """One attempt at a stage, over the proxy."""

    def __init__(self, url: str, endpoint: str, tmp_path: Path, retry_seconds: float = 30.0) -> None:
        self.store = Store(url, endpoint, retry_seconds, QUICK)
        self.fence = claim(self.store, "k")
        outbox = Outbox(self.store, tmp_path / "outbox")
        self.artifacts = ArtifactStore(self.store, tmp_path / "cache", outbox)
        self.checkpoints = CheckpointStore(
            self.store, "k", tmp_path / "work", keep(2), self.fence, outbox=outbox
        )

    def publish(self, tmp_path: Path, weights: bytes = WEIGHTS) -> ArtifactRef:
        folder = artifact_folder(tmp_path, weights)
        return self.artifacts.publish("ppo", "k", folder, Provenance(), fence=self.fence)


def assert_right(store: Store, tmp_path: Path, steps: list[int]) -> None:
    """Looked at without the proxy: the artifact and these checkpoints, and nothing that is half."""
    eyes = ArtifactStore(store, tmp_path / "eyes")
    ref = eyes.find("ppo", "k")
    assert ref is not None
    assert (eyes.fetch(ref) / "policy" / "model.safetensors").read_bytes() == WEIGHTS
    assert_checkpoints(store, tmp_path, steps)


def assert_checkpoints(store: Store, tmp_path: Path, steps: list[int]) -> None:
    found = CheckpointStore(store, "k", tmp_path / "eyes", keep(2)).latest()
    assert found is not None and found[0] == steps[-1]
    assert (found[1] / "rank0.pt").read_bytes() == bytes([steps[-1]]) * 4096
    manifests = [key for key in store.list("checkpoints/k") if key.endswith("manifest.json")]
    assert manifests == [f"checkpoints/k/step-{step:08d}/manifest.json" for step in steps]
    assert not [key for key in store.list("checkpoints") + store.list("artifacts") if "damaged-" in key]


@pytest.mark.parametrize("name", PASSING)
def test_temporary_fault_is_survived_with_the_right_bytes(
    name: str, proxy: FaultyProxy, url: str, s3_server: Any, tmp_path: Path, summary_lines: list[str]
) -> None:
    proxy.restart(PASSING[name])
    started = time.monotonic()
    # A fault with a period can meet the same request of a file again and again. A loaded machine makes few
    # tries in 30 s.
    attempt = Attempt(url, proxy.endpoint, tmp_path, retry_seconds=120.0)
    for step in (1, 2, 3):
        attempt.checkpoints.save(step, state(tmp_path, step))
    ref = attempt.publish(tmp_path)
    fetched = attempt.artifacts.fetch(ref)
    assert (fetched / "policy" / "model.safetensors").read_bytes() == WEIGHTS
    # The upload of the last checkpoint runs in the background, and the next attempt would supersede it.
    upload = attempt.checkpoints._background_upload
    assert upload is not None
    upload[1].result()
    resumed = Attempt(url, proxy.endpoint, tmp_path / "other").checkpoints.latest()
    assert resumed is not None and resumed[0] == 3
    faults = {fault: count for fault, count in sorted(proxy.seen.items()) if fault}
    assert sum(faults.values()) >= 3
    assert_right(Store(url, s3_server.endpoint), tmp_path, [2, 3])
    assert not [path for path in (tmp_path / "outbox").rglob("*") if path.is_file()]
    summary_lines.append(
        f"{name:38} {sum(proxy.seen.values()):4} requests, {sum(faults.values()):3} faults {faults}, "
        f"{time.monotonic() - started:.1f} s: right"
    )


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("expired", "access denied .*expired.*check the credentials"),
        ("denied", "access denied .*check the credentials"),
        ("503", "in [0-9]+ tries over [0-9]+ s: "),
        ("reset", "in [0-9]+ tries over [0-9]+ s: "),
        ("full", "in [0-9]+ tries over [0-9]+ s: .*; free space in the bucket, or raise its quota"),
    ],
)
@pytest.mark.parametrize("after", [0, 4])
def test_failed_upload_is_kept_and_repeated(
    fault: Fault,
    says: str,
    after: int,
    proxy: FaultyProxy,
    url: str,
    s3_server: Any,
    tmp_path: Path,
    summary_lines: list[str],
) -> None:
    proxy.restart(lambda n: "")
    attempt = Attempt(url, proxy.endpoint, tmp_path, retry_seconds=0.5)
    attempt.checkpoints.save(1, state(tmp_path, 1))
    attempt.checkpoints.finish()
    attempt.artifacts.find("ppo", "k")
    proxy.restart(lambda n: fault if n > after else "")
    started = time.monotonic()
    attempt.checkpoints.save(2, state(tmp_path, 2))
    with pytest.raises(StoreError, match=f"{says}.* It is kept in .*; the same command uploads it") as caught:
        attempt.checkpoints.save(3, state(tmp_path, 3))
    seconds, tries = time.monotonic() - started, proxy.seen[fault]
    assert caught.value.exit_code == 3
    assert seconds < 30
    if fault in ("expired", "denied"):
        assert tries == 1, "what cannot pass is not tried again"
    direct = Store(url, s3_server.endpoint)
    assert_checkpoints(direct, tmp_path, [1])

    proxy.restart(lambda n: "")
    second = Attempt(url, proxy.endpoint, tmp_path)
    found = second.checkpoints.latest()
    assert found is not None and found[0] == 3
    assert_checkpoints(direct, tmp_path / "again", [2, 3])
    summary_lines.append(
        f"{fault + f' for good, after {after}':38} StoreError in {seconds:.1f} s after {tries} tries; then"
        " uploaded"
    )


def _fault_after(allowed: int, fault: Fault, number: int) -> Fault:
    return fault if number > allowed else ""


@pytest.mark.parametrize("fault", ["expired", "503"])
def test_killed_upload_is_invisible_and_the_next_attempt_finishes_it(
    fault: Fault, proxy: FaultyProxy, url: str, s3_server: Any, tmp_path: Path, summary_lines: list[str]
) -> None:
    ended = []
    for allowed in range(1, 100, 3):
        place = tmp_path / str(allowed)
        proxy.restart(lambda n: "")
        attempt = Attempt(f"{url}/{allowed}", proxy.endpoint, place, retry_seconds=0.3)
        attempt.artifacts.find("ppo", "k")
        proxy.restart(partial(_fault_after, allowed, fault))
        eyes = ArtifactStore(Store(f"{url}/{allowed}", s3_server.endpoint), place / "eyes")
        try:
            ref = attempt.publish(place, WEIGHTS[:5000])
        except StoreError:
            seen = eyes.find("ppo", "k")
            proxy.restart(lambda n: "")
            second = Attempt(f"{url}/{allowed}", proxy.endpoint, place)
            delivered = second.artifacts.upload_pending("ppo", "k", second.fence)
            assert delivered is not None and seen in (None, delivered)
            ref = delivered
            ended.append(allowed)
        assert eyes.find("ppo", "k") == ref
        assert (eyes.fetch(ref) / "policy" / "model.safetensors").read_bytes() == WEIGHTS[:5000]
        if not ended or ended[-1] != allowed:
            break
    assert len(ended) >= 3
    summary_lines.append(
        f"{fault + ' in the middle of an artifact':38} after {ended} requests: unseen, then uploaded"
    )


def test_expired_credentials_exit_with_3_and_lose_nothing(
    proxy: FaultyProxy, url: str, s3_server: Any, tmp_path: Path, new_home: Callable[[Path], Path]
) -> None:
    sections = {
        "run": {"home": str(new_home(tmp_path / "home"))},
        "store": {"url": url, "endpoint": proxy.endpoint},
        "tracking": {"system_metrics": False},
    }
    spec = StageSpec("data", "k", PipelineConfig.model_validate(sections))
    made = []

    def stage(config: PipelineConfig, context: StageContext) -> StageResult:
        made.append(context.checkpoints.latest())
        context.checkpoints.save(1, state(context.scratch, 1))
        (context.output / "rows.json").write_text("[1, 2]")
        proxy.restart(lambda n: "expired")
        return StageResult({"rows": 2.0})

    proxy.restart(lambda n: "")
    with pytest.raises(
        StoreError, match=r"expired.*check the credentials.*the same command uploads it"
    ) as caught:
        attempt_with(stage, spec)
    assert caught.value.exit_code == 3
    direct = Store(url, s3_server.endpoint)
    assert ArtifactStore(direct, tmp_path / "eyes").find("data", "k") is None

    proxy.restart(lambda n: "")
    ref = attempt_with(stage, spec)
    assert ref.metrics == {"rows": 2.0}
    eyes = ArtifactStore(direct, tmp_path / "eyes")
    assert eyes.find("data", "k") == ref and (eyes.fetch(ref) / "rows.json").read_text() == "[1, 2]"
    assert {key.split("/")[2] for key in direct.list("checkpoints/k")} == {"attempts"}
    assert not [path for path in (tmp_path / "home" / "outbox").rglob("*") if path.is_file()]
    assert made == [None], "the second attempt had nothing to make"


def test_only_the_part_of_a_file_that_failed_is_sent_again(
    proxy: FaultyProxy, url: str, s3_server: Any, tmp_path: Path
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(WEIGHTS)
    # More failures than the client itself retries.
    proxy.restart(lambda n: "500" if n <= 5 else "", path="partNumber=2")
    Store(url, proxy.endpoint, s3_limits=QUICK).put_file(file, "a/weights")
    parts = Counter(part for request in proxy.requests for part in re.findall(r"partNumber=(\d+)", request))
    assert parts == {"1": 1, "2": 6, "3": 1}
    Store(url, s3_server.endpoint).get_file("a/weights", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == WEIGHTS


@pytest.mark.parametrize(("fault", "tries"), [("denied", 1), ("expired", 1), ("500", 10)])
def test_a_part_is_sent_a_limited_number_of_times(
    fault: Fault, tries: int, proxy: FaultyProxy, url: str, tmp_path: Path
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(WEIGHTS)
    proxy.restart(lambda n: fault, path="partNumber=2")
    with pytest.raises(StoreError):
        Store(url, proxy.endpoint, retry_seconds=2.0, s3_limits=QUICK).put_file(file, "a/weights")
    # Temporary errors: the upload of the whole file starts again afterwards.
    starts = [number for number, request in enumerate(proxy.requests) if request.endswith("uploads")]
    first = proxy.requests[starts[0] : starts[1] if len(starts) > 1 else None]
    assert sum("partNumber=2" in request for request in first) == tries
    assert (len(starts) > 1) == (fault == "500")


def test_stalled_upload_is_aborted_and_repeated(proxy: FaultyProxy, url: str, tmp_path: Path) -> None:
    # One request of more bytes than the network's buffers take. `read_seconds` does not bound what is sent.
    limits = S3Limits(request_seconds=2.0, read_seconds=60.0, part_bytes=2**23, first_pause=0.02)
    file = tmp_path / "weights"
    file.write_bytes(random.Random(0).randbytes(2**23))
    proxy.restart(lambda n: "stall" if n == 1 else "")
    started = time.monotonic()
    Store(url, proxy.endpoint, s3_limits=limits).put_file(file, "a/weights")
    assert 2 < time.monotonic() - started < 15
    assert proxy.seen["stall"] == 1
    Store(url, proxy.endpoint).get_file("a/weights", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(("times", "code"), [(1, EXIT_STOPPED), (2, 128 + signal.SIGKILL)])
def test_stop_during_an_upload_leaves_nothing_partial(
    times: int,
    code: int,
    proxy: FaultyProxy,
    url: str,
    s3_server: Any,
    tmp_path: Path,
    new_home: Callable[[Path], Path],
    summary_lines: list[str],
) -> None:
    config = load_config(TINY, [f"run.home={new_home(tmp_path / 'home')}", f"store.url={url}"])
    config = config.model_copy(update={"store": config.store.model_copy(update={"endpoint": proxy.endpoint})})
    spec = StageSpec("data", "k", config)
    spec.write(tmp_path / "spec.json")
    flow = {PARENT_VARIABLE: str(os.getpid()), STOP_VARIABLE: str(TERM_SECONDS)}
    command = [sys.executable, "-m", "rlhf_core.run", str(tmp_path / "spec.json")]
    proxy.restart(lambda n: "stall" if n > 2 else "", path="/artifacts/data/k/")
    with (tmp_path / "log").open("wb") as log:
        stage = subprocess.Popen(
            command, env={**os.environ, **flow}, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + 120
    while not proxy.seen["stall"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert proxy.seen["stall"], (tmp_path / "log").read_text()[-2000:]
    asked = time.monotonic()
    for _ in range(times):
        stage.terminate()
        time.sleep(0.3)  # before it has left
    assert stage.wait(timeout=25) == code
    assert time.monotonic() - asked < 25
    seconds = time.monotonic() - asked
    direct = Store(url, s3_server.endpoint)
    assert ArtifactStore(direct, tmp_path / "eyes").find("data", "k") is None

    proxy.restart(lambda n: "")
    made = run.run_attempt(spec, Events(None))
    eyes = ArtifactStore(direct, tmp_path / "eyes")
    assert eyes.find("data", "k") == made and (eyes.fetch(made) / "data_card.json").stat().st_size > 0
    summary_lines.append(f"SIGTERM x {times} during an upload: gone after {seconds:.1f} s, then uploaded")


@pytest.mark.parametrize(
    ("fault", "kind", "code"),
    [
        ("expired", ConfigError, 2),
        ("denied", ConfigError, 2),
        ("503", StoreUnavailable, 3),
        ("reset", StoreUnavailable, 3),
        ("short answer", StoreUnavailable, 3),
    ],
)
def test_preflight_has_one_message_about_the_store(
    fault: Fault, kind: type[RLHFError], code: int, proxy: FaultyProxy, url: str
) -> None:
    proxy.restart(lambda n: fault)
    started = time.monotonic()
    with pytest.raises(kind, match=r"store\.url=.* cannot be used") as caught:
        Store(url, proxy.endpoint, s3_limits=QUICK).check()
    assert time.monotonic() - started < 20
    assert type(caught.value) is kind and caught.value.exit_code == code
    assert "\n" not in caught.value.message and "test-secret" not in caught.value.message
    proxy.restart(lambda n: "")
    Store(url, proxy.endpoint, s3_limits=QUICK).check()


def test_flow_waits_for_the_store_at_its_start(proxy: FaultyProxy, url: str) -> None:
    proxy.restart(lambda n: "503" if n < 12 else "")
    Store(url, proxy.endpoint, s3_limits=QUICK).check(retry_seconds=60.0)
    assert proxy.seen["503"] == 11


def test_an_outage_of_the_datas_bucket_is_no_fault_of_the_data(proxy: FaultyProxy, url: str) -> None:
    for fault, kind in (("503", StoreUnavailable), ("denied", DataError)):
        proxy.restart(partial(_fault_after, 0, fault))
        with pytest.raises(kind, match=r"cannot list s3://") as caught:
            list(
                read_rows(
                    Source(path=f"{url}/rows.jsonl"), StoreConfig(endpoint=proxy.endpoint, retry_seconds=2.0)
                )
            )
        assert type(caught.value) is kind
