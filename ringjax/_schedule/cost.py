"""What a call costs each device: its sizes there, and the messages that it sends; integers alone.

B batch, N query heads of a device, K key/value heads, H and V the widths.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from ringjax._definition.branch import Branch
from ringjax._definition.pattern import DilatedPattern
from ringjax._schedule.heads import HeadParts
from ringjax._schedule.schedule import BranchSchedule, Leg, Schedules, exchanged_together
from ringjax._schedule.side import Side

Direction = Literal["forward", "backward"]


class RowBytes(NamedTuple):
    """The bytes of one slot on one shard, over batch and heads, of what the backward reads and adds up."""

    queries: int  # with all that belongs to them: cotangents, lse, ...
    keys: int  # and values
    query_grad: int
    keys_grad: int


class Message(NamedTuple):
    """What every device sends to others, so many `times`: `num_bytes` at once.

    Arrays that go together, such as keys and values, are one message. It reaches devices up to `distance` further. What
    `is_hidden` has computation beside it that does not need it.
    """

    direction: Direction
    collective: Literal["permute", "all_to_all", "all_gather", "reduce_scatter"]
    num_bytes: int
    distance: int
    times: int = 1
    is_hidden: bool = False


@dataclasses.dataclass(frozen=True)
class Work:
    """What a call asks for, beside its schedule: sizes on one device, before it exchanges tokens for heads.

    Args:
      pattern: the pattern.
      num_kv_heads: the key/value heads of all devices.
      batch, num_heads, width, value_width: what a device has of B, N, H and V.
      itemsize, sum_itemsize: the bytes of a number of the arrays, and of sums.
      kv_itemsizes: the bytes of a number of keys, and of values; by default those of the arrays.
      has_order: whether what is exchanged waits for each other, as on CPUs: then nothing is left out.
      head_parts: the devices that heads are cut over, beside those of the sequence.
      document_itemsize: the bytes of the number of a document, 0 without documents.
      needs_lse: whether anything but the sum of branches asks for the lse, which may then have a gradient.
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
    kv_itemsizes: tuple[int, int] | None = None
    has_order: bool = False

    @property
    def kv_bytes(self) -> int:
        """The bytes of a key and a value of one head."""
        of_key, of_value = self.kv_itemsizes or (self.itemsize, self.itemsize)
        return self.width * of_key + self.value_width * of_value

    @property
    def has_one_branch(self) -> bool:
        """Whether nothing is added to the results of a branch."""
        return len(self.pattern.branches) == 1

    def local_heads(self, exchange_size: int) -> int:
        """Returns the key/value heads that the queries of a device use."""
        return self._parts(exchange_size).size

    def repeats_heads(self, exchange_size: int) -> bool:
        """Returns whether key/value heads are too few to be exchanged, so that gradients of copies are added."""
        return exchange_size * self.local_heads(exchange_size) != self.local_heads(1)

    def heads_of(self, schedule: BranchSchedule) -> tuple[int, int]:
        """Returns the query heads, and key/value heads, of a branch on a device that has the most of them."""
        parts = self._parts(schedule.exchange_size)
        most = max(parts.members(self._numbers(schedule)))
        return self.num_heads // schedule.exchange_size // parts.size * most, most

    def num_classes(self, schedule: BranchSchedule) -> int:
        """Returns how many classes of heads there are, whose rows are not the same."""
        branches = [(schedule.number, schedule.branch), *schedule.earlier]
        offsets = [self._offsets(schedule, one, number) for number, one in branches]
        return np.unique(np.stack(offsets), axis=1).shape[1]

    def offsets(self, schedule: BranchSchedule) -> tuple[int, ...]:
        """Returns the offset of each key/value head, of all devices, that runs a branch."""
        return tuple(self._offsets(schedule, schedule.branch, schedule.number).tolist())

    def _offsets(self, schedule: BranchSchedule, other: Branch, number: int) -> np.ndarray:
        """The offsets of the heads of a branch in another branch."""
        return self.pattern.offset(np.asarray(self._numbers(schedule)), other, number, self.num_kv_heads)

    def _parts(self, exchange_size: int) -> HeadParts:
        return HeadParts(self.num_kv_heads, self.head_parts * exchange_size)

    def _numbers(self, schedule: BranchSchedule) -> range:
        return self.pattern.heads_of(schedule.number, self.num_kv_heads)

    def documents(self, schedule: BranchSchedule) -> int:
        """Returns the bytes of the documents of a slot."""
        return self.batch * self.num_classes(schedule) * self.document_itemsize if self.document_itemsize else 0

    def query_row(self, schedule: BranchSchedule) -> int:
        """Returns the bytes of a slot's queries."""
        return self.batch * self.heads_of(schedule)[0] * self.width * self.itemsize + self.documents(schedule)

    def keys_row(self, schedule: BranchSchedule) -> int:
        """Returns the bytes of a slot's keys and values."""
        return self.batch * self.heads_of(schedule)[1] * self.kv_bytes + self.documents(schedule)

    def row_bytes(self, schedule: BranchSchedule) -> RowBytes:
        """Returns the bytes of a slot in the backward."""
        heads, kv_heads = self.heads_of(schedule)
        return RowBytes(
            queries=self.query_row(schedule) + self.batch * heads * self._residual_bytes(schedule),
            keys=self.keys_row(schedule),
            query_grad=self.batch * heads * self.width * self.sum_itemsize,
            keys_grad=self.batch * kv_heads * (self.width + self.value_width) * self.sum_itemsize,
        )

    def _residual_bytes(self, schedule: BranchSchedule) -> int:
        """The bytes of what the backward needs of a query, beside itself: delta of it, or the output."""
        if schedule.traits.takes_output:
            return 2 * self.value_width * self.itemsize + (1 + self.needs_lse) * self.sum_itemsize
        return self.value_width * self.itemsize + 2 * self.sum_itemsize

    def residual_bytes(self, schedules: Iterable[BranchSchedule]) -> int:
        """Returns the same for several branches, each of whose implementations has its own."""
        return sum({schedule.implementation: self._residual_bytes(schedule) for schedule in schedules}.values())


