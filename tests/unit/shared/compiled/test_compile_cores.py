"""How a build comes to be there, with a compiler that only says what it was asked: all of it at once, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from coppice.compiled import FOLDER, Build, build_of
from coppice.errors import CoppiceError
from scripts import compile_cores
from scripts.compile_cores import compile_core, put, stays_source


@pytest.fixture
def source(tmp_path: Path) -> Path:
    package = tmp_path / "checkout" / "spam"
    for room in ("core", "core/rooms"):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").touch()
    (package / "core" / "rooms" / "index.py").write_text("KIND = 1\n")
    return package


def library_in(folder: Path, content: str) -> Path:
    for file in ("core/rooms/index.so", "core__mypyc.so"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content)
    return folder


def compiles(monkeypatch: pytest.MonkeyPatch, beside: Callable[[], object] = lambda: None) -> None:
    def run_mypyc(package: Path, made: Path) -> None:
        library_in(made / "lib" / package.name, "first")
        beside()

    monkeypatch.setattr(compile_cores, "run_mypyc", run_mypyc)


def files_of(package: Path) -> set[str]:
    build = package / FOLDER
    return {path.relative_to(build).as_posix() for path in build.rglob("*") if path.is_file()}


def test_a_build_lies_beside_the_source(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles(monkeypatch)
    compile_core(source, source, tmp_path / "made")
    assert build_of(source) is Build.CURRENT
    assert files_of(source) == {
        *("core/__init__.py", "core/rooms/__init__.py", "core/rooms/index.so", "core__mypyc.so", "made_of")
    }
    assert {path.name for path in source.iterdir()} == {"core", FOLDER}


RECORD = "class Request(Record, frozen=True):\n    name: str | None\n"


def test_records_stay_source_and_lie_beside_what_is_compiled(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "core" / "request.py").write_text(RECORD)
    compiles(monkeypatch)
    compile_core(source, source, tmp_path / "made")
    assert (source / FOLDER / "core" / "request.py").read_text() == RECORD
    assert not (source / FOLDER / "core" / "rooms" / "index.py").exists()


def test_classes_that_would_lose_something_are_refused(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    for text, stays in (("class A: ...\n", False), ("class A(Enum):\n    B = 1\n", False), (RECORD, True)):
        module.write_text(text)
        assert stays_source(module) is stays
    module.write_text("class A(Base, tag=1): ...\n")
    with pytest.raises(CoppiceError, match="class A has keywords"):
        stays_source(module)


def test_a_source_that_cannot_be_read_has_no_build(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles(monkeypatch)
    compile_core(source, source, tmp_path / "made")
    (source / "core" / ".#index.py").symlink_to("nobody@nowhere")
    assert build_of(source) is Build.STALE


def test_a_build_for_a_copy_lies_there(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles(monkeypatch)
    target = tmp_path / "copy" / "spam"
    shutil.copytree(source, target)
    compile_core(source, target, tmp_path / "made")
    assert (build_of(target), build_of(source)) == (Build.CURRENT, Build.NONE)


def test_a_copy_that_differs_gets_none(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles(monkeypatch)
    target = tmp_path / "copy" / "spam"
    shutil.copytree(source, target)
    (target / "core" / "more.py").touch()
    with pytest.raises(CoppiceError, match="changed while it was compiled"):
        compile_core(source, target, tmp_path / "made")
    assert build_of(target) is Build.NONE


def test_a_source_that_changes_meanwhile_gets_none(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles(monkeypatch, (source / "core" / "more.py").touch)
    with pytest.raises(CoppiceError, match="changed while it was compiled"):
        compile_core(source, source, tmp_path / "made")
    assert build_of(source) is Build.NONE


def test_a_new_build_takes_the_place_of_the_one_before(source: Path, tmp_path: Path) -> None:
    put(library_in(tmp_path / "one", "first"), source, "first")
    (tmp_path / "one" / "core" / "gone.so").touch()
    put(library_in(tmp_path / "two", "second"), source, "second")
    assert (source / FOLDER / "core__mypyc.so").read_text() == "second"
    assert (source / FOLDER / "made_of").read_text() == "second"
    assert {path.name for path in source.iterdir()} == {"core", FOLDER}


def test_one_that_is_cut_off_leaves_the_one_before(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(library_in(tmp_path / "one", "first"), source, "first")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_cores.shutil, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(library_in(tmp_path / "two", "second"), source, "second")
    assert (source / FOLDER / "made_of").read_text() == "first"
    assert {path.name for path in source.iterdir()} == {"core", FOLDER}


def test_a_service_that_there_is_not_is_refused_before_any_is_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(compile_cores, "compile_core", lambda *each: asked.append(each))
    with pytest.raises(SystemExit):
        compile_cores.main(["cache", "worker"])
    assert "'worker' is none of cache, scheduler" in capsys.readouterr().err
    assert not asked
