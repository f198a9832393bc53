"""What a call asks of each device: its sizes there, the bytes of its rows, and which side the backward streams.

B batch, N query heads of a device, K key/value heads, H and V the widths.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ringjax._pattern.branch import Branch
from ringjax._pattern.pattern import DilatedPattern
from ringjax._schedule.heads import HeadParts
from ringjax._schedule.schedule import BranchSchedule, Rotation, Schedules
from ringjax._schedule.side import Side


class RowBytes(NamedTuple):
    """The bytes of one padded row, over batch and heads of a shard, in the inputs and sums of the backward."""

    queries: int  # with their residuals: cotangents, lse, ...
    keys: int  # and values
    query_grad: int
    keys_grad: int


@dataclasses.dataclass(frozen=True)
class Work:
    """What a call asks for besides its schedule: sizes on one device, before it exchanges tokens for heads.

    Args:
      pattern: the pattern.
      num_kv_heads: the key/value heads of all devices.
      batch, num_heads, width, value_width: what a device has of B, N, H and V.
      itemsize, sum_itemsize: the bytes of an element of the arrays, and of sums.
      needs_maximum: whether the greatest logit of each query is a result.
      kv_itemsizes: the bytes of an element of keys, and of values; by default `itemsize`.
      packings: sequences of packed documents, to count their pairs; without any, all tokens are of one document.
      has_order: whether collectives wait for each other, as on CPUs: then XLA eliminates no unused one.
      head_parts: the devices that heads are cut over, besides those of the sequence.
      document_itemsize: the bytes of a document number, 0 without documents.
      needs_lse: whether anything besides the sum of branches needs the lse, which may then have a gradient.
    """

    pattern: DilatedPattern
    num_kv_heads: int
    batch: int
    num_heads: int
    width: int
    value_width: int
    itemsize: int
    sum_itemsize: int = 4
    head_parts: int = 1
    document_itemsize: int = 0
    needs_lse: bool = False
    needs_maximum: bool = False
    kv_itemsizes: tuple[int, int] | None = None
    has_order: bool = False
    packings: tuple[Any, ...] = ()

    @property
    def kv_bytes(self) -> int:
        """The bytes of a key and a value of one head."""
        of_key, of_value = self.kv_itemsizes or (self.itemsize, self.itemsize)
        return self.width * of_key + self.value_width * of_value

    def local_heads(self, ulysses_size: int) -> int:
        """Returns the key/value heads that the queries of a device use."""
        return self._parts(ulysses_size).size

    def repeats_heads(self, ulysses_size: int) -> bool:
        """Returns whether key/value heads are too few for the exchange, which then copies them and sums gradients."""
        return ulysses_size * self.local_heads(ulysses_size) != self.local_heads(1)

    def heads_of(self, schedule: BranchSchedule) -> tuple[int, int]:
        """Returns the query heads, and key/value heads, of a branch on a device that has the most of them."""
        parts = self._parts(schedule.ulysses_size)
        most = max(parts.members(self._numbers(schedule)))
        return self.num_heads // schedule.ulysses_size // parts.size * most, most

    def num_classes(self, schedule: BranchSchedule) -> int:
        """Returns the number of classes of heads: heads of one class keep the same rows."""
        branches = [(schedule.number, schedule.branch), *schedule.earlier_branches]
        offsets = [self._offsets(schedule, one, number) for number, one in branches]
        return np.unique(np.stack(offsets), axis=1).shape[1]

    def offsets(self, schedule: BranchSchedule) -> tuple[int, ...]:
        """Returns the offset of each key/value head, of all devices, that runs a branch."""
        return tuple(self._offsets(schedule, schedule.branch, schedule.number).tolist())

    def _offsets(self, schedule: BranchSchedule, other: Branch, number: int) -> np.ndarray:
        """Returns the offsets that the heads of a branch have in another branch."""
        return self.pattern.offset(np.asarray(self._numbers(schedule)), other, number, self.num_kv_heads)

    def _parts(self, ulysses_size: int) -> HeadParts:
        return HeadParts(self.num_kv_heads, self.head_parts * ulysses_size)

    def _numbers(self, schedule: BranchSchedule) -> range:
        return self.pattern.heads_of(schedule.number, self.num_kv_heads)

    def documents(self, schedule: BranchSchedule) -> int:
        """Returns the bytes of the documents of a padded row."""
        return self.batch * self.num_classes(schedule) * self.document_itemsize if self.document_itemsize else 0

    def query_row(self, schedule: BranchSchedule) -> int:
        """Returns the bytes of a padded row's queries."""
        return self.batch * self.heads_of(schedule)[0] * self.width * self.itemsize + self.documents(schedule)

    def keys_row(self, schedule: BranchSchedule) -> int:
        """Returns the bytes of a padded row's keys and values."""
        return self.batch * self.heads_of(schedule)[1] * self.kv_bytes + self.documents(schedule)

    def output_row(self, schedule: BranchSchedule) -> int:
        """Returns the bytes of the sums of a padded row's outputs, with their lse and maximum."""
        numbers = self.value_width + 1 + self.needs_maximum
        return self.batch * self.heads_of(schedule)[0] * numbers * self.sum_itemsize

    def row_bytes(self, schedule: BranchSchedule) -> RowBytes:
        """Returns the bytes of a padded row in the backward."""
        heads, kv_heads = self.heads_of(schedule)
        return RowBytes(
            queries=self.query_row(schedule) + self.batch * heads * self._residual_bytes(schedule),
            keys=self.keys_row(schedule),
            query_grad=self.batch * heads * self.width * self.sum_itemsize,
            keys_grad=self.batch * kv_heads * (self.width + self.value_width) * self.sum_itemsize,
        )

    def _residual_bytes(self, schedule: BranchSchedule) -> int:
        """Returns the bytes that the backward needs for a query besides the query, with its delta or its output."""
        if schedule.residual_bytes is not None:
            return schedule.residual_bytes
        return self.value_width * self.itemsize + 2 * self.sum_itemsize

    def residual_bytes(self, schedules: Iterable[BranchSchedule]) -> int:
        """Returns these bytes summed over the distinct implementations of several branches."""
        return sum({schedule.implementation: self._residual_bytes(schedule) for schedule in schedules}.values())


