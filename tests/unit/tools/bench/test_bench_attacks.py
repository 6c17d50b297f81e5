"""An attack of the benchmark that does not reach what it attacks is named; ours are not refused before they do."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest

from benchmarks.attacks import over_rest
from benchmarks.attacks.attacker import ATTACKS, Target
from benchmarks.attacks.phases import CALM, FAIR, PHASES, missed
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from tests.fakes.api import rest

WAIT_S = 60
KEY = "of the attacker"


def test_each_phase_has_an_attack_and_each_door_its_calm_and_its_share() -> None:
    assert set(ATTACKS) == set(PHASES)
    doors = {phase.door for phase in PHASES.values()}
    assert set(CALM) == set(FAIR) == doors
    assert {PHASES[name].door for name in CALM.values()} == doors
    assert all(phase.proof for name, phase in PHASES.items() if name not in CALM.values())


def test_an_attack_that_was_refused_too_early_is_named() -> None:
    proof = "400 context_length_exceeded max_tokens"
    assert missed("ids", Counter({proof: 40}), rounds=4) == []
    assert len(missed("ids", Counter({proof: 39, "413 request_too_large None": 9_000}), rounds=4)) == 1
    assert len(missed("refused", Counter({proof: 900}), rounds=1)) == 1, "of the other kind there was none"
    assert missed("calm", Counter(), rounds=4) == []


@pytest.mark.wide
@pytest.mark.parametrize("name", ["texts", "ids", "refused", "strangers", "wrong_grammars"])
def test_a_front_door_with_a_long_context_lets_attacks_through_to_what_they_attack(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_rest, "MODEL_NAME", rest.MODEL)
    tenants = TenantDirectory([Tenant(id="attacker", api_key_sha256=(digest_of_key(KEY),))])
    with rest.serving(tenants, context=over_rest.CONTEXT) as served:
        door = Target(phase=name, url=served.url, host="127.0.0.1", port=served.port, grpc_port=0, ca="", key=KEY)
        told: Counter[str] = Counter()

        async def attack() -> None:
            attacking = asyncio.ensure_future(ATTACKS[name](door, told))
            async with asyncio.timeout(WAIT_S):
                while not attacking.done() and missed(name, told, rounds=1):
                    await asyncio.sleep(0.01)
            attacking.cancel()
            with suppress(asyncio.CancelledError):
                await attacking

        with suppress(TimeoutError):
            asyncio.run(attack())
        assert missed(name, told, rounds=1) == [], told
