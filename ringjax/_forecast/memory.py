"""The bytes that a device holds at the peak, by count: arguments, results, and what branches keep beside them.

`benchmarks.plan_memory` measures how near this comes to what compilers choose.
"""

import itertools
import operator
from collections.abc import Hashable
from typing import NamedTuple

from ringjax._forecast.exchanged import Exchanged, exchanges_all
from ringjax._forecast.factors import Factors
from ringjax._forecast.kept import Kept
from ringjax._schedule.cost import Work
from ringjax._schedule.schedule import BranchSchedule, Schedules, exchanged_together


def peak_bytes(work: Work, schedules: Schedules, factors: Factors, has_gradient: bool) -> int:
    """Returns the bytes at the peak of a call, or of its gradient.

    Arguments and results lie close.
    """
    query, out, of_keys = _numbers(work, schedules)
    arguments, results = query + of_keys + has_gradient * out, query + of_keys if has_gradient else out
    held = (arguments + results) * work.itemsize + round(_beside(work, schedules, factors, has_gradient))
    # What a kernel has in a TPU's vector memory is there as well: less for small arrays.
    return held + min(factors.of_kernel, held // 5)


class _Held(NamedTuple):
    """What a branch keeps, or some that are counted together, and how much of it there is beside what keeps most."""

    bytes: float
    share: float
    sums: float = 0
    is_gathered: bool = False
    output: float = 0


def _beside(work: Work, schedules: Schedules, factors: Factors, has_gradient: bool) -> float:
    """What branches keep, of which some are under way at once, and what they are added to."""
    of_branches = {_pairs_of(work, schedule): schedule for schedule in schedules}.values()
    in_turn = [exchanges_all(schedule) for schedule in of_branches]
    kept = [Kept(work, schedule, factors, has_gradient) for schedule in of_branches]
    held = [
        _Held(one.bytes, _share(one.schedule, factors, has_gradient), one.sums, one.schedule.is_gathered, one.output)
        for one in itertools.compress(kept, map(operator.not_, in_turn))
    ]
    for part in exchanged_together(itertools.compress(of_branches, in_turn)):
        tiles = [one.tiles for one in kept if one.schedule in part]
        exchanged = Exchanged(work, part, tiles, has_gradient)
        num_bytes = exchanged.on_gpus if factors.laid_out is None else exchanged.on_tpus
        held.append(_Held(num_bytes, factors.share_exchanged))
    most, *others = sorted(held, reverse=True)
    most_share = factors.share_beside_gathered if most.is_gathered else 1
    keep = most.bytes + sum(min(one.share, most_share) * one.bytes for one in others)
    # Sums are what several branches are added to. Where some of these have none, others are added as cheaply.
    sums = [one.sums for one in held]
    keep += max(sums) if others and all(sums) else 0
    outputs = sum(one.output for one in others) if factors.keeps_outputs and not has_gradient else 0
    return keep + outputs


def _pairs_of(work: Work, schedule: BranchSchedule) -> Hashable:
    """What says which pairs a branch has: those of two branches that are the same are computed once."""
    heads = work.pattern.heads_of(schedule.number, work.num_kv_heads)
    offset = work.pattern.offset(heads.start, schedule.branch, schedule.number, work.num_kv_heads)
    return schedule.branch, heads, offset, schedule.earlier


def _numbers(work: Work, schedules: Schedules) -> tuple[int, int, int]:
    """The numbers in a device's queries, in its output, and in its keys and values."""
    tokens = max(schedule.of_devices().queries.shard_length for schedule in schedules) * work.batch
    keys = max(schedule.of_devices().keys.shard_length for schedule in schedules) * work.batch * work.local_heads(1)
    widths = work.width, work.value_width
    return tokens * work.num_heads * widths[0], tokens * work.num_heads * widths[1], keys * sum(widths)


def _share(schedule: BranchSchedule, factors: Factors, has_gradient: bool) -> float:
    """How much of what a branch keeps is there while the one that keeps most is computed."""
    if schedule.queries.chunks == "residues" and not schedule.is_local:
        return factors.share_sorted
    if schedule.traits.copies_arguments:
        sends_all = schedule.branch.keeps_all and not schedule.is_local
        return factors.share_of_tiles[not sends_all]
    if schedule.exchange_size > 1 or schedule.is_local or schedule.is_closed:
        return factors.share
    return factors.share_of_neighbours[has_gradient]
