"""The launch of a kernel for Hopper GPUs: a thread block takes a chain of stationary tiles, and streams the others.

Two warpgroups compute, each for half of the rows of the stationary tile. A third copies: the stationary tile, and then
the streamed tiles, as many ahead as shared memory has stages. It copies the next stationary tile while the results of
the last are written. Barriers say which tiles have arrived, which have been read, and which warpgroup multiplies next.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array

from ringjax._kernels.block_list import find_stretches, is_full_step, streamed_in
from ringjax._kernels.hopper.buffers import (
    COMPUTING,
    STAGES,
    TILE_ROWS,
    Barriers,
    chains_of,
    make_barriers,
    make_buffers,
    passes_of,
    plgpu,
    staged,
    stay_stages,
)
from ringjax._kernels.hopper.chains import Chains
from ringjax._kernels.operands import KEYS, KernelCall, KernelOperand, flatten

OWN_ROWS = TILE_ROWS // COMPUTING  # a warpgroup's rows of the stationary tile
# The registers of each thread of a warpgroup that computes, and of the one that copies, of 65536 in all.
_REGISTERS, _REGISTERS_TO_COPY = 240, 24
TURNS_OF_STEP = 2  # for products of queries and keys, and for those of weights and values


class GpuStep(NamedTuple):
    """The inputs of a kernel in a step: references to the step's tiles, in trees like those of the arrays.

    References to the stationary tile are to the warpgroup's own rows. A kernel waits for each of the two streamed
    operands, and releases it after the last read. The per-row values come with the first one.
    """

    given: tuple[Any, ...]
    is_full: Any
    slot: Any
    barriers: Barriers

    def wait(self, number: int) -> None:
        """Waits until a streamed operand has arrived."""
        plgpu.barrier_wait(self.barriers.streamed[number].at[self.slot])

    def release(self, number: int) -> None:
        """Lets a streamed operand be overwritten."""
        plgpu.barrier_arrive(self.barriers.spent[number].at[self.slot])

    def arrive(self) -> None:
        """Lets the other warpgroup take its turn."""
        plgpu.barrier_arrive(self.barriers.order)

    def take_turn(self) -> None:
        """Waits for the turn; the other warpgroup has to `arrive` as often as this one."""
        plgpu.barrier_wait(self.barriers.order)


@runtime_checkable
class GpuKernel(Protocol):
    """What a warpgroup computes: it starts sums, adds to them step by step, and makes results of them.

    If it `takes_turns`, the two warpgroups use the matrix unit alternately: each `TURNS_OF_STEP` times in a step.
    """

    takes_turns: bool

    def start(self, before: tuple[Any, ...]) -> Any:
        """Returns the initial sums, given references to the arrays to add to, if there are any."""
        ...

    def step(self, step: GpuStep, sums: Any) -> Any:
        """Returns the sums after a step."""
        ...

    def finish(self, sums: Any, before: tuple[Any, ...]) -> tuple[Array, ...]:
        """Returns the results."""
        ...


class _Lists(NamedTuple):
    """References to the tiles of chains, to the number of steps of each tile, and to these steps.

    A tile's number is read, not computed: values computed from the number of a thread block stay in registers.
    """

    tiles: Any
    lengths: Any
    steps: Any


class _Tile(NamedTuple):
    """A stationary tile: its stage in shared memory, its number, and the entries of its steps."""

    stage: Any
    number: Any
    start: Any
    num_steps: Any


class _Block(NamedTuple):
    """The state of a thread block: a reference to each operand, and the buffers of those that are copied.

    It takes one chain of the tiles of a head, whose steps are in list `list_number`.
    """

    call: KernelCall
    chains: Chains
    leaves: list[KernelOperand]
    results: list[KernelOperand]
    tree: Any
    lists: _Lists
    refs: list[Any]
    outs: list[Any]
    buffers: list[Any]
    barriers: Barriers
    head: Any
    list_number: Any
    chain: Any

    @property
    def groups(self) -> np.int32:
        """The number of query heads that share a stationary tile of keys."""
        return np.int32(self.call.sizes.groups if self.call.stationary == KEYS else 1)

    def tile(self, link: Any) -> _Tile:
        """Returns a tile of its chain."""
        number = self.lists.tiles[self.chain * np.int32(self.chains.links) + link]
        entry = self.list_number * np.int32(self.chains.num_tiles) + number
        num_others = np.int32(self.call.num_tiles[1 - self.call.stationary])
        num_steps = self.lists.lengths[entry] * self.groups
        return _Tile(jax.lax.rem(link, np.int32(stay_stages(self.chains))), number, entry * num_others, num_steps)

    def over_tiles(self, take: Callable[[Any, _Tile, Any], None]) -> None:
        """Calls `take` for each tile of its chain, with the tile's link and the number of steps before it."""

        def run(link: Any, steps: Any) -> Any:
            link = jax.lax.convert_element_type(link, np.int32)
            tile = self.tile(link)
            take(link, tile, steps)
            return steps + tile.num_steps

        jax.lax.fori_loop(np.int32(0), np.int32(self.chains.links), run, np.int32(0))

    def entry(self, tile: _Tile, step: Any) -> tuple[Any, Any]:
        """Returns the entry of a step in the list, and which of the heads that share a tile of keys it is for."""
        if self.groups == 1:
            return tile.start + step, 0
        return tile.start + jax.lax.div(step, self.groups), jax.lax.rem(step, self.groups)

    def is_full(self, tile: _Tile, step: Any) -> Any:
        """Returns whether the block of a step is full."""
        return is_full_step(self.lists.steps[self.entry(tile, step)[0]])

    def copy(self, tile: _Tile, step: Any, number: int, buffer: Any, barrier: Any) -> None:
        """Copies a tile of an operand to shared memory."""
        (entry, group), leaf = self.entry(tile, step), self.leaves[number]
        place = self.call.sizes.place(self.head, group, tile.number, streamed_in(self.lists.steps[entry]))
        rows = pl.ds(place.tiles[leaf.side] * TILE_ROWS, TILE_ROWS)
        plgpu.copy_gmem_to_smem(self.refs[number].at[leaf.at(place, rows)], buffer, barrier)


