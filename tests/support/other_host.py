"""A second host in this process: an agent that finds each folder elsewhere, and a bucket for both hosts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from rlhf_core.cluster.agent import NodeAgent
from rlhf_core.cluster.base_model import BaseModel
from rlhf_core.cluster.nodes import ClusterNodes
from rlhf_core.cluster.stored_output import StoredOutput
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import StoreError
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.backend import LocalFiles
from rlhf_core.storage.bundles import FileEntry, Manifest
from rlhf_core.storage.store import Store
from rlhf_core.system.heartbeat import Monitor
from rlhf_core.types import ArtifactRef
from tests.support.demo_data import with_demo_data
from tests.support.scripted_cluster import ScriptedCluster, node


class Bucket(LocalFiles):
    """A folder that behaves like a bucket: nothing of it is on this machine."""

    is_down = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fetched: Counter[str] = Counter()
        """How often each object was read as a file."""
        self.sent: list[str] = []
        """The objects that were written as files."""

    @override
    def local_path(self, key: str) -> Path | None:
        return None

    @override
    def put_file(self, source: Path, key: str, *, link: bool, sha256: str | None = None) -> None:
        self._check()
        self.sent.append(key)
        super().put_file(source, key, link=link, sha256=sha256)

    @override
    def get_file(self, key: str, target: Path, size: int | None = None) -> None:
        self.fetched[key] += 1
        super().get_file(key, target, size)

    @override
    def sizes(self, prefix: str) -> Mapping[str, int]:
        self._check()
        return super().sizes(prefix)

    def _check(self) -> None:
        if self.is_down:
            raise StoreError("The bucket does not answer.")


def bucket(folder: Path, *, is_down: bool = False) -> Store:
    """Return a bucket; the hosts of a test share its content, and can lose it one by one."""
    store = Store(folder / "bucket")
    backend = Bucket(folder / "bucket")
    backend.is_down = is_down
    store._backend = backend
    return store


def backend_of(store: Store) -> Bucket:
    """Return the backend of a store that `bucket` has returned."""
    assert isinstance(store._backend, Bucket)
    return store._backend


class Elsewhere(NodeAgent):
    """An agent in this process that finds each folder below `root`, as if it were on another host.

    Args:
        root: Has the files of the other host, by their paths there.
        config: Configuration of the run.
        work: Scratch folder of the attempt, the same path on all hosts.
        store: Store of the other host.
    """

    def __init__(self, root: Path, config: PipelineConfig, work: Path, store: Store) -> None:
        self._root = root
        self.folders_hashed: list[Path] = []
        run = config.run.model_copy(update={"home": str(self.there(Path(config.run.home).resolve()))})
        json = config.model_copy(update={"run": run}).model_dump_json(by_alias=True)
        super().__init__(json, self.there(work), root / "stacks", "one", store)

    def there(self, folder: Path) -> Path:
        return self._root / folder.relative_to("/")

    @override
    def fetch_artifacts(self, refs: Sequence[ArtifactRef]) -> list[Path]:
        folders = super().fetch_artifacts(refs)
        root = self._root
        return [Path("/") / each.relative_to(root) if each.is_relative_to(root) else each for each in folders]

    @override
    def prepare(self, folder: Path, size: int) -> None:
        super().prepare(self.there(folder), size)

    @override
    def add(self, folder: Path, target: str) -> tuple[FileEntry, ...]:
        return super().add(self.there(folder), target)

    @override
    def fetch(self, manifest: Manifest, work: Path, needed: frozenset[str]) -> None:
        super().fetch(manifest, self.there(work), needed)

    @override
    def upload_files(self, folder: Path, files: Sequence[FileEntry], target: str) -> None:
        super().upload_files(self.there(folder), files, target)

    @override
    def fetch_files(self, source: str, files: Sequence[FileEntry], folder: Path) -> None:
        super().fetch_files(source, files, self.there(folder))

    @override
    def listing(self, folder: Path) -> tuple[FileEntry, ...]:
        return super().listing(self.there(folder))

    @override
    def digests(self, folder: Path) -> dict[str, str]:
        self.folders_hashed.append(folder)
        return super().digests(self.there(folder))

    @override
    def remove(self, folder: Path) -> None:
        super().remove(self.there(folder))


def two_nodes(
    folder: Path,
    agent: NodeAgent,
    inputs: Sequence[ArtifactRef] = (),
    artifacts: ArtifactStore | None = None,
    model: Path | None = None,
    base_model: BaseModel | None = None,
) -> ClusterNodes:
    """Return the driver's view of one other host before the stage has ranks."""
    cluster = ScriptedCluster([node("1", "one"), node("2", "two")], actors={"2": agent})
    work = folder / "home" / "attempt"
    work.mkdir(parents=True)
    monitor = Monitor(folder / "stacks")
    tree = with_demo_data({"run": {"home": str(folder / "home")}, "model": {"path": model and str(model)}})
    return ClusterNodes(
        PipelineConfig.model_validate_json(json.dumps(tree)),
        work,
        inputs,
        StoredOutput(work / "out", agent._store, "artifacts/sft/k/000001"),
        monitor,
        base_model,
        artifacts=artifacts,
        cluster=cluster,
    )
