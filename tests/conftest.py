"""What all tests stand on: Ctrl-C, ids that every process gives alike, and an order that nobody can rely on."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import re
import signal
import tempfile
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.shares import Shares

# Before anything of a service is imported: tests put other things in the place of functions of cores, which compiled
# code does not see. Processes that tests start inherit it. `tests/unit/shared/compiled/test_on_compiled_cores.py` says
# otherwise.
os.environ.setdefault("COPPICE_COMPILED", "never")

# No time is asserted: a neighbour may keep the machine busy.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# The seed of the order. Test processes, and checks that a test runs in a process of their own, inherit it.
ORDER_SEED = "ORDER_SEED"
# Files that take longest begin first: else a process may be left with one while the other has nothing to do.
LONG_FILES = frozenset(
    {
        "tests/e2e/test_exactness.py",
        "tests/e2e/failures/test_faults.py",
        "tests/e2e/failures/test_worker_stops.py",
        "tests/e2e/up/test_up_ray.py",
        "tests/e2e/test_front_doors.py",
        "tests/kernels/test_interpreted.py",
        "tests/kernels/test_interpreted_attention.py",
        "tests/simulation/test_mutants.py",
        "tests/simulation/test_seeds.py",
        "tests/unit/shared/compiled/test_on_compiled_cores.py",
    }
)

# What `repr` says of an object that has none of its own: another one in each process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def pytest_configure(config: pytest.Config) -> None:
    """Whoever starts the tests in the background has Ctrl-C ignored, here and in every process that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault(ORDER_SEED, str(random.SystemRandom().randrange(10**6)))
    config.pluginmanager.register(Shares(config))


def pytest_sessionstart(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:  # test processes of xdist have none
        terminal.write_line(f"in random order, again with {ORDER_SEED}={os.environ[ORDER_SEED]}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in random order, and the tests of each. Two tests come in the same order, whatever else is selected."""

    def random_place(name: str) -> bytes:
        return hashlib.blake2b(f"{os.environ[ORDER_SEED]} {name}".encode(), digest_size=8).digest()

    def place(item: pytest.Item) -> tuple[bool, bytes, bytes]:
        file = item.nodeid.partition("::")[0]
        # Those of containers keep their order: the last of them end what all the others use.
        keeps = file.startswith("tests/containers/")
        return file not in LONG_FILES, random_place(file), b"" if keeps else random_place(item.nodeid)

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    found = yield
    check_ids(found if isinstance(found, list) else [])
    return found


def check_ids(items: Iterable[pytest.Item]) -> None:
    """Raises CollectError for a test whose id differs in each process: several would agree on no test at all."""
    for item in items:
        if _ADDRESS.search(item.nodeid):
            raise pytest.Collector.CollectError(
                f"{item.nodeid} has the address of an object in its id, which differs in each process; "
                "give its cases other values, or ids of their own."
            )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small steps are quicker so, and sums come in one order."""
    import torch  # most tests do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A folder for Unix sockets: closed to others, and with a short path, as `tmp_path` need not be."""
    with tempfile.TemporaryDirectory(prefix="coppice-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """What is loaded when a file begins is never looked at again by the garbage collector: some million objects, and a
    service in this process collects each time it starts."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    """A test may set up a process's logging, which is that of all other tests, too."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
