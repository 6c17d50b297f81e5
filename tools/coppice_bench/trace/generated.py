"""Traces that nobody recorded: ten kinds of load, each of which some order of eviction is bad at.

Equal seeds give equal traces.

agents, busy_agents   loops whose prompt grows at each step; the second has more of them than a cache holds
chat                  conversations that go on after a while of thinking, or end
recent                conversations of which the last used go on
documents             a popular document in front of each question
phases                popular prefixes that all change at mid-run
bursts                prefixes that are used often for a while, and never again
scans                 chats with batches of long prompts between them that never come again
rounds                the same documents in turn, round after round
twice                 each prompt comes exactly twice, the second time after a while
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import accumulate
from random import Random
from types import MappingProxyType

from coppice.messages.reuse import Outcome
from coppice_bench.trace.file import Request, Trace

Run = tuple[int, ...]
_MS_APART = 100
_PROMPT_BLOCKS_MAX = 120
CHAT, AGENT, BATCH = 2, 3, 9  # kinds of calls, numbered as by front doors


class _Load:
    """Requests in the making, and blocks that no other prompt has."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._next_id = 0
        self._requests: list[Request] = []

    def fresh(self, least: int, most: int) -> Run:
        start = self._next_id
        self._next_id += self.random.randint(least, most)
        return tuple(range(start, self._next_id))

    def ask(self, prompt: Run, call_kind: int = 0, outcome: Outcome = Outcome.UNKNOWN) -> None:
        self._requests.append(Request(len(self._requests) * _MS_APART, 0, prompt, call_kind, outcome))

    def __len__(self) -> int:
        return len(self._requests)

    def trace(self) -> Trace:
        return Trace(tuple(self._requests), 0)


def _popular(random: Random, count: int, exponent: float) -> Callable[[], int]:
    """Draws from a Zipf distribution."""
    sums = list(accumulate((place + 1) ** -exponent for place in range(count)))
    return lambda: bisect(sums, random.random() * sums[-1])


def agents(seed: int, requests: int, *, live: int = 60) -> Trace:
    load = _Load(seed)
    kinds = [load.fresh(2, 10) for _ in range(8)]

    def begun() -> Run:
        return load.random.choice(kinds) + load.fresh(1, 6)

    loops = [begun() for _ in range(live)]
    while len(load) < requests:
        place = load.random.randrange(live)
        has_ended = load.random.random() < 0.08 or len(loops[place]) > _PROMPT_BLOCKS_MAX
        load.ask(loops[place], AGENT, Outcome.CALLED_NONE if has_ended else Outcome.CALLED_TOOLS)
        loops[place] = begun() if has_ended else loops[place] + load.fresh(1, 4)
    return load.trace()


def busy_agents(seed: int, requests: int) -> Trace:
    return agents(seed, requests, live=120)


def chat(seed: int, requests: int, *, batches: float = 0.0) -> Trace:
    load = _Load(seed)
    system = load.fresh(3, 3)
    waiting: list[tuple[int, int, Run]] = []
    turns = 0
    while len(load) < requests:
        turns += 1
        goes_on = bool(waiting) and waiting[0][0] <= turns
        prompt = heappop(waiting)[2] if goes_on else system + load.fresh(1, 12)
        load.ask(prompt, CHAT)
        if load.random.random() < 0.7:
            heappush(waiting, (turns + load.random.randint(5, 400), turns, prompt + load.fresh(1, 6)))
        if load.random.random() < batches:
            load.ask(load.fresh(20, _PROMPT_BLOCKS_MAX), BATCH)
    return load.trace()


def scans(seed: int, requests: int) -> Trace:
    return chat(seed, requests, batches=0.3)


def recent(seed: int, requests: int) -> Trace:
    load = _Load(seed)
    live: list[Run] = []  # the last used first
    while len(load) < requests:
        prompt = load.fresh(4, 20)
        if live and load.random.random() < 0.75:
            prompt = live.pop(min(int(load.random.expovariate(1 / 6)), len(live) - 1)) + load.fresh(1, 5)
        load.ask(prompt)
        live.insert(0, prompt)
        del live[1000:]
    return load.trace()


def documents(seed: int, requests: int) -> Trace:
    load = _Load(seed)
    system, draw = load.fresh(4, 4), _popular(load.random, 4000, 0.9)
    known: dict[int, Run] = {}
    while len(load) < requests:
        number = draw()
        if number not in known:
            known[number] = load.fresh(3, 20)
        load.ask(system + known[number] + load.fresh(1, 8))
    return load.trace()


def phases(seed: int, requests: int) -> Trace:
    load = _Load(seed)
    for end in (requests // 2, requests):
        draw, prefixes = _popular(load.random, 1500, 1.0), [load.fresh(4, 30) for _ in range(1500)]
        while len(load) < end:
            load.ask(prefixes[draw()] + load.fresh(0, 4))
    return load.trace()


def bursts(seed: int, requests: int) -> Trace:
    load = _Load(seed)
    live = [(load.fresh(5, 25), load.random.randint(5, 60)) for _ in range(50)]
    while len(load) < requests:
        place = load.random.randrange(len(live))
        prefix, left = live[place]
        load.ask(prefix + load.fresh(0, 6))
        live[place] = (prefix, left - 1) if left > 1 else (load.fresh(5, 25), load.random.randint(5, 60))
    return load.trace()


def rounds(seed: int, requests: int) -> Trace:
    load = _Load(seed)
    prefixes = [load.fresh(8, 24) for _ in range(400)]
    while len(load) < requests:
        load.ask(prefixes[len(load) % len(prefixes)] + load.fresh(1, 1))
    return load.trace()


def twice(seed: int, requests: int) -> Trace:
    load = _Load(seed)
    waiting: list[tuple[int, Run]] = []
    while len(load) < requests:
        if waiting and waiting[0][0] <= len(load):
            load.ask(heappop(waiting)[1])
        else:
            prompt = load.fresh(5, 25)
            heappush(waiting, (len(load) + load.random.randint(150, 300), prompt))
            load.ask(prompt)
    return load.trace()


# By seed and number of requests.
GENERATED: Mapping[str, Callable[[int, int], Trace]] = MappingProxyType(
    {
        "agents": agents,
        "busy_agents": busy_agents,
        "chat": chat,
        "recent": recent,
        "documents": documents,
        "phases": phases,
        "bursts": bursts,
        "scans": scans,
        "rounds": rounds,
        "twice": twice,
    }
)
