"""The tables of docs/API.md are what the code says; where they are not, it is told which, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from coppice_scheduler.edge.openai.parsing.fields import CHAT, COMPLETION
from scripts import api_tables


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to change."""
    copy = tmp_path / "API.md"
    copy.write_text(api_tables.DOCUMENT.read_text())
    monkeypatch.setattr(api_tables, "DOCUMENT", copy)
    return copy


def test_the_document_says_what_the_code_says() -> None:
    assert api_tables.main(["--check"]) is None


def test_a_stale_table_is_named_and_written_again(document: Path) -> None:
    right = document.read_text()
    stale = right.replace("| `temperature` | from 0 to 2 |", "| `temperature` | from 0 to 1 |")
    document.write_text(stale)
    assert api_tables.main(["--check"]) == "API.md differs from the code (bounds): run make api-tables"
    assert document.read_text() == stale
    assert api_tables.main([]) is None
    assert document.read_text() == right


@pytest.mark.parametrize("name", ["routes", "refused fields of messages"])
def test_each_table_has_its_place(document: Path, name: str) -> None:
    document.write_text(document.read_text().replace(f"<!-- table: {name} -->", ""))
    with pytest.raises(AssertionError, match=name):
        api_tables.main([])


def test_a_field_that_routes_refuse_for_other_reasons_has_a_row_for_each() -> None:
    rows = api_tables.TABLES["refused fields"]().splitlines()
    assert [row.split(" | ")[1] for row in rows if "`add_special_tokens`" in row] == ["chats", "completions"]
    (both,) = (row for row in rows if row.startswith("| `suffix` |"))
    assert both.split(" | ")[1:3] == ["chats, completions", '`""`']
    for table in (CHAT, COMPLETION):
        for name in table.refused.keys() - table.supported:
            assert any(row.startswith(f"| `{name}` |") and table.refused[name].instead in row for row in rows)
