"""Bounds of the bytes that a device holds at the peak: what it must hold, and what it can hold at the most."""

from typing import NamedTuple

from ringjax._schedule.schedule import BranchSchedule, Schedules
from ringjax._schedule.work import Work


class Memory(NamedTuple):
    """Bounds of the bytes that a device holds at the peak, from below and from above."""

    at_least: int
    at_most: int


def bound_memory(work: Work, schedules: Schedules, has_gradient: bool) -> Memory:
    """Returns bounds of what a device holds at the peak of a call, or of its gradient, compiled by itself.

    Let A be the arguments, including the cotangent, R the results, and S the sums of all tokens in the dtype of sums.
    For each branch, let G be the keys and values that it gathers, B its rows of queries and of the keys that are live
    at once, with their residuals and sums, and L the logits of one tile if XLA computes it:

        at least  A + max(R, max G)
        at most   A + R + 2 (S + sum B) + 4 sum L, and 2 (A + R) more if tokens are exchanged for heads

    The factor 2 counts an array at its source and at its destination. The factor 4 counts logits, their mask, and their
    weights in the dtypes of sums and of arrays. Only a compiler knows which arrays are live at once.
    """
    numbers = _Numbers.of(work, schedules)
    arguments = (numbers.query + has_gradient * numbers.out) * work.itemsize + numbers.key_bytes
    results = numbers.query * work.itemsize + numbers.key_bytes if has_gradient else numbers.out * work.itemsize
    sums = numbers.out + numbers.lse + has_gradient * (numbers.query + numbers.lse + numbers.key)
    sums += work.needs_maximum * numbers.lse
    gathered = max((_gathered(work, schedule) for schedule in schedules), default=0)
    of_branches = sum(_rows(work, schedule, has_gradient) for schedule in schedules)
    logits = sum(_logits(work, schedule) for schedule in schedules)
    is_exchanged = any(schedule.ulysses_size > 1 for schedule in schedules)
    at_most = (1 + 2 * is_exchanged) * (arguments + results) + 2 * (sums * work.sum_itemsize + of_branches) + 4 * logits
    return Memory(arguments + max(results, gathered), at_most)


class _Numbers(NamedTuple):
    """The elements of a device's queries, output, lse, and keys with values, and the bytes of the keys and values."""

    query: int
    out: int
    lse: int
    key: int
    key_bytes: int

    @classmethod
    def of(cls, work: Work, schedules: Schedules) -> "_Numbers":
        one = schedules[0].of_devices()
        tokens, keys = one.queries.shard_length * work.batch, one.keys.shard_length * work.batch * work.local_heads(1)
        rows = tokens * work.num_heads
        widths = work.width, work.value_width
        return cls(rows * widths[0], rows * widths[1], rows, keys * sum(widths), keys * work.kv_bytes)


def _gathered(work: Work, schedule: BranchSchedule) -> int:
    """Returns the bytes of the keys and values that a whole group of devices gathers."""
    return schedule.is_gathered * schedule.gather_size * schedule.keys.num_padded_rows * work.keys_row(schedule)


def _rows(work: Work, schedule: BranchSchedule, has_gradient: bool) -> int:
    """Returns the bytes of a branch's rows, of queries and of all keys that are live at once, with their sums."""
    row, (heads, _) = work.row_bytes(schedule), work.heads_of(schedule)
    # In a ring over groups, the rows on their way to the next group are live while others go around this one.
    num_copies = schedule.gather_size if schedule.is_gathered else 1 + schedule.is_nested
    num_keys = schedule.keys.num_padded_rows * num_copies
    num_queries = schedule.num_query_rows * (1 + schedule.is_nested)
    sums = work.batch * heads * (work.value_width + 2) * work.sum_itemsize
    if not has_gradient:
        return num_queries * (work.query_row(schedule) + sums) + num_keys * row.keys
    of_queries = num_queries * (row.queries + max(row.query_grad, sums))
    return of_queries + num_keys * (row.keys + row.keys_grad)


def _logits(work: Work, schedule: BranchSchedule) -> int:
    """Returns the bytes of the logits of one tile of queries and one of keys, over batch and heads."""
    if schedule.implementation != "xla":
        return 0
    side = schedule.queries
    pairs = side.chunks_per_tile * side.block_rows * schedule.keys.block_rows
    return work.batch * work.heads_of(schedule)[0] * pairs * work.sum_itemsize
