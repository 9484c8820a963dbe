"""The objects of a remote job in the store.

    {store}/jobs/{stage key}/{number}/
        spec.json         the job's input, created once by the flow that submits it
        events.jsonl      its events (rlhf_core/executors/events.py), and the latest progress of each task at
                          the end; replaced about once per second
        log.txt           the end of the stage's log
        stop              a flow asks the job to stop

They carry the words of a run and not its results: what a stage has made is decided by the manifest of its
artifact. The flow deletes all jobs of a stage key when the artifact exists; until then they are kept.
`spec.json` is deleted first: without its events, a job would look as if it had not been submitted yet.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlhf_core.config.pipeline import Executor
from rlhf_core.errors import ConfigError
from rlhf_core.executors.events import parse
from rlhf_core.executors.spec import StageSpec
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.store import Store

Event = dict[str, Any]

LOG_BYTES = 2**20
"""Size of the part of a log that is kept in the store."""


@dataclass(frozen=True)
class Submission:
    """The content of `spec.json`."""

    spec: StageSpec
    job_name: str
    executor: Executor
    seconds: float
    """Time that is left for the stage."""
    environment: Mapping[str, str]
    """Variables of the job, where its host does not set them."""
    time: float
    """Unix time on the clock of the flow's host. For people: clocks of two hosts are not compared."""


_FORMAT = TypeAdapter(Submission)


class JobFiles:
    """The objects of one job."""

    def __init__(self, store: Store, stage_key: str, number: int) -> None:
        self._store = store
        self._stage_key = stage_key
        self.folder = f"jobs/{stage_key}/{number:06d}"
        self.number = number
        self._submission: Submission | None = None

    @classmethod
    def newest(cls, store: Store, stage_key: str) -> JobFiles | None:
        """Return the files of the job of `stage_key` that was submitted last; None if there is none.

        It may not exist: it was deleted (`has_remains`), or in a local store is just being created.
        """
        # By the names of folders: a listing of all objects would have those of every job of the stage.
        numbers = _numbers(store, stage_key)
        return cls(store, stage_key, numbers[-1]) if numbers else None

    def create(
        self, spec: StageSpec, executor: Executor, seconds: float, environment: Mapping[str, str]
    ) -> bool:
        """Create `spec.json` with a new name for the job. Return False if this number exists already.

        Args:
            spec: The stage.
            executor: Executor of the job.
            seconds: Time that is left for the stage.
            environment: Variables of the job.
        """
        # Random, because a job of another store can have the same stage and number.
        name = f"rlhf-{spec.stage}-{secrets.token_hex(6)}-{self.number}"
        submission = Submission(spec, name, executor, seconds, environment, time.time())
        content = _FORMAT.dump_json(submission, by_alias=True)
        # Of two flows with the same stage, one submits the job, and the other one follows it.
        return self._store.put_if_absent(f"{self.folder}/spec.json", content)

    @property
    def has_remains(self) -> bool:
        """Whether there are objects of a job without `spec.json`: its number must not be used again."""
        # A new job of this number would read the request to stop that was meant for the old one.
        return bool(self._store.list(self.folder))

    @property
    def submission(self) -> Submission:
        """The content of `spec.json`, which is read once. Raises ConfigError if there is none."""
        submission = self._submission or self.read_submission()
        if submission is None:
            raise ConfigError(
                f"store.url: {self._store.uri(self.folder)} has no spec.json on this host; use a bucket, or a"
                " folder that is mounted at the same path on every host"
            )
        return submission

    def read_submission(self) -> Submission | None:
        """Read `spec.json` and return its content; None if there is none at present."""
        data = self._store.read_bytes(f"{self.folder}/spec.json")
        if data is None:
            return None
        try:
            self._submission = _FORMAT.validate_json(data)
        except ValidationError as error:
            raise ConfigError(
                f"{self._store.uri(self.folder)}/spec.json is of another release; delete this folder when its"
                " job has ended"
            ) from error
        return self._submission

    # -- written by the job --

    def write_events(self, events: Iterable[Event], progress: Iterable[Event] = ()) -> None:
        """Replace the events, and the latest progress of each task.

        All events are written each time, because they are few: progress is not among them.
        """
        lines = [json.dumps(event, default=str) + "\n" for event in (*events, *progress)]
        self._store.put_bytes(f"{self.folder}/events.jsonl", "".join(lines).encode())

    def write_log(self, tail: bytes) -> None:
        """Replace the end of the log."""
        self._store.put_bytes(f"{self.folder}/log.txt", tail)

    def is_asked_to_stop(self) -> bool:
        """Return whether a flow asked the job to stop."""
        return self._store.read_bytes(f"{self.folder}/stop") is not None

    # -- written or read by a flow --

    def read_events(self) -> tuple[list[Event], list[Event]]:
        """Return the events of the job, and the latest progress of each task."""
        data = self._store.read_bytes(f"{self.folder}/events.jsonl") or b""
        found = [event for event in map(parse, data.splitlines()) if event is not None]
        events = [event for event in found if event["event"] != "progress"]
        return events, found[len(events) :]

    def read_log(self) -> bytes:
        """Return the end of the log; empty if there is none."""
        return self._store.read_bytes(f"{self.folder}/log.txt") or b""

    def ask_to_stop(self) -> None:
        """Have the job save a checkpoint, if it can, and end."""
        # An object and no signal: the flow reaches the store, and perhaps no node of the job.
        self._store.put_bytes(f"{self.folder}/stop", b"stop\n")


def delete_jobs(store: Store, spec: StageSpec) -> None:
    """Delete all jobs of a stage key if its artifact exists."""
    if ArtifactStore(store, spec.home.cache).find(spec.stage, spec.key) is not None:
        store.delete([f"jobs/{spec.key}/{number:06d}/spec.json" for number in _numbers(store, spec.key)])
        store.delete_prefix(f"jobs/{spec.key}")


def _numbers(store: Store, stage_key: str) -> list[int]:
    names = store.folders(f"jobs/{stage_key}")
    return sorted(int(name) for name in names if re.fullmatch("[0-9]{6}", name))
