"""The local store: keys stay inside, objects appear whole, creation happens once, bad addresses are refused.

Locks: key table, address table, one folder for all forms of an address, credentials never echoed,
put/get/list/delete, no temporary file left or listed, an interrupted write changes nothing, content is on the
disk before its name, one winner among racing creators, linked writes, full disks in one sentence, an object
exists although a listing lacks it, a folder that cannot be listed is an error.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import ConfigError, InputError, RLHFError, StoreError
from rlhf_core.storage.store import Store
from tests.support.late_listings import LateListings


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.mark.parametrize(
    "key",
    ["", "/etc/passwd", "../x", "a/../../b", "a/./b", "a//b", "a/", "a\0b", "a\nb", "a\\b", "a?versionId=1",
        ".tmp-x/b",
     "x" * 300, "a/" * 500 + "b", "a\x7fb", "a\ud800"],
)  # fmt: skip
def test_unsafe_keys_are_refused(store: Store, key: str) -> None:
    for action in (
        lambda: store.put_bytes(key, b""),
        lambda: store.read_bytes(key),
        lambda: store.put_if_absent(key, b""),
        lambda: store.delete_prefix(key),
        lambda: store.uri(key),
    ):
        with pytest.raises(InputError):
            action()


@pytest.mark.parametrize("key", ["a", "a/b.c/d-e_f=1", "späße/数", "%2e%2e/x", "...", "a b"])
def test_an_odd_but_harmless_key_is_kept_as_it_is(store: Store, key: str) -> None:
    store.put_bytes(key, b"x")
    assert store.list(key.split("/")[0]) == [key]
    assert store.read_bytes(key) == b"x"


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///prefix",
        "s3://B_cket/x",
        "s3://bucket/../x",
        "gs://bucket/x",
        "http://host/x",
        "file://host/x",
        "file://localhost/x",
        "file://",
        "",
        "  ",
    ],
)
def test_an_address_that_cannot_be_a_store_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url"):
        Store(url)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("s3://user:hunter2@bucket/x", None),
        ("s3://bucket/x", "http://user:hunter2@host:9000"),
        ("file://u:hunter2@h/x", None),
    ],
)
def test_credentials_in_an_address_are_refused_and_not_echoed(url: str, endpoint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        Store(url, endpoint)
    assert "hunter2" not in str(caught.value)


def test_an_endpoint_must_be_the_address_of_a_server() -> None:
    with pytest.raises(ConfigError, match=r"store\.endpoint"):
        Store("s3://bucket/x", "127.0.0.1:9000")


@pytest.mark.parametrize("name", ["s", "run#1", "run?x", "a%20b"])
def test_a_file_address_is_the_same_store_as_its_path(name: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/{name}"
    Store(url).put_bytes("a/b", b"1")
    assert Store(tmp_path / name).read_bytes("a/b") == b"1"
    assert Store(tmp_path / name).uri("a/b") == str(tmp_path / name / "a" / "b")
    assert config_from_tree({"store": {"url": url}}, "test").store_folder == tmp_path / name


def test_a_stored_object_is_listed_read_and_deleted(store: Store, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello")
    store.put_file(tmp_path / "x", "a/b/x")
    store.put_bytes("a/y", b"12")
    store.put_bytes("ab/z", b"")
    assert store.sizes("a") == {"a/b/x": 5, "a/y": 2}
    assert store.exists("a/b/x") and not store.exists("a/b") and not store.exists("a/q")
    store.get_file("a/b/x", tmp_path / "sub" / "back")
    assert (tmp_path / "sub" / "back").read_bytes() == b"hello"
    store.delete(["a/y", "a/nothing"])
    assert store.list("a") == ["a/b/x"]
    store.delete_prefix("a")
    assert store.list("a") == [] and store.list("ab") == ["ab/z"]


def test_a_file_that_another_process_deletes_does_not_keep_the_rest(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        store.put_bytes(f"a/{number}", b"1")
    unlink = os.unlink
    gone: list[Any] = []

    def race(path: Any, **options: Any) -> None:
        unlink(path, **options)
        if not gone:
            gone.append(path)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(os, "unlink", race)
    store.delete_prefix("a")
    assert gone and store.list("a") == []


def test_an_object_that_a_listing_lacks_exists_and_has_a_size(store: Store) -> None:
    late = LateListings(store.url)
    for number in (1, 2, 3):
        late.put_bytes(f"n/{number}/x", b"12")
    late.hidden = "n/[23]/"
    assert late.list("n") == ["n/1/x"] and late.folders("n") == ["1"]
    assert late.exists("n/2/x") and late.size("n/2/x") == 2
    assert late.size("n/2") is late.size("n/4/x") is late.size("n/2/x/y") is None
    assert abs(late.time() - time.time()) < 60 and late.list("probe") == []


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_folder_or_object_that_cannot_be_read_is_an_error(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store.put_bytes("a/b/x", b"1")

    def refuse(path: object = ".", *args: object, **options: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StoreError, match=os.strerror(code)):
        store.list("a")
    monkeypatch.undo()
    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(StoreError, match=os.strerror(code)):
        store.exists("a/b/x")


def test_missing_object_is_none_or_file_not_found(store: Store, tmp_path: Path) -> None:
    assert store.read_bytes("a/b") is None
    assert store.list("a") == []
    store.delete_prefix("a")
    with pytest.raises(FileNotFoundError):
        store.get_file("a/b", tmp_path / "x")
    assert list(tmp_path.glob("*")) == []


def test_an_interrupted_write_leaves_the_old_object_and_no_temporary_file(
    store: Store, tmp_path: Path
) -> None:
    store.put_bytes("a/x", b"old")
    (tmp_path / "new").write_bytes(bytes(2**20))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, limits[1]))
    try:
        # In the middle of the file. Python ignores the signal SIGXFSZ.
        with pytest.raises(StoreError, match="File too large"):
            store.put_file(tmp_path / "new", "a/x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.read_bytes("a/x") == b"old"
    assert [path.name for path in (tmp_path / "store" / "a").iterdir()] == ["x"]


WRITES: dict[str, Callable[[Store, Path], object]] = {
    "bytes": lambda store, source: store.put_bytes("a/x", b"new"),
    "copy": lambda store, source: store.put_file(source, "a/x"),
    "link": lambda store, source: store.put_file(source, "a/x", link=True),
    "creation": lambda store, source: store.put_if_absent("a/x", b"new"),
}


@pytest.mark.parametrize("write", WRITES)
def test_content_is_synced_before_its_name(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    place = tmp_path / "store" / "a" / "x"
    seen: list[int | str] = []
    fsync, replace, link = os.fsync, os.replace, os.link

    def recorded(plain: Callable[..., None]) -> Callable[..., None]:
        def call(source: Path, target: Path, **options: bool) -> None:
            plain(source, target, **options)
            seen.extend(["name"] if target == place else [])

        return call

    def synced(descriptor: int) -> None:
        seen.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", recorded(replace))
    monkeypatch.setattr(os, "link", recorded(link))
    (tmp_path / "new").write_bytes(b"new")
    WRITES[write](store, tmp_path / "new")
    assert place.read_bytes() == b"new"
    assert seen == [place.stat().st_ino, "name", place.parent.stat().st_ino]


def test_unfinished_write_is_not_listed(store: Store, tmp_path: Path) -> None:
    store.put_bytes("a/x", b"1")
    (tmp_path / "store" / "a" / ".tmp-123").write_bytes(b"half")
    assert store.list("a") == ["a/x"]
    store.delete_prefix("a")
    assert not (tmp_path / "store" / "a").exists()


def test_only_the_first_creator_of_a_key_succeeds(store: Store) -> None:
    assert store.put_if_absent("a/x", b"1")
    assert not store.put_if_absent("a/x", b"1")
    assert not store.put_if_absent("a/x", b"2")
    assert store.read_bytes("a/x") == b"1"


def test_exactly_one_racing_creator_wins(store: Store) -> None:
    for turn in range(20):
        with ThreadPoolExecutor(8) as pool:
            won = list(
                pool.map(lambda n, turn=turn: store.put_if_absent(f"r/{turn}", str(n).encode()), range(8))
            )
        assert won.count(True) == 1
        assert store.read_bytes(f"r/{turn}") == str(won.index(True)).encode()


@pytest.mark.usefixtures("no_hard_links")
def test_creation_happens_once_where_the_file_system_has_no_hard_links(store: Store) -> None:
    assert store.put_if_absent("a/x", b"1")
    assert not store.put_if_absent("a/x", b"2")
    assert store.read_bytes("a/x") == b"1"


def test_put_copies_and_linked_put_shares_the_file(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "x"
    source.write_bytes(b"1")
    store.put_file(source, "copy")
    store.put_file(source, "link", link=True)
    store.put_file(source, "link", link=True)
    assert source.stat().st_nlink == 2
    source.write_bytes(b"2")
    assert store.read_bytes("copy") == b"1"
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["copy", "link"]


def test_a_full_disk_is_one_sentence_with_the_path(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RLHFError, match="No space left on device; free some space") as caught:
        store.put_bytes("a/x", b"1")
    assert store.uri("a/x") in str(caught.value)
    assert store.list("a") == []


def test_check_accepts_a_usable_folder_and_leaves_nothing(store: Store, tmp_path: Path) -> None:
    store.check()
    assert list((tmp_path / "store").iterdir()) == []


def test_check_names_the_field_when_the_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"store\.url=.*cannot be used"):
        Store(tmp_path / "file" / "store").check()
