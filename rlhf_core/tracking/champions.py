"""The champions of a registered model: their history, promotion by a person, and rollback.

MLflow has no transactions. Each move of the alias `champion` is therefore written in this order:

    1. a tag of the registered model with the whole move, state `started`
    2. for a rollback: the tag `rlhf.revoked` of the version that is no longer champion
    3. the alias
    4. the tag of step 1 again, state `done`

After a kill between two of them, `settle` finishes the move. Every command and every registration begins with
it. Each move has a tag of its own, so that two writers do not overwrite each other's history.

Two processes can move the alias at the same time. Each writes it before it reads the history again, so at
least one of them sees the other's move, and the last finished move is applied again (`_compare`).
"""

from __future__ import annotations

import json
import logging
import random
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from rlhf_core.config.redact import has_credentials
from rlhf_core.errors import InfrastructureError, InputError, RLHFError
from rlhf_core.system.failpoints import failpoint
from rlhf_core.tracking.mlflow_client import Mlflow, ModelVersion
from rlhf_core.tracking.mlflow_errors import describe_failure

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
_MAX_TAG = 5000
"""Largest number of characters of a tag of a registered model in MLflow's databases."""
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
"""Number of a version."""
_MOVE = "rlhf.champion."
"""Prefix of the tags of the registered model that contain its moves. Microseconds since 1970 follow."""

Action = Literal["crowned", "promoted", "rolled_back"]
"""These values are in tags of registered models, so they stay as they are."""
ACTION_NAMES: Mapping[Action, str] = {
    "crowned": "promoted automatically",
    "promoted": "promoted",
    "rolled_back": "rolled back",
}
"""Actions as messages and tables name them."""


@dataclass(frozen=True)
class Move:
    """One change of the champion."""

    time: float
    """Seconds since 1970."""
    action: Action
    """`crowned`: promoted by the stage `register`; `promoted`: by a person; or `rolled_back`."""
    version: str | None
    """The new champion; None if there is none after it."""
    previous: str | None
    """The champion before; None for the first one."""
    reason: str
    evidence: Mapping[str, Any] | None = None
    """The match that decided; None without one."""
    state: Literal["started", "done", "overtaken"] = "started"
    """`overtaken`: someone else moved the alias, or revoked or deleted the version, before this move was
    finished. The alias was not moved.
    """
    digests: Mapping[str, str] | None = None
    """For a rollback, the tags `POLICY` and `WEIGHTS` of the version that it revokes, which can be deleted.
    None if it revoked nothing.
    """
    revoked: bool = False
    """Whether a move that was overtaken revoked the version nevertheless, as earlier releases did not."""

    @property
    def key(self) -> str:
        """Name of its tag. The names sort by time."""
        return f"{_MOVE}{round(self.time * 1e6):020d}"


_MOVES = TypeAdapter(Move)


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
    tag: str
    """The tag of a revoked version."""


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
    found = [
        Revocation(each.version, each.tags[REVOKED], _digests(each.tags), f"{REVOKED} of the version")
        for each in versions
        if REVOKED in each.tags
    ]
    existing = {each.version for each in versions}
    # Only of deleted versions. An existing one has the tag REVOKED, which a person may have removed.
    for move in moves:
        is_revoked = move.state != "overtaken" or move.revoked
        if is_revoked and move.digests and move.previous not in existing:
            tag = f"{move.key} of the registered model"
            found.append(Revocation(str(move.previous), move.reason, _digests(move.digests), tag))
    for each in found:
        if each.version == version.version or each.digests & _digests(version.tags):
            return each
    return None


def find_revocation(mlflow: Mlflow, model: str, version: ModelVersion) -> Revocation | None:
    """Return the same as `revocation`, without reading all versions."""
    moves = history(mlflow, model)
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
        address = "(address hidden)" if has_credentials(mlflow.uri) else mlflow.uri
        why = describe_failure(error)
        raise InfrastructureError(f"MLflow at {address} did not {action}: it {why}") from error


def history(mlflow: Mlflow, model: str) -> list[Move]:
    """Return all moves of `model`, the oldest first. Tags that cannot be read are ignored."""
    return moves_of(mlflow.model_tags(model) or {})


