"""What all tests stand on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Whoever starts the tests in the background has Ctrl-C ignored, here and in every process that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
