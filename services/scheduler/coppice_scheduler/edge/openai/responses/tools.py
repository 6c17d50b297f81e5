"""`tools` and `tool_choice` of a response, whose functions stand flat. Raises ApiError only."""

from __future__ import annotations

from typing import Any

from coppice_scheduler.edge.base.errors import ApiError, invalid
from coppice_scheduler.edge.http.json_body import Fields
from coppice_scheduler.edge.openai.responses.input_items import ItemNotes
from coppice_scheduler.edge.text.tools.tool import (
    MAX_TOOLS,
    NO_PARAMETERS,
    Tool,
    ToolMode,
    ToolUse,
    check_is_offered,
    check_name,
    check_tools,
)

TOOLS, TOOL_CHOICE, PARALLEL = "tools", "tool_choice", "parallel_tool_calls"
_CHOICES = "none, auto, required, or an object of type function or allowed_tools"
_DIRECT: tuple[Any, ...] = (None, [], ["direct"])


def tools_of(fields: Fields, notes: ItemNotes) -> tuple[Tool, ...]:
    value = fields.at_most(TOOLS, MAX_TOOLS, "entries")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise fields.wrong(TOOLS, "a list of tools")
    tools = tuple(_tool(f"{TOOLS}[{place}]", entry, notes) for place, entry in enumerate(value))
    check_tools(tools, ".name")
    return tools


def tool_use_of(fields: Fields, tools: tuple[Tool, ...], notes: ItemNotes) -> ToolUse | None:
    """What the model may do with the tools; None without any."""
    is_parallel = fields.flag(PARALLEL, default=True)
    mode, names, is_one = _choice(fields, tools, notes)
    if not tools:
        if mode is ToolMode.REQUIRED or names is not None:
            raise invalid(f"{TOOL_CHOICE} asks for a call, and there are no tools.", param=TOOL_CHOICE)
        return None
    allowed = frozenset(tool.name for tool in tools) if names is None else names
    return ToolUse(tools, mode, allowed, 1 if is_one or not is_parallel else None)


def _tool(where: str, entry: Any, notes: ItemNotes) -> Tool:
    if not isinstance(entry, dict):
        raise invalid(f"{where} must be an object with type, name and parameters.", param=where)
    fields = Fields(entry, f"{where}.")
    _check_type(fields, where, "tools that a server runs or knows are not supported, only functions")
    name = fields.required_text("name")
    check_name(name, f"{where}.name")
    if fields.get("allowed_callers") not in _DIRECT:
        raise _unsupported(f"{where}.allowed_callers", "only the model itself calls")
    if fields.flag("defer_loading"):
        raise _unsupported(f"{where}.defer_loading", "all tools are shown")
    schema, parameters = fields.get("parameters"), fields.json_object("parameters")
    if schema and schema.get("type", "object") != "object":
        raise invalid(f"{where}.parameters must be of type object.", param=f"{where}.parameters")
    known = ("type", "name", "description", "parameters", "strict", "allowed_callers", "defer_loading")
    notes.only(entry, known, frozenset({"output_schema", "async"}), where, f"{TOOLS}[]")
    text = parameters if schema and parameters else NO_PARAMETERS
    return Tool(name, text, fields.text("description"), fields.flag("strict"))


def _choice(fields: Fields, tools: tuple[Tool, ...], notes: ItemNotes) -> tuple[ToolMode, frozenset[str] | None, bool]:
    """How the model may call, which ones where those are not all, and whether only once."""
    value = fields.get(TOOL_CHOICE)
    if value is None:
        return ToolMode.AUTO, None, False
    if isinstance(value, str) and value in tuple(ToolMode):
        return ToolMode(value), None, False
    match value:
        case {"type": "function"}:
            return ToolMode.REQUIRED, frozenset({_named(TOOL_CHOICE, value, tools, notes)}), True
        case {"type": "allowed_tools"}:
            inner = Fields(value, f"{TOOL_CHOICE}.")
            mode, entries = inner.required_text("mode"), inner.at_most("tools", MAX_TOOLS, "entries")
            if mode not in (ToolMode.AUTO, ToolMode.REQUIRED):
                raise invalid(f"{TOOL_CHOICE}.mode must be auto or required.", param=f"{TOOL_CHOICE}.mode")
            if not isinstance(entries, list) or not entries:
                raise inner.wrong("tools", "a list of tools, one at least")
            notes.only(value, ("type", "mode", "tools"), frozenset(), TOOL_CHOICE, TOOL_CHOICE)
            at = f"{TOOL_CHOICE}.tools"
            names = [_named(f"{at}[{place}]", entry, tools, notes) for place, entry in enumerate(entries)]
            return ToolMode(mode), frozenset(names), False
        case str() | dict():
            raise invalid(f"{TOOL_CHOICE} must be {_CHOICES}.", param=TOOL_CHOICE)
    raise fields.wrong(TOOL_CHOICE, _CHOICES)


def _named(where: str, value: Any, tools: tuple[Tool, ...], notes: ItemNotes) -> str:
    if not isinstance(value, dict):
        raise invalid(f"{where} must be an object with type and name.", param=where)
    fields = Fields(value, f"{where}.")
    _check_type(fields, where, "only functions can be named")
    name = fields.required_text("name")
    notes.only(value, ("type", "name"), frozenset(), where, TOOL_CHOICE)
    check_is_offered(name, tools, where)
    return name


def _check_type(fields: Fields, where: str, why: str) -> None:
    kind = fields.required_text("type")
    if kind != "function":
        raise _unsupported(f"{where}.type", f"it is {kind[:50]!r}; {why}")


def _unsupported(where: str, why: str) -> ApiError:
    return invalid(f"{where} is not supported: {why}.", param=where, code="unsupported_parameter")
