"""What a kernel reads and writes, tile by tile: arrays of heads and masks, with the index of each for two tiles.

Letters: B batch, K key/value heads, N query heads, G of them for each key/value head; masks are tiled as in
`_kernels.mask`, with one chunk. The tiles of one side are stationary, those of the other side are streamed.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ringjax._kernels.mask import BlockMask, Mask
from ringjax._kernels.softmax import Weighting

QUERIES, KEYS = 0, 1  # the sides
_LAST = 3  # the axis of rows if it comes after their width
LOG2E = 1 / math.log(2)  # kernels compute powers of two
# The initial maximum of a row: finite, so that subtracting it from a score of minus infinity gives no NaN.
LEAST = -0.7 * float(np.finfo(np.float32).max)


class Stats(NamedTuple):
    """What the backward needs of each query: its lse, infinite where it attends to nothing, and its delta."""

    lse: Float[Array, "B N T"]
    delta: Float[Array, "B N T"]


class Given(NamedTuple):
    """The inputs of a kernel: laid-out queries, keys and values, and their mask; the last two only for gradients.

    The `rows_axis` is that of T in [B, N, T, H], [B, T, N, H] or [B, N, H, T]. `interpret` is that of Pallas. Results
    have the `result_dtype`, except per-row ones. If it `has_maximum`, the forward returns the greatest logit of each
    row too.
    """

    query: Float[Array, "B _ _ _"]
    key: Float[Array, "B _ _ _"]
    value: Float[Array, "B _ _ _"]
    mask: Mask
    weighting: Weighting
    rows_axis: int
    interpret: Any = False
    result_dtype: Any = jnp.float32
    out_grad: Float[Array, "B _ _ _"] | None = None
    stats: Stats | None = None
    has_maximum: bool = False

    def width(self, array: Array) -> int:
        """Returns the width of the rows of an array."""
        return array.shape[_width_axis(self.rows_axis)]


class Sizes(NamedTuple):
    """The sizes of a call: for each side, the `rows` of a tile, and the tiles in one step, its `parts`.

    `lists` is the number of lists of active blocks, `stationary` the stationary side. If `rows_last`, the rows of
    arrays come after their width.
    """

    batch: int
    kv_heads: int
    groups: int
    rows: tuple[int, int]
    parts: tuple[int, int]
    lists: int
    stationary: int
    rows_last: bool = False

    @property
    def heads(self) -> tuple[int, int]:
        """The number of heads of queries and of keys, in all batches."""
        return self.batch * self.kv_heads * self.groups, self.batch * self.kv_heads

    def place(self, head: Any, group: Any, stationary: Any, streamed: Any) -> "Place":
        """Returns the place of a stationary head and two tiles; for a head of keys, `group` selects the query head."""
        if self.stationary == QUERIES:
            return Place((head, jax.lax.div(head, np.int32(self.groups))), (stationary, streamed))
        return Place((head * self.groups + group, head), (streamed, stationary))


class Place(NamedTuple):
    """What a kernel works on: the numbers of the head and the tile of each side."""

    heads: tuple[Any, Any]
    tiles: tuple[Any, Any]


class KernelOperand(NamedTuple):
    """An array that kernels read or write tile by tile.

    It is [heads, rows, width], [B, rows, heads, width], or, with `rows_last`, [any, width, rows], as per-row values
    are, with width one. `number(place)` is the number of a place's head among all heads, or its index of the first
    dimension.
    """

    array: Any
    side: int
    rows_last: bool
    number: Callable[[Place], Any]

    @property
    def axis(self) -> int:
        """The axis of rows."""
        return 2 if self.rows_last else 1

    def at(self, place: Place, rows: Any) -> tuple[Any, ...]:
        """Returns the index of some rows of a place."""
        number = self.number(place)
        if self.rows_last:
            return number, 0, rows
        if len(self.array.shape) == 3:
            return number, rows
        heads = np.int32(self.array.shape[2])
        return jax.lax.div(number, heads), rows, jax.lax.rem(number, heads)


class KernelCall(NamedTuple):
    """A kernel, and what it reads and writes.

    `results` are shapes, or the arrays to add to. `operations` counts those for a pair of a query and a key. `parts` is
    the number of streamed tiles in one step, `scratch` the memory that the kernel keeps between steps.
    """

    name: str
    kernel: Any
    mask: Mask
    stationary: int
    queries: tuple[Any, ...]
    keys: tuple[Any, ...]
    stats: Any
    results: tuple[Any, ...]
    operations: int
    rows_axis: int
    parts: int = 1
    scratch: tuple[Any, ...] = ()
    interpret: Any = False

    @property
    def varying(self) -> Any:
        """The mesh axes along which the results vary: those of the queries, as masks vary along no others."""
        return jax.typeof(self.queries[0]).manual_axis_type

    @property
    def blocks(self) -> BlockMask:
        """The block mask, with a row for each stationary tile."""
        return self.mask.blocks if self.stationary == QUERIES else self.mask.blocks.transposed()

    @property
    def sizes(self) -> Sizes:
        """The sizes."""
        rows = self.mask.queries.last.shape[-1], self.mask.keys.position.shape[-1]
        batch, heads_axis = self.queries[0].shape[0], _heads_axis(self.rows_axis)
        heads, kv_heads = (arrays[0].shape[heads_axis] for arrays in (self.queries, self.keys))
        parts = (1, self.parts) if self.stationary == QUERIES else (self.parts, 1)
        lists = self.mask.blocks.is_active.shape[0]
        return Sizes(batch, kv_heads, heads // kv_heads, rows, parts, lists, self.stationary, self.rows_axis == _LAST)

    @property
    def num_tiles(self) -> tuple[int, int]:
        """How many tiles each side has."""
        _, queries, keys = self.mask.blocks.is_active.shape
        return queries, keys

    def outs(self) -> list[KernelOperand]:
        """Returns the operands that it writes."""
        return [self._of_heads(shape, self.stationary) for shape in self.results]

    def operands(self) -> tuple[Any, ...]:
        """Returns those that it reads, in trees: masks of both sides, queries, keys, stats, and arrays to add to."""
        of_side = lambda arrays, side: tuple(self._of_heads(array, side) for array in arrays)
        return (
            _masks(self.mask, self.sizes),
            of_side(self.queries, QUERIES),
            of_side(self.keys, KEYS),
            jax.tree.map(lambda array: self._of_heads(array, QUERIES), self.stats),
            tuple(out for out in self.outs() if isinstance(out.array, jax.Array)),
        )

    def take_back(self, found: list[Array]) -> list[Array]:
        """Returns arrays in the shapes and dtypes of `results`."""
        return [array.reshape(one.shape).astype(one.dtype) for array, one in zip(found, self.results, strict=True)]

    def cost(self, arrays: list[Any]) -> dict[str, int]:
        """Returns the arguments of `pl.CostEstimate`, for all pairs: compilers cannot see what a kernel does."""
        heads, _ = self.sizes.heads
        pairs = heads * math.prod(of_side[0].shape[self.rows_axis] for of_side in (self.queries, self.keys))
        num_bytes = sum(array.size * array.dtype.itemsize for array in arrays)
        return {"flops": pairs * self.operations, "transcendentals": pairs, "bytes_accessed": num_bytes}

    def _of_heads(self, array: Any, side: int) -> KernelOperand:
        """Returns the operand of an array or a shape: of rows with a width, or of per-row values [B, heads, rows]."""
        is_of_numbers, shape = len(array.shape) == 3, array.shape
        if is_of_numbers or self.rows_axis > 1:
            shape = (math.prod(shape[:2]), *([1] if is_of_numbers else []), *shape[2:])
        flat = array.reshape(shape) if isinstance(array, jax.Array) else jax.ShapeDtypeStruct(shape, array.dtype)
        return KernelOperand(flat, side, is_of_numbers or self.rows_axis == _LAST, lambda place: place.heads[side])


def forward_call(kernel: Any, given: Given, before: tuple[Array, ...] | None) -> KernelCall:
    """Returns the call of a kernel for the output, the lse and a maximum, from those of other keys, `before`."""
    query, width = given.query, given.width(given.value)
    batch, heads, rows = (query.shape[axis] for axis in (0, _heads_axis(given.rows_axis), given.rows_axis))
    shape = list(query.shape)
    shape[_width_axis(given.rows_axis)] = width
    out = jax.ShapeDtypeStruct(tuple(shape), given.result_dtype)
    per_row = jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32)
    results = before or (out, per_row, *[per_row] * given.has_maximum)
    arrays = (query,), (given.key, given.value), ()
    operations = 2 * (given.width(query) + width)
    return KernelCall(
        "forward", kernel, given.mask, QUERIES, *arrays, results, operations, given.rows_axis, interpret=given.interpret
    )


def gradient_call(kernel: Any, given: Given, stationary: int, before: tuple[Array, ...] | None) -> KernelCall:
    """Returns the call of a kernel for the gradients of the stationary side: of queries, or of keys and values.

    They are added to the gradients `before`.
    """
    query, keys = given.query, (given.key, given.value)
    of_stays = (query,) if stationary == QUERIES else keys
    results = before or tuple(jax.ShapeDtypeStruct(array.shape, given.result_dtype) for array in of_stays)
    arrays = (query, given.out_grad), keys, given.stats, results
    operations = 2 * sum(map(given.width, (query, given.value, *of_stays)))
    name = "query_gradient" if stationary == QUERIES else "key_gradient"
    return KernelCall(
        name, kernel, given.mask, stationary, *arrays, operations, given.rows_axis, interpret=given.interpret
    )


def _heads_axis(rows_axis: int) -> int:
    return 2 if rows_axis == 1 else 1


def _width_axis(rows_axis: int) -> int:
    return 2 if rows_axis == _LAST else 3


def flatten(given: Any) -> tuple[list[KernelOperand], Any]:
    """Returns the operands of a tree, and its structure."""
    return jax.tree.flatten(given, is_leaf=lambda leaf: isinstance(leaf, KernelOperand))


def _of_mask(array: Array, side: int, sizes: Sizes) -> KernelOperand:
    """Returns the operand of an array of a mask [I, A, 1, O, R], or of streams [I, B, 1, K, G, R]."""
    tiles, batches, _, heads, *_, rows = array.shape
    flat = jnp.moveaxis(array, 0, -2).reshape(-1, 1, tiles * rows)  # [A * O, 1, I * R]
    if array.ndim > 5:
        return KernelOperand(flat, side, True, lambda place: place.heads[side])

    def number(place: Place) -> Any:
        kv_head = place.heads[KEYS]
        batch = jax.lax.div(kv_head, np.int32(sizes.kv_heads)) if batches > 1 else 0
        return batch * heads + (jax.lax.rem(kv_head, np.int32(sizes.kv_heads)) if heads > 1 else 0)

    return KernelOperand(flat, side, True, number)


def _masks(mask: Mask, sizes: Sizes) -> tuple[Any, Any]:
    """Returns the masks of both sides as operands, as signed integers."""
    # Rows of padding get position -1, which no interval holds: all begin at 0 or later.
    position = mask.keys.position
    if mask.keys.is_key is not None:
        position = jnp.where(mask.keys.is_key, position, -1)
    is_word = lambda array: array.dtype == jnp.uint32
    words = lambda array: jax.lax.bitcast_convert_type(array, jnp.int32) if is_word(array) else array.astype(jnp.int32)
    of_side = lambda tree, side: jax.tree.map(lambda array: _of_mask(words(array), side, sizes), tree)
    return of_side(mask.queries, QUERIES), of_side(mask.keys._replace(position=position, is_key=None), KEYS)
