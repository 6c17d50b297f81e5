"""The next cache epoch: strictly higher than any that we remember.

    epoch = max(Redis, file) + 1        raised in Redis atomically, then written to the file

Two memories, neither needed for safety: when both are lost, peers show what they were told last, and the service starts
over above it. What stands in Redis counts with our voucher only: "EPOCH VOUCHER", the voucher in hex.

These are version 1 of both. A version N above it begins with "vN ", so that it is no number here: the file is refused
then, and what stands in Redis is not believed.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import redis

from coppice.errors import CoppiceError, UnavailableError, UsageError
from coppice.handles import CACHE_EPOCH_MAX
from coppice.ids import CacheEpoch
from coppice.session.vouchers import Vouchers

_log = logging.getLogger("coppice.cache")
EPOCH_KEY = "coppice:cache_epoch"
_DIGITS_MAX = len(str(CACHE_EPOCH_MAX))
VERSION = 1  # of the file; what it holds is no number from the next one on
TRIES_MAX = 16  # to be the one who writes
_LATER = re.compile(r"v(\d{1,9}) ")
# Redis cannot check a voucher, so it only compares: who was overtaken since it read reads again.
_REPLACE = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


class EpochFile:
    """One decimal number in a file, replaced atomically."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int:
        """0 when there is no file yet. Raises UsageError for one that holds something else, or is of a later build."""
        try:
            text = self._path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return 0
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the epoch file {self._path}: {error}") from error
        if later := _LATER.match(text):
            raise UsageError(
                f"the epoch file {self._path} has version {later[1]}, this build reads version {VERSION}",
                hint="start the build that wrote it, or a later one",
            )
        if not text.isdecimal() or len(text) > _DIGITS_MAX:
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


class EpochInRedis:
    """The number in Redis, which anybody there may write."""

    def __init__(self, client: redis.Redis, vouchers: Vouchers) -> None:
        self._client = client
        self._vouchers = vouchers
        self._disbelieved = ""  # what was said of last
        self.num_disbelieved = 0

    def take_next(self, known: CacheEpoch) -> CacheEpoch:
        """The next one above `known` and Redis; two services that start at once get two. Raises RedisError."""
        for _ in range(TRIES_MAX):
            text = self._text()
            epoch = CacheEpoch(max(known, self._believed(text)) + 1)
            if self._replace(text, epoch):
                return epoch
        raise redis.RedisError(f"{EPOCH_KEY} was changed {TRIES_MAX} times while it was raised")

    def raise_to(self, epoch: CacheEpoch) -> None:
        """Make Redis remember at least `epoch`; whoever overtakes us is asked again later. Raises RedisError."""
        text = self._text()
        if self._believed(text) < epoch:
            self._replace(text, epoch)

    def _text(self) -> str:
        return str(self._client.get(EPOCH_KEY) or "")

    def _replace(self, text: str, epoch: CacheEpoch) -> bool:
        named = f"{epoch} {self._vouchers.of_stored(epoch).hex()}"
        return bool(self._client.eval(_REPLACE, 1, EPOCH_KEY, text, named))

    def _believed(self, text: str) -> CacheEpoch:
        """0 for what nobody vouches for; said once for each such text."""
        number, _, voucher = text.partition(" ")
        if number.isdecimal() and len(number) <= _DIGITS_MAX:
            epoch = CacheEpoch(int(number))
            if self._vouchers.is_of_stored(_bytes(voucher), epoch):
                return epoch
        if text and text != self._disbelieved:
            self._disbelieved = text
            self.num_disbelieved += 1
            if later := _LATER.match(text):
                _log.error("%s in Redis has version %s, this build reads version %d", EPOCH_KEY, later[1], VERSION)
                return CacheEpoch(0)
            _log.error(
                "%s in Redis holds an epoch without a voucher of ours, and is not believed: somebody else wrote it, or "
                "COPPICE_SEAL_KEY is another one than before, or is not set", EPOCH_KEY
            )  # fmt: skip
        return CacheEpoch(0)


def _bytes(voucher: str) -> bytes:
    """Empty for what is no hexadecimal."""
    try:
        return bytes.fromhex(voucher)
    except ValueError:
        return b""


def next_epoch(file: EpochFile | None, stored: EpochInRedis | None) -> CacheEpoch:
    """Raises CoppiceError: a file that cannot be used, or no epoch left."""
    known = file.read() if file is not None else 0
    epoch = known + 1
    if stored is not None:
        try:
            epoch = stored.take_next(CacheEpoch(known))
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
