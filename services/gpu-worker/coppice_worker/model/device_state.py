"""The rows of a step on the device, in memory that is allocated once and filled by one copy a step.

    host     | tokens | positions | slots | lengths | settings ... | common | chunks | changed rows | their tables |
                         `------------------ one copy, of what is used -----------------'
    device   | the same                                                                                   |
                                                                                `--> tables [rows, width]

Tables are most of it, and of a batch that goes on only those that grew are sent. Two host buffers take turns, as the
copy of the step before may not be over. Rows and tokens behind the batch are padding: nothing may be read or written
for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from coppice_worker.core.batch.choices import CHOICE_COLUMNS, pack_choices
from coppice_worker.core.batch.step_batch import Int32, StepBatch, StepOutput
from coppice_worker.kernels.backend import StepRows
from coppice_worker.kernels.upload import HostBuffer, aligned, new_event

_ROW_ID_BYTES, _BLOCK_ID_BYTES = 8, 4
_FIELDS = {
    "token_ids": torch.int64,
    "positions": torch.int64,
    "slots": torch.int64,
    "context_lens": torch.int32,
    "query_starts": torch.int32,
    "sampled": torch.int64,
    "choices": torch.float64,
    "common": torch.int32,
    "chunks": torch.int32,
}


class DeviceState:
    """Room for `rows_max` rows with tables of `table_width` blocks, and for `tokens_max` new tokens, or one a row."""

    def __init__(
        self,
        rows_max: int,
        table_width: int,
        common_size: int,
        device: torch.device,
        *,
        tokens_max: int = 0,
        chunks_size: int = 0,
    ) -> None:
        self.rows_max, self.table_width, self.device = rows_max, table_width, device
        self.tokens_max = max(tokens_max, rows_max)
        sizes = {
            **dict.fromkeys(("token_ids", "positions", "slots"), self.tokens_max),
            "context_lens": rows_max,
            "query_starts": rows_max + 1,
            "sampled": rows_max,
            "choices": rows_max * CHOICE_COLUMNS,
            "common": common_size,
            "chunks": chunks_size,
        }
        places, self._tables_at = _places(sizes)
        num_bytes = self._tables_at + aligned(rows_max * _ROW_ID_BYTES) + rows_max * table_width * _BLOCK_ID_BYTES
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._fields = {name: self._bytes[place].view(_FIELDS[name]) for name, place in places.items()}
        self._hosts = [_Host(num_bytes, places, device) for _ in range(2)]
        self._tables = torch.zeros((rows_max, table_width), dtype=torch.int32, device=device)
        self._one_each = torch.arange(rows_max + 1, dtype=torch.int32, device=device)
        self._holds_tables = False
        self._fields["slots"].fill_(-1)

    def has_room_for(self, batch: StepBatch) -> bool:
        num_rows, width = batch.block_tables.shape
        return num_rows <= self.rows_max and width <= self.table_width and len(batch.token_ids) <= self.tokens_max

    def rows(self, num_rows: int, *, with_common: bool) -> StepRows:
        """With one new token each."""
        return StepRows(
            slots=self._fields["slots"][:num_rows],
            context_lens=self._fields["context_lens"][:num_rows],
            block_tables=self._tables[:num_rows],
            query_starts=self._one_each[: num_rows + 1],
            common=self._fields["common"] if with_common else None,
        )

    def mixed_rows(self, num_tokens: int, chunks_size: int, *, with_common: bool) -> StepRows:
        """As many as may have that many new tokens."""
        num_rows = min(num_tokens, self.rows_max)
        return StepRows(
            slots=self._fields["slots"][:num_tokens],
            context_lens=self._fields["context_lens"][:num_rows],
            block_tables=self._tables[:num_rows],
            query_starts=self._fields["query_starts"][: num_rows + 1],
            common=self._fields["common"] if with_common else None,
            chunks=self._fields["chunks"][:chunks_size],
        )

    def token_ids(self, num_tokens: int) -> torch.Tensor:
        return self._fields["token_ids"][:num_tokens]

    def positions(self, num_tokens: int) -> torch.Tensor:
        return self._fields["positions"][:num_tokens]

    def sampled(self, count: int) -> torch.Tensor:
        """[count] int64: the new tokens of a mixed step behind which tokens are chosen."""
        return self._fields["sampled"][:count]

    def choices(self, num_rows: int) -> torch.Tensor:
        """[num_rows, CHOICE_COLUMNS] float64: of each row of decodes, of each sampled row of a mixed step."""
        return self._fields["choices"].view(-1, CHOICE_COLUMNS)[:num_rows]

    def forget_tables(self) -> None:
        """Another batch was computed elsewhere: what the next one changes, it changes from that."""
        self._holds_tables = False

    def holds(self, batch: StepBatch) -> bool:
        """Whether its rows are those of the batch before, but for what they grew."""
        return self._holds_tables and batch.changed_tables is not None

    def fill(self, batch: StepBatch, common: Int32 | None = None, chunks: Int32 | None = None) -> None:
        """Puts the batch on the device, and what its rows have in common; what is behind it becomes padding."""
        host = self._hosts[0]
        self._hosts.reverse()
        host.wait_until_sent()
        _fill_fields(host.fields, batch)
        if common is not None:
            host.fields["common"][:] = common
        if chunks is not None:
            host.fields["chunks"][: len(chunks)] = chunks
        changed = batch.changed_tables if self._holds_tables else None
        ids = np.arange(len(batch.block_tables)) if changed is None else changed
        used = self._fill_tables(host, batch.block_tables, ids)
        host.send(used, self._bytes)
        if len(ids):
            self._spread_tables(len(ids), batch.block_tables.shape[1])
        self._holds_tables = True

    def _table_places(self, count: int, width: int) -> tuple[slice, slice]:
        """Where the ids of that many rows are, and their tables."""
        start = self._tables_at + aligned(count * _ROW_ID_BYTES)
        ids = slice(self._tables_at, self._tables_at + count * _ROW_ID_BYTES)
        return ids, slice(start, start + count * width * _BLOCK_ID_BYTES)

    def _fill_tables(self, host: _Host, tables: Int32, ids: npt.NDArray[Any]) -> int:
        """Bytes used in all."""
        if not len(ids):
            return self._tables_at
        id_place, table_place = self._table_places(len(ids), tables.shape[1])
        host.array[id_place].view(np.int64)[:] = ids
        wanted = host.array[table_place].view(np.int32).reshape(len(ids), -1)
        np.take(tables, ids, axis=0, out=wanted)
        return int(table_place.stop)

    def _spread_tables(self, count: int, width: int) -> None:
        """To the rows that they are of."""
        id_place, table_place = self._table_places(count, width)
        tables = self._bytes[table_place].view(torch.int32).view(count, width)
        self._tables[:, :width].index_copy_(0, self._bytes[id_place].view(torch.int64), tables)


class _Host(HostBuffer):
    """With the fields in it."""

    def __init__(self, num_bytes: int, places: dict[str, slice], device: torch.device) -> None:
        super().__init__(num_bytes, device)
        self.fields = {name: self.memory[place].view(_FIELDS[name]).numpy() for name, place in places.items()}


class TokensBack:
    """Tokens on their way from the device: those of two steps at a time."""

    def __init__(self, rows_max: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._hosts = [torch.zeros(rows_max, dtype=torch.int64, pin_memory=on_cuda) for _ in range(2)]
        self._events = [new_event(device) for _ in range(2)]

    def fetch(self, tokens: torch.Tensor, rows: Int32) -> Arriving:
        """Begins to copy tokens [S], of which those of `rows` are wanted."""
        self._hosts.reverse()
        self._events.reverse()
        host, event = self._hosts[0][: len(tokens)], self._events[0]
        host.copy_(tokens, non_blocking=True)
        if event is not None:
            event.record()
        return Arriving(host, rows, event)


@dataclass(frozen=True, slots=True)
class Arriving:
    """A step whose tokens are on their way."""

    host: torch.Tensor  # [S] int64
    rows: Int32  # [R]
    event: torch.cuda.Event | None

    def wait(self) -> StepOutput:
        if self.event is not None:
            self.event.synchronize()
        return StepOutput(self.host.numpy()[self.rows].astype(np.int32))


def _places(sizes: dict[str, int]) -> tuple[dict[str, slice], int]:
    """Where each field's bytes are, and where the fields end."""
    places, start = {}, 0
    for name, dtype in _FIELDS.items():
        end = start + sizes[name] * dtype.itemsize
        places[name] = slice(start, end)
        start = aligned(end)
    return places, start


def _fill_fields(fields: dict[str, npt.NDArray[Any]], batch: StepBatch) -> None:
    sample = batch.sample
    for name, values, padding in (
        ("token_ids", batch.token_ids, 0),
        ("positions", batch.positions, 0),
        ("slots", batch.slots, -1),
        ("context_lens", batch.context_lens, 0),
        ("query_starts", batch.query_starts, len(batch.token_ids)),
    ):
        fields[name][: len(values)] = values
        fields[name][len(values) :] = padding
    # Whoever is not sampled is chosen for like a greedy row, in vain.
    choices = fields["choices"].reshape(-1, CHOICE_COLUMNS)
    choices[:, 0] = 0
    where = sample.rows
    if len(batch.token_ids) > len(batch.context_lens):
        where = np.arange(len(sample.rows), dtype=np.int32)
        fields["sampled"][: len(where)] = batch.query_starts[sample.rows + 1] - 1
        fields["sampled"][len(where) :] = 0
    if sample.temperature.any():
        choices[where] = pack_choices(sample)
