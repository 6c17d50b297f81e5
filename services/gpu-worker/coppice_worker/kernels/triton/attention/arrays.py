"""What the launches of one step read and leave for each other, all of it on the device.

    StepArrays       what the step is: index arrays, in tensors of any origin
    DecodeScratch    what its launches leave for each other: made once, for the most rows of a step

Launches depend on shapes (of `StepArrays` the number of rows S, of tokens T and of tiles), on `DecodeScratch` and on
whether there are decodes and prefixes, and never on what the arrays hold: lengths, tables, how many rows are real. So
a CUDA graph that captured a step may be replayed after its arrays were filled anew, by the host or by a launch before
it. For that, make `StepArrays` of slices of buffers that stay where they are, and fill those:

    slots, context_lens, query_starts = slot_buffer[:T], length_buffer[:S], start_buffer[: S + 1]
    arrays = StepArrays(slots, table_buffer[:S], context_lens, query_starts, no_tiles, no_tiles, True, None)

A row decodes if it has one new token. A padding row has one too in a step of decodes alone (T = S), and none in others;
its context length is 0, and the slot of tokens that are padding -1: no launch reads its table, and such rows of
attention's output stay as they are. Tiles and pieces of row -1 are padding as well (`chunks`).

In each step `split_kv.plan` is launched once, after the arrays were filled and before the first layer attends; it is a
part of what a graph captures. Scratch holds nothing between steps and is never cleared; one serves steps of all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from coppice_worker.core.batch.step_batch import StepBatch
from coppice_worker.kernels.backend import Heads
from coppice_worker.kernels.pool import KvShape
from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.attention.cascade import find_groups
from coppice_worker.kernels.triton.attention.chunks import tiles_of
from coppice_worker.kernels.triton.attention.extend_launch import cut_tiles
from coppice_worker.kernels.triton.attention.extend_pieces import ExtendPieces, piece_room
from coppice_worker.kernels.triton.residency import DecodePrograms
from coppice_worker.kernels.upload import Upload


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Groups of decode rows that begin with the same blocks; see `cascade`. Of fixed size, whoever is in them."""

    members: torch.Tensor  # [groups, members] int32, sequence rows; -1 where there is none, and then none after it
    starts: torch.Tensor  # [groups + 1] int32, as in DecodeScratch.starts, of the tiles that a group shares
    places: torch.Tensor  # [S] int32, group * members + member of each row, or -1


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step on the device: S sequence rows, T packed new tokens."""

    slots: torch.Tensor  # [T] int64; -1: the token is padding and stored nowhere
    tables: torch.Tensor  # [S, W] int32, rows may be strided
    context_lens: torch.Tensor  # [S] int32, this step's tokens included; 0: the row is padding
    query_starts: torch.Tensor  # [S + 1] int32
    tile_rows: torch.Tensor  # [tiles] int32, sequence row of each tile of the rows with several new tokens
    tile_starts: torch.Tensor  # [tiles] int32, its first packed query row, counted from the row's first
    has_decodes: bool  # False: no row has just one new token, and nothing is launched for such rows
    prefixes: Prefixes | None  # None: nothing is launched for what rows have in common
    extend_pieces: ExtendPieces | None = None  # in their place, for layers without a window, if there are any


@dataclass(frozen=True, slots=True)
class Partials:
    """What programs found for their pieces of a context, to be joined."""

    out: torch.Tensor  # [pieces, columns, D] float32
    lse: torch.Tensor  # [pieces, columns] float32, log2 of the sum of the scores' exponentials


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Room for steps of at most `rows_max` rows. See `split_kv`."""

    rows_max: int
    programs: int  # each takes one span
    shared_programs: int  # of those over what rows have in common
    windows: tuple[int | None, ...]  # the different windows of the layers
    starts: torch.Tensor  # [windows, > rows_max] int32, first tile of each row, counted over rows and KV heads
    firsts: torch.Tensor  # like `starts`, first tile of each row's context to read
    own: Partials  # programs + rows_max * HK pieces, columns = query heads of a KV head
    shared: Partials  # shared_programs + PREFIX_GROUPS_MAX * HK pieces, columns = those of all members of a group

    def starts_of(self, window: int | None) -> torch.Tensor:
        """[> rows_max] int32 of the layers with that window."""
        return self.starts[self.windows.index(window)]


def decode_scratch(
    rows_max: int,
    heads: Heads,
    shape: KvShape,
    *,
    per_sm: DecodePrograms,
    num_sms: int,
    device: torch.device,
) -> DecodeScratch:
    """For steps of at most `rows_max` rows on a device with that many multiprocessors."""
    group = heads.num_heads // shape.num_kv_heads
    windows = tuple(dict.fromkeys(layer.window for layer in heads.layers))

    def partials(programs: int, units: int, columns: int) -> Partials:
        # Each step from one piece to the next goes on to another program, or to another unit.
        pieces = programs + units * shape.num_kv_heads if columns else 0
        lse = torch.empty((pieces, columns), dtype=torch.float32, device=device)
        return Partials(lse.new_empty((pieces, columns, shape.head_dim)), lse)

    # Kernels are compiled for addresses that are multiples of 16 bytes.
    per_row = torch.empty((len(windows), (rows_max // 4 + 1) * 4), dtype=torch.int32, device=device)
    return DecodeScratch(
        rows_max,
        num_sms * per_sm.own,
        num_sms * per_sm.shared,
        windows,
        starts=per_row,
        firsts=torch.empty_like(per_row),
        own=partials(num_sms * per_sm.own, rows_max, group),
        shared=partials(num_sms * per_sm.shared, launch.PREFIX_GROUPS_MAX, launch.prefix_members(group) * group),
    )


def step_arrays(
    batch: StepBatch,
    *,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    upload: Upload,
    num_sms: int = 1,
) -> StepArrays:
    """Of a step with new arrays; `group` query heads share a KV head.

    Chunks are cut such that they keep `num_sms` multiprocessors busy.
    """
    decodes = np.diff(batch.query_starts) == 1
    groups = find_groups(
        batch.block_tables, batch.context_lens, decodes,
        num_kv_heads=num_kv_heads, group=group, block_size=block_size,
    )  # fmt: skip
    tile_rows, tile_starts, context_lens = tiles_of(batch, group)
    cut = cut_tiles(tile_rows, tile_starts, context_lens, num_kv_heads, num_sms)
    slots, tables, lens, starts, rows_of_tiles, starts_of_tiles, *more = upload.send(
        (
            *(batch.slots, batch.block_tables, batch.context_lens, batch.query_starts, tile_rows, tile_starts),
            *(() if groups is None else (groups.members, groups.starts, groups.places)),
            *(() if cut is None else (cut.pieces, cut.joins)),
        )
    )
    return StepArrays(
        slots=slots,
        tables=tables,
        context_lens=lens,
        query_starts=starts,
        tile_rows=rows_of_tiles,
        tile_starts=starts_of_tiles,
        has_decodes=bool(decodes.any()),
        prefixes=None if groups is None else Prefixes(*more[:3]),
        extend_pieces=None
        if cut is None
        else ExtendPieces(more[-2], more[-1], piece_room(cut.num_results, num_kv_heads, head_dim, upload.device)),
    )
