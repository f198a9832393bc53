"""The bytes that a device holds at the peak, by count: arguments, results, and what each branch adds in its turn.

Compilers also copy, which is not counted, and may take branches in another order.
"""

import dataclasses

from ringjax._cost import RowBytes, Work, queries_travel
from ringjax._schedule import BranchSchedule
from ringjax._strategy import Schedules


def peak_bytes(work: Work, branches: Schedules, lanes: int, has_gradient: bool) -> int:
    """Returns the bytes at the peak of a call, or of its gradient; widths are padded to multiples of `lanes`."""
    work = _padded(work, lanes)
    query, out, of_keys = _numbers(work, branches)
    arguments, results = query + of_keys + has_gradient * out, query + of_keys if has_gradient else out
    # Results are made when what was gathered is gone.
    is_gathered = any(branch.strategy == "all_gather" for branch in branches)
    kept = arguments if is_gathered else arguments + results
    kept += _exchanged(work, branches, arguments - of_keys, of_keys)
    return kept * work.itemsize + max(_in_turn(work, branches, results * work.sum_itemsize, has_gradient))


def _padded(work: Work, lanes: int) -> Work:
    pad = lambda width: -(-width // lanes) * lanes
    return dataclasses.replace(work, width=pad(work.width), value_width=pad(work.value_width))


def _numbers(work: Work, branches: Schedules) -> tuple[int, int, int]:
    """The numbers in a device's queries, in its output, and in its keys and values."""
    tokens = max(branch.of_devices().queries.shard_length for branch in branches) * work.batch
    keys = max(branch.of_devices().keys.shard_length for branch in branches) * work.batch * work.local_heads(1)
    widths = work.width, work.value_width
    return tokens * work.num_heads * widths[0], tokens * work.num_heads * widths[1], keys * sum(widths)


def _exchanged(work: Work, branches: Schedules, of_queries: int, of_keys: int) -> int:
    """The numbers of exchanged tokens of which branches take some; key/value heads that are too few are repeated."""
    sizes = {
        branch.exchange_size
        for branch in branches
        if branch.exchange_size > 1 and not branch.exchanges_rows and not branch.branch.keeps_all
    }
    repeats = (size * work.local_heads(size) // work.local_heads(1) for size in sizes)
    return max((of_queries + of_keys * count for count in repeats), default=0)


def _in_turn(work: Work, branches: Schedules, total_bytes: int, has_gradient: bool) -> list[int]:
    """The bytes that are there while each branch is computed: its own, and what those before it have left.

    These are results that wait to be added all at once, or the total that they were added to.
    """
    found, waiting, total = [], 0, 0
    for number, branch in enumerate(branches):
        own = _results_of(work, branch, has_gradient)
        waits = branch.traits.are_added_at_once and branch.is_dense
        is_added = len(branches) > 1 and not waits
        is_total = number == 0 and branch.branch.keeps_all  # put there, not added
        if is_added and not is_total:
            total = total_bytes
        found.append(waiting + total + own + _held_by(work, branch, has_gradient))
        waiting += own if waits else 0
        total = total_bytes if is_added else total
    return found


def _results_of(work: Work, branch: BranchSchedule, has_gradient: bool) -> int:
    """The bytes of a branch's results. What comes in parts is summed; else it may be in the dtype of the arrays."""
    row, (heads, _) = work.row_bytes(branch), work.heads_of(branch)
    if has_gradient:
        sums = branch.queries.num_slots * row.query_grad + branch.keys.num_slots * row.keys_grad
    else:
        sums = branch.queries.num_slots * work.batch * heads * work.value_width * work.sum_itemsize
    is_whole = branch.traits.own_dtype and branch.is_local
    return sums * work.itemsize // work.sum_itemsize if is_whole else sums


def _held_by(work: Work, branch: BranchSchedule, has_gradient: bool) -> int:
    """The bytes of a branch's rows, and of what arrives."""
    row = work.row_bytes(branch)
    of_query = row.queries if has_gradient else work.query_row(branch)
    rows = branch.queries.num_slots * of_query + branch.keys.num_slots * row.keys
    return rows + _arriving(branch, row, has_gradient)


def _arriving(branch: BranchSchedule, row: RowBytes, has_gradient: bool) -> int:
    """The bytes of rows that come from other devices, and of their gradients: a shard's in each rotation, and halos."""
    of_key = row.keys + has_gradient * row.keys_grad
    if branch.strategy == "all_gather" and not branch.is_local:
        of_key += row.keys_grad if has_gradient and branch.traits.rows_last else 0
        return branch.gather_size * branch.keys.num_slots * of_key
    do_queries = has_gradient and queries_travel(branch, row)
    legs, side = (branch.query_legs, branch.queries) if do_queries else (branch.key_legs, branch.keys)
    rotating = sum(side.num_slots for leg in legs if leg.rotations)
    halos = sum(leg.halo_rows(side) for leg in legs)
    return (rotating + halos) * (row.queries + row.query_grad if do_queries else of_key)
