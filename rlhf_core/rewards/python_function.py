"""Runs a user's reward function in a separate process, so that slow, crashing or hanging functions do not
affect PPO.

    function = PythonFunction(source)    starts the process and loads the function
    outcome = function(samples)          values, and reasons for missing ones, after the retries
    function.close()

The module of the function is read once, and all its processes use this content. Later edits during the run
have no effect. Modules that it imports are read by each process. If a batch exceeds `timeout` seconds or the
process dies, the process and its children are killed, and each retry starts a new process. Batches are
processed one at a time, and the object must be used by one thread only.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config.rewards import PythonReward, UserFunction
from rlhf_core.errors import ConfigError, InputError, RewardError
from rlhf_core.rewards.check import function_file
from rlhf_core.rewards.failures import CodeError, Failure, Outcome, groups_of, score_with_retries
from rlhf_core.rewards.python_worker import TOKEN_FIELDS
from rlhf_core.system.processes import launch, python_module
from rlhf_core.types import RewardInput

START_SECONDS = 120.0
"""Time limit for the import of the user's module, which may load a model (or `timeout`, if that is more)."""
_STOP_SECONDS = 2.0


def read_code(source: UserFunction, field: str, digest: str | None) -> bytes | None:
    """Return the source of the module of a user's function; None if it is not a Python file.

    Args:
        source: The function.
        field: Its section, for messages.
        digest: sha256 of the source at the beginning of the run; None: any.

    Raises:
        ConfigError: The file is missing.
        InputError: Its content is another one.
    """
    if source.file is not None and not Path(source.file).is_file():
        raise ConfigError(f"{field}.file must be an existing Python file; got {source.file}")
    file = function_file(source)
    if file is None or file.suffix != ".py" or not file.is_file():
        return None
    code = file.read_bytes()
    if digest is not None and hashlib.sha256(code).hexdigest() != digest:
        raise InputError(
            f"{field}: {file} has changed since this run began; "
            "restore the former content, or start the run again to use the new one"
        )
    return code


