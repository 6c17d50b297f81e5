"""An operator's browser before the stack: what a person has imported into theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.containers.stack import ADMIN_PORT, REQUESTS_PORT
from tests.e2e.console.browsing import Console, console_at


@contextmanager
def operators_console(browser: Any, certificate: Path | None) -> Iterator[Console]:
    """`certificate`: the folder of the one that it shows; None: it has none."""
    shown = [
        {
            "origin": f"https://127.0.0.1:{port}",
            "certPath": str(certificate / "cert.pem"),
            "keyPath": str(certificate / "key.pem"),
        }
        for port in (ADMIN_PORT, REQUESTS_PORT)
        if certificate is not None
    ]
    # The certificates name `coppice.internal`, which no hosts file here knows.
    options = {"client_certificates": shown, "ignore_https_errors": True}
    with console_at(browser, f"https://127.0.0.1:{ADMIN_PORT}/", may_fail=certificate is None, **options) as opened:
        yield opened
