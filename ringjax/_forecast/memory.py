"""The bytes that a device holds at the peak, by count: arguments, results, and what branches keep beside them.

`benchmarks.plan_memory` measures how near this comes to what compilers choose.
"""

from collections.abc import Hashable

from ringjax._forecast import several
from ringjax._forecast.exchanged import Exchanged, exchanges_all
from ringjax._forecast.factors import Factors
from ringjax._forecast.kept import Kept
from ringjax._schedule.cost import Work
from ringjax._schedule.schedule import BranchSchedule, Schedules, exchanged_together, in_order_of_sums

# How much of arguments and results, or of what is beside them, is copied to a TPU's vector memory if there is room, and
# how much room is filled for outputs of local branches; and how much of it is filled with what memory has not, then.
_COPIED, _COPIED_BESIDE, _ROOM_OF_LOCAL, _ELSEWHERE = 0.9, 1.35, 0.5, 0.25
_COPIED_OF_OUTPUTS = 1.35  # of arguments and results, where nothing is exchanged


def peak_bytes(work: Work, schedules: Schedules, factors: Factors, has_gradient: bool) -> int:
    """Returns the bytes at the peak of a call, or of its gradient.

    Arguments and results lie close.
    """
    query, out, of_keys = _numbers(work, schedules)
    arguments, results = query + of_keys + has_gradient * out, query + of_keys if has_gradient else out
    held, beside = (arguments + results) * work.itemsize, _beside(work, schedules, factors, has_gradient)
    copied = _copied(schedules, factors, has_gradient, held, beside)
    return held + round(max(beside - _ELSEWHERE * factors.vector_memory, copied))


def _copied(schedules: Schedules, factors: Factors, has_gradient: bool, held: int, beside: float) -> float:
    """What is in a TPU's vector memory at the most: small arrays are copied there, and compilers state them as well."""
    room, exchanged = factors.vector_memory, any(schedule.exchange_size > 1 for schedule in schedules)
    if not has_gradient and len(schedules) == 1 and schedules[0].is_local:
        # There is nothing to wait for, and nothing to copy if all arrays are read and written as they are.
        room *= _ROOM_OF_LOCAL * (beside > 0)
    if len(schedules) > 1 or any(map(_reads_neighbours, schedules)):  # all of it, for one kernel after the other
        return min(room, held + beside)
    of_held = _COPIED if has_gradient or exchanged else _COPIED_OF_OUTPUTS
    return min(room, max(of_held * held, _COPIED_BESIDE * beside))


def _reads_neighbours(schedule: BranchSchedule) -> bool:
    """Whether kernels read all tokens of a shard, and some of its neighbours."""
    is_neighbours = not (schedule.is_local or schedule.is_gathered or schedule.is_closed)
    return schedule.branch.keeps_all and is_neighbours


def _beside(work: Work, schedules: Schedules, factors: Factors, has_gradient: bool) -> float:
    """What branches keep, of which some are under way at once, and what they are added to."""
    of_branches = in_order_of_sums({_pairs_of(work, schedule): schedule for schedule in schedules}.values())
    kept = [Kept(work, schedule, factors, has_gradient) for schedule in of_branches]
    first = {part[0].number for part in exchanged_together(of_branches)}
    adds = lambda schedule: schedule.continues and schedule.number not in first
    held = [several.held_by(one, adds(one.schedule)) for one in kept if not exchanges_all(one.schedule)]
    are_gpus = factors.laid_out is None
    for part in exchanged_together(filter(exchanges_all, of_branches)):
        tiles = [one.tiles for one in kept if one.schedule in part]
        exchanged = Exchanged(work, part, tiles, has_gradient)
        held.append(several.Held(exchanged.on_gpus if are_gpus else exchanged.on_tpus, "exchanged"))
    if are_gpus:
        return several.at_once(held, work, has_gradient)
    return several.in_turn(held, work, has_gradient)


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
