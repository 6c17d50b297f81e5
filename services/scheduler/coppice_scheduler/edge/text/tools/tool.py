"""Tools that a client offers to the model, calls of them, and what the client says about calling."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from coppice_scheduler.edge.base.errors import invalid

MAX_TOOLS = 128
MAX_CALLS = 1024  # in one message
MAX_TOOL_CHARS = 1 << 20  # of the descriptions and schemas of all tools of a call
NO_PARAMETERS = '{"type":"object","properties":{}}'
# What a parser takes for a name. OpenAI's are shorter and have neither dots nor colons; those of MCP servers do.
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: str  # a JSON schema, as text
    description: str | None = None
    is_strict: bool = False  # arguments must follow the schema


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Of an answer that is sent back."""

    call_id: str
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolMode(StrEnum):
    NONE = "none"  # the model knows the tools and must not call them
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the model may do with the tools of its prompt."""

    tools: tuple[Tool, ...]
    mode: ToolMode = ToolMode.AUTO
    names: frozenset[str] = frozenset()  # of the tools that it may call
    calls_max: int | None = None  # in one answer; None: any number
    # Tools with their arguments whose values are strings, where a parser has to know: XML has no quotes.
    texts: frozenset[tuple[str, str]] = frozenset()
    in_json: bool = False  # forced calls are written as JSON, which is not how the family writes them

    @property
    def allowed(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if tool.name in self.names)

    @property
    def num_chars(self) -> int:
        return num_chars(self.tools)


def num_chars(tools: Iterable[Tool]) -> int:
    return sum(len(tool.parameters) + len(tool.description or "") for tool in tools)


def check_name(name: str, where: str) -> None:
    """Raises ApiError that names `where`."""
    if not NAME.fullmatch(name):
        raise invalid(
            f"{where} is {name[:50]!r}; a name has 1 to 128 of the letters a-z and A-Z, digits and . _ : / -.",
            param=where,
        )


def check_is_offered(name: str, tools: Iterable[Tool], where: str) -> None:
    """Raises ApiError where `where`, of `tool_choice`, names none of the tools."""
    if name not in {tool.name for tool in tools}:
        raise invalid(f"{where} names {name[:100]!r}, which is none of the tools.", param="tool_choice")


def check_tools(tools: Sequence[Tool], suffix: str) -> None:
    """What is so of all tools together. `suffix`: where an entry has its name. Raises ApiError."""
    seen: set[str] = set()
    for place, tool in enumerate(tools):
        if tool.name in seen:
            where = f"tools[{place}]{suffix}"
            raise invalid(f"{where} is that of another tool, {tool.name}.", param=where)
        seen.add(tool.name)
    size = num_chars(tools)
    if size > MAX_TOOL_CHARS:
        raise invalid(f"tools have {size} characters; at most {MAX_TOOL_CHARS} are taken.", param="tools")
