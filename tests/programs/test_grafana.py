"""Our boards against the classes that Grafana 11.4 generates from its schemas."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.programs.conftest import ASKED, ROOT

pytestmark = pytest.mark.programs
BOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
# The schema of boards has none of them: Grafana's data source for Prometheus reads two, its pages the last one.
OF_PLUGINS = {"annotations.list[].titleFormat", "annotations.list[].step", "templating.list[].definition"}


def lost(bin_folder: Path, *boards: Path) -> set[str]:
    command = [str(bin_folder / "python"), str(ASKED / "boards.py"), *map(str, boards)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return {line.split(".", 1)[1] for line in done.stdout.splitlines() if line}


def test_the_compose_file_has_the_version_that_is_asked() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    version = services["grafana"]["image"].rsplit(":", 1)[1]
    requirements = (ROOT / "tests" / "programs" / "requirements.txt").read_text(encoding="utf-8")
    asked = re.search(r"grafana-foundation-sdk==\d+!([\d.]+)", requirements)
    assert asked is not None
    assert asked[1] == version


def test_boards_have_no_field_that_grafana_does_not_know(bin_folder: Path) -> None:
    assert len(BOARDS) == 3
    assert lost(bin_folder, *BOARDS) == OF_PLUGINS


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda board: board.update(refreshes="5s"), "refreshes"),
        (lambda board: board["panels"][1].update(fieldConfigs={}), "panels[].fieldConfigs"),
        (lambda board: timeseries(board)["options"].update(legends={}), "panels[].options.legends"),
    ],
)
def test_what_is_wrong_with_a_board_is_found(
    bin_folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], problem: str
) -> None:
    board = json.loads(BOARDS[0].read_text(encoding="utf-8"))
    change(board)
    path = tmp_path / BOARDS[0].name
    path.write_text(json.dumps(board), encoding="utf-8")
    assert problem in lost(bin_folder, path)


def timeseries(board: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(panel for panel in board["panels"] if panel["type"] == "timeseries")
    return found
