"""The other hosts of a stage, as its driver sees them: an agent on each (`rlhf_core.cluster.agent`).

    join     one agent per node of the stage other than the driver's; hosts with processes fetch the inputs
    monitor  asks each agent what its processes do, once per second (`heartbeat.OtherHosts`)
    parts    of checkpoints: each agent hashes, uploads and fetches its own (`checkpoints.HostParts`)
    gather   moves the output that processes have written on other hosts to the store, and small files from
             there to this host
    share    copies a folder below `run.home` to the others, through the store, and compares other folders
    leave    ends the agents

Nodes that share the folder of the run (`run.home` on NFS) have one part of the files: the first of them.
"""

from __future__ import annotations

import logging
import math
import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from rlhf_core.cluster.agent import MARK, POLL_SECONDS, Host, HostCall, NodeAgent, Started, mark_text, of_host
from rlhf_core.cluster.base_model import BaseModel
from rlhf_core.cluster.connect import on_cluster
from rlhf_core.cluster.handshake import check_nodes
from rlhf_core.cluster.placement import RAY_CLUSTER, RayCluster
from rlhf_core.cluster.rpc import RemoteActor, fetch, ready, settle
from rlhf_core.cluster.stored_output import StoredOutput, needed_files, written_bytes
from rlhf_core.config import PipelineConfig
from rlhf_core.data.hub import fetch_model
from rlhf_core.data.sources import require_unchanged
from rlhf_core.errors import DataError, InfrastructureError, RLHFError, WorkerDied, WorkerStuck
from rlhf_core.pipeline import StageName
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.bundles import FileDigests, FileEntry, Manifest, is_record, merged
from rlhf_core.storage.s3 import s3_endpoint
from rlhf_core.system.heartbeat import Monitor, Participant, heartbeat
from rlhf_core.system.home import Home, is_below
from rlhf_core.system.processes import here
from rlhf_core.types import ArtifactRef

log = logging.getLogger(__name__)

SILENT_SECONDS = 30.0
"""A host whose agent has not answered for this long is lost."""
_REPORT_SECONDS = 1.0
"""Time between two reports of a host."""
_WAIT_SECONDS = 1.0
"""How often a wait looks whether a host is lost."""
_FRESH_SECONDS = 3.0
"""Longest wait for a report after a call has failed."""
_LAST_SECONDS = 15.0
"""Longest wait for an agent to save stacks, to kill, or to end."""

P = ParamSpec("P")
R = TypeVar("R")


