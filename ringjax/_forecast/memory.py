"""The bytes that a device holds at the peak, by count: arguments, results, and what branches keep beside them.

What they keep is for compilers to choose, who copy, and begin early what travels. All factors here come near to what
they chose in some 200 random programs for H100s and a v5e; `benchmarks.plan_memory` measures how near.
"""

import dataclasses
import functools
from collections.abc import Hashable
from typing import NamedTuple

from ringjax._schedule.cost import RowBytes, Work
from ringjax._schedule.schedule import BranchSchedule, Schedules

# Of what a branch keeps, the share that is there as well when the one that keeps most is computed. Of two numbers, the
# second is with the gradient: what neighbours send is on its way from the beginning.
_SHARE, _SHARE_OF_NEIGHBOURS = 0.75, (0.75, 0.9)
# How often rows that stay are there, where they are laid out anew beside the arguments; and a halo.
_COPIED, _HALO = (1, 1.4), (1.15, 1.25)
# How often the logits of a tile are there, with what becomes of them.
_LOGITS = 1.6, 3.2


class Factors(NamedTuple):
    """How often what is counted is there, on one kind of devices. Of two numbers, the second is with the gradient."""

    lanes: int  # widths of what branches keep are multiples of it
    # Rows that do not travel, laid out anew: None where kernels read the arguments themselves, of which the backward
    # copies half, and rows that were taken.
    laid_out: tuple[float, float] | None
    laid_out_in_groups: float  # of that with the gradient, what does not get less the more groups there are
    share_local: float  # of branches whose rows do not travel
    travelling: tuple[float, float]  # what stays and what comes by in a ring, or along hops
    one_rotation: float  # what comes by where nothing rotates on: in a loop it is there twice
    share_exchanged: float  # of branches that exchange all tokens, and share these where kernels read no copies
    small: int  # bytes of what is computed in a memory beside the main one
    in_both: tuple[float, float]  # how often that is there


# CPUs are counted as GPUs are.
ON_GPUS = Factors(
    lanes=1,
    laid_out=None,
    laid_out_in_groups=1,
    share_local=_SHARE,
    travelling=(1, 1),
    one_rotation=0.75,
    share_exchanged=0.05,
    small=0,
    in_both=(1, 1),
)
# Kernels for TPUs read heads that lie apart; the small memory is their vector memory.
ON_TPUS = Factors(
    lanes=128,
    laid_out=(0.7, 2.25),
    laid_out_in_groups=0.18,
    share_local=0.3,  # one waits for the other
    travelling=(0.7, 1.1),
    one_rotation=1.5,
    share_exchanged=_SHARE,
    small=128 * 2**20,
    in_both=(2, 1.2),
)


def peak_bytes(work: Work, schedules: Schedules, factors: Factors, has_gradient: bool) -> int:
    """Returns the bytes at the peak of a call, or of its gradient.

    Arguments and results lie close; what branches keep has widths of whole lanes.
    """
    query, out, of_keys = _numbers(work, schedules)
    arguments, results = query + of_keys + has_gradient * out, query + of_keys if has_gradient else out
    given = (arguments + results) * work.itemsize
    beside = functools.partial(_beside, work, schedules, factors, has_gradient)
    # What does not fit the small memory is there once: there the count falls, as the compilers' does.
    in_both = given + round(beside(is_small=True))
    return in_both if in_both < factors.small else given + round(beside(is_small=False))


def _beside(work: Work, schedules: Schedules, factors: Factors, has_gradient: bool, is_small: bool) -> float:
    """What branches keep, of which some are under way at once."""
    padded, of_branches = _padded(work, factors.lanes), {}
    for schedule in schedules:
        kept = _Kept(padded, schedule, factors, has_gradient, is_small)
        of_branches[_pairs_of(work, schedule)] = kept.bytes, _share(schedule, factors, has_gradient)
    (most, _), *others = sorted(of_branches.values(), reverse=True)
    beside = most + sum(share * num_bytes for num_bytes, share in others)
    return beside * factors.in_both[has_gradient] if is_small else beside


