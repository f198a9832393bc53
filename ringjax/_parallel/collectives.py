"""The collectives that move rows of a branch: ring permutes, hops, dealing, all-gather and reduce-scatter."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array

from ringjax._mesh.axes import permute
from ringjax._mesh.order import after
from ringjax._parallel.ulysses import Ulysses, exchange
from ringjax._schedule.schedule import BranchSchedule
from ringjax._schedule.side import Side


class Moved(NamedTuple):
    """Arrays after a move: those that differ only in their last dimension are concatenated into one message.

    `places` has the indices of the arrays in each message, `ends` the split points between them.
    """

    messages: tuple[Array, ...]
    places: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]

    def take_apart(self) -> tuple[Array, ...]:
        """Splits the messages, and returns the arrays in their original order."""
        arrays: dict[int, Array] = {}
        for message, place, ends in zip(self.messages, self.places, self.ends, strict=True):
            arrays |= zip(place, jnp.split(message, ends, axis=-1), strict=True)
        # The first array depends on the others, so whatever waits for it waits for all messages.
        first, *rest = (arrays[number] for number in range(len(arrays)))
        return (after(first, rest), *rest) if len(self.messages) > 1 else (first, *rest)


def _pack(move: Callable[[Array], Array], arrays: Sequence[Array]) -> Moved:
    """Moves arrays in as few messages as possible."""
    kinds = [(array.dtype, array.shape[:-1]) for array in arrays]
    messages, places, all_ends = [], [], []
    for kind in dict.fromkeys(kinds):
        place = tuple(number for number, other in enumerate(kinds) if other == kind)
        side_by_side = jnp.concatenate([arrays[number] for number in place], axis=-1)
        messages.append(move(after(side_by_side, messages[-1:])))
        places.append(place)
        all_ends.append(tuple(np.cumsum([arrays[number].shape[-1] for number in place])[:-1].tolist()))
    return Moved(tuple(messages), tuple(places), tuple(all_ends))


class Collectives(NamedTuple):
    """Moves rows of a branch between shards. Their tiles have the padded rows along `rows_axis`."""

    schedule: BranchSchedule
    ulysses: Ulysses
    rows_axis: int

    def rotate(self, arrays: Any, hops: int = 1) -> Any:
        """Moves every shard's arrays by `hops` shards around its ring, or around its group in a ring of several."""
        return self._permute(arrays, self.schedule.permutation(hops))

    def cross(self, arrays: Any, hops: int = 1) -> Any:
        """Moves every shard's arrays by `hops` groups."""
        return self._permute(arrays, self.schedule.crossing(hops))

    def hop(self, arrays: Any, hops: int) -> Any:
        """Moves arrays as `rotate` does, but in an open ring not around its ends: shards without a source get zeros."""
        return self._permute(arrays, self.schedule.hop(hops))

    def hop_rows(self, rows: tuple[Array, ...], hops: int) -> Moved:
        """Moves rows [B, m, K, D] as `hop` does, with one message for each dtype and [B, m, K]."""
        return _pack(lambda packed: self.hop(packed, hops), rows)

    def _permute(self, arrays: Any, permutation: Sequence[tuple[int, int]]) -> Any:
        return permute(arrays, self.ulysses.axes, self.ulysses.pairs(permutation))

    def deal(self, tiles: Any, side: Side) -> Any:
        """Returns the tiles that the shard computes, given those of the tokens that it holds."""
        if self.schedule.is_zigzag:
            return self._sort(self._give(tiles))
        to_shards = "(groups stripes shards) ... -> shards groups stripes ..."
        return self._deal_stripes(tiles, side, to_shards, "shards groups stripes ... -> (groups shards stripes) ...")

    def deal_back(self, tiles: Any, side: Side) -> Any:
        """Undoes `deal`."""
        if self.schedule.is_zigzag:
            return self._give(self._sort(tiles))
        to_shards = "(groups shards stripes) ... -> shards groups stripes ..."
        return self._deal_stripes(tiles, side, to_shards, "shards groups stripes ... -> (groups stripes shards) ...")

    def _deal_stripes(self, tiles: Any, side: Side, there: str, here: str) -> Any:
        """Deals stripes; the patterns of einops say how these lie before and after they are sent."""
        if not self.schedule.is_dealt:
            return tiles
        rings, num_groups = self.schedule.gather_groups, side.num_tile_groups
        devices = None if len(rings) * self.ulysses.size == 1 else self.ulysses.groups(rings)
        sizes = {"shards": self.schedule.ring_size, "groups": num_groups}

        def deal(array: Array) -> Array:
            axis = self._axis(array)
            stripes = array.reshape(*array.shape[:axis], num_groups * side.parts, -1, *array.shape[axis + 1 :])
            parts = rearrange(jnp.moveaxis(stripes, axis, 0), there, **sizes)
            dealt = rearrange(exchange(parts, self.ulysses.axes, devices), here, **sizes)
            return jnp.moveaxis(dealt, 0, axis).reshape(array.shape)

        return jax.tree.map(deal, tiles)

    def _give(self, tiles: Any) -> Any:
        permutation = self.schedule.swap_permutation()

        def give(array: Array) -> Array:
            (own, given), axis = self._halves(array), self._axis(array)
            taken = self._permute(given, permutation)
            if self.schedule.sorts_halves:  # sorting copies both halves anyway
                return jax.lax.concatenate([own, taken], axis)
            return jax.lax.dynamic_update_slice_in_dim(array, taken, given.shape[axis], axis)

        return jax.tree.map(give, tiles)

    def _sort(self, tiles: Any) -> Any:
        if not self.schedule.sorts_halves:
            return tiles
        is_late = self.schedule.is_late(self.ulysses.shard)
        flip = lambda array: jax.lax.concatenate(self._halves(array)[::-1], self._axis(array))
        return jax.tree.map(lambda array: jnp.where(is_late, flip(array), array), tiles)

    def _halves(self, array: Array) -> Sequence[Array]:
        axis = self._axis(array)
        return jax.lax.split(array, (array.shape[axis] // 2,) * 2, axis)

    def _axis(self, array: Array) -> int:
        return self.rows_axis % array.ndim

    def gather(self, tiles: Any, side: Side) -> Any:
        """Gathers the tiles of all shards that share a segment on each of them, by tile group, then by shard."""
        parts = self.schedule.gather_size, side.num_tile_groups
        collect = lambda array, axis, **groups: jax.lax.all_gather(array, axis=axis, **groups)
        gathered = self._collect(collect, tiles)
        return jax.tree.map(lambda array: _swap_parts(array, self._axis(array), *parts), gathered)

    def scatter(self, tiles: Any, side: Side) -> Any:
        """Returns, on each shard, the sum over shards of what they hold for its tiles: the transpose of `gather`."""
        parts = side.num_tile_groups, self.schedule.gather_size
        by_shards = jax.tree.map(lambda array: _swap_parts(array, self._axis(array), *parts), tiles)
        collect = lambda array, axis, **groups: jax.lax.psum_scatter(array, scatter_dimension=axis, **groups)
        return self._collect(collect, by_shards)

    def send_back(self, tiles: Any, side: Side) -> list[Any]:
        """Returns, for each shard, what it holds for the tiles of this one, given what this one holds for all."""
        size = self.schedule.gather_size
        groups = self.ulysses.groups(self.schedule.gather_groups)

        def send(array: Array) -> Array:
            axis = self._axis(array)
            by_shards = _swap_parts(array, axis, side.num_tile_groups, size)
            parts = by_shards.reshape(*array.shape[:axis], size, -1, *array.shape[axis + 1 :])
            return exchange(jnp.moveaxis(parts, axis, 0), self.ulysses.axes, groups)

        sent = jax.tree.map(send, tiles)
        return [jax.tree.map(lambda array, shard=shard: array[shard], sent) for shard in range(size)]

    def _collect(self, collective: Any, tiles: Any) -> Any:
        if self.schedule.gather_size == 1:
            return tiles
        collect = functools.partial(
            collective,
            axis_name=self.ulysses.axes,
            axis_index_groups=self.ulysses.groups(self.schedule.gather_groups),
            tiled=True,
        )
        if self.rows_axis:
            return jax.tree.map(lambda array: collect(array, self._axis(array)), tiles)
        # Gathered as 2D rows, whose layout XLA:CPU keeps: it would relayout the more numerous tiles after the gather.
        return jax.tree.map(lambda array: collect(_rows(array), 0).reshape(-1, *array.shape[1:]), tiles)


def _rows(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])


def _swap_parts(array: Array, axis: int, outer: int, inner: int) -> Array:
    """Changes the order of an axis from [outer, inner, rest] to [inner, outer, rest]."""
    if 1 in (outer, inner):
        return array
    parts = array.reshape(*array.shape[:axis], outer, inner, -1, *array.shape[axis + 1 :])
    return jnp.swapaxes(parts, axis, axis + 1).reshape(array.shape)
