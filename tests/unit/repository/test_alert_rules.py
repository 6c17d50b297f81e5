"""The alert rules: each is tested, asks for metrics that exist, and is loaded."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.unit.repository.test_deploy_files import ROOT, metric_names, names_in

PROMETHEUS = ROOT / "deploy" / "prometheus"
PLACES = ("services/*/*/edge/**/*metrics.py", "shared/coppice/tenants/*.py", "tools/coppice_audit/watch.py")


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_prometheus_loads_the_rules() -> None:
    assert yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["rule_files"] == ["alerts.yml"]


def test_rules_ask_for_metrics_that_exist(rules: list[dict[str, Any]]) -> None:
    asked = {name for rule in rules for name in metric_names(rule["expr"])}
    assert len(asked) >= 8
    assert not asked - names_in(*PLACES)


def test_each_rule_says_what_it_is_and_what_to_do(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]


def test_each_rule_is_seen_ringing(rules: list[dict[str, Any]]) -> None:
    tested = yaml.safe_load((PROMETHEUS / "alerts.test.yml").read_text())["tests"]
    ringing = {case["alertname"] for test in tested for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert ringing == {rule["alert"] for rule in rules}


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
