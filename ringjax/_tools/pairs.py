"""Counts the query-key pairs that a device computes: those that it keeps, and all pairs of active tiles."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ringjax._pattern.branch import spaced_tokens
from ringjax._schedule.schedule import BranchSchedule
from ringjax._schedule.side import Side

_MOST_SHARDS, _MOST_BLOCKS, _MOST_OFFSETS = 16, 1024, 16


@functools.lru_cache(maxsize=1024)
def num_kept_pairs(schedule: BranchSchedule, offsets: tuple[int, ...]) -> int:
    """Returns how many pairs of a query head the busiest device keeps, on average over the offsets of heads.

    In very long shards, a sample of evenly spaced tokens is counted and scaled up.
    """
    schedule = _placed(schedule)
    side = schedule.queries
    if _is_triangle(schedule):  # of all rows of the ring, in equal parts
        rows = side.chunk_rows * schedule.ring_size
        return rows * (rows + 1) // (2 * schedule.ring_size)
    distinct, counts = np.unique(offsets, return_counts=True)
    keys, is_of_all = schedule.keys, schedule.gathers_queries
    length = side.shard_length * (side.num_shards if is_of_all else 1)
    local = spaced_tokens(length)
    found = []
    for shard in _extreme_shards(side):
        token = side.first(0 if is_of_all else shard) + local
        token = token[token < side.stop]
        seen = (keys.first(shard), keys.first(shard + 1)) if is_of_all else (0, keys.length)
        count = lambda offset, token=token, seen=seen: schedule.branch.count(
            token, *seen, offset, keys.length, schedule.is_causal
        )
        sums = [count(int(offset)).sum(dtype=np.int64) for offset in distinct]
        found.append(np.average(sums, weights=counts) * length / max(1, len(local)))
    return int(max(found))


@functools.lru_cache(maxsize=1024)
def num_tile_pairs(schedule: BranchSchedule, offsets: tuple[int, ...]) -> int:
    """Returns how many pairs are in the active tiles of a query head on the busiest device.

    A tile of queries and one of keys are active if, over all heads, a key lies between the first and the last key that
    a query sees. Documents, and the pairs of earlier branches that a union leaves out, are ignored. Swapped halves
    count whole.
    """
    schedule = _placed(schedule)
    queries, keys = schedule.queries, schedule.keys
    num_rows = queries.num_full_chunks * queries.block_rows  # of one block in all chunks
    if schedule.is_zigzag:
        # Two triangles and a whole square of the shard's own halves, and two whole squares for each other shard.
        blocks = queries.num_blocks // 2
        tiles = blocks * (2 * blocks + 1) + (schedule.ring_size - 1) * 2 * blocks**2
        return tiles * num_rows * keys.block_rows
    if _is_triangle(schedule):
        # The last shard has every g-th block of the ring, the last one too.
        blocks, size = queries.num_blocks, schedule.ring_size
        return blocks * size * (blocks + 1) // 2 * num_rows * keys.block_rows
    distinct = np.unique(offsets)
    distinct = distinct[:: 1 + distinct.size // _MOST_OFFSETS]
    shards = range(queries.num_shards) if queries.num_shards <= _MOST_SHARDS else _extreme_shards(queries)
    return max(_tile_pairs_of(schedule, shard, distinct) for shard in shards) * num_rows


def _placed(schedule: BranchSchedule) -> BranchSchedule:
    """Returns the schedule with the queries last among the keys, if only the running program knows where they are."""
    last = max(0, schedule.keys.length - schedule.queries.length)
    return dataclasses.replace(schedule, queries=schedule.queries.at(last))


def _is_triangle(schedule: BranchSchedule) -> bool:
    """Returns whether shards share the work of a causal ring in equal parts."""
    return schedule.is_zigzag or (schedule.is_dealt and schedule.is_causal and schedule.is_one_segment)


def _extreme_shards(side: Side) -> set[int]:
    """Returns the shards that differ most: usually one of them is the busiest."""
    last = side.num_shards - 1
    return {0, side.num_shards // 2, max(0, last - 1), last}


def _tile_pairs_of(schedule: BranchSchedule, shard: int, offsets: np.ndarray) -> int:
    """Returns the keys in active blocks, summed over a chunk's query blocks, of which very many are sampled."""
    branch, side = schedule.branch, schedule.queries
    sampled = np.arange(0, side.num_blocks, 1 + side.num_blocks // _MOST_BLOCKS)
    own = np.arange(side.num_shards) if schedule.gathers_queries else np.array([shard])
    first, last = _ends(side, own, sampled, offsets)
    seen, up_to = branch.seen(first, schedule.is_causal)[0], branch.seen(last, schedule.is_causal)[1]
    total = 0
    for of_keys, shards in _keys_met(schedule, shard):
        key_first, key_last = _ends(of_keys, shards, np.arange(of_keys.num_blocks), offsets)
        active = np.searchsorted(key_first, up_to, "right") - np.searchsorted(key_last, seen)
        total += int(active.clip(0).sum()) * of_keys.block_rows
    return total * side.num_blocks // max(1, sampled.size)


def _ends(side: Side, shards: np.ndarray, blocks: np.ndarray, offsets: np.ndarray) -> tuple[Any, Any]:
    """Returns the first and the last token, over all heads, of each block of the first chunk of each shard, in order.

    Blocks without a row are left out.
    """
    row = blocks * side.block_rows
    last_row = np.minimum(row + side.block_rows, side.chunk_rows) - 1
    shard = np.sort(shards)[:, None]
    stop = np.minimum(side.first(shard) + side.chunk_length, side.stop)
    first, last = np.full((2, shard.size, blocks.size), -1)
    for offset in offsets:
        token, is_row = side.row_token(shard, 0, row, offset)  # [S, J]
        first = np.where(is_row & ((first < 0) | (token < first)), token, first)
        end = np.minimum(side.row_token(shard, 0, last_row, offset)[0], stop - 1)
        last = np.where(is_row & (end > last), end, last)
    return first[first >= 0], last[first >= 0]


def _keys_met(schedule: BranchSchedule, shard: int) -> Iterator[tuple[Side, np.ndarray]]:
    """Yields the keys that a shard's queries are computed with, and the shards that these come from."""
    if schedule.is_gathered:
        size = schedule.gather_size
        yield schedule.keys, shard // size * size + np.arange(size)
        return
    yield schedule.keys, np.array([shard])
    if schedule.gathers_queries:
        return
    for rotation in schedule.key_rotations:
        hops = np.arange(1, rotation.steps + 1)
        hops = hops[np.broadcast_to(schedule.is_new(shard, hops, rotation.direction), hops.shape)]
        yield schedule.keys, schedule.source(shard, hops, rotation.direction)
        if rotation.halo and schedule.is_new(shard, rotation.steps + 1, rotation.direction):
            yield (
                rotation.of_halo(schedule.keys),
                np.array([schedule.source(shard, rotation.steps + 1, rotation.direction)]),
            )
