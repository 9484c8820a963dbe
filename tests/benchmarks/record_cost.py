"""What the record costs: `python -m tests.benchmarks.record_cost [CONFIG] [SETTING ...]`.

The stages before PPO run once, or are in a home that `--before` names. PPO runs in turns without a record and
at each level. The table has the bytes of the record for each token of a response, the share of the steps'
time that the record took, and whether files and metrics of the artifact are those without a record.
"""

from __future__ import annotations

import argparse
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlhf_core.config.load import load_config
from rlhf_core.record.reader import RECORD, read_rollouts
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.store import Store
from rlhf_core.types import ArtifactRef
from tests.chaos.harness import CONFIG, MEASURED_IN_SECONDS

LEVELS = ("none", "rewards", "logprobs", "all")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, nargs="?", default=CONFIG)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--before", type=Path, help="home of a run that has the stages before PPO")
    parser.add_argument("overrides", nargs="*", help="settings, such as ppo.steps=8")
    arguments = parser.parse_args(argv)
    table = Table("record.level", "bytes a token", "share of the steps' time", "as without a record")
    with tempfile.TemporaryDirectory() as temporary:
        before = arguments.before or Path(temporary) / "before"
        if arguments.before is None:
            run(arguments.config, before, "reward", arguments.overrides)
        expected: dict[str, object] = {}
        for turn in range(arguments.turns):
            for level in LEVELS:
                home = Path(temporary) / f"{level}-{turn}"
                shutil.copytree(before, home)
                run(arguments.config, home, "ppo", [*arguments.overrides, f"record.level={level}"])
                artifacts, ref = artifact(arguments.config, home)
                made = contents(artifacts, ref)
                expected = expected or made
                size = bytes_of_a_token(artifacts.fetch(ref, record=True))
                table.add_row(level, f"{size:.1f}", f"{share(home):.2%}", str(made == expected))
                shutil.rmtree(home)
    Console().print(table)


def run(config: Path, home: Path, until: str, overrides: Sequence[str]) -> None:
    """Run a configuration up to a stage."""
    command = [sys.executable, "-m", "rlhf_cli.main", "run", str(config), f"run.home={home}", *overrides]
    subprocess.run([*command, "--until", until], check=True, stdout=subprocess.DEVNULL)


def artifact(config: Path, home: Path) -> tuple[ArtifactStore, ArtifactRef]:
    """Return the artifact of PPO, and its store."""
    store = Store(load_config(config, [f"run.home={home}"]).store_url)
    [key] = (path.name for path in (home / "store" / "artifacts" / "ppo").iterdir())
    artifacts = ArtifactStore(store, home / "cache")
    found = artifacts.find("ppo", key)
    assert found is not None
    return artifacts, found


def contents(artifacts: ArtifactStore, ref: ArtifactRef) -> dict[str, object]:
    """Return the digest of all files but the record, and the metrics that are not measured in seconds."""
    metrics = {
        name: value
        for name, value in ref.metrics.items()
        if not any(part in name for part in MEASURED_IN_SECONDS)
    }
    return {"digest": ref.digest, "metrics": metrics}


def bytes_of_a_token(folder: Path) -> float:
    """Return the bytes of the record for each token of a response; 0 without a record."""
    if not (folder / RECORD).is_dir():
        return 0.0
    responses = read_rollouts(folder, ["response_ids"])["response_ids"].to_pylist()
    return sum(part.stat().st_size for part in (folder / RECORD).iterdir()) / sum(map(len, responses))


def share(home: Path) -> float:
    """Return the share of the record in the time of all steps of PPO."""
    with sqlite3.connect(f"file:{home}/mlflow.db?mode=ro", uri=True) as database:
        query = "select coalesce(sum(value), 0) from metrics where key = ?"
        [record], [step] = (
            database.execute(query, [f"timing/{name}"]).fetchone() for name in ("record", "step")
        )
    return float(record / step)


if __name__ == "__main__":
    main()
