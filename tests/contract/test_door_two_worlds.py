"""What a tenant is told at the front door does not depend on what others say; a strict one's, not on whether they are
there.

One tenant sends a list of calls. In each world another tenant does something before each of them: it sends the same,
with the same names, salts, schemas and texts, or other ones, or nothing; it leaves bodies unfinished and streams open.
Status, headers and body of all answers must be equal, but for what is random or a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from random import Random
from select import select
from typing import Any

import pytest

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.state.request import Request
from coppice_scheduler.edge.frontend.body_budget import SMALL_BYTES, BodyBudget
from coppice_scheduler.edge.frontend.door_limits import DoorLimits
from tests.fakes.api.engine import Script, echo
from tests.fakes.api.rest import MODEL, Served, serving
from tests.fakes.waiting import wait_for

OPEN_TOKENS = 99  # of a stream that the victim leaves open
LARGE = SMALL_BYTES + 60_000  # bytes of a body that the budget counts
ROUTES = {
    "chat": "/v1/chat/completions",
    "text": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count": "/v1/messages/count_tokens",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
SECRETS = ("swordfish", "tuna")  # the one is what the attacker guesses
Heard = list[tuple[object, ...]]


def directory(mode: str) -> TenantDirectory:
    """The attacker, whose mode it is, and the victim: with limits that the lists of calls reach."""
    own: dict[str, Any] = {"guarantee_share": 0.5} if mode == "strict" else {}
    limits: dict[str, Any] = {"requests_per_minute": 40}
    attacker = Tenant(id="attacker", api_key_sha256=(digest_of_key("key-attacker"),), mode=mode, **own, **limits)  # type: ignore[arg-type]
    return TenantDirectory([attacker, Tenant(id="victim", api_key_sha256=(digest_of_key("key-victim"),), **limits)])


def call(rng: Random, word: str) -> tuple[str, dict[str, Any], str]:
    """Route, body and request id of one call; `word` stands in all that a front door might remember."""
    kind = rng.choice(sorted(ROUTES))
    schema = {"type": "object", "properties": {word: {"type": "integer"}}, "required": [word]}
    said = [{"role": "user", "content": f"my word is {word}"}]
    bodies: dict[str, dict[str, Any]] = {
        "chat": {"messages": said, "cache_salt": word, "prompt_cache_key": word, "max_tokens": 8},
        "text": {"prompt": f"my word is {word}", "cache_salt": word, "max_tokens": 8},
        "responses": {"input": f"my word is {word}", "prompt_cache_key": word, "max_output_tokens": 8},
        "messages": {"messages": said, "max_tokens": 8},
        "count": {"messages": said},
        "tokenize": {"prompt": f"my word is {word}"},
        "detokenize": {"tokens": [len(word), 7, 9]},
    }
    body = {"model": MODEL, **bodies[kind]}
    if kind in ("chat", "text") and rng.random() < 0.3:
        body["structured_outputs"] = {"json": schema}
    if kind == "chat" and rng.random() < 0.3:
        body["tools"] = [{"type": "function", "function": {"name": word, "parameters": schema}}]
    if rng.random() < 0.2:
        body["metadata" if kind in ("chat", "responses") else "no_such_field"] = {"word": word}
    if rng.random() < 0.3 and kind in ("chat", "text", "responses", "messages"):
        body["stream"] = True
    if rng.random() < 0.2:
        body["prompt" if kind in ("text", "tokenize") else "user"] = word * (LARGE // len(word))
    return kind, body, f"id-{word}-{rng.randrange(3)}"


class Victim:
    """What the other tenant does in one world."""

    def __init__(self, served: Served, seed: int, word: str) -> None:
        self._served, self._rng, self._word = served, Random(f"victim of {seed}"), word
        self._held = ExitStack()

    def act(self) -> None:
        rng, served = self._rng, self._served
        kind, body, name = call(rng, self._word)
        deed = rng.choice(("call", "call", "unfinished", "open", "abort"))
        if deed == "call":
            served.post(body, ROUTES[kind], headers=headers("victim", name))
        elif deed == "abort":
            served.http.post(f"/v1/requests/{name}/abort", headers=headers("victim", "of-abort"))
        elif deed == "open":
            stream = {"model": MODEL, "prompt": f"hang {self._word}", "stream": True, "max_tokens": OPEN_TOKENS}
            running = served.engine.num_running
            self._hold(json.dumps(stream).encode(), name, lambda: served.engine.num_running > running)
        else:
            held = served.frontdoor.bodies._held
            target = held["victim"] + LARGE - SMALL_BYTES
            self._hold(b"x" * LARGE, name, lambda: held["victim"] >= target, length=2 * LARGE)

    def _hold(self, body: bytes, name: str, is_held: Callable[[], bool], **length: int) -> None:
        """Until the end of the world, unless it is refused."""
        given = "".join(f"{key}: {value}\r\n" for key, value in headers("victim", name).items())
        connection = self._held.enter_context(self._served.begin(body, headers=given, **length))
        wait_for(lambda: is_held() or select([connection], [], [], 0)[0], "it to be held, or refused")

    def leave(self) -> None:
        self._held.close()


def headers(tenant: str, name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-{tenant}", "x-request-id": name}


def hangs(request: Request) -> Script:
    if request.max_new_tokens == OPEN_TOKENS:
        return Script([], hangs=True)
    return echo(request)


def heard(seed: int, mode: str, victim_word: str | None) -> Heard:
    """By the attacker, in one world. None: the victim is not there."""
    rng = Random(f"attacker of {seed}")
    budget = BodyBudget(
        tenant_bytes=8 * LARGE, own_bytes=40_000, shared_bytes=30_000
    )  # one large body takes of both, a second finds no room
    found: Heard = []
    with serving(directory(mode), bodies=budget, context=1 << 20) as served:
        served.engine.script = hangs
        served.frontdoor._limits = DoorLimits(clock_ns=lambda: 0)  # nothing comes back, however long a world takes
        victim = Victim(served, seed, victim_word) if victim_word is not None else None
        try:
            for _ in range(50):
                if victim is not None:
                    victim.act()
                kind, body, name = call(rng, SECRETS[0])
                answer = served.post(body, ROUTES[kind], headers=headers("attacker", name))
                found.append((kind, answer.status_code, shown(answer.headers), constant(answer.text)))
                if rng.random() < 0.2:
                    answer = served.http.post(f"/v1/requests/{name}/abort", headers=headers("attacker", "of-abort"))
                    found.append(("abort", answer.status_code, constant(answer.text)))
        finally:
            if victim is not None:
                victim.leave()
    return found


TIMES = (
    *("date", "retry-after", "retry-after-ms", "x-ratelimit-reset-requests", "x-ratelimit-reset-tokens"),
    *("anthropic-ratelimit-requests-reset", "anthropic-ratelimit-tokens-reset"),
)
RANDOM = re.compile(r"[0-9a-f]{16,32}\b|(?<=\"created\":)[0-9]+|(?<=\"created_at\":)[0-9]+|\b[0-9.]+ (?:ms|s)\b")


def shown(given: Any) -> dict[str, str]:
    return {name: value for name, value in given.items() if name not in TIMES}


def constant(text: str) -> str:
    return RANDOM.sub("*", text)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.wide) for seed in range(1, 12))])
def test_nobody_hears_what_another_says(seed: int) -> None:
    for mode in ("private", "strict"):
        same, other = heard(seed, mode, SECRETS[0]), heard(seed, mode, SECRETS[1])
        assert len({status for _, status, *_ in same}) >= 3, "some calls fail, each in another way"
        assert same == other


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.wide) for seed in range(2, 12))])
def test_a_strict_tenant_does_not_hear_whether_another_is_there(seed: int) -> None:
    assert heard(seed, "strict", SECRETS[1]) == heard(seed, "strict", None)
