"""The process that runs a user's reward function. `python_function.PythonFunction` starts it and never
imports it.

    parent                                      worker
    {"code": "..." or null}                ->   load the function
                                           <-   {"ready": true} or {"refused": "..."}
    {"samples": n}, and n lines            ->   call it
                                           <-   {"values": [...]} or {"error": "..."}

Messages are JSON objects, one per line, over an inherited socket. Output of the function goes to the log.
`code` is the source of the module as the run first read it (base64); the current content of the file is not
used. The process ends when the parent closes the socket or ends.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.types import Numbers, RewardInput

TOKEN_FIELDS = ("prompt_ids", "response_ids")
"""Fields of a sample that are sent as base64 of int32, because numbers in JSON take longer than the text."""

_PARENT_CHECK = 1.0
"""Seconds between checks that the parent is alive."""
_IN_CODE = (AttributeError, ImportError, LookupError, NameError, NotImplementedError, SyntaxError, TypeError)
"""Errors that a function raises again if it is called again with the same samples."""


def load_function(
    function: str, file: str | None, code: bytes | None = None
) -> Callable[[list[RewardInput]], Any]:
    """Return the callable named `package.module:function`, or the function of that name in `file`.

    `code` is the source of the file or module; None for a module that is not a Python file. Raises any
    exception of the import.
    """
    module_name, name = _module_name(function, file), function.partition(":")[2]
    if code is None and file is not None:
        code = Path(file).read_bytes()
    if code is None:
        module = importlib.import_module(module_name)
    else:
        if file is None:
            spec = importlib.util.find_spec(module_name)
        else:
            spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None, "the parent has read its source"
        module = importlib.util.module_from_spec(spec)
        # Before the code is executed, as in an import. Dataclasses, for example, look up their module there.
        sys.modules[module_name] = module
        exec(compile(code, str(spec.origin), "exec"), module.__dict__)
    loaded = getattr(module, name, None)
    if not callable(loaded):
        raise AttributeError(f"{file or module_name} has no function {name}")
    return loaded  # type: ignore[no-any-return]  # what the user wrote is checked by its results


def _module_name(function: str, file: str | None) -> str:
    return function.partition(":")[0] if file is None else "rlhf_user_reward"


def as_floats(result: Any, count: int) -> list[float]:
    """Return `result` as `count` floats, which need not be finite. Raises `ValueError` for anything else."""
    # A dict or a set of n numbers has the right length, but no order that says which response each is for.
    if isinstance(result, str | bytes | dict | set) or not hasattr(result, "__len__"):
        raise ValueError(f"it returned {_short(result)}, but a list of {count} floats is needed")
    # A list of a torch tensor has tensors without axes, and
    # each `float` of one on a GPU waits for the device.
    values = result.tolist() if hasattr(result, "tolist") else list(result)
    # `tolist` of an array without axes returns a number.
    if not isinstance(values, list) or len(values) != count:
        size = len(values) if isinstance(values, list) else 0
        raise ValueError(f"it returned {size} values for {count} responses ({_short(result)})")
    for index, value in enumerate(values):
        if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            raise ValueError(f"it returned {_short(value)} for response {index}, but a float is needed")
    return list(map(float, values))


def serve(channel: socket.socket, function: str, file: str | None) -> None:
    """Answer batches until the parent closes `channel`."""
    lines = channel.makefile("r", encoding="utf-8", newline="\n")
    start = json.loads(lines.readline())
    code = None if start["code"] is None else base64.b64decode(start["code"])
    try:
        call = load_function(function, file, code)
    except Exception as error:
        _send(channel, {"refused": f"{type(error).__name__}: {error}"})
        return
    _send(channel, {"ready": True})
    shown = set[str]()  # errors whose traceback is in the log
    for line in lines:
        count = json.loads(line)["samples"]
        samples = [_sample(json.loads(each)) for each in islice(lines, count)]
        try:
            reply: dict[str, Any] = {"values": as_floats(call(samples), len(samples))}
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            text = str(error)
            # Errors of `as_floats` are whole sentences. Others get their position in the user's code.
            if frames[-1].filename != __file__:
                own = sys.modules[_module_name(function, file)].__file__
                # Without one, another module has the function.
                frame = ([each for each in frames if each.filename == own] or frames)[-1]
                line = f"{Path(frame.filename).name}:{frame.lineno}"
                text = f"it raised {type(error).__name__}: {error} ({line})"
            if text not in shown:
                shown.add(text)
                traceback.print_exc()
            reply = {"error": text, "in_code": isinstance(error, _IN_CODE)}
        _send(channel, reply)


def _sample(record: dict[str, Any]) -> RewardInput:
    for name in TOKEN_FIELDS:
        record[name] = Numbers(np.frombuffer(base64.b64decode(record[name]), np.int32))
    return RewardInput(**record)


def _send(channel: socket.socket, record: dict[str, Any]) -> None:
    channel.sendall(json.dumps(record).encode() + b"\n")


def _short(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"


def _exit_with(parent: int) -> None:
    # Not the kernel's signal for the death of the parent: it comes when the
    # thread that started this process ends, which can be earlier (prctl(2)).
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK)
    os._exit(1)


def main(argv: list[str]) -> None:
    """Run the worker.

    Arguments: file descriptor of the socket, process id of the parent, `package.module:function`, file or
    empty.
    """
    descriptor, parent, function, file = int(argv[0]), int(argv[1]), argv[2], argv[3] or None
    # While the function computes, nobody reads the socket and notices that the parent has ended.
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    os.dup2(2, 1)
    os.set_inheritable(descriptor, False)  # processes that the function starts must not inherit the socket
    with socket.socket(fileno=descriptor) as channel:
        serve(channel, function, file)


if __name__ == "__main__":
    main(sys.argv[1:])