def choose_travelling_side(work: Work, schedules: Schedules) -> Schedules:
    """Returns the schedules in which the backward sends queries where they are lighter than keys, with gradients.

    To be asked again when implementations have taken branches: what they need of a query differs.
    """
    are_lighter = [_are_queries_lighter(schedule, work.row_bytes(schedule)) for schedule in schedules]
    of_all = zip(schedules, are_lighter, strict=True)
    return tuple(dataclasses.replace(schedule, queries_travel=is_lighter) for schedule, is_lighter in of_all)


def _are_queries_lighter(schedule: BranchSchedule, row: RowBytes) -> bool:
    queries = _num_rows(schedule.query_legs, schedule.queries) * (row.queries + row.query_grad)
    return queries < _num_rows(schedule.key_legs, schedule.keys) * (row.keys + row.keys_grad)


def _num_rows(legs: Iterable[Leg], side: Side) -> int:
    return sum(leg.num_rows(side) for leg in legs)


def messages(work: Work, schedules: Schedules, has_gradient: bool) -> list[Message]:
    """Returns what each device sends in all branches."""
    of_branches = [branch_messages(work, schedule, has_gradient) for schedule in schedules]
    return sum(of_branches, exchange_messages(work, schedules, has_gradient))


def branch_messages(work: Work, schedule: BranchSchedule, has_gradient: bool) -> list[Message]:
    """Returns what each device sends in one branch, beside what is exchanged."""
    of_strategy = _of_gather if schedule.is_gathered else _of_ring
    return [message for message in of_strategy(work, schedule, has_gradient) if message.num_bytes]


def _of_ring(work: Work, schedule: BranchSchedule, has_gradient: bool) -> Iterator[Message]:
    """What goes round or along: keys, and where they are the lighter side queries, with gradients."""
    yield from _swaps(work, schedule, has_gradient, with_keys=True)
    yield from _ways("forward", schedule, schedule.key_legs, schedule.keys, work.keys_row(schedule))
    if has_gradient:
        row = work.row_bytes(schedule)
        do_queries = schedule.queries_travel
        legs, side = (schedule.query_legs, schedule.queries) if do_queries else (schedule.key_legs, schedule.keys)
        arrays, grad = (row.queries, row.query_grad) if do_queries else (row.keys, row.keys_grad)
        yield from _ways("backward", schedule, legs, side, arrays)
        yield from _ways("backward", schedule, legs, side, grad)


def _ways(
    direction: Direction, schedule: BranchSchedule, legs: Iterable[Leg], side: Side, row: int
) -> Iterator[Message]:
    of_devices = functools.partial(Message, direction, "permute", is_hidden=True)
    for leg in legs:
        yield of_devices(row * side.num_slots * (leg.rotations > 0), schedule.exchange_size, leg.rotations)
        yield of_devices(row * leg.halo_rows(side), schedule.exchange_size * abs(leg.halo_hops))


