"""The cache service in this process on real ports, and what stands around it: a worker and two kinds of clients."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import grpc
import numpy as np

from coppice.edge import codec
from coppice.edge.grpc_server import CHANNEL_OPTIONS
from coppice.edge.link_client import LinkClient
from coppice.edge.signal_event import SignalEvent
from coppice.handles import block_ids, generations
from coppice.ids import CacheEpoch, DomainId, LeaseId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.cell import CellNews
from coppice.messages.index import (
    Acquire,
    Answer,
    AnswerBatch,
    Candidate,
    Grant,
    LeaseClaim,
    LeaseDigest,
    Op,
    OpBatch,
    Reattached,
    TenantsVersion,
    Workers,
)
from coppice.messages.registration import Fence, FenceAck, Register, Registered
from coppice.session.frames import Reject
from coppice.session.link import Attached, ClientLink
from coppice.session.vouchers import Vouchers
from coppice.tls.credentials import Credentials
from coppice_cache.edge.process import CacheProcess
from coppice_cache.edge.settings import CacheSettings
from coppice_rpc.v1 import cache_pb2 as pb
from coppice_rpc.v1 import cache_pb2_grpc
from tests.fakes.waiting import wait_for

BLOCK = 4  # tokens
NAMESPACE = Namespace(b"model-a")
SEAL_KEY = "5e" * 32
CALL_S = 60.0


def tokens(*numbers: int) -> bytes:
    return np.array(numbers, dtype="<u4").tobytes()


def prompt(length: int, first: int = 1) -> bytes:
    return tokens(*range(first, first + length))


def lease(number: int) -> LeaseId:
    return LeaseId(number.to_bytes(16, "big"))


class Cache:
    """`stop` ends it, `restart` starts another one on the same ports."""

    def __init__(self, **settings: Any) -> None:
        values = {
            "grpc_port": 0,
            "admin_grpc_port": 0,
            "session_port": 0,
            "http_port": 0,
            "heartbeat_ms": 50,
            "seal_key": SEAL_KEY,
            **settings,
        }
        self._settings = CacheSettings(**values)
        self._start()

    def _start(self) -> None:
        self.broken = SignalEvent()
        self.process = CacheProcess(self._settings, self.broken)
        self.process.start()
        self.port, self.admin_port = self.process.grpc_port, self.process.admin_grpc_port
        self.http_port = self.process.http_port
        self.sessions = str(self.process.session_address)

    def stop(self) -> None:
        self.process.stop()
        assert not self.process.failures, self.process.failures

    def restart(self, **changes: Any) -> None:
        self.stop()
        ports = {"grpc_port": self.port, "admin_grpc_port": self.admin_port, "http_port": self.http_port}
        values = {**self._settings.model_dump(), **ports, "session_address": self.sessions, **changes}
        self._settings = CacheSettings(**values)
        self._start()

    def rest(self, path: str, method: str = "GET") -> tuple[int, Any]:
        """Status and body, parsed when it is JSON."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.http_port}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=CALL_S) as answer:
                return answer.status, _parsed(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _parsed(error)

    def stats(self) -> Any:
        return self.rest("/v1/stats")[1]

    def audit(self) -> None:
        status, found = self.rest("/v1/audit", "POST")
        assert (status, found["holds"]) == (200, True), found


def _parsed(answer: Any) -> Any:
    body = answer.read()
    return json.loads(body) if "json" in answer.headers.get("Content-Type", "") else body.decode()


class FakeWorker:
    """Registers, remembers what was written into its blocks, acknowledges fences at once or when told."""

    def __init__(
        self,
        cache: Cache,
        worker_id: str = "w",
        num_blocks: int = 16,
        *,
        acknowledges: bool = True,
        address: str = "127.0.0.1:9",
        tls: Credentials | None = None,
    ) -> None:
        self.worker_id = WorkerId(worker_id)
        self.address = address
        self.num_blocks = num_blocks
        self.acknowledges = acknowledges
        self.epoch = WorkerEpoch(0)
        self.cache_epoch = CacheEpoch(0)
        self.voucher = b""
        self.scheduler_epochs: tuple[SchedulerEpoch, ...] = ()
        self.generations = np.zeros(num_blocks, dtype="<u8")
        self.seals = np.zeros((num_blocks, 16), dtype=np.uint8)
        self.registered: list[Registered] = []
        self.fences: list[Fence] = []
        self.rejected: list[Reject] = []
        self._attachment = 0
        self._link = LinkClient(codec.WORKERS, cache.sessions, self, worker_id, "cache", tls=tls)
        self._link.start()

    def register_message(self) -> Register:
        return Register(
            worker_id=self.worker_id,
            worker_epoch=self.epoch,
            address=self.address,
            num_blocks=self.num_blocks,
            block_size=BLOCK,
            namespace=NAMESPACE,
            model="model-a",
            highest_cache_epoch=self.cache_epoch,
            generations=self.generations.tobytes(),
            seals=self.seals.tobytes(),
            scheduler_epochs=self.scheduler_epochs,
            voucher=self.voucher,
            knows_owners=True,
        )

    def was_registered_by(self, cache_epoch: int) -> None:
        """As if another incarnation of this deployment had done it."""
        self.epoch, self.cache_epoch = WorkerEpoch(cache_epoch << 32 | 1), CacheEpoch(cache_epoch)
        vouchers = Vouchers(bytes.fromhex(SEAL_KEY))
        self.voucher = vouchers.of_registration(7, self.worker_id, self.epoch, self.cache_epoch)

    def link_attached(self, attached: Attached, attachment: int) -> None:
        self._attachment = attachment
        if attached.fresh:
            self._link.post(self.register_message(), attachment)

    def link_body(self, body: Any, attachment: int) -> None:
        if isinstance(body, Registered):
            if body.worker_epoch != self.epoch:
                self.generations[:] = 0
                self.seals[:] = 0
            self.epoch, self.cache_epoch, self.voucher = body.worker_epoch, body.cache_epoch, body.voucher
            self.registered.append(body)
        elif isinstance(body, Fence):
            self.fences.append(body)
            if self.acknowledges:
                self.acknowledge(body)

    def link_lost(self, reason: str) -> None: ...

    def link_rejected(self, reject: Reject) -> None:
        self.rejected.append(reject)

    def acknowledge(self, fence: Fence) -> None:
        arrays = (self.generations.tobytes(), self.seals.tobytes()) if fence.report else (b"", b"")
        self._link.post(FenceAck(fence.fence_id, self.epoch, *arrays), self._attachment)

    def post(self, body: Any) -> None:
        self._link.post(body, self._attachment)

    def attach(self, owned: bytes) -> None:
        """A step wrote into these blocks."""
        self.generations[block_ids(owned)] = generations(owned)
        self.seals[block_ids(owned)] = 0

    def seal(self, handles: bytes, seals: bytes) -> None:
        self.seals[block_ids(handles)] = np.frombuffer(seals, dtype=np.uint8).reshape(-1, 16)

    def wait_registered(self, times: int = 1) -> FakeWorker:
        wait_for(lambda: len(self.registered) >= times, f"{times} registrations; rejected: {self.rejected}")
        return self

    def wait_fence(self, number: int = 1) -> Fence:
        wait_for(lambda: len(self.fences) >= number, f"{number} fences")
        return self.fences[number - 1]

    def stop(self) -> None:
        self._link.stop()


class UnaryClient:
    """The unary forms, with one session."""

    def __init__(self, cache: Cache) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{cache.port}", options=CHANNEL_OPTIONS)
        self.stub = cache_pb2_grpc.PrefixIndexStub(self.channel)
        self.opened = self.stub.OpenSession(pb.OpenSessionRequest(name="test"), timeout=CALL_S)
        self.epoch = self.opened.session_epoch

    def acquire(self, number: int, packed: bytes, domain: str = "a", **changes: Any) -> pb.Answer:
        values: dict[str, Any] = {
            "lease_id": lease(number),
            "domain": domain,
            "namespace": NAMESPACE,
            "tokens": packed,
            "reserve_tokens": len(packed) // 4,
            "candidates": [pb.Candidate(worker_id="w")],
        }
        wire = pb.Acquire(**{**values, **changes})
        return self.stub.Acquire(pb.AcquireRequest(session_epoch=self.epoch, acquire=wire), timeout=CALL_S)

    def extend(self, number: int, reserve_tokens: int) -> pb.Answer:
        wire = pb.Extend(lease_id=lease(number), reserve_tokens=reserve_tokens)
        return self.stub.Extend(pb.ExtendRequest(session_epoch=self.epoch, extend=wire), timeout=CALL_S)

    def publish(self, number: int, packed: bytes, first_block: int = 0) -> pb.Answer:
        wire = pb.Publish(lease_id=lease(number), first_block=first_block, tokens=packed)
        return self.stub.Publish(pb.PublishRequest(session_epoch=self.epoch, publish=wire), timeout=CALL_S)

    def release(self, number: int, *, through_fence: bool = False) -> pb.Answer:
        request = pb.ReleaseRequest(
            session_epoch=self.epoch, release=pb.Release(lease_id=lease(number)), through_fence=through_fence
        )
        return self.stub.Release(request, timeout=CALL_S)

    def renew(self) -> bool:
        """Whether the session lives."""
        request = pb.RenewSessionRequest(session_epoch=self.epoch)
        return not self.stub.RenewSession(request, timeout=CALL_S).gone

    def match(self, packed: bytes, domain: str = "a", worker_id: str = "w") -> int:
        request = pb.MatchRequest(domain=domain, namespace=NAMESPACE, tokens=packed, worker_id=worker_id)
        return int(self.stub.Match(request, timeout=CALL_S).num_cached_tokens)

    def stats(self) -> pb.StatsResponse:
        return self.stub.Stats(pb.StatsRequest(), timeout=CALL_S)

    def stop(self) -> None:
        self.channel.close()


class StreamClient:
    """A client that keeps a session open; `key` and `epoch` as if it had been there before; `link` if it was."""

    def __init__(
        self, cache: Cache, *, key: bytes | None = None, epoch: int = 0, link: ClientLink[Any] | None = None
    ) -> None:
        self.attached: list[Attached] = []
        self.workers: list[Workers] = []
        self.batches: list[AnswerBatch] = []
        self.reattached: list[Reattached] = []
        self.digests: list[LeaseDigest] = []
        self.tenants: list[TenantsVersion] = []
        self.rejected: list[Reject] = []
        self.attachment = 0
        self.link = LinkClient(codec.INDEX, cache.sessions, self, "stream", "cache", epoch=epoch)
        if link is not None:
            self.link._link = link
        if key is not None:
            self.link._link.renew(key)
        self.session = self.link._link
        self.link.start()
        wait_for(lambda: self.attached, f"an attachment; rejected: {self.rejected}")

    @property
    def epoch(self) -> int:
        return self.attached[-1].epoch

    def link_attached(self, attached: Attached, attachment: int) -> None:
        self.attachment = attachment
        self.attached.append(attached)

    def link_body(self, body: Any, attachment: int) -> None:
        heard: dict[type, list[Any]] = {
            Workers: self.workers,
            AnswerBatch: self.batches,
            Reattached: self.reattached,
            LeaseDigest: self.digests,
            TenantsVersion: self.tenants,
        }
        if not isinstance(body, CellNews):  # of other sessions that plan
            heard[type(body)].append(body)

    def link_lost(self, reason: str) -> None: ...

    def link_rejected(self, reject: Reject) -> None:
        self.rejected.append(reject)

    def post(self, body: Any) -> None:
        self.link.post(body, self.attachment)

    def ask(self, *ops: Op) -> tuple[Answer, ...]:
        seen = len(self.batches)
        self.post(OpBatch(ops))
        wait_for(lambda: len(self.batches) > seen, f"an answer; rejected: {self.rejected}")
        return self.batches[seen].answers

    def acquire(self, number: int, packed: bytes, domain: str = "a", reserve: int = 0) -> Acquire:
        return Acquire(
            lease_id=lease(number),
            domain=DomainId(domain),
            namespace=NAMESPACE,
            tokens=packed,
            reserve_tokens=reserve or len(packed) // 4,
            candidates=(Candidate(WorkerId("w"), 0),),
        )

    def stop(self) -> None:
        self.link.stop()


def claim(grant: Grant, owned: bytes, shared: bytes, shared_seals: bytes, domain: str = "a") -> LeaseClaim:
    return LeaseClaim(
        lease_id=grant.lease_id,
        domain=DomainId(domain),
        namespace=NAMESPACE,
        worker_id=grant.worker_id,
        worker_epoch=grant.worker_epoch,
        shared=shared,
        shared_seals=shared_seals,
        owned=owned,
    )
