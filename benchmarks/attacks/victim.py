"""Who is attacked: a few tokens for a short prompt, at fixed times, whatever became of the request before."""

from __future__ import annotations

import asyncio
import ssl
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from coppice_bench.stack import MODEL_NAME, Stack

EVERY_S = 0.2  # a request
TAIL_REQUESTS = 200  # with fewer the 99th percentile is one of the two largest, and is not told
_TIMEOUT_S = 60.0


@dataclass
class Seen:
    """Of the victim, in one kind of phase."""

    first_token_ms: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        times = sorted(self.first_token_ms)
        shown: dict[str, Any] = {"requests": len(times), "failed": self.failures.total()}
        if self.failures:
            shown["failures"] = dict(self.failures)
        if times:
            shown |= {"p50_ms": statistics.median(times), "max_ms": times[-1]}
        if len(times) >= TAIL_REQUESTS:
            shown["p99_ms"] = times[round(0.99 * (len(times) - 1))]
        return shown


class Victim:
    """Of one door. Over TLS each request has a connection, so that it shakes hands, too."""

    def __init__(self, stack: Stack, key: str) -> None:
        keeps = 0 if stack.ca else 20
        self._http = httpx.AsyncClient(
            base_url=stack.url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=_TIMEOUT_S,
            verify=ssl.create_default_context(cafile=stack.ca),
            limits=httpx.Limits(max_keepalive_connections=keeps),
        )
        self._number = 0

    async def ask_for(self, seconds: float, seen: Seen) -> None:
        running: list[asyncio.Task[None]] = []
        begin_s = time.monotonic()
        while (now_s := time.monotonic()) < begin_s + seconds:
            running.append(asyncio.create_task(self._ask(seen)))
            await asyncio.sleep(max(0.0, begin_s + len(running) * EVERY_S - now_s))
        await asyncio.gather(*running)

    async def _ask(self, seen: Seen) -> None:
        self._number += 1
        body = {"model": MODEL_NAME, "prompt": f"{self._number} What does sorted do?", "max_tokens": 4, "stream": True}
        begin_s = time.monotonic()
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    seen.failures[str(answer.status_code)] += 1
                    return
                is_first = True
                async for line in answer.aiter_lines():
                    if is_first and line.startswith("data: "):
                        seen.first_token_ms.append((time.monotonic() - begin_s) * 1e3)
                        is_first = False
        except httpx.HTTPError as error:
            seen.failures[type(error).__name__] += 1

    async def close(self) -> None:
        await self._http.aclose()