def moves_of(tags: Mapping[str, str]) -> list[Move]:
    """Return the moves in the tags of a registered model, as `history`."""
    moves = []
    for name, value in sorted(tags.items()):
        if name.startswith(_MOVE):
            try:
                move = _MOVES.validate_json(value, strict=True)
                if move.key != name:
                    raise ValueError("another time than in its name")
            except (ValueError, OverflowError):
                continue  # edited by hand
            moves.append(move)
    return moves


def move_champion(mlflow: Mlflow, model: str, move: Move) -> Move:
    """Make `move.version` champion, or nobody if it is None, in the order of the module's docstring.

    Return the move as it was recorded: `done`, or `overtaken` if the alias was moved, or the version revoked
    or deleted, in the meantime.
    """
    earlier = history(mlflow, model)
    if earlier and move.time <= earlier[-1].time:
        # The clock of the host that made the last move is ahead. The history is ordered by time. At least 10
        # us, because names of tags have microseconds, and a float of this size is exact to a quarter of one.
        # Random, because another process may do the same, and one tag would replace the other.
        move = replace(move, time=earlier[-1].time + random.uniform(1e-5, 1e-2))
    _record(mlflow, model, move)
    failpoint("champion.recorded")
    finished = _finish(mlflow, model, move)
    settle(mlflow, model)
    return finished


def settle(mlflow: Mlflow, model: str) -> str | None:
    """Finish moves that were interrupted. If the champion is revoked after them, give the alias to the last
    champion in the history that is not, and return the version that had it.
    """
    for move in history(mlflow, model):
        if move.state == "started":
            _finish(mlflow, model, move)
    champion = mlflow.by_alias(model, CHAMPION)
    if champion is None or find_revocation(mlflow, model, champion) is None:
        return None
    moves = history(mlflow, model)
    if any(move.state == "started" for move in moves):
        return settle(mlflow, model)  # another process revokes the champion now, and names the next one
    versions = _versions_of_rollbacks(mlflow, model, moves)
    target = None
    for number in _former_champions(moves):
        # None is the target of a rollback to no champion.
        if number is None or _is_usable(mlflow, model, number, versions, moves):
            target = number
            break
    _set(mlflow, model, target)
    log.warning(
        "%s: version %s is revoked and had the alias `%s`; %s has it now",
        model, champion.version, CHAMPION, f"version {target}" if target else "none",
    )  # fmt: skip
    return champion.version


def _former_champions(moves: Sequence[Move]) -> list[str | None]:
    """Return the champions of a history, the last one first; None for a time without one."""
    done = [move for move in reversed(moves) if move.state == "done"]
    return list(dict.fromkeys(number for move in done for number in (move.version, move.previous)))


def _is_usable(
    mlflow: Mlflow, model: str, number: str, versions: Collection[ModelVersion], moves: Iterable[Move]
) -> bool:
    """Return whether a version exists and may become champion. Arguments as for `revocation`."""
    if any(each.version == number and REVOKED in each.tags for each in versions):
        return False
    version = mlflow.version(model, number)
    return version is not None and revocation(version, versions, moves) is None


def _finish(mlflow: Mlflow, model: str, move: Move) -> Move:
    """Do what is left of a move, and return it as it was recorded."""
    version = None if move.version is None else mlflow.version(model, move.version)
    is_lost = move.version is not None and (
        version is None or find_revocation(mlflow, model, version) is not None
    )
    if is_lost and _champion(mlflow, model) == move.previous:
        # Nothing can replace the champion, which is therefore not revoked either.
        return _close(mlflow, model, replace(move, state="overtaken", digests=None))
    is_rollback = move.action == "rolled_back" and move.previous is not None
    if is_rollback and mlflow.version(model, str(move.previous)) is not None:
        mlflow.tag_version(model, str(move.previous), {REVOKED: move.reason})
        failpoint("champion.revoked")
    # At neither end of the move, the alias was moved by somebody else, which is respected.
    if is_lost or _champion(mlflow, model) not in (move.previous, move.version):
        revoked = move.action == "rolled_back"
        return _close(mlflow, model, replace(move, state="overtaken", revoked=revoked))
    failpoint("champion.checked")
    _set(mlflow, model, move.version)
    failpoint("champion.moved")
    _compare(mlflow, model, move)
    failpoint("champion.done")
    # Now others see that this move is finished. Those that finished before that are seen here.
    return _compare(mlflow, model, move)


