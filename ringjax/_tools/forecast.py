"""Forecasts of strategies: bounds of their time on a machine, and the strategy whose bound is the least.

A bound counts, at the rates of the machine, products, one read or write of each array wherever it is needed, and
messages. With measured rates it is a forecast. Computation beside a message hides it for as long as the computation
lasts, except on devices that copy messages themselves.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from ringjax._call import Call
from ringjax._pattern.warning import warn_once
from ringjax._schedule.schedule import BranchSchedule, Schedules
from ringjax._schedule.strategy import OF_BRANCHES
from ringjax._schedule.work import Work
from ringjax._tools.machine import Machine, known_machine
from ringjax._tools.memory import Memory, bound_memory
from ringjax._tools.messages import Direction, Message, branch_messages, exchange_messages
from ringjax._tools.packing import in_step, num_packed_pairs, num_packed_tile_pairs
from ringjax._tools.pairs import num_kept_pairs, num_tile_pairs


class Seconds(NamedTuple):
    """The time bound of one direction on the busiest device: products, memory passes, exposed and hidden links."""

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
    """The forecast of a call with one strategy.

    Args:
      strategy: its name, or a tuple with one for each branch.
      schedules: the schedule of each branch.
      implemented: the same schedules, in the tiles of their implementations.
      messages: what each device sends.
      pairs: the pairs of queries and keys that the busiest device keeps, over its batch and heads; with packed
        documents the sum over ring steps of what the busiest device of each step keeps.
      in_step: those over the pairs of an average device, in packed documents; else 1.
      computed: the pairs that it computes for these: all pairs of active tiles, if tiles are computed as a whole.
      operations: the operations of their products, forward and of the gradient.
      memory: bounds of the bytes that it holds at the peak.
      forward, backward: the bounds of time.
    """

    strategy: Any
    schedules: Schedules
    implemented: Schedules
    messages: tuple[Message, ...]
    pairs: int
    in_step: float
    computed: int
    operations: tuple[int, int]
    memory: Memory
    forward: Seconds
    backward: Seconds

    @property
    def seconds(self) -> float:
        """The bound of both directions."""
        return self.forward.total + self.backward.total

    @property
    def ring_ulysses_size(self) -> int:
        """The number of devices that exchange tokens for heads, if a ring runs between groups of them; else 1."""
        return max((one.ulysses_size for one in self.implemented if not one.is_local), default=1)

    def num_bytes(self, direction: Direction) -> int:
        """Returns the bytes that a device sends in one direction."""
        return sum(message.num_bytes * message.times for message in self.messages if message.direction == direction)


def best_strategy(call: Call) -> str | tuple[str, ...]:
    """Returns what ``strategy="auto"`` stands for: the strategy of least time on the call's devices, with the gradient.

    On devices whose figures are unknown it is the ring.
    """
    kind = call.request.device_kind or call.request.platform
    machine = known_machine(call.request.platform, call.request.device_kind)
    if machine is not None:
        return choose(call, machine.beside(call.work.head_parts)).strategy
    warn_once(
        ("auto", kind),
        f"strategy='auto' takes \"ring\": the figures of {kind!r} are not known; name a strategy, which "
        "`ringjax plan` compares for the figures that `ringjax plan --measure FILE` writes",
    )
    return "ring"


def forecast(call: Call, strategy: str | tuple[str, ...], machine: Machine, has_gradient: bool = True) -> Forecast:
    """Returns what a call will take with a strategy."""
    schedules = call.schedules(strategy)
    implemented = call.implement(schedules)
    of_branches = [branch_messages(call.work, schedule, has_gradient) for schedule in implemented]
    of_exchange = exchange_messages(call.work, implemented, has_gradient)
    directions: tuple[Direction, ...] = ("forward", "backward") if has_gradient else ("forward",)
    seconds = {
        direction: sum(
            (
                _of_branch(call, schedule, own, machine, direction)
                for schedule, own in zip(implemented, of_branches, strict=True)
            ),
            _of_exchange(call, of_exchange, machine, direction),
        )
        for direction in directions
    }
    forward = sum(_operations(call.work, schedule, "forward") for schedule in implemented)
    backward = sum(_operations(call.work, schedule, "backward") for schedule in implemented) if has_gradient else 0
    pairs = sum(_num_heads(call.work, schedule) * _kept(call.work, schedule) for schedule in implemented)
    return Forecast(
        strategy,
        schedules,
        implemented,
        tuple(sum(of_branches, of_exchange)),
        pairs,
        pairs / max(1, sum(_num_heads(call.work, schedule) * _mean(call.work, schedule) for schedule in implemented)),
        sum(_computed(call.work, schedule) for schedule in implemented),
        (forward, backward),
        bound_memory(call.work, implemented, has_gradient),
        seconds["forward"],
        seconds.get("backward", ZERO),
    )


def choose(call: Call, machine: Machine, has_gradient: bool = True) -> Forecast:
    """Returns the forecast of least time, with one strategy for all branches or one for each.

    Forecasts that may fit the machine's memory come before those that cannot. Of equal forecasts the one with more
    rings wins, or else the first, so that the same call always gets the same strategy. Starting from the best strategy
    for all, each branch in turn takes another one if that is better, given those of the other branches.
    """
    count = len(call.pattern.branches)
    names_of = lambda one: (one.strategy,) * count if isinstance(one.strategy, str) else one.strategy
    is_large = lambda one: one.memory.at_least > machine.memory
    cost = lambda one: (is_large(one), one.seconds, sum(name != "ring" for name in names_of(one)))
    best = min(all_forecasts(call, machine, has_gradient), key=cost)
    if count == 1:
        return best
    names = list(names_of(best))
    for number, name in itertools.product(range(count), OF_BRANCHES):
        strategy = (*names[:number], name, *names[number + 1 :])
        if len({*strategy}) > 1 and call.obstacle(call.schedules(strategy)) is None:
            one = forecast(call, strategy, machine, has_gradient)
            if cost(one) < cost(best):
                best, names = one, list(strategy)
    return best


def all_forecasts(call: Call, machine: Machine, has_gradient: bool) -> list[Forecast]:
    """Returns the forecast of every strategy that can serve all branches alike.

    Raises:
      ValueError: if none can be served.
    """
    served = [name for name in OF_BRANCHES if call.obstacle(call.schedules(name)) is None]
    return [forecast(call, name, machine, has_gradient) for name in served or ["ring"]]  # which raises the reason


def _operations(work: Work, schedule: BranchSchedule, direction: Direction) -> int:
    """Returns the operations of two products per pair forward, and five in the gradient, one of them recomputed."""
    of_pair = work.width + work.value_width if direction == "forward" else 3 * work.width + 2 * work.value_width
    return 2 * of_pair * _computed(work, schedule)


def _computed(work: Work, schedule: BranchSchedule) -> int:
    """Returns the number of pairs that are computed, over batch and heads."""
    if schedule.implementation != "xla":
        count = _kept(work, schedule)
    elif work.packings:
        count = num_packed_tile_pairs(schedule, work.packings, work.batch)
    else:
        count = num_tile_pairs(schedule, work.offsets(schedule))
    return _num_heads(work, schedule) * count


def _kept(work: Work, schedule: BranchSchedule) -> int:
    """Returns the pairs that a device keeps, of a head; with documents as if all kept as many as the busiest ones."""
    mean = _mean(work, schedule)
    return int(mean * in_step(schedule, work.packings, work.batch)) if work.packings else mean


def _mean(work: Work, schedule: BranchSchedule) -> int:
    """Returns the pairs that an average device keeps in packed documents, of a head, or else the busiest one."""
    if work.packings:
        return num_packed_pairs(schedule, work.offsets(schedule), work.packings)
    return num_kept_pairs(schedule, work.offsets(schedule))


def _num_heads(work: Work, schedule: BranchSchedule) -> int:
    return work.batch * work.heads_of(schedule)[0]


def _of_branch(
    call: Call, schedule: BranchSchedule, own: list[Message], machine: Machine, direction: Direction
) -> Seconds:
    """Returns the time of a branch with its own messages."""
    work = call.work
    link = functools.partial(_links, own, machine, call.num_devices, direction)
    hidden, exposed = link(is_hidden=True), link(is_hidden=False)
    hops = (rotation.hops for rotation in schedule.key_rotations)
    num_steps = 1 if schedule.has_one_step else 1 + max(hops, default=0)
    products = _operations(work, schedule, direction) / machine.rate(work.itemsize)
    # The gradient computes the exponential again, and its derivative.
    products += (1 if direction == "forward" else 2) * _computed(work, schedule) * machine.pair_seconds
    memory = _bytes_moved(work, schedule, num_steps, direction) / machine.memory_bandwidth
    # Products and passes over memory alternate, so their times add up. The last step waits for the last message.
    computing = products + memory
    total = exposed + max(computing, hidden + computing / num_steps)
    return Seconds(products, memory, exposed, hidden, total)


def _of_exchange(call: Call, own: list[Message], machine: Machine, direction: Direction) -> Seconds:
    """Returns the time of the exchanges for all branches, which no computation hides."""
    exposed = _links(own, machine, call.num_devices, direction, is_hidden=False)
    return Seconds(0.0, 0.0, exposed, 0.0, exposed)


def _links(
    found: Iterable[Message], machine: Machine, num_devices: int, direction: Direction, is_hidden: bool
) -> float:
    own = (message for message in found if message.direction == direction)
    own = (message for message in own if (message.is_hidden and machine.hides_messages) == is_hidden)
    return sum((machine.seconds(message, num_devices) for message in own), 0.0)


def _bytes_moved(work: Work, schedule: BranchSchedule, num_steps: int, direction: Direction) -> int:
    """Returns the bytes read and written: operands and sums in each step, and rows taken from tokens and put back."""
    row, (heads, _) = work.row_bytes(schedule), work.heads_of(schedule)
    # Gathered keys are written before they are read.
    gathered = 2 * schedule.gather_size if schedule.is_gathered else 1
    queries, keys = schedule.num_query_rows, schedule.keys.num_padded_rows * gathered
    tokens = schedule.queries.shard_length * work.batch * work.num_heads // schedule.ulysses_size * work.sum_itemsize
    if direction == "forward":
        sums = 2 * queries * work.batch * heads * work.value_width * work.sum_itemsize
        moved = num_steps * (queries * work.query_row(schedule) + keys * row.keys + sums)
        return moved + 2 * tokens * work.value_width
    sums = 2 * (queries * row.query_grad + keys * row.keys_grad)
    moved = num_steps * (queries * row.queries + keys * row.keys + sums)
    return moved + 2 * tokens * work.width
