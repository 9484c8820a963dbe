"""Processes that have imported torch, transformers and DeepSpeed when they start.

They are forks of a server (the start method `forkserver` of `multiprocessing`) that imports these libraries
once for all tests of a process of pytest. In a new interpreter the import takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.system.environment import STRICT_MKL

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
"""Environment of ranks of small models. More threads are slower."""
if STRICT_MKL:
    # MKL's AVX-512 code gives other bits at other addresses, with two ranks also in strict mode: decision 5.
    ENVIRONMENT["MKL_CBWR"] = "AVX2,STRICT"
_IMPORTED = (
    "deepspeed",
    "peft",
    "transformers.models.llama.modeling_llama",
    "tests.integration.deepspeed_step",
)


def spawn(work: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Call `work(number, *args)` in `nprocs` processes and wait for their end.

    As `torch.multiprocessing.spawn`, but variables of the environment that a test sets do not reach them.
    """
    from torch.multiprocessing import start_processes  # type: ignore[attr-defined]

    _start_server()
    start_processes(work, args, nprocs, start_method="forkserver")


@cache
def _start_server() -> None:
    multiprocessing.set_forkserver_preload(list(_IMPORTED))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        forkserver.ensure_running()
