"""A stage of a few lines for the child processes of a test, in place of every real stage."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PRELUDE = """
import os, signal, subprocess, sys, time, types
from pathlib import Path
from rlhf_core.run import reaper
from rlhf_core.types import ArtifactRef

reaper.LEFTOVER_SECONDS = 1.0
REF = ArtifactRef("data", "0" * 16, "d" * 64, "/store/x", {"loss": 0.5}, "run1", {"weights_sha256": "w"})

def run_attempt(spec, events, stop):
    folder = Path(os.environ["TOY_FOLDER"])
"""
_INSTALL = """
module = types.ModuleType('rlhf_core.run.attempt')
module.run_attempt = run_attempt
module.import_for = import_for
sys.modules[module.__name__] = module
"""


_PREPARE = """
def import_for(stage, config):
    folder = Path(os.environ["TOY_FOLDER"])
"""


def toy_environment(folder: Path, body: str, prepare: str = "pass") -> dict[str, str]:
    """Return the environment of processes that run a stage of a few lines.

    Args:
        folder: Folder for the code of the stage, in the variable TOY_FOLDER of the processes.
        body: Body of `run_attempt(spec, events, stop)`.
        prepare: Body of `import_for(stage, config)`.
    """
    text = _PRELUDE + _indented(body) + _PREPARE + _indented(prepare) + _INSTALL
    (folder / "sitecustomize.py").write_text(text)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "TOY_FOLDER": str(folder),
    }


def _indented(body: str) -> str:
    return "".join(f"    {line}\n" for line in body.splitlines())
