"""Packed documents: how many pairs attend, and how evenly the steps of a ring share them, counted in active blocks."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringjax._pattern.branch import spaced_tokens
from ringjax._pattern.counts import is_integer
from ringjax._schedule.schedule import BranchSchedule
from ringjax._schedule.side import Side

_MOST_PACKINGS = 8  # sequences that are counted
_FEWEST_TOKENS = 16  # of a random document
_NOWHERE = 2**32  # a position after all others
_MOST_ROWS = 512  # of the blocks of kernels that compute chunks as a whole


class Packing(NamedTuple):
    """A sequence of packed documents: the position of the first token of each, and the length of the sequence."""

    starts: tuple[int, ...]
    length: int

    def bounds(self, token: Any) -> tuple[Any, Any]:
        """Returns the first and the last token of the document that a token is in."""
        ends = np.array([*self.starts, self.length])
        number = np.searchsorted(ends, token, "right").clip(1, len(self.starts))
        return ends[number - 1], ends[number] - 1


def pack(lengths: Sequence[int], num_tokens: int) -> tuple[Packing, ...]:
    """Returns sequences of documents of these lengths, in order, each cut where its sequence ends.

    The documents are repeated from the first one where they do not fill a sequence. At most eight sequences are
    returned.

    Raises:
      TypeError: for anything but a sequence.
      ValueError: if there is no document, or one without a token.
    """
    if isinstance(lengths, str) or not hasattr(lengths, "__len__"):
        raise TypeError(f"document_lengths={lengths!r} must be a sequence: give the tokens of each document")
    for length in lengths:
        if not is_integer(length) or length < 1:
            raise ValueError(f"document_lengths has {length!r}: give the tokens of each document, positive integers")
    if not len(lengths):
        raise ValueError("document_lengths=[] is empty: give the tokens of each document")
    given = np.array([min(int(length), num_tokens) for length in lengths])
    given = np.tile(given, -(-num_tokens // int(given.sum())))
    packings, begin, repeated = [], 0, np.tile(given, 2)
    while begin < given.size and len(packings) < _MOST_PACKINGS:
        ends = np.cumsum(repeated[begin:])
        count = int(np.searchsorted(ends, num_tokens)) + 1
        packings.append(Packing((0, *ends[: count - 1].tolist()), num_tokens))
        begin += count
    return tuple(packings)


def draw_lengths(median: float, sigma: float, num_tokens: int, seed: int = 0) -> list[int]:
    """Returns log-normal lengths of documents that fill several sequences of so many tokens."""
    random, fewest = np.random.default_rng(seed), min(_FEWEST_TOKENS, num_tokens)
    lengths: list[int] = []
    drawn = np.empty(0, np.int64)
    for _ in range(_MOST_PACKINGS):
        while drawn.sum() < num_tokens:
            more = random.lognormal(np.log(median), sigma, size=max(1024, drawn.size))
            drawn = np.append(drawn, np.clip(more, fewest, num_tokens).astype(np.int64))
        count = int(np.searchsorted(np.cumsum(drawn), num_tokens)) + 1
        lengths += drawn[:count].tolist()
        drawn = drawn[count:]
    return lengths


@functools.lru_cache(maxsize=1024)
def active_blocks(schedule: BranchSchedule, packing: Packing) -> tuple[tuple[int, ...], ...]:
    """Returns the active blocks of each ring step on each shard, of a head with offset 0.

    A block is active if, by the bounds of its rows, a query sees a key in its document, as kernels decide it. Pairs of
    earlier branches that a union leaves out are counted.
    """
    schedule = _in_blocks(schedule)
    shards = np.arange(schedule.num_shards)
    first, last = _ends(schedule, schedule.queries, shards, schedule.is_dealt)  # [shards, chunks, blocks]
    is_causal, branch, is_block = schedule.is_causal, schedule.branch, first < _NOWHERE
    low = np.maximum(branch.seen(first, is_causal)[0], packing.bounds(first)[0])
    high = np.minimum(branch.seen(last, is_causal)[1], packing.bounds(last)[1])
    steps = []
    for of_keys, sources, is_new in _steps(schedule, shards):
        # Of each shard, or, if keys are gathered, of several ones after each other.
        ends = _ends(schedule, of_keys, sources, schedule.is_dealt and not schedule.is_gathered)
        ends = (array.reshape(shards.size, -1, *array.shape[1:]).swapaxes(1, 2) for array in ends)
        key_first, key_last = (np.sort(array.reshape(*array.shape[:2], -1)) for array in ends)  # [shards, chunks, keys]
        count = _count(key_first, high, "right") - _count(key_last, low, "left")
        steps.append(np.where(is_block, count, 0).sum(axis=(1, 2)) * is_new)
    return tuple(tuple(step.tolist()) for step in steps)


def _in_blocks(schedule: BranchSchedule) -> BranchSchedule:
    """Returns the schedule in the blocks that its kernel skips, which may be less than the rows that it lays out."""
    if schedule.implementation == "xla":
        return schedule
    most = min(_MOST_ROWS, *(schedule.tile_rows or (_MOST_ROWS,)))
    cut = lambda side: dataclasses.replace(side, max_block_rows=min(side.max_block_rows, most))
    return dataclasses.replace(schedule, queries=cut(schedule.queries), keys=cut(schedule.keys))


def _count(ends: np.ndarray, bound: np.ndarray, side: Any) -> np.ndarray:
    """Returns, in each chunk, how many of its sorted numbers come before each bound."""
    number = np.arange(ends.shape[0] * ends.shape[1]).reshape(*ends.shape[:2], 1)
    # One search for all chunks, whose numbers follow each other.
    found = np.searchsorted((ends + 2 * _NOWHERE * number).reshape(-1), bound + 2 * _NOWHERE * number, side)
    return found - ends.shape[-1] * number


def _ends(schedule: BranchSchedule, side: Side, shards: np.ndarray, is_dealt: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first and the last token of each block [shards, chunks, blocks], beyond all others if it has none."""
    shard, chunk = shards[:, None, None], np.arange(side.num_chunks)[:, None]
    block = np.arange(side.num_blocks) * side.block_rows
    holder, row = schedule.origin(shard, block, side) if is_dealt else (shard, block)
    first, is_row = side.row_token(holder, chunk, row, 0)
    last, _ = side.row_token(holder, chunk, np.minimum(row + side.block_rows, side.chunk_rows) - 1, 0)
    last = np.minimum(np.minimum(last, side.first(holder, chunk) + side.chunk_length - 1), side.stop - 1)
    return np.where(is_row, first, _NOWHERE), np.where(is_row, last, _NOWHERE)


