"""What a schedule costs: the work of each shard in each step of a ring, and the bytes that a shard sends."""

from typing import NamedTuple

from ringjax._schedule import BranchSchedule


class RowBytes(NamedTuple):
    """The bytes of one slot on one shard, over batch and heads, of what the backward reads and adds up."""

    queries: int  # with all that belongs to them: cotangents, lse, ...
    keys: int  # and values
    query_grad: int
    keys_grad: int


def work(branch: BranchSchedule, shard: int, step: int, offset: int = 0) -> int:
    """Returns the number of pairs of a query and a key that a shard computes in one step of the ring.

    In a union, those that it leaves out are counted too.
    """
    if not branch.is_new(shard, step):
        return 0
    queries, keys = _ranks(branch, shard, offset), _ranks(branch.of_keys, branch.source(shard, step), offset)
    return sum(_pairs(branch, some, others, offset) for some in queries for others in keys)


def _ranks(branch: BranchSchedule, shard: int, offset: int) -> list[range]:
    """The ranks of the rows that a shard computes: one range, or one for each half."""
    slots = branch.num_slots // (2 if branch.is_balanced else 1)
    ranks = []
    for first_slot in range(0, branch.num_slots, slots):
        holder, slot = branch.origin(shard, first_slot)
        boundaries = branch.first(holder), branch.first(holder + 1)
        begin, end = (branch.rank(min(token, branch.stop), offset) for token in boundaries)
        ranks.append(_overlap(range(begin + slot, begin + slot + slots), range(begin, end)))
    return ranks


def _pairs(branch: BranchSchedule, queries: range, keys: range, offset: int) -> int:
    kept = branch.kept(branch.segment_length, offset)
    total = 0
    for begin in range(queries.start // kept * kept, queries.stop, kept):
        segment = range(begin, begin + kept)
        rows, seen = _overlap(queries, segment), _overlap(keys, segment)
        if branch.is_causal:
            total += _before(rows.stop - seen.start, len(seen)) - _before(rows.start - seen.start, len(seen))
        else:
            total += len(rows) * len(seen)
    return total


def _before(rows: int, keys: int) -> int:
    """The pairs of `rows` queries with the keys up to their own: one more for each, until there are no more."""
    triangle = max(0, min(rows, keys))
    return triangle * (triangle + 1) // 2 + max(0, rows - keys) * keys


def _overlap(some: range, others: range) -> range:
    start = max(some.start, others.start)
    return range(start, max(start, min(some.stop, others.stop)))


def forward_bytes(branch: BranchSchedule, query: int, keys: int, results: int) -> int:
    """Returns the bytes that a shard sends forward, given those of a slot's query, key and value, and out and lse.

    Keys and values go around; the swapped halves of all go there, and their results back.
    """
    return _sent(branch, branch.of_keys.num_slots * keys, query + keys + results)


def queries_travel(branch: BranchSchedule, row: RowBytes) -> bool:
    """Returns whether the backward sends queries around, being lighter than keys and values, gradients included."""
    queries, keys = _around(branch, row)
    return queries < keys


def backward_bytes(branch: BranchSchedule, row: RowBytes) -> int:
    """Returns the bytes that a shard sends backward: the lighter side around, and the swapped halves there and back."""
    return _sent(branch, min(_around(branch, row)), sum(row))


def _around(branch: BranchSchedule, row: RowBytes) -> tuple[int, int]:
    queries, keys = row.queries + row.query_grad, row.keys + row.keys_grad
    return branch.num_slots * queries, branch.of_keys.num_slots * keys


def _sent(branch: BranchSchedule, rotated: int, swapped: int) -> int:
    swaps = branch.num_slots // 2 if branch.is_balanced else 0
    return (branch.ring_size - 1) * rotated + swaps * swapped
