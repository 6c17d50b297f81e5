"""Whether two services go by the same tenants file: told after a while, once, and again when it is over."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from coppice.tenants.agreement import GRACE_S, TenantsAgreement
from coppice.tenants.watch import TenantsWatch

ONE = f"tenants:\n  - {{id: a, api_key_sha256: '{'0' * 64}'}}\n"


class World:
    """A scheduler with a file, or without one, and what the cache service has said."""

    def __init__(self, folder: Path, *, has_file: bool = True) -> None:
        path = folder / "tenants.yaml"
        path.write_text(ONE)
        self.path = path
        watch = TenantsWatch(path) if has_file else None
        self.ours = watch.directory.version if watch is not None else ""
        self.theirs: str | None = None
        self.agreement = TenantsAgreement(watch, lambda: self.theirs)

    def differs(self) -> list[str]:
        return [note for note in self.agreement.notes if "differ" in note]

    def gauge(self) -> list[str]:
        registry = CollectorRegistry()
        registry.register(self.agreement)
        text = generate_latest(registry).decode()
        return [line for line in text.splitlines() if line.startswith("coppice_tenants_agree")]


@pytest.fixture
def world(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> World:
    caplog.set_level(logging.INFO, "coppice.tenants")
    return World(tmp_path)


def test_what_is_not_known_is_not_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for now_s in (0.0, 10 * GRACE_S):
        world.agreement.tend(now_s)
    assert (world.differs(), world.gauge(), caplog.messages) == ([], [], [])


def test_a_moment_at_a_change_is_not_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.theirs = "old"
    world.agreement.tend(0.0)
    world.agreement.tend(GRACE_S - 0.001)
    world.theirs = world.ours
    world.agreement.tend(GRACE_S)
    world.theirs = "older"
    for now_s in (GRACE_S + 1, 2 * GRACE_S):  # each difference has its own time
        world.agreement.tend(now_s)
    assert (world.differs(), world.gauge(), caplog.messages) == ([], ["coppice_tenants_agree 1.0"], [])


def test_a_difference_is_told_once_with_both_versions_and_what_to_do(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.theirs = "fedcba987654"
    for now_s in (0.0, GRACE_S, GRACE_S + 1, 10 * GRACE_S):
        world.agreement.tend(now_s)
    (line,) = caplog.messages
    assert world.differs() == [line]
    for words in (f"version {world.ours} of {world.path} here", "version fedcba987654 at the cache", "SIGHUP"):
        assert words in line
    assert world.gauge() == ["coppice_tenants_agree 0.0"]
    world.theirs = world.ours
    world.agreement.tend(11 * GRACE_S)
    assert caplog.messages[1:] == [
        f"the tenants files agree again: version {world.ours} of {world.path} here and at the cache service"
    ]
    assert (world.differs(), world.gauge()) == ([], ["coppice_tenants_agree 1.0"])


@pytest.mark.parametrize(("has_file", "theirs"), [(True, ""), (False, "abc")])
def test_a_file_on_one_side_alone_is_a_difference(tmp_path: Path, has_file: bool, theirs: str) -> None:
    world = World(tmp_path, has_file=has_file)
    world.theirs = theirs
    for now_s in (0.0, GRACE_S):
        world.agreement.tend(now_s)
    assert len(world.differs()) == 1
    assert ("none at the cache service" if has_file else "none here, version abc") in world.differs()[0]


def test_no_file_on_either_side_is_none(tmp_path: Path) -> None:
    world = World(tmp_path, has_file=False)
    world.theirs = ""
    for now_s in (0.0, GRACE_S):
        world.agreement.tend(now_s)
    assert (world.differs(), world.gauge()) == ([], ["coppice_tenants_agree 1.0"])
