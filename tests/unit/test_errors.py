"""Errors on their way from one process to another.

- every class of the tree keeps itself and its message through pickle and through a record
- an unexpected exception is classified in the process where it was raised: a bug is not retried, a failure of
  the system is, and a lack of memory has its own class
"""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterator

import pytest
import torch

from rlhf_core.errors import (
    DataError,
    InfrastructureError,
    OutOfMemory,
    RLHFError,
    UnexpectedError,
    classified,
    from_record,
    to_record,
)
from rlhf_core.run.stage_runner import NEVER_RETRIED


def _tree(root: type[RLHFError] = RLHFError) -> Iterator[type[RLHFError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


@pytest.mark.parametrize("kind", _tree(), ids=lambda kind: kind.__name__)
def test_a_class_survives_pickle_and_record_with_its_message(kind: type[RLHFError]) -> None:
    error = kind("policy rank 1: what happened")
    for copy in (pickle.loads(pickle.dumps(error)), from_record(to_record(error))):
        assert type(copy) is kind
        assert copy.message == error.message


@pytest.mark.parametrize(
    "bug",
    [
        TypeError("x"),
        KeyError("x"),
        AssertionError("x"),
        ZeroDivisionError("x"),
        UnicodeDecodeError("u", b"", 0, 1, "x"),
    ],
)
def test_a_bug_is_not_tried_again(bug: Exception) -> None:
    error = classified(bug, "engine 0, generate")
    assert isinstance(error, UnexpectedError) and isinstance(error, NEVER_RETRIED)
    assert error.message == f"engine 0, generate: {type(bug).__name__}: {bug}"


@pytest.mark.parametrize("fault", [OSError("x"), ConnectionError("x"), TimeoutError("x"), RuntimeError("x")])
def test_the_systems_failure_is_tried_again(fault: Exception) -> None:
    error = classified(fault)
    assert type(error) is InfrastructureError and not isinstance(error, NEVER_RETRIED)
    assert error.message == f"{type(fault).__name__}: x"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"
            " tried"
        ),
    ],
)
def test_memory_that_does_not_suffice_has_a_name(error: Exception) -> None:
    assert type(classified(error)) is OutOfMemory


def test_torch_has_the_expected_interface() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert type(classified(caught.value)) is OutOfMemory


def test_an_error_of_ours_stays_what_it_is() -> None:
    error = DataError("rows.jsonl:3: no prompt; add one")
    assert classified(error, "policy rank 1, load") is error
