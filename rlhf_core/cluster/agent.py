"""The agent of one host: its files of a stage, and the monitor of its processes. `Host` is what the driver
knows of that host.

    driver (`rlhf_core.cluster.nodes`)        agent, one per other host
    ------------------------------------      ------------------------------------------------------------
    join                                  ->  fetches and verifies the stage's inputs, once per host
    at intervals: report                  ->  last observations of the monitor of this host
    save_stacks, kill                     ->  of the processes of this host
    add, upload                           ->  hashes and uploads this host's part of a checkpoint
    fetch                                 ->  what the ranks of this host need of a checkpoint
    listing, upload_files, remove         ->  moves what processes have written here to the store
    digests, fetch_files                  ->  files of the driver that processes here read, from the store

An agent is a Ray actor without CPUs. It trains nothing and imports neither torch nor vLLM. It ends with its
driver.
"""

from __future__ import annotations

import functools
import logging
import math
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from rlhf_core.cluster.base_model import BaseModel
from rlhf_core.cluster.rpc import Pending, RemoteActor, settle
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import DataError, InfrastructureError, InputError, RLHFError, classifying
from rlhf_core.storage import bundles
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.bundles import FileDigests, FileEntry, Manifest
from rlhf_core.storage.store import Store, open_store
from rlhf_core.system.files import delete_abandoned, held
from rlhf_core.system.heartbeat import Monitor, Participant, read_stacks
from rlhf_core.system.home import Home, is_below, make_attempt_folders
from rlhf_core.system.processes import here
from rlhf_core.types import ArtifactRef

log = logging.getLogger(__name__)

MARK = "node"
"""File in the scratch folder with the token of the attempt and the id of the node that has made it."""

P = ParamSpec("P")
R = TypeVar("R")


class Started(NamedTuple):
    """What an agent returns when it has started."""

    hostname: str
    machine: str
    """See `this_machine`."""
    files_of: str
    """The id of the node whose files this host has: its own, or that of an earlier one if the hosts share the
    folder.
    """


def mark_text(token: str, node_id: str) -> str:
    """Return the content of `MARK`."""
    return f"{token} {node_id}"


