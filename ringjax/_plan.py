"""The plan of one call: its schedules, its shard's place on the mesh, and all ways in which rows move there."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
        if all_offsets.size == 1:
            return Rows(branch, shard, all_offsets, all_offsets)
        head = (self.first_head + jnp.arange(self.local_heads, dtype=jnp.int32)).astype(jnp.uint32)
        return Rows(branch, shard, offset(head), all_offsets)

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
        half = branch.num_tiles // 2
        given = jax.tree.map(lambda array: array[half:], tiles)
        given = jax.lax.ppermute(given, self.placement.axis_name, branch.swap_permutation())
        return jax.tree.map(lambda array, given: jnp.concatenate([array[:half], given]), tiles, given)

    def _sort(self, branch: BranchSchedule, tiles: Any) -> Any:
        half = branch.num_tiles // 2
        is_late = branch.is_late(jax.lax.axis_index(self.placement.axis_name))
        flip = lambda array: jnp.concatenate([array[half:], array[:half]])
        return jax.tree.map(lambda array: jnp.where(is_late, flip(array), array), tiles)

    def gather(self, branch: BranchSchedule, tiles: Any) -> Any:
        """Brings the tiles of all shards that share a segment to each of them, in order."""
        return self._collect(jax.lax.all_gather, branch, tiles)

    def scatter(self, branch: BranchSchedule, tiles: Any) -> Any:
        """Brings each shard the sum of what the shards hold for its tiles: the transpose of `gather`."""
        return self._collect(jax.lax.psum_scatter, branch, tiles)

    def _collect(self, collective: Any, branch: BranchSchedule, tiles: Any) -> Any:
        if branch.gather_size == 1:
            return tiles
        axis_name, groups = self.placement.axis_name, branch.gather_groups
        return jax.tree.map(lambda array: collective(array, axis_name, axis_index_groups=groups, tiled=True), tiles)
