"""The lists of active blocks that kernels run over; their lengths are known only at run time.

Letters: L lists, one for each batch of masks; I stationary tiles, J streamed tiles, P of them in one step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ringjax._kernels.mask import BlockMask

# The blocks of a step: none is active, all are active but not all full, all are full, or only some are active.
NOTHING, PARTIAL, FULL, SOME = range(4)
_FIRST, _LAST, _PARTS, _LIST = 2, 3, 4, 12  # the bits of a step's note, with room for eight parts
_HALF = 16


class BlockList(NamedTuple):
    """The steps of a kernel: the stationary tile and the streamed tiles of each, and a note on their blocks.

    The steps of a stationary tile are consecutive. It has at least one, so that its results are written. There is an
    entry for each step that might be needed, and the first `length` entries are steps.
    """

    tiles: Int[Array, "entries"]
    notes: Int[Array, "entries"]
    length: Int[Array, ""]


class Stretches(NamedTuple):
    """The number of steps of each stationary tile, and these steps, each with one streamed tile.

    A step encodes the number of the streamed tile, and whether the block is full. Later entries are unused.
    """

    length: Int[Array, "L I"]
    steps: Int[Array, "L I J"]


class Step(NamedTuple):
    """A step as a kernel reads it from scalar memory; it runs for each of the heads that share a stationary tile."""

    note: Any
    head: Any = 0
    num_heads: int = 1

    @property
    def case(self) -> Any:
        """The case of the step: `NOTHING`, `PARTIAL`, `FULL` or `SOME`."""
        return self.note & 3

    @property
    def is_first(self) -> Any:
        """Whether this is the first step of its stationary tile."""
        is_first = ((self.note >> _FIRST) & 1) != 0
        return is_first if self.num_heads == 1 else is_first & (self.head == 0)

    @property
    def is_last(self) -> Any:
        """Whether this is the last step of its stationary tile."""
        is_last = ((self.note >> _LAST) & 1) != 0
        return is_last if self.num_heads == 1 else is_last & (self.head == self.num_heads - 1)

    def is_active(self, part: Any) -> Any:
        """Returns whether block number `part` of the step is active."""
        return ((self.note >> (_PARTS + part)) & 1) != 0

    @property
    def list(self) -> Any:
        """The number of its list."""
        return self.note >> _LIST


def stationary_of(tile: Any) -> Any:
    """Returns the number of the stationary tile of a step."""
    return tile >> _HALF


def is_full_step(step: Any) -> Any:
    """Returns whether the block of a step of `Stretches` is full."""
    return (step & 1) != 0


def streamed_in(step: Any) -> Any:
    """Returns the number of the streamed tile in a step of `Stretches`."""
    return step >> 1


def streamed_of(tile: Any) -> Any:
    """Returns the number of the group of streamed tiles of a step."""
    return tile & ((1 << _HALF) - 1)


def list_blocks(blocks: BlockMask, parts: int) -> BlockList:
    """Returns the list of active blocks, one stationary tile after the other, with `parts` streamed tiles in a step."""
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
    # A stationary tile without an active block has one step, with the case NOTHING.
    is_step = some | (~some.any(axis=2, keepdims=True) & (column == 0))
    return _list_steps(is_step, (row << _HALF) | column, note)


def find_stretches(blocks: BlockMask) -> Stretches:
    """Returns the active blocks of each stationary tile."""
    _, rows, columns = blocks.is_active.shape
    _check_size(blocks.is_active, rows, columns, most=1 << 30)
    *_, column = _numbers(1, rows, columns)
    # Active blocks sort first.
    steps = jnp.where(blocks.is_active, (column << 1) | blocks.is_full, np.iinfo(np.int32).max)
    return Stretches(blocks.is_active.sum(axis=2, dtype=jnp.int32), jnp.sort(steps, axis=2, stable=False))


def _check_size(is_active: Any, rows: int, columns: int, most: int) -> None:
    if max(rows, columns) >= most or is_active.size >= 2**31:
        words = "are too many on one device: use more devices, or implementation='xla'"
        raise ValueError(f"{rows} tiles of queries or keys and {columns} of the others {words}")


def _list_steps(is_step: Bool[Array, "L I J"], tile: Int[Array, "1 I J"], note: Int[Array, "L I J"]) -> BlockList:
    size, columns = is_step.size, is_step.shape[2]
    flat = lambda array: jnp.broadcast_to(array, is_step.shape).reshape(-1)
    # Entries that are no steps sort last, after the length. One sort of all arrays, as gathers are slow on TPUs.
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
