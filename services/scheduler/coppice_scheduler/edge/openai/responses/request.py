"""The body of a response to a GenerationSpec. Raises ApiError only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coppice.messages.sampling import LOGPROBS_MAX
from coppice.settings import nearest
from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.frontend.generation_spec import ChatPrompt, Endpoint, GenerationSpec
from coppice_scheduler.edge.http.field_table import Reading
from coppice_scheduler.edge.http.json_body import Fields, parse_object
from coppice_scheduler.edge.openai.parsing.cache_retention import retain_ms_of, reuse_of
from coppice_scheduler.edge.openai.parsing.template_values import MAX_EFFORT_CHARS
from coppice_scheduler.edge.openai.responses.fields import INCLUDABLE, INCLUDE_NO_EFFECT, LOGPROBS, RESPONSES
from coppice_scheduler.edge.openai.responses.input_items import ItemNotes, conversation_of
from coppice_scheduler.edge.openai.responses.tools import PARALLEL, TOOL_CHOICE, tool_use_of, tools_of
from coppice_scheduler.edge.text.chat import effort_of_template, switch_of
from coppice_scheduler.edge.text.output_format import FormatKind, OutputFormat

MAX_INCLUDES = 16
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
FORMATS = ("text", "json_object", "json_schema")
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    spec: GenerationSpec
    ignored: tuple[str, ...]  # fields that were taken without effect
    told_again: Body  # what the answer repeats of the request


def parse_response(raw: bytes, reading: Reading) -> ParsedResponse:
    body = parse_object(raw)
    notes = ItemNotes(reading.unknown_fields)
    notes.ignore(*RESPONSES.check(body, reading.unknown_fields))
    fields = Fields(body)
    tools = tools_of(fields, notes)
    messages = conversation_of(fields, notes)
    values, effort = _reasoning(fields, reading, notes)
    wanted, told_format = _text(fields, notes)
    num_logprobs = _logprobs(fields, notes)
    spec = GenerationSpec(
        model=fields.required_text("model"),
        prompts=(ChatPrompt(messages, values, tools),),
        max_tokens=_max_output_tokens(fields),
        fills_context=True,
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        top_k=fields.integer("top_k"),
        seed=fields.integer("seed"),
        num_logprobs=num_logprobs,
        priority=fields.integer("priority") or 0,
        timeout_s=fields.number("timeout"),
        reuse=reuse_of(fields),
        retain_ms=retain_ms_of(fields),
        output_format=wanted,
        tool_use=tool_use_of(fields, tools, notes),
        cache_salt=fields.text("cache_salt"),
        streams=_streams(fields, notes),
        endpoint=Endpoint.RESPONSES,
    )
    told_again: Body = {
        "max_output_tokens": spec.max_tokens,
        "metadata": _metadata(fields),
        "parallel_tool_calls": fields.flag(PARALLEL, default=True),
        "reasoning": {"effort": effort, "summary": None},
        "temperature": spec.temperature,
        "text": {"format": told_format},
        "tool_choice": body.get(TOOL_CHOICE) or "auto",
        "top_logprobs": num_logprobs or 0,
        "top_p": spec.top_p,
    }
    fields.assert_read(RESPONSES.supported)
    return ParsedResponse(spec, tuple(notes.ignored), told_again)


def _max_output_tokens(fields: Fields) -> int | None:
    value = fields.integer("max_output_tokens")
    if value is not None and value < 1:
        raise invalid(f"max_output_tokens is {value}; it must be at least 1.", param="max_output_tokens")
    return value


def _inner(fields: Fields, name: str, known: tuple[str, ...], notes: ItemNotes, *no_effect: str) -> Fields | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fields.wrong(name, "an object")
    notes.only(value, known, frozenset(no_effect), name, name)
    return Fields(value, f"{name}.")


def _streams(fields: Fields, notes: ItemNotes) -> bool:
    streams, options = fields.flag("stream"), fields.get("stream_options")
    if options is not None:
        inner = _inner(fields, "stream_options", (), notes, "include_obfuscation")
        assert inner is not None
        inner.flag("include_obfuscation")
    return streams


def _reasoning(fields: Fields, reading: Reading, notes: ItemNotes) -> tuple[dict[str, Any], str | None]:
    """Values for the chat template, and the effort that was asked for.

    Agents send it to any model; where the template has no place for it, it has no effect.
    """
    inner = _inner(fields, "reasoning", ("effort",), notes, "summary", "generate_summary", "context", "mode")
    effort = inner.text("effort") if inner is not None else None
    if effort is None:
        return {}, None
    if not 1 <= len(effort) <= MAX_EFFORT_CHARS:
        message = f"reasoning.effort has {len(effort)} characters; it must have 1 to {MAX_EFFORT_CHARS}."
        raise invalid(message, param="reasoning.effort")
    if "reasoning_effort" in reading.template_variables:
        return {"reasoning_effort": effort_of_template(effort)}, effort
    switch = switch_of(reading.template_variables)
    if switch is not None:
        return {switch: effort != "none"}, effort
    notes.ignore("reasoning.effort")
    return {}, effort


def _text(fields: Fields, notes: ItemNotes) -> tuple[OutputFormat | None, Body]:
    """The form of the answer, and how it is told again."""
    inner = _inner(fields, "text", ("format",), notes, "verbosity")
    value = inner.get("format") if inner is not None else None
    if inner is None or value is None:
        return None, {"type": "text"}
    if not isinstance(value, dict):
        raise inner.wrong("format", "an object")
    where = "text.format"
    form = Fields(value, f"{where}.")
    kind = form.required_text("type")
    if kind not in FORMATS:
        message = f"{where}.type is {kind[:50]!r}; supported are {', '.join(FORMATS)}."
        raise invalid(message, param=f"{where}.type", code="unsupported_parameter")
    known = ("type", "name", "description", "schema", "strict") if kind == "json_schema" else ("type",)
    notes.only(value, known, frozenset(), where, where)
    if kind != "json_schema":
        wanted = OutputFormat(FormatKind.JSON_OBJECT, "", where) if kind == "json_object" else None
        return wanted, {"type": kind}
    name = form.text("name")
    form.text("description"), form.flag("strict")
    schema = form.json_object("schema")
    if schema is None:
        raise invalid(f"{where}.schema is required.", param=f"{where}.schema", code="missing")
    # The schema itself is not told again: nothing that is large is kept while the answer is computed.
    return OutputFormat(FormatKind.JSON, schema, f"{where}.schema"), {"type": kind, "name": name or "", "strict": True}


def _logprobs(fields: Fields, notes: ItemNotes) -> int | None:
    """Likeliest tokens to tell beside each of the text's; None: no log-probabilities. Others to include are noted."""
    names = fields.texts("include", MAX_INCLUDES)
    for name in names:
        if name in INCLUDE_NO_EFFECT:
            notes.ignore(f"include.{name}")
        elif name != LOGPROBS:
            message = f"include has {name[:100]!r}, which is not supported; {nearest(name[:100], INCLUDABLE)}"
            raise invalid(message, param="include", code="unsupported_parameter")
    num_top = fields.integer("top_logprobs") or 0
    if not 0 <= num_top <= LOGPROBS_MAX:
        raise invalid(f"top_logprobs is {num_top}; it must be from 0 to {LOGPROBS_MAX}.", param="top_logprobs")
    if LOGPROBS in names:
        return num_top
    if num_top:
        notes.ignore("top_logprobs")
    return None


def _metadata(fields: Fields) -> Mapping[str, str]:
    """Labels of the caller's own, which the answer tells again."""
    value = fields.at_most("metadata", MAX_METADATA, "entries")
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(
        isinstance(text, str) and len(name) <= MAX_METADATA_KEY and len(text) <= MAX_METADATA_VALUE
        for name, text in value.items()
    ):
        message = (
            f"metadata must be an object of strings; names have {MAX_METADATA_KEY} characters at most, "
            f"values {MAX_METADATA_VALUE}."
        )
        raise invalid(message, param="metadata")
    return value
