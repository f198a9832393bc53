"""The strategy that a call names, and the schedules that it gives each branch, in integers."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from ringjax._schedule.schedule import Balance, Schedules

StrategyName = Literal["ring", "all_gather", "all_to_all"]
Strategy = StrategyName | Literal["auto"] | Sequence[StrategyName]
# The strategies of one branch, and all names of strategies.
OF_BRANCHES: tuple[StrategyName, ...] = get_args(StrategyName)
STRATEGIES = *OF_BRANCHES, "auto"


def exchange_sizes(num_devices: int, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Returns the numbers of consecutive devices that can exchange tokens for heads, given the heads of a device.

    The query heads divide evenly over these devices, and so do the key/value heads, or else each device gets one.
    """
    serves = lambda size: num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
    return tuple(size for size in range(1, num_devices + 1) if num_devices % size == 0 and serves(size))


def check_strategy(argument: str, strategy: Any) -> None:
    """Checks a strategy: a name, or a sequence with one for each branch.

    Raises:
      ValueError: naming the argument, its value and the remedy.
    """
    if isinstance(strategy, str) and strategy in STRATEGIES:
        return
    if not isinstance(strategy, tuple | list):
        known = ", ".join(map(repr, STRATEGIES))
        raise ValueError(f"{argument}={strategy!r} is unknown: use one of {known}, or a tuple of one for each branch")
    for name in strategy:
        if name not in OF_BRANCHES:
            known = ", ".join(map(repr, OF_BRANCHES))
            raise ValueError(f"{argument}={strategy!r} has {name!r}: use one of {known} for each branch")


def check_balance(argument: str, balance: Any) -> None:
    """Checks how rings balance their work, None for the default.

    Raises:
      ValueError: naming the argument, its value and the remedy.
    """
    if balance is not None and not (isinstance(balance, str) and balance in get_args(Balance)):
        known = ", ".join(map(repr, get_args(Balance)))
        raise ValueError(f"{argument}={balance!r} is unknown: use one of {known}, or None for the default")


def read_strategy(strategy: Any, num_branches: int) -> str | tuple[str, ...]:
    """Returns the strategy of all branches, or a tuple with the strategy of each.

    Raises:
      ValueError: for another number of strategies than branches.
    """
    if isinstance(strategy, str):
        return strategy
    if len(strategy) != num_branches:
        raise ValueError(
            f"strategy={strategy!r} has {len(strategy)} entries, and pattern {num_branches} branches: give one for each"
        )
    return tuple(strategy)


def check_exchange(exchange_size: Any, strategy: str | tuple[str, ...]) -> None:
    """Checks that an exchange size is given only with a strategy that exchanges.

    Raises:
      ValueError: naming the argument, its value and the remedy.
    """
    names = (strategy,) if isinstance(strategy, str) else strategy
    if exchange_size is not None and not {"all_to_all", "auto"} & {*names}:
        raise ValueError(
            f"exchange_size={exchange_size!r} is given, but strategy={strategy!r} exchanges nothing: leave it out, or "
            'use strategy="all_to_all"'
        )


def read_exchange_sizes(
    exchange_size: int | None, num_devices: int, num_heads: int, num_kv_heads: int
) -> tuple[int, ...]:
    """Returns how many devices may exchange, given the heads of each: the given number, or else all that can.

    Raises:
      ValueError: if the given number of devices cannot exchange.
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


def schedules_with(
    make: Callable[[int], Schedules], strategies: Sequence[str], sizes: tuple[int, ...], heads: str
) -> Schedules:
    """Returns the schedules, given the strategy of each branch.

    `make` returns the schedules for a number of devices that exchange. The chosen number is the smallest of `sizes`
    that makes the branches that exchange local, or else the largest.
    """
    schedules = list(make(1))
    for number, (schedule, strategy) in enumerate(zip(schedules, strategies, strict=True)):
        if strategy == "all_gather" and schedule.is_closed:  # open rings keep their hops, which send less
            schedules[number] = dataclasses.replace(schedule, strategy="all_gather")
    exchanging = [number for number, strategy in enumerate(strategies) if strategy == "all_to_all"]
    travelling = [number for number in exchanging if not schedules[number].is_local]
    if not travelling or max(sizes) == 1:
        return tuple(schedules)
    size_of = lambda numbers: next((size for size in sizes if _are_local(make(size), numbers)), sizes[-1])
    # Either all tokens are exchanged once for all branches, or only the rows of each branch that is not local.
    exchanged = {number: make(size_of([number]))[number] for number in travelling}
    sides = [schedule.of_devices().queries for schedule in exchanged.values()]
    has_few = sum(side.chunk_rows for side in sides) < sides[0].shard_length
    if heads == "all" and has_few and all(schedule.can_exchange_rows for schedule in exchanged.values()):
        exchanged = {number: dataclasses.replace(one, exchanges_rows=True) for number, one in exchanged.items()}
    else:
        of_tokens = make(size_of(travelling))
        exchanged = {number: of_tokens[number] for number in exchanging}
    return tuple(exchanged.get(number, schedule) for number, schedule in enumerate(schedules))


def _are_local(schedules: Schedules, numbers: Iterable[int]) -> bool:
    return all(schedules[number].is_local for number in numbers)
