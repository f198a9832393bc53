"""The messages that each device sends in a call, in bytes."""

import functools
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from ringjax._schedule.schedule import BranchSchedule, Rotation, Schedules, exchanged_together
from ringjax._schedule.side import Side
from ringjax._schedule.work import Work

Direction = Literal["forward", "backward"]


class Message(NamedTuple):
    """A message that every device sends `times` times, each time with `num_bytes`.

    Arrays that are sent together, such as keys and values, are one message. It goes to devices up to `distance` away,
    among `span` consecutive ones, all by default. If it `is_hidden`, computation that does not need it runs beside it.
    """

    direction: Direction
    collective: Literal["permute", "all_to_all", "all_gather", "reduce_scatter"]
    num_bytes: int
    distance: int
    times: int = 1
    is_hidden: bool = False
    span: int | None = None


def messages(work: Work, schedules: Schedules, has_gradient: bool) -> list[Message]:
    """Returns what each device sends in all branches."""
    of_branches = [branch_messages(work, schedule, has_gradient) for schedule in schedules]
    return sum(of_branches, exchange_messages(work, schedules, has_gradient))


def branch_messages(work: Work, schedule: BranchSchedule, has_gradient: bool) -> list[Message]:
    """Returns what each device sends in one branch, except in exchanges of tokens for heads."""
    of_strategy = _of_queries if schedule.gathers_queries else _of_gather if schedule.is_gathered else _of_ring
    return [message for message in of_strategy(work, schedule, has_gradient) if message.num_bytes * message.times]


def _of_ring(work: Work, schedule: BranchSchedule, has_gradient: bool) -> Iterator[Message]:
    """Yields the messages of a ring: keys, or queries with outputs; backward the same or others, with gradients."""
    yield from _dealing(work, schedule, has_gradient, with_keys=True)
    of_queries, of_keys = (schedule.query_rotations, schedule.queries), (schedule.key_rotations, schedule.keys)
    if schedule.rotates_outputs:
        yield from _of_rotations("forward", schedule, *of_queries, work.query_row(schedule))
        yield from _of_rotations("forward", schedule, *of_queries, work.output_row(schedule))
    else:
        yield from _of_rotations("forward", schedule, *of_keys, work.keys_row(schedule))
    if has_gradient:
        row = work.row_bytes(schedule)
        do_queries = schedule.rotates_queries
        streamed = of_queries if do_queries else of_keys
        arrays, grad = (row.queries, row.query_grad) if do_queries else (row.keys, row.keys_grad)
        yield from _of_rotations("backward", schedule, *streamed, arrays)
        yield from _of_rotations("backward", schedule, *streamed, grad)


def _of_rotations(
    direction: Direction, schedule: BranchSchedule, rotations: Iterable[Rotation], side: Side, row: int
) -> Iterator[Message]:
    of_devices = functools.partial(Message, direction, "permute", is_hidden=True)
    for rotation in rotations:
        around, across = schedule.turns(rotation)
        shard, group = schedule.ulysses_size, schedule.inner_size * schedule.ulysses_size
        num_bytes = row * side.num_padded_rows
        span = group if schedule.is_closed and schedule.num_shards % schedule.ring_size == 0 else None
        yield of_devices(num_bytes, shard, around.steps * schedule.outer_size, span=span)
        yield of_devices(num_bytes, group, across.steps)
        yield of_devices(row * rotation.halo_rows(side), schedule.ulysses_size * abs(rotation.halo_hops))


def _of_gather(work: Work, schedule: BranchSchedule, has_gradient: bool) -> Iterator[Message]:
    """Yields the messages of a gather: keys, again in the backward, and gradients summed where their keys are."""
    yield from _dealing(work, schedule, has_gradient, with_keys=False)
    size = schedule.gather_size
    of_others = schedule.keys.num_padded_rows * (size - 1)
    directions: tuple[Direction, ...] = ("forward", "backward") if has_gradient else ("forward",)
    for direction in directions:
        yield Message(direction, "all_gather", work.keys_row(schedule) * of_others, size * schedule.ulysses_size)
    if has_gradient:
        keys_grad = work.row_bytes(schedule).keys_grad
        yield Message("backward", "reduce_scatter", keys_grad * of_others, size * schedule.ulysses_size)


def _of_queries(work: Work, schedule: BranchSchedule, has_gradient: bool) -> Iterator[Message]:
    """Yields the messages of gathered queries, of their outputs, and of their gradients, summed where they are kept."""
    row, distance = work.row_bytes(schedule), schedule.gather_size * schedule.ulysses_size
    of_others = schedule.queries.num_padded_rows * (schedule.gather_size - 1)
    yield Message("forward", "all_gather", work.query_row(schedule) * of_others, distance)
    yield Message("forward", "all_to_all", work.output_row(schedule) * of_others, distance)
    if has_gradient:
        yield Message("backward", "all_gather", row.queries * of_others, distance)
        yield Message("backward", "reduce_scatter", row.query_grad * of_others, distance)


