"""Paged attention by the Triton kernels: index arrays once per step, launches once per layer."""

from __future__ import annotations

import numpy as np
import torch

from coppice_worker.core.batch.step_batch import Int32, StepBatch
from coppice_worker.kernels.backend import Angles, Arithmetic, Heads, StepRows
from coppice_worker.kernels.pool import KvPool, has_scales
from coppice_worker.kernels.torch_backend import refuse_overlap
from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.arithmetic import TritonArithmetic
from coppice_worker.kernels.triton.attention.arrays import (
    DecodeScratch,
    Prefixes,
    StepArrays,
    decode_scratch,
    step_arrays,
)
from coppice_worker.kernels.triton.attention.cascade import find_groups
from coppice_worker.kernels.triton.attention.chunks import ChunkRoom, chunk_room, packed_chunks, unpacked_chunks
from coppice_worker.kernels.triton.attention.decode import decode
from coppice_worker.kernels.triton.attention.extend import extend
from coppice_worker.kernels.triton.attention.extend_pieces import ExtendPieces, PieceRoom, piece_room
from coppice_worker.kernels.triton.attention.resident import resident_programs
from coppice_worker.kernels.triton.attention.split_kv import plan
from coppice_worker.kernels.triton.blocks import copy_blocks, gather_blocks, scatter_blocks, zero_blocks
from coppice_worker.kernels.triton.residency import read_programs
from coppice_worker.kernels.triton.sampling import choose_packed
from coppice_worker.kernels.triton.write import write
from coppice_worker.kernels.upload import Upload

