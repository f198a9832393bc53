"""The bytes that a device holds at the peak, by count: arguments, results, and what branches keep beside them.

What they keep is for compilers to choose, who copy, and begin early what travels. All factors here come nearest to what
they chose in some 500 random programs for H100s and a v5e; `benchmarks.plan_memory` measures how near that is.
"""

import dataclasses
from collections.abc import Hashable
from typing import NamedTuple

from ringjax._schedule.cost import RowBytes, Work, queries_travel
from ringjax._schedule.schedule import BranchSchedule
from ringjax._schedule.strategy import Schedules

# Of what a branch keeps, the share that is there as well when the one that keeps most is computed.
_SHARE, _SHARE_GATHERED = 0.75, 0.5


class Factors(NamedTuple):
    """How often what is counted is there, on one kind of devices. Of two numbers, the second is with the gradient."""

    lanes: int  # widths of what branches keep are multiples of it
    # Rows that do not travel, laid out anew: None where kernels read the arguments themselves, of which the backward
    # copies half, and rows that were taken.
    laid_out: tuple[float, float] | None
    travelling: tuple[float, float]  # what stays and what comes by in a ring, or along hops
    one_rotation: float  # what comes by where nothing rotates on: in a loop it is there twice
    share_exchanged: float  # of branches that exchange all tokens, and share these where kernels read no copies
    small: int  # bytes of what is computed in a memory beside the main one
    in_both: float  # how often that is there


# CPUs are counted as GPUs are.
ON_GPUS = Factors(lanes=1, laid_out=None, travelling=(1, 1), one_rotation=0.75, share_exchanged=0.2, small=0, in_both=1)
# Kernels for TPUs read heads that lie apart; the small memory is their vector memory.
ON_TPUS = Factors(
    lanes=128,
    laid_out=(0.7, 2.25),
    travelling=(0.7, 1.1),
    one_rotation=1.5,
    share_exchanged=_SHARE,
    small=128 * 2**20,
    in_both=1.3,
)


def peak_bytes(work: Work, branches: Schedules, factors: Factors, has_gradient: bool) -> int:
    """Returns the bytes at the peak of a call, or of its gradient.

    Arguments and results lie close; what branches keep has widths of whole lanes.
    """
    query, out, of_keys = _numbers(work, branches)
    arguments, results = query + of_keys + has_gradient * out, query + of_keys if has_gradient else out
    padded, of_branches = _padded(work, factors.lanes), {}
    for branch in branches:
        kept = _Kept(padded, branch, factors, has_gradient)
        of_branches[_pairs_of(work, branch)] = kept.bytes, _share(branch, factors)
    (most, _), *others = sorted(of_branches.values(), reverse=True)
    beside = most + sum(share * num_bytes for num_bytes, share in others)
    given = (arguments + results) * work.itemsize
    return given + round(beside * (factors.in_both if given + beside < factors.small else 1))


def _pairs_of(work: Work, branch: BranchSchedule) -> Hashable:
    """What says which pairs a branch has: those of two branches that are the same are computed once."""
    heads = work.pattern.heads_of(branch.number, work.num_kv_heads)
    offset = work.pattern.offset(heads.start, branch.branch, branch.number, work.num_kv_heads)
    return branch.branch, heads, offset, branch.earlier


