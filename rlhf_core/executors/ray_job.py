"""A stage as a job of a running Ray cluster, by Ray's Job Submission client.

The cluster's head must run Ray with its dashboard, which has the job server (`ray[default]`). Its address is
RAY_API_SERVER_ADDRESS, such as http://head:8265; the token is Ray's RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus as RayStatus
from ray.job_submission import JobSubmissionClient

from rlhf_core.config.redact import shown
from rlhf_core.errors import ConfigError, InfrastructureError
from rlhf_core.executors.base import Job, JobState, JobStatus

ADDRESS = "RAY_API_SERVER_ADDRESS"
_REQUEST_SECONDS = 30.0
_LOG_BYTES = 2**16
"""Length of the end of the output that is copied to the log of the stage."""
_STATES: dict[RayStatus, JobState] = {
    RayStatus.PENDING: "pending",
    RayStatus.RUNNING: "running",
    RayStatus.SUCCEEDED: "succeeded",
    RayStatus.FAILED: "failed",
    RayStatus.STOPPED: "stopped",
}

T = TypeVar("T")
_ERROR: Any = object()
"""No answer in place of an error."""


class _Client(JobSubmissionClient):  # type: ignore[misc] # the library is not typed
    def _do_request(self, *args: Any, **kwargs: Any) -> requests.Response:
        # Ray sets no timeout, and then requests waits without a limit.
        answer: requests.Response = super()._do_request(*args, **{"timeout": _REQUEST_SECONDS, **kwargs})
        return answer


class RayJobs:
    """Jobs of a Ray cluster."""

    title = "Ray job"
    holds_resources = False

    def submit(self, job: Job) -> None:
        """Start `job`, unless a job of this name exists already."""
        try:
            self._call(
                lambda: self._client.submit_job(
                    # Ray runs it in a shell.
                    entrypoint=shlex.join(job.command),
                    submission_id=job.name,
                    metadata={"rlhf_stage": job.stage},
                    # No GPUs: ranks and engines ask Ray for theirs, and the stage's own process needs none.
                    # No memory: with that of a whole node, the job would wait for a node that nothing else
                    # uses.
                    entrypoint_num_cpus=job.resources.cpus_per_node,
                )
            )
        except InfrastructureError:
            # Ray answers a name that is taken with the status of a failure in the server.
            if self.status(job.name).state == "missing":
                raise

    def status(self, name: str) -> JobStatus:
        """Return the status of a job."""
        info = self._call(lambda: self._client.get_job_info(name), missing=None)
        if info is None:
            return JobStatus("missing")
        return JobStatus(_STATES[info.status], (info.message or "").strip())

    def cancel(self, name: str) -> None:
        """End a job. A job that has ended or does not exist is ignored."""
        self._call(lambda: self._client.stop_job(name), missing=False)

    def log_tail(self, name: str) -> str:
        """Return the end of the job's output; empty if there is none."""
        text: str = self._call(lambda: self._client.get_job_logs(name), missing="")
        return text[-_LOG_BYTES:]

    @cached_property
    def _client(self) -> _Client:
        return _Client(os.environ[ADDRESS], headers=_authorization())

    def _call(self, request: Callable[[], T], missing: T = _ERROR) -> T:
        """Send a request. `missing` is the answer if the job does not exist; by default, an error is
        raised.
        """
        address = shown(os.environ.get(ADDRESS, ""))
        try:
            return request()
        except AuthenticationError as error:
            raise ConfigError(
                f"RAY_AUTH_TOKEN: the Ray cluster at {address} refuses it; give the cluster's token"
            ) from error
        except (ConnectionError, requests.RequestException) as error:
            raise InfrastructureError(f"the Ray cluster at {address} does not answer: {error}") from error
        except RuntimeError as error:
            # The status is only in the text: Ray raises RuntimeError for every answer that is an error.
            if "status code 404" in str(error) and missing is not _ERROR:
                return missing
            # Without 408 and 429, which another try can change, as in `kuberay`.
            if re.search(r"status code 4(?!08|29)\d\d", str(error)):
                raise ConfigError(
                    f"run.executor=ray: the Ray cluster at {address} refuses: {error}"
                ) from error
            raise InfrastructureError(f"the Ray cluster at {address}: {error}") from error


def _authorization() -> dict[str, str]:
    """Return the header with the token of RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH; {} without one."""
    # Ray's client adds it only if RAY_AUTH_MODE was set before ray was imported.
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not token and path:
        try:
            token = Path(path).read_text(encoding="ascii")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"RAY_AUTH_TOKEN_PATH: cannot read {shown(path)} ({error})") from error
    return {"Authorization": f"Bearer {token.strip()}"} if token.strip() else {}
