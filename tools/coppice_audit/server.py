"""The audited server, as two of its tenants reach it."""

from __future__ import annotations

import json
import time
from typing import Any, Protocol

from coppice.errors import UsageError
from coppice_audit.core.samples import Reading
from coppice_audit.facts import facts_of
from coppice_bench.serve.load.answer import Answer
from coppice_bench.serve.load.http import Endpoint, HttpClient

COMPLETIONS = "/v1/completions"


class Completes(Protocol):
    """Whatever can be audited."""

    async def complete(self, key: str, prompt: str, **changes: Any) -> Reading:
        """One token after `prompt`, streamed. `changes` are further fields of the body. Raises nothing."""


class Server:
    """Connections of their own for each key, so that tenants share nothing on the way."""

    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        self._url = url
        self._endpoint = endpoint_of(url)
        self._model = model
        self._timeout_s = timeout_s
        self._clients: dict[str, HttpClient] = {}

    async def complete(self, key: str, prompt: str, **changes: Any) -> Reading:
        answer, sent_s, failure = await self.ask(key, prompt, **changes)
        return reading_of(answer, sent_s, failure)

    async def ask(self, key: str, prompt: str, **changes: Any) -> tuple[Answer, float, str]:
        """The answer, the moment of sending, and what kept it from being answered, where something did."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **changes,
        }
        request = self._endpoint.request("POST", COMPLETIONS, json.dumps(body).encode(), key)
        return await self._send(key, request)

    async def models(self, key: str) -> tuple[Answer, str]:
        """The answer to `/v1/models`, and what kept it from coming."""
        answer, _, failure = await self._send(key, self._endpoint.request("GET", "/v1/models", api_key=key))
        return answer, failure

    def use(self, model: str) -> None:
        """Ask for this model from now on."""
        self._model = model

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    async def _send(self, key: str, request: bytes) -> tuple[Answer, float, str]:
        client = self._clients.get(key) or self._clients.setdefault(key, HttpClient(self._endpoint))
        answer, sent_s = Answer(keeps_text=True), time.monotonic()
        try:
            await client.send(request, answer, self._timeout_s)
        except TimeoutError:
            return answer, sent_s, f"no answer within {self._timeout_s:g} s"
        except OSError as error:
            return answer, sent_s, f"no connection: {error}"
        return answer, sent_s, answer.failure


def endpoint_of(url: str) -> Endpoint:
    """Raises UsageError in the words of this command's flag."""
    try:
        return Endpoint.parse(url)
    except UsageError as error:
        raise UsageError(f"--base-url {url} is no address of a server", hint=error.hint) from None


def reading_of(answer: Answer, sent_s: float, failure: str) -> Reading:
    """What is kept of an answer."""
    try:
        facts = facts_of(answer)
    except (ValueError, TypeError, AttributeError):
        return Reading(sent_s, 0.0, {}, "the answer is none of the OpenAI API")
    if not failure and answer.status != 200:
        failure = f"{answer.status}: {answer.message()}"
    elif not failure and not answer.first_s:
        failure = "an answer without a token"
    return Reading(sent_s, answer.first_s, facts, failure, _retry_s(answer))


def _retry_s(answer: Answer) -> float | None:
    if answer.status not in (429, 503):
        return None
    asked = answer.headers.get(b"retry-after", b"")
    return float(asked) if asked.isdigit() else 1.0
