"""Typed reads of a JSON object: what is said of a wrong field is checked with the routes, in `contract/`."""

from __future__ import annotations

import pytest

from coppice_scheduler.edge.http.json_body import Fields


def test_null_is_a_flag_left_out() -> None:
    fields = Fields({"on": True, "off": False, "null": None})
    assert [fields.flag(name) for name in ("on", "off", "null", "absent")] == [True, False, False, False]
    assert [fields.flag(name, default=True) for name in ("on", "off", "null", "absent")] == [True, False, True, True]


def test_a_field_that_was_never_read_is_a_bug_of_ours() -> None:
    fields = Fields({"a": 1, "b": 2})
    fields.integer("a")
    fields.text("absent")
    fields.assert_read(("a", "absent"))
    with pytest.raises(AssertionError, match=r"without being read: b, c$"):
        fields.assert_read(("a", "b", "c"))
