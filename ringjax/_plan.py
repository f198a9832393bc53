"""The plan of one call: its schedules, its shard's place on the mesh, and all ways in which rows move there."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ringjax._implementation import IMPLEMENTATIONS
from ringjax._mesh import Placement
from ringjax._pattern import DilatedPattern
from ringjax._rows import Rows
from ringjax._schedule import BranchSchedule


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is static in one call: the schedule of each branch, and where shards and heads lie on the mesh."""

    pattern: DilatedPattern
    branches: tuple[BranchSchedule, ...]
    num_kv_heads: int
    scale: float
    placement: Placement
    strategy: str = "ring"

    @property
    def first_head(self) -> Any:
        """The global number of this shard's first key/value head."""
        axes = self.placement.heads
        return jax.lax.axis_index(axes) * self.num_kv_heads // jax.lax.axis_size(axes) if axes else 0

    @property
    def local_heads(self) -> int:
        """The number of key/value heads that this shard's queries use."""
        return max(1, self.num_kv_heads // jax.lax.axis_size(self.placement.heads))

    def rows(self, branch: BranchSchedule) -> Rows:
        """Returns the rows that this shard keeps; the offsets follow the heads' global numbers."""
        axis_name = self.placement.axis_name
        shard = jnp.int32(0) if axis_name is None else jax.lax.axis_index(axis_name)
        offset = lambda head: self.pattern.offset(head, branch.dilation_rate, self.num_kv_heads)
        all_offsets = jnp.asarray(np.unique(offset(np.arange(self.num_kv_heads))), jnp.uint32)
        head = (self.first_head + jnp.arange(self.local_heads, dtype=jnp.int32)).astype(jnp.uint32)
        offsets = all_offsets if all_offsets.size == 1 else offset(head)
        return Rows(branch, shard, offsets, all_offsets, is_whole=self.placement.is_whole)

    @staticmethod
    def implementation(branch: BranchSchedule) -> Any:
        """Returns the module or object that computes a branch."""
        return IMPLEMENTATIONS[branch.implementation]

    def rotate(self, branch: BranchSchedule, arrays: Any, hops: int = 1) -> Any:
        """Moves every shard's arrays by `hops` shards along its ring."""
        return jax.lax.ppermute(arrays, self.placement.axis_name, branch.permutation(hops))

    def swap(self, branch: BranchSchedule, tiles: Any) -> Any:
        """Gives the second half of the tiles to the partner, and sorts what is then here: as it will be computed."""
        return self._sort(branch, self._give(branch, tiles)) if branch.is_balanced else tiles

    def swap_back(self, branch: BranchSchedule, tiles: Any) -> Any:
        """Undoes `swap`."""
        return self._give(branch, self._sort(branch, tiles)) if branch.is_balanced else tiles

    def _give(self, branch: BranchSchedule, tiles: Any) -> Any:
        permutation = branch.swap_permutation()

        def give(array: Array) -> Array:
            own, given = self._halves(branch, array)
            return self._join(branch, own, jax.lax.ppermute(given, self.placement.axis_name, permutation))

        return jax.tree.map(give, tiles)

    def _sort(self, branch: BranchSchedule, tiles: Any) -> Any:
        is_late = branch.is_late(jax.lax.axis_index(self.placement.axis_name))
        flip = lambda array: self._join(branch, *self._halves(branch, array)[::-1])
        return jax.tree.map(lambda array: jnp.where(is_late, flip(array), array), tiles)

    def _halves(self, branch: BranchSchedule, array: Array) -> list[Array]:
        return jnp.split(array, 2, axis=self.implementation(branch).SLOTS_AXIS)

    def _join(self, branch: BranchSchedule, *halves: Array) -> Array:
        return jnp.concatenate(halves, axis=self.implementation(branch).SLOTS_AXIS)

    def gather(self, branch: BranchSchedule, tiles: Any) -> Any:
        """Brings the tiles of all shards that share a segment to each of them, in order."""
        return self._collect(jax.lax.all_gather, branch, tiles)

    def scatter(self, branch: BranchSchedule, tiles: Any) -> Any:
        """Brings each shard the sum of what the shards hold for its tiles: the transpose of `gather`."""
        return self._collect(jax.lax.psum_scatter, branch, tiles)

    def _collect(self, collective: Any, branch: BranchSchedule, tiles: Any) -> Any:
        if branch.gather_size == 1:
            return tiles
        collect = functools.partial(
            collective,
            axis_name=self.placement.axis_name,
            axis_index_groups=branch.gather_groups,
            tiled=True,
        )
        return jax.tree.map(collect, tiles)
