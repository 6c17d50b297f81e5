"""What keeps epochs and leases of before a restart apart, taken away; see `registry`."""

from __future__ import annotations

from typing import Any

import numpy as np

from coppice.session.vouchers import Vouchers
from coppice_cache.core.index import IndexCore
from coppice_cache.core.pool import ledger
from coppice_cache.core.recovery import reattach, registration
from coppice_cache.core.state import replay
from coppice_cache.core.state.sessions import minted_by
from coppice_scheduler.core.state.leases import LeaseTable
from coppice_worker.core.worker import WorkerCore

Patches = list[tuple[Any, str, Any]]


def dead_epochs_forgotten() -> Patches:
    return [(reattach, "_bury", lambda *_: None)]


def lost_leases_forgotten() -> Patches:
    return [(LeaseTable, "lost", lambda self, lease: None)]


def sessions_are_believed() -> Patches:
    return [(IndexCore, "believed", lambda self, hello: (minted_by(hello.incarnation), hello.epoch))]


def registrations_are_believed() -> Patches:
    """Also without a voucher, and with another worker's."""
    return [(Vouchers, "registered_by", lambda self, voucher, *told: int.from_bytes(voucher[:4], "little"))]


def chain_keys_are_believed() -> Patches:
    """Whatever tree the log names with them."""
    return [(replay, "proved_again", lambda seal_keys, domain, namespace, known: known)]


def schedulers_are_believed() -> Patches:
    return [(WorkerCore, "why_not_trust", lambda self, epoch, voucher: None)]


def eras_are_forgotten() -> Patches:
    return [(registration, "era_of", lambda epoch: 0)]


def no_epoch_bits() -> Patches:
    """Counters go on from what the worker reported, as if its epoch were ours."""
    return [
        (ledger, "is_of_epoch", lambda generation, epoch: True),
        (ledger, "are_of_epoch", lambda generations, epoch: np.ones(len(generations), bool)),
        (ledger, "below_first", lambda epoch: 0),
    ]
