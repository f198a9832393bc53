"""The exchange of tokens for heads: consecutive devices become one shard of the sequence, each with some of its heads.

Attention within a shard then needs no communication (DeepSpeed-Ulysses, arXiv 2309.14509); rows are sent between shards
(USP, arXiv 2405.07719). B batch, n tokens of a device, K its key/value heads, E the exchanged heads, which are K or
repetitions of them, L heads of a rank after the exchange.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Int, Shaped

from ringjax._mesh.axes import Axes
from ringjax._mesh.order import after

# Arrays narrower than this, such as the lse, are exchanged with tokens as the last axis. Otherwise XLA:TPU would pad
# their width to 128 lanes, in code that grows with the tokens.
_NARROW = 16


class Ulysses(NamedTuple):
    """The shards along mesh axes: each is `size` consecutive devices (its ranks), which split its heads."""

    axes: Axes
    num_devices: int
    size: int = 1

    @property
    def shard(self) -> Int[Array, ""]:
        """The number of this device's shard."""
        if not self.axes:
            return jnp.int32(0)
        device = jax.lax.axis_index(self.axes)
        return device if self.size == 1 else jax.lax.div(device, jnp.int32(self.size))

    @property
    def rank(self) -> Any:
        """The number of this device in its shard."""
        return 0 if self.size == 1 else jax.lax.rem(jax.lax.axis_index(self.axes), jnp.int32(self.size))

    def pairs(self, permutation: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns the pairs of devices for pairs of shards: each device sends to the one of the same rank."""
        size = self.size
        return [(size * here + one, size * there + one) for here, there in permutation for one in range(size)]

    def groups(self, groups: Iterable[Sequence[int]]) -> list[list[int]]:
        """Returns the groups of devices for groups of shards: one for each rank."""
        return [[self.size * shard + one for shard in group] for group in groups for one in range(self.size)]

    def num_copies(self, num_kv_heads: int) -> int:
        """Returns the number of ranks that need each of a device's key/value heads."""
        return max(1, self.size // num_kv_heads)

    def spread_keys(self, array: Shaped[Array, "B n K D"]) -> Shaped[Array, "B n E D"]:
        """Repeats heads so that every rank has one."""
        copies = self.num_copies(array.shape[2])
        return array if copies == 1 else jnp.repeat(array, copies, axis=2)

    def add_copies(self, array: Shaped[Array, "B n E D"], num_kv_heads: int) -> Shaped[Array, "B n K D"]:
        """Sums the copies of each head: the transpose of `spread_keys`."""
        copies = self.num_copies(num_kv_heads)
        return array if copies == 1 else array.reshape(*array.shape[:2], num_kv_heads, copies, -1).sum(axis=3)

    def to_heads(self, arrays: Sequence[Shaped[Array, "B _ _ _"]]) -> tuple[Shaped[Array, "B _ _ _"], ...]:
        """Gives each rank all tokens of the shard, in order, and its part of the heads."""
        return self._move("B n (p L) D", "B (p n) L D", arrays)

    def to_tokens(self, arrays: Sequence[Shaped[Array, "B _ _ _"]]) -> tuple[Shaped[Array, "B _ _ _"], ...]:
        """Undoes `to_heads`."""
        return self._move("B (p n) L D", "B n (p L) D", arrays)

    def gather(self, documents: Sequence[Int[Array, "B _"] | None]) -> tuple[Int[Array, "B _"] | None, ...]:
        """Gives each rank the documents of the shard's tokens."""

        def gather(array: Array, earlier: Any) -> Array:
            array, groups = after(array, earlier), self._groups
            return jax.lax.all_gather(array, self.axes, axis=1, axis_index_groups=groups, tiled=True)

        gathered: list[Any] = []
        for array in documents:
            gathered.append(None if array is None else gather(array, gathered))
        return tuple(gathered)

    @property
    def _groups(self) -> list[list[int]] | None:
        if self.size == self.num_devices:
            return None
        return np.arange(self.num_devices).reshape(-1, self.size).tolist()

    def _move(self, here: str, there: str, arrays: Sequence[Array]) -> tuple[Array, ...]:
        # The axis of ranks comes first: there XLA exchanges parts without a copy. Each array is exchanged by itself:
        # concatenating and splitting several takes as many passes as the exchange itself, and memory.
        moved: list[Array] = []
        orders = ["p B n L D" if array.shape[-1] >= _NARROW else "p B L D n" for array in arrays]
        for array, order in zip(arrays, orders, strict=True):
            parts = rearrange(array, f"{here} -> {order}", p=self.size)
            moved.append(exchange(after(parts, moved[-1:]), self.axes, self._groups))
        # The first array depends on the others, so whatever waits for it waits for all.
        moved[0] = after(moved[0], moved[1:])
        return tuple(rearrange(parts, f"{order} -> {there}") for parts, order in zip(moved, orders, strict=True))


def exchange(
    parts: Shaped[Array, "p B *rest"], axes: Axes, groups: list[list[int]] | None
) -> Shaped[Array, "p B *rest"]:
    """Sends each device of a group its part, and returns the parts that this device receives."""
    # JAX has no batching rule for `axis_index_groups`: the axis of a vmap is folded into the batch.
    mapped = custom_vmap(lambda parts: jax.lax.all_to_all(parts, axes, 0, 0, axis_index_groups=groups, tiled=True))

    @mapped.def_vmap
    def _(size: int, is_batched: list[bool], parts: Array) -> tuple[Array, bool]:
        del is_batched
        folded = exchange(rearrange(parts, "v p B ... -> p (v B) ..."), axes, groups)
        return rearrange(folded, "p (v B) ... -> v p B ...", v=size), True

    return mapped(parts)
