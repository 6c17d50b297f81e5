"""Tools of the gRPC API to what the front door takes, and calls back."""

from __future__ import annotations

import json

from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.base.json_size import check_json_size
from coppice_scheduler.edge.text.tools.call_parser import CallDelta
from coppice_scheduler.edge.text.tools.tool import (
    MAX_CALLS,
    MAX_TOOLS,
    NO_PARAMETERS,
    Tool,
    ToolCall,
    ToolMode,
    ToolUse,
    check_name,
    check_tools,
)


def tools_of(chat: pb.ChatMessages) -> tuple[Tool, ...]:
    """Raises ApiError."""
    if len(chat.tools) > MAX_TOOLS:
        raise invalid(f"tools has {len(chat.tools)} entries; at most {MAX_TOOLS} are taken", param="tools")
    check_json_size([tool.parameters.encode("utf-8", "replace") for tool in chat.tools], "tools", "tools")
    tools = tuple(_tool(f"tools[{place}]", tool) for place, tool in enumerate(chat.tools))
    check_tools(tools, ".name")
    return tools


def tool_use_of(request: pb.GenerateRequest, tools: tuple[Tool, ...]) -> ToolUse | None:
    """What the model may do with its tools; None without any. Raises ApiError."""
    mode, names = request.tool_choice.mode or ToolMode.AUTO, list(request.tool_choice.names)
    if mode not in tuple(ToolMode):
        raise invalid(f"tool_choice.mode is {mode[:50]!r}; it must be auto, none or required", param="tool_choice")
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise invalid(f"tool_choice names {name[:100]!r}, which is none of the tools", param="tool_choice")
    if not tools:
        if mode == ToolMode.REQUIRED:
            raise invalid("tool_choice asks for a call, and there are no tools", param="tool_choice")
        return None
    is_one = request.HasField("parallel_tool_calls") and not request.parallel_tool_calls
    return ToolUse(tools, ToolMode(mode), frozenset(names or known), 1 if is_one else None)


def _tool(where: str, tool: pb.Tool) -> Tool:
    check_name(tool.name, f"{where}.name")
    try:
        parameters = json.loads(tool.parameters or NO_PARAMETERS, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{where}.parameters is no JSON: {error}", param=f"{where}.parameters") from None
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise invalid(f"{where}.parameters must be a JSON schema of type object", param=f"{where}.parameters")
    description = tool.description if tool.HasField("description") else None
    return Tool(tool.name, tool.parameters or NO_PARAMETERS, description, tool.strict)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def calls_of(message: pb.ChatMessage) -> tuple[ToolCall, ...]:
    """Raises ApiError."""
    if len(message.tool_calls) > MAX_CALLS:
        count = len(message.tool_calls)
        raise invalid(f"tool_calls has {count} entries; at most {MAX_CALLS} are taken", param="tool_calls")
    for place, call in enumerate(message.tool_calls):
        check_name(call.name, f"tool_calls[{place}].name")
    return tuple(ToolCall(call.id, call.name, call.arguments or "{}") for call in message.tool_calls)


def call_delta(piece: CallDelta) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(index=piece.index, id=piece.call_id, name=piece.name, arguments=piece.arguments)
