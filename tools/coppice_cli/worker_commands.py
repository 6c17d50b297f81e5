"""`coppice worker ...`: how a worker stands, and whether requests are sent to it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coppice.errors import CoppiceError, UnavailableError, UsageError
from coppice_cli.epochs import short_of
from coppice_cli.tls_options import TlsCa, TlsCert, TlsKey, files_of
from coppice_cli.variables import Command

if TYPE_CHECKING:
    import grpc

    from coppice_rpc.v1.worker_pb2_grpc import WorkerStub

CALL_S = 10.0
_LOOK_S = 0.5

WorkerAddress = Annotated[
    str, typer.Argument(metavar="HOST:PORT", help="gRPC of the worker (--grpc-port, 7072).", show_default=False)
]


def add_to(worker: typer.Typer) -> None:
    """Hang the commands up under `coppice worker`."""
    worker.callback()(tls_options)
    for command in (show, drain, undrain):
        worker.command(cls=Command)(command)


def tls_options(context: typer.Context, cert: TlsCert = None, key: TlsKey = None, ca: TlsCa = None) -> None:
    """How a worker stands, and whether requests are sent to it. With TLS, give the certificate of an operator before
    the command."""
    context.obj = files_of(cert, key, ca)


def show(
    context: typer.Context,
    address: WorkerAddress,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line and nothing else.")] = False,
) -> None:
    """What runs there, and whether it takes requests."""
    with _worker(context, address) as stub:
        found = _stats(stub)
    if as_json:
        typer.echo(json.dumps(found, separators=(",", ":")))
        return
    typer.echo("drains: it takes no new requests" if found["draining"] else "takes requests")
    for name in (
        "sequences",
        "blocks_in_use",
        "steps",
        "tokens_computed",
        "tokens_sampled",
        "refusals",
    ):
        typer.echo(f"{name.replace('_', ' '):16} {found[name]}")
    typer.echo(f"{'worker epoch':16} {short_of(found['worker_epoch'])}")


def drain(
    context: typer.Context,
    address: WorkerAddress,
    wait: Annotated[
        bool, typer.Option(help="Return when nothing runs there any more, so that it may be stopped.")
    ] = True,
) -> None:
    """Send it nothing new, and wait until what runs has ended. Ctrl-C ends the waiting; the worker goes on draining."""
    import grpc

    from coppice_rpc.v1 import worker_pb2

    with _worker(context, address) as stub:
        drained = stub.Drain.future(worker_pb2.DrainRequest())
        try:
            seen = None
            while not drained.done():
                found = _stats(stub)
                if found["draining"] and not wait:
                    typer.echo(f"it drains; {_running(found)}", err=True)
                    return
                if found["sequences"] and found["sequences"] != seen:
                    seen = found["sequences"]
                    typer.echo(_running(found), err=True)
                time.sleep(_LOOK_S)
            drained.result()
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.ABORTED:
                raise CoppiceError(f"the worker at {address} was undrained while it drained") from error
            raise
        except KeyboardInterrupt:
            typer.echo(
                "not waited for; the worker goes on draining (coppice worker undrain lets requests in)", err=True
            )
            raise
        finally:
            drained.cancel()
    typer.echo("nothing runs there; it may be stopped", err=True)


def undrain(context: typer.Context, address: WorkerAddress) -> None:
    """Send requests there again."""
    from coppice_rpc.v1 import worker_pb2

    with _worker(context, address) as stub:
        stub.Undrain(worker_pb2.UndrainRequest(), timeout=CALL_S)
    typer.echo("it takes requests", err=True)


def _running(found: dict[str, Any]) -> str:
    number = found["sequences"]
    return f"{number} sequence{'' if number == 1 else 's'} still {'runs' if number == 1 else 'run'}"


def _stats(stub: WorkerStub) -> dict[str, Any]:
    from coppice_rpc.v1 import worker_pb2

    answer = stub.Stats(worker_pb2.WorkerStatsRequest(), timeout=CALL_S)
    return {field.name: getattr(answer, field.name) for field in answer.DESCRIPTOR.fields}


@contextmanager
def _worker(context: typer.Context, text: str) -> Iterator[WorkerStub]:
    """Raises CoppiceError for whatever it answers but OK."""
    import grpc

    from coppice.addresses import parse_address
    from coppice.edge.grpc_tls import open_channel
    from coppice.tls.credentials import Credentials
    from coppice.tls.identity import Role
    from coppice_rpc.v1.worker_pb2_grpc import WorkerStub

    address, files = parse_address(text), context.obj
    tls = None if files is None else Credentials(files, Role.OPERATOR)
    with open_channel(str(address), tls, (("grpc.enable_http_proxy", 0),)) as channel:
        try:
            yield WorkerStub(channel)
        except grpc.RpcError as error:
            raise _told(error, text) from error


def _told(error: grpc.RpcError, address: str) -> CoppiceError:
    import grpc

    code, details = error.code(), error.details()
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return UnavailableError(
            f"no worker answers at {address}: {details}",
            hint="give the address of its gRPC port; with TLS, certificates of an operator before the command",
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return UsageError(
            f"no worker, or an older one, answers at {address}", hint="its gRPC port is --grpc-port, 7072"
        )
    return CoppiceError(f"the worker at {address} refuses: {details}")