def _steps(schedule: BranchSchedule, shards: np.ndarray) -> Iterator[tuple[Side, np.ndarray, Any]]:
    """Yields, for each ring step, the side of the keys, the shards that they are of, and where they are new."""
    if schedule.is_gathered:
        size = schedule.gather_size
        yield schedule.keys, (shards[:, None] // size * size + np.arange(size)).reshape(-1), True
        return
    yield schedule.keys, shards, True
    for rotation in schedule.key_rotations:
        for hops in range(1, rotation.hops + 1):
            side = schedule.keys if hops <= rotation.steps else rotation.of_halo(schedule.keys)
            where = hops, rotation.direction
            yield side, schedule.source(shards, *where), schedule.is_new(shards, *where)


def in_step(schedule: BranchSchedule, packings: Sequence[Packing], batch: int = 1) -> float:
    """Returns how long the steps of all packings take over the ideal, in which all shards share the blocks.

    A step computes so many packings of a batch, and the shards wait for the one with the most blocks of these.
    """
    counts = _by_batches(schedule, packings, batch)
    return float(counts.max(axis=2).sum() * counts.shape[2] / max(1, counts.sum()))


def _by_batches(schedule: BranchSchedule, packings: Sequence[Packing], batch: int) -> np.ndarray:
    """Returns the active blocks [batches, steps, shards] of batches of packings, which are repeated if they are few."""
    counts = np.array([active_blocks(schedule, packing) for packing in packings])
    number = np.arange(max(1, len(packings) // batch))[:, None] * batch + np.arange(batch)
    return counts[number % len(packings)].sum(axis=1)


def num_packed_pairs(schedule: BranchSchedule, offsets: tuple[int, ...], packings: Sequence[Packing]) -> int:
    """Returns the pairs of a query head that a shard keeps, on average over shards, packings and offsets of heads."""
    return int(np.mean([_num_pairs(schedule, offsets, packing) for packing in packings]))


@functools.lru_cache(maxsize=1024)
def _num_pairs(schedule: BranchSchedule, offsets: tuple[int, ...], packing: Packing) -> float:
    token = schedule.queries.first(0) + spaced_tokens(packing.length)
    first, last = packing.bounds(token)
    length, distinct = schedule.keys.length, np.unique(offsets, return_counts=True)
    count = lambda offset: schedule.branch.count(token, first, last + 1, offset, length, schedule.is_causal).sum()
    pairs = np.average([count(int(offset)) for offset in distinct[0]], weights=distinct[1])
    return pairs * packing.length / token.size / schedule.num_shards


def num_packed_tile_pairs(schedule: BranchSchedule, packings: Sequence[Packing], batch: int) -> int:
    """Returns the pairs in the active blocks of a query head of a packing, of the busiest shard of each step."""
    counts = _by_batches(schedule, packings, batch)
    busiest = counts.max(axis=2).sum() / (len(counts) * batch)
    return int(busiest * schedule.queries.block_rows * schedule.keys.block_rows)
