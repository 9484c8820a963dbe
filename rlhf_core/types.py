"""Small frozen records that stages, processes and packages exchange.

Axes: `P` prompt tokens, `T` response tokens of one sequence (ragged, no padding).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from typing_extensions import override

from rlhf_core.pipeline import StageName
from rlhf_core.system.heartbeat import Monitor
from rlhf_core.system.processes import StopRequest

_T = TypeVar("_T", int, float)

PromptAndResponse = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of a response to it."""

CHECKPOINTS = "checkpoints"
"""Folder of the store with the checkpoints of all stages."""


def artifact_prefix(stage: str, key: str) -> str:
    """Return the folder of an artifact in its store."""
    return f"artifacts/{stage}/{key}"


def annotations_folder(digest: str) -> str:
    """Return the name of the folder, beside that of an artifact with this digest, with its annotations
    (`rlhf_core.record.annotations`).
    """
    return f"annotations-{digest[:12]}"


def checkpoint_prefix(key: str) -> str:
    """Return the folder of the checkpoints and attempts of a stage key in its store."""
    return f"{CHECKPOINTS}/{key}"


@dataclass(frozen=True)
class ArtifactRef:
    """Reference to the output of a finished stage. Stages exchange nothing else."""

    kind: StageName
    """The stage that produced it."""
    key: str
    """Stage key, 16 hex digits; see `artifact_prefix`."""
    digest: str
    """sha256 over names, sizes and hashes of its files: equal content has an equal digest."""
    uri: str
    """Full address of the folder, for messages and for lineage."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The stage's headline numbers, copied from the manifest."""
    mlflow_run_id: str | None = None
    """The MLflow run that made it."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """`StageResult.attributes` as text, copied from the manifest (`weights_sha256` of the policy, counts)."""

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict. `ArtifactRef(**d)` is the inverse."""
        return asdict(self)


@dataclass(frozen=True)
class PromptExample:
    """One prompt of the data artifact (a row of `prompts_{train,eval}.parquet`)."""

    prompt_id: str
    """Digest of the prompt text, 16 hex digits: stable over runs and machines."""
    prompt: str
    """What the user asked, as plain text (chat messages joined), for rewards and for reading."""
    input_ids: tuple[int, ...]
    """(P,) tokens with the chat template and the generation prompt applied once; starts with BOS if the model
    has one.
    """
    meta: Mapping[str, Any] = field(default_factory=dict)
    """The other fields of the source row (`answer`, gold specification) as JSON, for rule rewards."""
    source: str = ""
    """Name of the data source, for measures by source."""
    group: str = ""
    """Digest of its group, 16 hex digits. Prompts of one group are related: all are on one side of the
    split, and their outcomes are not independent. The default is a group of its own, `prompt_id`.
    """

    def __post_init__(self) -> None:
        # The only way to set a field of a frozen record.
        object.__setattr__(self, "group", self.group or self.prompt_id)


@dataclass(frozen=True)
class PairExample:
    """One preference pair (a row of `pairs_{train,eval}.parquet`)."""

    prompt_id: str
    prompt: str
    """Plain text, for reading."""
    prompt_ids: tuple[int, ...]
    """(P,) as in `PromptExample.input_ids`."""
    chosen_ids: tuple[int, ...]
    """(T,) the preferred response, EOS included."""
    rejected_ids: tuple[int, ...]
    """(T,) the other one, EOS included."""
    source: str = ""
    """Name of the data source, for accuracy by source."""
    margin: float | None = None
    """The row's number `margin`, where it has one (`reward.margin: field`)."""
    group: str = ""
    """As in `PromptExample`."""

    def __post_init__(self) -> None:
        # The only way to set a field of a frozen record.
        object.__setattr__(self, "group", self.group or self.prompt_id)


@dataclass(frozen=True)
class SFTExample:
    """One demonstration (a row of `sft_{train,eval}.parquet`)."""

    input_ids: tuple[int, ...]
    """(P+T,) whole conversation."""
    loss_mask: tuple[int, ...]
    """(P+T,) 1 on tokens the assistant wrote, its EOS included; for plain text 1 everywhere but BOS."""
    source: str = ""
    group: str = ""
    """As in `PromptExample`; empty in artifacts of earlier versions."""


