"""The check of calls against the CUDA wheels (`tests.gpu.against_wheels`).

- a call with an argument that is not accepted, is missing or is one too many is refused; one that fits is not
- a method that does not exist is refused
- every call of a method of vLLM's and DeepSpeed's engines fits the packages of this environment
"""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests.gpu.against_wheels import OBJECTS, check_methods, refused


def function(a: int, *, level: int, mode: str = "abort") -> None:
    """Be called."""


class Engine:
    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Be called."""


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("f(1, level=2)", None),
        ("f(1, level=2, mode='keep')", None),
        ("f(*some, **more)", None),
        ("f(level=2, **more)", None),
        ("f(1)", "missing a required argument: 'level'"),
        ("f(1, 2, level=3)", "too many positional arguments"),
        ("f(1, level=2, wait=3)", "got an unexpected keyword argument 'wait'"),
        ("f(1, wait=3, **more)", "got an unexpected keyword argument 'wait'"),
    ],
)
def test_arguments_must_fit(call: str, problem: str | None) -> None:
    assert refused(function, parsed(call)) == problem


def test_methods_must_exist_and_fit() -> None:
    kind: Any = Engine
    assert refused(kind.sleep, parsed("f(level=0, mode='keep')"), of_object=True) is None
    assert refused(kind.sleep, parsed("f(0, 'keep')"), of_object=True) is None
    problem = refused(kind.sleep, parsed("f(0, 'keep', 1)"), of_object=True)
    assert problem == "too many positional arguments"
    assert refused(getattr(kind, "rest", None), parsed("f()"), of_object=True) == "does not exist"


def test_methods_of_engines_fit_the_packages_of_this_environment() -> None:
    assert list(check_methods()) == []
    assert len(OBJECTS) == 7


def parsed(call: str) -> ast.Call:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    return node
