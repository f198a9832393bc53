"""The shared memory of a thread block: buffers for tiles, of one or two pipeline stages, and barriers."""

import math
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import mosaic_gpu

from ringjax._kernels.hopper.chains import Chains, make_chains
from ringjax._kernels.operands import QUERIES, KernelCall, KernelOperand

# Untyped: it has names that only newer versions of jax have.
plgpu: Any = mosaic_gpu

TILE_ROWS = 128
COMPUTING = 2  # warpgroups that compute; one more copies
STAGES = 2  # of streamed tiles
_SHARED_BYTES = 220 * 1024  # that a thread block has for tiles
_LINE_BYTES = 128


class Barriers(NamedTuple):
    """The barriers that warpgroups wait for; those of copied tiles have one for each stage.

    `stationary`: a stationary tile has arrived. `stays_spent`: both computing warpgroups have read it. `streamed`: a
    tile of each of the two streamed operands has arrived, the first one with the per-row values. `spent`: both have
    read it. `order`: the other computing warpgroup has reached the same point.
    """

    stationary: Any
    stays_spent: Any
    streamed: tuple[Any, Any]
    spent: tuple[Any, Any]
    order: Any


def chains_of(call: KernelCall, leaves: list[KernelOperand]) -> Chains:
    """Returns the chains: of one tile each if shared memory has no room for the next one."""
    num_bytes = lambda stationary: sum(
        math.prod(_buffer_shape(leaves[number])) * leaves[number].array.dtype.itemsize
        for number in staged(call, leaves, stationary)
    )
    can_link = 2 * num_bytes(True) + STAGES * num_bytes(False) <= _SHARED_BYTES
    return make_chains(
        call.num_tiles[call.stationary], call.sizes.heads[call.stationary], call.stationary == QUERIES, can_link
    )


def stay_stages(chains: Chains) -> int:
    """Returns the number of stages of stationary tiles."""
    return min(2, chains.links)


def staged(call: KernelCall, leaves: list[KernelOperand], stationary: bool) -> list[int]:
    """Returns the numbers of one side's operands that are copied to shared memory: all but sums."""
    num_sums = sum(isinstance(result, jax.Array) for result in call.results)
    copied = leaves[: len(leaves) - num_sums]
    return [number for number, leaf in enumerate(copied) if (leaf.side == call.stationary) == stationary]


def passes_of(call: KernelCall, leaves: list[KernelOperand]) -> tuple[list[int], list[int]]:
    """Returns the numbers of the streamed operands: of the first one with the per-row values, and of the second."""
    numbers = staged(call, leaves, stationary=False)
    first, second = (number for number in numbers if not leaves[number].rows_last)
    return [first, *(number for number in numbers if leaves[number].rows_last)], [second]


def _buffer_shape(leaf: KernelOperand) -> tuple[int, ...]:
    """Returns the shape of a tile of an operand: on GPUs only per-row values have their rows last."""
    return (TILE_ROWS,) if leaf.rows_last else (TILE_ROWS, leaf.array.shape[-1])


def make_buffers(call: KernelCall, chains: Chains, leaves: list[KernelOperand]) -> list[Any]:
    """Returns the shared-memory buffer of each operand that is copied."""
    buffers = []
    for stationary, stages in ((True, stay_stages(chains)), (False, STAGES)):
        for number in staged(call, leaves, stationary):
            leaf = leaves[number]
            dtype = leaf.array.dtype
            # As the matrix unit reads its operands: tiles of eight rows by a line of 128 bytes, swizzled.
            lines = plgpu.TilingTransform((8, _LINE_BYTES // dtype.itemsize)), plgpu.SwizzleTransform(_LINE_BYTES)
            transforms = () if leaf.rows_last or call.interpret else lines
            buffers.append((number, plgpu.SMEM((stages, *_buffer_shape(leaf)), dtype, transforms=transforms)))
    return [buffer for _, buffer in sorted(buffers, key=lambda pair: pair[0])]


def make_barriers(call: KernelCall, chains: Chains, leaves: list[KernelOperand]) -> Barriers:
    """Returns the barriers."""
    barrier = lambda arrivals, stages=STAGES: plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    (first, second), stages = passes_of(call, leaves), stay_stages(chains)
    spent = barrier(COMPUTING)
    stationary, stays_spent = barrier(len(staged(call, leaves, stationary=True)), stages), barrier(COMPUTING, stages)
    order = plgpu.Barrier(num_arrivals=COMPUTING)
    return Barriers(stationary, stays_spent, (barrier(len(first)), barrier(len(second))), (spent, spent), order)
