"""The lists of active blocks, over which kernels run; how many there are is known when run.

Letters: L lists, one for each batch of masks; I tiles that stay, J tiles that come by, P of them in one step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ringjax._kernels.mask import BlockMask

# What a step finds where it multiplies: nothing, tiles that a mask cuts, tiles that none cuts, or some of all these.
NOTHING, PARTIAL, FULL, SOME = range(4)
_FIRST, _LAST, _PARTS, _LIST = 2, 3, 4, 12  # the bits of what a step is told, with room for eight parts
_HALF = 16


class BlockList(NamedTuple):
    """The steps of a kernel: of each the tile that stays and the tiles that come by, and what it finds there.

    The steps of one tile that stays follow each other. Each such tile has a step, so that its results are written. All
    blocks that might be active have an entry, and the first so many of these, the `length`, are steps.
    """

    tiles: Int[Array, "entries"]
    notes: Int[Array, "entries"]
    length: Int[Array, ""]


class Stretches(NamedTuple):
    """Of each tile that stays how many steps it has, each with one tile that comes by, and these.

    A step is the number of the tile that comes by, and whether the block is full; behind the steps is
    room for as many as there might be.
    """

    length: Int[Array, "L I"]
    steps: Int[Array, "L I J"]


class Step(NamedTuple):
    """What a step is told, of scalars that a kernel reads; it is taken by each of the heads that share a tile."""

    note: Any
    head: Any = 0
    num_heads: int = 1

    @property
    def case(self) -> Any:
        """What it finds."""
        return self.note & 3

    @property
    def is_first(self) -> Any:
        """Whether it is the first one of the tile that stays."""
        is_first = ((self.note >> _FIRST) & 1) != 0
        return is_first if self.num_heads == 1 else is_first & (self.head == 0)

    @property
    def is_last(self) -> Any:
        """Whether it is the last one of the tile that stays."""
        is_last = ((self.note >> _LAST) & 1) != 0
        return is_last if self.num_heads == 1 else is_last & (self.head == self.num_heads - 1)

    def is_active(self, part: Any) -> Any:
        """Whether one of the blocks of the step is active."""
        return ((self.note >> (_PARTS + part)) & 1) != 0

    @property
    def list(self) -> Any:
        """The number of its list."""
        return self.note >> _LIST


def stationary_of(tile: Any) -> Any:
    """Returns the number of the tile that stays."""
    return tile >> _HALF


def is_full_step(step: Any) -> Any:
    """Returns whether no mask cuts what meets in a step of a stretch."""
    return (step & 1) != 0


def streamed_in(step: Any) -> Any:
    """Returns the number of the tile that comes by in a step of a stretch."""
    return step >> 1


def streamed_of(tile: Any) -> Any:
    """Returns the number of the tiles that come by."""
    return tile & ((1 << _HALF) - 1)


def list_blocks(blocks: BlockMask, parts: int) -> BlockList:
    """Returns the list of active blocks, by tiles of queries, with so many tiles of keys in one step."""
    is_active, is_full = (jnp.pad(array, [(0, 0), (0, 0), (0, -array.shape[2] % parts)]) for array in blocks)
    is_active, is_full = (array.reshape(*array.shape[:2], -1, parts) for array in (is_active, is_full))  # [L, I, J, P]
    lists, rows, columns, _ = is_active.shape
    _check_size(is_active, rows, columns, most=1 << (_HALF - 1))
    number, row, column = _numbers(lists, rows, columns)
    some, every, whole = is_active.any(axis=-1), is_active.all(axis=-1), (is_active & is_full).all(axis=-1)
    case = jnp.where(whole, FULL, jnp.where(every, PARTIAL, jnp.where(some, SOME, NOTHING)))
    bits = jnp.sum(
        is_active.astype(jnp.int32) << (_PARTS + jnp.arange(parts, dtype=jnp.int32)), axis=-1, dtype=jnp.int32
    )
    note = case.astype(jnp.int32) | bits | (number << _LIST)
    # A tile without an active block takes the first step, and finds nothing.
    is_step = some | (~some.any(axis=2, keepdims=True) & (column == 0))
    return _list_steps(is_step, (row << _HALF) | column, note)


def find_stretches(blocks: BlockMask) -> Stretches:
    """Returns the active blocks of each tile."""
    _, rows, columns = blocks.is_active.shape
    _check_size(blocks.is_active, rows, columns, most=1 << 30)
    *_, column = _numbers(1, rows, columns)
    # Those that meet come first.
    steps = jnp.where(blocks.is_active, (column << 1) | blocks.is_full, np.iinfo(np.int32).max)
    return Stretches(blocks.is_active.sum(axis=2, dtype=jnp.int32), jnp.sort(steps, axis=2, stable=False))


def _check_size(is_active: Any, rows: int, columns: int, most: int) -> None:
    if max(rows, columns) >= most or is_active.size >= 2**31:
        words = "are too many on one device: use more devices, or implementation='xla'"
        raise ValueError(f"{rows} tiles of queries or keys and {columns} of the others {words}")


def _list_steps(is_step: Bool[Array, "L I J"], tile: Int[Array, "1 I J"], note: Int[Array, "L I J"]) -> BlockList:
    size, columns = is_step.size, is_step.shape[2]
    flat = lambda array: jnp.broadcast_to(array, is_step.shape).reshape(-1)
    # By their numbers; entries that are no steps come last, behind the length. One sort, as gathers are slow on TPUs.
    number = jnp.where(flat(is_step), jnp.arange(size, dtype=jnp.int32), size)
    number, tiles, notes = jax.lax.sort((number, flat(tile), flat(note)), num_keys=1, is_stable=False)
    row = number // columns
    is_new = jnp.append(True, row[1:] != row[:-1])
    is_last = jnp.append(is_new[1:], True)
    edges = is_new.astype(jnp.int32) << _FIRST | is_last.astype(jnp.int32) << _LAST
    return BlockList(tiles, notes | edges, is_step.sum(dtype=jnp.int32))


def _numbers(*shape: int) -> list[Array]:
    of_axis = lambda own: [-1 if axis == own else 1 for axis in range(len(shape))]
    return [jnp.arange(size, dtype=jnp.int32).reshape(of_axis(axis)) for axis, size in enumerate(shape)]
