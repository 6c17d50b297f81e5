"""Bodies of the Anthropic API to a GenerationSpec. Raises ApiError only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coppice.messages.reuse import Reuse
from coppice_scheduler.edge.anthropic.blocks import Block, MessageNotes
from coppice_scheduler.edge.anthropic.conversation import conversation_of
from coppice_scheduler.edge.anthropic.fields import COUNT, MESSAGES
from coppice_scheduler.edge.anthropic.tools import tool_use_of, tools_of
from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.frontend.generation_spec import (
    ASSISTANT,
    MAX_STOP_BYTES,
    MAX_STOPS,
    ChatPrompt,
    Endpoint,
    GenerationSpec,
)
from coppice_scheduler.edge.http.field_table import FieldTable, Reading
from coppice_scheduler.edge.http.json_body import Fields, parse_object
from coppice_scheduler.edge.text.chat import SWITCHES, PromptEnd, effort_of_template, switch_of
from coppice_scheduler.edge.text.output_format import FormatKind, OutputFormat
from coppice_scheduler.edge.text.tools.tool import ToolUse

THINKING, OUTPUT_CONFIG = "thinking", "output_config"
OUTPUT_FORMAT = "output_format"  # the older name of a form
KINDS_OF_THINKING = ("enabled", "adaptive", "between_tools", "disabled")
DISPLAYS = ("summarized", "updates", "omitted")
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
            reuse=Reuse.LIKELY if notes.comes_again else Reuse.UNKNOWN,
            retain_ms=notes.retain_ms,
            output_format=read.output_format,
            tool_use=read.tool_use,
            cache_salt=fields.text("cache_salt"),
            streams=fields.flag("stream"),
            endpoint=Endpoint.MESSAGES,
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


def _opened(raw: bytes, reading: Reading, table: FieldTable) -> tuple[Fields, MessageNotes]:
    body = parse_object(raw)
    notes = MessageNotes(reading.unknown_fields)
    notes.ignore(*table.check(body, reading.unknown_fields))
    return Fields(body), notes


def _read(fields: Fields, reading: Reading, notes: MessageNotes) -> _Read:
    model = fields.required_text("model")
    notes.saw_cache_control(fields, "")
    tools = tools_of(fields, notes)
    messages = conversation_of(fields, notes)
    end = PromptEnd.WITHIN_LAST_MESSAGE if messages[-1].role == ASSISTANT else PromptEnd.ANSWER
    values, shows_thinking = _thinking(fields, reading, notes)
    if end is PromptEnd.WITHIN_LAST_MESSAGE and any(values.get(switch) for switch in SWITCHES):
        message = "The last of messages is the assistant's; an answer that goes on from it has no thinking. Disable it."
        raise invalid(message, param=THINKING)
    output_format = _output_config(fields, reading, values, notes)
    use = tool_use_of(fields, tools, notes)
    return _Read(model, ChatPrompt(messages, values, tools, end), use, output_format, shows_thinking)


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
    if any(len(stop.encode("utf-8", "replace")) > MAX_STOP_BYTES for stop in stops):
        raise invalid(f"stop_sequences has a string of more than {MAX_STOP_BYTES} bytes.", param="stop_sequences")
    return stops


def _object(fields: Fields, name: str, where: str) -> tuple[Fields, Block] | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fields.wrong(name, "an object")
    inner = Fields(value, f"{where}.")
    return inner, Block("", where, where, inner, value)


def _thinking(fields: Fields, reading: Reading, notes: MessageNotes) -> tuple[dict[str, Any], bool]:
    """Values for the chat template, and whether what was thought is shown.

    Who does not ask for thinking gets none, as programs read the first block as text. Agents send `thinking` to any
    model; where the template has no switch for it, it has no effect.
    """
    switch = switch_of(reading.template_variables)
    found = _object(fields, THINKING, THINKING)
    if found is None:
        return ({switch: False} if switch is not None else {}), True
    inner, block = found
    kind = _choice(inner, "type", KINDS_OF_THINKING, THINKING)
    if kind is None:
        raise invalid(f"{THINKING}.type is required.", param=f"{THINKING}.type", code="missing")
    display = _choice(inner, "display", DISPLAYS, THINKING)
    inner.integer("budget_tokens")
    block.only(("display",), ("budget_tokens", "block_binding"), notes)
    if switch is None:
        notes.ignore(THINKING)
        return {}, display != "omitted"
    return {switch: kind != "disabled"}, display != "omitted"


def _output_config(
    fields: Fields, reading: Reading, values: dict[str, Any], notes: MessageNotes
) -> OutputFormat | None:
    """The form of the answer; how much effort the model should make is added to the values of the template."""
    older = _output_format(fields, OUTPUT_FORMAT, OUTPUT_FORMAT, notes)
    found = _object(fields, OUTPUT_CONFIG, OUTPUT_CONFIG)
    if found is None:
        return older
    inner, block = found
    effort = _choice(inner, "effort", EFFORTS, OUTPUT_CONFIG)
    if effort is not None and "reasoning_effort" in reading.template_variables:
        values["reasoning_effort"] = effort_of_template(effort)
    elif effort is not None:
        notes.ignore(f"{OUTPUT_CONFIG}.effort")
    block.only(("effort", "format"), ("task_budget",), notes)
    newer = _output_format(inner, "format", f"{OUTPUT_CONFIG}.format", notes)
    if older is not None and newer is not None:
        raise invalid(f"{OUTPUT_FORMAT} and {OUTPUT_CONFIG}.format mean the same; send one.", param=OUTPUT_FORMAT)
    return newer or older


def _output_format(fields: Fields, name: str, where: str, notes: MessageNotes) -> OutputFormat | None:
    found = _object(fields, name, where)
    if found is None:
        return None
    inner, block = found
    kind = inner.required_text("type")
    if kind != "json_schema":
        message = f"{where}.type is {kind[:50]!r}; only json_schema is supported."
        raise invalid(message, param=f"{where}.type", code="unsupported_parameter")
    schema = inner.json_object("schema")
    if schema is None:
        raise invalid(f"{where}.schema is required.", param=f"{where}.schema", code="missing")
    block.only(("schema",), ("name",), notes)
    return OutputFormat(FormatKind.JSON, schema, f"{where}.schema")


def _choice(fields: Fields, name: str, known: tuple[str, ...], where: str) -> str | None:
    value = fields.text(name)
    if value is not None and value not in known:
        message = f"{where}.{name} is {value[:50]!r}; it must be {', '.join(known)}."
        raise invalid(message, param=f"{where}.{name}")
    return value
