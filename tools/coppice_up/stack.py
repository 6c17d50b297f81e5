"""The stack as one thing that is started, watched and stopped; used by `coppice up`, `coppice bench` and tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from coppice.addresses import UNIX_PATH_BYTES_MAX
from coppice.errors import UnavailableError, UsageError
from coppice_up.checkpoint import find_checkpoint
from coppice_up.display import Display
from coppice_up.options import UpOptions
from coppice_up.plan import Services, StackPlan, plan_stack
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
    checkpoint = find_checkpoint(options.model)
    if options.redis_url:
        check_redis(options.redis_url)
    log_dir = _log_dir(options)
    keep_logs = options.log_dir is not None
    socket_dir = private_socket_dir()
    try:
        plan = plan_stack(options, checkpoint, log_dir, socket_dir, os.environ, services or Services())
        supervisor = Supervisor(plan.stages, display, show_logs=options.verbose)
        with _signals_stop(supervisor):
            try:
                if not supervisor.start():
                    raise StopRequested
                yield plan, supervisor
            except Exception as error:
                if not isinstance(error, StopRequested) and not keep_logs:
                    keep_logs = True
                    display.close()
                    display.note(f"logs are in {log_dir}")
                raise
            finally:
                supervisor.stop()
    finally:
        shutil.rmtree(socket_dir, ignore_errors=True)
        if not keep_logs:
            shutil.rmtree(log_dir, ignore_errors=True)


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


def _log_dir(options: UpOptions) -> Path:
    if options.log_dir is None:
        return Path(tempfile.mkdtemp(prefix="coppice-up-"))
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-dir {options.log_dir}: {error.strerror}", hint="give a folder to write to") from None
    return options.log_dir.resolve()


def private_socket_dir() -> Path:
    """A folder that is closed to others, as that of the logs need not be; its path leaves room for a socket's name."""
    parent = tempfile.gettempdir()
    is_short = len(os.fsencode(parent)) <= UNIX_PATH_BYTES_MAX // 2
    short = "/tmp"  # nosec B108 # mkdtemp makes a folder of our own in it
    return Path(tempfile.mkdtemp(prefix="coppice-up-", dir=parent if is_short else short))


def check_redis(url: str) -> None:
    """Raise while it is cheap when the Redis that a user named does not answer. The error never shows a password."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    shown = url.rsplit("@", 1)[-1] if "@" in url else url
    try:
        client = redis.Redis.from_url(url, socket_connect_timeout=3, socket_timeout=3, retry=Retry(NoBackoff(), 0))
    except ValueError as error:
        raise UsageError(f"--redis-url {shown}: {error}", hint="redis://HOST:PORT/DB") from None
    try:
        client.ping()
    except redis.RedisError as error:
        raise UnavailableError(
            f"no Redis answers at {shown}: {error}", hint="start it, or leave --redis-url out for an embedded Valkey"
        ) from None
    finally:
        client.close()