def launch(call: KernelCall) -> list[Array]:
    """Runs a kernel; `call.kernel` is a `GpuKernel`."""
    (leaves, tree), outs = flatten(call.operands()), call.outs()
    chains = chains_of(call, leaves)
    scalars = _Lists(*(array.reshape(-1) for array in (chains.tiles, *find_stretches(call.blocks))))
    arrays = [leaf.array for leaf in leaves]

    def body(*refs: Any) -> None:
        block, warpgroup = _enter(call, chains, leaves, outs, tree, refs), jax.lax.axis_index("warpgroup")
        pl.when(warpgroup < COMPUTING)(lambda: _compute(block, warpgroup))
        pl.when(warpgroup == COMPUTING)(lambda: _copy(block))

    body.__name__ = f"ringjax_{call.name}"
    run = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(out.array.shape, out.array.dtype) for out in outs],
        scratch_types=[make_buffers(call, chains, leaves), make_barriers(call, chains, leaves)],
        grid=(call.sizes.heads[call.stationary] * chains.num_chains,),
        grid_names=("chain",),
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(**call.cost(arrays)),
        interpret=call.interpret or None,
    )
    # The types of a kernel's results do not say that they vary along mesh axes.
    varying = tuple(call.varying.varying)
    return call.take_back([jax.lax.pcast(array, varying, to="varying") for array in run(*scalars, *arrays)])


