"""Two worlds inside of one domain: what a user's salt finds does not depend on what users of other salts send.

The same script is played with everybody in it and with one user alone, who is told the same in every word. They share
the domain's memory, so there is enough of it here; how much others take of it can be felt, as in `private` mode.
"""

from __future__ import annotations

import sys
from random import Random

import pytest

from coppice.ids import Namespace
from coppice.messages.index import (
    Acquire,
    Candidate,
    Extend,
    Grant,
    MatchQueries,
    MatchQuery,
    Publish,
    Published,
    Release,
    Wake,
)
from coppice.namespaces import digest_salt, with_salt
from tests.unit.cache.machine.test_two_worlds import told
from tests.unit.cache.world import ALICE, MS, NAMESPACE, W, World, lease_id, settings, tokens

BLOCK = 4
USERS = ("attacker", "victim", "another", "")
Script = list[tuple[str, str, int, int]]


def name_of(user: str) -> Namespace:
    """Who sends no salt is a user, too."""
    return with_salt(NAMESPACE, digest_salt(ALICE, user)) if user else NAMESPACE


def script(seed: int, length: int = 150) -> Script:
    """Moves of all users, drawn once, on few prompts that begin alike."""
    rng = Random(seed)
    kinds = ["acquire"] * 4 + ["publish"] * 3 + ["extend", "release", "release", "hint"]
    users = ("attacker", *USERS)
    return [(rng.choice(kinds), rng.choice(users), rng.randrange(9), rng.randrange(1 << 12)) for _ in range(length)]


def heard(moves: Script, users: tuple[str, ...]) -> list[object]:
    """What the attacker is told when only these users do anything; time passes for all moves."""
    world = World(settings(flight_tokens_min=1), num_blocks=4_096, block_size=BLOCK)
    leases: dict[str, list[tuple[Acquire, int]]] = {user: [] for user in USERS}
    said: list[object] = []
    for number, (kind, user, which, drawn) in enumerate(moves, start=1):
        world.now_ns += 3 * MS
        if user not in users:
            continue
        answer = _play(world, leases[user], kind, name_of(user), number, which, drawn)
        if user == "attacker":
            said.append(answer)
            mine = {lease_id(n) for n, move in enumerate(moves, start=1) if move[1] == user}
            woken = [m.lease_ids for m in world.told(world.session) if isinstance(m, Wake)]
            said.append([one for ids in woken for one in ids if one in mine])
    return said


def _play(
    world: World,
    leases: list[tuple[Acquire, int]],
    kind: str,
    namespace: Namespace,
    number: int,
    which: int,
    drawn: int,
) -> object:
    prompt = tokens(BLOCK * (1 + which)) + tokens(1 + drawn % 7, 100 * (drawn % 3))
    if kind == "hint":
        return world.core.match_all(MatchQueries((MatchQuery(ALICE, namespace, prompt),)))
    if kind == "acquire":
        flags = {"may_wait": drawn & 1 == 1, "wants_copy": drawn & 2 == 2, "skip_match": drawn % 9 == 8}
        op = Acquire(lease_id(number), ALICE, namespace, prompt, len(prompt) // 4, (Candidate(W, 0),), **flags)
        answer = world.do(op)
        if isinstance(answer, Grant):
            leases.append((op, answer.num_cached_tokens // BLOCK))
        return told(answer)
    if not leases:
        return None
    at = drawn % len(leases)
    op, settled = leases[at]
    if kind == "release":
        del leases[at]
        return told(world.do(Release(op.lease_id)))
    if kind == "extend":
        return told(world.do(Extend(op.lease_id, op.reserve_tokens + drawn % 6)))
    whole = op.tokens[4 * BLOCK * settled : len(op.tokens) // (4 * BLOCK) * 4 * BLOCK]
    if kind == "publish" and whole:
        by_number = Publish(op.lease_id, settled, b"", len(whole) // (4 * BLOCK))  # as schedulers do, or by tokens
        answer = world.do(by_number if drawn % 2 else Publish(op.lease_id, settled, whole))
        if isinstance(answer, Published):
            leases[at] = op, answer.num_published_blocks
        return told(answer)
    return None


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.wide) for seed in range(8, 30))])
def test_a_user_is_told_the_same_with_and_without_the_others(seed: int) -> None:
    moves = script(seed)
    alone = heard(moves, ("attacker",))
    assert heard(moves, USERS) == alone
    assert any(isinstance(one, tuple) and one[0] == "grant" and one[3] for one in alone), "it finds what is its own"


def test_without_salts_it_would_be_told_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    monkeypatch.setattr(sys.modules[__name__], "name_of", lambda user: NAMESPACE)
    assert any(heard(script(seed), USERS) != heard(script(seed), ("attacker",)) for seed in range(3))
