"""Two services with files of their own, which are not the same: who is missing in one waits, and operators are told."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coppice_cli.tenants.operations import add_tenant
from tests.e2e.stack import Stack
from tests.fakes.waiting import WAIT_S, wait_for

BODY = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.mark.wide
def test_who_is_missing_at_the_cache_waits_alone_until_the_files_agree(checkpoint: Path, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "scheduler.yaml", tmp_path / "cache.yaml"
    acme = add_tenant(ours, "acme", {}, "main")
    shutil.copy(ours, theirs)
    nova = add_tenant(ours, "nova", {}, "main")
    with Stack(checkpoint, tmp_path / "logs", num_blocks=128, tenants=ours, cache_tenants=theirs) as stack:
        ready = f"http://127.0.0.1:{stack.metrics_port}/readyz"
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(stack.post, "/v1/completions", BODY, nova)
            wait_for(lambda: "the tenants files differ" in stack.get(ready)[1], "a line for operators")
            assert stack.metric(stack.metrics_port, "coppice_tenants_agree") == 0
            assert stack.post("/v1/completions", BODY, acme)[0] == 200
            assert not waits.done()
            shutil.copy(ours, tmp_path / "new.yaml")
            (tmp_path / "new.yaml").replace(theirs)
            assert waits.result(WAIT_S)[0] == 200
        wait_for(lambda: "differ" not in stack.get(ready)[1], "the line to be gone")
        assert stack.metric(stack.metrics_port, "coppice_tenants_agree") == 1
        assert "the tenants files agree again" in stack.logs()
