"""What `rlhf prune` deletes, decided from what the store and the registry have.

- whatever the lineage: what is deleted is old, has weights, and nothing that is kept for a reason of its own
  descends from it; descendants are deleted first
- a greater age, another version and another reader keep more, never less
- a stage that runs, or was begun in the last week, keeps what it reads
- checkpoints and files without a manifest are deleted if the last attempt and the last save are old
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.ops.retention import UNFINISHED_SECONDS, Item, Known, Reason, decide
from rlhf_core.storage.fencing import Claim
from rlhf_core.storage.inventory import (
    ArtifactName,
    Inventory,
    Leftover,
    StoredArtifact,
    Unfinished,
)
from tests.support.sampled import examples

NOW, DAY = 1e9, 86_400.0
STAGES = ("data", "sft", "ppo", "evaluate", "distilled")


def artifact(
    name: ArtifactName,
    parents: Any = (),
    *,
    created: float = 0.0,
    has_weights: bool = True,
    registered: tuple[str, str] | None = None,
) -> StoredArtifact:
    return StoredArtifact(
        name, ("000001",), "d" * 64, 10, created, has_weights, frozenset(parents), registered
    )


def known(*artifacts: StoredArtifact, **changes: Any) -> Known:
    inventory = Inventory(artifacts, (), (), frozenset())
    return replace(Known(inventory, {}, (), (), (), NOW, 90 * DAY), **changes)


def deleted(given_: Known) -> set[Any]:
    return {each.name for each in artifacts_of(given_, deleted=True)}


def artifacts_of(given_: Known, *, deleted: bool) -> list[StoredArtifact]:
    items = [item for item in decide(given_) if (item.reason is None) == deleted]
    return [item.subject for item in items if isinstance(item.subject, StoredArtifact)]


def reason_of(items: list[Item], subject: Any) -> Reason | None:
    [reason] = [item.reason for item in items if item.subject == subject]
    return reason


@st.composite
def stores(draw: st.DrawFn) -> Known:
    count = draw(st.integers(1, 12))
    all_names = [ArtifactName(draw(st.sampled_from(STAGES)), f"{number:016x}") for number in range(count)]
    made = []
    for number, name in enumerate(all_names):
        earlier = draw(st.sets(st.sampled_from(all_names[:number]))) if number else set()
        registered = draw(st.sampled_from([None, None, ("m", "known"), ("m", "other")]))
        created = draw(st.sampled_from([math.inf, NOW - 91 * DAY, NOW - 91 * DAY, NOW - 89 * DAY]))
        weights = draw(st.booleans())
        made.append(artifact(name, earlier, created=created, has_weights=weights, registered=registered))
    some = st.sets(st.sampled_from(all_names), max_size=2)
    held = {name.key: Claim(1, True, 0.0, frozenset()) for name in draw(some)}
    return known(*made, claims=held, needed=draw(some), in_use=draw(some), registered={("m", "known")})


def own_reason(each: StoredArtifact, given_: Known) -> bool:
    """Whether an artifact is kept with all that it descends from, written another way than the code."""
    is_young = NOW - each.created < given_.age
    is_unknown = each.registered == ("m", "other")
    return (
        is_young or is_unknown or each.name in given_.needed or each.name in given_.in_use
        or each.name.key in given_.claims
    )  # fmt: skip


@examples(300, 4)
@given(stores())
def test_nothing_is_deleted_that_something_kept_descends_from(given_: Known) -> None:
    by_name = {each.name: each for each in given_.inventory.artifacts}
    gone = deleted(given_)
    for name, each in by_name.items():
        if own_reason(each, given_):
            seen, waiting = set(), [name]
            while waiting:
                one = waiting.pop()
                seen.add(one)
                waiting += by_name[one].descends_from - seen
            assert not seen & gone
    for name in gone:
        assert by_name[name].has_weights and name.stage != "data"
    order = [each.name for each in artifacts_of(given_, deleted=True)]
    for place, name in enumerate(order):
        assert not by_name[name].descends_from & set(order[:place])
    kept = {each.name for each in artifacts_of(given_, deleted=False)}
    assert kept | gone == set(by_name) and not kept & gone
    # What has weights and no reason is deleted: the command is of use.
    used = {name for each in by_name.values() for name in each.descends_from}
    for name, each in by_name.items():
        if not own_reason(each, given_) and name not in used and each.has_weights and name.stage != "data":
            assert name in gone


@examples(200, 4)
@given(stores(), st.data())
def test_more_reasons_never_delete_more(given_: Known, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([each.name for each in given_.inventory.artifacts]))
    claims = {**given_.claims, "f" * 16: Claim(1, True, 0.0, frozenset([str(name)]))}
    for changed in (
        replace(given_, age=given_.age * 2),
        replace(given_, running_since=NOW - 91 * DAY),
        replace(given_, needed={*given_.needed, name}),
        replace(given_, in_use={*given_.in_use, name}),
        replace(given_, claims=claims),
        replace(given_, registered=()),
    ):
        assert deleted(changed) <= deleted(given_)
    assert name not in deleted(replace(given_, claims=claims))


SFT, PPO = ArtifactName("sft", "1" * 16), ArtifactName("ppo", "2" * 16)


@pytest.mark.parametrize(
    ("claim", "kept"),
    [
        (Claim(1, True, 0.0, frozenset([str(SFT)])), True),
        (Claim(1, False, NOW - 6 * DAY, frozenset([str(SFT)])), True),
        (Claim(1, False, math.inf, frozenset([str(SFT)])), True),
        (Claim(1, False, NOW - 8 * DAY, frozenset([str(SFT)])), False),
        (Claim(1, False, NOW - 6 * DAY, frozenset([str(PPO)])), False),
        (Claim(1, False, NOW, frozenset()), False),
    ],
)
def test_an_unfinished_stage_keeps_what_it_reads(claim: Claim, kept: bool) -> None:
    given_ = known(artifact(SFT), age=0.0, claims={PPO.key: claim})
    assert (SFT not in deleted(given_)) == kept


def test_a_finished_stage_does_not_keep_what_it_read() -> None:
    claim = Claim(1, False, NOW - DAY, frozenset([str(SFT)]))
    given_ = known(artifact(SFT), artifact(PPO, [SFT]), age=0.0, claims={PPO.key: claim})
    assert deleted(given_) == {SFT, PPO}


def test_a_version_whose_artifact_is_gone_keeps_its_other_artifacts() -> None:
    assert deleted(known(artifact(SFT), needed={PPO, SFT})) == set()


@pytest.mark.parametrize(
    ("claim", "saved", "reason"),
    [
        (Claim(2, False, NOW - 91 * DAY, frozenset()), NOW - 91 * DAY, None),
        (Claim(2, False, NOW - 91 * DAY, frozenset()), NOW - 89 * DAY, Reason.YOUNG),
        (Claim(2, False, NOW - 89 * DAY, frozenset()), NOW - 91 * DAY, Reason.YOUNG),
        (Claim(2, True, NOW - 91 * DAY, frozenset()), NOW - 91 * DAY, Reason.HELD),
        (Claim(2, False, NOW - 91 * DAY, frozenset()), math.inf, Reason.YOUNG),
        (Claim(2, False, math.inf, frozenset()), NOW - 91 * DAY, Reason.YOUNG),
        (None, NOW - 91 * DAY, Reason.YOUNG),
    ],
)
def test_checkpoints_of_stages_that_were_not_continued(
    claim: Claim | None, saved: float, reason: Reason | None
) -> None:
    checkpoints = Unfinished(PPO.key, 10, (4, 8), saved)
    inventory = Inventory((), (), (checkpoints,), frozenset([PPO.key]))
    given_ = known(inventory=inventory, claims={} if claim is None else {PPO.key: claim})
    assert reason_of(decide(given_), checkpoints) == reason


@pytest.mark.parametrize("seconds", [-60.0, 60.0])
def test_files_without_a_manifest_stay_for_a_week_in_any_case(seconds: float) -> None:
    leftover = Leftover(PPO, 10, ("000001",), is_damaged=False)
    claim = Claim(1, False, NOW - UNFINISHED_SECONDS + seconds, frozenset())
    inventory = Inventory((), (leftover,), (), frozenset([PPO.key]))
    decision = decide(known(inventory=inventory, claims={PPO.key: claim}, age=0.0))
    assert reason_of(decision, leftover) == (Reason.YOUNG if seconds > 0 else None)
    damaged = replace(leftover, is_damaged=True)
    inventory = Inventory((), (damaged,), (), frozenset([PPO.key]))
    assert reason_of(decide(known(inventory=inventory, claims={})), damaged) == Reason.DAMAGED