_STARTS = -(-(launch.PREFIX_GROUPS_MAX + 1) // 4) * 4  # so that what is behind them is aligned
_CPU_SMS = 1  # the interpreter runs one program after another


class TritonBackend:
    """Paged attention on CUDA (or in Triton's interpreter)."""

    def __init__(self, pool: KvPool, heads: Heads) -> None:
        rows = pool.num_blocks * pool.shape.num_kv_heads * pool.block_size
        assert rows < 1 << 31, f"{rows} rows of K in a layer: decode counts them in 32 bits"
        self.pool = pool
        self.heads = heads
        self.arithmetic: Arithmetic = TritonArithmetic()
        self.device = pool.storage.device
        properties = torch.cuda.get_device_properties(self.device) if self.device.type == "cuda" else None
        self._num_sms = properties.multi_processor_count if properties else _CPU_SMS
        self._group = heads.num_heads // pool.shape.num_kv_heads
        self._members_max = launch.prefix_members(self._group)
        self._upload = Upload(self.device)
        self._piece_room: PieceRoom | None = None
        self._no_tiles = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._programs = read_programs(pool.shape.head_dim, has_scales(pool.storage.dtype))
        # Those that were outgrown stay, as graphs hold their addresses.
        self._attended: list[torch.Tensor] = []
        self._scratches = [self._make_scratch(1)]
        if properties is not None:
            self._programs = resident_programs(pool, heads, self._scratches[0], self._programs)
            self._scratches = [self._make_scratch(1)]

    def scratch(self, num_rows: int) -> DecodeScratch:
        """For a step of that many rows."""
        rows_max = self._scratches[-1].rows_max
        if num_rows > rows_max:
            self._scratches.append(self._make_scratch(max(num_rows, 2 * rows_max)))
        return self._scratches[-1]

    def attended(self, query: torch.Tensor) -> torch.Tensor:
        """Where all graphs put what attention gives, one layer after the other. What no query was of is 0, or was a
        number of an earlier step: padding must not bring NaN to what looks at all rows."""
        rows_max = len(self._attended[-1]) if self._attended else 0
        if len(query) > rows_max:
            self._attended.append(query.new_zeros((max(len(query), 2 * rows_max), *query.shape[1:])))
        return self._attended[-1][: len(query)]

    def _make_scratch(self, rows_max: int) -> DecodeScratch:
        shape = self.pool.shape
        return decode_scratch(
            rows_max, self.heads, shape, per_sm=self._programs, num_sms=self._num_sms, device=self.device
        )

    def plan(self, batch: StepBatch) -> TritonStep:
        return TritonStep(self, self.arrays(batch))

    def arrays(self, batch: StepBatch) -> StepArrays:
        num_kv_heads = self.pool.shape.num_kv_heads
        return step_arrays(
            batch,
            num_kv_heads=num_kv_heads,
            group=self._group,
            head_dim=self.pool.shape.head_dim,
            block_size=self.pool.block_size,
            upload=self._upload,
            num_sms=self._num_sms,
        )

    def plan_rows(self, rows: StepRows) -> TritonStep:
        prefixes = None if rows.common is None else self._prefixes(rows.common, len(rows.context_lens))
        tile_rows = tile_starts = self._no_tiles
        pieces: ExtendPieces | None = None
        if rows.chunks is not None:
            room = self._chunk_room(len(rows.slots))
            tile_rows, tile_starts, of_pieces, joins = unpacked_chunks(rows.chunks, room)
            pieces = ExtendPieces(of_pieces, joins, self._results_of(room))
        arrays = StepArrays(
            slots=rows.slots,
            tables=rows.block_tables,
            context_lens=rows.context_lens,
            query_starts=rows.query_starts,
            tile_rows=tile_rows,
            tile_starts=tile_starts,
            has_decodes=True,
            prefixes=prefixes,
            extend_pieces=pieces,
        )
        return TritonStep(self, arrays, is_graph=True)

    def chunks_size(self, num_tokens: int) -> int:
        return self._chunk_room(num_tokens).size

    def chunks(self, batch: StepBatch, num_tokens: int) -> Int32 | None:
        heads = self.pool.shape.num_kv_heads
        room = self._chunk_room(num_tokens)
        return packed_chunks(batch, room, group=self._group, num_kv_heads=heads, num_sms=self._num_sms)

    def _chunk_room(self, num_tokens: int) -> ChunkRoom:
        heads = self.pool.shape.num_kv_heads
        return chunk_room(num_tokens, group=self._group, num_kv_heads=heads, num_sms=self._num_sms)

    def _results_of(self, room: ChunkRoom) -> PieceRoom:
        """One for all graphs, as one runs at a time; none before the first."""
        if self._piece_room is None:
            shape = self.pool.shape
            self._piece_room = piece_room(room.results, shape.num_kv_heads, shape.head_dim, self.device)
        return self._piece_room

    def common_size(self, rows_max: int) -> int:
        return launch.PREFIX_GROUPS_MAX * self._members_max + _STARTS + rows_max

    def common(self, batch: StepBatch, rows_max: int) -> Int32 | None:
        if all(layer.window is not None for layer in self.heads.layers):
            return None
        found = find_groups(
            batch.block_tables,
            batch.context_lens,
            np.diff(batch.query_starts) == 1,
            block_size=self.pool.block_size,
            num_kv_heads=self.pool.shape.num_kv_heads,
            group=self._group,
        )
        if found is None:
            return None
        packed = np.full(self.common_size(rows_max), -1, np.int32)
        for place, part in zip(
            self._places(len(found.places)), (found.members, found.starts, found.places), strict=True
        ):
            packed[place] = part.ravel()
        return packed

    def _prefixes(self, packed: torch.Tensor, num_rows: int) -> Prefixes:
        members, starts, places = (packed[place] for place in self._places(num_rows))
        return Prefixes(members.view(launch.PREFIX_GROUPS_MAX, self._members_max), starts, places)

    def _places(self, num_rows: int) -> tuple[slice, slice, slice]:
        """Of members, starts and places in what rows have in common."""
        members = launch.PREFIX_GROUPS_MAX * self._members_max
        starts = launch.PREFIX_GROUPS_MAX + 1
        places = members + _STARTS
        return slice(0, members), slice(members, members + starts), slice(places, places + num_rows)

    def choose_decodes(self, logits: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        return choose_packed(logits, choices)

    def zero_blocks(self, block_ids: Int32) -> None:
        zero_blocks(self.pool.planes(), self._to_device(block_ids))

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        refuse_overlap(src, dst)
        copy_blocks(self.pool.planes(), self._to_device(src), self._to_device(dst))

    def gather_blocks(self, block_ids: Int32, staging: torch.Tensor) -> None:
        gather_blocks(self.pool.planes(), self._to_device(block_ids), self.pool.staged(staging))

    def scatter_blocks(self, staging: torch.Tensor, block_ids: Int32) -> None:
        scatter_blocks(self.pool.staged(staging), self._to_device(block_ids), self.pool.planes())

    def _to_device(self, array: Int32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


class TritonStep:
    """One step's launches."""

    def __init__(self, backend: TritonBackend, arrays: StepArrays, *, is_graph: bool = False) -> None:
        self._backend = backend
        self._arrays = arrays
        self._is_graph = is_graph
        self._scratch = backend.scratch(len(arrays.context_lens))
        plan(arrays, self._scratch, backend.pool.shape.num_kv_heads)

    def write(self, layer: int, qkv: torch.Tensor, angles: Angles) -> torch.Tensor:
        heads = self._backend.heads
        blocks = self._backend.pool.layer(layer)
        return write(qkv, angles, self._arrays.slots, blocks, heads.layers[layer], heads.num_heads)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        blocks = self._backend.pool.layer(layer)
        how = self._backend.heads.layers[layer]
        out = (
            self._backend.attended(query)
            if self._is_graph
            else torch.empty(query.shape, dtype=query.dtype, device=query.device)
        )
        decode(query, blocks, self._arrays, self._scratch, how, out)
        if self._arrays.tile_rows.numel():
            extend(query, blocks, self._arrays, how, out)
        return out.view(query.shape[0], -1)