def _dealing(work: Work, schedule: BranchSchedule, has_gradient: bool, with_keys: bool) -> Iterator[Message]:
    """Yields the messages of rows that shards deal, and of results that they deal back."""
    if not schedule.is_dealt:
        return
    heads, _ = work.heads_of(schedule)
    is_added = len(work.pattern.branches) > 1
    result = work.sum_itemsize if is_added else work.itemsize
    has_lse = has_gradient or work.needs_lse or is_added or (work.has_order and schedule.ulysses_size > 1)
    deal = functools.partial(_deal, schedule)
    # Documents, which are the same for queries and keys, are dealt once in each direction.
    documents = 0 if schedule.is_general else work.documents(schedule)
    keys = with_keys * (work.keys_row(schedule) - documents)
    yield deal("forward", work.query_row(schedule), keys)
    narrow = (has_lse + work.needs_maximum) * work.sum_itemsize
    yield deal("forward", work.batch * heads * (work.value_width * result + narrow))
    if has_gradient:
        row = work.row_bytes(schedule)
        of_keys = work.sum_itemsize if work.repeats_heads(schedule.ulysses_size) else result
        query_grad, keys_grad = row.query_grad * result, with_keys * row.keys_grad * of_keys
        yield deal("backward", row.queries, keys)
        yield deal("backward", query_grad // work.sum_itemsize, keys_grad // work.sum_itemsize)


def _deal(schedule: BranchSchedule, direction: Direction, query_row: int, keys_row: int = 0) -> Message:
    size, devices = schedule.ring_size, schedule.ulysses_size
    sent = 2 if schedule.is_zigzag else size  # all rows of a shard but one part in so many
    queries, keys = (side.num_padded_rows // sent * (sent - 1) for side in (schedule.queries, schedule.keys))
    num_bytes = query_row * queries + keys_row * keys
    if schedule.is_zigzag:
        return Message(direction, "permute", num_bytes, devices * (size - 1))
    return Message(direction, "all_to_all", num_bytes, devices * size)


def exchange_messages(work: Work, schedules: Schedules, has_gradient: bool) -> list[Message]:
    """Returns the messages that exchange tokens for heads and back: all tokens once, or the rows of each branch."""
    found: list[Message] = []
    for group in exchanged_together(schedule for schedule in schedules if schedule.ulysses_size > 1):
        found += _of_exchange(work, group, has_gradient, is_final=len(group) == len(work.pattern.branches))
    return [message for message in found if message.num_bytes]


def _of_exchange(work: Work, schedules: Schedules, has_gradient: bool, is_final: bool) -> Iterator[Message]:
    size, one = schedules[0].ulysses_size, schedules[0].of_devices()
    tokens = one.queries.shard_length, one.keys.shard_length
    queries, keys = (one.queries.chunk_rows, one.keys.chunk_rows) if schedules[0].exchanges_rows else tokens
    heads, kv_heads = work.num_heads, work.local_heads(size) * size  # which may be repeated
    item, sums, kv_width = work.itemsize, work.sum_itemsize, work.width + work.value_width
    # Gradients of a single cuDNN kernel are sent as it returns them, already rounded.
    is_rounded = len(schedules) == 1 and schedules[0].is_local and schedules[0].implementation == "cudnn"
    are_keys_last = is_rounded or not work.repeats_heads(size)
    result, grad = (item if is_final and is_last else sums for is_last in (True, are_keys_last))
    has_lse = has_gradient or work.needs_lse or not is_final or work.has_order

    def exchange(direction: Direction, of_query: int, of_key: int = 0) -> Message:
        num_bytes = work.batch * (queries * heads * of_query + keys * kv_heads * of_key)
        return Message(direction, "all_to_all", num_bytes // size * (size - 1), size)

    yield exchange("forward", work.width * item, work.kv_bytes)
    yield exchange("forward", work.value_width * result + (has_lse + work.needs_maximum) * sums)
    directions: tuple[Direction, ...] = ("forward", "backward") if has_gradient else ("forward",)
    for direction in directions:
        yield Message(direction, "all_gather", work.batch * sum(tokens) * work.document_itemsize * (size - 1), size)
    if has_gradient:
        yield exchange("backward", work.width * item + work.residual_bytes(schedules), work.kv_bytes)
        yield exchange("backward", work.width * result, kv_width * grad)
