"""`coppice doctor`: what it finds wrong, and what it says to do."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import socket
import time
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.compiled import digest
from coppice_cli.app import app
from coppice_cli.doctor import command, machine, services, software
from coppice_cli.doctor.findings import Finding, State, fail, ok, warn, worst
from coppice_up.options import UpOptions
from tests.fakes.ports import free_port, valkey_server

GIB = 1 << 30
Usage = namedtuple("Usage", ["total", "used", "free"])


def test_the_worst_finding_counts() -> None:
    assert worst([ok("a", "b")]) is State.OK
    assert worst([ok("a", "b"), warn("a", "b", "c")]) is State.WARN
    assert worst([fail("a", "b", "c"), warn("a", "b", "c")]) is State.FAIL


@pytest.mark.parametrize(
    ("version", "state"),
    [((3, 10, 1), State.FAIL), ((3, 11, 0), State.OK), ((3, 13, 9), State.OK), ((3, 14, 0), State.FAIL)],
)
def test_versions_of_python(version: tuple[int, ...], state: State) -> None:
    assert software.check_python(version).state is state


REQUIRES = [
    "grpcio<2,>=1.85.1",
    "rich<16,>=15",
    "pytest==9.2.0; extra == 'dev'",
    "torch<3,>=2.13; extra == 'up'",
    "triton<4,>=3.6; (platform_system == 'Linux') and extra == 'up'",
]


def packages(versions: dict[str, str]) -> list[Finding]:
    def version_of(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    return list(software.check_packages(lambda: REQUIRES, version_of))


def test_packages_of_other_versions_and_missing_ones_are_named() -> None:
    right = {"grpcio": "1.85.1", "rich": "15.0.0", "torch": "2.13.0+cpu", "triton": "3.6"}
    (well,) = packages(right)
    assert (well.state, well.what[:5]) == (State.OK, "all 4")
    found = packages({**right, "grpcio": "1.85", "rich": "16.0"})
    assert [(each.state, each.subject) for each in found] == [
        (State.FAIL, "package grpcio"),
        (State.FAIL, "package rich"),
    ]
    assert found[0].what == "1.85 is installed, <2,>=1.85.1 is asked for"
    (missing,) = packages({name: version for name, version in right.items() if name != "torch"})
    assert (missing.state, missing.subject, missing.what) == (State.FAIL, "package torch", "is not installed")


def test_our_own_requirements_can_be_read() -> None:
    """Each line of the real metadata: a form that is not understood would go unchecked."""
    for line in metadata.requires("coppice") or []:
        parsed = software._REQUIREMENT.match(line)
        assert parsed is not None
        assert software._BOUND.findall(parsed[2]) or not parsed[2].strip() or line.startswith("coppice"), line


def test_a_package_that_is_no_package_is_said() -> None:
    def requires() -> list[str]:
        raise metadata.PackageNotFoundError("coppice")

    (found,) = software.check_packages(requires)
    assert found.state is State.WARN


def test_compilers_for_a_cpu_and_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    found = software.check_compiler
    assert found(has_gpu=False, which=lambda name: None).state is State.WARN
    assert found(has_gpu=False, which=lambda name: f"/bin/{name}").what.startswith("/bin/g++")
    assert found(has_gpu=True, which=lambda name: None).state is State.FAIL
    assert found(has_gpu=True, which={"cc": "/bin/cc"}.get).state is State.FAIL  # Triton looks for no such name

    def which(name: str) -> str | None:
        return {"gcc": "/bin/gcc"}.get(name)

    without = found(has_gpu=True, which=which, include=str(tmp_path))
    assert (without.state, "Python.h is not there" in without.what) == (State.FAIL, True)
    assert "python3-dev" in without.to_do
    (tmp_path / "Python.h").touch()
    assert found(has_gpu=True, which=which, include=str(tmp_path)).state is State.OK
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert "/no/such/compiler" in found(has_gpu=True, which=which, include=str(tmp_path)).what


@pytest.mark.parametrize(
    ("program", "state", "words"),
    [
        ("import time; time.sleep(60)", State.FAIL, "did not answer within"),
        ("import os; os.abort()", State.FAIL, "torch fails: exit code -6"),
        ("raise RuntimeError('driver too old')", State.FAIL, "torch fails: RuntimeError: driver too old"),
        ("raise ModuleNotFoundError(\"No module named 'torch'\")", State.FAIL, "torch is not installed"),
        ("""print('{"torch": "2", "cuda": null, "gpus": []}')""", State.WARN, "built without CUDA"),
        ("""print('{"torch": "2", "cuda": "12", "gpus": []}')""", State.WARN, "sees none"),
    ],
)
def test_a_gpu_is_looked_for_in_a_process_of_its_own(program: str, state: State, words: str) -> None:
    found, count = software.check_gpu(program, limit_s=0.5 if "sleep" in program else 60.0)
    assert (found.state, count) == (state, 0)
    assert words in found.what
    assert found.to_do


def test_gpus_that_are_there_are_told_with_their_memory() -> None:
    told = json.dumps({"torch": "2", "cuda": "12", "gpus": [["a card", 3 * GIB, 4 * GIB]]})
    found, count = software.check_gpu(f"print({told!r})")
    assert (found.state, count) == (State.OK, 1)
    assert "a card (3.0 of 4.0 GiB free)" in found.what


def test_torch_of_this_installation_answers() -> None:
    found, _ = software.check_gpu()
    assert found.state in (State.OK, State.WARN), found


def test_the_hard_limit_of_open_files_counts() -> None:
    unlimited = resource.RLIM_INFINITY
    limits = {(64, 100): State.FAIL, (64, 1024): State.WARN, (64, 65536): State.OK, (64, unlimited): State.OK}
    for limit, state in limits.items():
        assert machine.check_files(lambda limit=limit: limit).state is state  # type: ignore[misc]


def test_shared_memory_and_disk_may_be_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(count: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, count))

    for count, shared, disk in (
        (1 << 20, State.FAIL, State.FAIL),
        (64 << 20, State.WARN, State.FAIL),
        (2 * GIB, State.OK, State.WARN),
        (9 * GIB, State.OK, State.OK),
    ):
        free(count)
        assert machine.check_shared_memory(tmp_path).state is shared
        (found,) = machine.check_folders({"logs": tmp_path})
        assert found.state is disk
    assert machine.check_shared_memory(tmp_path / "nowhere").state is State.WARN


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = {
        name: next(iter(machine.check_folders({name: folder})))
        for name, folder in {"new": tmp_path / "a" / "b", "wrong": tmp_path / "file" / "logs"}.items()
    }
    assert found["new"].state is not State.FAIL
    assert not (tmp_path / "a").exists(), "nothing is made"
    assert (found["wrong"].state, found["wrong"].what) == (State.FAIL, f"{tmp_path / 'file'} is no folder")


def test_the_disk_tier_wants_room_for_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, 3 * GIB))
    for needed, state in ((2 * GIB, State.OK), (4 * GIB, State.WARN)):
        (found,) = machine.check_disk(tmp_path, needed)
        assert (found.state, found.subject) == (state, "folder of the disk tier")
    assert list(tmp_path.iterdir()) == [], "nothing is left there"
    (found,) = machine.check_disk(tmp_path / "mount", GIB)
    assert (found.state, found.what) == (State.FAIL, f"{tmp_path / 'mount'} is not there")
    (tmp_path / "file").touch()
    (found,) = machine.check_disk(tmp_path / "file", GIB)
    assert (found.state, found.what) == (State.FAIL, f"{tmp_path / 'file'} is no folder")


def test_a_disk_that_takes_no_file_has_no_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(machine.os, "fsync", full)
    (found,) = machine.check_disk(tmp_path, 0)
    assert (found.state, found.what) == (State.FAIL, f"{tmp_path}: No space left on device")


def test_the_disk_tier_is_looked_at_where_it_is_named(tmp_path: Path) -> None:
    words = ["doctor", "--json", "--disk-folder", str(tmp_path), "--disk-mib", "1"]
    said = json.loads(CliRunner().invoke(app, words).stdout)
    assert "folder of the disk tier" in [finding["subject"] for finding in said["findings"]]


def test_clocks_that_stand_or_are_wrong() -> None:
    assert machine.check_clock().state is State.OK
    assert machine.check_clock(monotonic=lambda: 5.0).state is State.FAIL
    past = machine.check_clock(wall=lambda: 0.0)
    assert (past.state, past.what) == (State.FAIL, "it is 1970 here")


def test_ports_that_others_have_are_a_warning_and_the_one_that_was_named_a_failure() -> None:
    named, usual = free_port(), free_port()
    options = UpOptions(port=named)
    with socket.create_server(("127.0.0.1", named)):
        (found,) = services.check_ports(options)
    assert (found.state, found.subject, found.to_do) == (State.FAIL, f"port {named}", "choose another with --port")
    (free,) = services.check_ports(options)
    assert (free.state, free.what) == (State.OK, "all 1 that coppice up takes are free")
    with pytest.MonkeyPatch.context() as patched, socket.create_server(("127.0.0.1", usual)):
        patched.setattr("coppice_up.plan.USUAL_CACHE_ADMIN", usual)
        (found,) = services.check_ports(UpOptions(port=0, cache_admin_port=None))
    assert found.state is State.WARN
    assert "--cache-admin-port chooses another" in found.to_do


def test_redis_answers_and_its_clock_is_compared() -> None:
    with valkey_server() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        found = list(services.check_redis_url(url))
        assert [(each.state, each.subject) for each in found] == [(State.OK, "Redis"), (State.OK, "clock of Redis")]
        behind = list(services.check_redis_url(url, now=lambda: time.time() - 60))[1]
        ahead = list(services.check_redis_url(url, now=lambda: time.time() + 60))[1]
    assert (behind.state, ahead.state) == (State.WARN, State.WARN)
    assert "before ours" in behind.what
    assert "behind ours" in ahead.what
    (gone,) = services.check_redis_url("redis://user:geheim@127.0.0.1:1/0")
    assert gone.state is State.FAIL
    assert "geheim" not in gone.what + gone.to_do


@pytest.mark.parametrize(
    ("word", "made_of", "state", "what"),
    [
        ("auto", None, State.OK, "its source; there is no compiled core"),
        ("auto", "this", State.OK, "compiled"),
        ("auto", "another", State.WARN, "its source, slower: there is a compiled core that was made of another source"),
        ("always", None, State.FAIL, "COPPICE_COMPILED is always, and there is no compiled core"),
        ("never", "this", State.OK, "its source, as COPPICE_COMPILED is never"),
    ],
)
def test_whether_cores_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, made_of: str | None, state: State, what: str
) -> None:
    monkeypatch.setenv("COPPICE_COMPILED", word)
    if made_of is not None:
        (tmp_path / "_compiled").mkdir()
        (tmp_path / "_compiled" / "made_of").write_text(digest(tmp_path) if made_of == "this" else made_of)
    (found,) = software.check_cores({"coppice_cache": tmp_path}.get)
    assert (found.state, found.subject) == (state, "core of the cache")
    assert found.what.startswith(what)
    assert ("make compiled" in found.to_do) is (state is not State.OK)


def test_a_word_that_is_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_COMPILED", "yes")
    (found,) = software.check_cores()
    assert (found.state, found.to_do) == (State.FAIL, "unset COPPICE_COMPILED")


def test_the_embedded_valkey_is_there() -> None:
    assert services.check_valkey().state is State.OK


@pytest.mark.parametrize(
    ("found", "code"), [(ok("a", "b"), 0), (warn("a", "b", "do this"), 0), (fail("a", "b", "do"), 1)]
)
def test_the_exit_code_says_whether_a_stack_would_run(
    monkeypatch: pytest.MonkeyPatch, found: Finding, code: int
) -> None:
    monkeypatch.setattr(command, "_findings", lambda *asked: [found, ok("longer", "well")])
    plain = CliRunner().invoke(app, ["doctor"])
    assert plain.exit_code == code
    assert plain.output.splitlines()[0] == f"{found.state.value:4}  a       b"
    assert ("-> do" in plain.output) is bool(found.to_do)
    told = CliRunner().invoke(app, ["doctor", "--json"])
    assert told.exit_code == code
    parsed = json.loads(told.output)
    assert parsed["state"] == found.state.value
    assert parsed["findings"][0] == {"state": found.state.value, "subject": "a", "what": "b", "to_do": found.to_do}


def test_everything_is_looked_at() -> None:
    subjects = {each.subject for each in command._findings("", free_port(), 1, None)}
    wanted = {"Python", "compiler", "GPU", "Valkey", "clock", "open files", "/dev/shm", "folder of temporary files"}
    wanted |= {"core of the cache", "core of the scheduler"}
    assert wanted <= subjects
    assert any(subject.startswith("package") for subject in subjects)
    assert any(subject.startswith("port") for subject in subjects)
