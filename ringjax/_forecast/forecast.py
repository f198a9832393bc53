"""What a strategy will take: bounds of its time on a machine, and which strategy's bound is the least.

All are bounds: products at the machine's peak, each array read and written once where it must be, and messages at the
full rate of links. What is computed beside a message hides it, as far as that lasts, but for devices that copy messages
themselves.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

from ringjax._forecast.call import Call
from ringjax._forecast.machine import Machine
from ringjax._forecast.memory import ON_GPUS, ON_TPUS, peak_bytes
from ringjax._schedule.cost import (
    Direction,
    Message,
    Work,
    branch_messages,
    exchange_messages,
)
from ringjax._schedule.pairs import num_kept_pairs, num_tile_pairs
from ringjax._schedule.schedule import BranchSchedule
from ringjax._schedule.strategy import STRATEGIES, Schedules


class Seconds(NamedTuple):
    """The bound of one direction on the busiest device: products, passes over memory, and links, seen and hidden."""

    products: float
    memory: float
    exposed: float
    hidden: float
    total: float

    def __add__(self, other: "Seconds") -> "Seconds":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Seconds(*map(sum, zip(self, other, strict=True)))


ZERO = Seconds(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What a call will take with one strategy.

    Args:
      strategy: its name.
      schedules: the schedule of each branch.
      implemented: the same in the tiles of what computes them.
      messages: what each device sends.
      pairs: the pairs of queries and keys that the busiest device keeps, over its batch and heads.
      computed: the pairs that it computes for these: those of whole tiles, where tiles are computed as a whole.
      operations: the operations of their products, forward and of the gradient.
      memory: the bytes that it holds at the peak, by count; compilers differ.
      forward, backward: the bounds of time.
    """

    strategy: str
    schedules: Schedules
    implemented: Schedules
    messages: tuple[Message, ...]
    pairs: int
    computed: int
    operations: tuple[int, int]
    memory: int
    forward: Seconds
    backward: Seconds

    @property
    def seconds(self) -> float:
        """The bound of both directions."""
        return self.forward.total + self.backward.total

    def num_bytes(self, direction: Direction) -> int:
        """Returns the bytes that a device sends in one direction."""
        return sum(message.num_bytes * message.times for message in self.messages if message.direction == direction)


def schedules_of(call: Call, strategy: str, machine: Machine) -> Schedules:
    """Returns the schedules of a strategy, with ``"auto"`` those of the least time on a machine, with the gradient."""
    return choose(call, machine).schedules if strategy == "auto" else call.schedules(strategy)


def forecast(call: Call, strategy: str, schedules: Schedules, machine: Machine, has_gradient: bool = True) -> Forecast:
    """Returns what a call will take with these schedules."""
    branches = call.implement(schedules)
    of_branches = [branch_messages(call.work, branch, has_gradient) for branch in branches]
    of_exchange = exchange_messages(call.work, branches, has_gradient)
    directions: tuple[Direction, ...] = ("forward", "backward") if has_gradient else ("forward",)
    seconds = {
        direction: sum(
            (
                _of_branch(call, branch, own, machine, direction)
                for branch, own in zip(branches, of_branches, strict=True)
            ),
            _of_exchange(call, of_exchange, machine, direction),
        )
        for direction in directions
    }
    forward = sum(_operations(call.work, branch, "forward") for branch in branches)
    backward = sum(_operations(call.work, branch, "backward") for branch in branches) if has_gradient else 0
    return Forecast(
        strategy,
        schedules,
        branches,
        tuple(sum(of_branches, of_exchange)),
        sum(_num_heads(call.work, branch) * _kept(call.work, branch) for branch in branches),
        sum(_computed(call.work, branch) for branch in branches),
        (forward, backward),
        peak_bytes(call.work, branches, ON_TPUS if machine.platform == "tpu" else ON_GPUS, has_gradient),
        seconds["forward"],
        seconds.get("backward", ZERO),
    )


def choose(call: Call, machine: Machine, has_gradient: bool = True) -> Forecast:
    """Returns the forecast of the least time: of one strategy for all branches, or of each branch's best.

    One that holds more than the machine's memory, by count, comes after those that fit. Of equal ones the first counts:
    the same call is always served the same way.
    """
    candidates = all_forecasts(call, machine, has_gradient)
    if not call.work.has_one_branch:
        best = [_best_of(call, number, machine, has_gradient) for number in range(len(call.pattern.branches))]
        schedules = tuple(branch for branch in best if branch is not None)
        if len(schedules) == len(best):
            candidates.append(forecast(call, "auto", schedules, machine, has_gradient))
    return min(candidates, key=lambda one: (one.memory > machine.memory, one.seconds))


