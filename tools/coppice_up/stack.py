"""The stack as one thing that is started, watched and stopped; used by `coppice up`, `coppice bench` and tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from coppice_up.display import Display
from coppice_up.host import Host
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
    host: Host | None = None
    keep_logs = False
    with _StopSignals() as signals:
        try:
            host = make_host(options)
            signals.take()  # Ray takes SIGTERM for itself
            plan = plan_stack(options, host.place(needs_of(options)), os.environ, services or Services())
            signals.supervisor = supervisor = Supervisor(plan.stages, host, display, show_logs=options.verbose)
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
        except (KeyboardInterrupt, SystemExit):  # the latter from Ray, as long as it has SIGTERM
            raise StopRequested from None
        finally:
            if host is not None:
                host.close(keep_logs=keep_logs)


def make_host(options: UpOptions) -> Host:
    """This machine, or a cluster. Raises UsageError and UnavailableError."""
    if not options.on:
        return LocalHost(options.model, options.log_dir)
    from coppice_up.on_ray.host import RayHost  # nothing of Ray is imported without it

    return RayHost(options.on, options.model, options.log_dir)


class _StopSignals:
    """Signals become a request to the supervisor, and KeyboardInterrupt while there is none: nothing runs yet."""

    def __init__(self) -> None:
        self.supervisor: Supervisor | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take(self) -> None:
        """From whoever has them."""
        for number in _STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.supervisor is None:
            raise KeyboardInterrupt
        self.supervisor.request_stop()