def _padded(work: Work, lanes: int) -> Work:
    pad = lambda width: -(-width // lanes) * lanes
    return dataclasses.replace(work, width=pad(work.width), value_width=pad(work.value_width))


def _numbers(work: Work, branches: Schedules) -> tuple[int, int, int]:
    """The numbers in a device's queries, in its output, and in its keys and values."""
    tokens = max(branch.of_devices().queries.shard_length for branch in branches) * work.batch
    keys = max(branch.of_devices().keys.shard_length for branch in branches) * work.batch * work.local_heads(1)
    widths = work.width, work.value_width
    return tokens * work.num_heads * widths[0], tokens * work.num_heads * widths[1], keys * sum(widths)


def _share(branch: BranchSchedule, factors: Factors) -> float:
    exchanges_tokens = branch.exchange_size > 1 and not branch.exchanges_rows
    if branch.is_local:
        return factors.share_exchanged if exchanges_tokens else _SHARE
    return _SHARE_GATHERED if exchanges_tokens or branch.is_gathered else _SHARE


class _Kept(NamedTuple):
    """What a branch keeps at its peak: rows as they are computed, those that come by, sums, and what is exchanged."""

    work: Work
    branch: BranchSchedule
    factors: Factors
    has_gradient: bool

    @property
    def bytes(self) -> float:
        """The bytes of all of it."""
        return self._computing() + self._exchanged() + self._tiles()

    @property
    def row(self) -> RowBytes:
        """The bytes of a slot: of arrays, and of sums under way."""
        row = self.work.row_bytes(self.branch)
        if self.has_gradient:
            return row
        heads, _ = self.work.heads_of(self.branch)
        sums = self.work.batch * heads * self.work.value_width * self.work.sum_itemsize
        return RowBytes(self.work.query_row(self.branch), row.keys, sums, 0)

    @property
    def _kv_heads(self) -> int:
        """The key/value heads of a device's own tokens, repeated where they are exchanged and too few."""
        return self.work.local_heads(self.branch.exchange_size) * self.branch.exchange_size

    def _computing(self) -> float:
        if self.branch.is_local:
            return self._local()
        if self.branch.is_gathered:
            return self._gathered()
        return self._travelling() * self.factors.travelling[self.has_gradient]

    def _local(self) -> float:
        """Rows that are taken. All of a shard are the arguments themselves, of which the backward copies some."""
        branch, row = self.branch, self.row
        if self.factors.laid_out is not None:
            one, work = branch.of_devices(), self.work
            numbers = one.queries.shard_length * work.num_heads * work.width
            numbers += one.keys.shard_length * self._kv_heads * (work.width + work.value_width)
            return self.factors.laid_out[self.has_gradient] * work.batch * numbers * work.itemsize
        rows = branch.queries.num_slots * row.queries + branch.keys.num_slots * row.keys
        is_whole = branch.branch.keeps_all and not branch.traits.copies_arguments
        return rows * self.has_gradient / 2 if is_whole else rows

    def _gathered(self) -> float:
        """Queries with their sums, and keys of a segment: as they come and laid out, or most with their sums."""
        branch, row = self.branch, self.row
        of_sums = row.keys_grad * (1 + branch.traits.rows_last)  # those that are laid out anew are there twice
        of_key = 0.8 * (row.keys + of_sums) if self.has_gradient else 1.5 * row.keys
        stay = branch.queries.num_slots * (row.queries + row.query_grad)
        return stay + branch.gather_size * branch.keys.num_slots * of_key

    def _travelling(self) -> float:
        """The side that stays with its sums, and what comes by with its own: twice in a loop, which needs the next."""
        branch, row = self.branch, self.row
        sides = (
            (branch.queries, branch.query_legs, row.queries, row.query_grad),
            (branch.keys, branch.key_legs, row.keys, row.keys_grad),
        )
        do_queries = self.has_gradient and queries_travel(branch, row)
        (stays, _, *of_stays), (side, legs, own, sums) = sides[::-1] if do_queries else sides
        kept, come_by, rotations = stays.num_slots * sum(of_stays), own + sums, max(leg.rotations for leg in legs)
        if not branch.is_closed:
            # A shard visits its own rows in two parts, while the halo comes and while its gradient returns.
            kept += side.num_slots * own + 1.15 * sum(leg.halo_rows(side) for leg in legs) * come_by
        if rotations > 1:
            # Rows whose halves are swapped, where they are not taken anyway, are arrays beside the arguments.
            is_swapped = branch.is_balanced and branch.branch.keeps_all
            kept += is_swapped * 2 * branch.queries.num_slots * self.work.query_row(branch)
            return kept + 2 * side.num_slots * come_by
        if rotations and branch.branch.keeps_all and not branch.is_balanced:  # the arguments themselves
            kept -= stays.num_slots * of_stays[0]
        return kept + rotations * self.factors.one_rotation * side.num_slots * come_by

    def _exchanged(self) -> float:
        """What was exchanged, and the results that are to return; rings begin when it has arrived, and reuse it."""
        branch, work = self.branch, self.work
        is_ring = not branch.is_local and branch.is_closed and max(leg.rotations for leg in branch.key_legs) > 1
        if branch.exchange_size == 1 or is_ring or (branch.is_local and self.factors.laid_out is not None):
            return 0
        one = branch.of_devices()
        tokens = lambda side: side.num_slots if branch.exchanges_rows else side.shard_length
        result = work.width if self.has_gradient else work.value_width
        of_query = work.num_heads * (work.width + result) * work.itemsize
        of_query += work.num_heads * work.residual_bytes([branch]) * self.has_gradient
        of_key = self._kv_heads * (work.width + work.value_width) * work.itemsize * (1 + self.has_gradient)
        exchanged = work.batch * (tokens(one.queries) * of_query + tokens(one.keys) * of_key)
        if branch.is_local:
            return exchanged * (1.4 if branch.traits.copies_arguments else 1)
        return exchanged / 2

    def _tiles(self) -> int:
        """The tiles of pairs that XLA computes one after the other: logits and what becomes of them."""
        branch = self.branch
        if not branch.traits.keeps_logits:
            return 0
        heads, _ = self.work.heads_of(branch)
        pairs = branch.queries.chunks_per_tile * branch.queries.block_rows * branch.keys.block_rows
        return 2 * self.work.batch * heads * pairs * self.work.sum_itemsize
