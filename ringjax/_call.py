"""A call in integers: what it asks for, and its schedules under each strategy."""

import dataclasses
import functools
from typing import Any

from ringjax._kernels.implementation import implement, obstacle, obstacles
from ringjax._kernels.interface import Request
from ringjax._kernels.tile_sizes import most_rows
from ringjax._pattern.pattern import DilatedPattern
from ringjax._schedule.make import MIN_STRIPE_ROWS, make_schedule
from ringjax._schedule.schedule import BranchSchedule, Schedules
from ringjax._schedule.strategy import read_exchange_sizes, schedules_with
from ringjax._schedule.work import Work, choose_travelling_side


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call asks for.

    Args:
      request: the arrays, or their shapes, and what implementations need to know. Its batch and heads may be those of
        all devices.
      pattern: the pattern.
      num_queries, num_keys: the lengths of the whole sequences.
      query_offset: the position of the first query, None where it is known only when the program runs.
      num_devices: the devices along the sequence.
      batch: the sequences of a device.
      num_heads: the query heads of a device.
      num_inner_devices: the devices along the last mesh axis of the sequence, None if it has a single one.
      num_unmapped: the devices over which the compiler may cut these sequences and heads once more.
      document_itemsize: the bytes of a document number, 0 without documents.
      is_causal: whether queries see no later keys.
      exchange_size: how many devices exchange tokens for heads, None if the caller does not say.
      implementation: the implementation, None if the caller does not say.
      packings, longest_document: for the planner, sequences of packed documents, and the most tokens of a document.
    """

    request: Request
    pattern: DilatedPattern
    num_queries: int
    num_keys: int
    query_offset: int | None
    num_devices: int
    batch: int
    num_heads: int
    num_unmapped: int
    document_itemsize: int
    is_causal: bool
    num_inner_devices: int | None = None
    exchange_size: int | None = None
    implementation: str | None = None
    packings: tuple[Any, ...] = ()
    longest_document: int | None = None

    @classmethod
    def of(cls, asked: Any, request: Request, pattern: DilatedPattern, **sizes: Any) -> "Call":
        """Returns the call with options that `read_options` has read."""
        size = None if asked.exchange_size is None else int(asked.exchange_size)
        named = {"exchange_size": size, "implementation": asked.implementation}
        return cls(request, pattern, is_causal=bool(asked.is_causal), **named, **sizes)

    @functools.cached_property
    def work(self) -> Work:
        """The sizes on one device."""
        query, key, value = self.request.query, self.request.key, self.request.value
        return Work(
            pattern=self.pattern,
            num_kv_heads=key.shape[-2],
            batch=self.batch,
            num_heads=self.num_heads,
            width=query.shape[-1],
            value_width=value.shape[-1],
            itemsize=query.dtype.itemsize,
            sum_itemsize=max(4, *(array.dtype.itemsize for array in (query, key, value))),
            head_parts=query.shape[-2] // self.num_heads,
            document_itemsize=self.document_itemsize,
            needs_lse=self.request.needs_lse,
            needs_maximum="return_max_logit" in self.request.needs,
            kv_itemsizes=(key.dtype.itemsize, value.dtype.itemsize),
            has_order=self.request.orders_collectives,
            packings=self.packings,
        )

    @functools.cached_property
    def max_block_rows(self) -> int:
        """The most rows of a tile."""
        extent = max(branch.extent for branch in self.pattern.branches)
        # If the unmapped axes cut nothing, tiles are only larger than necessary.
        batch_heads = max(1, self.batch * self.num_heads // self.num_unmapped)
        shard_length = max(self.num_queries, self.num_keys) // self.num_devices
        return most_rows(self.request, self.num_devices, shard_length, batch_heads, extent)

    def schedules(self, strategy: str | tuple[str, ...]) -> Schedules:
        """Returns the schedule of each branch, before an implementation is chosen; "auto" asks the planner."""
        if strategy == "auto":
            from ringjax._tools.forecast import best_strategy  # noqa: PLC0415 - the one tool that a call can need

            strategy = best_strategy(self)
        has_documents = "document_ids" in self.request.needs
        balance = self.request.balance or ("stripes" if has_documents else "zigzag")
        num_exchanging = self.num_inner_devices or self.num_devices
        sizes = read_exchange_sizes(self.exchange_size, num_exchanging, self.work.num_heads, self.work.local_heads(1))
        make = lambda ulysses_size: make_schedule(
            self.pattern,
            self.num_queries,
            self.num_devices,
            self.work.num_kv_heads,
            is_causal=self.is_causal,
            max_block_rows=self.max_block_rows,
            key_length=self.num_keys,
            query_offset=self.query_offset,
            ulysses_size=ulysses_size,
            balance=balance,
            num_inner_devices=self.num_inner_devices,
            min_stripe_rows=MIN_STRIPE_ROWS if self.request.balance is None else 1,
        )
        strategies = (strategy,) * len(self.pattern.branches) if isinstance(strategy, str) else strategy
        return choose_travelling_side(self.work, schedules_with(make, strategies, sizes, self.pattern.heads))

    def implement(self, schedules: Schedules, with_warning: bool = False) -> Schedules:
        """Returns the schedules with the implementation of each, in its tiles.

        Raises:
          ValueError: if the named implementation cannot serve all branches.
        """
        implemented = implement(schedules, self.implementation, self._request_for(schedules), with_warning)
        return choose_travelling_side(self.work, implemented)

    def obstacle(self, schedules: Schedules) -> str | None:
        """Returns why the implementation cannot serve the schedules, None where it can."""
        return obstacle(schedules, self.implementation, self._request_for(schedules))

    def obstacles(self, schedules: Schedules, schedule: BranchSchedule) -> list[tuple[str, str]]:
        """Returns the implementations preferred to that of `schedule`, with why each cannot serve; [] if one is set."""
        return [] if self.implementation is not None else obstacles(schedule, self._request_for(schedules))

    def _request_for(self, schedules: Schedules) -> Request:
        are_heads_cut = self.work.head_parts > 1 or any(schedule.ulysses_size > 1 for schedule in schedules)
        if self.pattern.heads != "grouped" or not are_heads_cut:
            return self.request
        return self.request._replace(needs=(*self.request.needs, "heads='grouped' over several devices"))
