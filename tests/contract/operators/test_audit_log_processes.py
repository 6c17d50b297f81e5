"""`--audit-log` of a process: what it is given is where its acts go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from coppice_up.ports import free_addresses
from tests.fakes.api.rest import DEMO
from tests.fakes.api.surface import call, methods
from tests.fakes.waiting import wait_for

NOBODY = "127.0.0.1:1"  # where no cache service answers


@contextmanager
def running(module: str, log: Path, *flags: str) -> Iterator[None]:
    command = [sys.executable, "-m", module, "--audit-log", str(log), "--cache", NOBODY, "--model", str(DEMO), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_the_scheduler_tells_of_its_tenants(tmp_path: Path) -> None:
    tenants, log = tmp_path / "tenants.yaml", tmp_path / "audit.log"
    tenants.write_text("tenants: [{id: a, api_key_sha256: []}]\n")
    with running("coppice_scheduler", log, "--port=0", "--grpc-port=0", f"--tenants={tenants}"):
        wait_for(lambda: len(lines(log)) == 1, "the line of the first file")
        tenants.write_text("tenants: [{id: b, api_key_sha256: []}]\n")
        wait_for(lambda: len(lines(log)) == 2, "the line of the second file")
    first, second = lines(log)
    assert (first["service"], first["verb"], first["tenants_added"]) == ("scheduler", "tenants", ["a"])
    assert (second["tenants_added"], second["tenants_removed"]) == (["b"], ["a"])


@pytest.mark.wide
def test_a_worker_tells_who_drained_it(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    (address,) = free_addresses(1)
    (drain,) = [method for method in methods("Worker") if method.name == "Drain"]
    flags = ("--session-port=0", "--http-port=0", f"--grpc-port={address.port}", "--device=cpu", "--kernels=torch")
    with running("coppice_worker", log, *flags, "--num-blocks=8", "--threads=1"):
        with grpc.insecure_channel(str(address)) as channel:
            wait_for(lambda: call(channel, drain) is grpc.StatusCode.OK, "the worker is drained")
        wait_for(lambda: lines(log), "its line")
    assert lines(log)[0].items() >= {"service": "worker", "verb": "drain", "via": "gRPC", "result": "done"}.items()
