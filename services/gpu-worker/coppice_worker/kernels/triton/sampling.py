"""Tokens from logits, one program per row, without sorting the vocabulary and without the host.

    logits -> (x - highest) / temperature, kept as `key`: the bits of its magnitude, so that the largest logit is key 0
           -> cut, a key: those above it are dropped. min_p is a cut; top_k and top_p are found by search
           -> running sum of exp(-magnitude) in token order, up to noise * total

A cut is the smallest key up to which there are enough keys (top_k), or enough mass (top_p), so equal logits share a
fate. Its search measures two keys in one pass over the row and goes on between them, from data to data. It begins at
a bound that needs no pass: each lane of the program knows the largest of the logits it has seen, and mostly the largest
few of a row are in lanes of their own.

Noise comes from the host, so it has the same bits everywhere. Masses are summed in float64, by tiles, then within one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coppice_worker.core.batch.choices import CHOICE_COLUMNS, pack_choices
from coppice_worker.core.batch.step_batch import SampleRows
from coppice_worker.kernels.triton import launch

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)

# Tiles on their way while one is looked at: a program has a multiprocessor for itself, and little of a row per thread.
AHEAD = tl.constexpr(6)


@triton.jit
def _ordered(value):
    """float32 -> int32 of the same order. NaN is the largest, and zeros are equal."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value == value, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFF)


@triton.jit
def _value(ordered):
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _key(value, highest, temperature):
    """int32 bits of the magnitude of (value - highest) / temperature, rounded as IEEE says."""
    return tl.div_rn(value - highest, temperature).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _weight(key):
    return tl.exp(-key.to(tl.float32, bitcast=True))


@triton.jit
def _largest_of_lanes(logits_ptr, vocab, TILE: tl.constexpr):
    """Of each lane's tokens (lane, lane + TILE, ...) the largest logit, ordered, and the first token that has it."""
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], -0x80000000, tl.int32)
    token = lane
    for first in tl.range(0, vocab, TILE, num_stages=AHEAD):
        inside = first + lane < vocab
        logit = tl.load(logits_ptr + first + lane, mask=inside, other=0.0).to(tl.float32)
        ordered = tl.where(inside, _ordered(logit), -0x80000000)
        token = tl.where(ordered > best, first + lane, token)
        best = tl.maximum(best, ordered)
    return best, token


@triton.jit
def _first_largest(best, token):
    """The row's largest logit, ordered, and its first token."""
    largest = tl.max(best, axis=0)
    return largest, tl.min(tl.where(best == largest, token, 0x7FFFFFFF), axis=0)


