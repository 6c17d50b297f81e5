"""`multipleOf` is bounded before anything is compiled: no limit of the library counts what it costs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coppice.grammar import GrammarError
from coppice_scheduler.edge.text.output_format import FormatKind, OutputFormat, grammar_of


def schema(*multiples: Any) -> str:
    return json.dumps({"type": "array", "prefixItems": [{"type": "number", "multipleOf": each} for each in multiples]})


@pytest.mark.parametrize("multiples", [(0.01,), (0.25, 0.01), (60, 15), (1000, 10, 2), (1e-5,), (9973,), (1e3, 0.5)])
def test_usual_ones_are_taken(multiples: tuple[float, ...]) -> None:
    assert grammar_of(OutputFormat(FormatKind.JSON, schema(*multiples), "f"))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (FormatKind.JSON, schema(999_983)),
        (FormatKind.JSON, schema(99_999_989.5)),
        (FormatKind.JSON, schema(0.123456)),
        (FormatKind.JSON, schema(9973, 9967)),
        (FormatKind.JSON, schema(1e300)),
        (FormatKind.JSON, schema(0)),
        (FormatKind.JSON, schema(-3)),
        (FormatKind.JSON, schema(999_983).replace("multipleOf", "multiple\\u004ff")),
        (FormatKind.JSON, schema(7).replace("7", "9" * 5_000)),
        (FormatKind.GRAMMAR, f"start: %json {schema(999_983)}"),
    ],
)
def test_large_ones_are_refused(kind: FormatKind, text: str) -> None:
    with pytest.raises(GrammarError, match="multipleOf"):
        grammar_of(OutputFormat(kind, text, "f"))
