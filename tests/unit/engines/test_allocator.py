"""`keep_freed_memory` and `return_freed_memory`, in a process of their own, by the page faults of a loop that
allocates and frees tensors.
"""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

LOOP = """
import resource, sys, torch
from rlhf_core.engines import distributed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        [torch.empty(16 << 20, dtype=torch.uint8).fill_(1) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

getattr(distributed, sys.argv[1])()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are those of glibc")
@pytest.mark.parametrize(
    ("function", "reuses"), [("keep_freed_memory", True), ("return_freed_memory", False)]
)
def test_freed_memory_is_reused_only_with_the_settings(function: str, reuses: bool) -> None:
    output = subprocess.check_output([sys.executable, "-c", LOOP, function], text=True)
    # 20 times 64 MiB are 327,680 pages of 4 KiB.
    assert (int(output) < 10_000) == reuses, output