@triton.jit
def _measure(keys_ptr, vocab, low, high, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """Keys up to `low` and up to `high`, or their mass; the keys next to `low` and to `high`, on both sides."""
    lane = tl.arange(0, TILE)
    count_type = tl.float64 if BY_MASS else tl.int32
    up_to_low, up_to_high = tl.zeros([TILE], count_type), tl.zeros([TILE], count_type)
    under_low, under_high = tl.full([TILE], -1, tl.int32), tl.full([TILE], -1, tl.int32)
    over_low, over_high = tl.full([TILE], 0x7FFFFFFF, tl.int32), tl.full([TILE], 0x7FFFFFFF, tl.int32)
    for first in tl.range(0, vocab, TILE, num_stages=AHEAD):
        key = tl.load(keys_ptr + first + lane, mask=first + lane < vocab, other=0x7FFFFFFF)
        worth = _weight(key).to(tl.float64) if BY_MASS else 1
        in_low, in_high = key <= low, key <= high
        up_to_low += tl.where(in_low, worth, 0)
        up_to_high += tl.where(in_high, worth, 0)
        under_low = tl.maximum(under_low, tl.where(in_low, key, -1))
        under_high = tl.maximum(under_high, tl.where(in_high, key, -1))
        over_low = tl.minimum(over_low, tl.where(in_low, 0x7FFFFFFF, key))
        over_high = tl.minimum(over_high, tl.where(in_high, 0x7FFFFFFF, key))
    return (
        tl.sum(up_to_low, axis=0), tl.max(under_low, axis=0), tl.min(over_low, axis=0),
        tl.sum(up_to_high, axis=0), tl.max(under_high, axis=0), tl.min(over_high, axis=0),
    )  # fmt: skip


@triton.jit
def _search(keys_ptr, vocab, cut, wanted, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """The smallest key up to which there is as much as `wanted`; `cut` if that is not below it.

    It lies in (below, cut]; both ends are next to keys that exist, so the search ends when one of them is between.
    """
    below = -1
    low, high = cut - 1, cut
    while cut - below > 1:
        up_to_low, under_low, over_low, up_to_high, under_high, over_high = _measure(
            keys_ptr, vocab, low, high, BY_MASS, TILE
        )
        if up_to_low >= wanted:
            cut = under_low
            below = cut - 1 if up_to_low == wanted else below
        elif up_to_high >= wanted:
            cut = under_high
            below = cut - 1 if up_to_high == wanted else over_low - 1
        else:
            below = over_high - 1
        third = (cut - below) // 3
        low = below + tl.maximum(third, 1)
        high = tl.maximum(low, cut - third)
    return cut


@triton.jit
def _bound_by_lanes(lane_keys, worth, cut, wanted):
    """The smallest key up to which the lanes alone have as much as `wanted`, or `cut`."""
    below = -1
    for _ in range(31):
        middle = below + (cut - below) // 2
        enough = tl.sum(tl.where(lane_keys <= middle, worth, 0), axis=0) >= wanted
        cut = tl.where(enough, middle, cut)
        below = tl.where(enough, below, middle)
    # The largest logit stays even where nothing is wanted.
    return tl.maximum(cut, 0)


@triton.jit
def _draw(keys_ptr, vocab, cut, noise, instead, TILE: tl.constexpr, TILES: tl.constexpr):
    """The first token whose running sum passes noise * total; `instead` where nothing has any weight."""
    lane, tile_index = tl.arange(0, TILE), tl.arange(0, TILES)
    sums = tl.zeros([TILES], tl.float64)
    for tile in tl.range(0, tl.cdiv(vocab, TILE), num_stages=AHEAD):
        token = tile * TILE + lane
        key = tl.load(keys_ptr + token, mask=token < vocab, other=0x7FFFFFFF)
        mass = tl.sum(tl.where(key <= cut, _weight(key), 0.0).to(tl.float64), axis=0)
        sums = tl.where(tile_index == tile, mass, sums)
    running = tl.cumsum(sums, axis=0)
    total = tl.max(running, axis=0)
    target = noise * total
    # Sums of a scan are rounded each in its own way, so only places with weight may be chosen.
    last = tl.max(tl.where(sums > 0, tile_index, 0), axis=0)
    tile = tl.min(tl.where((running > target) & (sums > 0), tile_index, last), axis=0)
    target -= tl.sum(tl.where(tile_index < tile, sums, 0.0), axis=0)
    token = tile * TILE + lane
    key = tl.load(keys_ptr + token, mask=token < vocab, other=0x7FFFFFFF)
    weight = tl.where(key <= cut, _weight(key), 0.0).to(tl.float64)
    last = tl.max(tl.where(weight > 0, token, 0), axis=0)
    chosen = tl.min(tl.where((tl.cumsum(weight, axis=0) > target) & (weight > 0), token, last), axis=0)
    return tl.where(total > 0, chosen, instead)


@triton.jit
def argmax_kernel(
    logits_ptr,  # [R, vocab], rows `stride` elements apart
    tokens_ptr,  # [R] int64
    stride,
    vocab,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    best, token = _largest_of_lanes(logits_ptr + row * stride, vocab, TILE)
    tl.store(tokens_ptr + row, _first_largest(best, token)[1].to(tl.int64))


@triton.jit
def choose_kernel(
    logits_ptr,  # [R, vocab], rows `stride` elements apart
    choices_ptr,  # [R, 5] float64: temperature, logarithm of min_p, top_k, top_p, noise
    keys_ptr,  # [R, vocab] int32, scratch
    tokens_ptr,  # [R] int64
    stride,
    vocab,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # power of two, tiles of a row or more
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    keys_ptr += row * vocab
    choices_ptr += row * 5
    temperature = tl.load(choices_ptr).to(tl.float32)
    best, first_token = _largest_of_lanes(logits_ptr, vocab, TILE)
    largest, chosen = _first_largest(best, first_token)
    if temperature > 0:
        highest = _value(largest)
        lane = tl.arange(0, TILE)
        for first in tl.range(0, vocab, TILE, num_stages=AHEAD):
            inside = first + lane < vocab
            logit = tl.load(logits_ptr + first + lane, mask=inside, other=0.0).to(tl.float32)
            tl.store(keys_ptr + first + lane, _key(logit, highest, temperature), mask=inside)
        # Another thread than the one that stored a key may read it.
        tl.debug_barrier()
        lane_keys = tl.where(lane < vocab, _key(_value(best), highest, temperature), 0x7FFFFFFF)
        cut = tl.load(choices_ptr + 1).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        top_k = tl.load(choices_ptr + 2).to(tl.int32)
        if (top_k > 0) & (top_k < vocab):
            cut = _bound_by_lanes(lane_keys, 1, cut, top_k)
            cut = _search(keys_ptr, vocab, cut, top_k, False, TILE)
        top_p = tl.load(choices_ptr + 3)
        if top_p < 1:
            wanted = top_p * _measure(keys_ptr, vocab, cut, cut, True, TILE)[0]
            cut = _bound_by_lanes(lane_keys, _weight(lane_keys).to(tl.float64), cut, wanted)
            cut = _search(keys_ptr, vocab, cut, wanted, True, TILE)
        chosen = _draw(keys_ptr, vocab, cut, tl.load(choices_ptr + 4), chosen, TILE, TILES)
    tl.store(tokens_ptr + row, chosen.to(tl.int64))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """[R] int64, the first of the largest in each row of logits [R, vocab]; NaN counts as the largest."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    tile, _, options = launch.vocab_tile(logits.shape[1])
    argmax_kernel[(logits.shape[0],)](logits, tokens, logits.stride(0), logits.shape[1], TILE=tile, **options)
    return tokens


def choose_packed(logits: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """A token [R] int64 for each row of logits [R, vocab]: one launch, and nothing that a graph could not hold.

    choices [R, CHOICE_COLUMNS] float64, on the device, as `pack_choices` makes them. Rows of temperature 0 take the
    first of the largest.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    assert choices.shape == (rows, CHOICE_COLUMNS)
    assert choices.is_contiguous()
    keys = torch.empty((rows, vocab), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    tile, tiles, options = launch.vocab_tile(vocab)
    choose_kernel[(rows,)](logits, choices, keys, tokens, logits.stride(0), vocab, TILE=tile, TILES=tiles, **options)
    return tokens


def choose(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    """A token [R] int64 for each row of logits [R, vocab], as `torch_sampling.choose` chooses."""
    if not rows.temperature.any():
        return argmax(logits)
    return choose_packed(logits, torch.from_numpy(pack_choices(rows)).to(logits.device, non_blocking=True))
