"""A call in integers: what it asks for, and the schedules with which each strategy would serve it."""

import dataclasses
import functools

from ringjax._definition.pattern import DilatedPattern
from ringjax._kernels.implementation import implement, obstacle, obstacles
from ringjax._meeting.protocol import Request
from ringjax._schedule.cost import Work, choose_travelling_side
from ringjax._schedule.make import MAX_BLOCK_ROWS, make_schedule
from ringjax._schedule.schedule import BranchSchedule, Schedules
from ringjax._schedule.strategy import read_exchange_sizes, schedules_with

SHARED_BLOCK_ROWS = 128
MIN_BLOCK_ROWS = 64
MAX_LOGITS = 2**24
GPUS = "cuda", "rocm"  # as jax names their platforms
MIN_GPU_BLOCK_ROWS, MAX_GPU_BLOCK_ROWS = 128, 2048


def choose_block_size(batch_heads: int, itemsize: int, share_cache: bool = False) -> int:
    """Returns the most rows of queries, and of keys, that one tile of logits spans.

    It spans fewer rows in narrow dtypes: logits are as wide in these, and weigh more beside the rows. It spans fewer
    where many batches and heads fill a tile by themselves, and where the CPU devices of one process share a cache.
    """
    rows = SHARED_BLOCK_ROWS if share_cache else min(128 * itemsize, MAX_BLOCK_ROWS)
    while rows > MIN_BLOCK_ROWS and batch_heads * rows**2 > MAX_LOGITS:
        rows //= 2
    return rows


def choose_gpu_block_size(head_bytes: int, num_devices: int, extent: int) -> int:
    """Returns the most rows of queries, and of keys, that one tile of logits spans on GPUs.

    A step there starts many kernels, whatever its size, so tiles are large: on one device the logits of a head, in
    float32, may take three times the `head_bytes`, those of its queries. In a ring more is held, and they may take a
    quarter. Tiles beyond the `extent` of all branches would be masked for the most part.
    """
    most = 3 * head_bytes if num_devices == 1 else head_bytes // 4
    rows = MIN_GPU_BLOCK_ROWS
    while rows < min(MAX_GPU_BLOCK_ROWS, extent) and 4 * (2 * rows) ** 2 <= most:
        rows *= 2
    return rows


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call asks for.

    Args:
      request: the arrays, or their shapes, and what implementations have to know. Batch and heads may be those of all
        devices.
      pattern: the pattern.
      num_queries, num_keys: the lengths of the whole sequences.
      query_offset: the position of the first query, None where it is known only when the program runs.
      num_devices: the devices along the sequence.
      batch: the sequences of a device.
      num_heads: its query heads.
      num_unmapped: the devices over which the compiler may cut these sequences and heads once more.
      document_itemsize: the bytes of the number of a document, 0 without documents.
      is_causal: whether queries see no later keys.
      exchange_size: how many devices exchange, where the caller says so.
      implementation: what computes, where the caller says so.
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
    exchange_size: int | None
    implementation: str | None

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
            kv_itemsizes=(key.dtype.itemsize, value.dtype.itemsize),
            has_order=self.request.platform == "cpu",
        )

    @functools.cached_property
    def max_block_rows(self) -> int:
        """The most rows of a tile."""
        if self.request.block_size is not None:
            return self.request.block_size
        if self.request.platform in GPUS:
            head_bytes = self.num_queries // self.num_devices * self.work.width * self.work.itemsize
            extent = max(branch.extent for branch in self.pattern.branches)
            return choose_gpu_block_size(head_bytes, self.num_devices, extent)
        share_cache = self.request.platform == "cpu" and self.num_devices > 1
        # If those axes cut nothing, tiles are only larger than they need be.
        batch_heads = max(1, self.batch * self.num_heads // self.num_unmapped)
        return choose_block_size(batch_heads, self.request.query.dtype.itemsize, share_cache)

    def schedules(self, strategy: str, only: int | None = None) -> Schedules:
        """Returns the schedule of each branch with this strategy, or of one alone, before implementations take it."""
        sizes = read_exchange_sizes(self.exchange_size, self.num_devices, self.work.num_heads, self.work.local_heads(1))

        def make(exchange_size: int) -> Schedules:
            schedules = make_schedule(
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
            return schedules if only is None else (schedules[only],)

        return choose_travelling_side(self.work, schedules_with(make, strategy, sizes, self.pattern.heads))

    def implement(self, schedules: Schedules, with_warning: bool = False) -> Schedules:
        """Returns the schedules in the tiles of what computes them.

        Raises:
          ValueError: if the named implementation cannot serve all branches.
        """
        implemented = implement(schedules, self.implementation, self._request_for(schedules), with_warning)
        return choose_travelling_side(self.work, implemented)

    def obstacle(self, schedules: Schedules) -> str | None:
        """Returns why what computes cannot serve such schedules, None where it can."""
        return obstacle(schedules, self.implementation, self._request_for(schedules))

    def obstacles(self, schedules: Schedules, schedule: BranchSchedule) -> list[tuple[str, str]]:
        """Returns, where callers name none, the implementations preferred to what serves one of them, and why not."""
        return [] if self.implementation is not None else obstacles(schedule, self._request_for(schedules))

    def _request_for(self, schedules: Schedules) -> Request:
        are_heads_cut = self.work.head_parts > 1 or any(schedule.exchange_size > 1 for schedule in schedules)
        if self.pattern.heads != "grouped" or not are_heads_cut:
            return self.request
        return self.request._replace(needs=(*self.request.needs, "heads='grouped' over several devices"))
