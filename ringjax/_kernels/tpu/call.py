"""The launch of a kernel for TPUs, which reads its operands and masks tile by tile, over the list of active blocks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ringjax._kernels.block_list import Step, list_blocks, stationary_of, streamed_of
from ringjax._kernels.mask import BlockMask
from ringjax._kernels.operands import KEYS, QUERIES, KernelCall, KernelOperand, Place, Sizes, flatten

_VMEM_BYTES = 64 * 2**20
# The most entries of a list: at two words each, they take half of the mebibyte of scalar memory.
MAX_ENTRIES = 2**16


def _entry(step: Any, sizes: Sizes) -> tuple[Any, Any]:
    """Returns the entry of a step in the list, and which of the heads that share a tile of keys it is for."""
    if sizes.stationary == QUERIES or sizes.groups == 1:
        return step, 0
    return jax.lax.div(step, np.int32(sizes.groups)), jax.lax.rem(step, np.int32(sizes.groups))


def _block(operand: KernelOperand, sizes: Sizes) -> pl.BlockSpec:
    rows = sizes.rows[operand.side] * sizes.parts[operand.side]
    outer = sizes.heads[sizes.stationary] // sizes.lists

    def locate(head: Any, step: Any, tiles: Any, notes: Any) -> Place:
        entry, group = _entry(step, sizes)
        if sizes.lists > 1:
            head += Step(notes[entry]).list * outer
        return sizes.place(head, group, stationary_of(tiles[entry]), streamed_of(tiles[entry]))

    def index(*indices: Any) -> tuple[Any, ...]:
        place = locate(*indices)
        first, tile = operand.number(place), place.tiles[operand.side]
        return (first, 0, tile) if operand.rows_last else (first, tile, 0)

    _, *shape = operand.array.shape
    shape[operand.axis - 1] = rows
    return pl.BlockSpec((1, *shape), index)


def launch(call: KernelCall) -> list[Array]:
    """Runs a kernel: `kernel(step, (masks, queries, keys, stats, sums), results, scratch, sizes)`.

    The kernel gets references, in trees like those of the arrays; `sums` are the arrays to add to, if there are any.
    """
    sizes, given, outs = call.sizes, call.operands(), call.outs()
    leaves, tree = flatten(given)
    # The arrays to add to are the last operands; results are written in their place.
    num_sums = len(given[-1])
    aliases = {2 + len(leaves) - num_sums + number: number for number in range(num_sums)}

    def body(tiles: Any, notes: Any, *refs: Any) -> None:
        del tiles
        entry, group = _entry(pl.program_id(1), sizes)
        step = Step(notes[entry], group, sizes.groups if call.stationary == KEYS else 1)
        inner, outer = refs[: len(leaves)], refs[len(leaves) :]
        call.kernel(step, tree.unflatten(inner), outer[: len(outs)], outer[len(outs) :], sizes)

    def run(blocks: BlockMask, arrays: list[Any], outs: list[KernelOperand]) -> list[Array]:
        steps = list_blocks(blocks, call.parts)
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(
                sizes.heads[call.stationary] // sizes.lists,
                steps.length * (sizes.groups if call.stationary == KEYS else 1),
            ),
            in_specs=[_block(leaf, sizes) for leaf in leaves],
            out_specs=[_block(out, sizes) for out in outs],
            scratch_shapes=call.scratch,
        )
        parameters = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES)
        shape = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, manual_axis_type=call.varying)
        shapes = [shape(out.array) for out in outs]
        named = {"name": f"ringjax_{call.name}", "interpret": call.interpret, "compiler_params": parameters}
        named |= {"input_output_aliases": aliases, "cost_estimate": pl.CostEstimate(**call.cost(arrays))}
        kernel = pl.pallas_call(body, grid_spec=spec, out_shape=shapes, **named)
        with jax.enable_x64(False):  # kernels know no int64
            return list(kernel(steps.tiles, steps.notes, *arrays))

    return call.take_back(_in_bands(run, call.blocks, leaves, outs, sizes))


def _in_bands(
    run: Callable[..., list[Array]],
    blocks: BlockMask,
    leaves: list[KernelOperand],
    outs: list[KernelOperand],
    sizes: Sizes,
) -> list[Array]:
    """Runs a kernel on bands of stationary tiles, one after the other: scalar memory has room for the lists of one."""
    lists, tiles, others = blocks.is_active.shape
    most = tiles * lists * -(-others // sizes.parts[1 - sizes.stationary])
    bands = next((n for n in range(1, tiles) if tiles % n == 0 and most <= n * MAX_ENTRIES), tiles)
    arrays = [leaf.array for leaf in leaves]
    if bands == 1:
        return run(blocks, arrays, outs)

    def split(array: Array, axis: int) -> Array:
        return jnp.moveaxis(array.reshape(*array.shape[:axis], bands, -1, *array.shape[axis + 1 :]), axis, 0)

    def run_band(band: Any) -> list[Array]:
        blocks, some = band
        whole = [own if part is None else part for part, own in zip(some, arrays, strict=True)]
        return run(BlockMask(*blocks), whole, cut)

    of_band = jax.eval_shape(lambda: [split(jnp.zeros(out.array.shape, out.array.dtype), out.axis)[0] for out in outs])
    cut = [out._replace(array=shape) for out, shape in zip(outs, of_band, strict=True)]
    stay = [split(leaf.array, leaf.axis) if leaf.side == sizes.stationary else None for leaf in leaves]
    found = jax.lax.map(run_band, (tuple(split(array, 1) for array in blocks), stay))
    return [jnp.moveaxis(array, 0, out.axis).reshape(out.array.shape) for array, out in zip(found, outs, strict=True)]
