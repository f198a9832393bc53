"""How a kernel for Hopper GPUs is run: a block of threads for each tile that stays, past which the others come.

Two warpgroups compute, each for half of the rows of the tile that stays. A third copies: the tile that stays, and then
the tiles that come by, as many ahead as shared memory has stages. Barriers say what is there, what is spent, and whose
turn it is.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array

from ringjax._kernels.operands import KEYS, KernelCall, KernelOperand, Sizes, flatten
from ringjax._kernels.tile_list import find_stretches, is_whole_step, passing_in

# With what is in newer versions of jax alone.
plgpu: Any = mosaic_gpu

TILE_ROWS = 128
OWN_ROWS = 64  # of a warpgroup, of the tile that stays
_COMPUTING = 2  # warpgroups; the next one copies
_STAGES = 2
_LINE_BYTES = 128
# The registers of each thread of a warpgroup, of the 65536 that there are.
_REGISTERS, _REGISTERS_TO_COPY = 240, 24


class Barriers(NamedTuple):
    """What warpgroups wait for; of the two operands that come by, one for each stage.

    `stays`: the tile that stays is there. `passes`: a tile of an operand is there, and with the first one the rows of
    numbers. `spent`: both have read it. `turn`: the other one has got as far.
    """

    stays: Any
    passes: tuple[Any, Any]
    spent: tuple[Any, Any]
    turn: Any


class GpuStep(NamedTuple):
    """What a kernel is given in a step: trees of references, as the arrays were, each to what of it meets.

    Those of the tile that stays are to the warpgroup's own rows. A kernel waits for each of the two operands that come
    by, and releases it when it has read it for the last time: with the first one, also the rows of numbers.
    """

    given: tuple[Any, ...]
    is_whole: Any
    slot: Any
    barriers: Barriers

    def wait(self, number: int) -> None:
        """Waits until an operand is there."""
        plgpu.barrier_wait(self.barriers.passes[number].at[self.slot])

    def release(self, number: int) -> None:
        """Lets an operand be replaced."""
        plgpu.barrier_arrive(self.barriers.spent[number].at[self.slot])

    def arrive(self) -> None:
        """Lets the other warpgroup take its turn."""
        plgpu.barrier_arrive(self.barriers.turn)

    def take_turn(self) -> None:
        """Waits for the turn; the other one has to `arrive` as often as this one."""
        plgpu.barrier_wait(self.barriers.turn)


@runtime_checkable
class GpuKernel(Protocol):
    """What a warpgroup computes: from sums that it starts, step by step, to results.

    One that `takes_turns` uses the matrix unit while the other warpgroup does not.
    """

    takes_turns: bool

    def start(self, before: tuple[Any, ...]) -> Any:
        """Returns the sums of no step, given references to what is added to, if there is something."""
        ...

    def step(self, step: GpuStep, sums: Any) -> Any:
        """Returns the sums with those of a step."""
        ...

    def finish(self, sums: Any, before: tuple[Any, ...]) -> tuple[Array, ...]:
        """Returns the results."""
        ...


class _Lists(NamedTuple):
    """References to the tiles that stay, with their stretches, and to the steps."""

    stays: Any
    starts: Any
    stops: Any
    steps: Any


class _Block(NamedTuple):
    """What a block of threads knows: of each operand the reference, and for those that are copied the room."""

    call: KernelCall
    leaves: list[KernelOperand]
    results: list[KernelOperand]
    tree: Any
    lists: _Lists
    refs: list[Any]
    outs: list[Any]
    rooms: list[Any]
    barriers: Barriers
    head: Any
    stays: Any
    start: Any
    num_steps: Any

    @property
    def sizes(self) -> Sizes:
        """The sizes of the call."""
        return self.call.sizes

    def entry(self, step: Any) -> tuple[Any, Any]:
        """Returns the entry of the list that a step takes, and which of the heads that share a tile of keys."""
        groups = np.int32(self.sizes.groups if self.sizes.stays == KEYS else 1)
        if groups == 1:
            return self.start + step, 0
        return self.start + jax.lax.div(step, groups), jax.lax.rem(step, groups)

    def is_whole(self, step: Any) -> Any:
        """Whether no mask cuts what meets in a step."""
        return is_whole_step(self.lists.steps[self.entry(step)[0]])

    def copy(self, number: int, entry: Any, group: Any, room: Any, barrier: Any) -> None:
        """Copies a tile of an operand."""
        leaf, ref = self.leaves[number], self.refs[number]
        place = self.sizes.place(self.head, group, self.stays, passing_in(self.lists.steps[entry]))
        rows = pl.ds(place.tiles[leaf.side] * TILE_ROWS, TILE_ROWS)
        plgpu.copy_gmem_to_smem(ref.at[leaf.at(place, rows)], room, barrier)


def launch(call: KernelCall) -> list[Array]:
    """Runs a kernel; `call.kernel` is a `GpuKernel`."""
    (leaves, tree), outs = flatten(call.operands()), call.outs()
    stretches = find_stretches(call.visits)
    scalars, num_tiles = _Lists(*(array.reshape(-1) for array in stretches)), stretches.tile.shape[1]
    arrays = [leaf.array for leaf in leaves]

    def body(*refs: Any) -> None:
        block, warpgroup = _enter(call, leaves, outs, tree, num_tiles, refs), jax.lax.axis_index("warpgroup")
        pl.when(warpgroup < _COMPUTING)(lambda: _compute(block, warpgroup))
        pl.when(warpgroup == _COMPUTING)(lambda: _copy(block))

    body.__name__ = f"ringjax_{call.name}"
    run = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(out.array.shape, out.array.dtype) for out in outs],
        scratch_types=[_make_rooms(call, leaves), _make_barriers(call, leaves)],
        grid=(call.sizes.heads[call.stays] * num_tiles,),
        grid_names=("tile",),
        num_threads=_COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(**call.cost(arrays)),
        interpret=call.interpret or None,
    )
    # What comes out of a kernel is not said to vary along axes of the mesh.
    varying = tuple(call.varying.varying)
    return call.take_back([jax.lax.pcast(array, varying, to="varying") for array in run(*scalars, *arrays)])


def _enter(
    call: KernelCall,
    leaves: list[KernelOperand],
    results: list[KernelOperand],
    tree: Any,
    num_tiles: int,
    refs: tuple[Any, ...],
) -> _Block:
    """Returns what a block of threads knows, which begins: the head and the tile that are its own, and its stretch."""
    lists, refs = _Lists(*refs[: len(_Lists._fields)]), refs[len(_Lists._fields) :]
    index, per_head, sizes = jax.lax.axis_index("tile"), np.int32(num_tiles), call.sizes
    head, number = jax.lax.div(index, per_head), jax.lax.rem(index, per_head)
    stretch = jax.lax.div(head, np.int32(sizes.heads[call.stays] // sizes.lists)) * per_head + number
    start, groups = lists.starts[stretch], sizes.groups if call.stays == KEYS else 1
    *outs, rooms, barriers = refs[len(leaves) :]
    return _Block(
        call,
        leaves,
        results,
        tree,
        lists,
        refs=list(refs[: len(leaves)]),
        outs=outs,
        rooms=list(rooms),
        barriers=Barriers(*barriers),
        head=head,
        stays=lists.stays[stretch],
        start=start,
        num_steps=(lists.stops[stretch] - start) * groups,
    )


def _staged(call: KernelCall, leaves: list[KernelOperand], stays: bool) -> list[int]:
    """Returns the numbers of the operands that are copied, of one side; sums are not."""
    num_sums = sum(isinstance(result, jax.Array) for result in call.results)
    copied = leaves[: len(leaves) - num_sums]
    return [number for number, leaf in enumerate(copied) if (leaf.side == call.stays) == stays]


def _passes(call: KernelCall, leaves: list[KernelOperand]) -> tuple[list[int], list[int]]:
    """Returns the operands that come by: the first one, with the rows of numbers, and the second."""
    numbers = _staged(call, leaves, stays=False)
    first, second = (number for number in numbers if not leaves[number].is_row)
    return [first, *(number for number in numbers if leaves[number].is_row)], [second]


def _make_rooms(call: KernelCall, leaves: list[KernelOperand]) -> list[Any]:
    rooms = []
    for stays, stages in ((True, ()), (False, (_STAGES,))):
        for number in _staged(call, leaves, stays):
            array = leaves[number].array
            is_row = leaves[number].is_row
            shape = (*stages, TILE_ROWS) if is_row else (*stages, TILE_ROWS, array.shape[-1])
            # As the matrix unit wants its operands: a line of 128 bytes of each of eight rows.
            lines = plgpu.TilingTransform((8, _LINE_BYTES // array.dtype.itemsize)), plgpu.SwizzleTransform(_LINE_BYTES)
            transforms = () if is_row or call.interpret else lines
            rooms.append((number, plgpu.SMEM(shape, array.dtype, transforms=transforms)))
    return [room for _, room in sorted(rooms, key=lambda pair: pair[0])]


def _make_barriers(call: KernelCall, leaves: list[KernelOperand]) -> Barriers:
    barrier = lambda arrivals: plgpu.Barrier(num_arrivals=arrivals, num_barriers=_STAGES)
    first, second = _passes(call, leaves)
    spent = barrier(_COMPUTING)
    stays = plgpu.Barrier(num_arrivals=len(_staged(call, leaves, stays=True)))
    turn = plgpu.Barrier(num_arrivals=_COMPUTING)
    return Barriers(stays, (barrier(len(first)), barrier(len(second))), (spent, spent), turn)


def _copy(block: _Block) -> None:
    """What the warpgroup does that copies."""
    plgpu.set_max_registers(_REGISTERS_TO_COPY, action="decrease")
    entry, group = block.entry(np.int32(0))
    for number in _staged(block.call, block.leaves, stays=True):
        block.copy(number, entry, group, block.rooms[number], block.barriers.stays)

    @pl.loop(np.int32(0), block.num_steps)
    def _(step: Any) -> None:
        slot = jax.lax.rem(step, np.int32(_STAGES))
        entry, group = block.entry(step)
        barriers = block.barriers
        for numbers, here, spent in zip(
            _passes(block.call, block.leaves), barriers.passes, barriers.spent, strict=True
        ):
            pl.when(step >= _STAGES)(lambda spent=spent: plgpu.barrier_wait(spent.at[slot]))
            for number in numbers:
                block.copy(number, entry, group, block.rooms[number].at[slot], here.at[slot])


def _compute(block: _Block, warpgroup: Any) -> None:
    """What a warpgroup does that computes."""
    plgpu.set_max_registers(_REGISTERS, action="increase")
    kernel: GpuKernel = block.call.kernel
    own = pl.ds(warpgroup * OWN_ROWS, OWN_ROWS)
    rows = pl.ds(block.stays * TILE_ROWS + warpgroup * OWN_ROWS, OWN_ROWS)
    place = block.sizes.place(block.head, 0, block.stays, 0)
    outs = [ref.at[out.at(place, rows)] for out, ref in zip(block.results, block.outs, strict=True)]
    sums = zip(block.leaves[len(block.rooms) :], block.refs[len(block.rooms) :], strict=True)
    before = tuple(ref.at[leaf.at(place, rows)] for leaf, ref in sums)
    turn = lambda: plgpu.barrier_arrive_and_wait(block.barriers.turn)
    plgpu.barrier_wait(block.barriers.stays)

    def take(step: Any, sums: Any) -> Any:
        slot = jax.lax.rem(step, np.int32(_STAGES))
        stays = set(_staged(block.call, block.leaves, stays=True))
        refs = [room.at[own] if number in stays else room.at[slot] for number, room in enumerate(block.rooms)]
        given = block.tree.unflatten([*refs, *before])
        return kernel.step(GpuStep(given, block.is_whole(step), slot, block.barriers), sums)

    if kernel.takes_turns:
        pl.when(warpgroup == 1)(turn)
    sums = jax.lax.fori_loop(np.int32(0), block.num_steps, take, kernel.start(before))
    if kernel.takes_turns:
        pl.when(warpgroup == 0)(turn)
    for out, result in zip(outs, kernel.finish(sums, before), strict=True):
        # Unoptimized: numbers of 16 bits fill but half of what memory takes at once.
        plgpu.store(out, result.astype(out.dtype), optimized=False)