class Numbers(Sequence[_T]):
    """Numbers of one response: an array that cannot be written, and is read like a tuple of Python numbers.

    `len`, an index, a slice, iteration, `in`, `index`, `+`, `==` and `hash` do what they do for a tuple.
    `np.asarray` returns the array without a copy.

    Args:
        array: (T,) numpy array. It is not copied.
    """

    def __init__(self, array: Any) -> None:
        # A view has a flag of its own: the array of the caller stays writable.
        self._array = array.view()
        self._array.flags.writeable = False

    @staticmethod
    def of(values: Sequence[_T], kind: Literal["int32", "float32"] = "int32") -> Numbers[_T]:
        """Return token ids (T,), or numbers of another kind."""
        import numpy as np

        return Numbers(np.asarray(values, kind))

    @override
    def __len__(self) -> int:
        return len(self._array)

    @override
    def __getitem__(self, index: Any) -> Any:
        found = self._array[index]
        # `item` gives a Python number. JSON cannot encode those of numpy.
        return Numbers(found) if isinstance(index, slice) else found.item()

    @override
    def __iter__(self) -> Iterator[_T]:
        return iter(self._array.tolist())

    # The methods of `Sequence` make an object for each index.
    @override
    def __reversed__(self) -> Iterator[_T]:
        return iter(self._array[::-1].tolist())

    @override
    def index(self, value: Any, start: int = 0, stop: int = 2**63 - 1) -> int:
        return tuple(self).index(value, start, stop)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        # NumPy 2 passes None for "a copy only where it is needed", which is False for `astype`.
        return self._array.astype(dtype or self._array.dtype, copy=bool(copy))

    def __add__(self, other: Numbers[_T] | tuple[_T, ...]) -> tuple[_T, ...]:
        return tuple(self) + (tuple(other) if isinstance(other, Numbers) else other)

    def __radd__(self, other: tuple[_T, ...]) -> tuple[_T, ...]:
        return other + tuple(self)

    @override
    def __eq__(self, other: object) -> bool:
        # As of a tuple: with an array it is the comparison of each number.
        return tuple(self) == (tuple(other) if isinstance(other, Numbers) else other)

    @override
    def __hash__(self) -> int:
        return hash(tuple(self))

    @override
    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True)
class Rollout:
    """One sampled response."""

    prompt_id: str
    sample_index: int
    """0 .. samples_per_prompt - 1."""
    prompt_ids: tuple[int, ...]
    """(P,)"""
    response_ids: Sequence[int]
    """(T,) tokens the policy generated, the first EOS included; `Numbers`."""
    rollout_logprobs: Sequence[float]
    """(T,) log-probabilities by the engine, at the sampling temperature."""
    finished: bool
    """True if the policy ended with EOS, False if the length limit cut it."""
    policy_version: int
    """Step whose weights sampled it."""


@dataclass(frozen=True)
class RewardInput:
    """What a reward source sees of one rollout."""

    prompt_id: str
    prompt: str
    response: str
    """Decoded without special tokens."""
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    """`Numbers`, which are read like a tuple."""
    finished: bool
    meta: Mapping[str, Any] = field(default_factory=dict)
    """`PromptExample.meta` of its prompt."""


class Progress(Protocol):
    """Reports how far a long part is; shown as a bar, a log line and a Prefect progress artifact."""

    def __call__(self, task: str, done: int, total: int, unit: str, **metrics: float) -> None: ...


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt with the answers of several models, for people to read."""

    prompt: str
    answers: Mapping[str, str]
    """By the title of the model, that of the policy first."""
    assessments: Mapping[str, float | str]
    """The verdict of the judge, as a text, and scores of the policy's answer."""
    judge: str
    """Name of the judge of the verdict."""


class MetricLogger(Protocol):
    """The part of tracking that training loops see."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep `metrics` for `step`; they reach the tracker at the next `flush`."""

    def flush(self) -> None:
        """Send everything kept so far; called with every checkpoint and at the end."""

    def log_table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Log a table of samples, `name` without suffix."""

    def log_figure(self, name: str, figure: Any) -> None:
        """Log a matplotlib figure as PNG."""

    def log_answers(self, rows: list[AnsweredPrompt]) -> None:
        """Log prompts with answers, once per stage, where the tracker can show and search them."""

    def log_file(self, path: Path, folder: str = "") -> None:
        """Log a small file (report, data card) as an artifact of the run."""


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `metrics` with `prefix` before each name."""
    return {f"{prefix}{name}": value for name, value in metrics.items()}


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are finite: a step that was skipped has no loss, and JSON has no NaN."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def finite_or_none(value: float) -> float | None:
    """Return a value as JSON can have it: None if it is not finite."""
    if math.isfinite(value):
        return value
    return None


class Checkpoints(Protocol):
    """The resumable state of one stage (`{store}/checkpoints/{stage key}/step-%08d/`)."""

    def latest(self) -> tuple[int, Path] | None:
        """Return (step, verified local folder) of the newest intact checkpoint, or None when none was ever
        committed.
        """

    def prepare(
        self, step: int, folder: Path, size: int, unsharded: int | None = None, *, own: int = 0
    ) -> None:
        """Make `folder` empty for the checkpoint of `step`. Raises StoreError unless its disk has space.

        Args:
            step: Number of the last finished step.
            folder: Folder that all ranks write to, on each host.
            size: Bytes of the checkpoint that the ranks write.
            unsharded: The part of `size` that rank 0 writes alone. All ranks write equal parts of the rest.
                None if this is not known; rank 0 may then write everything.
            own: Further bytes that this process writes on its host.
        """

    def save(self, step: int, folder: Path) -> None:
        """Commit a local folder atomically as the checkpoint of `step`. The folder is consumed.

        Args:
            step: Number of the last finished step.
            folder: The files of the checkpoint.
        """