def _of_gather(work: Work, schedule: BranchSchedule, has_gradient: bool) -> Iterator[Message]:
    """Keys that come at once, again for the gradient, and gradients that are summed where the keys are."""
    yield from _swaps(work, schedule, has_gradient, with_keys=False)
    size = schedule.gather_size
    of_others = schedule.keys.num_slots * (size - 1)
    directions: tuple[Direction, ...] = ("forward", "backward") if has_gradient else ("forward",)
    for direction in directions:
        yield Message(direction, "all_gather", work.keys_row(schedule) * of_others, size * schedule.exchange_size)
    if has_gradient:
        keys_grad = work.row_bytes(schedule).keys_grad
        yield Message("backward", "reduce_scatter", keys_grad * of_others, size * schedule.exchange_size)


def _swaps(work: Work, schedule: BranchSchedule, has_gradient: bool, with_keys: bool) -> Iterator[Message]:
    """The halves that balanced shards give each other, and what returns."""
    if not schedule.is_balanced:
        return
    heads, _ = work.heads_of(schedule)
    result = work.itemsize if work.has_one_branch else work.sum_itemsize
    is_added = not work.has_one_branch
    has_lse = has_gradient or work.needs_lse or is_added or (work.has_order and schedule.exchange_size > 1)
    swap = functools.partial(_swap, schedule)
    # Documents, which are the same for queries and keys, are swapped once.
    documents = work.documents(schedule)
    keys = with_keys * (work.keys_row(schedule) - documents)
    yield swap("forward", work.query_row(schedule) + keys)
    yield swap("forward", work.batch * heads * (work.value_width * result + has_lse * work.sum_itemsize))
    if has_gradient:
        row = work.row_bytes(schedule)
        of_keys = work.sum_itemsize if work.repeats_heads(schedule.exchange_size) else result
        grads = row.query_grad * result + with_keys * row.keys_grad * of_keys
        yield swap("backward", row.queries - documents + keys)
        yield swap("backward", grads // work.sum_itemsize)


def _swap(schedule: BranchSchedule, direction: Direction, row: int) -> Message:
    distance = schedule.exchange_size * (schedule.ring_size - 1)
    return Message(direction, "permute", row * (schedule.queries.num_slots // 2), distance)


def exchange_messages(work: Work, schedules: Schedules, has_gradient: bool) -> list[Message]:
    """Returns what is exchanged, tokens for heads and back: all tokens once, or of each branch its rows."""
    found: list[Message] = []
    for group in exchanged_together(schedule for schedule in schedules if schedule.exchange_size > 1):
        found += _of_exchange(work, group, has_gradient, is_final=len(group) == len(work.pattern.branches))
    return [message for message in found if message.num_bytes]


def _of_exchange(work: Work, schedules: Schedules, has_gradient: bool, is_final: bool) -> Iterator[Message]:
    size, one = schedules[0].exchange_size, schedules[0].of_devices()
    tokens = one.queries.shard_length, one.keys.shard_length
    queries, keys = (one.queries.chunk_rows, one.keys.chunk_rows) if schedules[0].exchanges_rows else tokens
    heads, kv_heads = work.num_heads, work.local_heads(size) * size  # which may be repeated
    item, sums, kv_width = work.itemsize, work.sum_itemsize, work.width + work.value_width
    is_rounded = len(schedules) == 1 and schedules[0].is_local and schedules[0].traits.rounds_gradients
    are_keys_last = is_rounded or not work.repeats_heads(size)
    result, grad = (item if is_final and is_last else sums for is_last in (True, are_keys_last))
    has_lse = has_gradient or work.needs_lse or not is_final or work.has_order

    def exchange(direction: Direction, of_query: int, of_key: int = 0) -> Message:
        num_bytes = work.batch * (queries * heads * of_query + keys * kv_heads * of_key)
        return Message(direction, "all_to_all", num_bytes // size * (size - 1), size)

    yield exchange("forward", work.width * item, work.kv_bytes)
    yield exchange("forward", work.value_width * result + has_lse * sums)
    directions: tuple[Direction, ...] = ("forward", "backward") if has_gradient else ("forward",)
    for direction in directions:
        yield Message(direction, "all_gather", work.batch * sum(tokens) * work.document_itemsize * (size - 1), size)
    if has_gradient:
        yield exchange("backward", work.width * item + work.residual_bytes(schedules), work.kv_bytes)
        yield exchange("backward", work.width * result, kv_width * grad)