def _compare(mlflow: Mlflow, model: str, move: Move) -> Move:
    """Compare a move, whose alias was set, with those of other processes. Return it as it was recorded.

    If a later move is finished, or another process has finished this one, the last finished move is applied
    again. This move is recorded unless another process did.
    """
    while True:
        moves = history(mlflow, model)
        own = next((each for each in moves if each.key == move.key), move)
        finished = [
            each for each in moves if each.state == "done" or (each == own and own.state == "started")
        ]
        last = finished[-1] if finished else own
        champion = _champion(mlflow, model)
        # At no version of another move, the alias was moved by hand.
        if champion == last.version or champion not in {
            each.version for each in moves if each.key != last.key
        }:
            break
        # Then the history is read again: another process may have finished a move before this.
        _set(mlflow, model, last.version)
    if last == own:
        return _close(mlflow, model, replace(move, state="done"))
    return _close(mlflow, model, replace(move, state="overtaken", revoked=move.action == "rolled_back"))


def _close(mlflow: Mlflow, model: str, move: Move) -> Move:
    """Record that a move has ended, unless another process did. Return it as it was recorded."""
    for each in history(mlflow, model):
        if each.key == move.key and each.state != "started":
            return each
    return _record(mlflow, model, move)


def _set(mlflow: Mlflow, model: str, version: str | None) -> None:
    """Give the alias to a version, or to none."""
    if version is None:
        mlflow.delete_alias(model, CHAMPION)
    else:
        mlflow.set_alias(model, CHAMPION, version)


def _champion(mlflow: Mlflow, model: str) -> str | None:
    """Return the version that has the alias."""
    champion = mlflow.by_alias(model, CHAMPION)
    return champion.version if champion else None


def _record(mlflow: Mlflow, model: str, move: Move) -> Move:
    """Write the tag of a move, and return it."""
    mlflow.tag_model(model, {move.key: _text(move)})
    return move


def _text(move: Move) -> str:
    """Return the text of the tag of a move, without details of the match if it would be too long."""
    few = move.evidence and {name: value for name, value in move.evidence.items() if name != "by_source"}
    last = replace(move, evidence=None, reason=move.reason[:MAX_REASON])
    for each in (move, replace(move, evidence=few), replace(move, evidence=None), last):
        text = json.dumps(asdict(each), ensure_ascii=False)
        if len(text) <= _MAX_TAG:
            break
    return text


def champions(mlflow: Mlflow, model: str) -> tuple[ModelVersion | None, list[Move]]:
    """Return the champion and all moves of `model`. Raises InputError if there is no such model."""
    with registry_errors(mlflow, f"list the champions of {model!r}"):
        _require_model(mlflow, model)
        return mlflow.by_alias(model, CHAMPION), history(mlflow, model)


def registered_models(mlflow: Mlflow) -> list[str]:
    """Return the names of all registered models."""
    with registry_errors(mlflow, "list its models"):
        return mlflow.all_model_names()


