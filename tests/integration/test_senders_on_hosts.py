"""Weight sync from two policy ranks on hosts of their own to two engines on a third, with limited links.

- two senders take at most 1 / 1.8 of the time of one, and the engines acknowledge the same checksums
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.benchmarks.weight_senders import Job, measure
from tests.support.hosts import missing_right

_MISSING = missing_right()
pytestmark = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))

# So slow that the link is the limit on a busy machine too: 12 MiB take 2 s.
RATE, MIB = "50mbit", "12"


def test_two_senders_are_nearly_twice_as_fast_as_one() -> None:
    # Not the folder of pytest, which is in /tmp and invisible on the hosts.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as shared:
        job = Job("plain", MIB, [("apart", 1), ("apart", 2)], syncs=3, bucket_mib=1)
        one, two = measure(job, RATE, Path(shared))
    assert one.seconds / two.seconds >= 1.8
    assert one.checksums == two.checksums
    assert len(one.checksums) == 8
