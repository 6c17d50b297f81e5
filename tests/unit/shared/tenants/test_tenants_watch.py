"""A tenants file that changes: as a whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from coppice.errors import UsageError
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.watch import TenantsWatch


def text(*names: str) -> str:
    return "tenants:\n" + "".join(f'  - id: {name}\n    api_key_sha256: "{digest_of_key(name)}"\n' for name in names)


class Seen:
    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "tenants.yaml"
        self.write(text("a"))
        self.watch = TenantsWatch(self.path)
        self.applied: list[list[str]] = []
        self.refusal: UsageError | None = None

    def write(self, content: str) -> None:
        """As an editor that renames."""
        new = self.path.with_suffix(".new")
        new.write_text(content)
        os.replace(new, self.path)

    def look(self, *, always: bool = False) -> list[list[str]]:
        for _ in range(2):  # what changed is read when it lies still
            self.watch.look(self._apply, always=always)
        applied, self.applied = self.applied, []
        return applied

    def _apply(self, directory: TenantDirectory, content: bytes) -> None:
        if self.refusal is not None:
            raise self.refusal
        assert content == self.path.read_bytes()
        self.applied.append([tenant.id for tenant in directory.tenants])

    def metrics(self) -> str:
        registry = CollectorRegistry()
        registry.register(self.watch)
        return generate_latest(registry).decode()


@pytest.fixture
def seen(tmp_path: Path) -> Seen:
    return Seen(tmp_path)


def test_a_change_is_applied_once(seen: Seen) -> None:
    assert seen.look() == []
    before = seen.watch.directory.version
    seen.write(text("a", "b"))
    assert seen.look() == [["a", "b"]]
    assert seen.look() == seen.look(always=True) == []
    assert seen.watch.directory.version != before
    assert f'coppice_tenants_file{{version="{seen.watch.directory.version}"}} 1.0' in seen.metrics()
    assert seen.watch.notes == (f"tenants file: version {seen.watch.directory.version}",)


def test_a_wrong_file_leaves_the_old_one_and_says_line_and_key(seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    before = seen.watch.directory
    seen.write(text("a", "b") + "    wieght: 2\n")
    assert seen.look() == seen.look() == []
    assert seen.watch.directory is before
    assert "tenants.yaml:6: unknown key tenants.1.wieght; did you mean weight?" in seen.watch.problem
    assert seen.watch.problem in caplog.text
    assert seen.watch.problem in seen.watch.notes[1]
    assert seen.watch.num_errors == 1, "the same file is complained of once"
    assert "coppice_tenants_file_errors_total 1.0" in seen.metrics()
    assert "coppice_tenants_file_refused 1.0" in seen.metrics()
    seen.write(text("a"))
    assert seen.look() == [], "it is what counts already"
    assert (seen.watch.problem, seen.watch.num_errors) == ("", 1)


def test_a_file_that_is_being_written_is_not_read(seen: Seen) -> None:
    with seen.path.open("w") as file:
        for part in (text("b"), "# more\n", "# and more\n"):
            file.write(part)
            file.flush()
            seen.watch.look(seen._apply)
            assert (seen.applied, seen.watch.problem) == ([], "")
    seen.watch.look(seen._apply)
    assert seen.applied == [["b"]]


@pytest.mark.parametrize("damage", ["gone", "folder", "empty", "cut", "binary"])
def test_no_damage_takes_the_tenants_away(seen: Seen, damage: str) -> None:
    if damage in ("gone", "folder"):
        seen.path.unlink()
    if damage == "folder":
        seen.path.mkdir()
    if damage in ("empty", "cut", "binary"):
        seen.path.write_bytes({"empty": b"", "cut": text("a", "b").encode()[:-3], "binary": b"\xff\xfe"}[damage])
    assert seen.look() == []
    assert seen.watch.problem
    assert [tenant.id for tenant in seen.watch.directory.tenants] == ["a"]
    if damage == "folder":
        seen.path.rmdir()
    seen.write(text("c"))
    assert seen.look() == [["c"]]


def test_who_applies_it_may_refuse_it(seen: Seen) -> None:
    seen.write(text("b"))
    seen.refusal = UsageError("a worker is too small")
    assert seen.look() == []
    assert "a worker is too small" in seen.watch.problem
    assert [tenant.id for tenant in seen.watch.directory.tenants] == ["a"]
    seen.refusal = None
    assert seen.look() == []
    assert seen.look(always=True) == [["b"]], "as SIGHUP asks for"


def test_a_key_admits_while_it_is_its_tenants(seen: Seen) -> None:
    from datetime import UTC, datetime

    now = datetime(2026, 7, 1, tzinfo=UTC)
    tenant = seen.watch.directory.authenticate("a", now)
    assert tenant is not None
    assert seen.watch.directory.admits(tenant)
    seen.write(text("b") + text("a").replace("tenants:\n", "").replace("id: a", "id: c"))
    assert seen.look() == [["b", "c"]]
    assert not seen.watch.directory.admits(tenant), "another tenant has it now"
