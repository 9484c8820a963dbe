"""A registered model with three champions, for the tests of promotion."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.tracking.mlflow_client import Mlflow
from tests.support.champions import enter


@pytest.fixture
def mlflow(database: Path) -> Mlflow:
    return Mlflow(f"sqlite:///{database}", "champions")


@pytest.fixture
def model(mlflow: Mlflow, request: pytest.FixtureRequest) -> str:
    """A model with the champions 1, 2 and 3, one after the other."""
    name = f"champions of {abs(hash(request.node.nodeid))}"
    for digest in "abc":
        enter(mlflow, name, digest)
    return name
