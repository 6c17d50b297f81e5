"""`coppice worker show | drain | undrain` against a running worker."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import grpc
import pytest
from typer.testing import CliRunner, Result

from coppice.errors import CoppiceError, UnavailableError, UsageError
from coppice.ids import WorkerEpoch
from coppice.messages.registration import Draining, Register
from coppice.messages.step import StepPlan
from coppice.session.link import Attached
from coppice_cli.app import app
from coppice_rpc.v1 import worker_pb2, worker_pb2_grpc
from coppice_up.ports import free_addresses
from tests.contract.worker.test_worker_service import Planner, Stack, handle, start, u32
from tests.fakes.waiting import WAIT_S


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack()
    yield stack
    stack.close()


@pytest.fixture
def planner(stack: Stack) -> Iterator[Planner]:
    planner = Planner(stack.address, epoch=7)
    planner.next(Attached)
    planner.step(StepPlan(1, attach=(start(1, 2, handle(3)),), rows=u32(1), row_tokens=u32(2)))
    yield planner
    planner.close()


def worker(*words: str) -> Result:
    return CliRunner().invoke(app, ["worker", *words])


def test_it_tells_what_runs_and_whether_the_worker_takes_requests(stack: Stack, planner: Planner) -> None:
    found = json.loads(worker("show", stack.grpc_address, "--json").stdout)
    assert (found["sequences"], found["draining"], found["worker_epoch"]) == (1, False, 1)
    assert worker("show", stack.grpc_address).stdout.startswith("takes requests\n")
    assert worker("drain", "--no-wait", stack.grpc_address).exit_code == 0
    assert stack.registrar.received.get(timeout=WAIT_S) == Draining(WorkerEpoch(1))
    assert worker("show", stack.grpc_address).stdout.startswith("drains: it takes no new requests\n")
    assert worker("undrain", stack.grpc_address).exit_code == 0
    assert isinstance(stack.registrar.received.get(timeout=WAIT_S), Register)
    assert worker("show", stack.grpc_address).stdout.startswith("takes requests\n")


def test_draining_returns_when_nothing_runs(stack: Stack, planner: Planner) -> None:
    found: list[Result] = []
    draining = threading.Thread(target=lambda: found.append(worker("drain", stack.grpc_address)))
    draining.start()
    assert stack.registrar.received.get(timeout=WAIT_S) == Draining(WorkerEpoch(1))
    assert not found
    planner.step(StepPlan(2, detach=u32(1)))
    draining.join(WAIT_S)
    assert found[0].exit_code == 0
    assert found[0].stderr.endswith("nothing runs there; it may be stopped\n")


def test_who_waits_hears_that_somebody_undrained_it(stack: Stack, planner: Planner) -> None:
    found: list[Result] = []
    draining = threading.Thread(target=lambda: found.append(worker("drain", stack.grpc_address)))
    draining.start()
    assert stack.registrar.received.get(timeout=WAIT_S) == Draining(WorkerEpoch(1))
    with grpc.insecure_channel(stack.grpc_address) as channel:
        worker_pb2_grpc.WorkerStub(channel).Undrain(worker_pb2.UndrainRequest(), timeout=WAIT_S)
    draining.join(WAIT_S)
    assert isinstance(found[0].exception, CoppiceError)
    assert "was undrained" in str(found[0].exception)


def test_what_is_no_worker_is_told() -> None:
    (address,) = free_addresses(1)
    with pytest.raises(UnavailableError, match=f"no worker answers at {address}"):
        raise worker("show", str(address)).exception or AssertionError
    with pytest.raises(UsageError, match="nowhere"):
        raise worker("drain", "nowhere").exception or AssertionError
