"""Vouchers: by them the cache service knows its own words again, whoever brings them back.

    who          is told                                  shows it again in
    client       Welcome: its session and epoch           Hello
    worker       Registered: its worker and cache epoch   Register
    Redis        the cache epoch                          the next start
    scheduler    Workers: its epoch at one worker         Hello to that worker, which has the key for it

A voucher is a keyed digest of what is vouched for and of its bearer, so nothing else and nobody else can be vouched for
with it. To whoever keeps it, it is bytes. Its key follows from the deployment's seal key. When that is replaced, words
of before count as long as the seal key of then is given, too.
"""

from __future__ import annotations

from hashlib import blake2b
from hmac import compare_digest

from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch, WorkerId

VOUCHER_BYTES = 16
KEY_BYTES = 32
_INCARNATION_BYTES = 4


class Vouchers:
    """Those of one deployment. Seal keys have 16 to 64 bytes."""

    def __init__(self, seal_key: bytes, *previous_seal_keys: bytes) -> None:
        self._key = blake2b(digest_size=KEY_BYTES, key=seal_key, person=b"coppice.vouchers").digest()
        self._previous = tuple(map(Vouchers, previous_seal_keys))

    def of_session(self, client_key: bytes, incarnation: int, epoch: int) -> bytes:
        """That the client with this key had the session `incarnation` with this epoch."""
        return _digest(self._key, b"session", client_key, _packed(incarnation), _packed(epoch))

    def is_of_session(self, voucher: bytes, client_key: bytes, incarnation: int, epoch: int) -> bool:
        shown = (client_key, incarnation, epoch)
        return any(is_same(voucher, one.of_session(*shown)) for one in (self, *self._previous))

    def of_stored(self, cache_epoch: CacheEpoch) -> bytes:
        """That we stored this cache epoch."""
        return _digest(self._key, b"stored", _packed(cache_epoch))

    def is_of_stored(self, voucher: bytes, cache_epoch: CacheEpoch) -> bool:
        return any(is_same(voucher, one.of_stored(cache_epoch)) for one in (self, *self._previous))

    def of_registration(
        self, incarnation: int, worker_id: WorkerId, worker_epoch: WorkerEpoch, cache_epoch: CacheEpoch
    ) -> bytes:
        """That the incarnation with this number, below 2**32, registered the worker. It names the incarnation."""
        named = incarnation.to_bytes(_INCARNATION_BYTES, "little")
        epochs = _packed(worker_epoch), _packed(cache_epoch)
        return named + _digest(self._key, b"registration", named, worker_id.encode(), *epochs)

    def registered_by(
        self, voucher: bytes, worker_id: WorkerId, worker_epoch: WorkerEpoch, cache_epoch: CacheEpoch
    ) -> int | None:
        """The incarnation that vouches for this; None: nobody does."""
        incarnation = int.from_bytes(voucher[:_INCARNATION_BYTES], "little")
        shown = (incarnation, worker_id, worker_epoch, cache_epoch)
        is_ours = any(is_same(voucher, one.of_registration(*shown)) for one in (self, *self._previous))
        return incarnation if is_ours else None

    def scheduler_key(self, worker_id: WorkerId, worker_epoch: WorkerEpoch) -> bytes:
        """By which this worker, in this epoch, knows whom we vouch for. No other worker is told it."""
        return _digest(self._key, b"worker", worker_id.encode(), _packed(worker_epoch))

    def of_scheduler(self, worker_id: WorkerId, worker_epoch: WorkerEpoch, epoch: SchedulerEpoch) -> bytes:
        """That a scheduler with this epoch may plan at this worker."""
        return scheduler_voucher(self.scheduler_key(worker_id, worker_epoch), epoch)


def scheduler_voucher(scheduler_key: bytes, epoch: SchedulerEpoch) -> bytes:
    return _digest(scheduler_key, b"scheduler", _packed(epoch))


def is_same(voucher: bytes, expected: bytes) -> bool:
    """Takes as long whatever differs."""
    return compare_digest(voucher, expected)


def _packed(number: int) -> bytes:
    return b"%d" % number  # whatever number somebody claims


def _digest(key: bytes, kind: bytes, *parts: bytes) -> bytes:
    """Of what kind the voucher is keeps those of two kinds apart; lengths keep neighbouring parts apart."""
    digest = blake2b(digest_size=VOUCHER_BYTES, key=key, person=kind)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()