def promote(mlflow: Mlflow, model: str, version: str, reason: str) -> Moved:
    """Make a version, given by its number or alias, champion by the decision of a person.

    Raises InputError if there is no such version, if it was revoked, or if there is no reason.
    """
    with registry_errors(mlflow, f"promote a version of {model!r}"):
        interrupted = _interrupted(mlflow, model)
        _begin(mlflow, model, reason)
        champion = mlflow.by_alias(model, CHAMPION)
        version = find_version(mlflow, model, version).version
        if champion is not None and champion.version == version:
            # The same command again, after a kill, returns the move that `settle` has finished.
            last = _last(mlflow, model)
            if last is not None and last.version == version:
                return Moved(last, last.key in interrupted)
            raise InputError(f"version {version} of {model} is the champion already")
        usable_version(mlflow, model, version)
        move = Move(time.time(), "promoted", version, champion.version if champion else None, reason)
        return Moved(_require_done(model, move_champion(mlflow, model, move)), True)


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
        interrupted = _interrupted(mlflow, model)
        seen, lost = _begin(mlflow, model, reason)
        champion = mlflow.by_alias(model, CHAMPION)
        if to not in (None, NONE):
            to = find_version(mlflow, model, to).version
        # Before the checks below: after a rollback to no champion, the same command finds none.
        last = _last(mlflow, model)
        if last is not None and _is_same_rollback(last, champion.version if champion else None, reason, to):
            return Moved(last, last.key in interrupted)
        if lost is not None:
            raise InputError(
                f"version {lost} of {model} was revoked already, and had the alias `{CHAMPION}`;"
                f" {f'version {champion.version}' if champion else 'none'} has it now, and nothing else was"
                f" changed; see `rlhf champions {model}`, and decide again"
            )
        now = champion.version if champion else None
        if now != seen:
            raise InputError(
                f"an interrupted move was finished, and the champion of {model} is"
                f" {f'version {now}' if now else 'none'} now, not {f'version {seen}' if seen else 'none'};"
                f" nothing else was changed; see `rlhf champions {model}`, and decide again"
            )
        if champion is None:
            raise InputError(f"{model} has no champion that could be rolled back; use `rlhf promote`")
        if to == champion.version:
            raise InputError(f"--to: version {to} of {model} is the champion; choose an earlier one")
        version = None
        if to != NONE:
            version = to or _earlier_champion(mlflow, model, champion, reason)
            if _digests(usable_version(mlflow, model, version).tags) & _digests(champion.tags):
                raise InputError(
                    f"--to: version {version} of {model} has the same policy as the champion, version"
                    f" {champion.version}; choose another one"
                )
        digests = {name: champion.tags[name] for name in (POLICY, WEIGHTS) if name in champion.tags}
        move = Move(time.time(), "rolled_back", version, champion.version, reason, digests=digests)
        return Moved(_require_done(model, move_champion(mlflow, model, move)), True)


def find_version(mlflow: Mlflow, model: str, wanted: str = CHAMPION) -> ModelVersion:
    """Return a version by its number or alias. Raises InputError if there is none."""
    with registry_errors(mlflow, f"find {model}@{wanted}"):
        _require_model(mlflow, model)
        is_number = _NUMBER.fullmatch(wanted) is not None
        found = mlflow.version(model, wanted) if is_number else mlflow.by_alias(model, wanted)
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
        raise InputError(
            f"{text}was revoked: {revoked.reason}; choose another one, or remove the tag {revoked.tag} in"
            " MLflow if that was an error"
        )


def _is_same_rollback(last: Move, champion: str | None, reason: str, to: str | None) -> bool:
    """Return whether the last move is the rollback that is asked for."""
    same = last.action == "rolled_back" and last.version == champion
    return same and last.reason == reason and to in (None, last.version or NONE)


def _interrupted(mlflow: Mlflow, model: str) -> set[str]:
    """Return the keys of the moves that `settle` would finish."""
    return {move.key for move in history(mlflow, model) if move.state == "started"}


def _begin(mlflow: Mlflow, model: str, reason: str) -> tuple[str | None, str | None]:
    """Check what every command checks, and finish interrupted moves. Return the champion before that, and the
    result of `settle`.
    """
    if not reason.strip():
        raise InputError("--reason must say why; it is kept in the history of champions")
    if len(reason) > MAX_REASON:
        raise InputError(
            f"--reason must have at most {MAX_REASON} characters, which every database of MLflow can keep;"
            f" got {len(reason)}; shorten it"
        )
    _require_model(mlflow, model)
    seen = _champion(mlflow, model)  # before `settle`, which can change it
    return seen, settle(mlflow, model)


def _require_model(mlflow: Mlflow, model: str) -> None:
    if mlflow.model_tags(model) is None:
        names = mlflow.model_names(10)
        raise InputError(
            f"MLflow has no registered model {model!r}; it has {', '.join(names) or 'none'}; check the name,"
            " --home and MLFLOW_TRACKING_URI"
        )


def _require_done(model: str, move: Move) -> Move:
    if move.state != "done":
        what = f"the alias `{CHAMPION}` of {model} was moved"
        if move.version is not None:
            what += f", or version {move.version} was revoked or deleted,"
        raise InputError(
            f"{what} in the meantime; this command did not move it; see `rlhf champions {model}`, and decide"
            " again"
        )
    return move


def _last(mlflow: Mlflow, model: str) -> Move | None:
    done = [move for move in history(mlflow, model) if move.state == "done"]
    return done[-1] if done else None


def _earlier_champion(mlflow: Mlflow, model: str, champion: ModelVersion, reason: str) -> str:
    """Return the last version that was champion before, that exists, and that is usable after the champion
    is revoked.
    """
    moves = history(mlflow, model)
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
