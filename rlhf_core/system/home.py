"""Paths below `run.home`, in one place.

home/
├── runs/<run>/              run.json and progress.json (for `rlhf status`), summary.json; tune/ during
│                            `rlhf tune`, replay/ during `rlhf replay`
├── logs/                    rlhf.log; <run>/<stage>-01.log
├── work/<stage>-<key>/      scratch files of the attempts; <stage>-<key>.lock, see files.held
├── stacks/                  Python stacks of processes that stalled
├── references/              versions that references of unfinished runs stand for
├── digests.json             sha256 of the files of base models, by path, inode, size and time of change
├── judge/                   replies of language models that judge or grade, by the digest of what was asked
├── cache/                   local copies of remote artifacts; parts/ has encoded parts of data
├── outbox/                  artifacts and checkpoints that wait for a bucket
├── spool/                   metrics that MLflow has not received
├── store/                   artifacts and checkpoints, if no other store is configured
├── mlflow.db, mlartifacts/  the tracker, if no other is configured
├── prefect/                 profiles.toml for Prefect's clients of `rlhf up`
└── servers/                 state, password, databases and logs of `rlhf up`
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.errors import InputError
from rlhf_core.system.files import no_folder, unwritable


def home_problem(folder: Path, *, writable: bool = True) -> str | None:
    """Return the reason for which `folder` cannot be used as `run.home`, or None.

    The folder contains databases that MLflow and Prefect address by URL. The characters `#`, `%` and `?`
    would change such a URL, so that it names a different file. Without `writable`, the folder is only read.
    """
    problem = unwritable(folder) if writable else no_folder(folder)
    if problem is not None:
        return problem
    signs = [sign for sign in "#%?" if sign in str(folder.absolute())]
    if signs:
        return (
            f"its absolute path has {' and '.join(signs)}, which have a special meaning in URLs of databases"
        )
    return None


HOME_OF_RUNS = "RLHF_HOME"
"""The variable with the home of all commands that get neither `--home` nor an override of `run.home`."""


def default_home() -> str:
    """Return the folder of commands without a configuration: RLHF_HOME, else `.rlhf`."""
    return os.environ.get(HOME_OF_RUNS) or ".rlhf"


_MAY_BE_LINKS = ("work", "cache", "outbox")
"""Folders in `run.home` that may be links to another disk."""


def is_below(path: Path, home: Path) -> bool:
    """Return whether a path, its links followed, is below the folder `home`, or below one of its folders
    `_MAY_BE_LINKS` and named by it.

    Other files on that disk are not below `home`: they may be those of the user.
    """
    found, home = path.resolve(), home.resolve()
    if home in found.parents:
        return True
    # Not resolved: only this path has the name of the link.
    own = [each for each in path.absolute().parents if each.name in _MAY_BE_LINKS]
    return any(each.parent.resolve() == home and each.resolve() in found.parents for each in own)


def output_folder(work: Path) -> Path:
    """Return the folder for the output of an attempt. `work` is the folder of the attempt."""
    return work / "out"


def make_attempt_folders(work: Path) -> tuple[Path, Path]:
    """Create the folders for the output and for the scratch files of an attempt, and return them.

    They have the same path on all hosts. `work` is the folder of the attempt.
    """
    output, scratch = output_folder(work), work / "scratch"
    for folder in (output, scratch):
        # Not `exist_ok`: no two attempts have one folder, and what another one left in the output would be
        # published.
        folder.mkdir(parents=True)
    return output, scratch


def mlflow_artifacts_of(database: Path) -> Path:
    """Return the folder of the artifacts of a tracker with this SQLite file."""
    return database.with_name("mlartifacts")


class Home:
    """The folder `run.home`. Nothing is created by asking for a path.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

        self.runs = path / "runs"
        self.logs = path / "logs"
        self.all_stacks = path / "stacks"
        """Python stacks of all attempts."""
        self.works = path / "work"
        """Scratch files of all stage keys."""
        self.judge = path / "judge"
        """Replies of language models."""
        self.store = path / "store"
        """The store, if no other is configured."""
        self.cache = path / "cache"
        self.parts = self.cache / "parts"
        """Encoded parts of data (`rlhf_core.data.parts`), for later attempts and runs."""
        self.outbox = path / "outbox"
        self.digests = path / "digests.json"
        self.spool = path / "spool"

        self.mlflow_database = path / "mlflow.db"
        self.mlflow_artifacts = mlflow_artifacts_of(self.mlflow_database)

        self.prefect_profiles = path / "prefect" / "profiles.toml"
        """Settings of Prefect clients for the server of `rlhf up`."""

        self.servers = path / "servers"
        """Everything that `rlhf up` starts."""
        self.servers_ports = self.servers / "ports.json"
        """The ports of the servers of `rlhf up` at the last start."""
        self.servers_state = self.servers / "state.json"
        self.servers_login = self.servers / "login"
        self.supervisor_log = self.servers / "supervisor.log"

    @classmethod
    def of(cls, folder: str | Path) -> Home:
        """Return the home in `folder`, as an absolute path without links."""
        return cls(Path(folder).resolve())

    def make(self) -> Home:
        """Create the folder if it does not exist, and return this home.

        A new folder is only accessible to this user, because logs and databases contain training data.
        Raises InputError if it cannot be created.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"run.home: the folder {self.path} cannot be made: {error.strerror}; choose another"
            ) from error
        return self

    def run(self, name: str) -> Path:
        """Return the folder of the run `name`."""
        return self.runs / name

    def progress(self, name: str) -> Path:
        """Return the file with the progress of the stage that the run `name` makes."""
        return self.run(name) / "progress.json"

    def run_states(self) -> Iterator[Path]:
        """Yield the `run.json` of every run."""
        return self.runs.glob("*/run.json")

    def summaries(self) -> Iterator[Path]:
        """Yield the `summary.json` of every run that finished its stages."""
        return self.runs.glob("*/summary.json")

    def tune(self, name: str) -> Path:
        """Return the temporary folder of the trials of `rlhf tune` for the run `name`."""
        return self.run(name) / "tune"

    def replay(self, name: str) -> Path:
        """Return the temporary folder of `rlhf replay` for the run `name`."""
        return self.run(name) / "replay"

    def run_logs(self, name: str) -> Path:
        """Return the folder with the logs of the stages of the run `name`."""
        return self.logs / name

    def kept_versions(self, digest: str) -> Path:
        """Return the file with the versions that the references of an unfinished run stand for."""
        return self.path / "references" / f"{digest}.json"

    def work(self, stage: str, key: str) -> Path:
        """Return the folder for scratch files of the attempts at a stage key."""
        return self.works / f"{stage}-{key}"

    def stacks(self, stage: str, key: str, attempt: int) -> Path:
        """Return the folder for the Python stacks of the processes of an attempt."""
        return self.all_stacks / f"{stage}-{key}-{attempt:06d}"
