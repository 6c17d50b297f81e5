"""Request bodies of the OpenAI API to a GenerationSpec, and how the answer is to be shown. Raises ApiError only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from coppice_scheduler.edge.base.errors import ApiError, invalid
from coppice_scheduler.edge.base.tenant_model import ContextLimit
from coppice_scheduler.edge.frontend.generation_spec import (
    MAX_LOGIT_BIASES,
    MAX_PROMPTS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    ChatPrompt,
    Endpoint,
    GenerationSpec,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from coppice_scheduler.edge.http.field_table import Notes, Reading
from coppice_scheduler.edge.http.json_body import Fields, parse_object
from coppice_scheduler.edge.openai.parsing.cache_retention import retain_ms_of, reuse_of
from coppice_scheduler.edge.openai.parsing.fields import CHAT, COMPLETION, STREAM_OPTIONS, STREAM_OPTIONS_REFUSED
from coppice_scheduler.edge.openai.parsing.messages import messages_of
from coppice_scheduler.edge.openai.parsing.output_format import output_format_of
from coppice_scheduler.edge.openai.parsing.template_values import prompt_end_of, template_values_of
from coppice_scheduler.edge.openai.parsing.tools import tool_use_of, tools_of
from coppice_scheduler.edge.text.tokenizer import SLICE, TOKEN_DTYPE
from coppice_scheduler.edge.text.tools.tool import ToolUse


@dataclass(frozen=True, slots=True)
class Presentation:
    """How the answer is shown. None of it reaches the engine."""

    include_usage: bool = False  # of all answers, behind them
    usage_so_far: bool = False  # of its answer in each chunk
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # log-probabilities name tokens `token_id:5`
    include_reasoning: bool = True


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    spec: GenerationSpec
    presentation: Presentation
    ignored: tuple[str, ...]  # fields that were taken without effect


def parse_chat(raw: bytes, reading: Reading) -> ParsedRequest:
    body = parse_object(raw)
    notes = Notes(reading.unknown_fields)
    notes.ignore(*CHAT.check(body, reading.unknown_fields))
    fields = Fields(body)
    messages = messages_of(fields, notes)
    values, not_read = template_values_of(fields, reading)
    notes.ignore(*not_read)
    tools = tools_of(fields, notes)
    chat = ChatPrompt(messages, values, tools, prompt_end_of(fields))
    use = tool_use_of(fields, tools, notes)
    parsed = _parse(fields, (chat,), _chat_logprobs(fields), tuple(notes.ignored), use)
    fields.assert_read(CHAT.supported)
    return parsed


def parse_completion(raw: bytes, reading: Reading) -> ParsedRequest:
    body = parse_object(raw)
    ignored = COMPLETION.check(body, reading.unknown_fields)
    fields = Fields(body)
    parsed = _parse(fields, prompts_of(fields, reading.context), fields.integer("logprobs"), ignored)
    fields.assert_read(COMPLETION.supported)
    return parsed


def _parse(
    fields: Fields,
    prompts: tuple[Prompt, ...],
    num_logprobs: int | None,
    ignored: tuple[str, ...],
    tool_use: ToolUse | None = None,
) -> ParsedRequest:
    streams = fields.flag("stream")
    n, best_of = _choices(fields, streams)
    return ParsedRequest(
        spec=GenerationSpec(
            model=fields.required_text("model"),
            prompts=prompts,
            n=n,
            best_of=best_of,
            uses_beams=_beams(fields, streams),
            length_penalty=_or_default(fields.number("length_penalty"), 1.0),
            max_tokens=_max_tokens(fields),
            min_tokens=fields.integer("min_tokens") or 0,
            temperature=fields.number("temperature"),
            top_p=fields.number("top_p"),
            top_k=fields.integer("top_k"),
            min_p=fields.number("min_p") or 0.0,
            frequency_penalty=fields.number("frequency_penalty") or 0.0,
            presence_penalty=fields.number("presence_penalty") or 0.0,
            repetition_penalty=_or_default(fields.number("repetition_penalty"), 1.0),
            logit_bias=fields.numbers_by_id("logit_bias", MAX_LOGIT_BIASES),
            seed=fields.integer("seed"),
            stop=fields.texts("stop", MAX_STOPS),
            stop_token_ids=fields.integers("stop_token_ids", MAX_STOP_TOKEN_IDS),
            ignore_eos=fields.flag("ignore_eos"),
            include_stop=fields.flag("include_stop_str_in_output"),
            skip_special_tokens=fields.flag("skip_special_tokens", default=True),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=_prompt_logprobs(fields, streams),
            echo=fields.flag("echo"),
            priority=fields.integer("priority") or 0,
            timeout_s=fields.number("timeout"),
            reuse=reuse_of(fields),
            retain_ms=retain_ms_of(fields),
            output_format=output_format_of(fields),
            tool_use=tool_use,
            cache_salt=fields.text("cache_salt"),
            streams=streams,
            endpoint=Endpoint.CHAT if any(isinstance(each, ChatPrompt) for each in prompts) else Endpoint.COMPLETIONS,
        ),
        presentation=_presentation(fields, streams),
        ignored=ignored,
    )


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def _choices(fields: Fields, streams: bool) -> tuple[int, int | None]:
    """`n` and `best_of`."""
    n, best_of = fields.integer("n"), fields.integer("best_of")
    n = 1 if n is None else n
    if streams and best_of is not None and best_of != n:
        raise invalid(
            f"best_of is {best_of} and n is {n}: which answers are the best is known at their end. Leave out stream, "
            "or best_of.",
            param="best_of",
        )
    return n, best_of


def _beams(fields: Fields, streams: bool) -> bool:
    wanted = fields.flag("use_beam_search")
    if streams and wanted:
        raise invalid("The answers of a beam search are known at its end; leave out stream.", param="stream")
    return wanted


def _prompt_logprobs(fields: Fields, streams: bool) -> int | None:
    number = fields.integer("prompt_logprobs")
    if streams and number is not None:
        raise invalid("prompt_logprobs are told in whole answers; leave out stream.", param="prompt_logprobs")
    return number


def _chat_logprobs(fields: Fields) -> int | None:
    num_top = fields.integer("top_logprobs")
    if not fields.flag("logprobs"):
        if num_top:
            raise invalid("top_logprobs is only for logprobs: true.", param="top_logprobs")
        return None
    return num_top or 0


def _max_tokens(fields: Fields) -> int | None:
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise invalid(
            f"max_tokens ({old}) and max_completion_tokens ({new}) mean the same and differ; send one.",
            param="max_tokens",
        )
    return old if new is None else new


def _presentation(fields: Fields, streams: bool) -> Presentation:
    return Presentation(
        *_usage_options(fields, streams),
        fields.flag("return_token_ids"),
        fields.flag("return_tokens_as_token_ids"),
        fields.flag("include_reasoning", default=True),
    )


def _usage_options(fields: Fields, streams: bool) -> tuple[bool, bool]:
    """`include_usage` and `continuous_usage_stats`."""
    options = fields.get("stream_options")
    if options is None:
        return False, False
    if not isinstance(options, dict):
        raise fields.wrong("stream_options", "an object")
    inner = Fields(options, "stream_options.")
    for name, value in options.items():
        param = f"stream_options.{name[:100]}"
        if name in STREAM_OPTIONS_REFUSED:
            inner.flag(name)
            STREAM_OPTIONS_REFUSED[name].check(param, value)
        elif name not in STREAM_OPTIONS:
            message = f"{param} is not supported; known: {', '.join(STREAM_OPTIONS)}."
            raise invalid(message, param=param, code="unsupported_parameter")
    if not streams:
        raise invalid("stream_options is only for stream: true.", param="stream_options")
    include_usage, so_far = (inner.flag(name) for name in STREAM_OPTIONS)
    return include_usage, so_far


# --- prompts ------------------------------------------------------------------------------------------------------


def prompts_of(fields: Fields, context: ContextLimit) -> tuple[Prompt, ...]:
    """Text, a list of texts, token ids, or a list of lists of token ids: at most as many as the tenant may send."""
    value = fields.get("prompt")
    if value is None:
        raise invalid("prompt is required.", param="prompt", code="missing")
    if isinstance(value, str):
        return (TextPrompt(value),)
    if not isinstance(value, list):
        raise fields.wrong("prompt", "a string, a list of strings, token ids or a list of those")
    if not value:
        raise invalid("prompt is an empty list.", param="prompt", code="empty")
    if type(value[0]) is int:
        return (_token_prompt(value, context),)
    if len(value) > MAX_PROMPTS:
        raise invalid(f"prompt has {len(value)} entries; at most {MAX_PROMPTS} are taken.", param="prompt")
    if all(isinstance(item, str) for item in value):
        return tuple(TextPrompt(item) for item in value)
    if all(isinstance(item, list) for item in value):
        return tuple(_token_prompt(item, context) for item in value)
    raise fields.wrong("prompt", "a string, a list of strings, token ids or a list of those")


def _token_prompt(ids: list[Any], context: ContextLimit) -> TokenPrompt:
    """The length is looked at before the entries are. Raises ApiError."""
    if len(ids) >= context.num_tokens:
        raise context.too_long(str(len(ids)), "prompt")
    return TokenPrompt(packed_ids(ids, "prompt"))


def packed_ids(ids: list[Any], param: str) -> bytes:
    """Token ids as packed u32. Raises ApiError that names `param`."""
    return b"".join(_packed_slice(ids[at : at + SLICE], param) for at in range(0, len(ids), SLICE))


def _packed_slice(ids: list[Any], param: str) -> bytes:
    if set(map(type, ids)) - {int}:
        raise invalid(f"{param} has a token id that is no integer.", param=param, code="invalid_token_id")
    try:
        array = np.array(ids, dtype=np.int64)
    except OverflowError:
        raise _no_token_id("larger than 64 bits", param) from None
    if array.size and (int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF):
        raise _no_token_id(str(int(array.min() if int(array.min()) < 0 else array.max())), param)
    return array.astype(TOKEN_DTYPE).tobytes()


def _no_token_id(what: str, param: str) -> ApiError:
    message = f"{param} has a token id that is {what}; they are integers from 0, below the size of the vocabulary."
    return invalid(message, param=param, code="invalid_token_id")
