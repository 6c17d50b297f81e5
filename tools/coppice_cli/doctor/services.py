"""What a stack meets: ports that others have, Redis or the embedded Valkey."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from coppice.addresses import Address
from coppice.errors import CoppiceError
from coppice_cli.doctor.findings import Finding, fail, ok, warn
from coppice_up.host import Program
from coppice_up.local_host import check_redis, program_path
from coppice_up.options import UpOptions
from coppice_up.plan import needs_of
from coppice_up.ports import check_free

SKEW_MUCH_S = 2.0


def check_ports(options: UpOptions) -> Iterable[Finding]:
    """Of `coppice up` with these options; one finding if all are free."""
    taken = count = 0
    for needs in needs_of(options):
        for port in needs.ports:
            number = port.number or port.usual
            if not number:
                continue
            count += 1
            try:
                check_free(Address(port.host or "127.0.0.1", number), port.flag)
            except CoppiceError as error:
                taken += 1
                if port.number:
                    yield fail(f"port {number}", error.what, error.hint)
                else:
                    to_do = f"coppice up takes a free one instead, and says so; {port.flag} chooses another"
                    yield warn(f"port {number}", f"{error.what} ({port.flag} of coppice up)", to_do)
    if not taken:
        yield ok("ports", f"all {count} that coppice up takes are free")


def check_redis_url(url: str, now: Callable[[], float] = time.time) -> Iterable[Finding]:
    """Whether it answers, and how far its clock is from ours."""
    try:
        check_redis(url)
    except CoppiceError as error:
        yield fail("Redis", error.what, error.hint)
        return
    import redis

    client = redis.Redis.from_url(url, socket_connect_timeout=3, socket_timeout=3)
    try:
        before = now()
        seconds, microseconds = client.time()
        after = now()
    except redis.RedisError as error:
        yield fail("Redis", f"it answers PING, but not TIME: {error}", "let the user of --redis-url run TIME")
        return
    finally:
        client.close()
    yield ok("Redis", f"it answers after {(after - before) * 1000:.1f} ms")
    skew_s = seconds + microseconds / 1e6 - (before + after) / 2
    if abs(skew_s) > SKEW_MUCH_S:
        said = f"that of Redis is {abs(skew_s):.1f} s {'before' if skew_s > 0 else 'behind'} ours"
        yield warn("clock of Redis", said, "let both machines follow one time server (chrony, systemd-timesyncd)")
    else:
        yield ok("clock of Redis", f"{abs(skew_s) * 1000:.0f} ms from ours")


def check_valkey() -> Finding:
    """The one that `coppice up` starts when no Redis is named."""
    try:
        return ok("Valkey", f"{program_path(Program.VALKEY)}, for a stack without --redis-url")
    except CoppiceError as error:
        return fail("Valkey", error.what, error.hint)
