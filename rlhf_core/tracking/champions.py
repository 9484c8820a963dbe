"""The champions of a registered model: their history, promotion by a person, and rollback.

MLflow has no transactions. Each move of the alias `champion` is therefore written in this order:

    1. a tag of the registered model with the whole move, state `started`
    2. for a rollback: the tag `rlhf.revoked` of the version that is no longer champion
    3. the alias
    4. the tag of step 1 again, state `done`

After a kill between two of them, `settle` finishes the move. Every command and every registration begins with
it. Each move has a tag of its own, so that two writers do not overwrite each other's history.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rlhf_core.config.redact import has_credentials
from rlhf_core.errors import InfrastructureError, InputError, RLHFError
from rlhf_core.system.failpoints import failpoint
from rlhf_core.tracking.mlflow_client import Mlflow, ModelVersion, short_reason

CHAMPION = "champion"
NONE = "none"
"""Target of a rollback after which there is no champion."""
REVOKED = "rlhf.revoked"
"""Tag of a version that was rolled back, with the reason. It never becomes champion again."""

MAX_REASON = 1000
"""Largest number of characters of a reason."""
_MOVE = "rlhf.champion."
"""Prefix of the tags of the registered model that contain its moves. Microseconds since 1970 follow."""

Action = Literal["crowned", "promoted", "rolled_back"]


@dataclass(frozen=True)
class Move:
    """One change of the champion."""

    time: float
    """Seconds since 1970."""
    action: Action
    """`crowned` by the gate, `promoted` by a person, or `rolled_back`."""
    version: str | None
    """The new champion; None if there is none after it."""
    previous: str | None
    """The champion before; None for the first one."""
    reason: str
    evidence: Mapping[str, Any] | None = None
    """The match that decided; None without one."""
    state: Literal["started", "done", "overtaken"] = "started"
    """`overtaken`: someone else moved the alias before this move was finished."""

    @property
    def key(self) -> str:
        """Name of its tag. The names sort by time."""
        return f"{_MOVE}{round(self.time * 1e6):020d}"


@contextmanager
def registry_errors(mlflow: Mlflow, action: str) -> Iterator[None]:
    """Convert any error of MLflow, which raises those of four libraries, to an InfrastructureError."""
    try:
        yield
    except RLHFError:
        raise
    except Exception as error:
        address = "(address hidden)" if has_credentials(mlflow.uri) else mlflow.uri
        raise InfrastructureError(f"MLflow at {address} did not {action}: {short_reason(error)}") from error


def history(mlflow: Mlflow, model: str) -> list[Move]:
    """Return all moves of `model`, the oldest first. Tags that cannot be read are ignored."""
    moves = []
    for name, value in sorted((mlflow.model_tags(model) or {}).items()):
        if name.startswith(_MOVE):
            try:
                moves.append(Move(**json.loads(value)))
            except (ValueError, TypeError):
                continue  # edited by hand
    return moves


def move_champion(mlflow: Mlflow, model: str, move: Move) -> Move:
    """Make `move.version` champion, or nobody if it is None, in the order of the module's docstring, and
    return the finished move.
    """
    earlier = history(mlflow, model)
    if earlier and move.time <= earlier[-1].time:
        # The clock of the host that made the last move is ahead. The history is ordered by time.
        move = replace(move, time=earlier[-1].time + 1e-5)
    _record(mlflow, model, move)
    failpoint("champion.recorded")
    _finish(mlflow, model, move)
    return replace(move, state="done")


def settle(mlflow: Mlflow, model: str) -> None:
    """Finish moves that were interrupted."""
    for move in history(mlflow, model):
        if move.state != "started":
            continue
        champion = mlflow.by_alias(model, CHAMPION)
        now = champion.version if champion else None
        if now in (move.previous, move.version):
            _finish(mlflow, model, move)
        else:
            _record(mlflow, model, replace(move, state="overtaken"))


def _finish(mlflow: Mlflow, model: str, move: Move) -> None:
    tags = {each.version: each.tags for each in mlflow.versions(model)}
    if move.version is not None and REVOKED in tags.get(move.version, {REVOKED: ""}):
        # It was deleted or rolled back in the meantime.
        _record(mlflow, model, replace(move, state="overtaken"))
        return
    if move.action == "rolled_back" and move.previous in tags:
        assert move.previous is not None
        mlflow.tag_version(model, move.previous, {REVOKED: move.reason})
        failpoint("champion.revoked")
    if move.version is None:
        mlflow.delete_alias(model, CHAMPION)
    else:
        mlflow.set_alias(model, CHAMPION, move.version)
    failpoint("champion.moved")
    _record(mlflow, model, replace(move, state="done"))
    failpoint("champion.done")


def _record(mlflow: Mlflow, model: str, move: Move) -> None:
    mlflow.tag_model(model, {move.key: json.dumps(asdict(move))})


def champions(mlflow: Mlflow, model: str) -> tuple[ModelVersion | None, list[Move]]:
    """Return the champion and all moves of `model`. Raises InputError if there is no such model."""
    with registry_errors(mlflow, f"list the champions of {model!r}"):
        _require_model(mlflow, model)
        return mlflow.by_alias(model, CHAMPION), history(mlflow, model)


def registered_models(mlflow: Mlflow) -> list[str]:
    """Return the names of registered models, at most 100."""
    with registry_errors(mlflow, "list its models"):
        return mlflow.model_names(100)


def promote(mlflow: Mlflow, model: str, version: str, reason: str) -> Move:
    """Make a version, given by its number or alias, champion by the decision of a person. Returns the move.

    Raises InputError if there is no such version, if it was revoked, or if there is no reason.
    """
    with registry_errors(mlflow, f"promote a version of {model!r}"):
        _begin(mlflow, model, reason)
        champion = mlflow.by_alias(model, CHAMPION)
        version = find_version(mlflow, model, version).version
        if champion is not None and champion.version == version:
            last = _last(mlflow, model)
            if last is not None and last.version == version:
                return last
            raise InputError(f"version {version} of {model} is the champion already")
        _require_usable(mlflow, model, version)
        move = Move(time.time(), "promoted", version, champion.version if champion else None, reason)
        return move_champion(mlflow, model, move)


def rollback(mlflow: Mlflow, model: str, reason: str, to: str | None = None) -> Move:
    """Revoke the champion, make an earlier version champion, and return the move.

    The same call again, after an interruption or not, returns the same move and changes nothing.

    Args:
        mlflow: The registry.
        model: Name of the registered model.
        reason: Why the champion is taken back.
        to: Number or alias of the version that becomes champion; `NONE` for no champion; None for the last
            one that was champion and is not revoked.

    Raises:
        InputError: There is no champion, no reason, or no such version to return to.
    """
    with registry_errors(mlflow, f"roll back {model!r}"):
        _begin(mlflow, model, reason)
        champion = mlflow.by_alias(model, CHAMPION)
        if to not in (None, NONE):
            to = find_version(mlflow, model, to).version
        last = _last(mlflow, model)
        if last is not None and _is_same_rollback(last, champion.version if champion else None, reason, to):
            return last
        if champion is None:
            raise InputError(f"{model} has no champion that could be rolled back; use `rlhf promote`")
        if to == champion.version:
            raise InputError(f"--to: version {to} of {model} is the champion; choose an earlier one")
        version = None
        if to != NONE:
            version = to or _earlier_champion(mlflow, model, champion.version)
            _require_usable(mlflow, model, version)
        move = Move(time.time(), "rolled_back", version, champion.version, reason)
        return move_champion(mlflow, model, move)


def find_version(mlflow: Mlflow, model: str, wanted: str = CHAMPION) -> ModelVersion:
    """Return a version by its number or alias. Raises InputError if there is none."""
    with registry_errors(mlflow, f"find {model}@{wanted}"):
        _require_model(mlflow, model)
        found = None if wanted.isdigit() else mlflow.by_alias(model, wanted)
        versions = mlflow.versions(model)
        for version in versions:
            if version.version == (found.version if found else wanted):
                return version
        raise InputError(
            f"{model} has no version {wanted}; its versions are"
            f" {', '.join(sorted((each.version for each in versions), key=int)) or 'none'}"
        )


def _is_same_rollback(last: Move, champion: str | None, reason: str, to: str | None) -> bool:
    """Return whether the last move is the rollback that is asked for."""
    same = last.action == "rolled_back" and last.version == champion
    return same and last.reason == reason and to in (None, last.version or NONE)


def _begin(mlflow: Mlflow, model: str, reason: str) -> None:
    if not reason.strip():
        raise InputError("--reason must say why; it is kept in the history of champions")
    if len(reason) > MAX_REASON:
        raise InputError(
            f"--reason must have at most {MAX_REASON} characters, which every database of MLflow can keep;"
            f" got {len(reason)}; shorten it"
        )
    _require_model(mlflow, model)
    settle(mlflow, model)


def _require_model(mlflow: Mlflow, model: str) -> None:
    if mlflow.model_tags(model) is None:
        names = mlflow.model_names(10)
        raise InputError(
            f"MLflow has no registered model {model!r}; it has {', '.join(names) or 'none'}; check the name,"
            " --home and MLFLOW_TRACKING_URI"
        )


def _require_usable(mlflow: Mlflow, model: str, version: str) -> None:
    tags = find_version(mlflow, model, version).tags
    if REVOKED in tags:
        raise InputError(
            f"version {version} of {model} was revoked: {tags[REVOKED]}; choose another one, or remove its"
            f" tag {REVOKED} in MLflow if that was an error"
        )


def _last(mlflow: Mlflow, model: str) -> Move | None:
    done = [move for move in history(mlflow, model) if move.state == "done"]
    return done[-1] if done else None


def _earlier_champion(mlflow: Mlflow, model: str, champion: str) -> str:
    """Return the last version that was champion before, and that exists and is not revoked."""
    usable = {each.version for each in mlflow.versions(model) if REVOKED not in each.tags} - {champion}
    for move in reversed(history(mlflow, model)):
        for version in (move.version, move.previous):
            if move.state == "done" and version is not None and version in usable:
                return version
    raise InputError(
        f"the history of {model} has no earlier champion that is not revoked; name a version with --to, or"
        f" use --to {NONE}"
    )