def choose_travelling_side(work: Work, schedules: Schedules) -> Schedules:
    """Returns schedules that send queries where these, with outputs or gradients, have fewer bytes than keys.

    Few queries are gathered, in both directions. Otherwise each direction of a ring streams the lighter side. It has to
    be called again once implementations are chosen, since their residuals differ.
    """
    return tuple(_with_travelling_side(work, schedule) for schedule in schedules)


def _with_travelling_side(work: Work, schedule: BranchSchedule) -> BranchSchedule:
    row = work.row_bytes(schedule)
    if schedule.gathers_queries or _are_queries_few(work, schedule, row):
        strategy = {"strategy": "gather_queries", "rotates_queries": False, "rotates_outputs": False}
        return dataclasses.replace(schedule, **strategy)
    rotates = {
        "rotates_queries": _are_queries_lighter(schedule, row),
        "rotates_outputs": _is_general_ring(schedule) and _are_outputs_lighter(work, schedule, row),
    }
    return dataclasses.replace(schedule, **rotates)


def _is_general_ring(schedule: BranchSchedule) -> bool:
    """Returns whether a ring may have fewer queries than keys; else queries with their outputs are heavier."""
    return schedule.is_general and schedule.strategy == "ring" and not schedule.is_local


def _are_outputs_lighter(work: Work, schedule: BranchSchedule, row: RowBytes) -> bool:
    queries = schedule.queries.num_padded_rows * (work.query_row(schedule) + work.output_row(schedule))
    return queries < schedule.keys.num_padded_rows * row.keys


def _are_queries_few(work: Work, schedule: BranchSchedule, row: RowBytes) -> bool:
    """Returns whether all queries are no more than a shard's keys, and gathering them sends fewer bytes."""
    queries, keys = schedule.queries.num_padded_rows, schedule.keys.num_padded_rows
    # Stripes balance the pairs of documents, whose keys lie on few shards.
    is_ring = _is_general_ring(schedule) and not schedule.is_dealt
    if not is_ring or schedule.num_shards * queries > keys:
        return False
    output = work.output_row(schedule)
    sent = queries * (work.query_row(schedule) + output + row.queries + row.query_grad)
    lighter = min(queries * (row.queries + row.query_grad), keys * (row.keys + row.keys_grad))
    return sent < keys * row.keys + lighter


def _are_queries_lighter(schedule: BranchSchedule, row: RowBytes) -> bool:
    queries = _num_rows(schedule.query_rotations, schedule.queries) * (row.queries + row.query_grad)
    return queries < _num_rows(schedule.key_rotations, schedule.keys) * (row.keys + row.keys_grad)


def _num_rows(rotations: Iterable[Rotation], side: Side) -> int:
    return sum(rotation.num_rows(side) for rotation in rotations)
