"""Plays a cache machine from a seed: long random ways at a fraction of what a search costs, the same every time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from tests.unit.cache.stand import DOMAINS, LENDS, CacheStand, prompt


def _data(rng: Random) -> bytes:
    return prompt(rng.randrange(1, 14), rng.choice([1, 3, 4, 5, 7, 8, 99, 99, 99]), rng.randrange(2))


def _which(rng: Random) -> dict[str, Any]:
    return {"which": rng.randrange(1 << 12)}


def _about(rng: Random) -> dict[str, Any]:
    return {"domain": rng.choice((LENDS, *DOMAINS)), "data": _data(rng)}


Draw = Callable[[Random], dict[str, Any]]
MOVES: dict[str, tuple[float, Draw]] = {  # how often, and with what
    "acquire": (3, lambda r: _about(r) | _which(r) | {"space": r.randrange(10), "more": r.randrange(6)}),
    "fill": (6, lambda r: _about(r) | _which(r)),
    "ask_again": (1, _which),
    "publish": (3, lambda r: _which(r) | {"blocks": r.randrange(1, 5), "back": r.randrange(4), "fill": _data(r)}),
    "extend": (1, lambda r: _which(r) | {"more": r.randrange(1, 6)}),
    "end_a_lease": (1, _which),
    "say_it_again": (1, _which),
    "use_a_dead_lease": (1, _which),
    "use_a_foreign_lease": (1, _which),
    "distrust": (1, _which),
    "batch": (1, lambda r: _which(r) | {"data": _data(r)}),
    "query": (1, _about),
    "invalidate": (1, lambda r: _about(r) | {"kind": r.randrange(8), "space": r.randrange(2)}),
    "pin": (1, lambda r: _about(r) | {"which": r.randrange(3)}),
    "answer_a_copy": (1, lambda r: _which(r) | {"failed": r.random() < 0.4, "strange": r.random() < 0.5}),
    "acknowledge": (1, _which),
    "replace_worker": (1, _which),
    "change_sessions": (1, _which),
    "drop_unlisted": (1, _which),
    "wait": (1, lambda r: {"ms": r.choice([100, 600, 2_500]), "silent": r.randrange(10)}),
    "follow_late": (1, lambda r: {"count": r.randrange(1, 5)}),
    "swap": (1, lambda r: {"start": r.randrange(20, 23)}),
    "restart_worker": (0.3, lambda r: _which(r) | {"lost": r.randrange(4)}),
    "sink": (0.4, lambda r: {"start": r.randrange(30, 33)}),
}


def _is_possible(stand: CacheStand, move: str) -> bool:
    model = stand.model
    if move in ("publish", "extend", "end_a_lease", "say_it_again", "use_a_foreign_lease", "distrust", "drop_unlisted"):
        return bool(model.live)
    needed = {"ask_again": model.waiting, "answer_a_copy": model.orders, "acknowledge": model.fences}
    if move == "use_a_dead_lease":
        return bool(model.dead or model.drained)
    return bool(needed.get(move, True))


def play(machine: type[CacheStand], seed: int, *, steps: int) -> Counter[str]:
    """Returns what happened, by kind. Whatever is wrong raises."""
    rng = Random(seed)
    stand = machine.__new__(machine)
    CacheStand.start(stand)
    weights = [weight for weight, _ in MOVES.values()]
    for move in rng.choices(list(MOVES), weights, k=steps):
        if _is_possible(stand, move):
            getattr(machine, move)(stand, **MOVES[move][1](rng))
    CacheStand.teardown(stand)
    return stand.model.happened
