"""Calls of tools as a model of a family writes them."""

from __future__ import annotations

from coppice_scheduler.edge.text.tools.formats import NAME_PLACE, ToolFormat
from coppice_scheduler.edge.text.tools.tool import ToolCall


def written(tool_format: ToolFormat, calls: list[ToolCall]) -> str:
    """Not for Python."""
    each = (tool_format.before.replace(NAME_PLACE, call.name) + call.arguments + tool_format.after for call in calls)
    return tool_format.opening + tool_format.between.join(each) + tool_format.closing
