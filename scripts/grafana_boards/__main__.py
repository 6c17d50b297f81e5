"""Write deploy/grafana/dashboards: `make boards`; `--check` compares, and writes nothing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from scripts.grafana_boards.overview import OVERVIEW
from scripts.grafana_boards.panels import Board
from scripts.grafana_boards.tenants import TENANTS
from scripts.grafana_boards.workers import WORKERS

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
BOARDS: dict[str, Board] = {"overview.json": OVERVIEW, "tenants.json": TENANTS, "workers.json": WORKERS}


def main(arguments: list[str]) -> str | None:
    """What is wrong; None where nothing is."""
    parser = argparse.ArgumentParser(prog="python -m scripts.grafana_boards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    only_checks = parser.parse_args(arguments).check
    texts = {FOLDER / name: json.dumps(board.json(), indent=2) + "\n" for name, board in BOARDS.items()}
    if not only_checks:
        for path, text in texts.items():
            path.write_text(text)
        return None
    stale = [path.name for path, text in texts.items() if not path.exists() or path.read_text() != text]
    return f"{', '.join(stale)} differ from scripts/grafana_boards: run make boards" if stale else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
