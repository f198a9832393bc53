"""How many pairs of queries and keys a device computes: those that it keeps, and all those of the tiles that meet."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ringjax._definition.branch import spaced_tokens
from ringjax._schedule.schedule import BranchSchedule
from ringjax._schedule.side import Side

_MOST_SHARDS, _MOST_BLOCKS = 16, 1024


@functools.lru_cache(maxsize=1024)
def num_kept_pairs(schedule: BranchSchedule, offsets: tuple[int, ...]) -> int:
    """Returns how many pairs of a query head the busiest device keeps, on average over the offsets of heads.

    Of very long shards a sample of evenly spaced tokens is counted and scaled up.
    """
    side = schedule.queries
    if schedule.is_balanced:  # a triangle of all rows of the ring, in equal parts
        rows = side.num_rows * schedule.ring_size
        return rows * (rows + 1) // (2 * schedule.ring_size)
    distinct, counts = np.unique(offsets, return_counts=True)
    length = side.shard_length
    local = spaced_tokens(length)
    found = []
    for shard in _looked_at(side):
        token = side.first(shard) + local
        token = token[token < side.stop]
        count = lambda offset, token=token: schedule.branch.count(
            token, 0, schedule.keys.length, offset, schedule.keys.length, schedule.is_causal
        )
        sums = [count(int(offset)).sum(dtype=np.int64) for offset in distinct]
        found.append(np.average(sums, weights=counts) * length / max(1, len(local)))
    return int(max(found))


@functools.lru_cache(maxsize=1024)
def num_tile_pairs(schedule: BranchSchedule, offsets: tuple[int, ...]) -> int:
    """Returns how many pairs are in the tiles of a query head that meet on the busiest device.

    A tile meets another where one of its queries, of any head, sees from its first to its last key one of the other's.
    Documents, and what earlier branches of a union take, are left out of account.
    """
    queries, keys = schedule.queries, schedule.keys
    rows = queries.num_full_chunks * queries.block_rows
    if (
        schedule.is_balanced
    ):  # of the own halves two triangles and a whole one, of those of each other shard two whole ones
        blocks = queries.num_blocks // 2
        tiles = blocks * (2 * blocks + 1) + (schedule.ring_size - 1) * 2 * blocks**2
        return tiles * rows * keys.block_rows
    extremes = min(offsets), max(offsets)
    return max(_tile_pairs_of(schedule, shard, extremes) for shard in _looked_at(queries)) * rows


def _looked_at(side: Side) -> Iterable[int]:
    """The shards of which the busiest is taken: all, or of many those that differ most."""
    last = side.num_shards - 1
    return range(last + 1) if last < _MOST_SHARDS else {0, side.num_shards // 2, last - 1, last}


def _tile_pairs_of(schedule: BranchSchedule, shard: int, offsets: tuple[int, int]) -> int:
    """The keys that the blocks of a chunk of queries meet, in whole blocks; of very many blocks a sample is counted."""
    sampled = np.arange(0, schedule.queries.num_blocks, 1 + schedule.queries.num_blocks // _MOST_BLOCKS)
    first, last = _ends(schedule.queries, np.array([shard]), sampled, offsets)
    seen, up_to = schedule.branch.seen(first, schedule.is_causal)[0], schedule.branch.seen(last, schedule.is_causal)[1]
    total = 0
    for side, shards in _keys_met(schedule, shard):
        key_first, key_last = _ends(side, shards, np.arange(side.num_blocks), offsets)
        met = np.searchsorted(key_first, up_to, "right") - np.searchsorted(key_last, seen)
        total += int(met.clip(0).sum()) * side.block_rows
    return total * schedule.queries.num_blocks // max(1, sampled.size)


def _ends(side: Side, shards: np.ndarray, blocks: np.ndarray, offsets: tuple[int, int]) -> tuple[Any, Any]:
    """Returns the first and the last token, of any head, of each block of the first chunks of shards, in order."""
    slot = blocks * side.block_rows
    last_slot = np.minimum(slot + side.block_rows, side.num_rows) - 1
    shard = np.sort(shards)[:, None]
    first, has_rows = side.slot_token(shard, 0, slot, offsets[0])  # [S, J]
    last, _ = side.slot_token(shard, 0, last_slot, offsets[1])
    return first[has_rows], np.minimum(last, side.stop - 1)[has_rows]


def _keys_met(schedule: BranchSchedule, shard: int) -> Iterator[tuple[Side, np.ndarray]]:
    """Yields the keys that meet a shard's queries, with the shards that they are of."""
    if schedule.is_gathered:
        size = schedule.gather_size
        yield schedule.keys, shard // size * size + np.arange(size)
        return
    yield schedule.keys, np.array([shard])
    for leg in schedule.key_legs:
        hops = np.arange(1, leg.rotations + 1)
        hops = hops[np.broadcast_to(schedule.is_new(shard, hops, leg.direction), hops.shape)]
        yield schedule.keys, schedule.source(shard, hops, leg.direction)
        if leg.halo and schedule.is_new(shard, leg.rotations + 1, leg.direction):
            yield leg.of_halo(schedule.keys), np.array([schedule.source(shard, leg.rotations + 1, leg.direction)])
