"""The artifacts that registered versions need, for `rlhf prune`.

The versions are those of all registered models of the tracker. A version keeps its artifacts if

- it has an alias, such as `champion`, `candidate` (the newest one) or one that a person has set;
- a move in the history of champions names it, and it is not revoked: `rlhf rollback` can choose it;
- it was promoted by an earlier release without a history, and is not revoked;
- another program registered it.

Any other version that is not revoked can become champion by `rlhf promote`. Its artifacts are kept while they
are young. An alias keeps them longer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rlhf_core.storage.artifacts import parse_artifact_address
from rlhf_core.storage.inventory import ArtifactName
from rlhf_core.tracking.champion_log import Move, read_log, without_logs
from rlhf_core.tracking.champions import WEIGHTS, registry_errors, revocation
from rlhf_core.tracking.mlflow_client import Mlflow, ModelVersion, UnusableAnswer

_KEY = re.compile(r"rlhf\.([a-z]+)\.key")
"""Tag of a version with the key of one of its artifacts."""


class Retained(NamedTuple):
    """What the registry says about artifacts."""

    needed: frozenset[ArtifactName]
    """The artifacts of the versions that keep them."""
    registered: frozenset[tuple[str, str]]
    """Name of the model and digest of the weights of every version."""


def retained(mlflow: Mlflow) -> Retained:
    """Read all versions of all models. Raises InfrastructureError if MLflow does not answer."""
    needed: set[ArtifactName] = set()
    registered: set[tuple[str, str]] = set()
    with registry_errors(mlflow, "list the versions of its models"):
        for name in without_logs(mlflow.all_model_names()):
            # The aliases and moves first, so that their versions exist when those are listed.
            aliased, moves = set(mlflow.aliases(name).values()), read_log(mlflow, name).moves
            versions = mlflow.versions(name)
            missing = aliased - {version.version for version in versions}
            if missing:
                raise UnusableAnswer(f"version {min(missing)} of {name} has an alias, and is not listed")
            for version in _kept(versions, moves, aliased):
                needed.update(artifacts_of(version))
            registered.update((name, version.tags.get(WEIGHTS, "")) for version in versions)
    return Retained(frozenset(needed), frozenset(registered))


def artifacts_of(version: ModelVersion) -> Iterator[ArtifactName]:
    """Yield the artifacts that the tags of a version, and the address of its files, name."""
    for tag, key in version.tags.items():
        if found := _KEY.fullmatch(tag):
            yield ArtifactName(found[1], key)
    if address := parse_artifact_address(version.source):
        yield ArtifactName(address.stage, address.key)


def _kept(
    versions: Sequence[ModelVersion], moves: Sequence[Move], aliased: set[str]
) -> Iterator[ModelVersion]:
    in_history = {name for move in moves for name in (move.version, move.previous)}
    for version in versions:
        is_foreign = not any(map(_KEY.fullmatch, version.tags))
        was_champion = version.version in in_history
        is_usable = revocation(version, versions, moves) is None
        if version.version in aliased or is_foreign or (was_champion and is_usable):
            yield version
