"""The store, artifacts and checkpoints on a real S3-compatible server.

Locks: the store's contract on S3, one winner among racing creators (also on a server that ignores
conditions), an object exists although the server's listing lacks it, damage noticed after a second download,
checkpoints that fall back, downloads that appear whole and are verified again, readable errors for a missing
bucket, a dead server and denied access, no secret in them.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import s3fs
from typing_extensions import override

from rlhf_core.errors import ConfigError, CorruptArtifact, StoreUnavailable, Superseded
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.bundles import hash_file
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from rlhf_core.types import ArtifactRef
from tests.support import corruption
from tests.support.checkpoints import keep
from tests.support.claims import claim


@pytest.fixture
def store(s3_server: Any, request: pytest.FixtureRequest) -> Store:
    return Store(f"{s3_server.url}/{abs(hash(request.node.name))}/x", s3_server.endpoint)


@pytest.fixture(scope="module")
def careless_endpoint(s3_server: Any) -> Iterator[str]:
    """A server that ignores the conditions of conditional puts, as some compatible servers do."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = DomainDispatcherApplication(create_backend_app)

    def careless(environ: dict[str, Any], start_response: Any) -> Any:
        environ.pop("HTTP_IF_NONE_MATCH", None)
        return application(environ, start_response)

    server = make_server("127.0.0.1", 0, careless, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


@pytest.fixture
def late_store(s3_server: Any, store: Store) -> Iterator[tuple[Store, set[str]]]:
    """The store on a server that lists late, and parts of the keys that its listings lack."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = DomainDispatcherApplication(create_backend_app)
    hidden: set[str] = set()

    def late(environ: dict[str, Any], start_response: Any) -> Any:
        is_listing = "list-type" in environ.get("QUERY_STRING", "")
        kept: list[Any] = []
        body = b"".join(application(environ, lambda *head, **more: kept.extend(head)))
        if is_listing:
            for entry in re.findall(rb"<Contents>.*?</Contents>", body, re.DOTALL):
                if any(part.encode() in entry for part in hidden):
                    body = body.replace(entry, b"")
        headers = [each for each in kept[1] if not is_listing or each[0].lower() != "content-length"]
        start_response(kept[0], headers)
        return [body]

    server = make_server("127.0.0.1", 0, late, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Store(store.url, f"http://127.0.0.1:{server.server_port}"), hidden
    server.shutdown()
    thread.join()


def output(folder: Path, text: str = "") -> Path:
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "model.safetensors").write_bytes(bytes(range(256)) * 8 + text.encode())
    (folder / "card.md").write_text("card")
    return folder


def publish(artifacts: ArtifactStore, folder: Path, **more: Any) -> ArtifactRef:
    return artifacts.publish("ppo", "k", folder, Provenance(metrics={"kl": 1.0}), **more)


def test_a_stored_object_is_listed_read_and_deleted(store: Store, tmp_path: Path) -> None:
    store.check()
    (tmp_path / "x").write_bytes(b"hello")
    store.put_file(tmp_path / "x", "a/b/x")
    store.put_bytes("a/späße", b"12")
    store.put_bytes("ab/z", b"")
    assert store.sizes("a") == {"a/b/x": 5, "a/späße": 2}
    assert list(store.folders("a")) == ["b"] and list(store.folders("a/b")) == list(store.folders("q")) == []
    assert store.exists("a/b/x") and not store.exists("a/b") and not store.exists("a/q")
    assert store.uri("a/b/x").startswith("s3://rlhf-test/")
    store.get_file("a/b/x", tmp_path / "sub" / "back")
    assert (tmp_path / "sub" / "back").read_bytes() == b"hello"
    assert store.read_bytes("a/q") is None
    with pytest.raises(FileNotFoundError):
        store.get_file("a/q", tmp_path / "q")
    store.delete(["a/b/x", "a/nothing"])
    assert store.list("a") == ["a/späße"]
    store.delete_prefix("a")
    assert store.list("a") == [] and store.list("ab") == ["ab/z"]


def test_an_object_that_a_listing_lacks_exists_and_has_a_size(late_store: tuple[Store, set[str]]) -> None:
    store, hidden = late_store
    for number in (1, 2, 3):
        store.put_bytes(f"n/{number}/x", b"12")
    hidden |= {"n/2/", "n/3/"}
    assert store.list("n") == ["n/1/x"]
    assert store.exists("n/2/x") and store.size("n/2/x") == 2
    assert store.size("n/2") is store.size("n/4/x") is None
    assert abs(store.time() - time.time()) < 60


def test_an_artifact_and_a_claim_that_a_listing_lacks_are_there(
    late_store: tuple[Store, set[str]], tmp_path: Path
) -> None:
    store, hidden = late_store
    first, second = claim(store, "k"), claim(store, "k")
    ref = publish(ArtifactStore(store, tmp_path / "cache"), output(tmp_path / "out"), fence=second)
    hidden |= {"model.safetensors", "000002.json"}
    assert len(store.list("artifacts")) == 2, "the manifest and the card"
    assert ArtifactStore(store, tmp_path / "cache").find("ppo", "k") == ref
    assert (ArtifactStore(store, tmp_path / "other").fetch(ref) / "policy" / "model.safetensors").is_file()
    with pytest.raises(Superseded):
        first.check()
    store.check()


def test_a_file_of_many_parts_comes_back_bit_by_bit(store: Store, tmp_path: Path) -> None:
    data = bytes(range(251)) * (40 * 2**20 // 251)
    (tmp_path / "big").write_bytes(data)
    store.put_file(tmp_path / "big", "big")
    store.get_file("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


@pytest.mark.parametrize("size", [1000, 40 * 2**20])
def test_what_is_sent_is_compared_with_its_digest(store: Store, tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(250)) * (size // 250))
    digest = hash_file(file)
    store.put_file(file, "whole", sha256=digest)
    with file.open("r+b") as damaged:
        damaged.seek(size // 2)
        damaged.write(b"damaged")
    with pytest.raises(CorruptArtifact, match="has other content than its manifest says"):
        store.put_file(file, "damaged", sha256=digest)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_what_is_sent_again_after_lost_answers_is_whole(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]
    from botocore.exceptions import ConnectionClosedError

    store.check()
    send, answers = AIOHTTPSession.send, iter(range(10))

    async def lose(session: Any, request: Any) -> Any:
        answer = await send(session, request)
        if request.method == "PUT" and next(answers) < lost:
            raise ConnectionClosedError(endpoint_url=request.url)
        return answer

    monkeypatch.setattr(AIOHTTPSession, "send", lose)
    (tmp_path / "file").write_bytes(b"content")
    store.put_file(tmp_path / "file", "file", sha256=hash_file(tmp_path / "file"))
    assert store.read_bytes("file") == b"content"
    answers = iter(range(10))
    store.put_bytes("bytes", b"content")
    assert store.read_bytes("bytes") == b"content"


def test_parts_of_interrupted_uploads_are_deleted(store: Store, s3_server: Any) -> None:
    def begin(key: str) -> None:
        bucket, _, path = store.uri(key).removeprefix("s3://").partition("/")
        upload = {"Bucket": bucket, "Key": path}
        made = objects.call_s3("create_multipart_upload", **upload)
        objects.call_s3("upload_part", **upload, UploadId=made["UploadId"], PartNumber=1, Body=b"x" * 2**20)

    def unfinished() -> list[str]:
        bucket, _, end = store.uri("end").removeprefix("s3://").partition("/")
        mine = end.removesuffix("end")  # other tests leave theirs in the same bucket
        keys = [upload["Key"] for upload in objects.list_multipart_uploads(bucket)]
        return [key.removeprefix(mine) for key in keys if key.startswith(mine)]

    objects = s3fs.S3FileSystem(endpoint_url=s3_server.endpoint)
    for key in ("checkpoints/k/step-1/shard", "checkpoints/k2/step-1/shard"):
        begin(key)
    store.abort_multipart_uploads("checkpoints/k")
    assert unfinished() == ["checkpoints/k2/step-1/shard"]
    store.abort_multipart_uploads("checkpoints/k2")
    assert unfinished() == []


def test_of_racing_creators_exactly_one_wins(store: Store) -> None:
    assert store.put_if_absent("r/first", b"1") and not store.put_if_absent("r/first", b"2")
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda n: store.put_if_absent("r/race", str(n).encode()), range(4)))
    assert won.count(True) == 1
    assert store.read_bytes("r/race") == str(won.index(True)).encode()


def test_one_racing_creator_wins_without_conditional_puts(
    s3_server: Any, careless_endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(f"{s3_server.url}/careless", careless_endpoint)
    assert store.put_if_absent("warm-up", b"")
    assert "ignores conditional puts" in caplog.text
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda n: store.put_if_absent("race", str(n).encode()), range(4)))
    assert won.count(True) == 1
    assert store.read_bytes("race") == str(won.index(True)).encode()
    assert store.list("race") == ["race"]


def test_a_published_artifact_is_fetched_verified_and_cached(store: Store, tmp_path: Path) -> None:
    ref = publish(ArtifactStore(store, tmp_path / "cache"), output(tmp_path / "out"), fence=claim(store, "k"))
    reader = ArtifactStore(store, tmp_path / "other")
    assert reader.find("ppo", "k") == ref
    folder = reader.fetch(ref)
    assert (folder / "policy" / "model.safetensors").stat().st_size == 2048
    assert ref.uri.endswith("/artifacts/ppo/k/000001")
    (folder / "card.md").write_text("Card")
    again = ArtifactStore(store, tmp_path / "other").fetch(ref)
    assert (again / "card.md").read_text() == "card", "a cached copy is verified before it is used again"
    assert [path for path in (tmp_path / "other").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("make", "cases"),
    [(corruption.artifact, corruption.ARTIFACT_CASES), (corruption.checkpoint, corruption.CHECKPOINT_CASES)],
)
def test_mutations_of_every_file_are_detected_and_logged(
    make: Callable[[Store, Path], corruption.Bundle],
    cases: int,
    every: int,
    store: Store,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    summary_lines: list[str],
) -> None:
    bundle = make(store, tmp_path)
    caplog.set_level(logging.WARNING)
    counted, missed = corruption.undetected(bundle, tmp_path / "open", caplog.records, every=every)
    assert missed == []
    assert counted.total() == -(-cases // every)
    summary_lines.append(f"{make.__name__} on S3: {counted.total()} mutations, {len(missed)} not detected")


def test_damaged_artifact_is_marked_and_made_again(store: Store, tmp_path: Path) -> None:
    artifacts = ArtifactStore(store, tmp_path / "cache")
    ref = publish(artifacts, output(tmp_path / "out"), fence=claim(store, "k"))
    key = "artifacts/ppo/k/000001/policy/model.safetensors"
    store.put_bytes(key, corruption.flip_bit(store.read_bytes(key) or b"", 0))
    with pytest.raises(CorruptArtifact, match=r"s3://.*policy/model\.safetensors"):
        artifacts.fetch(ref)
    assert artifacts.find("ppo", "k") is None
    # A file has its name only with its content.
    assert list(tmp_path.glob("cache/**/model.safetensors")) == []
    assert publish(artifacts, output(tmp_path / "out"), fence=claim(store, "k")).digest == ref.digest


class LosesOneDownload(Store):
    """A store whose first download of the card is empty."""

    downloads = 0

    @override
    def get_file(self, key: str, local: Path, size: int | None = None) -> None:
        super().get_file(key, local, size)
        if key.endswith("card.md"):
            self.downloads += 1
            if self.downloads == 1:
                local.write_bytes(b"")


def test_one_bad_download_does_not_condemn_an_artifact(store: Store, s3_server: Any, tmp_path: Path) -> None:
    ref = publish(ArtifactStore(store, tmp_path / "cache"), output(tmp_path / "out"))
    lossy = LosesOneDownload(store.url, s3_server.endpoint)
    artifacts = ArtifactStore(lossy, tmp_path / "cache")
    assert (artifacts.fetch(ref) / "card.md").read_text() == "card"
    assert lossy.downloads == 2
    assert artifacts.find("ppo", "k") == ref


def test_a_damaged_checkpoint_falls_back_to_the_one_before(store: Store, tmp_path: Path) -> None:
    saver = CheckpointStore(store, "k", tmp_path / "work", keep(2), claim(store, "k"))
    for step in range(3):
        saver.save(step, output(tmp_path / f"state{step}", str(step)))
    assert {key.split("/")[2] for key in store.list("checkpoints/k")} == {
        "attempts", "newest.json", "step-00000001", "step-00000002",
    }  # fmt: skip
    prefix = "checkpoints/k/step-00000002"
    store.put_bytes(f"{prefix}/manifest.json", b"")
    resumed = CheckpointStore(store, "k", tmp_path / "work", keep(2), claim(store, "k"))
    found = resumed.latest()
    assert found is not None and found[0] == 1
    assert (found[1] / "policy" / "model.safetensors").read_bytes().endswith(b"1")
    with pytest.raises(Superseded):
        saver.save(5, output(tmp_path / "state5"))
    resumed.clear()
    assert resumed.latest() is None
    assert [key for key in store.list(prefix) if "/damaged-" in key]


def test_a_missing_bucket_is_a_config_error_that_names_it(s3_server: Any) -> None:
    with pytest.raises(ConfigError, match=r"store\.url=.*bucket.*does not exist"):
        Store("s3://no-such-bucket/x", s3_server.endpoint).check()


def test_unreachable_server_is_reported_within_seconds(s3_server: Any) -> None:
    with pytest.raises(StoreUnavailable, match=r"store\.url=.*Could not connect") as caught:
        Store(s3_server.url, "http://127.0.0.1:9").check()
    assert "test-secret" not in str(caught.value)
