"""Names for the things that cross a process boundary. Ids are types; none of them is ever guessed from another."""

from __future__ import annotations

from typing import NewType

BlockId = NewType("BlockId", int)  # 24 bits, index into one worker's pool
Generation = NewType("Generation", int)  # 40 bits, see handles.py
LeaseId = NewType("LeaseId", bytes)  # 16 bytes, chosen by the client: its idempotency key
WorkerId = NewType("WorkerId", str)
DomainId = NewType("DomainId", str)
Namespace = NewType("Namespace", bytes)  # see namespaces.py
SequenceId = NewType("SequenceId", int)  # 32 bits, chosen by a scheduler, never reused within its epoch
CacheEpoch = NewType("CacheEpoch", int)  # 16 bits, one incarnation of the cache service
WorkerEpoch = NewType("WorkerEpoch", int)  # 64 bits, one registration of a worker; 0 = never registered
SchedulerEpoch = NewType("SchedulerEpoch", int)  # 64 bits, one session of a scheduler; 0 = none yet

LEASE_ID_BYTES = 16
TOKEN_BYTES = 4  # tokens travel as packed little-endian u32
