"""The calls of MLflow's client that tracking and the registry need, with plain values. No other file imports
it.

Every method can raise any exception of MLflow, requests or SQLAlchemy. `Tracking` logs a warning and
continues; for the registry it is an error.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rlhf_core.config.redact import is_secret, printable, scrubbed
from rlhf_core.errors import ConfigError, InputError
from rlhf_core.system.home import Home
from rlhf_core.tracking.database import artifacts_of, ensure_database, tracker_problem

_T = TypeVar("_T")

_ENVIRONMENT = {
    # The defaults are 7 retries of 120 s each: training would wait for minutes at every checkpoint.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # MLflow allows it by default. Nothing here loads a model through MLflow, and data must never run code.
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
}
# A stage that is asked to stop has 20 s in all, and the last checkpoint needs them more than a tracker does.
_LAST_SECONDS = 3
# The largest batches that MLflow accepts.
_POINTS_PER_CALL = 1000
_PARAMS_PER_CALL = 100
_MODELS_PER_CALL = 100
_NAME = re.compile(r"[^\w\-./: ]")
_NAME_LENGTH, _DIGEST_LENGTH = 250, 12
"""Maximum length of a name, and length of the digest at the end of a name that would be longer."""
_TAG_LENGTH = 5000
"""Maximum length of a tag of a run."""
_DATASET_NAME, _DATASET_DIGEST = 500, 36
"""Maximum length of the name of a data set."""


COLUMNS_KEY = "rlhf"
"""Value of `viewStateShareKey` in the address of a list of runs with the columns `MAIN_METRICS` and
`MAIN_TAGS`.
"""
_COLUMNS_TAG = f"mlflow.sharedViewState.{COLUMNS_KEY}"
MAIN_METRICS = (
    "win_rate",
    "win_rate_low",
    "kl",
    "reward",
    "gold_reward",
    "judge",
    "length_ratio",
    "eos_rate",
    "reward_accuracy",
    "dpo_accuracy",
    "dpo_margin",
    "champion",
    "hours",
)
"""Metrics of the run of a pipeline."""
MAIN_TAGS = ("rlhf.algorithm", "rlhf.base_model", "rlhf.data", "rlhf.seed", "rlhf.model_version")
"""Tags of the run of a pipeline that people compare runs by."""
_COLUMN_IDS = [f"metrics.`{name}`" for name in MAIN_METRICS] + [f"tags.`{name}`" for name in MAIN_TAGS]
_COLUMNS = json.dumps({"selectedColumns": _COLUMN_IDS, "columnOrder": _COLUMN_IDS})


@dataclass(frozen=True)
class Point:
    """One number of one metric."""

    key: str
    value: float
    step: int
    timestamp: int
    """Milliseconds since 1970."""


@dataclass(frozen=True)
class RunState:
    """What the tracker has of a run."""

    run_id: str
    start: int
    """Milliseconds since 1970, on the server."""
    running: bool
    params: Mapping[str, str]
    last_steps: Mapping[str, int]
    """Highest recorded step of each metric."""


@dataclass(frozen=True)
class PastRun:
    """A run of any time, also one in MLflow's trash."""

    run_id: str
    name: str
    tags: Mapping[str, str]
    updated: float
    """Its end, else its start, in seconds since 1970, on the server."""
    finished: bool
    folder: Path | None
    """Its artifacts, if they are in a folder of this machine."""


@dataclass(frozen=True)
class DataSet:
    """Name, digest and location of a data set that a run reads, without its data."""

    name: str
    digest: str
    """MLflow uses the first 36 characters."""
    source_type: str
    """A source type of MLflow: local, s3, hugging_face or code."""
    source: Mapping[str, Any]
    """The location, in the format of MLflow's source type."""
    profile: Mapping[str, float] = field(default_factory=dict)
    """Numbers of rows."""


