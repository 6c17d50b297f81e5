"""Names for the things that cross a process boundary. Ids are types; none of them is ever guessed from another."""

from __future__ import annotations

from typing import Annotated, NewType

from msgspec import Meta

U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
U64 = Annotated[int, Meta(ge=0)]  # a message has no room for more than 64 bits
LEASE_ID_BYTES = 16
TOKEN_BYTES = 4  # tokens travel as packed little-endian u32

BlockId = NewType("BlockId", int)  # 24 bits, index into one worker's pool
Generation = NewType("Generation", int)  # 40 bits, see handles.py
# 16 bytes, chosen by the client: its idempotency key
LeaseId = NewType("LeaseId", Annotated[bytes, Meta(min_length=LEASE_ID_BYTES, max_length=LEASE_ID_BYTES)])
WorkerId = NewType("WorkerId", str)
DomainId = NewType("DomainId", str)
Namespace = NewType("Namespace", bytes)  # see namespaces.py
SequenceId = NewType("SequenceId", U32)  # 32 bits, chosen by a scheduler, never reused within its epoch
CacheEpoch = NewType("CacheEpoch", U32)  # 32 bits, one incarnation of the cache service
WorkerEpoch = NewType("WorkerEpoch", U64)  # 64 bits, one registration of a worker; 0 = never registered
SchedulerEpoch = NewType("SchedulerEpoch", U64)  # 64 bits, one session of a scheduler; 0 = none yet
