"""Corruption of stored bundles: every mutation of every file, for tests of local folders and S3 buckets.

`cases` lists the mutations. `undetected` applies each one, opens the bundle with an empty cache and restores
it.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.errors import CorruptArtifact
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.bundles import FileEntry, digest_of
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from rlhf_core.system.files import json_sha256
from rlhf_core.types import checkpoint_prefix
from tests.support.checkpoints import keep

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2048\n"
HTML = b"<html><body><h1>503 Slow Down</h1></body></html>"


def flip_bit(data: bytes, index: int) -> bytes:
    """Return `data` with the lowest bit of one byte flipped."""
    changed = bytearray(data)
    changed[index] ^= 1
    return bytes(changed)


Mutation = Callable[[bytes], bytes | None]
"""Returns the new content, or None to delete the object."""

ANY_FILE: dict[str, Mutation] = {
    "first byte flipped": lambda data: flip_bit(data, 0) if data else data,
    "middle byte flipped": lambda data: flip_bit(data, len(data) // 2) if data else data,
    "last byte flipped": lambda data: flip_bit(data, -1) if data else data,
    "one byte short": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "zeroed": lambda data: bytes(len(data)),
    "one byte more": lambda data: data + b"\0",
    "pointer file": lambda data: POINTER,
    "error page": lambda data: HTML,
    "deleted": lambda data: None,
}
MANIFEST: dict[str, Mutation] = {
    **ANY_FILE,
    "null": lambda data: b"null",
    "a list": lambda data: b"[]",
    "nested deeply": lambda data: b"[" * 100_000,
    "an edited number": lambda data: data.replace(b'"size": 2', b'"size": 3', 1),
}


def forged(change: Callable[[dict[str, Any]], object]) -> Mutation:
    """Return a mutation of a manifest that also corrects its digest and its checksum."""

    def mutate(data: bytes) -> bytes:
        content = json.loads(data)
        del content["checksum"]
        change(content)
        content["digest"] = digest_of([FileEntry(**entry) for entry in content["files"]])
        return json.dumps({**content, "checksum": json_sha256(content)}).encode()

    return mutate


def set_versions(store: Store, stage_key: str, step: int, **versions: str) -> None:
    """Change the versions in the manifest of a checkpoint, as if other ones had written it."""
    keys = store.list(f"{checkpoint_prefix(stage_key)}/step-{step:08d}")
    [key] = [key for key in keys if key.endswith("/manifest.json")]
    change = forged(lambda manifest: manifest["made_with"].update(versions))
    store.put_bytes(key, change(store.read_bytes(key) or b"") or b"")


FORGERIES: dict[str, Mutation] = {
    "another sha256": forged(lambda m: m["files"][0].update(sha256="0" * 64)),
    "another size": forged(lambda m: m["files"][0].update(size=1)),
    "size as text": forged(lambda m: m["files"][0].update(size=str(m["files"][0]["size"]))),
    "an entry less": forged(lambda m: m["files"].pop()),
    "an entry more": forged(lambda m: m["files"].append({"path": "more", "size": 0, "sha256": "0" * 64})),
    "an entry twice": forged(lambda m: m["files"].append(m["files"][0])),
    "two entries swapped": forged(
        lambda m: (
            m["files"][0].update(path=m["files"][1]["path"]),
            m["files"][1].update(path=m["files"][0]["path"]),
        )
    ),
    "path out of the folder": forged(lambda m: m["files"][0].update(path="../x")),
    "absolute path": forged(lambda m: m["files"][0].update(path="/etc/passwd")),
    "path with a backslash": forged(lambda m: m["files"][0].update(path="..\\x")),
    "folder out of the bundle": forged(lambda m: m.update(folder="../other")),
    "dangling folder": forged(lambda m: m.update(folder="000099")),
    "older schema": forged(lambda m: m.update(schema=0)),
    "another kind or step": forged(lambda m: m.update({"step": 7} if "step" in m else {"kind": "sft"})),
}


# A file with content: 11 of ANY_FILE + swap + additional file = 13. An empty file: 4 of ANY_FILE change it +
# 2 = 6. A manifest: 15 + 14 forgeries = 29. newest.json: 11 + 2 = 13.
ARTIFACT_CASES = 3 * 13 + 6 + 29
CHECKPOINT_CASES = 5 * 13 + 29 + 13


@dataclass(frozen=True)
class Bundle:
    """A committed artifact or checkpoint."""

    store: Store
    prefix: str
    """All objects with this prefix may be changed."""
    manifest: str
    data: str
    """Key of the folder with the files."""
    open: Callable[[Path], str]
    """Opens the bundle with an empty cache folder. Returns `damaged` if it is refused or an earlier bundle is
    used instead, otherwise `used`.
    """

    def names(self) -> list[str]:
        return [key for key in self.store.list(self.prefix) if "/attempts/" not in key]


@dataclass(frozen=True)
class Case:
    name: str
    key: str
    changes: dict[str, bytes | None]
    """New content by key, or None to delete the object."""
    harmless: bool = False
    """Must be logged, but the bundle is intact and is used."""


def cases(bundle: Bundle) -> Iterator[Case]:
    """Yield every mutation of every object of the bundle."""
    files = [key for key in bundle.names() if key.startswith(f"{bundle.data}/")]
    content = {key: bundle.store.read_bytes(key) or b"" for key in bundle.names()}
    for key, sibling in zip(files, [*files[1:], files[0]], strict=True):
        yield from (Case(name, key, {key: mutate(content[key])}) for name, mutate in ANY_FILE.items())
        yield Case("swapped with its sibling", key, {key: content[sibling], sibling: content[key]})
        yield Case("additional file", key, {f"{key}.json": b"{}"})
    for name, mutate in (MANIFEST | FORGERIES).items():
        yield Case(f"manifest: {name}", bundle.manifest, {bundle.manifest: mutate(content[bundle.manifest])})
    for key in content:
        if key.endswith("newest.json"):
            for name, mutate in ANY_FILE.items():
                yield Case(f"newest.json: {name}", key, {key: mutate(content[key])}, harmless=True)
            yield Case("newest.json: a missing step", key, {key: newest_json(9)}, harmless=True)
            yield Case("newest.json: edited", key, {key: content[key].replace(b"2", b"1", 1)}, harmless=True)


def newest_json(step: int) -> bytes:
    return json.dumps({"step": step, "checksum": json_sha256({"step": step})}).encode()


def undetected(
    bundle: Bundle, tmp_path: Path, records: list[logging.LogRecord], *, every: int = 1
) -> tuple[Counter[str], list[str]]:
    """Apply the first of every `every` cases. Return the number of those that were applied by name, and those
    that were not detected or not logged.
    """
    before = {key: bundle.store.read_bytes(key) or b"" for key in bundle.names()}
    counted: Counter[str] = Counter()
    missed = []
    # A mutation that does not change its file is none: half of an empty file is empty.
    mutated = [
        case for case in cases(bundle) if any(before.get(key) != data for key, data in case.changes.items())
    ]
    for number, case in enumerate(mutated[::every]):
        for key, data in case.changes.items():
            if data is None:
                bundle.store.delete([key])
            else:
                bundle.store.put_bytes(key, data)
        records.clear()
        outcome = bundle.open(tmp_path / str(number))
        logged = any(record.levelno >= logging.WARNING for record in records)
        counted[case.name] += 1
        expected = "used" if case.harmless else "damaged"
        if not logged or outcome != expected:
            missed.append(f"{case.name}: {case.key}: {outcome}, {'logged' if logged else 'not logged'}")
        bundle.store.delete([key for key in bundle.names() if key not in before])
        for key in {*case.changes, bundle.manifest} & before.keys():
            bundle.store.put_bytes(key, before[key])
    assert bundle.open(tmp_path / "intact") == "used", "everything was restored"
    return counted, missed


def artifact(store: Store, tmp_path: Path) -> Bundle:
    """Publish an artifact of four files, one of them empty."""
    folder = tmp_path / "out"
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    (folder / "policy" / "config.json").write_text('{"hidden": 32}')
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "empty.txt").write_bytes(b"")
    ref = ArtifactStore(store, tmp_path).publish("ppo", "k", folder, Provenance(metrics={"kl": 1.0}))
    prefix = "artifacts/ppo/k"
    data = f"{prefix}/{ref.uri.rsplit('/', 1)[-1]}"

    def open_with(cache: Path) -> str:
        found = ArtifactStore(store, cache).find("ppo", "k")
        try:
            # A run that found the artifact before the damage reads the files directly.
            ArtifactStore(store, cache).fetch(found or ref)
        except CorruptArtifact as error:
            logging.getLogger("tests").warning("%s", error)
            return "damaged"
        return "used"

    return Bundle(store, prefix, f"{prefix}/manifest.json", data, open_with)


def checkpoint(store: Store, tmp_path: Path) -> Bundle:
    """Save two checkpoints of five files, as DeepSpeed and the controller write them. Return the second."""
    saver = CheckpointStore(store, "k", tmp_path / "work", keep(2))
    for step in (1, 2):
        folder = tmp_path / f"state{step}"
        (folder / "policy" / "state").mkdir(parents=True)
        (folder / "policy" / "latest").write_text("state")
        (folder / "policy" / "state" / "mp_rank_00_model_states.pt").write_bytes(bytes([step, 2, 3]) * 300)
        (folder / "policy" / "state" / "zero_pp_rank_0_optim_states.pt").write_bytes(
            bytes([step, 9, 8]) * 300
        )
        (folder / "controller.json").write_text(json.dumps({"done": step}))
        (folder / "metrics.jsonl").write_text('{"step": 1}\n' * step)
        saver.save(step, folder)
    root, prefix = "checkpoints/k", "checkpoints/k/step-00000002"
    [data] = {"/".join(key.split("/")[:4]) for key in store.list(prefix) if not key.endswith("manifest.json")}

    def open_with(work: Path) -> str:
        found = CheckpointStore(store, "k", work, keep(2)).latest()
        assert found is not None and json.loads((found[1] / "controller.json").read_text()) == {
            "done": found[0]
        }
        return {1: "damaged", 2: "used"}[found[0]]

    return Bundle(store, root, f"{prefix}/manifest.json", data, open_with)
