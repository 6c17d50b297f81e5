"""Servers for `coppice audit isolation`, with a cache for each key, and leaks on request.

`AuditedServer` has virtual time and no sockets; `Tenants` answers over HTTP.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from coppice_audit.core.samples import CACHED_TOKENS, PROMPT_TOKENS, Reading
from tests.fakes.api.openai_server import OpenAIServer, Say, refusal

VICTIM, ATTACKER = "victim-key-1234", "attacker-key-5678"
HIT_S, MISS_S, NOISE_S = 0.010, 0.060, 0.004
NUM_TOKENS = 64


class AuditedServer:
    """`leaks` names what shows other tenants' prompts: time, cached_tokens, header, number, id, error.

    `finds` False: no cache at all.
    """

    def __init__(self, seed: int, *leaks: str, finds: bool = True) -> None:
        self._random = np.random.default_rng(seed)
        self._leaks = frozenset(leaks)
        self._finds = finds
        self._sent: defaultdict[str, dict[str, str]] = defaultdict(dict)  # by key: prompts and the ids of their answers
        self.now_s = 100.0
        self.num_asked = 0
        self.refusals: dict[int, Reading] = {}  # instead of an answer: to the n-th request, from 0

    async def complete(self, key: str, prompt: str, **changes: Any) -> Reading:
        self.num_asked += 1
        self.now_s += 0.001
        if (refusal := self.refusals.get(self.num_asked - 1)) is not None:
            return refusal
        by_others = next((ids[prompt] for one, ids in self._sent.items() if one != key and prompt in ids), "")
        is_hit = self._finds and (prompt in self._sent[key] or ("time" in self._leaks and bool(by_others)))
        took_s = (HIT_S if is_hit else MISS_S) + abs(self._random.normal(0, NOISE_S))
        if changes:
            return Reading(self.now_s, 0.0, self._error(by_others), "400: no such temperature")
        is_own = is_hit and prompt in self._sent[key]
        name = by_others if by_others and "id" in self._leaks else f"cmpl-{self._random.bytes(12).hex()}"
        self._sent[key][prompt] = name
        facts = self._facts(name, is_own=is_own, by_others=bool(by_others))
        return Reading(self.now_s, self.now_s + took_s, facts)

    def _error(self, by_others: str) -> Mapping[str, str]:
        told = " beside what is cached" if by_others and "error" in self._leaks else ""
        return {"status": "400", "body.error.message": f"no such temperature{told}"}

    def _facts(self, name: str, *, is_own: bool, by_others: bool) -> Mapping[str, str]:
        is_cached = is_own or ("cached_tokens" in self._leaks and by_others)
        return {
            "status": "200",
            "id": name,
            "created": str(int(self.now_s)),
            "header date": f"second {int(self.now_s)} of the day",
            "header x-cache": "hit" if by_others and "header" in self._leaks else "miss",
            "header work-ms": f"{self._random.normal(5 if by_others and 'number' in self._leaks else 9, 1):.6f}",
            PROMPT_TOKENS: str(NUM_TOKENS),
            CACHED_TOKENS: str(NUM_TOKENS - 16 if is_cached else 0),
        }


class Tenants(OpenAIServer):
    """Two tenants with a cache each, or one for both."""

    def __init__(self, *, shares: bool = False) -> None:
        super().__init__(keys=frozenset({VICTIM, ATTACKER}))
        self.shares = shares
        self.sent: defaultdict[str, set[str]] = defaultdict(set)
        self.key = ""

    def answer(self, path: str, key: str, body: dict[str, Any]) -> Say:
        self.key = key
        if body.get("temperature", 0) < 0:
            return refusal(400, "temperature must not be negative")
        return super().answer(path, key, body)

    def completion(self, body: dict[str, Any]) -> Say:
        sent = self.sent["all" if self.shares else self.key]
        is_cached = body["prompt"] in sent
        sent.add(body["prompt"])
        return self.generated(body, is_cached=is_cached)
