from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of MLflow. Its migrations take seconds, so that all tests of the registry share it."""
    return tmp_path_factory.mktemp("mlflow") / "mlflow.db"
