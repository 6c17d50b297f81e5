"""The `coppice` command.

    coppice up                  the whole stack on this machine, for development
    coppice bench smoke         a short measurement of a running stack, or of one that it starts
    coppice bench index|rpc|churn   what the cache service costs: its core, the stream before it, a load of chats
    coppice bench serve --url URL   a load on any server of the OpenAI API: throughput, times, goodput, tenants
    coppice top                 who runs, waits and holds memory, live
    coppice why|trace ID            why a request took its time, in words or as bars; requests, usage
    coppice doctor              whether a stack would run here, and what to do where not
    coppice size                how many blocks and requests a model leaves room for
    coppice cache stats         look into a running cache: stats, tree, explain, audit, flush, pin, unpin, pins
    coppice audit isolation         whether one tenant of any server can tell what another one has sent
    coppice tenants check FILE      a tenants file: check, show, add, rotate-key, revoke, schema
    coppice sim                 the deterministic simulation of the three cores
    coppice health HOST:PORT    whether a service serves, for container health checks
    coppice version

Commands are thin: each turns flags into a call and an error into one line. Modules load when their command runs, so
that `coppice --help` and completion (`--install-completion`) need no gRPC and no torch.
"""

from __future__ import annotations

import sys

from coppice.errors import EXIT_OK, UnavailableError, run_main


def main() -> None:
    """Entry point of the console script. Exit codes: 0 orderly, 1 failure, 2 wrong usage."""
    sys.exit(run_main("coppice", _run))


def _run() -> int:
    from coppice_cli.app import command  # here, so that Ctrl-C while modules load ends as quietly as later

    try:
        return int(command()(prog_name="coppice") or EXIT_OK)
    except ModuleNotFoundError as error:
        # An image holds one service, and no benchmarks.
        package = (error.name or "").partition(".")[0]
        if not package.startswith("coppice_"):
            raise
        raise UnavailableError(f"{package} is not installed here", hint="install from a checkout: make venv") from error


if __name__ == "__main__":
    main()
