"""The stack as one thing that is started, watched and stopped; used by `coppice up`, `coppice bench` and tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from coppice_up.display import Display
from coppice_up.host import Host, Place
from coppice_up.local_host import LocalHost
from coppice_up.options import UpOptions
from coppice_up.plan import Services, StackPlan, needs_of, plan_stack
from coppice_up.supervisor import Supervisor

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(Exception):
    """A signal asked to stop while the stack was starting."""


@contextmanager
def running_stack(
    options: UpOptions, display: Display, services: Services | None = None
) -> Iterator[tuple[StackPlan, Supervisor]]:
    """Start the stack, hand it over when all of it is ready, stop all of it on the way out, whatever the way.

    Must be entered by the main thread, which gets SIGINT, SIGTERM and SIGHUP. Raises UsageError, UnavailableError,
    ChildFailed, and StopRequested for a signal during the start. Logs in a folder of our own go when all went well,
    the sockets of sessions always.
    """
    options.check()
    host = make_host(options)
    keep_logs = False
    try:
        plan = plan_stack(options, _placed(host, options), os.environ, services or Services())
        supervisor = Supervisor(plan.stages, host, display, show_logs=options.verbose)
        with _signals_stop(supervisor):
            try:
                if not supervisor.start():
                    raise StopRequested
                yield plan, supervisor
            except Exception as error:
                if not isinstance(error, StopRequested) and options.log_dir is None:
                    keep_logs = True
                    display.close()
                    display.note(f"logs are in {plan.log_dir}" + (" of each node" if options.on else ""))
                raise
            finally:
                supervisor.stop()
    finally:
        host.close(keep_logs=keep_logs)


def make_host(options: UpOptions) -> Host:
    """This machine, or a cluster. Raises UsageError and UnavailableError."""
    if not options.on:
        return LocalHost(options.model, options.log_dir)
    from coppice_up.on_ray.host import RayHost  # nothing of Ray is imported without it

    return RayHost(options.on, options.model, options.log_dir)


def _placed(host: Host, options: UpOptions) -> dict[str, Place]:
    """Raises StopRequested for a Ctrl-C while places are looked for."""
    try:
        return host.place(needs_of(options))
    except KeyboardInterrupt:
        raise StopRequested from None


@contextmanager
def _signals_stop(supervisor: Supervisor) -> Iterator[None]:
    def on_signal(number: int, frame: FrameType | None) -> None:
        supervisor.request_stop()

    before = {number: signal.signal(number, on_signal) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
