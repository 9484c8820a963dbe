"""The champions of a registered model: promotion by a person, and rollback.

The log (`champion_log`) decides who is champion. A change of the champion is made in this order:

    1. its entry in the log, which counts unless another change was made in the meantime
    2. for a rollback: the tag `rlhf.revoked` of the version that is no longer champion
    3. the alias
    4. a mark in the log that both are written

After a kill between two of them, `settle` writes what is missing. Every command and every registration begins
with it. An alias that a person moves in MLflow after the mark is not moved back.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from rlhf_core.config.redact import has_credentials
from rlhf_core.errors import InfrastructureError, InputError, RLHFError
from rlhf_core.system.failpoints import failpoint
from rlhf_core.tracking.champion_log import (
    ENTRY,
    Log,
    Move,
    append,
    counted,
    log_of,
    mark_written,
    read_log,
    without_logs,
)
from rlhf_core.tracking.mlflow_client import Mlflow, ModelVersion, describe_failure

log = logging.getLogger(__name__)

CHAMPION = "champion"
NONE = "none"
"""Target of a rollback after which there is no champion."""
REVOKED = "rlhf.revoked"
"""Tag of a version that was rolled back, with the reason. Its policy never becomes champion again, see
`revocation`.
"""
POLICY = "rlhf.policy_digest"
"""Tag that identifies a version: digest of the artifact of its policy. Registering that again finds it."""
WEIGHTS = "rlhf.weights_sha256"
"""Tag with the digest of its weights."""
BASE = "rlhf.base"
"""Tag of a version, and of the MLflow run that made it, with the reference of the base model if that was
made by an earlier run: `registry://NAME/NUMBER` or `artifact://STAGE/KEY/FOLDER`.
"""
REFERENCE = "rlhf.reference."
"""Prefix of tags of both with what each reference of the configuration stood for."""

MAX_REASON = 1000
"""Largest number of characters of a reason."""
# Nine digits fit into the 32-bit column of MLflow's databases. PostgreSQL answers a larger one with an error.
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
"""Number of a version."""


class Moved(NamedTuple):
    """Result of a command of a person."""

    move: Move
    changed: bool
    """False if the same command was given before, so that this one changed nothing. True if it finished a
    move that was interrupted.
    """


@dataclass(frozen=True)
class Revocation:
    """A version that was rolled back."""

    version: str
    reason: str
    digests: frozenset[str]
    """Digests of its policy and weights."""
    entry: int | None = None
    """Number of the entry of the rollback. None if the version exists, which then has the tag `REVOKED`."""


def revocation(
    version: ModelVersion, versions: Collection[ModelVersion], moves: Iterable[Move]
) -> Revocation | None:
    """Return why a version must not become champion, or None if it may.

    It must not if it was rolled back, or another version with the same weights or the same policy was. A
    version that was rolled back and then deleted counts as well.

    Args:
        version: The version.
        versions: All versions of the model, or those that `_versions_of_rollbacks` returns.
        moves: The history of its champions.
    """
    found = []
    existing = set()
    for each in versions:
        existing.add(each.version)
        if REVOKED in each.tags:
            found.append(Revocation(each.version, each.tags[REVOKED], _digests(each.tags)))
    # Only of deleted versions. An existing one has the tag REVOKED, which a person may have removed.
    for move in moves:
        if move.digests and move.previous not in existing:
            digests = _digests(move.digests)
            found.append(Revocation(str(move.previous), move.reason, digests, move.number))
    for candidate in found:
        if candidate.version == version.version or candidate.digests & _digests(version.tags):
            return candidate
    return None


def find_revocation(mlflow: Mlflow, model: str, version: ModelVersion) -> Revocation | None:
    """Return the same as `revocation`, without reading all versions."""
    moves = read_log(mlflow, model).moves
    return revocation(version, _versions_of_rollbacks(mlflow, model, moves), moves)


def _versions_of_rollbacks(mlflow: Mlflow, model: str, moves: Iterable[Move]) -> list[ModelVersion]:
    """Return the versions that `revocation` needs: those with the tag `REVOKED`, and others that rollbacks
    name and that exist.
    """
    found = {each.version: each for each in mlflow.versions(model, REVOKED)}
    for move in moves:
        number = move.previous
        if not move.digests or number is None or number in found:
            continue
        version = mlflow.version(model, number)
        if version is not None:
            found[number] = version
    return list(found.values())


def _digests(tags: Mapping[str, str]) -> frozenset[str]:
    return frozenset(tags[name] for name in (POLICY, WEIGHTS) if name in tags)


@contextmanager
def registry_errors(mlflow: Mlflow, action: str) -> Iterator[None]:
    """Convert any error of MLflow, which raises those of four libraries, to an InfrastructureError."""
    try:
        yield
    except RLHFError:
        raise
    except Exception as error:
        address = mlflow.uri
        if has_credentials(address):
            # The address of a tracker may have a password, and errors are shown and stored.
            address = "(address hidden)"
        why = describe_failure(error)
        raise InfrastructureError(f"MLflow at {address} did not {action}: it {why}") from error


def history(mlflow: Mlflow, model: str) -> list[Move]:
    """Return all moves of `model`, the oldest first."""
    return list(read_log(mlflow, model).moves)


def move_champion(mlflow: Mlflow, model: str, move: Move, after: int) -> Move:
    """Make `move.version` champion, or nobody if it is None, in the order of the module's docstring.

    Return the move as it was recorded: `done`, or `overtaken` if another one was recorded after the entry
    `after` of the log. It is `overtaken` as well if a person revoked or deleted the version before the alias
    was set.
    """
    number = append(mlflow, model, after, move)
    failpoint("champion.recorded")
    entries = settle(mlflow, model)
    made = next(each for each in entries.moves if each.number == number)
    if made == counted(entries.moves)[-1] and number_of(mlflow.by_alias(model, CHAMPION)) != made.version:
        return replace(made, state="overtaken")
    return made


def settle(mlflow: Mlflow, model: str) -> Log:
    """Write what the log demands to the registered model, and return the log. If the champion is revoked
    after that, give the alias to the last champion in the log that is not.
    """
    entries = read_log(mlflow, model)
    written = entries.written
    while True:
        moves = [move for move in counted(entries.moves) if move.number > written]
        if moves:
            _write(mlflow, model, moves)
        has_replaced = _replace_revoked(mlflow, model, entries)
        if not moves and not has_replaced:
            return entries
        now = read_log(mlflow, model)
        if now.last == entries.last:
            break
        # Another process may have written a later move before this one set the alias.
        entries = now
    if moves:
        mark_written(mlflow, model, entries.last)
        failpoint("champion.done")
    # Not read again: a move that was recorded after this is not written yet.
    done = list(entries.moves)
    for index, move in enumerate(done):
        if move.state == "started":
            done[index] = replace(move, state="done")
    return entries._replace(moves=done, written=entries.last)


def _write(mlflow: Mlflow, model: str, moves: Sequence[Move]) -> None:
    """Write moves that may not be written yet to the registered model."""
    for move in moves:
        number = move.previous
        if move.action == "rolled_back" and number is not None and mlflow.version(model, number) is not None:
            mlflow.tag_version(model, number, {REVOKED: move.reason})
            failpoint("champion.revoked")
    target = moves[-1].version
    if target is not None and mlflow.version(model, target) is None:
        return  # deleted in the meantime
    failpoint("champion.checked")
    _set(mlflow, model, target)
    failpoint("champion.moved")


def _replace_revoked(mlflow: Mlflow, model: str, entries: Log) -> bool:
    """If the champion is revoked, give the alias to the last one in the log that is not. Return whether it
    was given.
    """
    champion = mlflow.by_alias(model, CHAMPION)
    if champion is None or find_revocation(mlflow, model, champion) is None:
        return False
    if read_log(mlflow, model).last != entries.last:
        return False  # another process revokes the champion now, and names the next one
    versions = _versions_of_rollbacks(mlflow, model, entries.moves)
    target = None
    for number in _former_champions(entries.moves):
        # None is the target of a rollback to no champion.
        if number is None or _is_usable(mlflow, model, number, versions, entries.moves):
            target = number
            break
    _set(mlflow, model, target)
    log.warning(
        "%s: version %s is revoked and had the alias `%s`; %s has it now",
        model, champion.version, CHAMPION, named(target),
    )  # fmt: skip
    return True


def _former_champions(moves: Sequence[Move]) -> list[str | None]:
    """Return the champions of a history, the last one first; None for a time without one."""
    numbers: list[str | None] = []
    for move in reversed(counted(moves)):
        # Also the previous one: a champion by hand, or from before the log, is the version of no move.
        numbers += [move.version, move.previous]
    return list(dict.fromkeys(numbers))


def _is_usable(
    mlflow: Mlflow, model: str, number: str, versions: Collection[ModelVersion], moves: Iterable[Move]
) -> bool:
    """Return whether a version exists and may become champion. Arguments as for `revocation`."""
    version = mlflow.version(model, number)
    return version is not None and revocation(version, versions, moves) is None


def _set(mlflow: Mlflow, model: str, version: str | None) -> None:
    """Give the alias to a version, or to none."""
    if version is None:
        mlflow.delete_alias(model, CHAMPION)
    else:
        mlflow.set_alias(model, CHAMPION, version)


def number_of(version: ModelVersion | None) -> str | None:
    """Return the number of a version; None for no version."""
    if version is None:
        return None
    return version.version


def named(number: str | None, none: str = "none") -> str:
    """Return `version 3` for a message, or the word for no version."""
    if number is None:
        return none
    return f"version {number}"


def moved_by_hand(mlflow: Mlflow, model: str, champion: ModelVersion | None, moves: Sequence[Move]) -> str:
    """Return a sentence if the alias is not where the history has put it; else an empty text.

    It was then moved or removed in MLflow, without a match and without a reason. During a move, and if the
    champion of the history is revoked, it cannot be known: `settle` moves the alias as well.
    """
    recorded, now = None, number_of(champion)
    if changes := counted(moves):
        if changes[-1].state == "started":
            return ""
        recorded = changes[-1].version
    if recorded == now:
        return ""
    if recorded is not None:
        with registry_errors(mlflow, f"list the champions of {model!r}"):
            version = mlflow.version(model, recorded)
            if version is not None and find_revocation(mlflow, model, version) is not None:
                return ""
    return (
        f"the alias `{CHAMPION}` was moved by hand: the history says {named(recorded, 'no version')}, and"
        f" {named(now, 'no version')} has it; use `rlhf promote` or `rlhf rollback`, which record a reason"
    )


def champions(mlflow: Mlflow, model: str) -> tuple[ModelVersion | None, list[Move]]:
    """Return the champion and all moves of `model`. Raises InputError if there is no such model."""
    with registry_errors(mlflow, f"list the champions of {model!r}"):
        _require_model(mlflow, model)
        return mlflow.by_alias(model, CHAMPION), history(mlflow, model)


def registered_models(mlflow: Mlflow) -> list[str]:
    """Return the names of all registered models."""
    with registry_errors(mlflow, "list its models"):
        return without_logs(mlflow.all_model_names())


def promote(mlflow: Mlflow, model: str, version: str, reason: str) -> Moved:
    """Make a version, given by its number or alias, champion by the decision of a person.

    Raises InputError if there is no such version, if it was revoked, or if there is no reason.
    """
    with registry_errors(mlflow, f"promote a version of {model!r}"):
        now = _begin(mlflow, model, reason)
        champion, last = now.champion, now.last
        version = find_version(mlflow, model, version).version
        if champion is not None and champion.version == version:
            # The same command again, after a kill, returns the move that `settle` has finished.
            if last is not None and last.version == version:
                return Moved(last, last.number in now.interrupted)
            raise InputError(f"version {version} of {model} is the champion already")
        usable_version(mlflow, model, version)
        move = Move(time.time(), "promoted", version, number_of(champion), reason)
        return _moved(mlflow, model, move, now.log.last)


def rollback(mlflow: Mlflow, model: str, reason: str, to: str | None = None) -> Moved:
    """Revoke the champion, and make an earlier version champion.

    The same call again returns the same move and changes nothing. After an interruption it finishes the move.
    If it finishes another move, which makes another version champion, it raises: that version was not meant.

    Args:
        mlflow: The registry.
        model: Name of the registered model.
        reason: Why the champion is taken back.
        to: Number or alias of the version that becomes champion; `NONE` for no champion; None for the last
            one that was champion and is not revoked.

    Raises:
        InputError: There is no champion, no reason, or no such version to return to, or another version has
            become champion.
    """
    with registry_errors(mlflow, f"roll back {model!r}"):
        begun = _begin(mlflow, model, reason)
        champion, last, seen = begun.champion, begun.last, begun.seen
        if to not in (None, NONE):
            to = find_version(mlflow, model, to).version
        now = number_of(champion)
        # Before the checks below: after a rollback to no champion, the same command finds none.
        if last is not None and _is_same_rollback(last, now, reason, to):
            return Moved(last, last.number in begun.interrupted)
        if now != seen:
            raise InputError(
                "an interrupted move was finished, or a revoked champion was replaced, and the champion of"
                f" {model} is {named(now)} now, not {named(seen)}; nothing else was changed; see"
                f" `rlhf champions {model}`, and decide again"
            )
        if champion is None:
            raise InputError(f"{model} has no champion that could be rolled back; use `rlhf promote`")
        if to == champion.version:
            raise InputError(f"--to: version {to} of {model} is the champion; choose an earlier one")
        version = None
        if to != NONE:
            version = to or _earlier_champion(mlflow, model, begun.log.moves, champion, reason)
            # The rollback revokes by these digests, so it would revoke the new champion as well.
            if _digests(usable_version(mlflow, model, version).tags) & _digests(champion.tags):
                raise InputError(
                    f"--to: version {version} of {model} has the same policy as the champion, version"
                    f" {champion.version}; choose another one"
                )
        digests = {name: champion.tags[name] for name in (POLICY, WEIGHTS) if name in champion.tags}
        move = Move(time.time(), "rolled_back", version, champion.version, reason, digests=digests)
        return _moved(mlflow, model, move, begun.log.last)


def find_version(mlflow: Mlflow, model: str, wanted: str = CHAMPION) -> ModelVersion:
    """Return a version by its number or alias. Raises InputError if there is none."""
    with registry_errors(mlflow, f"find {model}@{wanted}"):
        _require_model(mlflow, model)
        if _NUMBER.fullmatch(wanted):
            found = mlflow.version(model, wanted)
        else:
            found = mlflow.by_alias(model, wanted)
        if found is not None:
            return found
        numbers = sorted((each.version for each in mlflow.versions(model)), key=int)
        raise InputError(f"{model} has no version {wanted}; its versions are {', '.join(numbers) or 'none'}")


def usable_version(mlflow: Mlflow, model: str, wanted: str = CHAMPION) -> ModelVersion:
    """Return a version by its number or alias, see `revocation`. Raises InputError if there is none, or if it
    must not become champion.
    """
    with registry_errors(mlflow, f"find {model}@{wanted}"):
        version = find_version(mlflow, model, wanted)
        revoked = find_revocation(mlflow, model, version)
        if revoked is None:
            return version
        text = f"version {version.version} of {model} "
        if revoked.version != version.version:
            text += f"has the same policy as version {revoked.version}, which "
        what = f"the tag {REVOKED} of the version"
        if revoked.entry is not None:
            what = f"`digests` from the tag {ENTRY} of version {revoked.entry} of {log_of(model)}"
        raise InputError(
            f"{text}was revoked: {revoked.reason}; choose another one, or remove {what} in MLflow if that"
            " was an error"
        )


def _is_same_rollback(last: Move, champion: str | None, reason: str, to: str | None) -> bool:
    """Return whether the last move is the rollback that is asked for."""
    same = last.action == "rolled_back" and last.version == champion
    return same and last.reason == reason and to in (None, last.version or NONE)


class _Begun(NamedTuple):
    """What a command finds."""

    seen: str | None
    """The champion that the person could see."""
    interrupted: frozenset[int]
    """Numbers of the moves that this command finished."""
    log: Log
    champion: ModelVersion | None

    @property
    def last(self) -> Move | None:
        """The last finished move."""
        return next(reversed(self.log.done), None)


def _begin(mlflow: Mlflow, model: str, reason: str) -> _Begun:
    """Check what every command checks, and finish interrupted moves."""
    if not reason.strip():
        raise InputError("--reason must say why; it is kept in the history of champions")
    if len(reason) > MAX_REASON:
        raise InputError(
            f"--reason must have at most {MAX_REASON} characters, which every database of MLflow can keep;"
            f" got {len(reason)}; shorten it"
        )
    _require_model(mlflow, model)
    seen = number_of(mlflow.by_alias(model, CHAMPION))  # before `settle`, which can change it
    interrupted = frozenset(move.number for move in history(mlflow, model) if move.state == "started")
    entries = settle(mlflow, model)
    # After the log: a move that was made in between is not in the log, and this command then does not count.
    return _Begun(seen, interrupted, entries, mlflow.by_alias(model, CHAMPION))


def _require_model(mlflow: Mlflow, model: str) -> None:
    if mlflow.model_tags(model) is None:
        names = without_logs(mlflow.all_model_names())[:10]
        raise InputError(
            f"MLflow has no registered model {model!r}; it has {', '.join(names) or 'none'}; check the name,"
            " --home and MLFLOW_TRACKING_URI"
        )


def _moved(mlflow: Mlflow, model: str, move: Move, after: int) -> Moved:
    """Make a move of a person. Raises InputError if it was overtaken."""
    made = move_champion(mlflow, model, move, after)
    if made.state != "done":
        what = f"the alias `{CHAMPION}` of {model} was moved"
        if move.version is not None:
            what += f", or version {move.version} was revoked or deleted,"
        raise InputError(
            f"{what} in the meantime; this command did not move it; see `rlhf champions {model}`, and decide"
            " again"
        )
    return Moved(made, True)


def _earlier_champion(
    mlflow: Mlflow, model: str, moves: Sequence[Move], champion: ModelVersion, reason: str
) -> str:
    """Return the last version that was champion before, that exists, and that is usable after the champion
    is revoked.
    """
    versions = _versions_of_rollbacks(mlflow, model, moves)
    after = [each for each in versions if each.version != champion.version]
    after.append(replace(champion, tags={**champion.tags, REVOKED: reason}))
    for number in _former_champions(moves):
        if number is not None and _is_usable(mlflow, model, number, after, moves):
            return number
    raise InputError(
        f"the history of {model} has no earlier champion that is not revoked; name a version with --to, or"
        f" use --to {NONE}"
    )
