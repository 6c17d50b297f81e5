"""The Grafana boards: written from their source, of metrics that exist, with ways from one to the next."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from coppice.request_log.stages import WAITING
from coppice_scheduler.edge.request_log.exemplars import VALUES_S
from scripts.grafana_boards import __main__ as grafana_boards
from scripts.metrics_reference import ROOT, reference, series_names
from tests.unit.repository.observing.queries import boards, metric_names, panels, targets

GRAFANA = ROOT / "deploy" / "grafana"
OVERVIEW, TENANTS, WORKERS = "overview.json", "tenants.json", "workers.json"


def test_the_files_are_what_the_source_says() -> None:
    assert grafana_boards.main(["--check"]) is None
    assert sorted(path.name for path in grafana_boards.FOLDER.iterdir()) == sorted(grafana_boards.BOARDS)


def test_a_stale_board_is_named_and_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grafana_boards, "FOLDER", tmp_path)
    assert grafana_boards.main([]) is None
    (tmp_path / TENANTS).write_text("{}")
    said = f"{TENANTS} differ from scripts/grafana_boards: run make boards"
    assert grafana_boards.main(["--check"]) == said
    assert (tmp_path / TENANTS).read_text() == "{}"


def test_panels_draw_metrics_that_exist() -> None:
    drawn = {name for _, _, query in targets() for name in metric_names(query)}
    assert len(drawn) > 40
    assert not drawn - series_names() - {"up"}
    assert all(metric_names(query) for _, _, query in targets())


def test_labels_of_queries_are_those_of_the_metrics() -> None:
    """A selector of a label that is not there finds nothing, and says nothing."""
    labels = {
        name: {*entry.labels, "le"} for entries in reference().values() for entry in entries for name in entry.series
    }
    for board, panel, query in targets():
        for name, selector in re.findall(r"((?:vllm|coppice)[:_][a-z0-9_:]+)\{([^}]*)\}", query):
            asked = set(re.findall(r"(\w+)\s*[=!]", selector))
            assert asked <= labels[name], (board, panel, name)


def test_a_panel_without_a_metric_says_why() -> None:
    notes = panels("text")
    assert len(notes) == 3
    for note in notes:
        assert note["options"]["content"].startswith("No metric is drawn here. ")
    assert {panel["type"] for panel in panels() if "targets" not in panel} == {"text"}


def test_numbers_say_whether_they_are_good() -> None:
    """But for those that are neither."""
    plain = {panel["title"] for panel in panels("stat") if "thresholds" not in panel["fieldConfig"]["defaults"]}
    assert plain == {"Cached share of prompts", "Versions", "Running"}
    for panel in panels("stat"):
        steps = [step["value"] for step in panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])]
        assert steps[1:] == sorted(set(steps[1:])), panel["title"]


def test_time_spent_waiting_is_of_what_waits_alone() -> None:
    (panel,) = [panel for panel in panels("stat") if panel["title"] == "Time spent waiting"]
    found = re.search(r'cause=~"([^"]+)"', panel["targets"][0]["expr"])
    assert found is not None
    assert set(found[1].split("|")) == {kind.value for kind in WAITING}


def test_every_panel_is_described_and_in_its_place() -> None:
    for name, board in boards().items():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            assert panel["description"] or panel["type"] == "text", (name, panel["title"])
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not cells & taken, (name, panel["title"])
            assert max(x for x, _ in cells) < 24
            taken |= cells
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))


@pytest.mark.parametrize(("board", "variable"), [(TENANTS, "tenant"), (WORKERS, "worker")])
def test_variables_choose_what_is_drawn(board: str, variable: str) -> None:
    found = boards()[board]
    (declared,) = found["templating"]["list"]
    assert declared["name"] == variable
    assert declared["multi"]
    assert declared["includeAll"]
    name = re.fullmatch(r"label_values\((\S+), (\w+)\)", declared["query"]["query"])
    assert name is not None
    entry = next(entry for entries in reference().values() for entry in entries if name[1] in entry.series)
    assert name[2] in entry.labels
    drawn = [target["expr"] for panel in found["panels"] for target in panel.get("targets", ())]
    assert sum(f"${variable}" in query for query in drawn) > len(drawn) / 2


def test_one_board_leads_to_the_next() -> None:
    uids = {board["uid"] for board in boards().values()}
    assert len(uids) == 3
    for board in boards().values():
        (link,) = board["links"]
        assert (link["type"], link["tags"], link["keepTime"], link["includeVars"]) == (
            "dashboards",
            ["coppice"],
            True,
            True,
        )
        assert board["tags"] == ["coppice"]
    urls = [
        link["url"] for panel in panels() for link in panel.get("fieldConfig", {}).get("defaults", {}).get("links", ())
    ]
    boards_linked = {found[1] for url in urls if (found := re.match(r"/d/([\w-]+)\?", url))}
    assert boards_linked == uids - {"coppice"}
    assert any("var-tenant=${__field.labels.tenant}" in url for url in urls)


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return found


def test_slow_requests_lead_to_their_traces() -> None:
    sources = {source["uid"]: source for source in provisioned()}
    urls = [
        link["url"] for panel in panels() for link in panel.get("fieldConfig", {}).get("defaults", {}).get("links", ())
    ]
    explored = [url for url in urls if url.startswith("/explore?")]
    assert explored
    for url in explored:
        pane = json.loads(unquote(url.split("panes=")[1]))["a"]
        assert sources[pane["datasource"]]["type"] == "jaeger"
        assert pane["queries"][0]["service"] == "coppice-scheduler"
    assert "--enable-feature=exemplar-storage" in compose()["prometheus"]["command"]
    dotted = [target["expr"] for panel in panels() for target in panel.get("targets", ()) if target.get("exemplar")]
    assert len(dotted) >= 3
    assert {name.removesuffix("_bucket") for expr in dotted for name in metric_names(expr)} == set(VALUES_S)
    (exemplar,) = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert sources[exemplar["datasourceUid"]]["type"] == "jaeger"


def test_grafana_is_given_the_boards_their_source_and_explore() -> None:
    grafana = compose()["grafana"]
    assert {panel["datasource"]["uid"] for panel in panels() if "datasource" in panel} <= {
        s["uid"] for s in provisioned()
    }
    provider = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "coppice.yaml").read_text())["providers"][0]
    mounts = {target: source for source, target in (volume.split(":")[:2] for volume in grafana["volumes"])}
    folder = provider["options"]["path"]
    assert mounts[folder] == "./deploy/grafana/dashboards"
    environment = grafana["environment"]
    assert environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/{OVERVIEW}"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_USERS_VIEWERS_CAN_EDIT"] == "true", "without it viewers may not explore"


def provisioned() -> list[dict[str, Any]]:
    return list(yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "coppice.yaml").read_text())["datasources"])
