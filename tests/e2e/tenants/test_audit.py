"""`coppice audit isolation` against real services. Times are this machine's: only what answers say is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coppice.tenants.keys import digest_of_key
from coppice_audit.core.judge import P_CERTAIN
from coppice_audit.run import EXIT_INCONCLUSIVE, EXIT_LEAK
from tests.e2e.stack import Stack

SAMPLES = 48
KEYS = {"orchard": "orchard-key", "meadow": "meadow-key", "orchard-2": "orchard-key-2"}
TENANTS = f"""
tenants:
  - id: orchard
    mode: {{shared: orchards}}
    api_key_sha256: {digest_of_key(KEYS["orchard"])}
  - id: orchard-2
    mode: {{shared: orchards}}
    api_key_sha256: {digest_of_key(KEYS["orchard-2"])}
  - id: meadow
    api_key_sha256: {digest_of_key(KEYS["meadow"])}
"""


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("audited")
    (folder / "tenants.yaml").write_text(TENANTS)
    with Stack(checkpoint, folder, num_blocks=512, tenants=folder / "tenants.yaml") as stack:
        yield stack


def audit(stack: Stack, folder: Path, victim: str, attacker: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "coppice_cli", "audit", "isolation", "--base-url", stack.url]
    environ = {
        **os.environ,
        "COPPICE_AUDIT_ISOLATION_VICTIM_KEY": KEYS[victim],
        "COPPICE_AUDIT_ISOLATION_ATTACKER_KEY": KEYS[attacker],
    }
    sizes = [f"--samples={SAMPLES}", "--prompt-tokens=160", f"--json={folder / 'found.json'}"]
    done = subprocess.run([*command, *sizes], env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, EXIT_LEAK, EXIT_INCONCLUSIVE), done.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return done.returncode, found


@pytest.mark.wide
def test_answers_to_a_tenant_tell_nothing_of_another(stack: Stack, tmp_path: Path) -> None:
    _, found = audit(stack, tmp_path, "orchard", "meadow")
    checks = {check["name"]: check for check in found["checks"]}
    assert not found["failures"]
    assert checks["positive control"]["numbers"]["reported_cached_share"] == 1.0, "the audit sees its own hits"
    for name in ("answers", "errors"):
        assert checks[name]["numbers"]["p"] > P_CERTAIN, found["checks"]
    assert checks["answers"]["numbers"]["samples"] == [SAMPLES, SAMPLES]
    assert "status" in checks["errors"]["numbers"]["facts"]


@pytest.mark.wide
def test_tenants_of_one_group_share_and_it_is_seen(stack: Stack, tmp_path: Path) -> None:
    code, found = audit(stack, tmp_path, "orchard", "orchard-2")
    checks = {check["name"]: check for check in found["checks"]}
    assert (code, found["verdict"], checks["answers"]["verdict"]) == (EXIT_LEAK, "leak", "leak")
    assert checks["answers"]["numbers"]["reported_cached"] == SAMPLES
