"""constraints.txt locks whatever pyproject.toml names and whatever that needs, for each Python that is supported."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def lines() -> list[Requirement]:
    text = (ROOT / "constraints.txt").read_text()
    return [Requirement(line) for line in text.splitlines() if not line.startswith("#")]


def environment(python: str, machine: str) -> dict[str, str]:
    """A Linux with this Python, as markers see it."""
    here = {name: str(value) for name, value in default_environment().items()}
    linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": machine}
    return {**here, **linux, "python_version": python, "python_full_version": f"{python}.9", "extra": ""}


def applies(requirement: Requirement, where: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(dict(where))


def locked_versions(lines: list[Requirement], where: dict[str, str]) -> dict[str, str]:
    """Each package's version; a package that is locked twice for one environment is an error."""
    versions: dict[str, str] = {}
    for line in lines:
        if applies(line, where):
            name = canonicalize_name(line.name)
            assert name not in versions, f"{name} is locked twice for Python {where['python_version']}"
            versions[name] = str(line.specifier).removeprefix("==")
    return versions


def named(project: dict[str, Any]) -> list[Requirement]:
    """What pyproject.toml asks for, its references to itself aside."""
    extras = project["project"]["optional-dependencies"].values()
    texts = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    found = [Requirement(text) for text in [*texts, *(text for extra in extras for text in extra)]]
    return [requirement for requirement in found if requirement.name != "coppice"]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_whatever_is_named_is_locked_within_its_range(
    project: dict[str, Any], lines: list[Requirement], python: str, machine: str
) -> None:
    where = environment(python, machine)
    versions = locked_versions(lines, where)
    wrong = [
        f"{requirement}: {versions.get(canonicalize_name(requirement.name), 'not locked')}"
        for requirement in named(project)
        if applies(requirement, where)
        and not requirement.specifier.contains(versions.get(canonicalize_name(requirement.name), "0"), prereleases=True)
    ]
    assert not wrong, "run make lock"


def needed(requirements: list[Requirement], where: dict[str, str]) -> Iterator[tuple[str, Requirement]]:
    """Who needs what, down to the last, from the metadata of what is installed."""
    seen: set[tuple[str, str]] = set()
    queue = [("coppice", requirement) for requirement in requirements]
    while queue:
        by, requirement = queue.pop()
        yield by, requirement
        for extra in ("", *requirement.extras):
            name = canonicalize_name(requirement.name)
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                below = [Requirement(text) for text in requires(name) or ()]
            except PackageNotFoundError:  # of an extra that is not installed here
                continue
            queue += [(name, need) for need in below if applies(need, {**where, "extra": extra})]


def test_whatever_that_needs_is_locked_too(project: dict[str, Any], lines: list[Requirement]) -> None:
    here = {name: str(value) for name, value in default_environment().items()}
    versions = locked_versions(lines, {**here, "extra": ""})
    asked = [requirement for requirement in named(project) if applies(requirement, {**here, "extra": ""})]
    wrong = [
        f"{by} needs {requirement}, locked is {versions.get(canonicalize_name(requirement.name))}"
        for by, requirement in needed(asked, here)
        if not requirement.name.startswith(("nvidia-", "cuda-"))  # torch says which
        and not requirement.specifier.contains(versions.get(canonicalize_name(requirement.name), "0"), prereleases=True)
    ]
    assert not wrong, "run make lock"


def test_the_lock_is_exact_and_names_no_place(lines: list[Requirement]) -> None:
    assert len(lines) > 100
    assert not [str(line) for line in lines if not re.fullmatch(r"==[0-9][\w.]*", str(line.specifier)) or line.url]
    assert not [str(line) for line in lines if line.name.startswith(("nvidia-", "cuda-"))], "torch pins these itself"


def test_torch_has_one_version_and_no_condition() -> None:
    """What sets up an image or a .venv finds it so."""
    assert re.search(r"^torch==[0-9.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