def _enter(
    call: KernelCall,
    chains: Chains,
    leaves: list[KernelOperand],
    results: list[KernelOperand],
    tree: Any,
    refs: tuple[Any, ...],
) -> _Block:
    """Returns the state of a thread block that starts, with its own head and chain."""
    lists, refs = _Lists(*refs[: len(_Lists._fields)]), refs[len(_Lists._fields) :]
    index, num_chains, sizes = jax.lax.axis_index("chain"), np.int32(chains.num_chains), call.sizes
    head, chain = jax.lax.div(index, num_chains), jax.lax.rem(index, num_chains)
    *outs, buffers, barriers = refs[len(leaves) :]
    return _Block(
        call,
        chains,
        leaves,
        results,
        tree,
        lists,
        refs=list(refs[: len(leaves)]),
        outs=outs,
        buffers=list(buffers),
        barriers=Barriers(*barriers),
        head=head,
        list_number=jax.lax.div(head, np.int32(sizes.heads[call.stationary] // sizes.lists)),
        chain=chain,
    )


def _copy(block: _Block) -> None:
    """Runs the warpgroup that copies."""
    plgpu.set_max_registers(_REGISTERS_TO_COPY, action="decrease")
    barriers, stages = block.barriers, stay_stages(block.chains)

    def copy(link: Any, tile: _Tile, before: Any) -> None:
        pl.when(link >= stages)(lambda: plgpu.barrier_wait(barriers.stays_spent.at[tile.stage]))
        for number in staged(block.call, block.leaves, stationary=True):
            buffer = block.buffers[number].at[tile.stage]
            block.copy(tile, np.int32(0), number, buffer, barriers.stationary.at[tile.stage])

        @pl.loop(np.int32(0), tile.num_steps)
        def _(step: Any) -> None:
            slot = jax.lax.rem(before + step, np.int32(STAGES))
            for numbers, here, spent in zip(
                passes_of(block.call, block.leaves), barriers.streamed, barriers.spent, strict=True
            ):
                pl.when(before + step >= STAGES)(lambda spent=spent: plgpu.barrier_wait(spent.at[slot]))
                for number in numbers:
                    block.copy(tile, step, number, block.buffers[number].at[slot], here.at[slot])

    block.over_tiles(copy)


def _compute(block: _Block, warpgroup: Any) -> None:
    """Runs a warpgroup that computes."""
    plgpu.set_max_registers(_REGISTERS, action="increase")
    kernel: GpuKernel = block.call.kernel
    wait = lambda: _take_turns(block.barriers, 1)
    if kernel.takes_turns:
        pl.when(warpgroup == 1)(wait)
    block.over_tiles(lambda link, tile, before: _compute_tile(block, warpgroup, tile, before))
    if kernel.takes_turns:
        pl.when(warpgroup == 0)(wait)


def _take_turns(barriers: Barriers, count: int) -> None:
    for _ in range(count):
        plgpu.barrier_arrive_and_wait(barriers.order)


def _compute_tile(block: _Block, warpgroup: Any, tile: _Tile, before: Any) -> None:
    """Computes the warpgroup's rows of a tile; `before` is the number of earlier steps."""
    kernel, barriers = block.call.kernel, block.barriers
    own = pl.ds(warpgroup * OWN_ROWS, OWN_ROWS)
    rows = pl.ds(tile.number * TILE_ROWS + warpgroup * OWN_ROWS, OWN_ROWS)
    place = block.call.sizes.place(block.head, 0, tile.number, 0)
    outs = [ref.at[out.at(place, rows)] for out, ref in zip(block.results, block.outs, strict=True)]
    operands = zip(block.leaves[len(block.buffers) :], block.refs[len(block.buffers) :], strict=True)
    sums_before = tuple(ref.at[leaf.at(place, rows)] for leaf, ref in operands)
    stationary = set(staged(block.call, block.leaves, stationary=True))
    plgpu.barrier_wait(barriers.stationary.at[tile.stage])
    if kernel.takes_turns:
        # The second warpgroup ends a tile in the first one's turns of the next tile. If that had none, the second would
        # wait for the first, which waits for the tile after that, whose copy waits for the stage that the second still
        # holds.
        pl.when(tile.num_steps == 0)(lambda: _take_turns(barriers, TURNS_OF_STEP))

    def take(step: Any, sums: Any) -> Any:
        slot = jax.lax.rem(before + step, np.int32(STAGES))
        at = lambda number: (tile.stage, own) if number in stationary else slot
        refs = [buffer.at[at(number)] for number, buffer in enumerate(block.buffers)]
        given = block.tree.unflatten([*refs, *sums_before])
        return kernel.step(GpuStep(given, block.is_full(tile, step), slot, barriers), sums)

    sums = jax.lax.fori_loop(np.int32(0), tile.num_steps, take, kernel.start(sums_before))
    plgpu.barrier_arrive(barriers.stays_spent.at[tile.stage])
    for out, result in zip(outs, kernel.finish(sums, sums_before), strict=True):
        # Unoptimized: values of 16 bits fill only half of a memory transaction.
        plgpu.store(out, result.astype(out.dtype), optimized=False)
