"""A real Prometheus that scrapes a stack, with the project's own rules."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.metrics_reference import ROOT
from tests.fakes.ports import free_port
from tests.fakes.waiting import wait_for

RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"


def is_installed() -> bool:
    return shutil.which("prometheus") is not None


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Labels (`metric`) and `value` of each series."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def exemplars(self, expression: str) -> list[tuple[dict[str, str], str]]:
        """Labels of a series, and the trace that it names."""
        now = time.time()
        found = self._get("query_exemplars", query=expression, start=str(now - 600), end=str(now + 600))
        return [(row["seriesLabels"], one["labels"]["trace_id"]) for row in found for one in row["exemplars"]]

    def label_values(self, label: str, metric: str) -> list[str]:
        """As Grafana asks for a variable's."""
        found: list[str] = self._get(f"label/{label}/values", **{"match[]": metric})
        return found

    def firing(self) -> list[dict[str, str]]:
        """Labels of alerts that ring."""
        return [alert["labels"] for alert in self._get("alerts")["alerts"] if alert["state"] == "firing"]

    def unhealthy(self) -> list[str]:
        """Targets and rules that are not as they should be."""
        targets = self._get("targets")["activeTargets"]
        rules = [rule for group in self._get("rules")["groups"] for rule in group["rules"]]
        found = [f"{target['scrapeUrl']}: {target['lastError']}" for target in targets if target["health"] != "up"]
        return found + [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            return json.load(response)["data"]


@contextmanager
def scraping(folder: Path, jobs: Mapping[str, list[int]]) -> Iterator[Prometheus]:
    """`jobs`: ports of loopback by job. Once all of them answer."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
            for job, ports in jobs.items()
        ],
    }
    folder.mkdir(parents=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port, log = free_port(), folder / "prometheus.log"
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command.append("--enable-feature=exemplar-storage")
    with log.open("wb") as file:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=file, stderr=file)
    prometheus = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_for(lambda: _is_well(prometheus, log, process), "all targets and rules to be well")
        yield prometheus
    finally:
        process.terminate()
        process.wait(30)


def _is_well(prometheus: Prometheus, log: Path, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, log.read_text()[-3000:]
    try:
        return not prometheus.unhealthy()
    except OSError:
        return False
