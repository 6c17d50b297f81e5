"""`tools`, `tool_choice`, `parallel_tool_calls`, and calls in histories. Raises ApiError only."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.http.field_table import Notes, without_effect
from coppice_scheduler.edge.http.json_body import Fields, json_text
from coppice_scheduler.edge.text.tools.tool import (
    MAX_CALLS,
    MAX_TOOLS,
    NO_PARAMETERS,
    Tool,
    ToolCall,
    ToolMode,
    ToolUse,
    check_is_offered,
    check_name,
    check_tools,
)

TOOLS, TOOL_CHOICE, PARALLEL = "tools", "tool_choice", "parallel_tool_calls"
_PLACE = re.compile(r"\[[0-9]+\]")
CALL_NO_EFFECT = frozenset({"parsed_arguments"})  # of a call that the openai package read and sends back
_CHOICES = "none, auto, required, or an object that names a function or allowed_tools"


@dataclass(frozen=True, slots=True)
class _Choice:
    mode: ToolMode
    names: tuple[str, ...] | None = None  # of the tools that it allows, where those are not all
    is_one: bool = False  # call, no more


def tools_of(fields: Fields, notes: Notes) -> tuple[Tool, ...]:
    """What is offered to the model."""
    value = fields.at_most(TOOLS, MAX_TOOLS, "entries")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise fields.wrong(TOOLS, "a list of tools")
    tools = tuple(_tool(f"{TOOLS}[{place}]", entry, notes) for place, entry in enumerate(value))
    check_tools(tools, ".function.name")
    return tools


def tool_use_of(fields: Fields, tools: tuple[Tool, ...], notes: Notes) -> ToolUse | None:
    """What the model may do with the tools; None without any."""
    is_parallel = fields.flag(PARALLEL, default=True)
    choice = _choice(fields, tools, notes)
    if not tools:
        if choice.mode is ToolMode.REQUIRED or choice.names is not None:
            raise invalid(f"{TOOL_CHOICE} asks for a call, and there are no tools.", param=TOOL_CHOICE)
        return None
    names = [tool.name for tool in tools] if choice.names is None else choice.names
    calls_max = 1 if choice.is_one or not is_parallel else None
    return ToolUse(tools, choice.mode, frozenset(names), calls_max)


def _tool(where: str, entry: Any, notes: Notes) -> Tool:
    inner = _function(where, entry, "an object with name, description and parameters", notes)
    where = f"{where}.function"
    _only(entry["function"], ("name", "description", "parameters", "strict"), where, notes)
    name = inner.required_text("name")
    check_name(name, f"{where}.name")
    parameters = inner.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise inner.wrong("parameters", "a JSON schema")
    if parameters and parameters.get("type", "object") != "object":
        raise invalid(f"{where}.parameters must be of type object.", param=f"{where}.parameters")
    text = json_text(parameters, f"{where}.parameters") if parameters else NO_PARAMETERS
    return Tool(name, text, inner.text("description"), inner.flag("strict"))


def _choice(fields: Fields, tools: tuple[Tool, ...], notes: Notes) -> _Choice:
    value = fields.get(TOOL_CHOICE)
    if value is None:
        return _Choice(ToolMode.AUTO)
    if isinstance(value, str) and value in tuple(ToolMode):
        return _Choice(ToolMode(value))
    match value:
        case {"type": "function"}:
            name = _named(TOOL_CHOICE, value, notes)
            return _Choice(ToolMode.REQUIRED, _known([name], tools), is_one=True)
        case {"type": "allowed_tools"}:
            _only(value, ("type", "allowed_tools"), TOOL_CHOICE, notes)
            return _allowed(value.get("allowed_tools"), tools, notes)
        case str() | dict():
            hint = ' For a call in any case send "required".' if value == "any" else ""
            raise invalid(f"{TOOL_CHOICE} must be {_CHOICES}.{hint}", param=TOOL_CHOICE)
    raise fields.wrong(TOOL_CHOICE, _CHOICES)


def _allowed(value: Any, tools: tuple[Tool, ...], notes: Notes) -> _Choice:
    where = f"{TOOL_CHOICE}.allowed_tools"
    allowed = _object(where, value, "an object with mode and tools")
    _only(value, ("mode", "tools"), where, notes)
    mode, entries = allowed.required_text("mode"), allowed.at_most("tools", MAX_TOOLS, "entries")
    if mode not in (ToolMode.AUTO, ToolMode.REQUIRED):
        raise invalid(f"{where}.mode must be auto or required.", param=f"{where}.mode")
    if not isinstance(entries, list) or not entries:
        raise allowed.wrong("tools", "a list of tools, one at least")
    names = [_named(f"{where}.tools[{place}]", each, notes) for place, each in enumerate(entries)]
    return _Choice(ToolMode(mode), _known(names, tools))


def _named(where: str, value: Any, notes: Notes) -> str:
    """The name in `{"type": "function", "function": {"name": ...}}`."""
    function = _function(where, value, "an object with the name of a function", notes)
    _only(value["function"], ("name",), f"{where}.function", notes)
    return function.required_text("name")


def _known(names: list[str], tools: tuple[Tool, ...]) -> tuple[str, ...]:
    for name in names:
        check_is_offered(name, tools, TOOL_CHOICE)
    return tuple(names)


def _function(where: str, value: Any, expected: str, notes: Notes, *more: str) -> Fields:
    """What stands behind `function` in an object whose type is that; `more` fields may stand beside them."""
    outer = _object(where, value, "an object with type and function")
    kind = outer.text("type")
    if kind is None and "id" not in more:
        outer.required_text("type")
    if kind not in (None, "function"):
        raise invalid(
            f"{where}.type is {kind[:50]!r}; only function is supported.",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    _only(value, ("type", "function", *more), where, notes)
    return _object(f"{where}.function", outer.get("function"), expected)


# --- calls in histories -------------------------------------------------------------------------------------------


def calls_of(fields: Fields, where: str, notes: Notes) -> tuple[ToolCall, ...]:
    """`tool_calls` of a message."""
    value = fields.at_most("tool_calls", MAX_CALLS, "entries")
    if value in (None, "", {}):  # some send it empty, in whatever form
        return ()
    if not isinstance(value, list):
        raise fields.wrong("tool_calls", "a list of calls")
    return tuple(_call(f"{where}.tool_calls[{place}]", entry, notes) for place, entry in enumerate(value))


def _call(where: str, entry: Any, notes: Notes) -> ToolCall:
    # `index` is that of a stream. Some send no type.
    function = _function(where, entry, "an object with name and arguments", notes, "id", "index")
    _only(entry["function"], ("name", "arguments"), f"{where}.function", notes)
    outer = Fields(entry, f"{where}.")
    outer.integer("index")
    name = function.required_text("name")
    check_name(name, f"{where}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # of clients that read it as JSON
        arguments = json_text(arguments, f"{where}.function.arguments")
    elif arguments is not None and not isinstance(arguments, str):
        raise function.wrong("arguments", "a string of JSON")
    return ToolCall(outer.text("id") or "", name, arguments or "{}")


def _object(where: str, value: Any, expected: str) -> Fields:
    if not isinstance(value, dict):
        raise invalid(f"{where} must be {expected}.", param=where)
    return Fields(value, f"{where}.")


def _only(value: Any, known: Collection[str], where: str, notes: Notes) -> None:
    for name in without_effect(value, known, CALL_NO_EFFECT, where, notes.unknown):
        notes.ignore(_PLACE.sub("[]", f"{where}.{name}"))
