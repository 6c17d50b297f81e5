"""Attacks by requests of HTTP: each loop sends one, reads its answer, and sends the next."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx

from coppice_bench.stack import MODEL_NAME

if TYPE_CHECKING:
    from benchmarks.attacks.attacker import Target

NUM_BYTES = 1_900_000  # of a large body; 2 MiB are taken
CONTEXT = 1 << 19  # tokens that the model takes: 1.9 MB of text or ids are not refused by their length alone
COMPLETIONS = "/v1/completions"
_TIMEOUT_S = 120.0
_PAUSE_S = 0.05  # of a loop whose request came to nothing
Call = tuple[str, bytes]  # path and body


def _call(path: str, **body: Any) -> Call:
    """Without spaces: 2 MiB hold more of what matters."""
    return path, json.dumps({"model": MODEL_NAME, **body}, separators=(",", ":")).encode()


async def fair(target: Target, told: Counter[str]) -> None:
    """Ordinary requests."""
    numbers = itertools.count()
    calls = (_call(COMPLETIONS, prompt=f"{number} A list is", max_tokens=64) for number in numbers)
    await _loops(16, target, told, calls)


async def texts(target: Target, told: Counter[str]) -> None:
    """To be tokenised, and answered with as many ids."""
    text = "the quick brown fox jumps over the lazy dog " * (NUM_BYTES // 44)
    await _loops(8, target, told, itertools.repeat(_call("/tokenize", prompt=text)))


async def ids(target: Target, told: Counter[str]) -> None:
    """To be read whole: that the answer has no room is found out at the end."""
    prompt = [100 + number * 7919 % 3900 for number in range(NUM_BYTES // 5)]
    await _loops(8, target, told, itertools.repeat(_call(COMPLETIONS, prompt=prompt, max_tokens=CONTEXT)))


async def refused(target: Target, told: Counter[str]) -> None:
    """A wrong field, and a text that has to be tokenised before it is refused."""
    wrong = _call(COMPLETIONS, prompt="x", temperature="hot")
    long = _call(COMPLETIONS, prompt="x " * 20_000, max_tokens=CONTEXT)
    await _loops(64, target, told, itertools.cycle((wrong, long)))


async def strangers(target: Target, told: Counter[str]) -> None:
    await _loops(64, target, told, itertools.repeat(_call(COMPLETIONS, prompt="x")), key="nobody")


async def answers(target: Target, told: Counter[str]) -> None:
    await _loops(64, target, told, itertools.repeat(_call(COMPLETIONS, prompt=[[5]] * 128, max_tokens=1)))


async def grammars(target: Target, told: Counter[str]) -> None:
    """Each another one, as what is known is not compiled again: long to compile, wide to follow, and one too deep."""

    def forms() -> Iterator[dict[str, Any]]:
        for number in itertools.count():
            yield {"json": {"type": "integer", "multipleOf": 10_000 + number % 10_000}}
            yield {"json": {"enum": [f"v{number}-{value:05}" for value in range(4_000)]}}
            yield {"regex": f"(?s:.*)a{number}(?s:.){{300}}b"}
            yield {"regex": f"{number}" + "(" * 5_000 + "a" + ")" * 5_000}

    calls = (_call(COMPLETIONS, prompt="x", max_tokens=32, structured_outputs=form) for form in forms())
    await _loops(8, target, told, calls)


async def wrong_grammars(target: Target, told: Counter[str]) -> None:
    def forms() -> Iterator[dict[str, Any]]:
        for number in itertools.count():
            yield {"json": {"type": f"nonsense{number}"}}
            yield {"regex": f"(a{number}"}
            yield {"grammar": f"start: nothing{number}"}

    calls = (_call(COMPLETIONS, prompt="x", max_tokens=4, structured_outputs=form) for form in forms())
    await _loops(64, target, told, calls)


async def _loops(
    at_once: int, target: Target, told: Counter[str], calls: Iterator[Call], key: str | None = None
) -> None:
    headers = {"Authorization": f"Bearer {target.key if key is None else key}", "Content-Type": "application/json"}

    async def again_and_again(http: httpx.AsyncClient) -> None:
        for path, body in calls:  # of which each loop takes the next
            try:
                told[_said(await http.post(path, content=body))] += 1
            except httpx.HTTPError as error:
                told[type(error).__name__] += 1
                await asyncio.sleep(_PAUSE_S)

    verify = ssl.create_default_context(cafile=target.ca or None)
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(
        base_url=target.url, headers=headers, timeout=_TIMEOUT_S, limits=limits, verify=verify
    ) as http:
        await asyncio.gather(*(again_and_again(http) for _ in range(at_once)))


def _said(answer: httpx.Response) -> str:
    if answer.status_code == 200:
        return "200"
    error = answer.json()["error"]
    return f"{answer.status_code} {error['code']} {error['param']}"
