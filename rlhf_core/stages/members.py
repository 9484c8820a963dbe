"""The members of an ensemble of reward models (`reward.ensemble`), trained one after the other.

Each member is trained like a single reward model, with a view of the stage's context. In this view, the
metrics of member n have the prefix `member_n/`, and its checkpoints have the steps after those of the earlier
members. A checkpoint also contains the output of the finished members, so a stage can continue from any
checkpoint. The first checkpoint of a member contains nothing else.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhf_core.config.training import EnsembleConfig
from rlhf_core.engines.checkpointing import new_checkpoint
from rlhf_core.engines.distributed import wait_for_rank_zero
from rlhf_core.models.scoring import combined, deviations, save_ensemble
from rlhf_core.stages.training import Metrics, accuracy_interval
from rlhf_core.storage.bundles import on_one_disk
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.types import AnsweredPrompt, Checkpoints, MetricLogger, PairExample, StageContext, prefixed

_FOLDER, _OUTPUT, _RESULTS = "members", "output", "results.json"


@dataclass(frozen=True)
class Member:
    """What is known of a member at the end of its training."""

    metrics: Metrics
    scores: list[float]
    """(2P,) normalised scores of the held-out pairs, the chosen response of each pair first."""


def train_members(
    ensemble: EnsembleConfig,
    train: Callable[[int, StageContext | None], Member],
    check: Callable[[Metrics], None],
    *,
    held_out: Sequence[PairExample],
    steps: int,
    start_seconds: float,
    out: Path,
    work: Path,
    context: StageContext | None,
) -> Metrics:
    """Train all members, from the last checkpoint if there is one. This is a collective operation.

    Args:
        ensemble: Number of members, and how they are combined.
        train: Trains the member with this number, writes its files to `out`, and returns it.
        check: Raises for metrics that end the stage. It gets those of all members so far, on rank 0.
        held_out: The held-out pairs.
        steps: Optimizer steps of a member, at most.
        start_seconds: Limit for a member to load.
        out: Output folder of the stage.
        work: A folder for checkpoints that are not committed yet.
        context: The stage's context on rank 0, otherwise None.

    Returns:
        The metrics of the first member, those of the others as `member_1/...`, and `ensemble/accuracy`
        with its interval and `ensemble/std` of the combined score. Empty on all ranks but 0.
    """
    first, position, finished = _resume(steps, out, context)
    if finished.members:
        # An earlier attempt may have been killed before this check, or ended by it.
        check(finished.metrics())
    for number in range(first, ensemble.members):
        if context is None:
            heartbeat("wait for rank 0", math.inf)  # it commits, and may evaluate the member before alone
        wait_for_rank_zero(f"reward model {number}")
        heartbeat(f"load reward model {number}", start_seconds)
        member = train(number, _member_context(context, number, ensemble, steps, finished, position))
        position = None  # only the member that was interrupted has a checkpoint
        if context is None:
            continue
        finished.members.append(member)
        if number + 1 < ensemble.members:
            # Committed as step 0 of the next member: only the finished members. Before the check, so that an
            # attempt with a lower limit need not train this member again.
            following = _member_context(context, number + 1, ensemble, steps, finished, None)
            heartbeat("commit", math.inf)  # each request of an upload has its own timeout
            with new_checkpoint(following, work, 0, 0):
                pass
        check(finished.metrics())
    if context is None:
        return {}
    save_ensemble(out / "model", ensemble)
    combined_metrics = _ensemble_metrics(ensemble, finished.members, held_out)
    context.metrics.log_metrics(prefixed("eval/", combined_metrics), steps)
    return finished.metrics() | combined_metrics


def _ensemble_metrics(
    ensemble: EnsembleConfig, members: Sequence[Member], held_out: Sequence[PairExample]
) -> Metrics:
    """Return accuracy (ties count half) and mean standard deviation over the members, on held-out pairs."""
    by_member = [member.scores for member in members]
    scores_P2 = np.array(combined(ensemble, by_member)).reshape(-1, 2)
    gap_P = scores_P2[:, 0] - scores_P2[:, 1]
    bounds = accuracy_interval(torch.from_numpy(gap_P), held_out)
    return {
        "ensemble/accuracy": float(np.heaviside(gap_P, 0.5).mean()),
        **prefixed("ensemble/", bounds),
        "ensemble/std": float(np.mean(deviations(by_member))),
    }


@dataclass
class _Finished:
    """The members whose training has ended. On ranks other than 0 it stays empty."""

    out: Path
    members: list[Member]

    def metrics(self) -> Metrics:
        metrics = dict(self.members[0].metrics)
        for number, member in enumerate(self.members[1:], start=1):
            metrics |= prefixed(_prefix(number), member.metrics)
        return metrics

    def bytes_in(self, folder: Path) -> int:
        """Return the bytes that `save` writes, approximately. Links need none."""
        if on_one_disk(self.out, folder):
            return 0
        return sum(path.stat().st_size for path in self.out.rglob("*") if path.is_file())

    def save(self, folder: Path) -> None:
        # The files of a finished member are never written to again.
        shutil.copytree(self.out, folder / _OUTPUT, copy_function=_link_or_copy)
        results = [{"metrics": member.metrics, "scores": member.scores} for member in self.members]
        (folder / _RESULTS).write_text(json.dumps(results))

    def load(self, folder: Path) -> None:
        shutil.copytree(folder / _OUTPUT, self.out, dirs_exist_ok=True, copy_function=_link_or_copy)
        self.members = [Member(**result) for result in json.loads((folder / _RESULTS).read_text())]


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # not on one disk, or the file system has no links
        shutil.copy2(source, target)


def _resume(
    steps: int, out: Path, context: StageContext | None
) -> tuple[int, tuple[int, Path] | None, _Finished]:
    """Return the member to continue with, its checkpoint if it has one, and the finished members."""
    finished = _Finished(out, [])
    found: list[Any] = [(0, None)]
    heartbeat("restore", math.inf)  # rank 0 downloads while the others wait
    if context is not None:
        latest = context.checkpoints.latest()
        if latest is not None:
            number, step = divmod(latest[0], steps + 1)
            if number:
                finished.load(latest[1] / _FOLDER)
            found = [(number, (step, latest[1]) if step else None)]
    # The broadcast has a time limit, and rank 0 may still download.
    wait_for_rank_zero("restored members")
    dist.broadcast_object_list(found, src=0)
    number, position = found[0]
    return number, position, finished


# -- the context of one member --


def _prefix(number: int) -> str:
    return f"member_{number}/" if number else ""


def _member_context(
    context: StageContext | None,
    number: int,
    ensemble: EnsembleConfig,
    steps: int,
    finished: _Finished,
    position: tuple[int, Path] | None,
) -> StageContext | None:
    """Return the stage's context as the member `number` sees it; None if `context` is None."""
    if context is None:
        return None
    report = context.progress

    def progress(task: str, done: int, total: int, unit: str, **metrics: float) -> None:
        report(task, number * total + done, ensemble.members * total, unit, **metrics)

    return replace(
        context,
        checkpoints=_MemberCheckpoints(context.checkpoints, number * (steps + 1), finished, position),
        metrics=_MemberMetrics(context.metrics, _prefix(number)),
        progress=progress,
    )