class PythonFunction:
    """Callable `Sequence[RewardInput] -> Outcome`.

    A call fails that raises, takes longer than `timeout` seconds, or returns anything but n floats. Raises
    `ConfigError` at construction if the function cannot be loaded, `RewardError` if its process cannot be
    started.
    """

    def __init__(self, source: PythonReward, digest: str | None = None) -> None:
        """Start the process of the function.

        `digest` is the sha256 of the module's source at the beginning of the run. Other source raises
        `InputError`.
        """
        self._source = source
        self._name = source.used_name
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self.code = read_code(source, f"ppo.rewards.{self._name}", digest)
        """Source of its file; None for a function of a package."""
        self._start()

    def __call__(self, samples: Sequence[RewardInput]) -> Outcome:
        if self._source.needs_group:
            groups = groups_of(samples)
            by_group = [self._score([samples[row] for row in rows]) for rows in groups]
            outcome = Outcome.of_groups(groups, by_group)
        else:
            outcome = self._score(samples)
        if outcome.is_broken and self._source.on_error == "abort":
            raise InputError(
                f"reward {self._name}: the function fails for each response: {outcome.reasons[0]}; correct it"
            )
        return outcome

    def close(self) -> None:
        """End the process; a second call does nothing."""
        if self._process is not None:
            assert self._channel is not None
            self._channel.close()  # the process ends then
            self._exit_status()
            # Also if the process has ended, because those that the function started may still run.
            self._kill()

    def _score(self, samples: Sequence[RewardInput]) -> Outcome:
        return score_with_retries(self._name, self._once, samples, self._source.retries + 1)

    def _once(self, samples: Sequence[RewardInput]) -> Outcome:
        if self._process is None:
            self._start()
        try:
            # A message for each sample, made when it is sent, so that neither
            # process has the whole batch as text twice (decision 30: its process
            # had a peak of 41 bytes for each token before, and has 9 now).
            request = chain([{"samples": len(samples)}], map(_record, samples))
            reply = self._exchange(request, self._source.timeout)
            if "error" in reply:
                raise (CodeError if reply["in_code"] else Failure)(str(reply["error"]))
        except Failure as failure:
            # Parts of a group would get other values.
            failure.searchable &= not self._source.needs_group
            raise
        return Outcome.of(list(map(float, reply["values"])))

    def _start(self) -> None:
        """Start the process and load the function there. Raises ConfigError if it cannot be loaded."""
        # Not standard output: the function and its libraries print to it.
        ours, theirs = socket.socketpair()
        source = self._source
        arguments = [str(theirs.fileno()), str(os.getpid()), source.function, str(source.file or "")]
        # -P keeps the current folder from shadowing installed packages; it is searched last instead.
        paths = [*(path for path in sys.path if path), os.getcwd()]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
        self._process = launch(
            [*python_module("rlhf_core.rewards.python_worker"), *arguments],
            environment,
            pass_fds=(theirs.fileno(),),
        )
        # The worker has the only copy of its end now, so that `recv` returns when the worker ends.
        theirs.close()
        self._channel = ours
        try:
            code = None
            if self.code is not None:
                # The bytes and not their text: a source can declare
                # another encoding than UTF-8, which `compile` respects.
                code = base64.b64encode(self.code).decode()
            reply = self._exchange([{"code": code}], max(START_SECONDS, source.timeout))
        except Failure as failure:
            raise RewardError(
                f"reward {self._name}: the process for {source.function} did not start: {failure}"
            ) from failure
        if "refused" in reply:
            self.close()
            name = source.function
            if source.file:
                name = f"{source.file}, function {source.function.partition(':')[2]}"
            raise ConfigError(
                f"ppo.rewards.{self._name}.function must be loadable; got {name}: {reply['refused']}"
            )

    def _exchange(self, request: Iterable[dict[str, Any]], seconds: float) -> dict[str, Any]:
        """Send the lines of `request` and return the reply.

        On any failure, the process is killed and `Failure` is raised.
        """
        assert self._channel is not None
        deadline = time.monotonic() + seconds
        line = b""
        try:
            for part_of_request in request:
                self._channel.settimeout(max(1e-3, deadline - time.monotonic()))
                self._channel.sendall(json.dumps(part_of_request).encode() + b"\n")
            while not line.endswith(b"\n"):
                # Not 0: the socket would not block, and `recv` would raise BlockingIOError.
                self._channel.settimeout(max(1e-3, deadline - time.monotonic()))
                part = self._channel.recv(1 << 16)
                if not part:
                    raise ConnectionError("closed")
                line += part
        except TimeoutError:
            # This clause must come before that of OSError, of which TimeoutError is a subclass.
            self._kill()
            # The search for the sample that hangs waits for the time limit several times. That is useful only
            # if the other samples are used.
            message = f"it gave no answer within {seconds:g} s"
            raise Failure(message, searchable=self._source.on_error == "mask") from None
        except OSError as error:
            # Before the kill, whose SIGKILL would be the status otherwise.
            status = self._exit_status()
            self._kill()
            raise Failure(f"its process ended{status} ({error})") from error
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _exit_status(self) -> str:
        """Wait until the process ends, for a short time, and return its status for a message."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f" with exit status {self._process.wait(_STOP_SECONDS)}"
        return ""

    def _kill(self) -> None:
        assert self._channel is not None and self._process is not None
        self._channel.close()
        # The worker has a session of its own, so this ends it and the processes of the user's function only.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel = self._process = None


def _record(sample: RewardInput) -> dict[str, Any]:
    """Return a sample as JSON can have it, its tokens as base64 of int32."""
    tokens = {name: np.asarray(getattr(sample, name), np.int32) for name in TOKEN_FIELDS}
    return vars(sample) | {name: base64.b64encode(ids.tobytes()).decode() for name, ids in tokens.items()}
