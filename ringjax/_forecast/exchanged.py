"""The bytes that branches keep which exchange all their tokens for heads: their compilers take branches in turn.

Arrays are counted as compilers have them, who free each when it was read last.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ringjax._forecast.factors import LANES, is_in_bands
from ringjax._schedule.cost import Work
from ringjax._schedule.schedule import BranchSchedule, Schedules

# How often queries are there in the dtype of sums, with their cotangents, where gradients are taken in bands of tiles:
# those of wide heads, and of narrow ones.
_CUT_INTO_BANDS = 0.6, 1.5
# How often queries are there that are read for an output beside sums.
_READ = 0.75


def exchanges_all(schedule: BranchSchedule) -> bool:
    """Whether a branch exchanges all tokens, and has all that it needs then."""
    return schedule.exchange_size > 1 and schedule.is_local and not schedule.exchanges_rows


class Exchanged(NamedTuple):
    """Branches that exchange all tokens, once for all of them, in the order in which they are added.

    The `tiles` are the bytes of a tile of logits of each.
    """

    work: Work
    schedules: Schedules
    tiles: Sequence[float]
    has_gradient: bool

    @property
    def on_gpus(self) -> float:
        """The bytes at the peak: while tokens are exchanged, in a branch, or while results return."""
        of_branches = (self._in_turn(number) for number in range(len(self.schedules)))
        return max(self._coming(), self._returning(), *of_branches, *map(self._copying, self.schedules))

    @property
    def on_tpus(self) -> float:
        """The same: each branch is added to sums of all tokens, which the results of the first become."""
        first, *others = self.schedules
        if not self.has_gradient:
            return self._output_on_tpus(first, others)
        # Arrays that the caller gets are not there yet.
        of_caller = self._queries + self.work.batch * self._key_length * self._key_bytes(1)
        sums = (self._queries + self._keys) * self._result_size if others else 0
        own = max([self._read(first) if others else self._of_group(first), *map(self._of_group, others)])
        are_copied = bool(others) or (first.branch.keeps_all and not self._is_grouped)
        beside = are_copied * self._queries + sums + own - of_caller
        if others and others[-1].continues:
            beside = self._adding_in_place(first, sums, own, beside, of_caller)
        return max(self._tokens + beside, self._returning())

    def _adding_in_place(
        self, first: BranchSchedule, sums: float, own: float, beside: float, of_caller: float
    ) -> float:
        """The bytes beside tokens where some branches write where the sums are."""
        is_wider, in_groups = self._result_size > 1, any(one.queries.num_groups > 1 for one in self.schedules)
        of_results = max(self._queries, self._keys) * self._result_size
        if first.continues:  # kernels take all branches for one gradient, and then all for the other
            return own + of_results - of_caller if self._is_narrow and is_wider and not in_groups else beside
        if not self._is_narrow:
            return max(beside, sums + own)
        if first.queries.chunks == "residues":  # all rows are sorted, beside the tokens
            return max(beside, self._rows(first) + of_results - (not is_wider) * of_caller)
        return beside

    def _output_on_tpus(self, first: BranchSchedule, others: Sequence[BranchSchedule]) -> float:
        """The bytes at the peak of an output: of the first branch, or of another beside sums."""
        sums = self._queries * self._result_size
        if not self.work.has_one_branch:
            return self._tokens + max([self._added(first, 0), *(self._added(schedule, sums) for schedule in others)])
        if not first.branch.keeps_all:  # rows are taken of one array, and then of the next
            return max(self._queries, self._keys / 2) + self._rows(first)
        are_put_together = first.is_causal and is_in_bands(first)
        return self._tokens + are_put_together * sums + self._rows_copied_on_tpus(first)

    def _added(self, schedule: BranchSchedule, before: float) -> float:
        """The bytes beside tokens where a branch is added to the sums of outputs, some of which were there before."""
        sums, is_wider = self._queries * self._result_size, self._result_size > 1
        # The exchanged queries lie where the output will be.
        if schedule.queries.chunks == "residues":  # results in two orders
            return before + 2 * self._computed(schedule) - self._queries
        if is_wider and self.schedules[0].continues:  # all branches write to the same sums
            return sums - self._queries
        copied = self._rows_copied_on_tpus(schedule) if is_wider or not self._is_narrow else 0
        return sums + max(_READ * self._queries, copied)

    @property
    def _is_narrow(self) -> bool:
        return self.work.width % LANES != 0

    @property
    def _is_grouped(self) -> bool:
        """Whether several query heads share what a device gets of keys."""
        return self._keys < 2 * self._queries

    @property
    def _result_size(self) -> float:
        """The bits of a result on TPUs over those of a number of the caller's arrays."""
        return 1 if self.work.has_one_branch else self.work.sum_itemsize / self.work.itemsize

    def _of_group(self, schedule: BranchSchedule) -> float:
        """The bytes of the results of a group of segments, if they are not the sums, and of rows that are copied."""
        results = self._computed(schedule) * self._result_size * self.work.itemsize / self.work.sum_itemsize
        results *= len(self.schedules) == 1 or not schedule.continues
        return results / schedule.queries.num_groups + self._read(schedule)

    def _read(self, schedule: BranchSchedule) -> float:
        """The bytes of what is copied to be read."""
        cut = _CUT_INTO_BANDS[self._is_narrow] * is_in_bands(schedule) * self.work.sum_itemsize / self.work.itemsize
        return self._rows_copied_on_tpus(schedule) + cut * self._queries

    def _rows_copied_on_tpus(self, schedule: BranchSchedule) -> float:
        """The bytes of rows with empty ones where segments are not whole, and of half of those that are sorted.

        So it is beside other branches, but for narrow heads.
        """
        if schedule.branch.keeps_all and not schedule.queries.is_full:
            return self._rows(schedule)
        if schedule.queries.chunks != "residues" or self.work.has_one_branch:
            return 0
        return self._rows(schedule) * 0.5 * (not self._is_narrow)

    def _computed(self, schedule: BranchSchedule) -> float:
        """The bytes of sums of queries and of those of keys, which two kernels compute one after the other."""
        row, work = self.work.row_bytes(schedule), self.work
        of_queries = schedule.queries.num_slots * row.query_grad
        if not self.has_gradient:
            return of_queries
        of_keys = schedule.keys.num_slots * row.keys_grad
        if not work.has_one_branch:  # one is added to what was there, and rounded, before the other is there
            return max(1.5 * of_queries, of_keys)
        return max(of_queries, of_keys) if self._is_narrow and self._is_grouped else of_queries + of_keys

    # Sizes: of all tokens of a device, with heads that are repeated where they are too few for all members.

    @property
    def _length(self) -> int:
        return self.schedules[0].of_devices().queries.shard_length

    @property
    def _key_length(self) -> int:
        return self.schedules[0].of_devices().keys.shard_length

    @property
    def _queries(self) -> int:
        """The bytes of queries."""
        work = self.work
        return work.batch * self._length * work.num_heads * work.width * work.itemsize

    def _key_bytes(self, exchange_size: int) -> int:
        return self.work.local_heads(exchange_size) * exchange_size * self.work.kv_bytes

    @property
    def _keys(self) -> int:
        """The bytes of keys and values."""
        return self.work.batch * self._key_length * self._key_bytes(self.schedules[0].exchange_size)

    @property
    def _tokens(self) -> int:
        """The bytes of all that is exchanged."""
        residuals = max(self.work.residual_bytes([schedule]) for schedule in self.schedules)
        of_queries = self.has_gradient * self.work.batch * self._length * self.work.num_heads * residuals
        return self._queries + of_queries + self._keys

    def _coming(self) -> int:
        """What is exchanged, and what is sent last of it."""
        if not self.has_gradient:
            return self._tokens + self._keys // 2
        # Keys that are repeated are sent from an array of their own.
        return self._tokens + 2 * self._queries + self._repeats * self._keys

    def _copying(self, schedule: BranchSchedule) -> float:
        """What is there for the output while rows are copied: all keys, and as soon as these are, queries."""
        if self.has_gradient or not self._copies(schedule):
            return 0
        queries = schedule.queries.num_slots * self.work.query_row(schedule)
        if schedule.traits.copies_arguments:
            return self._tokens + self._keys + queries
        return self._tokens + self._keys + 2 * (not (schedule.queries.is_full or schedule.branch.keeps_all)) * queries

    def _in_turn(self, number: int) -> float:
        """What is there while a branch is computed: its rows and results, and what others need and have left."""
        before, schedule, behind = self.schedules[:number], self.schedules[number], self.schedules[number + 1 :]
        copies, own, left = self._copies(schedule), self._own(schedule), sum(map(self._kept_results, before))
        return self._for_others(before, schedule, behind) + copies + own + self.tiles[number] + left

    def _for_others(self, before: Schedules, schedule: BranchSchedule, behind: Schedules) -> float:
        """What is there of the tokens, and of rows of later branches that are taken early."""
        tokens, early = self._tokens, sum(self._copies(later) for later in behind if _takes_rows(later))
        if not self._copies(schedule):  # it reads the tokens themselves
            return tokens + early
        rest = min(tokens, early) if all(map(_takes_rows, behind)) else tokens
        is_of_tiles = [one.traits.copies_arguments for one in (*before, schedule)]
        # Tiles may be computed before what else is to come first: a mean of both cases.
        return max(rest, tokens / 2) if is_of_tiles[-1] and not all(is_of_tiles) else rest

    def _copies(self, schedule: BranchSchedule) -> int:
        """The bytes of rows that are copied before a branch is computed."""
        are_copied = _takes_rows(schedule) or schedule.traits.copies_arguments or not schedule.queries.is_full
        return are_copied * self._rows(schedule)

    def _rows(self, schedule: BranchSchedule) -> int:
        """The bytes of all rows that a branch is computed of."""
        row = self.work.row_bytes(schedule)
        of_query = row.queries if self.has_gradient else self.work.query_row(schedule)
        return schedule.queries.num_slots * of_query + schedule.keys.num_slots * row.keys

    def _own(self, schedule: BranchSchedule) -> int:
        """The bytes of a branch's results beside those arrays of the caller's that may hold them already."""
        results = self._kept_results(schedule)
        if schedule.traits.copies_arguments:  # sums, in more bits than the caller's
            return results
        if not schedule.queries.is_full:  # those of rows that are none are taken away
            return 2 * results
        return results - (results if self.has_gradient and not self._repeats else self._queries)

    @property
    def _repeats(self) -> bool:
        return self.work.repeats_heads(self.schedules[0].exchange_size)

    def _kept_results(self, schedule: BranchSchedule) -> int:
        """The bytes of a branch's results: in the dtype of the caller's arrays, but for sums of tiles."""
        work = self.work
        return self._results(schedule, work.sum_itemsize if schedule.traits.copies_arguments else work.itemsize)

    def _results(self, schedule: BranchSchedule, itemsize: int) -> int:
        """The bytes of what a branch computes, in numbers of such a size."""
        row = self.work.row_bytes(schedule)
        sums = schedule.queries.num_slots * row.query_grad
        if self.has_gradient:
            sums += schedule.keys.num_slots * row.keys_grad
        return sums * itemsize // self.work.sum_itemsize

    def _returning(self) -> int:
        """What is sent and comes of gradients of repeated keys, in the bits of sums, beside those of queries."""
        if not (self.has_gradient and self._repeats):
            return 0
        return 2 * self._keys * self.work.sum_itemsize // self.work.itemsize + self._queries


def _takes_rows(schedule: BranchSchedule) -> bool:
    """Whether some rows are taken of the tokens, or all in another order."""
    is_sorted = schedule.queries.chunks == "residues"
    return not schedule.traits.copies_arguments and (is_sorted or not schedule.branch.keeps_all)
