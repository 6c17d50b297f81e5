"""One stack for all tests of this folder, in the order of their file. Only `-m containers` runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.containers.engine import NoEngine, find_engine
from tests.containers.stack import Stack


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """They build images and own an address: no part of `make test`, whatever that selects."""
    if "containers" in str(config.option.markexpr):
        return
    left_out = [item for item in items if item.get_closest_marker("containers")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def built() -> Iterator[Stack]:
    """The images are built and nothing of an earlier run is left; in the end nothing of this one is."""
    try:
        stack = Stack(find_engine())
    except NoEngine as error:
        pytest.exit(str(error), returncode=1)
    stack.compose("down", "-v")
    stack.build()
    yield stack
    stack.remove()


@pytest.fixture(scope="session")
def stack(built: Stack) -> Stack:
    """Serves. A test that breaks it waits until it serves again."""
    built.up()
    built.wait_serving()
    return built


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """What the containers logged goes with a failure."""
    report = yield
    stack = item.funcargs.get("built") if hasattr(item, "funcargs") else None
    if report.failed and isinstance(stack, Stack):
        for service in stack.services:
            report.sections.append((f"log of {service}", stack.log_if_any(service)[-3000:]))
    return report
