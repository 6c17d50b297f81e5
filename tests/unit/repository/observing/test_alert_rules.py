"""The alert rules: each is tested, asks for metrics that exist, says what to do, and is loaded."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from coppice_scheduler.edge.base.metrics import TTFT_S
from scripts.metrics_reference import ROOT, series_names
from tests.unit.repository.observing.queries import metric_names

PROMETHEUS = ROOT / "deploy" / "prometheus"
OF_PROMETHEUS = {"up"}  # that it makes itself


@pytest.fixture(scope="module")
def groups() -> list[dict[str, Any]]:
    return list(yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"])


@pytest.fixture(scope="module")
def rules(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_prometheus_loads_the_rules() -> None:
    assert yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["rule_files"] == ["alerts.yml"]


def test_rules_ask_for_metrics_that_exist(groups: list[dict[str, Any]]) -> None:
    every = [rule for group in groups for rule in group["rules"]]
    asked = {name for rule in every for name in metric_names(rule["expr"])}
    assert len(asked) >= 15
    assert not asked - series_names() - OF_PROMETHEUS - {rule.get("record") for rule in every}


def test_the_objective_is_a_bound_of_the_histogram(groups: list[dict[str, Any]]) -> None:
    """Of a bound that there is not the rate is that of nothing, and the alert never rings."""
    bounds = set(re.findall(r'le="([^"]+)"', str(groups)))
    assert bounds
    assert {float(bound) for bound in bounds} <= set(TTFT_S)


def test_each_rule_says_what_it_is_and_what_to_do(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "action", "runbook_url"}, rule["alert"]


def test_each_rule_has_a_runbook_and_each_runbook_a_rule(rules: list[dict[str, Any]]) -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "ALERTS.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(rule["alert"] for rule in rules)
    for rule in rules:
        assert rule["annotations"]["runbook_url"] == f"docs/ALERTS.md#{rule['alert'].lower()}"


def test_each_runbook_says_how_bad_it_is_what_it_means_and_what_to_do(rules: list[dict[str, Any]]) -> None:
    text = (ROOT / "docs" / "ALERTS.md").read_text()
    for rule in rules:
        section = text.split(f"### {rule['alert']}\n")[1].split("\n### ")[0].split("\n## ")[0]
        assert f"*{rule['labels']['severity']}" in section, rule["alert"]
        for part in ("**Means.**", "**Do.**"):
            assert part in section, (rule["alert"], part)


def test_each_rule_is_seen_ringing_and_silent(rules: list[dict[str, Any]]) -> None:
    tested = yaml.safe_load((PROMETHEUS / "alerts.test.yml").read_text())["tests"]
    cases = [case for test in tested for case in test["alert_rule_test"]]
    every = {rule["alert"] for rule in rules}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == every
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == every


@pytest.mark.parametrize(
    ("command", "said"),
    [("check rules alerts.yml", r"SUCCESS: \d+ rules found"), ("test rules alerts.test.yml", "SUCCESS")],
)
def test_promtool_agrees(command: str, said: str) -> None:
    """The container tests run the same with the image's promtool."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed here")
    ended = subprocess.run(["promtool", *command.split()], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(said, ended.stdout)
