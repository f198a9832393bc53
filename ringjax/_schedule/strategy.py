"""How rows meet in each branch: the strategy that a call names, in schedules; integers alone."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

from ringjax._definition.counts import check_count, is_integer
from ringjax._schedule.schedule import Schedules

Strategy = Literal["ring", "all_gather", "all_to_all", "auto"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


def exchange_sizes(num_devices: int, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Returns the numbers of consecutive devices that can exchange tokens for heads, given the heads of a device.

    Each of them gets as many query heads as the others, and as many key/value heads, or else one.
    """
    serves = lambda size: num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
    return tuple(size for size in range(1, num_devices + 1) if num_devices % size == 0 and serves(size))


def check_exchange_size(exchange_size: Any, strategy: str) -> None:
    """Checks what says how many devices exchange, as far as devices and heads do not matter.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    if exchange_size is None:
        return
    if strategy not in ("all_to_all", "auto"):
        raise ValueError(
            f"exchange_size={exchange_size!r} is given, but strategy={strategy!r} exchanges nothing: leave it out, or "
            'use strategy="all_to_all"'
        )
    if not is_integer(exchange_size):
        raise TypeError(f"exchange_size={exchange_size!r} must be an integer: it counts devices")
    check_count("exchange_size", exchange_size)


def read_exchange_sizes(
    exchange_size: int | None, num_devices: int, num_heads: int, num_kv_heads: int
) -> tuple[int, ...]:
    """Returns how many devices may exchange, given the heads of each: the number that is said, or else all that can.

    Raises:
      ValueError: if that number cannot.
    """
    sizes = exchange_sizes(num_devices, num_heads, num_kv_heads)
    if exchange_size is None:
        return sizes
    if exchange_size not in sizes:
        raise ValueError(
            f"exchange_size={exchange_size!r} does not serve {num_devices} devices, each with {num_heads} query and "
            f"{num_kv_heads} key/value heads: use one of {', '.join(map(str, sizes))}"
        )
    return (exchange_size,)


def schedules_with(make: Callable[[int], Schedules], strategy: str, sizes: tuple[int, ...], heads: str) -> Schedules:
    """Returns the schedules of a strategy; `make` gives the schedules for a number of devices that exchange.

    That number is the smallest of `sizes` after which nothing else travels, or else the largest.
    """
    schedules = make(1)
    if strategy == "all_gather":  # open branches keep their hops, which bring less
        gather = lambda schedule: (
            dataclasses.replace(schedule, strategy="all_gather") if schedule.is_closed else schedule
        )
        return tuple(map(gather, schedules))
    travelling = [number for number, schedule in enumerate(schedules) if not schedule.is_local]
    if strategy == "ring" or not travelling or max(sizes) == 1:
        return schedules
    size_of = lambda numbers: next((size for size in sizes if _are_local(make(size), numbers)), sizes[-1])
    # Either all tokens are exchanged, and serve all branches, or of each that is not local its rows alone.
    of_rows = {number: make(size_of([number]))[number] for number in travelling}
    sides = [schedule.of_devices().queries for schedule in of_rows.values()]
    has_few = sum(side.chunk_rows for side in sides) < sides[0].shard_length
    if heads == "all" and has_few and all(schedule.can_exchange_rows for schedule in of_rows.values()):
        of_rows = {number: dataclasses.replace(schedule, exchanges_rows=True) for number, schedule in of_rows.items()}
        return tuple(of_rows.get(number, schedule) for number, schedule in enumerate(schedules))
    return make(size_of(travelling))


def _are_local(schedules: Schedules, numbers: Iterable[int]) -> bool:
    return all(schedules[number].is_local for number in numbers)
