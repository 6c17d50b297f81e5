"""Kinds of calls whose prompts may come again more often than others'."""

from __future__ import annotations

from itertools import product

from coppice.messages.reuse import CALL_KINDS
from coppice_bench.trace import generated
from coppice_scheduler.edge.frontend.admission import call_kind_of
from coppice_scheduler.edge.frontend.generation_spec import Endpoint, GenerationSpec
from coppice_scheduler.edge.text.tools.tool import ToolUse


def test_each_kind_has_a_number_of_its_own() -> None:
    specs = [
        GenerationSpec("m", (), endpoint=endpoint, tool_use=tools, priority=priority)
        for endpoint, tools, priority in product(Endpoint, (None, ToolUse(())), (0, 1))
        if tools is None or endpoint is not Endpoint.COMPLETIONS
    ]
    kinds = [call_kind_of(spec) for spec in specs]
    assert call_kind_of(GenerationSpec("m", (), endpoint=Endpoint.CHAT)) == generated.CHAT
    assert call_kind_of(GenerationSpec("m", (), priority=1)) == generated.BATCH
    assert len(set(kinds)) == len(specs) == 14
    assert all(0 < kind < CALL_KINDS for kind in kinds)
