"""Before a load: is there a server, does it take the keys, which model, and how long is a word in its tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from coppice.errors import CoppiceError, UnavailableError, UsageError
from coppice_bench.serve.load.answer import Answer
from coppice_bench.serve.load.http import Endpoint, HttpClient
from coppice_bench.serve.load.prompts import Bodies, Content, Model
from coppice_bench.serve.options import ServeOptions, TenantKey

_TIMEOUT_S = 60.0
_CALIBRATION_WORDS = (16, 80)


def look(options: ServeOptions) -> Model:
    """Raises UnavailableError, UsageError or CoppiceError that say what is wrong with the server, a key, the model."""
    return asyncio.run(_look(options))


async def _look(options: ServeOptions) -> Model:
    client = HttpClient(Endpoint.parse(options.url))
    try:
        model = await find_model(client, options)
        return model if options.sends_token_ids else await _measure_words(client, options, model)
    finally:
        client.close()


async def find_model(client: HttpClient, options: ServeOptions) -> Model:
    """The model that will be asked for, which every key can see. Raises as `look` does."""
    found = [await _models(client, options, sender) for sender in options.senders]
    return _choose(found[0], options.model)


async def _models(client: HttpClient, options: ServeOptions, sender: TenantKey) -> list[dict[str, Any]]:
    answer = await _ask(client, options, client.endpoint.request("GET", "/v1/models", api_key=sender.api_key))
    if answer.status in (401, 403):
        who = f"of --tenant {sender.name}" if options.tenants else "in --api-key"
        refused = f"{options.url} does not take the key {who}" if sender.api_key else f"{options.url} asks for a key"
        raise UsageError(f"{refused}: {answer.message()}", hint="--api-key KEY, or --tenant NAME:KEY")
    if answer.status != 200:
        raise CoppiceError(f"{options.url}: /v1/models answered {answer.status}: {answer.message()}")
    try:
        return [dict(entry) for entry in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise CoppiceError(f"{options.url} is no server of the OpenAI API: /v1/models lists no models") from None


def _choose(models: list[dict[str, Any]], wanted: str) -> Model:
    names = [str(entry.get("id")) for entry in models]
    if not names:
        raise CoppiceError("the server has no model", hint="is a worker running?")
    if wanted and wanted not in names:
        raise UsageError(f"--model {wanted} is not served there", hint=f"it has {', '.join(names)}")
    entry = models[names.index(wanted)] if wanted else models[0]
    return Model(str(entry["id"]), int(entry.get("max_model_len") or 0))


async def _measure_words(client: HttpClient, options: ServeOptions, model: Model) -> Model:
    """Two prompts of different length tell what a word costs, whatever is added to each prompt."""
    content = Content(0, replace(model, words_per_token=1.0), as_ids=False)
    bodies = Bodies(model.name, options.api, options.temperature)
    lengths = []
    for number, words in enumerate(_CALIBRATION_WORDS):
        body = bodies.single(content.run(0, number, words), 1)
        request = client.endpoint.request("POST", bodies.path, body, options.senders[0].api_key)
        answer = await _ask(client, options, request)
        usage = answer.usage()
        if answer.status != 200 or not usage:
            raise CoppiceError(f"{options.url}: a first request failed ({answer.status}): {answer.message()}")
        lengths.append(int(usage["prompt_tokens"]))
    few, many = _CALIBRATION_WORDS
    tokens_per_word = max(0.01, (lengths[1] - lengths[0]) / (many - few))
    return replace(model, words_per_token=1 / tokens_per_word)


async def _ask(client: HttpClient, options: ServeOptions, request: bytes) -> Answer:
    answer = Answer()
    hint = "is it running? coppice up starts a stack"
    try:
        await client.send(request, answer, min(_TIMEOUT_S, options.timeout_s))
    except TimeoutError:
        raise UnavailableError(f"{options.url} does not answer", hint=hint) from None
    except OSError as error:
        raise UnavailableError(f"no answer from {options.url}: {error}", hint=hint) from None
    if answer.failure:
        raise UnavailableError(f"{options.url} does not answer as a server of the OpenAI API: {answer.failure}")
    return answer
