"""Logs are one line each."""

from __future__ import annotations

import json
import logging

import pytest

from coppice.errors import UsageError
from coppice.telemetry.logs import about_request, configure_logging


def test_a_log_record_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning")
    logging.getLogger("coppice.test").info("unseen")
    logging.getLogger("coppice.test").warning("two\nlines from %s", "w0")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("Z WARNING coppice.test: two\\nlines from w0")


def test_a_line_may_be_json(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    with about_request("job-7"):
        try:
            raise ValueError("wrong")
        except ValueError:
            logging.getLogger("coppice.test").exception("two\nlines")
    logging.getLogger("coppice.test").info("of %s", "w0")
    first, second = (json.loads(line) for line in capfd.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("error", "coppice.test", "two\nlines")
    assert first["request"] == "job-7"
    assert "ValueError: wrong" in first["exception"]
    assert second == {"at": second["at"], "level": "info", "logger": "coppice.test", "message": "of w0"}
    assert second["at"].endswith("Z")


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(UsageError, match="'loud'"):
        configure_logging("loud")
