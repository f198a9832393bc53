"""The bytes that one branch keeps beside arguments and results, by count: its rows, what comes by, and their sums.

Compilers copy, and begin early what travels. The factors here, and in `factors`, come near to what they chose in some
700 random programs for H100s, and 960 for a v5e.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ringjax._forecast.factors import Factors, is_in_bands
from ringjax._schedule.cost import RowBytes, Work
from ringjax._schedule.schedule import BranchSchedule, Leg

# How often XLA's tiles have rows that stay in a ring beside the arguments, and what comes by where nothing rotates on.
_STAYING_OF_TILES, _ONE_ROTATION_OF_TILES = (0, 0.5), (2, 1.2)
# How much of the arguments the backward copies where nothing travels.
_COPIED_OF_ARGUMENTS = 0.3
# How much of all rows is there with swapped halves for outputs of GPUs' rings of one rotation.
_SWAPPED_ONCE = 0.7
# How much of those that stay in a loop is not copied.
_GIVEN_TO_LOOPS = 0.65
# How often sums of the tokens of all groups of segments are there: with rows before their width, and last.
_SUMS_OF_GROUPS = 2, 1
# How much of what is laid out is so where rows are last: compilers then have the caller's arrays so too.
_ROWS_LAST = 0.5
# How much of what was exchanged is there.
_EXCHANGED = 0.5
# How often sums of keys are there that have rows last, some of which are laid out anew to be summed over devices.
_SUMS_ROWS_LAST = 1.35
# On TPUs: how often sums of what was gathered are there where it meets in bands, and sums of queries beside these that
# have swapped halves.
_SUMS_IN_BANDS, _SWAPPED_SUMS = 2, 0.3
# How often queries, and keys and values, are there with their sums where neighbours' gradients are added to these: and
# so where sums are of the dtype of results.
_ADDING, _ADDING_TO_RESULTS = (3.7, 1.7), (2.8, 0.3)
# How often sums of keys and values are there among which rows are put.
_PUT_AMONG = 0.75
# How much of the rows that stay is there once more in another order.
_SORTED = 0.7
# How often the logits of a tile are there, with what becomes of them.
_LOGITS = 1.6, 3.2


class Kept(NamedTuple):
    """What a branch keeps at its peak: rows as they are computed, those that come by, sums, and what is exchanged."""

    work: Work
    schedule: BranchSchedule
    factors: Factors
    has_gradient: bool

    @property
    def bytes(self) -> float:
        """The bytes of all of it."""
        return self._computing() + self._exchanged() + self.tiles + self._put_among()

    @property
    def sums(self) -> int:
        """The bytes of sums of all tokens, to which branches are added: of outputs, or gradients.

        On GPUs branches are added all at once that return from an exchange.
        """
        work, schedule = self.work, self.schedule
        returns = self.factors.laid_out is None and schedule.exchange_size > 1
        if schedule.traits.are_added_at_once or returns:
            return 0
        if self.has_gradient:
            return self._tokens() // work.itemsize * work.sum_itemsize
        queries = work.batch * schedule.of_devices().queries.shard_length * work.num_heads
        return queries * work.value_width * work.sum_itemsize

    @property
    def results(self) -> int:
        """The bytes of sums of its rows: of its output, or of the larger of those of queries and of keys."""
        schedule, row = self.schedule, self.row
        return max(schedule.queries.num_slots * row.query_grad, schedule.keys.num_slots * row.keys_grad)

    @property
    def output(self) -> int:
        """The bytes of its output, in the dtype of that of all branches."""
        work, schedule = self.work, self.schedule
        heads, _ = work.heads_of(schedule)
        return work.batch * schedule.queries.num_slots * heads * work.value_width * work.itemsize

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
        if schedule.is_gathered:
            return max(self._gathered(), self._swapping_back())
        factors = self.factors.travelling if schedule.is_closed else self.factors.neighbours
        return max(self._travelling() * factors[self.has_gradient], self._swapping_back())

    @property
    def _rows_last(self) -> bool:
        """Whether rows are behind their width, as in the caller's arrays: those of narrow heads, a stride apart."""
        schedule = self.schedule
        return self._is_narrow and schedule.queries.is_strided and schedule.keys.is_strided

    @property
    def _is_narrow(self) -> bool:
        return self.work.width % self.factors.lanes != 0

    @property
    def _sorted(self) -> float:
        """How much of the rows that stay is there once more in another order."""
        return _SORTED * (self.schedule.queries.chunks == "residues")

    @property
    def _adds_to_all(self) -> bool:
        """Whether kernels for TPUs add gradients of neighbours to sums of all tokens."""
        is_laid_out = self.factors.laid_out is not None and not self._rows_last
        is_whole = self.schedule.branch.keeps_all and not self.schedule.traits.copies_arguments
        return self.has_gradient and is_laid_out and is_whole

    @property
    def _sums_are_results(self) -> bool:
        """Whether sums of a shard's tokens are the gradients themselves: of narrow heads, in the same dtype."""
        is_same = self.work.itemsize == self.work.sum_itemsize and not self._sorted
        return self.has_gradient and self._rows_last and self.schedule.branch.keeps_all and is_same

    def _put_among(self) -> float:
        """Sums of all keys and values among which kernels put rows of narrow heads, where halos are added to them."""
        schedule, work = self.schedule, self.work
        is_put = self._is_narrow and not schedule.branch.keeps_all and not schedule.is_local and not schedule.is_closed
        numbers = (self._tokens() - self._queries()) / work.itemsize
        return is_put * self.has_gradient * _PUT_AMONG * numbers * work.sum_itemsize

    def _tokens(self) -> int:
        """The queries, keys and values of a device."""
        one, work = self.schedule.of_devices(), self.work
        of_keys = one.keys.shard_length * self._kv_heads * (work.width + work.value_width)
        return self._queries() + work.batch * of_keys * work.itemsize

    def _queries(self) -> int:
        """The queries of a device."""
        work = self.work
        return (
            work.batch * self.schedule.of_devices().queries.shard_length * work.num_heads * work.width * work.itemsize
        )

    def _local(self) -> float:
        """Rows that are taken. All of a shard are the arguments themselves, of which the backward copies some."""
        schedule, row = self.schedule, self.row
        if self.factors.laid_out is not None:
            return self._copied() if self.work.has_one_branch else self._laid_out(self.factors.laid_out)
        rows = schedule.queries.num_slots * row.queries + schedule.keys.num_slots * row.keys
        if schedule.traits.copies_arguments and schedule.exchange_size == 1:  # of a group of segments, and of the next
            return rows * min(1, 2 / schedule.queries.num_groups)
        return rows * self.has_gradient * _COPIED_OF_ARGUMENTS if schedule.branch.keeps_all else rows

    def _copied(self) -> float:
        """What kernels for TPUs read and write of a group of segments, if it is all that is computed.

        Results lie where the caller's will. Rows are those of queries, of which cotangents are as many, and of keys.
        """
        schedule, row = self.schedule, self.row
        queries, keys = schedule.queries.num_slots * self.work.query_row(schedule), schedule.keys.num_slots * row.keys
        is_whole = schedule.branch.keeps_all and schedule.queries.num_groups == 1
        if self._is_narrow and is_whole and schedule.exchange_size == 1:  # the arguments as they are
            return 0
        are_results = schedule.exchanges_rows or not (self.has_gradient or schedule.branch.keeps_all)
        of_group = ((1 + (self.has_gradient or are_results)) * queries + keys) / schedule.queries.num_groups
        is_in_groups = self.has_gradient and not is_whole and schedule.branch.keeps_all and not self._is_narrow
        return of_group + is_in_groups * self._queries()

    def _laid_out(self, factors: tuple[float, float]) -> float:
        """Rows that are laid out anew, beside other branches: those of all tokens so often."""
        schedule, keeps_all, laid_out = self.schedule, self.schedule.branch.keeps_all, factors[self.has_gradient]
        if self._rows_last:
            laid_out *= _ROWS_LAST
        if self.has_gradient:  # of a group of segments, but for the sums of rows that are not all tokens
            sums = 0 if keeps_all else _SUMS_OF_GROUPS[self._rows_last]
            laid_out = sums + (laid_out - sums) / schedule.queries.num_groups
        if schedule.exchanges_rows:
            laid_out /= schedule.branch.offset_rate
        return max(laid_out * self._tokens(), self._own_sums())

    def _own_sums(self) -> int:
        """The sums of queries that are not exchanged, of all tokens, though groups of segments come one by one."""
        work, schedule = self.work, self.schedule
        if schedule.exchange_size > 1 or not self.has_gradient or self._rows_last:
            return 0
        return work.batch * schedule.queries.shard_length * work.num_heads * work.width * work.sum_itemsize

    def _gathered(self) -> float:
        """Queries with their sums, and keys of a segment: as they come and laid out, or most with their sums."""
        schedule, row, (of_rows, of_sums) = self.schedule, self.row, self.factors.gathered
        if self.has_gradient:
            of_sums *= _SUMS_ROWS_LAST if schedule.traits.rows_last else 1
            of_sums *= _SUMS_IN_BANDS if self.factors.laid_out is not None and is_in_bands(schedule) else 1
            of_key = of_rows * row.keys + of_sums * row.keys_grad
        else:
            of_key = (1 + self.factors.own_beside_gathered / schedule.gather_size) * row.keys
        gathered = schedule.gather_size * schedule.keys.num_slots * of_key
        return schedule.queries.num_slots * self._of_query_beside_gathered() + gathered

    def _of_query_beside_gathered(self) -> float:
        """The bytes of a query and its sums: backward kernels for TPUs read, and write, those of a shard in order."""
        schedule, row = self.schedule, self.row
        of_queries = self.factors.gathered_for[self.has_gradient]
        if self.factors.laid_out is None or not self.has_gradient:
            return of_queries * row.queries + row.query_grad
        are_copied = schedule.is_balanced or not schedule.branch.keeps_all
        return are_copied * of_queries * row.queries + schedule.is_balanced * _SWAPPED_SUMS * row.query_grad

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
        kept = stays.num_slots * (self._staying(rotations) * rows + of_stays)
        if not schedule.is_closed:
            # A shard visits its own rows in two parts, while the halo comes and while its gradient returns.
            halo = self.factors.halo[self.has_gradient] * sum(leg.halo_rows(side) for leg in legs)
            if self._adds_to_all:
                return self._adding() + halo * come_by
            if self._sums_are_results:
                kept -= stays.num_slots * of_stays
            return kept + self._has_own(legs) * side.num_slots * own + halo * come_by
        if rotations > 1:
            return kept + self._swapped() + 2 * side.num_slots * come_by
        of_kind = _ONE_ROTATION_OF_TILES if schedule.traits.copies_arguments else self.factors.one_rotation
        if self.factors.laid_out is None and not self.has_gradient and self._swapped():
            kept += _SWAPPED_ONCE * self._tokens()
        return kept + rotations * of_kind[self.has_gradient] * side.num_slots * come_by

    def _adding(self) -> float:
        """Queries and cotangents, laid out anew, and sums of all tokens, some of which lie where results will."""
        queries, keys = self._queries(), self._tokens() - self._queries()
        wider = self.work.sum_itemsize / self.work.itemsize
        of_queries, of_keys = _ADDING_TO_RESULTS if wider == 1 else _ADDING
        return of_queries * queries + of_keys * keys

    def _staying(self, rotations: int) -> float:
        """How often rows that stay are there beside the arguments."""
        schedule = self.schedule
        if schedule.traits.copies_arguments:
            return _STAYING_OF_TILES[self.has_gradient] * self.work.sum_itemsize / self.work.itemsize
        staying = self.factors.staying[self.has_gradient]
        if self.factors.laid_out is not None and not self._rows_last:
            return staying
        if not schedule.is_closed:
            return max(0, staying - self._rows_last) + self._sorted
        if schedule.branch.keeps_all and not schedule.is_balanced:
            # They are the arguments themselves, some of which a loop copies.
            return 0 if rotations == 1 else (1 - _GIVEN_TO_LOOPS) * staying
        return staying

    def _has_own(self, legs: Sequence[Leg]) -> bool:
        """Whether a shard's own rows, of the side whose halos come, are beside the arguments.

        For the output of GPUs' kernels those of all tokens are the arguments, where halos come from one side only: for
        that of TPUs' they are if heads are narrow.
        """
        schedule = self.schedule
        if self.factors.laid_out is None:
            reads_arguments = len(legs) == 1 and not schedule.traits.copies_arguments
        else:
            reads_arguments = self._rows_last and not self._sorted
        return self.has_gradient or not (reads_arguments and schedule.branch.keeps_all)

    def _swapped(self) -> float:
        """Rows whose halves are swapped: where they are not taken anyway, they are arrays beside the arguments."""
        schedule = self.schedule
        if not schedule.branch.keeps_all or schedule.traits.copies_arguments:
            return 0
        queries = schedule.queries.num_slots * self.work.query_row(schedule)
        if not schedule.is_balanced:  # kernels for TPUs have those of wide heads laid out anew
            return queries * (self.factors.laid_out is not None and not self._is_narrow and not self.has_gradient)
        return self.factors.swapped[self.has_gradient] * queries

    def _swapping_back(self) -> float:
        """Sums whose halves are swapped back on TPUs before they are added: as they are, in halves, and in order."""
        schedule, row = self.schedule, self.row
        is_swapped = schedule.is_balanced and schedule.branch.keeps_all and not schedule.traits.copies_arguments
        if self.factors.laid_out is None or self.work.has_one_branch or not is_swapped:
            return 0
        sums = schedule.queries.num_slots * row.query_grad
        if not self.has_gradient:  # some lie where the output will
            return 3 * sums - self._queries() if schedule.is_gathered else 2 * sums
        sums *= 3
        keys = 0 if schedule.is_gathered else schedule.keys.num_slots * (row.keys + 2 * row.keys_grad)
        return sums + schedule.queries.num_slots * row.queries / 2 + keys

    def _exchanged(self) -> float:
        """What was exchanged, and the results that are to return; rings begin when it has arrived, and reuse it.

        Branches that exchange all tokens and need no others are counted together: see `exchanged`.
        """
        schedule, work = self.schedule, self.work
        is_ring = not schedule.is_local and schedule.is_closed and max(leg.rotations for leg in schedule.key_legs) > 1
        # Rows of narrow heads are there beside those that are laid out.
        is_wide = not (self._is_narrow and self.has_gradient)
        is_laid_out = schedule.is_local and self.factors.laid_out is not None and is_wide
        if schedule.exchange_size == 1 or is_ring or is_laid_out:
            return 0
        one = schedule.of_devices()
        tokens = lambda side: side.num_slots if schedule.exchanges_rows else side.shard_length
        result = work.width if self.has_gradient else work.value_width
        of_query = work.num_heads * (work.width + result) * work.itemsize
        of_query += work.num_heads * work.residual_bytes([schedule]) * self.has_gradient
        of_key = self._kv_heads * (work.width + work.value_width) * work.itemsize * (1 + self.has_gradient)
        exchanged = work.batch * (tokens(one.queries) * of_query + tokens(one.keys) * of_key)
        return _EXCHANGED * exchanged

    @property
    def tiles(self) -> float:
        """The bytes of tiles of pairs that XLA computes one after the other: logits and what becomes of them."""
        schedule = self.schedule
        if not schedule.traits.keeps_logits:
            return 0
        heads, _ = self.work.heads_of(schedule)
        pairs = schedule.queries.chunks_per_tile * schedule.queries.block_rows * schedule.keys.block_rows
        return _LOGITS[self.has_gradient] * self.work.batch * heads * pairs * self.work.sum_itemsize
