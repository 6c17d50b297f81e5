"""The rules of the stateful test with weights that keep the pool full."""

from __future__ import annotations

from collections import Counter
from random import Random

from tests.unit.cache.machine.test_stateful import DOMAINS, CacheMachine

WEIGHTS = {
    "acquire": 8,
    "publish": 10,
    "publish_again": 1,
    "extend": 3,
    "acquire_again": 1,
    "release": 5,
    "abandon": 0.7,
    "drop_unlisted": 0.5,
    "use_a_dead_lease": 1,
    "use_a_foreign_lease": 0.5,
    "attach": 0.5,
    "end_session": 0.3,
    "acknowledge": 2,
    "replace_worker": 0.05,
    "reconnect_worker": 0.3,
    "wait": 1,
}


def possible(machine: CacheMachine, name: str) -> bool:
    if name in ("publish", "extend", "acquire_again", "release", "abandon", "drop_unlisted"):
        return bool(machine.live)
    if name == "publish_again":
        return any(lease.published for lease in machine.live.values())
    if name == "use_a_dead_lease":
        return bool(machine.dead or machine.drained)
    return name != "use_a_foreign_lease" or bool(machine.live and len(machine.sessions) > 1)


def arguments(random: Random, name: str) -> dict[str, object]:
    data = tuple(random.choices((0, 1), weights=(4, 1), k=random.randint(1, 11)))
    which = random.randrange(1 << 16)
    if name == "acquire":
        return {"domain": random.choice(DOMAINS), "data": data, "more": random.randint(0, 6), "which": which}
    if name == "publish":
        return {"which": which, "blocks": random.randint(1, 4), "fill": data}
    if name == "extend":
        return {"which": which, "more": random.randint(1, 5)}
    return {} if name in ("attach", "replace_worker", "reconnect_worker", "wait") else {"which": which}


def test_long_runs_meet_every_situation() -> None:
    """Each situation must come up or the run shows nothing."""
    happened: Counter[str] = Counter()
    for seed in range(12):
        random = Random(seed)
        machine = CacheMachine()
        machine.start()
        for _ in range(250):
            name = random.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
            if possible(machine, name):
                getattr(machine, name)(**arguments(random, name))
                machine.one_writer_and_what_is_published_is_found()
        happened += machine.happened
    for situation in ("shared", "duplicate", "evicted", "pool_full", "domain_maximum", "never_fits", "fenced"):
        assert happened[situation] > 3, happened