def _served(
    method: Callable[Concatenate[NodeAgent, P], R],
) -> Callable[Concatenate[NodeAgent, P], R]:
    """Decorate a method that the driver calls: only here the original class of an error is known."""

    @functools.wraps(method)
    def run(agent: NodeAgent, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with classifying(f"host {socket.gethostname()}, {method.__name__}"):
            return method(agent, *args, **kwargs)

    return run


class NodeAgent:
    """Serves one attempt of one stage on one host.

    Args:
        config_json: The whole configuration, with an absolute `run.home`.
        work: Folder of the scratch files of this attempt.
        monitored: Folder of heartbeats and stacks.
        driver: Hostname of the driver.
        store: Default: that of the configuration.
    """

    def __init__(
        self, config_json: str, work: Path, monitored: Path, driver: str, store: Store | None = None
    ) -> None:
        self._driver = driver
        self._config = PipelineConfig.model_validate_json(config_json)
        self._store = open_store(self._config) if store is None else store
        # Not `read_only`: what is damaged here is marked, so that the next attempt makes it again.
        self._artifacts = ArtifactStore(self._store, Home.of(self._config.run.home).cache)
        self._taken: dict[str, tuple[Path, tuple[FileEntry, ...]]] = {}
        """Folder and files of each part of a checkpoint that is to be uploaded, by its place in the store."""
        self._work = work
        self._shares_folders = False
        self._held = ExitStack()
        """Holds the scratch folder until this process ends, unless the driver holds it."""
        self._digests = FileDigests()
        self._monitor = Monitor(monitored)

    @_served
    def start(self, node_id: str, token: str) -> Started:
        """Make the scratch folder and start the monitor.

        Raises InputError if the folders cannot be made.

        Args:
            node_id: Ray's id of this node.
            token: Token of the attempt. A mark with another one was left by an attempt that was killed.
        """
        mark = self._work / MARK
        try:
            found = mark.read_text().split() if mark.exists() else []
            self._shares_folders = found[:1] == [token]
            if not self._shares_folders:
                home = Home.of(self._config.run.home)
                # Held before anything is deleted: what is not held, another stage on this host takes for
                # abandoned.
                self._held.enter_context(held(self._work.parent))
                delete_abandoned(home.works)  # of killed attempts, also at other stages
                shutil.rmtree(self._work.parent, ignore_errors=True)  # of killed attempts at this one
                make_attempt_folders(self._work)
                mark.write_text(mark_text(token, node_id))
            self._monitor.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"run.home={self._config.run.home}: host {socket.gethostname()} cannot make {self._work}"
                f" ({error.strerror}); choose a folder that can be made on every host"
            ) from error
        # Not by `with`: the monitor lives from this call of the driver to `close`.
        self._monitor.__enter__()
        files_of = found[1] if self._shares_folders else node_id
        return Started(*here(), files_of)

    @_served
    def close(self) -> None:
        """End the monitor and remove the scratch folder."""
        # First, because processes that still run write to the folders.
        self.kill(None)
        if not self._shares_folders:  # else the driver removes the files
            self._monitor.__exit__()
            shutil.rmtree(self._work, ignore_errors=True)
            self._held.close()

    # -- processes --

    @_served
    def report(self) -> list[Participant]:
        """Return the last observation of each participant on this host."""
        return self._monitor.local()

    @_served
    def save_stacks(self) -> dict[str, str]:
        """Have the participants of this host write their stacks; return them by name."""
        names = [participant.name for participant in self._monitor.local()]
        # Stacks of an earlier stall, which the driver already has.
        before = {name: len(read_stacks(self._monitor.folder, name)) for name in names}
        self._monitor.save_stacks()
        # The driver has the same files.
        if self._shares_folders:
            return {}
        return {name: read_stacks(self._monitor.folder, name)[before[name] :] for name in names}

    @_served
    def kill(self, names: Sequence[str] | None) -> None:
        """Send SIGKILL to the participants `names` (None: all) on this host."""
        # Hosts may share the folder, and a monitor forgets the participants that it kills.
        own = {participant.name for participant in self._monitor.local()}
        self._monitor.kill([name for name in own if names is None or name in names])

    # -- artifacts and checkpoints --

    @_served
    def fetch_artifacts(self, refs: Sequence[ArtifactRef]) -> list[Path]:
        """Fetch and verify artifacts, and return their folders. Raises CorruptArtifact with the name of the
        file.
        """
        return [self._artifacts.fetch(ref).absolute() for ref in refs]

    @_served
    def fetch_base_model(self, model: BaseModel) -> None:
        """Fetch the base model of a stage, or compare a local folder with that of the driver.

        Raises DataError if the folder has other files, and ModelError if there is none.
        """
        model.fetch(self._config, self._artifacts)
        if model.digest_here(self._config) != model.digest:
            base = model.address(self._config)
            raise DataError(
                f"{base.field}={base.path} has other files on host {socket.gethostname()} than on"
                f" {self._driver}; copy the folder to every host"
            )

    @_served
    def prepare(self, folder: Path, size: int) -> None:
        """Create the empty `folder`. Raises StoreError unless its disk has `size` free bytes."""
        shutil.rmtree(folder, ignore_errors=True)
        bundles.require_free(folder, size, f"{folder.name} on host {socket.gethostname()}")
        folder.mkdir(parents=True)

    @_served
    def add(self, folder: Path, target: str) -> tuple[FileEntry, ...]:
        """Take the files of `folder` for the folder `target` of the store, and return them."""
        # DeepSpeed adds a script to each of its checkpoints. Programs are never stored in a bucket.
        files = bundles.hash_folder(folder, skip=lambda path: path.endswith(".py"))
        if files:
            # Aside, because the next checkpoint is written to `folder` while this one is uploaded.
            aside = folder.rename(folder.with_name(target.rsplit("/", 1)[-1]))
            self._taken[target] = (aside, files)
        return files

    @_served
    def upload(self, target: str) -> None:
        """Upload the files that `add` took for `target`. Raises StoreError if the store fails."""
        if target in self._taken:
            folder, files = self._taken.pop(target)
            bundles.upload(self._store, folder, files, target)
            shutil.rmtree(folder)

    @_served
    def fetch(self, manifest: Manifest, work: Path, needed: frozenset[str]) -> None:
        """Fetch and verify the files `needed` of a bundle. Raises CorruptArtifact with the name of a file."""
        bundles.fetch(self._store, manifest, work, needed.__contains__)

    @_served
    def upload_files(self, folder: Path, files: Sequence[FileEntry], target: str) -> None:
        """Upload `files` of `folder` to the folder `target` of the store. Raises StoreError if it fails."""
        bundles.upload(self._store, folder, files, target)

    @_served
    def fetch_files(self, source: str, files: Sequence[FileEntry], folder: Path) -> None:
        """Fetch and verify files of a folder below `run.home`, see `bundles.fetch_files`."""
        self._require_below_home(folder)
        bundles.fetch_files(self._store, source, files, folder)

    # -- files that hosts exchange --

    @_served
    def listing(self, folder: Path) -> tuple[FileEntry, ...]:
        """Return the files below `folder`; none if it does not exist."""
        return bundles.hash_folder(folder)

    @_served
    def digests(self, folder: Path) -> dict[str, str]:
        """Return the sha256 of each file below `folder`, by its relative path."""
        return self._digests.of(folder)

    @_served
    def remove(self, folder: Path) -> None:
        """Delete the files below `folder`, which are in the store and below `run.home`."""
        self._require_below_home(folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def _require_below_home(self, path: Path) -> None:
        """Raise InputError for a path that may have files of the user, also through a link."""
        home = Path(self._config.run.home)
        if not is_below(path, home):
            raise InputError(
                f"{path} is not below run.home={home} on host {socket.gethostname()}; nothing was changed"
            )


# -- in the driver --


POLL_SECONDS = 0.05
"""Longest wait for the results of calls that may have ended."""

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class HostCall(Pending[R_co]):
    """A call of the agent on `host`."""

    host: Host = field(kw_only=True)


@dataclass
class Host:
    """One node other than the driver's."""

    node_id: str
    actor: RemoteActor[NodeAgent]
    name: str
    files_of: str = ""
    """The id of the node whose files it has: its own, unless hosts share the folder of the run."""
    inputs: list[Path] = field(default_factory=list)
    """Folders of the stage's inputs there, which it has verified, in the order of the inputs."""
    participants: list[Participant] = field(default_factory=list)
    """Participants of the last report. Their seconds are counted on from there."""
    silent: float = 0.0
    """Seconds since the last report."""
    asked: float = math.inf
    """Seconds since the last request for a report."""
    pending: Pending[list[Participant]] | None = None
    lost: bool = False

    @property
    def has_files(self) -> bool:
        """Whether it has files of its own."""
        return self.files_of == self.node_id

    def call(
        self, method: Callable[Concatenate[NodeAgent, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> HostCall[R]:
        call = self.actor.call(method, *args, **kwargs)
        return HostCall(call.reference, call.objects, host=self)

    def ask(self) -> None:
        """Request a report, unless one is under way."""
        if self.pending is None and not self.lost:
            self.pending, self.asked = self.call(NodeAgent.report), 0.0

    def receive(self, report: list[Participant] | RLHFError | TimeoutError) -> None:
        """Replace what is known by a report, if it has come."""
        if isinstance(report, RLHFError):
            log.warning("host %s is lost: %s", self.name, report)
            self.lose()
        elif not isinstance(report, TimeoutError):
            self.participants, self.silent, self.pending = report, 0.0, None

    def advance(self, seconds: float) -> None:
        """Count the time since the last report, also for the participants."""
        self.silent += seconds
        self.asked += seconds
        # In place: there may be thousands of them, twice per second.
        for participant in self.participants:
            participant.seconds += seconds

    def lose(self) -> None:
        """Mark the host and its participants as lost. This is final."""
        self.lost = True
        for participant in self.participants:
            participant.state = "lost"


def of_host(error: InfrastructureError, calls: Sequence[HostCall[Any]]) -> InfrastructureError:
    """Return the error of one of several calls with the name of its host. Ray's own errors have none."""
    # The results are asked for once more, because `fetch` raises the first error without the call that it is
    # of.
    for call, own in zip(calls, settle(calls, POLL_SECONDS), strict=True):
        if isinstance(own, InfrastructureError):
            named = f"host {call.host.name}"
            return own if named in own.message else type(own)(f"{named}: {own.message}")
    return error