class ClusterNodes:
    """Implements `Nodes` of types.py for one attempt of a stage.

    Args:
        config: The whole configuration.
        work: Scratch folder of the attempt.
        inputs: Artifacts that the processes of the stage read.
        output: Files of the stage that hosts exchange.
        monitor: The heartbeat monitor of the stage.
        base_model: That of the stage, if its processes read one.
        artifacts: The store, for the inputs that processes on this host read, and for further inputs. None if
            this host has the inputs.
        cluster: Has the other hosts.
    """

    def __init__(
        self,
        config: PipelineConfig,
        work: Path,
        inputs: Sequence[ArtifactRef],
        output: StoredOutput,
        monitor: Monitor,
        base_model: BaseModel | None = None,
        artifacts: ArtifactStore | None = None,
        cluster: RayCluster = RAY_CLUSTER,
    ) -> None:
        self.config = config
        self._work = work
        self._inputs = tuple(inputs)
        self._monitor = monitor
        self._base_model = base_model
        self._artifacts = artifacts
        self._fetched_here = 0
        """The number of inputs that this host has as a whole."""
        self._has_base_model = False
        """Whether this host has the base model."""
        self.lacks_base_weights = False
        """Whether this host has a copy of the base model without weights, which processes here need."""
        self.stages: Collection[StageName] = ()
        """The stage and the later ones of its run, for `check`."""
        self.output = output
        self._cluster = cluster
        self._hosts: list[Host] = []
        self._ranks: dict[str, dict[str, set[int]]] = {}
        """The ranks of each node, as in `join`. Nodes that share their files count as one of them."""
        self._files_of: dict[str, str] = {}
        """Id of the node whose files each other node has."""
        self._own_id = ""
        self._has_processes = False
        """Whether processes of the stage are on this host."""
        self._token = secrets.token_hex(8)
        """Token of this attempt, so that files which a killed one has left are not taken for shared ones."""
        self._digests = FileDigests()
        self._lock = threading.Lock()
        self.before_leave: Callable[[], None] = lambda: None
        """Function that is called while the agents still answer."""

    # -- start and end --

    def check(self) -> None:
        check_nodes(self.config, self.stages)

    def join(self, ranks: Mapping[str, Mapping[str, Collection[int]]]) -> None:
        if not on_cluster():
            return
        self._own_id = self._cluster.own_id()
        new = [node_id for node_id in sorted(ranks) if node_id not in {self._own_id, *self._files_of}]
        added = self._add_hosts(new) if new else []
        merged: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for node_id, folders in ranks.items():
            for folder, of_node in folders.items():
                merged[self._files_of.get(node_id, node_id)][folder] |= set(of_node)
        self._ranks = {node_id: dict(folders) for node_id, folders in merged.items()}
        self._has_processes = self._own_id in {self._files_of.get(node_id, node_id) for node_id in ranks}
        self._fetch_inputs(added)

    def add_inputs(self, refs: Sequence[ArtifactRef]) -> None:
        self._inputs += tuple(refs)

    def _add_hosts(self, node_ids: Sequence[str]) -> list[Host]:
        """Start the agents, and return the new hosts."""
        heartbeat("start agents", math.inf)  # each start has its own limit
        # An agent that finds this file shares the folder with the driver.
        (self._work / MARK).write_text(mark_text(self._token, self._own_id))
        added = []
        names = self._cluster.node_names()
        # A list, so that all agents are starting while the first one is waited for.
        for host in [Host(node_id, self._start(node_id), names[node_id]) for node_id in node_ids]:
            # In turn: the first of those that share a folder has its files.
            started = self._started(host)
            host.name, host.files_of = started.hostname, started.files_of
            self._files_of[host.node_id] = host.files_of
            if started[:3] == (*here(), self._own_id):
                host.actor.kill()  # another node on this host, whose processes are seen from here
            else:
                added.append(host)
        with self._lock:
            self._hosts += added
        self._monitor.include(self)
        return added

    def _fetch_inputs(self, added: Sequence[Host]) -> None:
        """Fetch and verify what the stage reads on all hosts with processes, at the same time."""
        heartbeat("fetch inputs", math.inf)  # a download has no time limit
        behind = [host for host in self._with_files() if len(host.inputs) < len(self._inputs)]
        fetching = [host.call(NodeAgent.fetch_artifacts, self._inputs[len(host.inputs) :]) for host in behind]
        bases = []
        if self._base_model is not None:
            # Also on hosts that share `run.home`, which need not share the base model.
            bases = [host.call(NodeAgent.fetch_base_model, self._base_model) for host in added]
        if self._has_processes:
            self._fetch_inputs_here()
        for host, folders in zip(behind, self._wait(fetching), strict=True):
            host.inputs += folders
        self._wait(bases)
        if added:
            names = sorted(host.name for host in self._hosts)
            log.info("hosts of the stage: this one, %s", ", ".join(names))

    def _fetch_inputs_here(self) -> None:
        """Raises DataError if the base model is another one than when the run began."""
        base = self._base_model
        if self._artifacts is not None:
            for ref in self._inputs[self._fetched_here :]:
                self._artifacts.fetch(ref)
        self._fetched_here = len(self._inputs)
        if base is not None and not self._has_base_model:
            address = base.address(self.config)
            if address.is_hub:
                fetch_model(address.path, address.revision)
            elif self.lacks_base_weights and self._artifacts is not None:
                base.fetch(self.config, self._artifacts)
            require_unchanged(
                {address.digest_name: base.digest_here(self.config)},
                {address.digest_name: base.digest},
                self.config,
            )
            self._has_base_model = True

    def _started(self, host: Host) -> Started:
        """Return what the agent returns when it has started."""
        limit = self.config.run.timeouts.start
        call = host.call(NodeAgent.start, host.node_id, self._token)
        try:
            return fetch([call], limit)[0]
        except TimeoutError:
            raise WorkerStuck(
                f"the agent on host {host.name} did not start within {limit:g} s (run.timeouts.start)"
            ) from None
        except InfrastructureError as error:
            raise of_host(error, [call]) from error

    def _start(self, node_id: str) -> RemoteActor[NodeAgent]:
        store = self.config.store
        endpoint = s3_endpoint(store.endpoint)
        # An agent has another working folder, so a relative path would be another one there.
        home = str(Home.of(self.config.run.home).path)
        config = self.config.model_copy(
            update={
                "run": self.config.run.model_copy(update={"home": home}),
                "store": store.model_copy(update={"endpoint": endpoint}),
            }
        )
        arguments = (
            # By alias: the section `register` is the field `register_`, and only its alias is read.
            config.model_dump_json(by_alias=True),
            self._work,
            self._monitor.folder.resolve(),
            socket.gethostname(),
        )
        # Reports are answered while files are hashed and uploaded.
        return self._cluster.start_actor(NodeAgent, node_id, arguments, max_concurrency=4)

    def leave(self) -> None:
        if not self._hosts:
            return
        self.before_leave()
        self._monitor.include(None)
        with self._lock:  # the monitor may be in the middle of a poll
            hosts, self._hosts, self._ranks, self._files_of = self._hosts, [], {}, {}
        # A host that does not answer keeps its scratch files until a later stage there deletes them.
        ready([host.call(NodeAgent.close) for host in hosts if not host.lost], _LAST_SECONDS)
        for host in hosts:
            host.actor.kill()

    @property
    def stored(self) -> Mapping[Path, str]:
        return self.output.digests

    def gather(self, folder: Path) -> None:
        for host in self._with_files():
            heartbeat("copy files from other hosts", math.inf)
            found = self._wait([host.call(NodeAgent.listing, folder)])[0]
            own = self._digests.of(folder)
            # What `share` has copied there does not come back.
            known = {folder / name: digest for name, digest in own.items()} | dict(self.stored)
            new = [entry for entry in found if known.get(folder / entry.path) != entry.sha256]
            if new:
                self.output.begin()
                target = self.output.key_of(folder)
                # By the store and not by way of this host, whose network would be the limit for weights
                # (decision 24).
                self._wait([host.call(NodeAgent.upload_files, folder, new, target)])
                self.output.receive(folder, new)
                log.info("%s has put %d files into the store", host.name, len(new))
                self._wait([host.call(NodeAgent.remove, folder)])

    def share(self, folder: Path) -> None:
        # A host has verified each file of an input against its manifest, as this one has.
        places = {folder.absolute(), *folder.absolute().parents}
        is_users = not is_below(folder, Path(self.config.run.home))
        # Hosts that share `run.home` need not share other folders.
        all_hosts = self._hosts if is_users else self._with_files()
        hosts = [host for host in all_hosts if places.isdisjoint(host.inputs)]
        if not hosts:
            return
        heartbeat("compare files with other hosts" if is_users else "copy files to other hosts", math.inf)
        asked = [host.call(NodeAgent.digests, folder) for host in hosts]
        own = self._digests.of(folder)
        there = self._wait(asked)
        if is_users:
            for host, files in zip(hosts, there, strict=True):
                _require_same(folder, own, files, host.name)
            return
        needed = self.output.files_of(folder, own)
        lacking = []
        for files in there:
            lacking.append([each for each in needed if files.get(each.path) != each.sha256])
        self.output.send(folder, merged(*lacking))
        source = self.output.key_of(folder)
        calls = []
        for host, missing in zip(hosts, lacking, strict=True):
            if missing:
                calls.append(host.call(NodeAgent.fetch_files, source, missing, folder))
        if self._has_processes:
            self.output.fetch(folder, own)
        self._wait(calls)

    def _with_files(self) -> list[Host]:
        """Return the hosts that have files of their own."""
        return [host for host in self._hosts if host.has_files]

    def _wait(self, calls: Sequence[HostCall[R]]) -> list[R]:
        """Return the answers of agents, however long they take. Raises WorkerDied if a host is lost, and
        other errors with the name of the host.
        """
        while True:
            try:
                return fetch(calls, _WAIT_SECONDS)
            except InfrastructureError as error:
                raise of_host(error, calls) from error
            except TimeoutError:
                lost = [host.name for host in self._hosts if host.lost]
                if lost:
                    raise WorkerDied(
                        f"host {', '.join(lost)} is lost: its agent has not answered for {SILENT_SECONDS:g} s"
                    ) from None

    # -- processes: `heartbeat.OtherHosts` --

    def participants(self, passed: float, *, fresh: bool) -> list[Participant]:
        with self._lock:
            for host in self._hosts:
                host.advance(passed)
            # Before any host is judged: a report that has come while this process was busy counts.
            self._receive_reports(POLL_SECONDS)
            for host in self._hosts:
                if host.pending is not None and host.silent > SILENT_SECONDS and not host.lost:
                    host.lose()
                if host.asked >= _REPORT_SECONDS:
                    host.ask()
            if fresh:
                self._receive_reports(_FRESH_SECONDS)  # those that were under way may be older than this call
                for host in self._hosts:
                    host.ask()
                self._receive_reports(_FRESH_SECONDS)
            return [each for host in self._hosts for each in host.participants]

    def _receive_reports(self, seconds: float) -> None:
        """Take the reports that come within this time."""
        asked = [(host, host.pending) for host in self._hosts if host.pending is not None and not host.lost]
        reports = settle([pending for _, pending in asked], seconds)
        for (host, _), report in zip(asked, reports, strict=True):
            host.receive(report)

    def save_stacks(self) -> dict[str, str]:
        stacks: dict[str, str] = {}
        for answer in self._try_all(NodeAgent.save_stacks):
            stacks |= answer
        return stacks

    def kill(self, names: Sequence[str] | None) -> None:
        self._try_all(NodeAgent.kill, names)
        with self._lock:
            for host in self._hosts:
                killed = {each.name for each in host.participants} if names is None else names
                host.participants = [each for each in host.participants if each.name not in killed]
                host.pending = None  # a report that is under way may still have them

    def _try_all(
        self, method: Callable[Concatenate[NodeAgent, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Return the answers of the agents that answer in time."""
        hosts = [host for host in self._hosts if not host.lost]
        calls = [host.call(method, *args, **kwargs) for host in hosts]
        answers: list[R] = []
        for host, answer in zip(hosts, settle(calls, _LAST_SECONDS), strict=True):
            if isinstance(answer, RLHFError | TimeoutError):
                log.warning("host %s, %s: %s", host.name, method.__name__, answer)
            else:
                answers.append(answer)
        return answers

    # -- checkpoints: `checkpoints.HostParts` --

    def prepare(self, folder: Path, size: int, unsharded: int | None) -> None:
        calls = []
        for host in self._with_files():
            part = written_bytes(size, unsharded, self._ranks, host.node_id)
            calls.append(host.call(NodeAgent.prepare, folder, part))
        self._wait(calls)

    def bytes_here(self, size: int, unsharded: int | None) -> int:
        return written_bytes(size, unsharded, self._ranks, self._own_id) if self._hosts else size

    def add(self, folder: Path, target: str) -> Callable[[], list[tuple[FileEntry, ...]]]:
        calls = [host.call(NodeAgent.add, folder, target) for host in self._with_files()]
        return lambda: [part for part in self._wait(calls) if part]

    def upload(self, target: str) -> Callable[[], None]:
        calls = [host.call(NodeAgent.upload, target) for host in self._with_files()]
        return lambda: _nothing(self._wait(calls))

    def fetch(self, manifest: Manifest, work: Path) -> Callable[[], None]:
        heartbeat("fetch the checkpoint on all hosts", math.inf)
        calls = []
        for host in self._with_files():
            needed = self._needed(manifest, host.node_id)
            calls.append(host.call(NodeAgent.fetch, manifest, work, needed))
        return lambda: _nothing(self._wait(calls))

    def needed_here(self, manifest: Manifest) -> Callable[[str], bool]:
        if not self._hosts:
            return lambda path: True
        return self._needed(manifest, self._own_id).__contains__

    def _needed(self, manifest: Manifest, node_id: str) -> frozenset[str]:
        paths = [entry.path for entry in manifest.files]
        if node_id != self._own_id:  # only the driver continues the record
            paths = [path for path in paths if not is_record(path)]
        return needed_files(paths, self._ranks, node_id)


def _require_same(folder: Path, own: Mapping[str, str], there: Mapping[str, str], host: str) -> None:
    """Raise DataError if a folder of the user has other files on another host. Hidden files do not count."""
    names = {name for name, _ in own.items() ^ there.items()}
    differing = [name for name in names if "/." not in f"/{name}"]
    if differing:
        raise DataError(
            f"{folder} has other files on host {host} than on {socket.gethostname()}, for example"
            f" {min(differing)}; copy the folder to every host"
        )


def _nothing(_answers: object) -> None:
    return None