def _pairs_of(work: Work, schedule: BranchSchedule) -> Hashable:
    """What says which pairs a branch has: those of two branches that are the same are computed once."""
    heads = work.pattern.heads_of(schedule.number, work.num_kv_heads)
    offset = work.pattern.offset(heads.start, schedule.branch, schedule.number, work.num_kv_heads)
    return schedule.branch, heads, offset, schedule.earlier


def _padded(work: Work, lanes: int) -> Work:
    pad = lambda width: -(-width // lanes) * lanes
    return dataclasses.replace(work, width=pad(work.width), value_width=pad(work.value_width))


def _numbers(work: Work, schedules: Schedules) -> tuple[int, int, int]:
    """The numbers in a device's queries, in its output, and in its keys and values."""
    tokens = max(schedule.of_devices().queries.shard_length for schedule in schedules) * work.batch
    keys = max(schedule.of_devices().keys.shard_length for schedule in schedules) * work.batch * work.local_heads(1)
    widths = work.width, work.value_width
    return tokens * work.num_heads * widths[0], tokens * work.num_heads * widths[1], keys * sum(widths)


def _share(schedule: BranchSchedule, factors: Factors, has_gradient: bool) -> float:
    if schedule.exchange_size > 1:
        return factors.share_exchanged if schedule.is_local and not schedule.exchanges_rows else _SHARE
    if schedule.is_local:
        return factors.share_local
    return _SHARE if schedule.is_closed else _SHARE_OF_NEIGHBOURS[has_gradient]


class _Kept(NamedTuple):
    """What a branch keeps at its peak: rows as they are computed, those that come by, sums, and what is exchanged."""

    work: Work
    schedule: BranchSchedule
    factors: Factors
    has_gradient: bool
    is_small: bool

    @property
    def bytes(self) -> float:
        """The bytes of all of it."""
        return self._computing() + self._exchanged() + self._tiles()

    @property
    def row(self) -> RowBytes:
        """The bytes of a slot: of arrays, and of sums under way."""
        row = self.work.row_bytes(self.schedule)
        if self.has_gradient:
            return row
        heads, _ = self.work.heads_of(self.schedule)
        sums = self.work.batch * heads * self.work.value_width * self.work.sum_itemsize
        return RowBytes(self.work.query_row(self.schedule), row.keys, sums, 0)

    @property
    def _kv_heads(self) -> int:
        """The key/value heads of a device's own tokens, repeated where they are exchanged and too few."""
        return self.work.local_heads(self.schedule.exchange_size) * self.schedule.exchange_size

    def _computing(self) -> float:
        schedule = self.schedule
        if schedule.is_local:
            return self._local()
        # In the small memory all tokens are there as well, where the gradient takes rows from them.
        are_taken = self.is_small and self.has_gradient and not schedule.branch.keeps_all
        tokens = self._tokens() if are_taken else 0
        if schedule.is_gathered:
            return tokens + self._gathered()
        return tokens + self._travelling() * self.factors.travelling[self.has_gradient]

    def _tokens(self) -> int:
        """The queries, keys and values of a device."""
        one, work = self.schedule.of_devices(), self.work
        numbers = one.queries.shard_length * work.num_heads * work.width
        numbers += one.keys.shard_length * self._kv_heads * (work.width + work.value_width)
        return work.batch * numbers * work.itemsize

    def _local(self) -> float:
        """Rows that are taken. All of a shard are the arguments themselves, of which the backward copies some."""
        schedule, row = self.schedule, self.row
        if self.factors.laid_out is not None:
            laid_out, same = self.factors.laid_out[self.has_gradient], self.factors.laid_out_in_groups
            if self.has_gradient and schedule.branch.keeps_all:  # of others the sums are arrays as well
                laid_out *= same + (1 - same) / schedule.queries.num_groups
            if schedule.exchanges_rows:  # of the gradient, beside the tokens that these are taken from
                laid_out = laid_out / schedule.branch.offset_rate + (1 if self.has_gradient else 0)
            return laid_out * self._tokens()
        rows = schedule.queries.num_slots * row.queries + schedule.keys.num_slots * row.keys
        is_whole = schedule.branch.keeps_all and not schedule.traits.copies_arguments
        return rows * self.has_gradient / 2 if is_whole else rows

    def _gathered(self) -> float:
        """Queries with their sums, and keys of a segment: as they come and laid out, or most with their sums."""
        schedule, row = self.schedule, self.row
        of_sums = row.keys_grad * (1.2 if schedule.traits.rows_last else 0.8)  # some are laid out anew
        of_key = 0.7 * row.keys + of_sums if self.has_gradient else 1.5 * row.keys
        stay = schedule.queries.num_slots * (row.queries + row.query_grad)
        return stay + schedule.gather_size * schedule.keys.num_slots * of_key

    def _travelling(self) -> float:
        """The side that stays with its sums, and what comes by with its own: twice in a loop, which needs the next."""
        schedule, row = self.schedule, self.row
        sides = (
            (schedule.queries, schedule.query_legs, row.queries, row.query_grad),
            (schedule.keys, schedule.key_legs, row.keys, row.keys_grad),
        )
        do_queries = self.has_gradient and schedule.queries_travel
        (stays, _, rows, of_stays), (side, legs, own, sums) = sides[::-1] if do_queries else sides
        come_by, rotations = own + sums, max(leg.rotations for leg in legs)
        are_copied = schedule.traits.copies_arguments or self.factors.laid_out is not None
        copies = _COPIED[self.has_gradient] if schedule.traits.copies_arguments else 1
        kept = stays.num_slots * (copies * rows + of_stays)
        if not schedule.is_closed:
            # A shard visits its own rows in two parts, while the halo comes and while its gradient returns.
            halo = _HALO[self.has_gradient] * sum(leg.halo_rows(side) for leg in legs)
            kept += side.num_slots * own + halo * come_by
        if rotations > 1:
            # Rows whose halves are swapped, where they are not taken anyway, are arrays beside the arguments.
            is_swapped = schedule.is_balanced and schedule.branch.keeps_all
            kept += is_swapped * 2 * schedule.queries.num_slots * self.work.query_row(schedule)
            return kept + 2 * side.num_slots * come_by
        if schedule.is_closed and schedule.branch.keeps_all and not (schedule.is_balanced or are_copied):
            kept -= stays.num_slots * rows  # the arguments themselves
        return kept + rotations * self.factors.one_rotation * side.num_slots * come_by

    def _exchanged(self) -> float:
        """What was exchanged, and the results that are to return; rings begin when it has arrived, and reuse it."""
        schedule, work = self.schedule, self.work
        is_ring = not schedule.is_local and schedule.is_closed and max(leg.rotations for leg in schedule.key_legs) > 1
        if schedule.exchange_size == 1 or is_ring or (schedule.is_local and self.factors.laid_out is not None):
            return 0
        one = schedule.of_devices()
        tokens = lambda side: side.num_slots if schedule.exchanges_rows else side.shard_length
        result = work.width if self.has_gradient else work.value_width
        of_query = work.num_heads * (work.width + result) * work.itemsize
        of_query += work.num_heads * work.residual_bytes([schedule]) * self.has_gradient
        of_key = self._kv_heads * (work.width + work.value_width) * work.itemsize * (1 + self.has_gradient)
        exchanged = work.batch * (tokens(one.queries) * of_query + tokens(one.keys) * of_key)
        if schedule.is_local:
            return exchanged * (1.7 if schedule.traits.copies_arguments else 1)
        return exchanged / 2

    def _tiles(self) -> float:
        """The tiles of pairs that XLA computes one after the other: logits and what becomes of them."""
        schedule = self.schedule
        if not schedule.traits.keeps_logits:
            return 0
        heads, _ = self.work.heads_of(schedule)
        pairs = schedule.queries.chunks_per_tile * schedule.queries.block_rows * schedule.keys.block_rows
        return _LOGITS[self.has_gradient] * self.work.batch * heads * pairs * self.work.sum_itemsize