@dataclass(frozen=True)
class _MemberCheckpoints(Checkpoints):
    """The checkpoints of the stage, as one member sees them."""

    inner: Checkpoints
    offset: int
    """Step of the stage at which the member begins."""
    finished: _Finished
    position: tuple[int, Path] | None
    """Step and folder that the member continues from."""

    def latest(self) -> tuple[int, Path] | None:
        return self.position

    def prepare(
        self, step: int, folder: Path, size: int, unsharded: int | None = None, *, own: int = 0
    ) -> None:
        """Prepare a checkpoint.

        Args:
            step, folder, size, unsharded, own: See `Checkpoints.prepare`.
        """
        finished = self.finished.bytes_in(folder)
        if unsharded is not None:
            unsharded += finished
        self.inner.prepare(self.offset + step, folder, size + finished, unsharded, own=own)

    def save(self, step: int, folder: Path, score: float | None = None) -> None:
        if self.finished.members:
            self.finished.save(folder / _FOLDER)
        # Without the scores. The best checkpoint would be kept, also one of a finished member, and the scores
        # of two members do not say which checkpoint is better.
        self.inner.save(self.offset + step, folder)

    def best(self) -> str | None:
        return self.inner.best()


@dataclass(frozen=True)
class _MemberMetrics(MetricLogger):
    """The metrics of the stage, with a prefix for those of one member."""

    inner: MetricLogger
    prefix: str

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.inner.log_metrics(prefixed(self.prefix, metrics), step)

    def flush(self) -> None:
        self.inner.flush()

    def log_table(self, name: str, rows: list[dict[str, Any]]) -> None:
        self.inner.log_table(f"{self.prefix}{name}", rows)

    def log_figure(self, name: str, figure: Any) -> None:
        self.inner.log_figure(f"{self.prefix}{name}", figure)

    def log_answers(self, rows: list[AnsweredPrompt]) -> None:
        self.inner.log_answers(rows)

    def log_file(self, path: Path, folder: str = "") -> None:
        self.inner.log_file(path, f"{self.prefix}{folder}".rstrip("/"))
