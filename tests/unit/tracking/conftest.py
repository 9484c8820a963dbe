"""Registered models with three champions, for the tests of promotion."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.tracking.mlflow_client import Mlflow
from tests.support.champions import copy_model, enter


@pytest.fixture
def mlflow(database: Path) -> Mlflow:
    return Mlflow(f"sqlite:///{database}", "champions")


@pytest.fixture(scope="session")
def three_champions(database: Path) -> str:
    """A model with the champions 1, 2 and 3, one after the other, which no test changes."""
    mlflow = Mlflow(f"sqlite:///{database}", "champions")
    for digest in "abc":
        enter(mlflow, "three champions", digest)
    return "three champions"


@pytest.fixture
def model(database: Path, three_champions: str, request: pytest.FixtureRequest) -> str:
    """A model with the champions 1, 2 and 3, one after the other."""
    name = f"champions of {abs(hash(request.node.nodeid))}"
    copy_model(database, three_champions, name)
    return name
