"""What a schedule costs in communication: the bytes that a shard sends."""

from typing import NamedTuple

from ringjax._schedule import BranchSchedule


class RowBytes(NamedTuple):
    """The bytes of one slot on one shard, over batch and heads, of what the backward reads and adds up."""

    queries: int  # with all that belongs to them: cotangents, lse, ...
    keys: int  # and values
    query_grad: int
    keys_grad: int


def forward_bytes(branch: BranchSchedule, query: int, keys: int, results: int) -> int:
    """Returns the bytes that a shard sends forward, given those of a slot's query, key and value, and out and lse.

    Keys and values go their ways; the swapped halves of all go there, and their results back.
    """
    return num_sent(branch, "keys") * keys + _num_swapped(branch) * (query + keys + results)


def queries_travel(branch: BranchSchedule, row: RowBytes) -> bool:
    """Returns whether the backward sends queries on their ways, being lighter than keys and values with gradients."""
    queries, keys = _on_their_ways(branch, row)
    return queries < keys


def backward_bytes(branch: BranchSchedule, row: RowBytes) -> int:
    """Returns the bytes that a shard sends backward: the lighter side, and the swapped halves there and back."""
    return min(_on_their_ways(branch, row)) + _num_swapped(branch) * sum(row)


def num_sent(branch: BranchSchedule, side: str) -> int:
    """Returns the number of rows that a shard sends of its "queries" or "keys"."""
    if side == "keys":
        return sum(leg.num_rows(branch.keys) for leg in branch.key_legs)
    return sum(leg.num_rows(branch.queries) for leg in branch.query_legs)


def _on_their_ways(branch: BranchSchedule, row: RowBytes) -> tuple[int, int]:
    queries, keys = row.queries + row.query_grad, row.keys + row.keys_grad
    return num_sent(branch, "queries") * queries, num_sent(branch, "keys") * keys


def _num_swapped(branch: BranchSchedule) -> int:
    return branch.queries.num_slots // 2 if branch.is_balanced else 0
