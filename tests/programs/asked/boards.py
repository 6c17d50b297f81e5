"""Boards against Grafana's own models of them: python boards.py BOARD.json ...

A board is read into the classes that Grafana generates from its schemas, and written again. A field that they do not
have is lost on the way, and a value of a wrong type raises. Prints what was lost, a line each; exit code 1 then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard


def lost(given: Any, kept: Any, where: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            if name not in kept:
                yield f"{where}.{name}"
            else:
                yield from lost(value, kept[name], f"{where}.{name}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for one, other in zip(given, kept, strict=True):
            yield from lost(one, other, f"{where}[]")
    elif given != kept:
        yield f"{where}: {given!r} became {kept!r}"


def main(*paths: str) -> int:
    register_default_plugins()
    found: dict[str, None] = {}
    for path in paths:
        board = json.loads(Path(path).read_text(encoding="utf-8"))
        kept = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
        found |= dict.fromkeys(lost(board, kept, Path(path).stem))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
