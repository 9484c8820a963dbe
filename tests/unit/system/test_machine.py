"""Locks what `Machine` says about cores and memory.

- the limits of a container and of a job count, for control groups of both versions;
- a group without a limit, or no group, leaves the numbers of the host.
"""

import os
from pathlib import Path

import pytest

from rlhf_core.system.machine import Machine

GIB = 2**30


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def machine_with(root: Path, groups: str, **files: str) -> Machine:
    """Return a machine whose process is in `groups`; `files` are below /sys/fs/cgroup, `__` is a slash."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        folder, _, file = name.rpartition("__")
        path = root / "sys/fs/cgroup" / folder.replace("__", "/") / file.replace("_", ".", 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root)


@pytest.mark.usefixtures("many_cores")
def test_the_limits_of_a_container_count(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, "0::/\n", cpu_max="400000 100000\n", memory_max=f"{GIB}\n")
    assert (machine.cores(), machine.memory()) == (4, GIB)


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize(("quota", "cores"), [("250000", 2), ("50000", 1)])
def test_a_part_of_a_core_is_none_unless_it_is_all(tmp_path: Path, quota: str, cores: int) -> None:
    assert machine_with(tmp_path, "0::/\n", cpu_max=f"{quota} 100000\n").cores() == cores


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("path", ["/", "/kubepods/burstable/pod7/abc"])
def test_the_limits_of_version_1_count(tmp_path: Path, path: str) -> None:
    machine = machine_with(
        tmp_path,
        f"4:memory:{path}\n2:cpu,cpuacct:{path}\n1:name=systemd:{path}\n0::/\n",
        cpu__cpu_cfs_quota_us="400000\n",
        cpu__cpu_cfs_period_us="100000\n",
        memory__memory_limit_in_bytes=f"{GIB}\n",
    )
    assert (machine.cores(), machine.memory()) == (4, GIB)


@pytest.mark.usefixtures("many_cores")
def test_the_smallest_limit_of_the_groups_around_a_job_counts(tmp_path: Path) -> None:
    machine = machine_with(
        tmp_path,
        "0::/slurm/job/step\n",
        slurm__job__step__memory_max="max\n",
        slurm__job__memory_max=f"{GIB}\n",
        slurm__memory_max=f"{2 * GIB}\n",
        slurm__job__cpu_max="800000 100000\n",
        slurm__job__step__cpu_max="max 100000\n",
    )
    assert (machine.cores(), machine.memory()) == (8, GIB)


@pytest.mark.usefixtures("many_cores")
def test_without_a_limit_the_numbers_are_those_of_the_host(tmp_path: Path) -> None:
    host = Machine(tmp_path / "nowhere")
    unlimited = machine_with(
        tmp_path,
        "4:memory:/\n2:cpu:/\n0::/\n",
        cpu_max="max 100000\n",
        cpu__cpu_cfs_quota_us="-1\n",
        cpu__cpu_cfs_period_us="100000\n",
        memory__memory_limit_in_bytes="9223372036854771712\n",
    )
    assert unlimited.cores() == host.cores() == 64
    assert unlimited.memory() == host.memory() > 0