class Nodes(Protocol):
    """The other hosts of a Ray cluster on which a stage has processes.

    Every folder has the same path on all hosts, and each host has files of its own there.
    """

    def check(self) -> None:
        """Compare all nodes of the cluster; to be called when Ray is connected, before `join`.

        Raises ConfigError if a node cannot be used (see `rlhf_core.cluster.handshake`).
        """

    def join(self, ranks: Mapping[str, Mapping[str, Collection[int]]]) -> None:
        """Start an agent on each other host: it fetches the stage's inputs and monitors the processes there.

        This host fetches them as well if it has processes. To be called when Ray is connected, before any
        process loads a model. `ranks` has, by id of Ray's node and by folder of the checkpoint ("" for its
        top folder), the training ranks on that node.
        """

    def add_inputs(self, refs: Sequence[ArtifactRef]) -> None:
        """Have the following calls of `join` fetch these artifacts as well."""

    @property
    def stored(self) -> Mapping[Path, str]:
        """sha256 of the weights that `gather` has left in the store, by their path."""

    def gather(self, folder: Path) -> None:
        """Move what processes on other hosts have written to `folder`, a part of the output, to the store.

        Files other than weights are copied from there to this host.
        """

    def share(self, folder: Path) -> None:
        """Copy the files of a folder of this host to the other hosts, through the store, unless they have
        them.

        A folder outside `run.home` is the user's: nothing is written to it. Raises DataError if it has other
        files on another host.

        Weights that are only in the store are fetched by all hosts with processes of the stage.
        """

    def leave(self) -> None:
        """End the agents; to be called before Ray's connection ends."""


@dataclass(frozen=True)
class Lineage:
    """The inputs of a stage and the run that it belongs to."""

    inputs: Mapping[StageName, ArtifactRef]
    """The artifacts this stage reads: digests and addresses for the registry."""
    parent_run_id: str | None = None
    """MLflow run of the whole pipeline; None when tracking could not be reached."""


@dataclass(frozen=True)
class StageContext:
    """Everything outside the configuration that a stage may use."""

    inputs: Mapping[str, Path]
    """Verified local folder of each input artifact, by stage name.

    On a cluster whose store is a bucket, files with weights (`is_weights`) are only on hosts with ranks or
    engines.
    """
    output: Path
    """Empty local folder; its content becomes the artifact of the stage."""
    scratch: Path
    """Local scratch folder of this attempt."""
    checkpoints: Checkpoints
    metrics: MetricLogger
    progress: Progress
    lineage: Lineage | None = None
    """None if the stage runs outside a pipeline, as in unit tests."""
    stop: StopRequest = field(default_factory=StopRequest)
    """Whether this process was asked to stop."""
    monitor: Monitor | None = None
    """Monitors the processes of this attempt; None outside a pipeline."""
    nodes: Nodes | None = None
    """The other hosts of a cluster; None outside a pipeline."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Digests of the external inputs of the stage, from its key or the key of an input. Empty outside of a
    pipeline.

    They must be compared with the files that are read.
    """

    @property
    def data(self) -> Path:
        """Folder of the artifact of the stage `data`, which nearly all stages read."""
        return self.inputs["data"]

    @property
    def input_refs(self) -> Mapping[StageName, ArtifactRef]:
        """The artifacts that the stage reads; empty outside a pipeline."""
        return {} if self.lineage is None else self.lineage.inputs

    def stored_in(self, folder: Path) -> dict[str, str]:
        """Return the sha256 of files of a folder of the output that are in the store, by name. They need not
        be on this host.
        """
        stored = {} if self.nodes is None else self.nodes.stored
        return {path.name: digest for path, digest in stored.items() if path.parent == folder}

    def artifact_name(self, stage: StageName) -> str:
        """Return the name of an input artifact in its store, `artifacts/{stage}/{key}`, or outside a pipeline
        its folder.
        """
        if self.lineage is None:
            return str(self.inputs[stage])
        # Not the address in the store: it is written into artifacts, and their digests must not depend on it.
        return artifact_prefix(stage, self.lineage.inputs[stage].key)


@dataclass(frozen=True)
class Findings:
    """What the summary and its table of results have of a stage (`Stage.findings`)."""

    read: Callable[[ArtifactRef], dict[str, Any] | None]
    """Returns the entry of the summary; None for no entry."""
    rows: Callable[[Mapping[str, Any]], list[tuple[str, str]]]
    """Returns the rows of the table, from the entry."""
    entry: str | None = None
    """Name of the entry; None: the name of the stage."""


@dataclass(frozen=True)
class StageResult:
    """What a stage returns, in addition to the files in `StageContext.output`."""

    metrics: Mapping[str, float]
    """Headline metrics, for the manifest, the table at the end and the summary."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Other values for the manifest, such as counts and digests. They are stored as text."""
