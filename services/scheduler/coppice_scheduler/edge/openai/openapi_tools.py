"""JSON schemas of what requests say about tools."""

from __future__ import annotations

from coppice_scheduler.edge.http.openapi.schema import Schema, inner, one_of
from coppice_scheduler.edge.openai.parsing.tools import CALL_NO_EFFECT, PARALLEL, TOOL_CHOICE, TOOLS
from coppice_scheduler.edge.text.tools.tool import MAX_CALLS, MAX_TOOLS, NAME, ToolMode

_NAME: Schema = {"type": "string", "pattern": f"^{NAME.pattern}$"}


def tool_fields(*, has_tools: bool) -> dict[str, Schema]:
    """Of a chat. Without `has_tools` this model has no way to call them."""
    named = inner({"name": _NAME}, ("name",), "One of the tools.")
    reference = inner({"type": {"const": "function"}, "function": named}, ("type", "function"), "One of the tools.")
    allowed = inner(
        {
            "mode": {"enum": [ToolMode.AUTO, ToolMode.REQUIRED]},
            "tools": {"type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": reference},
        },
        ("mode", "tools"),
        "Only these of the tools.",
    )
    either = inner(
        {"type": {"const": "allowed_tools"}, "allowed_tools": allowed},
        ("type", "allowed_tools"),
        "A part of the tools.",
    )
    choices: list[Schema] = [{"enum": [*ToolMode, None]}, reference, either]
    without: list[Schema] = [{"enum": [ToolMode.NONE, ToolMode.AUTO, None]}]
    return {
        TOOLS: _tools() if has_tools else {"enum": [[], None], "description": "This model has no way to call them."},
        TOOL_CHOICE: {"anyOf": choices if has_tools else without},
        PARALLEL: one_of("boolean", "False: one call at most.", default=True),
    }


def _tools() -> Schema:
    function = inner(
        {
            "name": _NAME,
            "description": one_of("string"),
            "parameters": one_of("object", "A JSON schema.", properties={"type": {"const": "object"}}),
            "strict": one_of("boolean", "Arguments follow the schema in any case."),
        },
        ("name",),
        "What the model may call.",
    )
    tool = inner({"type": {"const": "function"}, "function": function}, ("type", "function"), "A tool.")
    return one_of("array", "No two have one name.", maxItems=MAX_TOOLS, items=tool)


def earlier_calls() -> dict[str, Schema]:
    """Of an answer that is sent back."""
    function = inner(
        {
            "name": _NAME,
            "arguments": {"anyOf": [one_of("string", "JSON."), {"type": "object"}]},
            **{name: {"description": "Taken, without effect."} for name in CALL_NO_EFFECT},
        },
        ("name",),
        "What was called.",
    )
    call = inner(
        {
            "id": one_of("string"),
            "type": {"enum": ["function", None]},
            "function": function,
            "index": one_of("integer"),
        },
        ("function",),
        "A call of an earlier answer.",
    )
    return {"tool_calls": {"type": "array", "minItems": 1, "maxItems": MAX_CALLS, "items": call}}
