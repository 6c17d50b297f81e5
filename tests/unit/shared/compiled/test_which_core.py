"""Which core a service's package finds: its source, or what was compiled of it, for which files of Python stand in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coppice import compiled
from coppice.compiled import ALWAYS, AUTO, FOLDER, MADE_OF, NEVER, VARIABLE, Build, build_of, digest, search_path
from coppice.errors import UnavailableError, UsageError

PACKAGE = "from coppice.compiled import search_path\n__path__ = search_path(__name__, __path__)\n"
ASK = """
import spam.edge
from coppice.compiled import kind_of
from spam.core.rooms import index
print(index.KIND, kind_of("spam"))
"""


def core_in(folder: Path, kind: str) -> None:
    rooms = folder / "core" / "rooms"
    rooms.mkdir(parents=True)
    for package in (rooms.parent, rooms):
        (package / "__init__.py").touch()
    (rooms / "index.py").write_text(f"KIND = {kind!r}\n")


@pytest.fixture
def spam(tmp_path: Path) -> Path:
    """A package with a core, and with a build of it."""
    package = tmp_path / "spam"
    core_in(package, "source")
    (package / "__init__.py").write_text(PACKAGE)
    (package / "edge.py").touch()
    core_in(package / FOLDER, "compiled")
    (package / FOLDER / MADE_OF).write_text(digest(package))
    return package


def found(package: Path, monkeypatch: pytest.MonkeyPatch, word: str | None) -> list[str]:
    """What of `__path__` is found first, by a process whose environment says `word`."""
    if word is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, word)
    return [Path(place).name for place in search_path("spam", [str(package)])]


@pytest.mark.parametrize("word", [AUTO, ALWAYS, "", None])
def test_a_build_of_this_source_is_found_before_it(
    spam: Path, monkeypatch: pytest.MonkeyPatch, word: str | None
) -> None:
    assert build_of(spam) is Build.CURRENT
    assert found(spam, monkeypatch, word) == [FOLDER, "spam"]


def test_never_is_never(spam: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(spam, monkeypatch, NEVER) == ["spam"]


def change_a_room(spam: Path) -> None:
    (spam / "core" / "rooms" / "index.py").write_text("KIND = 'changed'\n")


def add_a_room(spam: Path) -> None:
    (spam / "core" / "more.py").touch()


def rename_a_room(spam: Path) -> None:
    (spam / "core" / "rooms" / "index.py").rename(spam / "core" / "rooms" / "other.py")


@pytest.mark.parametrize("change", [change_a_room, add_a_room, rename_a_room])
def test_a_build_of_another_source_is_left_alone(
    spam: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    change(spam)
    assert build_of(spam) is Build.STALE
    assert found(spam, monkeypatch, AUTO) == ["spam"]
    with pytest.raises(UnavailableError, match=r"COPPICE_COMPILED=always, and spam has .* another source") as refused:
        found(spam, monkeypatch, ALWAYS)
    assert "make compiled" in refused.value.hint


def test_what_all_services_share_is_part_of_the_source(
    spam: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores are compiled for its types."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "ids.py").write_text("WorkerId = str\n")
    monkeypatch.setattr(compiled, "_SHARED", shared)
    (spam / FOLDER / MADE_OF).write_text(digest(spam))
    assert build_of(spam) is Build.CURRENT
    (shared / "ids.py").write_text("WorkerId = int\n")
    assert build_of(spam) is Build.STALE


def test_a_build_for_another_python_is_left_alone(spam: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "EXTENSION_SUFFIXES", [".cpython-399-x86_64-linux-gnu.so"])
    assert build_of(spam) is Build.STALE
    assert found(spam, monkeypatch, AUTO) == ["spam"]


def test_edges_are_no_part_of_it(spam: Path) -> None:
    (spam / "edge.py").write_text("X = 1\n")
    assert build_of(spam) is Build.CURRENT


def test_without_a_build_the_source_is_found(spam: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (spam / FOLDER / MADE_OF).unlink()  # the last that a build gets
    assert build_of(spam) is Build.NONE
    assert found(spam, monkeypatch, AUTO) == ["spam"]
    with pytest.raises(UnavailableError, match="spam has no compiled core"):
        found(spam, monkeypatch, ALWAYS)


def test_another_word_is_refused(spam: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="COPPICE_COMPILED is 'yes'; give auto, always or never"):
        found(spam, monkeypatch, "yes")


@pytest.mark.parametrize(("word", "kind"), [(ALWAYS, "compiled"), (NEVER, "source")])
def test_a_process_imports_the_core_that_it_is_told_to(
    spam: Path, monkeypatch: pytest.MonkeyPatch, word: str, kind: str
) -> None:
    """And the rest of the package beside it."""
    monkeypatch.setenv(VARIABLE, word)
    ended = subprocess.run([sys.executable, "-c", ASK], cwd=spam.parent, capture_output=True, text=True, check=False)
    assert ended.stdout.split() == [kind, kind], ended.stderr


@pytest.mark.parametrize(
    ("word", "exit_code", "line"),
    [(ALWAYS, 1, "and spam has no compiled core (make compiled"), ("yes", 2, "give auto")],
)
def test_python_m_of_the_package_says_it_in_one_line(spam: Path, word: str, exit_code: int, line: str) -> None:
    (spam / FOLDER / MADE_OF).unlink()
    ended = subprocess.run(
        [sys.executable, "-m", "spam.edge"],
        cwd=spam.parent,
        env={**os.environ, VARIABLE: word},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == exit_code
    assert ended.stderr.startswith(f"python -m spam: {VARIABLE}")
    assert line in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_these_tests_run_on_the_source() -> None:
    """Those that compile say otherwise themselves: many tests put something else in the place of a function."""
    import coppice_cache
    import coppice_scheduler

    assert not any(FOLDER in place for each in (coppice_cache, coppice_scheduler) for place in each.__path__)
