"""Logs of processes.

- logs are rotated while their writers keep them open
"""

from __future__ import annotations

from pathlib import Path

from rlhf_core.logs import rotate_logs


def test_log_is_rotated_while_its_writer_continues(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    with log.open("ab", buffering=0) as writer:
        for text in (b"first " * 20, b"second " * 20):
            writer.write(text)
            rotate_logs(tmp_path, max_bytes=100)
            assert (log.read_bytes(), (tmp_path / "worker.log.1").read_bytes()) == (b"", text)
        writer.write(b"third")
        rotate_logs(tmp_path, max_bytes=100)
    assert log.read_bytes() == b"third"


def test_unreadable_log_does_not_prevent_rotation_of_others(tmp_path: Path) -> None:
    for name in ("a.log", "z.log"):
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    (tmp_path / "mlflow.log").write_bytes(b"text " * 40)
    rotate_logs(tmp_path, max_bytes=100)
    assert (tmp_path / "mlflow.log").read_bytes() == b""
    assert (tmp_path / "mlflow.log.1").read_bytes() == b"text " * 40


def test_logs_of_runs_are_rotated_too(tmp_path: Path) -> None:
    log = tmp_path / "demo" / "sft-01.log"
    log.parent.mkdir()
    log.write_bytes(b"text " * 40)
    rotate_logs(tmp_path, max_bytes=100)
    assert log.read_bytes() == b"" and (log.parent / "sft-01.log.1").exists()
