"""The plan of one call: its schedules, and its shard's place on the mesh and among heads."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ringjax._kernels.attention_step import DropoutCounters
from ringjax._kernels.implementation import IMPLEMENTATIONS
from ringjax._kernels.interface import Implementation
from ringjax._kernels.rows import BranchHeads, Rows, pick
from ringjax._kernels.softmax import Weighting
from ringjax._mesh.axes import Axes
from ringjax._mesh.placement import Placement
from ringjax._parallel.collectives import Collectives
from ringjax._parallel.ulysses import Ulysses
from ringjax._pattern.pattern import DilatedPattern
from ringjax._schedule.heads import HeadParts
from ringjax._schedule.schedule import BranchSchedule, Schedules, exchanged_together


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is static in one call: the schedule of each branch, and where shards and heads lie on the mesh.

    `schedules` are for the platform that the call most likely runs on. If that is known only at lowering, `elsewhere`
    has the schedules for all other platforms. Branches that exchange the same tokens form a part, a plan of its own, in
    which `ulysses_size` devices are a shard. If it `has_maximum`, the greatest logit of each query is a result.
    """

    pattern: DilatedPattern
    schedules: Schedules
    num_kv_heads: int
    weighting: Weighting
    placement: Placement
    broadcast_dropout: bool = False
    elsewhere: Schedules | None = None
    ulysses_size: int = 1
    has_maximum: bool = False

    def with_batch(self, axes: Axes) -> "Plan":
        """Returns the plan of all instances of a vmap: one more leading batch dimension, cut by these axes."""
        return dataclasses.replace(self, placement=self.placement.with_instances(axes))

    def at(self, query_offset: Array | None) -> "Plan":
        """Returns the plan with this position of the first query; None means that the plan has it already."""
        if query_offset is None:
            return self
        first_token = query_offset.astype(jnp.uint32)
        return dataclasses.replace(self, schedules=tuple(schedule.at(first_token) for schedule in self.schedules))

    @property
    def parts(self) -> tuple["Plan", ...]:
        """The parts of the plan, each with the branches that exchange the same tokens."""
        return tuple(
            dataclasses.replace(self, schedules=group, ulysses_size=group[0].ulysses_size)
            for group in exchanged_together(self.schedules)
        )

    def rows_exchanged(self, num_heads: int) -> tuple[Rows, Rows] | None:
        """Returns the rows that a part of a plan exchanges, as a device keeps them; None if it exchanges all tokens.

        They are the rows of queries, with `num_heads` heads, and the rows of keys.
        """
        schedule = self.schedules[0]
        if not schedule.exchanges_rows:
            return None
        device = dataclasses.replace(self, ulysses_size=1)
        rows = device.rows(schedule.of_devices())
        return rows.in_groups(num_heads // device.local_heads), rows

    @property
    def ulysses(self) -> Ulysses:
        """How devices make up shards."""
        return Ulysses(self.placement.axes, self.placement.num_shards, self.ulysses_size)

    # Heads are cut over axes of the mesh first, then over the ranks of a shard.

    @property
    def _head_parts(self) -> HeadParts:
        return HeadParts(self.num_kv_heads, jax.lax.axis_size(self.placement.heads) * self.ulysses_size)

    @property
    def _head_part(self) -> Any:
        """The number of this device's part of the heads."""
        axes = self.placement.heads
        outer = jax.lax.axis_index(axes) * self.ulysses_size if axes else 0
        return outer + self.ulysses.rank

    @property
    def first_head(self) -> Any:
        """The global number of this device's first key/value head."""
        return self._head_parts.first(self._head_part)

    @property
    def local_heads(self) -> int:
        """The number of key/value heads that this device's queries use."""
        return self._head_parts.size

    def rows(self, schedule: BranchSchedule) -> Rows:
        """Returns the rows of queries that this shard keeps."""
        heads = self._heads(schedule)
        return Rows(
            schedule,
            schedule.queries,
            self.ulysses.shard,
            heads,
            self.placement.is_whole,
            schedule.exchanges_rows,
            self.implementation(schedule).strides,
        )

    def _heads(self, schedule: BranchSchedule) -> BranchHeads:
        """Returns the heads of this shard that run a branch; their offsets follow their global numbers."""
        numbers = self.pattern.heads_of(schedule.number, self.num_kv_heads)
        branches = [(schedule.number, schedule.branch), *schedule.earlier_branches]
        offsets = [self.pattern.offset(np.asarray(numbers), one, number, self.num_kv_heads) for number, one in branches]
        offsets, classes = np.unique(np.stack(offsets), axis=1, return_inverse=True)
        own, *earlier = offsets.astype(np.uint32)
        first, head, is_member = self._members(numbers)
        head = (head - numbers.start).clip(0, len(numbers) - 1)
        classes = pick(classes.reshape(-1).astype(np.int32), head) if offsets.shape[1] > 1 else np.zeros(1, np.int32)
        return BranchHeads(first, head.size, own, tuple(earlier), classes, is_member)

    def _members(self, numbers: range) -> tuple[Any, Any, Any]:
        """Returns the local number of this shard's first head, the global numbers of its heads, and which are members.

        Members are heads in `numbers`. All shards list equally many heads: one with fewer members than others also
        lists heads that are not members. The last result is None where all heads are members.
        """
        heads = self._head_parts
        if heads.parts == 1:  # static, so that XLA folds it
            return numbers.start, np.array(numbers), None
        counts = heads.members(numbers)
        most = max(counts)
        first = jnp.clip(numbers.start - self.first_head, 0, heads.size - most)
        head = self.first_head + first + jnp.arange(most, dtype=jnp.int32)
        is_member = None if min(counts) == most else (head >= numbers.start) & (head < numbers.stop)
        return first, head, is_member

    def counters(self, seed: Array | None, batch_shape: tuple[Any, ...], num_heads: int) -> DropoutCounters | None:
        """Returns the dropout counters of a shard, given its batch dimensions and number of query heads.

        Each instance of a vmap has a seed of its own, and numbers its batches from zero.
        """
        if seed is None or not self.weighting.dropout_rate:
            return None
        num_vmaps = seed.ndim - 1
        batch = jnp.zeros((), jnp.int32)
        for size, axes in zip(batch_shape[num_vmaps:], self.placement.batch[num_vmaps:], strict=True):
            index = jnp.arange(size, dtype=jnp.int32) + (jax.lax.axis_index(axes) * size if axes else 0)
            batch = batch[..., None] * (size * jax.lax.axis_size(axes)) + index
        batch = jnp.broadcast_to(batch, batch_shape).reshape(-1)  # [B]
        of_instances = jnp.expand_dims(seed, range(num_vmaps, len(batch_shape)))
        seeds = jnp.broadcast_to(of_instances, (*batch_shape, 2)).reshape(-1, 2)  # [B, 2]
        head = self._head_part * num_heads + jnp.arange(num_heads, dtype=jnp.int32).reshape(self.local_heads, -1)
        return (
            DropoutCounters(seeds, batch * 0, head * 0)
            if self.broadcast_dropout
            else DropoutCounters(seeds, batch, head)
        )

    @staticmethod
    def implementation(schedule: BranchSchedule) -> Implementation:
        """Returns the implementation of a branch."""
        return IMPLEMENTATIONS[schedule.implementation]

    def collectives(self, schedule: BranchSchedule) -> Collectives:
        """Returns the collectives of a branch."""
        return Collectives(schedule, self.ulysses, self.implementation(schedule).rows_axis)
