"""The next cache epoch: strictly higher than any that we remember.

    epoch = max(Redis, file) + 1        raised in Redis atomically, then written to the file

Two memories, neither needed for safety: when both are lost, workers report the highest epoch that ever registered
them, and the service starts over above it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import redis

from coppice.errors import CoppiceError, UnavailableError, UsageError
from coppice.handles import CACHE_EPOCH_MAX
from coppice.ids import CacheEpoch

_log = logging.getLogger("coppice.cache")
EPOCH_KEY = "coppice:cache_epoch"
# Takes the next number above both memories; a second cache service that starts at the same moment gets another one.
_NEXT = """
local known = math.max(tonumber(redis.call('GET', KEYS[1]) or '0') or 0, tonumber(ARGV[1]))
redis.call('SET', KEYS[1], string.format('%d', known + 1))
return known + 1
"""
_RAISE = """
local known = tonumber(redis.call('GET', KEYS[1]) or '0') or 0
if known < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
return 0
"""


class EpochFile:
    """One decimal number in a file, replaced atomically."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int:
        """0 when there is no file yet. Raises UsageError for one that holds something else."""
        try:
            text = self._path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return 0
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the epoch file {self._path}: {error}") from error
        if not text.isdecimal() or len(text) > len(str(CACHE_EPOCH_MAX)):
            raise UsageError(
                f"{self._path} holds no cache epoch: one decimal number is expected there",
                hint="remove it only when no worker of before is running",
            )
        return int(text)

    def write(self, epoch: int) -> None:
        """Raises UnavailableError."""
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="ascii") as file:
                file.write(f"{epoch}\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UnavailableError(f"cannot write the epoch file {self._path}: {error.strerror}") from error


def next_epoch(file: EpochFile | None, client: redis.Redis | None) -> CacheEpoch:
    """Raises CoppiceError: a file that cannot be used, or no epoch left."""
    known = file.read() if file is not None else 0
    epoch = known + 1
    if client is not None:
        try:
            epoch = int(str(client.eval(_NEXT, 1, EPOCH_KEY, str(known))))
        except (redis.RedisError, OSError) as error:
            _log.warning("Redis does not answer (%s); going on from the epoch file or from 1", error)
    if epoch > CACHE_EPOCH_MAX:
        raise CoppiceError(
            f"cache epoch {epoch} is above {CACHE_EPOCH_MAX}, the last one",
            hint=f"stop every worker, then remove the epoch file and the Redis key {EPOCH_KEY}",
        )
    if file is not None:
        file.write(epoch)
    return CacheEpoch(epoch)


def raise_epoch(client: redis.Redis, epoch: CacheEpoch) -> None:
    """Make Redis remember at least `epoch`. Raises RedisError."""
    client.eval(_RAISE, 1, EPOCH_KEY, str(epoch))
