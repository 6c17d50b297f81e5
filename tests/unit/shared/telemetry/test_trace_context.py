"""Contexts of traces in headers and fields."""

from __future__ import annotations

import pytest

from coppice.telemetry.trace_context import context_from_headers, context_from_traceparent, traceparent_of

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_context_comes_from_headers_in_any_case() -> None:
    context = context_from_headers({"TraceParent": TRACEPARENT})
    assert traceparent_of(context) == TRACEPARENT
    assert traceparent_of(context_from_traceparent(TRACEPARENT)) == TRACEPARENT


@pytest.mark.parametrize("value", ["", "nonsense", "00-0-0-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_malformed_traceparent_is_no_context(value: str) -> None:
    assert traceparent_of(context_from_traceparent(value)) == ""
