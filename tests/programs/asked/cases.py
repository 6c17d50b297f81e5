"""Cases of one program: each is asked, whatever became of the others; what each gave is printed as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

CASES: dict[str, Callable[[str], Any]] = {}


def case(ask: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function of the server's URL that gives plain values."""
    CASES[ask.__name__] = ask
    return ask


def print_all(url: str) -> None:
    answers: dict[str, Any] = {}
    for name, ask in CASES.items():
        try:
            answers[name] = ask(url)
        except Exception as error:
            answers[name] = {"raised": f"{type(error).__name__}: {error}"}
    print(json.dumps(answers))