def _best_of(call: Call, number: int, machine: Machine, has_gradient: bool) -> BranchSchedule | None:
    """Returns the schedule with which one branch would take the least time by itself, None where none serves."""
    alone = _served(call, number).values()
    forecasts = [forecast(call, "auto", schedules, machine, has_gradient) for schedules in alone]
    return min(forecasts, key=lambda one: one.seconds).schedules[0] if forecasts else None


def all_forecasts(call: Call, machine: Machine, has_gradient: bool) -> list[Forecast]:
    """Returns the forecast of every strategy that is one for all branches, and that what computes can serve.

    Raises:
      ValueError: if it can serve none of them.
    """
    served = _served(call) or {"ring": call.schedules("ring")}  # which says why
    return [forecast(call, *one, machine, has_gradient) for one in served.items()]


def _served(call: Call, only: int | None = None) -> dict[str, Schedules]:
    """Returns the schedules of each strategy that what computes can serve, for all branches or one alone."""
    schedules = {strategy: call.schedules(strategy, only) for strategy in STRATEGIES if strategy != "auto"}
    return {strategy: some for strategy, some in schedules.items() if call.obstacle(some) is None}


def _operations(work: Work, branch: BranchSchedule, direction: Direction) -> int:
    """Two products of each pair forward, five in the gradient, of which it computes one again."""
    of_pair = work.width + work.value_width if direction == "forward" else 3 * work.width + 2 * work.value_width
    return 2 * of_pair * _computed(work, branch)


def _computed(work: Work, branch: BranchSchedule) -> int:
    """The pairs that are computed, over batch and heads."""
    count = num_tile_pairs(branch, work.offsets(branch)) if branch.traits.takes_whole_tiles else _kept(work, branch)
    return _num_heads(work, branch) * count


def _kept(work: Work, branch: BranchSchedule) -> int:
    return num_kept_pairs(branch, work.offsets(branch))


def _num_heads(work: Work, branch: BranchSchedule) -> int:
    return work.batch * work.heads_of(branch)[0]


def _of_branch(
    call: Call, branch: BranchSchedule, own: list[Message], machine: Machine, direction: Direction
) -> Seconds:
    """The time of a branch with its own messages."""
    work = call.work
    link = functools.partial(_links, own, machine, call.num_devices, direction)
    hidden, exposed = link(is_hidden=True), link(is_hidden=False)
    num_meetings = 1 if branch.is_gathered else 1 + max((leg.hops for leg in branch.key_legs), default=0)
    products = _operations(work, branch, direction) / machine.rate(work.itemsize)
    # The gradient takes the exponential again, and what becomes of it.
    products += (1 if direction == "forward" else 2) * _computed(work, branch) * machine.pair_seconds
    memory = _bytes_moved(work, branch, num_meetings, direction) / machine.memory_bandwidth
    # Sums are read and written between products; what comes is computed with last, when it is there.
    computing = products + memory
    total = exposed + max(computing, hidden + computing / num_meetings)
    return Seconds(products, memory, exposed, hidden, total)


def _of_exchange(call: Call, own: list[Message], machine: Machine, direction: Direction) -> Seconds:
    """The time of what is exchanged for all branches, with nothing beside it."""
    exposed = _links(own, machine, call.num_devices, direction, is_hidden=False)
    return Seconds(0.0, 0.0, exposed, 0.0, exposed)


def _links(
    found: Iterable[Message], machine: Machine, num_devices: int, direction: Direction, is_hidden: bool
) -> float:
    own = (message for message in found if message.direction == direction)
    own = (message for message in own if (message.is_hidden and machine.hides_messages) == is_hidden)
    return sum((machine.seconds(message, num_devices) for message in own), 0.0)


def _bytes_moved(work: Work, branch: BranchSchedule, num_meetings: int, direction: Direction) -> int:
    """The bytes that memory reads and writes: operands and sums in each meeting, and rows that are taken and put."""
    row, (heads, _) = work.row_bytes(branch), work.heads_of(branch)
    # What is gathered is written before it is read.
    gathered = 2 * branch.gather_size if branch.is_gathered else 1
    queries, keys = branch.queries.num_slots, branch.keys.num_slots * gathered
    tokens = branch.queries.shard_length * work.batch * work.num_heads // branch.exchange_size * work.sum_itemsize
    if direction == "forward":
        sums = 2 * queries * work.batch * heads * work.value_width * work.sum_itemsize
        moved = num_meetings * (queries * work.query_row(branch) + keys * row.keys + sums)
        return moved + 2 * tokens * work.value_width
    sums = 2 * (queries * row.query_grad + keys * row.keys_grad)
    moved = num_meetings * (queries * row.queries + keys * row.keys + sums)
    return moved + 2 * tokens * work.width
