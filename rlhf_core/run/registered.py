"""Registered policies by name: `NAME`, `NAME@champion`, `NAME@candidate`, `NAME@3`."""

from __future__ import annotations

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import InputError
from rlhf_core.system.home import Home
from rlhf_core.tracking.mlflow_client import Mlflow, sqlite_path
from rlhf_core.tracking.tracker import open_tracking


def open_registry(home: str) -> Mlflow:
    """Return the registry at MLFLOW_TRACKING_URI, else that in the folder `home`.

    Raises InputError if the folder has no database of MLflow.
    """
    config = PipelineConfig.model_validate({"run": {"home": str(Home.of(home).path)}})
    mlflow = open_tracking(config).mlflow
    database = sqlite_path(mlflow.uri)
    if database is not None and not database.is_file():
        raise InputError(
            f"--home: there is no database of MLflow at {database}; name the folder of the runs, or set"
            " MLFLOW_TRACKING_URI"
        )
    return mlflow
