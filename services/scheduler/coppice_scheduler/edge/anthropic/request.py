"""Bodies of the Anthropic API to a GenerationSpec. Raises ApiError only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coppice_scheduler.edge.anthropic.blocks import Block, Notes
from coppice_scheduler.edge.anthropic.conversation import conversation_of
from coppice_scheduler.edge.anthropic.fields import COUNT, MESSAGES
from coppice_scheduler.edge.anthropic.tools import tool_use_of, tools_of
from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.frontend.generation_spec import MAX_STOPS, ChatPrompt, GenerationSpec
from coppice_scheduler.edge.http.field_table import FieldTable, Reading
from coppice_scheduler.edge.http.json_body import Fields, parse_object
from coppice_scheduler.edge.text.chat import SWITCHES
from coppice_scheduler.edge.text.output_format import FormatKind, OutputFormat
from coppice_scheduler.edge.text.tools.tool import ToolUse

THINKING, OUTPUT_CONFIG = "thinking", "output_config"
KINDS_OF_THINKING = ("enabled", "adaptive", "between_tools", "disabled")
DISPLAYS = ("summarized", "omitted")
EFFORTS = ("low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    spec: GenerationSpec
    ignored: tuple[str, ...]  # fields that were taken without effect
    shows_thinking: bool  # blocks of it have their text


@dataclass(frozen=True, slots=True)
class _Read:
    """What both routes read of a body."""

    model: str
    chat: ChatPrompt
    tool_use: ToolUse | None
    output_format: OutputFormat | None
    shows_thinking: bool


def parse_message(raw: bytes, reading: Reading) -> ParsedMessage:
    fields, notes = _opened(raw, reading, MESSAGES)
    read = _read(fields, reading, notes)
    parsed = ParsedMessage(
        spec=GenerationSpec(
            model=read.model,
            prompts=(read.chat,),
            max_tokens=_max_tokens(fields),
            fills_context=True,
            temperature=fields.number("temperature"),
            top_p=fields.number("top_p"),
            top_k=fields.integer("top_k"),
            seed=fields.integer("seed"),
            stop=_stops(fields),
            priority=fields.integer("priority") or 0,
            timeout_s=fields.number("timeout"),
            comes_again=notes.comes_again,
            retain_ms=notes.retain_ms,
            output_format=read.output_format,
            tool_use=read.tool_use,
            cache_salt=fields.text("cache_salt"),
            streams=fields.flag("stream"),
        ),
        ignored=tuple(notes.ignored),
        shows_thinking=read.shows_thinking,
    )
    fields.assert_read(MESSAGES.supported)
    return parsed


def parse_count(raw: bytes, reading: Reading) -> tuple[str, ChatPrompt, tuple[str, ...]]:
    """The model, what to count, and names of the fields that were taken without effect."""
    fields, notes = _opened(raw, reading, COUNT)
    read = _read(fields, reading, notes)
    fields.assert_read(COUNT.supported)
    return read.model, read.chat, tuple(notes.ignored)


def _opened(raw: bytes, reading: Reading, table: FieldTable) -> tuple[Fields, Notes]:
    body = parse_object(raw)
    notes = Notes(reading.unknown_fields)
    for name in table.check(body, reading.unknown_fields):
        notes.ignore(name)
    return Fields(body), notes


def _read(fields: Fields, reading: Reading, notes: Notes) -> _Read:
    model = fields.required_text("model")
    notes.saw_cache_control(fields, "")
    tools = tools_of(fields, notes)
    messages = conversation_of(fields, notes)
    values, shows_thinking = _thinking(fields, reading, notes)
    output_format = _output_config(fields, reading, values, notes)
    use = tool_use_of(fields, tools, notes)
    return _Read(model, ChatPrompt(messages, values, tools), use, output_format, shows_thinking)


def _max_tokens(fields: Fields) -> int:
    value = fields.integer("max_tokens")
    if value is None:
        raise invalid("max_tokens is required.", param="max_tokens", code="missing")
    if value == 0:
        raise invalid(
            "max_tokens: 0, which fills the cache and answers nothing, is not supported; send 1.",
            param="max_tokens",
            code="unsupported_parameter",
        )
    return value


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop_sequences")
    if isinstance(value, str):
        raise fields.wrong("stop_sequences", "a list of strings")
    stops = fields.texts("stop_sequences", MAX_STOPS)
    if not all(stops):
        raise invalid("stop_sequences has an empty string.", param="stop_sequences")
    return stops


def _object(fields: Fields, name: str, kind: str, where: str) -> tuple[Fields, Block] | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fields.wrong(name, "an object")
    inner = Fields(value, f"{where}.")
    return inner, Block(kind, where, where, inner, value)


def _thinking(fields: Fields, reading: Reading, notes: Notes) -> tuple[dict[str, Any], bool]:
    """Values for the chat template, and whether what was thought is shown.

    Agents send `thinking` to any model. Where the template has no switch for it, it has no effect.
    """
    found = _object(fields, THINKING, "", THINKING)
    if found is None:
        return {}, True
    inner, block = found
    kind = inner.required_text("type")
    if kind not in KINDS_OF_THINKING:
        message = f"{THINKING}.type is {kind[:50]!r}; it must be {' or '.join(KINDS_OF_THINKING)}."
        raise invalid(message, param=f"{THINKING}.type")
    display = inner.text("display")
    if display not in (None, *DISPLAYS):
        message = f"{THINKING}.display is {str(display)[:50]!r}; it must be {' or '.join(DISPLAYS)}."
        raise invalid(message, param=f"{THINKING}.display")
    if inner.integer("budget_tokens") is not None:
        notes.ignore(f"{THINKING}.budget_tokens")
    block.only(("budget_tokens", "display"), (), notes)
    switch = next((name for name in SWITCHES if name in reading.template_variables), None)
    if switch is None:
        notes.ignore(THINKING)
        return {}, display != "omitted"
    return {switch: kind != "disabled"}, display != "omitted"


def _output_config(fields: Fields, reading: Reading, values: dict[str, Any], notes: Notes) -> OutputFormat | None:
    """The form of the answer; how much effort the model should make is added to the values of the template."""
    found = _object(fields, OUTPUT_CONFIG, "", OUTPUT_CONFIG)
    if found is None:
        return None
    inner, block = found
    effort = inner.text("effort")
    if effort is not None:
        if effort not in EFFORTS:
            message = f"{OUTPUT_CONFIG}.effort is {effort[:50]!r}; it must be {', '.join(EFFORTS)}."
            raise invalid(message, param=f"{OUTPUT_CONFIG}.effort")
        if "reasoning_effort" in reading.template_variables:
            values["reasoning_effort"] = effort
        else:
            notes.ignore(f"{OUTPUT_CONFIG}.effort")
    block.only(("effort", "format"), (), notes)
    wanted = _object(inner, "format", "", f"{OUTPUT_CONFIG}.format")
    if wanted is None:
        return None
    inner, block = wanted
    where = f"{OUTPUT_CONFIG}.format"
    kind = inner.required_text("type")
    if kind != "json_schema":
        message = f"{where}.type is {kind[:50]!r}; only json_schema is supported."
        raise invalid(message, param=f"{where}.type", code="unsupported_parameter")
    schema = inner.json_object("schema")
    if schema is None:
        raise invalid(f"{where}.schema is required.", param=f"{where}.schema", code="missing")
    block.only(("schema",), ("name",), notes)
    return OutputFormat(FormatKind.JSON, schema, f"{where}.schema")
