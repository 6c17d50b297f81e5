"""Before an audit: is there a server, does it take both keys, does it stream, how long is a word in its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coppice.errors import CoppiceError, UnavailableError, UsageError
from coppice_audit.core.plan import prompts
from coppice_audit.options import KEY_VARIABLES, PROMPT_TOKENS, AuditOptions
from coppice_audit.server import COMPLETIONS, Server
from coppice_bench.serve.load.answer import Answer

_FEW_WORDS, _MANY_WORDS = 16, 64
_SALT = 1 << 62  # beside all seeds of audits


@dataclass(frozen=True, slots=True)
class Target:
    """What will be asked: which model, with how many words."""

    model: str
    prompt_tokens: int
    num_words: int


async def look(server: Server, options: AuditOptions, seed: int) -> Target:
    """Raises UnavailableError, UsageError or CoppiceError that say what is wrong with server, key, model or length."""
    listed = [await _models(server, options, tenant) for tenant in ("victim", "attacker")]
    entry = _choose(listed, options.model)
    model, context = str(entry["id"]), int(entry.get("max_model_len") or 0)
    server.use(model)
    few, many = [await _prompt_tokens(server, options, seed, words) for words in (_FEW_WORDS, _MANY_WORDS)]
    tokens_per_word = max(0.01, (many - few) / (_MANY_WORDS - _FEW_WORDS))
    wanted = options.prompt_tokens or min(PROMPT_TOKENS, context // 2 or PROMPT_TOKENS)
    if context and wanted >= context:
        raise UsageError(f"--prompt-tokens {wanted} does not fit {model}, whose context is {context} tokens")
    extra = max(0.0, few - _FEW_WORDS * tokens_per_word)
    return Target(model, wanted, max(1, round((wanted - extra) / tokens_per_word)))


async def _models(server: Server, options: AuditOptions, tenant: str) -> list[dict[str, Any]]:
    key = options.victim_key if tenant == "victim" else options.attacker_key
    answer, failure = await server.models(key)
    _refuse_failures(options, tenant, answer, failure, "/v1/models")
    try:
        return [{"id": entry["id"], **entry} for entry in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise CoppiceError(
            f"{options.base_url} is no server of the OpenAI API: /v1/models lists no models", hint="check --base-url"
        ) from None


def _choose(listed: list[list[dict[str, Any]]], wanted: str) -> dict[str, Any]:
    """A model that both tenants see."""
    others = {str(entry["id"]) for entry in listed[1]}
    both = [entry for entry in listed[0] if str(entry["id"]) in others]
    names = [str(entry["id"]) for entry in both]
    if not both:
        raise CoppiceError("no model is served to both tenants", hint="is a worker running?")
    if wanted and wanted not in names:
        raise UsageError(f"--model {wanted} is not served to both tenants", hint=f"there is {', '.join(names)}")
    return both[names.index(wanted)] if wanted else both[0]


async def _prompt_tokens(server: Server, options: AuditOptions, seed: int, num_words: int) -> int:
    prompt = next(prompts(seed ^ _SALT, num_words))
    answer, _, failure = await server.ask(options.attacker_key, prompt)
    _refuse_failures(options, "attacker", answer, failure, COMPLETIONS)
    if not answer.is_stream:
        raise CoppiceError(
            f"{options.base_url} does not stream: {COMPLETIONS} with stream=true answered no event stream",
            hint="times to the first token need a server, and a proxy before it, that streams",
        )
    tokens = int(answer.usage().get("prompt_tokens") or 0)
    if not tokens or not answer.first_s:
        raise CoppiceError(f"{options.base_url}: a first request had no token or no usage (stream_options)")
    return tokens


def _refuse_failures(options: AuditOptions, tenant: str, answer: Answer, failure: str, path: str) -> None:
    if failure and not answer.status:
        hint = "check --base-url; is the server running?"
        raise UnavailableError(f"no answer from {options.base_url}: {failure}", hint=hint)
    if answer.status in (401, 403):
        hint = f"check --{tenant}-key-file or {KEY_VARIABLES[tenant]}"
        raise UsageError(f"{options.base_url} does not take the {tenant}'s key: {answer.message()}", hint=hint)
    if failure or answer.status != 200:
        raise CoppiceError(
            f"{options.base_url}: {path} answered {answer.status}: {answer.message()}", hint="check --base-url"
        )
