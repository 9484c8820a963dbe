"""End-to-end RLHF: raw data to a registered, evaluated policy.

    from rlhf_core import load_config, run_pipeline

    summary = run_pipeline(load_config("deployments/configs/demo.yaml"))

See docs/python-api.md; the errors are in `rlhf_core.errors`. Everything but `RLHFError` is imported at its
first use, so that `import rlhf_core` and the start of each child process stay fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import RLHFError

if TYPE_CHECKING:
    from rlhf_core.config import PipelineConfig
    from rlhf_core.config.load import load_config
    from rlhf_core.ops.api import run_pipeline, run_stage
    from rlhf_core.ops.plan.plan import Plan, make_plan
    from rlhf_core.ops.rounds import run_rounds
    from rlhf_core.types import ArtifactRef

    __version__: str

__all__ = [
    "ArtifactRef",
    "PipelineConfig",
    "Plan",
    "RLHFError",
    "__version__",
    "load_config",
    "make_plan",
    "run_pipeline",
    "run_rounds",
    "run_stage",
]

_MODULES = {
    "ArtifactRef": "rlhf_core.types",
    "PipelineConfig": "rlhf_core.config",
    "Plan": "rlhf_core.ops.plan.plan",
    "load_config": "rlhf_core.config.load",
    "make_plan": "rlhf_core.ops.plan.plan",
    "run_pipeline": "rlhf_core.ops.api",
    "run_rounds": "rlhf_core.ops.rounds",
    "run_stage": "rlhf_core.ops.api",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # a sixth of the import of the command line

        return metadata.version("rlhf-pipeline")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    # The default has only what was imported so far: names would be missing in the completion of a console.
    return sorted({*globals(), *__all__})