@dataclass(frozen=True)
class ModelVersion:
    """One version of a registered model."""

    version: str
    tags: Mapping[str, str]
    source: str = ""
    """Address of its files."""
    created: float = 0.0
    """Seconds since 1970, on the server."""


def shorten_timeouts() -> None:
    """Try each request once and for a few seconds only, because this process has been asked to end."""
    # MLflow reads the variables at each request, so that clients that exist follow them.
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(_LAST_SECONDS)


class Mlflow:
    """One tracking server or database, and one experiment in it."""

    def __init__(self, uri: str, experiment: str) -> None:
        self.uri = uri
        self._experiment = experiment

    @functools.cached_property
    def _client(self) -> Any:
        # Before the import, which reads some of them. The user's own values stay.
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # It logs a warning for every retry; `Tracking` logs one for the whole call.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        # Imported here, because it takes more than a second, and many commands need no tracker.
        from mlflow.tracking import MlflowClient
        from mlflow.utils import request_utils

        from rlhf_core.tracking.bounded_http import BoundedAdapter

        # MLflow has no public interface for this. The tests of bounded_http fail if it stops working.
        request_utils.TCPKeepAliveHTTPAdapter = BoundedAdapter
        if database := sqlite_path(self.uri):
            ensure_database(database)
        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def prepare(self) -> None:
        """Import MLflow. If the tracker is a file, open it and find the experiment."""
        client = self._client
        if sqlite_path(self.uri):
            client.search_runs([self.experiment_id], "", max_results=1)

    def ping(self) -> bool:
        """Return True if it answers; raises if not."""
        self._client.search_experiments(max_results=1)
        return True

    @functools.cached_property
    def experiment_id(self) -> str:
        """Id of the experiment, which is found by name or created."""
        from mlflow.exceptions import MlflowException

        existing = self._client.get_experiment_by_name(self._experiment)
        if existing is not None:
            if existing.tags.get(_COLUMNS_TAG) != _COLUMNS:
                self._client.set_experiment_tag(existing.experiment_id, _COLUMNS_TAG, _COLUMNS)
            return _identity(existing.experiment_id, "experiment")
        # A server decides where artifacts are. For a file, MLflow would use the folder of this process.
        location = None
        if database := sqlite_path(self.uri):
            location = artifacts_of(database)
        try:
            # Without the tag, MLflow's pages open in the view for prompts and traces.
            tags = {
                "mlflow.experimentKind": "custom_model_development",
                _COLUMNS_TAG: _COLUMNS,
                "mlflow.note.content": (
                    "Runs of the RLHF pipeline: one per configuration and data, with a run per stage below."
                ),
            }
            created = self._client.create_experiment(self._experiment, artifact_location=location, tags=tags)
            return _identity(created, "experiment")
        except MlflowException:
            # Another process created it in between.
            existing = self._client.get_experiment_by_name(self._experiment)
            if existing is None:
                raise
            return str(existing.experiment_id)

    # Runs

    def find_run(self, tags: Mapping[str, str]) -> RunState | None:
        """Return the oldest run with all these tags, or None."""
        # MLflow's search leaves out its trash: for a run that a person has deleted, another one is made.
        text = " and ".join(f"tags.`{name}` = {_quoted(value)}" for name, value in tags.items())
        # Two processes may have created one each. Both agree on the older one.
        order = ["attributes.start_time ASC"]
        runs = self._client.search_runs([self.experiment_id], text, max_results=1, order_by=order)
        return next(map(_state, runs), None)

    def has_run(self, run_id: str) -> bool:
        """Return whether this tracker has the run."""
        run = _found(self._client.get_run, run_id)
        return run is not None and run.info.run_id == run_id

    def create_run(self, name: str, tags: Mapping[str, str]) -> RunState:
        """Create a run in state RUNNING."""
        return _state(self._client.create_run(self.experiment_id, run_name=name, tags=dict(tags)))

    def delete_run(self, run_id: str) -> None:
        """Move a run to MLflow's trash."""
        self._client.delete_run(run_id)

    def past_runs(self) -> list[PastRun]:
        """Return the runs of all experiments, also those in MLflow's trash."""
        from mlflow.entities import ViewType

        experiments = [each.experiment_id for each in _all_pages(self._client.search_experiments)]
        return list(map(_past, _all_pages(self._client.search_runs, experiments, "", ViewType.ALL)))

    def past_run(self, run_id: str) -> PastRun | None:
        """Return a run as `past_runs` does; None if there is none."""
        run = _found(self._client.get_run, run_id)
        return run and _past(run)

    def delete_for_good(self, run_id: str) -> None:
        """Delete a run with its artifacts. On a server it is in the trash until `mlflow gc` is called."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        self.delete_run(run_id)
        if sqlite_path(self.uri) is None:
            return
        # What `mlflow gc` does for a run. The command itself also deletes all experiments in the trash.
        get_artifact_repository(self._client.get_run(run_id).info.artifact_uri).delete_artifacts()
        self._client._tracking_client.store._hard_delete_run(run_id)

    def reopen(self, run_id: str) -> None:
        """Mark a run as RUNNING again."""
        self._client.update_run(run_id, status="RUNNING")

    def terminate(self, run_id: str, status: str, *, keep_end: bool = False) -> None:
        """End a run with `status` FINISHED, FAILED or KILLED.

        With `keep_end`, a run that was reopened keeps its earlier end time.
        """
        end = None
        if keep_end:
            # `set_terminated` takes the present time for None.
            end = self._client.get_run(run_id).info.end_time
        self._client.set_terminated(run_id, status, end_time=end)

    def tags(self, run_id: str) -> dict[str, str]:
        """Return all tags of a run."""
        return dict(self._client.get_run(run_id).data.tags)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set or change tags."""
        from mlflow.entities import RunTag

        # One request for all: `set_tag` sends each alone.
        self._client.log_batch(
            run_id, tags=[RunTag(name, _short(value, _TAG_LENGTH)) for name, value in tags.items()]
        )

    def remove_tags(self, run_id: str, prefix: str) -> None:
        """Remove all tags whose names start with `prefix`."""
        for name in self.tags(run_id):
            if name.startswith(prefix):
                self._client.delete_tag(run_id, name)

    def log_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Log parameters that the run does not have yet: MLflow refuses to change one."""
        from mlflow.entities import Param

        items = [Param(clean_name(name), _short(str(value), 5000)) for name, value in params.items()]
        for start in range(0, len(items), _PARAMS_PER_CALL):
            self._client.log_batch(run_id, params=items[start : start + _PARAMS_PER_CALL])

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        """Log metrics. A point that the run has already, bit by bit, is not added again."""
        from mlflow.entities import Metric

        # MLflow refuses a whole batch for one name, so names were cleaned (`clean_name`).
        metrics = [Metric(point.key, point.value, point.timestamp, point.step) for point in points]
        for start in range(0, len(metrics), _POINTS_PER_CALL):
            self._client.log_batch(run_id, metrics=metrics[start : start + _POINTS_PER_CALL])

    def log_file(self, run_id: str, path: Path, folder: str) -> None:
        """Log a local file as an artifact, replacing one of the same name."""
        self._client.log_artifact(run_id, str(path), folder or None)

    def tag_tables(self, run_id: str, tables: Iterable[str]) -> None:
        """Mark artifacts as tables for MLflow's pages: the last ones, as many as fit into a tag."""
        tag = "mlflow.loggedArtifacts"
        known = json.loads(self._client.get_run(run_id).data.tags.get(tag, "[]"))
        # Not by `MlflowClient.log_table`, which appends to a table that the
        # run has: a table that is sent again would have its rows twice.
        entries = [{"path": path, "type": "table"} for path in tables]
        new = [entry for entry in entries if entry not in known]
        if new:
            marked = [*known, *new]
            while len(text := json.dumps(marked)) > _TAG_LENGTH:
                marked = marked[1:]
            self.set_tags(run_id, {tag: text})

    def log_datasets(self, run_id: str, datasets: Iterable[DataSet], context: str) -> None:
        """Log data sets as inputs of the run: addresses and digests, without data.

        Logging a data set twice has no effect. `context` describes the use, for example `training`.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag

        tags = [InputTag("mlflow.data.context", context)]
        inputs = []
        for entry in datasets:
            data = Dataset(
                name=entry.name[:_DATASET_NAME],
                digest=entry.digest[:_DATASET_DIGEST],
                source_type=entry.source_type,
                source=json.dumps(dict(entry.source)),
                profile=json.dumps(dict(entry.profile)) if entry.profile else None,
            )
            inputs.append(DatasetInput(data, tags))
        if inputs:
            self._client.log_inputs(run_id, datasets=inputs)

    def system_metrics(self, run_id: str) -> Any:
        """Start MLflow's sampler of CPU, memory and GPU, and return it; `finish()` ends it."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        # Without `resume_logging`, the steps of each attempt begin
        # at 0, and its points lie among those of the others.
        monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=self.uri)
        monitor.start()
        return monitor

    # Registry

    def ensure_model(self, name: str, description: str) -> None:
        """Create the registered model unless it exists."""
        from mlflow.exceptions import MlflowException

        if self.model_tags(name) is not None:
            return
        try:
            self._client.create_registered_model(name, description=description)
        except MlflowException as error:
            # Another process created it in between.
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def model_tags(self, name: str) -> dict[str, str] | None:
        """Return the tags of a registered model; None if it does not exist."""
        model = _found(self._client.get_registered_model, name)
        return model and dict(model.tags)

    def tag_model(self, name: str, tags: Mapping[str, str]) -> None:
        """Set or change tags of a registered model."""
        for key, value in tags.items():
            self._client.set_registered_model_tag(name, key, value)

    def all_model_names(self) -> list[str]:
        """Return the names of all registered models."""
        search = self._client.search_registered_models
        return [model.name for model in _all_pages(search, max_results=_MODELS_PER_CALL)]

    def aliases(self, name: str) -> dict[str, str]:
        """Return the versions of a registered model, which must exist, by their aliases."""
        aliases = self._client.get_registered_model(name).aliases
        return {alias: str(version) for alias, version in aliases.items()}

    def versions(self, name: str, tag: str | None = None) -> list[ModelVersion]:
        """Return the versions of a registered model. With `tag`, return only those that have this tag.

        MLflow reads the tags of all versions that it returns, which takes seconds for hundreds of versions.
        """
        # MLflow's search language has no escape for quotes. In a pattern, `_` is any character.
        pattern = re.sub(r"['\\]", "_", name)
        text = f"name = '{name}'"
        if pattern != name:
            text = f"name LIKE '{pattern}'"
        if tag is not None:
            text += f" and tags.`{tag}` LIKE '%'"
        # A page of 200 stays far below `ANSWER_BYTES` of bounded_http, also with many tags.
        found = _all_pages(self._client.search_model_versions, text, max_results=200)
        return [_version(entry) for entry in found if entry.name == name]

    def version(self, name: str, number: str) -> ModelVersion | None:
        """Return a version of a registered model; None if it does not exist."""
        entry = _found(self._client.get_model_version, name, number)
        return entry and _version(entry)

    def create_version(
        self, name: str, *, source: str, run_id: str | None, tags: Mapping[str, str], description: str
    ) -> ModelVersion:
        """Create a version of a registered model. No file is copied.

        Args:
            name: Name of the registered model.
            source: Address of its files.
            run_id: Run that made it, or None.
            tags: Tags of the version.
            description: Text for MLflow's page.
        """
        # Not awaited: no file is copied, so that the version is ready at once.
        entry = self._client.create_model_version(
            name, source, run_id=run_id, tags=dict(tags), description=description, await_creation_for=0
        )
        return ModelVersion(_identity(entry.version, "model version"), dict(tags))

    def tag_version(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        """Set or change tags of a version."""
        for key, value in tags.items():
            self._client.set_model_version_tag(name, version, key, value)

    def by_alias(self, name: str, alias: str) -> ModelVersion | None:
        """Return the version that has the alias, or None."""
        # `get_model_version_by_alias` has the same error for a missing alias as for an invalid name.
        version = self.aliases(name).get(alias)
        if version is None:
            return None
        return _version(self._client.get_model_version(name, version))

    def set_alias(self, name: str, alias: str, version: str) -> None:
        """Move the alias to `version`."""
        self._client.set_registered_model_alias(name, alias, version)

    def delete_alias(self, name: str, alias: str) -> None:
        """Take the alias from its version, if it has one."""
        self._client.delete_registered_model_alias(name, alias)


def _found(get: Callable[..., Any], *identity: str) -> Any:
    """Return what MLflow has under this id or name; None if it has nothing."""
    from mlflow.exceptions import MlflowException

    try:
        return get(*identity)
    except MlflowException as error:
        # The second for an id that does not have the form of MLflow's ids.
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _all_pages(search: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[Any]:
    """Yield all results of a search, which MLflow returns in pages."""
    token = None
    while True:
        page = search(*arguments, **options, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _version(entry: Any) -> ModelVersion:
    created = entry.creation_timestamp / 1000
    return ModelVersion(str(entry.version), dict(entry.tags), str(entry.source), created)


def sqlite_path(uri: str) -> Path | None:
    """Return the file of an SQLite address; None for any other address."""
    if not uri.startswith("sqlite:///"):
        return None
    # As in SQLAlchemy, the path begins after the third slash, and is relative without a fourth one.
    return Path(urlsplit(uri).path.removeprefix("/") or ".").absolute()


def mlflow_at(uri: str, experiment: str = "") -> Mlflow:
    """Return the client of the tracker at `uri`. Connects to nothing.

    Raises ConfigError for an address that cannot be a tracker.
    """
    if problem := tracker_problem(uri):
        raise ConfigError(f"tracking.uri (or MLFLOW_TRACKING_URI): {problem}")
    if database := sqlite_path(uri):
        uri = f"sqlite:///{database}"
    return Mlflow(uri, experiment)


def open_registry(home: str) -> Mlflow:
    """Return the registry at MLFLOW_TRACKING_URI, else that in the folder `home`.

    Raises InputError if the folder has no database of MLflow.
    """
    given = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow = mlflow_at(given or f"sqlite:///{Home.of(home).mlflow_database}")
    check_exists(mlflow, "this folder has no runs (--home)", given=bool(given))
    return mlflow


def check_exists(mlflow: Mlflow, field: str, *, given: bool) -> None:
    """Raise InputError if the tracker is a file that does not exist: MLflow would create an empty database.

    Args:
        mlflow: The tracker.
        field: Name of the setting with its folder.
        given: Whether its address was given instead.
    """
    database = sqlite_path(mlflow.uri)
    if database is not None and not database.is_file():
        fix = "name the folder of the runs, or set MLFLOW_TRACKING_URI"
        if given:
            field, fix = "tracking.uri (or MLFLOW_TRACKING_URI)", "name that of the runs"
        raise InputError(f"{field}: there is no database of MLflow at {database}; {fix}")


def clean_name(name: str) -> str:
    """Return the name of a metric, parameter or tag with everything replaced that MLflow does not accept.

    MLflow treats names as relative paths. The end of a long name is replaced by a digest of the whole name.
    """
    parts = _NAME.sub("_", name).strip().split("/")
    for index, part in enumerate(parts):
        if part in ("", ".", ".."):
            parts[index] = "_" * max(1, len(part))
    cleaned = "/".join(parts)
    if len(cleaned) <= _NAME_LENGTH:
        return cleaned
    # A name can come from a user's source, with a lone surrogate that UTF-8 cannot encode.
    digest = hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()[:_DIGEST_LENGTH]
    return f"{cleaned[: _NAME_LENGTH - _DIGEST_LENGTH - 1]}-{digest}"


def _identity(value: Any, what: str) -> str:
    """Return `value` as text.

    Raises UnusableAnswer if it is empty: then the server is not an MLflow server.
    """
    if not value:
        raise UnusableAnswer(f"the answer names no {what}; check the address")
    return str(value)


def _state(run: Any) -> RunState:
    # `run.data.metrics` has the values without their steps.
    last = {metric.key: int(metric.step) for metric in run.data._metric_objs}
    running = run.info.status == "RUNNING"
    run_id = _identity(run.info.run_id, "run")
    return RunState(run_id, int(run.info.start_time), running, dict(run.data.params), last)


def _past(run: Any) -> PastRun:
    address = urlsplit(run.info.artifact_uri)
    folder = Path(url2pathname(address.path)) if address.scheme in ("", "file") else None
    finished, updated = run.info.status == "FINISHED", (run.info.end_time or run.info.start_time) / 1000
    return PastRun(run.info.run_id, run.info.run_name, dict(run.data.tags), updated, finished, folder)


def _quoted(value: str) -> str:
    """Return a text of MLflow's search language, which has two kinds of quotes and no escape for them."""
    for quote in ("'", '"'):
        # A backslash before the last quote would be part of the text.
        if quote not in value and not value.endswith("\\"):
            return f"{quote}{value}{quote}"
    raise ValueError(f"cannot search MLflow for {value!r}")


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


# -- errors: what they mean, for messages and decisions --

_CAUSE = re.compile(r"\(Caused by (.+)\)")


def attempt(call: Callable[[], _T]) -> Future[_T]:
    """Make a call of a tracker, and return its result or its error.

    Errors are of any kind: MLflow raises those of four libraries, and none may stop a pipeline.
    """
    # A Future keeps a result or an error. `result` raises the error with its own traceback.
    done: Future[_T] = Future()
    try:
        done.set_result(call())
    except Exception as error:
        done.set_exception(error)
    return done


class UnusableAnswer(Exception):
    """The response has a success status but does not contain the requested data."""


def _status(error: BaseException) -> int:
    """Return the HTTP status of MLflow's error; 0 for other errors."""
    return int(getattr(error, "get_http_status_code", lambda: 0)())


def is_unreachable(error: BaseException) -> bool:
    """Return whether no connection was made or no answer came in time, or a database was not available."""
    from requests.exceptions import ConnectionError, Timeout

    # MLflow raises its own error while it handles that of requests, and gives its database's this code.
    return (
        isinstance(error.__context__, ConnectionError | Timeout)
        or getattr(error, "error_code", "") == "TEMPORARILY_UNAVAILABLE"
    )


def short_reason(error: BaseException) -> str:
    """Return the reason of an error in one short line without credentials."""
    text = printable(" ".join(scrubbed(str(error)).split()))
    # SQLAlchemy appends the statement with its parameters, which are the data of the run.
    text = text.partition(" [SQL: ")[0]
    # The beginning of an error of urllib3 is an address.
    if cause := _CAUSE.search(text):
        text = cause[1]
    text = text[:160]
    return type(error).__name__ if is_secret("", text) else f"{type(error).__name__}: {text}"


def describe_failure(error: BaseException) -> str:
    """Return a description of MLflow's problem and a fix if the user can apply one.

    It follows "MLflow at ADDRESS" in a message.
    """
    status = _status(error)
    code = getattr(error, "error_code", "")
    if status in (401, 403) or code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED"):
        fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return f"refuses these credentials ({short_reason(error)}); {fix}"
    if 400 <= status < 500 or isinstance(error, UnusableAnswer):
        return f"does not take this ({short_reason(error)})"
    return f"does not answer ({short_reason(error)})"
