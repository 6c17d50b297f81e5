"""Registration and fences <-> protobuf (the session between a worker and the cache service)."""

from __future__ import annotations

from coppice.edge.frame_codec import BodyField, Edge, FrameCodec
from coppice.edge.op_codec import known_value
from coppice.ids import CacheEpoch, LeaseId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages import registration as m
from coppice_rpc.v1 import cache_pb2 as pb


def _register_to_wire(message: m.Register) -> pb.Register:
    return pb.Register(
        worker_id=message.worker_id,
        worker_epoch=message.worker_epoch,
        address=message.address,
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        namespace=message.namespace,
        model=message.model,
        highest_cache_epoch=message.highest_cache_epoch,
        generations=message.generations,
        seals=message.seals,
        scheduler_epochs=message.scheduler_epochs,
        max_sequences=message.max_sequences,
        max_step_tokens=message.max_step_tokens,
        max_context=message.max_context,
        draining=message.draining,
        num_host_blocks=message.num_host_blocks,
        host_generations=message.host_generations,
        host_seals=message.host_seals,
    )


def _register_from_wire(wire: pb.Register) -> m.Register:
    return m.Register(
        worker_id=WorkerId(wire.worker_id),
        worker_epoch=WorkerEpoch(wire.worker_epoch),
        address=wire.address,
        num_blocks=wire.num_blocks,
        block_size=wire.block_size,
        namespace=Namespace(wire.namespace),
        model=wire.model,
        highest_cache_epoch=CacheEpoch(wire.highest_cache_epoch),
        generations=wire.generations,
        seals=wire.seals,
        scheduler_epochs=tuple(SchedulerEpoch(epoch) for epoch in wire.scheduler_epochs),
        max_sequences=wire.max_sequences,
        max_step_tokens=wire.max_step_tokens,
        max_context=wire.max_context,
        draining=wire.draining,
        num_host_blocks=wire.num_host_blocks,
        host_generations=wire.host_generations,
        host_seals=wire.host_seals,
    )


def _fence_to_wire(message: m.Fence) -> pb.Fence:
    return pb.Fence(
        fence_id=message.fence_id,
        worker_epoch=message.worker_epoch,
        scheduler_epochs=message.scheduler_epochs,
        up_to_epoch=message.up_to_epoch,
        spared=message.spared,
        lease_ids=message.lease_ids,
        report=message.report,
    )


def _fence_from_wire(wire: pb.Fence) -> m.Fence:
    return m.Fence(
        fence_id=wire.fence_id,
        worker_epoch=WorkerEpoch(wire.worker_epoch),
        scheduler_epochs=tuple(SchedulerEpoch(epoch) for epoch in wire.scheduler_epochs),
        up_to_epoch=SchedulerEpoch(wire.up_to_epoch),
        spared=tuple(SchedulerEpoch(epoch) for epoch in wire.spared),
        lease_ids=tuple(LeaseId(lease) for lease in wire.lease_ids),
        report=wire.report,
    )


def _ack_to_wire(message: m.FenceAck) -> pb.FenceAck:
    return pb.FenceAck(
        fence_id=message.fence_id,
        worker_epoch=message.worker_epoch,
        generations=message.generations,
        seals=message.seals,
        host_generations=message.host_generations,
        host_seals=message.host_seals,
    )


def _ack_from_wire(wire: pb.FenceAck) -> m.FenceAck:
    return m.FenceAck(
        wire.fence_id,
        WorkerEpoch(wire.worker_epoch),
        wire.generations,
        wire.seals,
        wire.host_generations,
        wire.host_seals,
    )


_DIRECTION_TO_WIRE = {direction: pb.CopyOrder.Direction.Value(direction.name) for direction in m.Direction}
_DIRECTION_FROM_WIRE: dict[int, m.Direction] = {wire: direction for direction, wire in _DIRECTION_TO_WIRE.items()}


def _copies_to_wire(message: m.CopyOrders) -> pb.CopyOrders:
    orders = [
        pb.CopyOrder(
            order_id=order.order_id,
            direction=_DIRECTION_TO_WIRE[order.direction],
            src=order.src,
            dst=order.dst,
            seals=order.seals,
        )
        for order in message.orders
    ]
    return pb.CopyOrders(worker_epoch=message.worker_epoch, orders=orders)


def _copies_from_wire(wire: pb.CopyOrders) -> m.CopyOrders:
    orders = tuple(
        m.CopyOrder(
            order_id=order.order_id,
            direction=known_value(_DIRECTION_FROM_WIRE, order.direction),
            src=order.src,
            dst=order.dst,
            seals=order.seals,
        )
        for order in wire.orders
    )
    return m.CopyOrders(WorkerEpoch(wire.worker_epoch), orders)


def _copies_done_to_wire(message: m.CopiesDone) -> pb.CopiesDone:
    return pb.CopiesDone(worker_epoch=message.worker_epoch, order_ids=message.order_ids, failed_ids=message.failed_ids)


def _copies_done_from_wire(wire: pb.CopiesDone) -> m.CopiesDone:
    return m.CopiesDone(WorkerEpoch(wire.worker_epoch), tuple(wire.order_ids), tuple(wire.failed_ids))


WORKER_FRAMES = FrameCodec(
    pb.WorkerFrame,
    (
        BodyField("register", m.Register, _register_to_wire, _register_from_wire),
        BodyField("fence_ack", m.FenceAck, _ack_to_wire, _ack_from_wire),
        BodyField(
            "draining",
            m.Draining,
            lambda body: pb.Draining(worker_epoch=body.worker_epoch),
            lambda wire: m.Draining(WorkerEpoch(wire.worker_epoch)),
        ),
        BodyField("copies_done", m.CopiesDone, _copies_done_to_wire, _copies_done_from_wire),
    ),
)

SERVER_FRAMES = FrameCodec(
    pb.WorkerServerFrame,
    (
        BodyField(
            "registered",
            m.Registered,
            lambda body: pb.Registered(worker_epoch=body.worker_epoch, cache_epoch=body.cache_epoch),
            lambda wire: m.Registered(WorkerEpoch(wire.worker_epoch), CacheEpoch(wire.cache_epoch)),
        ),
        BodyField("fence", m.Fence, _fence_to_wire, _fence_from_wire),
        BodyField("copy_orders", m.CopyOrders, _copies_to_wire, _copies_from_wire),
    ),
)

EDGE = Edge("workers", WORKER_FRAMES, SERVER_FRAMES)
