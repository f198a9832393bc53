"""How a kernel for TPUs is run: its operands and masks tile by tile, over the list of the tiles that meet.

Letters: B batch, K key/value heads, N query heads, G of them for each key/value head; masks are tiled as in `_mask`,
with one chunk. In a step of a kernel a tile of one side stays, while some tiles of the other side come by: its parts.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ringjax._mask import Mask, Visits
from ringjax._tile_list import Step, list_tiles, passing, staying

QUERIES, KEYS = 0, 1  # the sides
_VMEM_BYTES = 64 * 2**20
# The most entries of a list: scalar memory, of a mebibyte, holds two words of each.
MAX_ENTRIES = 2**15


class Sizes(NamedTuple):
    """The sizes of a call: `rows` are those of the tiles of each side, `parts` the tiles of a side in one step."""

    batch: int
    kv_heads: int
    groups: int
    rows: tuple[int, int]
    parts: tuple[int, int]
    lists: int
    stays: int

    @property
    def heads(self) -> tuple[int, int]:
        """The heads of queries and of keys, in all batches."""
        return self.batch * self.kv_heads * self.groups, self.batch * self.kv_heads


class _Place(NamedTuple):
    """Where a step is: the number of the head on each side, and of the tiles."""

    heads: tuple[Any, Any]
    tiles: tuple[Any, Any]


class _Operand(NamedTuple):
    """An array that kernels read or write tile by tile: [any, rows, width], or [any, 1, rows] of numbers.

    `number(place)` says which one of the first dimension.
    """

    array: Any
    side: int
    is_row: bool
    number: Callable[[_Place], Any]

    @property
    def axis(self) -> int:
        """The axis of rows."""
        return 2 if self.is_row else 1


def _of_heads(array: Any, side: int, is_row: bool = False) -> _Operand:
    """An array [B, heads, rows, width], or [B, heads, rows] of numbers, or its shape."""
    shape = (math.prod(array.shape[:2]), *([1] if is_row else []), *array.shape[2:])
    flat = array.reshape(shape) if isinstance(array, jax.Array) else jax.ShapeDtypeStruct(shape, array.dtype)
    return _Operand(flat, side, is_row, lambda place: place.heads[side])


def _of_mask(array: Array, side: int, sizes: Sizes) -> _Operand:
    """An array of a mask [I, A, 1, O, R], or of streams [I, B, 1, K, G, R]."""
    tiles, batches, _, heads, *_, rows = array.shape
    flat = jnp.moveaxis(array, 0, -2).reshape(-1, 1, tiles * rows)  # [A * O, 1, I * R]
    if array.ndim > 5:
        return _Operand(flat, side, True, lambda place: place.heads[side])

    def number(place: _Place) -> Any:
        kv_head = place.heads[KEYS]
        batch = jax.lax.div(kv_head, np.int32(sizes.kv_heads)) if batches > 1 else 0
        return batch * heads + (jax.lax.rem(kv_head, np.int32(sizes.kv_heads)) if heads > 1 else 0)

    return _Operand(flat, side, True, number)


def _entry(step: Any, sizes: Sizes) -> tuple[Any, Any]:
    """Returns the entry of the list that a step takes, and which of the heads that share a tile of keys takes it."""
    if sizes.stays == QUERIES or sizes.groups == 1:
        return step, 0
    return jax.lax.div(step, np.int32(sizes.groups)), jax.lax.rem(step, np.int32(sizes.groups))


def _block(operand: _Operand, sizes: Sizes) -> pl.BlockSpec:
    rows = sizes.rows[operand.side] * sizes.parts[operand.side]
    outer = sizes.heads[sizes.stays] // sizes.lists

    def locate(head: Any, step: Any, tiles: Any, notes: Any) -> _Place:
        entry, group = _entry(step, sizes)
        if sizes.lists > 1:
            head += Step(notes[entry]).list * outer
        stays, passes = staying(tiles[entry]), passing(tiles[entry])
        if sizes.stays == QUERIES:
            return _Place((head, jax.lax.div(head, np.int32(sizes.groups))), (stays, passes))
        return _Place((head * sizes.groups + group, head), (passes, stays))

    def index(*indices: Any) -> tuple[Any, ...]:
        place = locate(*indices)
        first, tile = operand.number(place), place.tiles[operand.side]
        return (first, 0, tile) if operand.is_row else (first, tile, 0)

    return pl.BlockSpec((1, 1, rows) if operand.is_row else (1, rows, operand.array.shape[-1]), index)


class Call(NamedTuple):
    """A kernel, and what it reads and writes.

    `results` are shapes, or the arrays that it adds to; `operations` those of a pair of a query and a key.
    """

    name: str
    kernel: Callable[..., None]
    mask: Mask
    stays: int
    parts: int
    queries: tuple[Any, ...]
    keys: tuple[Any, ...]
    stats: tuple[Any, ...]
    results: tuple[Any, ...]
    scratch: tuple[Any, ...]
    operations: int
    interpret: Any = False


def launch(call: Call) -> list[Array]:
    """Runs a kernel: `kernel(step, (masks, queries, keys, stats, sums), results, scratch, sizes)`.

    It gets references, in trees as the arrays were; `sums` are what is added to, if there is something.
    """
    rows = call.mask.queries.last.shape[-1], call.mask.keys.position.shape[-1]
    (batch, heads, *_), kv_heads = call.queries[0].shape, call.keys[0].shape[1]
    visits = call.mask.visits if call.stays == QUERIES else call.mask.visits.transposed()
    parts = (1, call.parts) if call.stays == QUERIES else (call.parts, 1)
    sizes = Sizes(batch, kv_heads, heads // kv_heads, rows, parts, visits.meets.shape[0], call.stays)
    of_side = lambda arrays, side: tuple(_of_heads(array, side) for array in arrays)
    outs = [_of_heads(shape, call.stays, is_row=len(shape.shape) == 3) for shape in call.results]
    given = (
        _masks(call.mask, sizes),
        of_side(call.queries, QUERIES),
        of_side(call.keys, KEYS),
        tuple(_of_heads(array, QUERIES, is_row=True) for array in call.stats),
        tuple(out for out in outs if isinstance(out.array, jax.Array)),
    )
    leaves, tree = jax.tree.flatten(given, is_leaf=lambda leaf: isinstance(leaf, _Operand))
    # What is added to is the last of what is given, and written where it was.
    num_sums = len(given[-1])
    aliases = {2 + len(leaves) - num_sums + number: number for number in range(num_sums)}

    def body(tiles: Any, notes: Any, *refs: Any) -> None:
        del tiles
        entry, group = _entry(pl.program_id(1), sizes)
        step = Step(notes[entry], group, sizes.groups if call.stays == KEYS else 1)
        inner, outer = refs[: len(leaves)], refs[len(leaves) :]
        call.kernel(step, tree.unflatten(inner), outer[: len(outs)], outer[len(outs) :], sizes)

    def run(visits: Visits, arrays: list[Any], outs: list[_Operand]) -> list[Array]:
        steps = list_tiles(visits, call.parts)
        varying = jax.typeof(arrays[0]).manual_axis_type
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(sizes.heads[call.stays] // sizes.lists, steps.length * (sizes.groups if call.stays == KEYS else 1)),
            in_specs=[_block(leaf, sizes) for leaf in leaves],
            out_specs=[_block(out, sizes) for out in outs],
            scratch_shapes=call.scratch,
        )
        parameters = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES)
        shapes = [jax.ShapeDtypeStruct(out.array.shape, jnp.float32, manual_axis_type=varying) for out in outs]
        named = {"name": f"ringjax_{call.name}", "interpret": call.interpret, "compiler_params": parameters}
        named |= {"input_output_aliases": aliases, "cost_estimate": _cost(call, arrays)}
        kernel = pl.pallas_call(body, grid_spec=spec, out_shape=shapes, **named)
        return list(kernel(steps.tiles, steps.notes, *arrays))

    found = _in_bands(run, visits, leaves, outs, sizes)
    return [array.reshape(shape.shape) for array, shape in zip(found, call.results, strict=True)]


def _cost(call: Call, arrays: list[Any]) -> pl.CostEstimate:
    """Returns what compilers take a kernel for, who see none of it: the products of all pairs."""
    query, key = call.queries[0], call.keys[0]
    pairs = math.prod(query.shape[:3]) * key.shape[2]
    num_bytes = sum(array.size * array.dtype.itemsize for array in arrays)
    return pl.CostEstimate(flops=pairs * call.operations, transcendentals=pairs, bytes_accessed=num_bytes)


def _masks(mask: Mask, sizes: Sizes) -> tuple[Any, Any]:
    """Returns the masks of both sides as operands, of numbers that have a sign."""
    # A key that is none is at a position of its own, which no interval holds: all others are numbers above.
    position = mask.keys.position
    if mask.keys.is_key is not None:
        position = jnp.where(mask.keys.is_key, position, -1)
    words = lambda array: jax.lax.bitcast_convert_type(array, jnp.int32)
    of_side = lambda tree, side: jax.tree.map(lambda array: _of_mask(words(array), side, sizes), tree)
    return of_side(mask.queries, QUERIES), of_side(mask.keys._replace(position=position, is_key=None), KEYS)


def _in_bands(
    run: Callable[..., list[Array]], visits: Visits, leaves: list[_Operand], outs: list[_Operand], sizes: Sizes
) -> list[Array]:
    """Runs a kernel on some of the tiles that stay after others: as many as scalar memory holds the lists of."""
    lists, tiles, others = visits.meets.shape
    most = tiles * lists * -(-others // sizes.parts[1 - sizes.stays])
    bands = next((n for n in range(1, tiles) if tiles % n == 0 and most <= n * MAX_ENTRIES), tiles)
    arrays = [leaf.array for leaf in leaves]
    if bands == 1:
        return run(visits, arrays, outs)

    def split(array: Array, axis: int) -> Array:
        return jnp.moveaxis(array.reshape(*array.shape[:axis], bands, -1, *array.shape[axis + 1 :]), axis, 0)

    def run_band(band: Any) -> list[Array]:
        visits, some = band
        whole = [own if part is None else part for part, own in zip(some, arrays, strict=True)]
        return run(Visits(*visits), whole, cut)

    of_band = jax.eval_shape(lambda: [split(jnp.zeros(out.array.shape, jnp.float32), out.axis)[0] for out in outs])
    cut = [out._replace(array=shape) for out, shape in zip(outs, of_band, strict=True)]
    stay = [split(leaf.array, leaf.axis) if leaf.side == sizes.stays else None for leaf in leaves]
    found = jax.lax.map(run_band, (tuple(split(array, 1) for array in visits), stay))
    return [jnp.moveaxis(array, 0, out.axis).reshape(out.array.shape) for array, out in zip(found, outs, strict=True)]
