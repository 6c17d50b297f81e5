"""`tools` and `tool_choice`. Raises ApiError only."""

from __future__ import annotations

from typing import Any

from coppice_scheduler.edge.anthropic.blocks import Block, MessageNotes
from coppice_scheduler.edge.anthropic.fields import CACHE_CONTROL
from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.http.json_body import Fields
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

TOOLS, TOOL_CHOICE = "tools", "tool_choice"
MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.REQUIRED, "none": ToolMode.NONE}
_DIRECT: tuple[Any, ...] = (None, [], ["direct"])


def tools_of(fields: Fields, notes: MessageNotes) -> tuple[Tool, ...]:
    value = fields.at_most(TOOLS, MAX_TOOLS, "entries")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise fields.wrong(TOOLS, "a list of tools")
    tools = tuple(_tool(f"{TOOLS}[{place}]", entry, notes) for place, entry in enumerate(value))
    check_tools(tools, ".name")
    return tools


def tool_use_of(fields: Fields, tools: tuple[Tool, ...], notes: MessageNotes) -> ToolUse | None:
    """What the model may do with the tools; None without any."""
    mode, named, is_one = _choice(fields, tools, notes)
    if not tools:
        if mode is ToolMode.REQUIRED:
            raise invalid(f"{TOOL_CHOICE} asks for a call, and there are no tools.", param=TOOL_CHOICE)
        return None
    names = frozenset({named} if named is not None else {tool.name for tool in tools})
    return ToolUse(tools, mode, names, 1 if is_one else None)


def _tool(where: str, entry: Any, notes: MessageNotes) -> Tool:
    if not isinstance(entry, dict):
        raise invalid(f"{where} must be an object with name and input_schema.", param=where)
    fields = Fields(entry, f"{where}.")
    kind = fields.text("type")
    if kind not in (None, "custom"):
        raise invalid(
            f"{where}.type is {kind[:50]!r}; tools that a server runs or knows are not supported, only custom ones.",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    name = fields.required_text("name")
    check_name(name, f"{where}.name")
    if fields.get("allowed_callers") not in _DIRECT:
        raise _not_here(f"{where}.allowed_callers", "only the model itself calls")
    if fields.flag("defer_loading"):
        raise _not_here(f"{where}.defer_loading", "all tools are shown")
    schema = fields.get("input_schema")
    parameters = fields.json_object("input_schema")
    if parameters is None:
        raise invalid(f"{where}.input_schema is required.", param=f"{where}.input_schema", code="missing")
    if schema.get("type", "object") != "object":
        raise invalid(f"{where}.input_schema must be of type object.", param=f"{where}.input_schema")
    known = ("name", "description", "input_schema", "strict", "allowed_callers", "defer_loading", CACHE_CONTROL)
    block = Block("custom", where, f"{TOOLS}[]", fields, entry)
    block.only(known, ("eager_input_streaming", "input_examples"), notes)
    return Tool(name, parameters if schema else NO_PARAMETERS, fields.text("description"), fields.flag("strict"))


def _choice(fields: Fields, tools: tuple[Tool, ...], notes: MessageNotes) -> tuple[ToolMode, str | None, bool]:
    """How the model may call, which one where it must be that, and whether only once."""
    value = fields.get(TOOL_CHOICE)
    if value is None:
        return ToolMode.AUTO, None, False
    expected = f"an object whose type is {', '.join(MODES)}"
    if not isinstance(value, dict):
        raise fields.wrong(TOOL_CHOICE, expected)
    inner = Fields(value, f"{TOOL_CHOICE}.")
    kind = inner.required_text("type")
    if kind not in MODES:
        raise invalid(f"{TOOL_CHOICE}.type is {kind[:50]!r}; it must be {', '.join(MODES)}.", param=TOOL_CHOICE)
    is_one = inner.flag("disable_parallel_tool_use")
    name = inner.required_text("name") if kind == "tool" else None
    known = ("name", "disable_parallel_tool_use") if kind == "tool" else ("disable_parallel_tool_use",)
    Block(kind, TOOL_CHOICE, TOOL_CHOICE, inner, value).only(known, (), notes)
    if name is not None:
        check_is_offered(name, tools, TOOL_CHOICE)
    return MODES[kind], name, is_one or name is not None


def _not_here(where: str, why: str) -> Exception:
    return invalid(f"{where} is not supported: {why}.", param=where, code="unsupported_parameter")
