"""docs/METRICS.md is what the services register; names are what promtool accepts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import metrics_reference
from scripts.metrics_reference import ROOT, exposition, reference, registries, series_names

SERVICES = tuple(registries())


def test_the_document_says_what_the_code_says() -> None:
    assert metrics_reference.main(["--check"]) is None


def test_a_stale_document_is_told_and_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "METRICS.md"
    copy.write_text(metrics_reference.DOCUMENT.read_text().replace("| gauge |", "| counter |", 1))
    monkeypatch.setattr(metrics_reference, "DOCUMENT", copy)
    assert metrics_reference.main(["--check"]) == "METRICS.md differs from the code: run make metrics-reference"
    assert metrics_reference.main([]) is None
    assert metrics_reference.main(["--check"]) is None


def test_every_name_in_the_code_is_in_the_reference() -> None:
    """Whatever registers a metric of ours is in what the document is written from."""
    known = {name for entries in reference().values() for entry in entries for name in (entry.name, *entry.series)}
    places = ("services/*/*/**/*.py", "shared/coppice/**/*.py", "tools/coppice_audit/*.py")
    written = {
        name
        for place in places
        for file in ROOT.glob(place)
        if "prometheus_client" in file.read_text()
        for name in re.findall(r'"((?:vllm:|coppice_|gen_ai_server_)[a-z0-9_:]+)"', file.read_text())
    }
    assert len(written) > 50
    packages = {name for name in written if (ROOT / "shared" / name).is_dir() or list(ROOT.glob(f"*/*/{name}"))}
    assert not {name for name in written - packages if name not in known and f"{name}_total" not in known}


def test_each_metric_says_what_it_means() -> None:
    for entries in reference().values():
        names = [entry.name for entry in entries]
        assert len(names) == len(set(names))
        for entry in entries:
            assert entry.text.endswith("."), entry.name
            assert entry.kind in ("counter", "gauge", "histogram"), entry.name


def test_what_gateways_and_boards_of_the_field_read_is_there() -> None:
    expected = {
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:cache_config_info", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
        *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total"),
        *(f"vllm:request_{part}_time_seconds_bucket" for part in ("queue", "prefill", "decode", "inference")),
        *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
        *("vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"),
        *("vllm:request_time_per_output_token_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket"),
        *("vllm:request_success_total", "coppice_build_info"),
        *(f"gen_ai_server_{part}_seconds_bucket" for part in ("request_duration", "time_to_first_token")),
        "gen_ai_server_time_per_output_token_seconds_bucket",
    }
    assert not expected - series_names()


@pytest.mark.parametrize("service", SERVICES)
def test_promtool_accepts_all_names_but_those_of_vllm(service: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed here")
    text = exposition(registries()[service])
    ended = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    complaints = (ended.stdout + ended.stderr).strip().splitlines()
    ours = [line for line in complaints if not re.match(r"vllm:\S+ metric names should not contain ':'$", line)]
    assert not ours
    assert bool(complaints) == (ended.returncode != 0)
