"""A call in integers: what it asks for, and the schedules with which each strategy would serve it."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

from ringjax._cost import Work
from ringjax._implementation import implement
from ringjax._pattern import DilatedPattern
from ringjax._protocol import Request
from ringjax._schedule import BranchSchedule, make_schedule
from ringjax._strategy import lay_ways, read_exchange_sizes


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call asks for.

    Args:
      pattern: the pattern.
      num_queries, num_keys: the lengths of the whole sequences.
      query_offset: the position of the first query, None where it is known only when the program runs.
      num_devices: the devices along the sequence.
      is_causal: whether queries see no later keys.
      max_block_rows: the most rows of a tile.
      exchange_size: how many devices exchange, where the caller says so.
      implementation: what computes, where the caller says so.
      request: the arrays, or their shapes, and what implementations have to know.
      work: the sizes on one device.
    """

    pattern: DilatedPattern
    num_queries: int
    num_keys: int
    query_offset: int | None
    num_devices: int
    is_causal: bool
    max_block_rows: int
    exchange_size: int | None
    implementation: str | None
    request: Request
    work: Work

    def schedules(self, strategy: str, only: int | None = None) -> tuple[BranchSchedule, ...]:
        """Returns the schedule of each branch with this strategy, or of one alone, before implementations take it."""
        sizes = read_exchange_sizes(self.exchange_size, self.num_devices, self.work.num_heads, self.work.local_heads(1))

        def make(exchange_size: int) -> tuple[BranchSchedule, ...]:
            branches = make_schedule(
                self.pattern,
                self.num_queries,
                self.num_devices,
                self.work.num_kv_heads,
                is_causal=self.is_causal,
                max_block_rows=self.max_block_rows,
                key_length=self.num_keys,
                query_offset=self.query_offset,
                exchange_size=exchange_size,
            )
            return branches if only is None else (branches[only],)

        return lay_ways(make, strategy, sizes, self.pattern.heads)

    def implement(self, branches: tuple[BranchSchedule, ...], with_warning: bool = False) -> tuple[BranchSchedule, ...]:
        """Returns the schedules in the tiles of what computes them.

        Raises:
          ValueError: if the named implementation cannot serve all branches.
        """
        request = self.request
        if self.pattern.heads == "grouped" and any(branch.exchange_size > 1 for branch in branches):
            request = request._replace(needs=(*request.needs, "heads='grouped' over devices that exchange"))
        return implement(branches, self.implementation, request, with_warning)


_RECORDED: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("recorded", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Any]]:
    """Gives a list of what is recorded inside: each call, its strategy, its placement, and where its mesh is from."""
    calls: list[Any] = []
    token = _RECORDED.set(calls)
    try:
        yield calls
    finally:
        _RECORDED.reset(token)


def record(*what: Any) -> None:
    """Records a call, if anybody wants to know."""
    calls = _RECORDED.get()
    if calls is not None:
        calls.append(what)
