"""Streams of rows with the sums of their gradients: around rings, from group to group, and to neighbors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ringjax._kernels.attention_step import Tiles
from ringjax._mesh.order import after, unroll, wait
from ringjax._parallel.layout import Layout, Operand, Task
from ringjax._schedule.schedule import Rotation


def _add(some: Any, others: Any) -> Any:
    return jax.tree.map(jnp.add, some, others)


class Part(NamedTuple):
    """The gradient of some rows, and the hops back to the shard that keeps them."""

    layout: Layout
    grad: Any
    hops: int = 0


class Streamed(NamedTuple):
    """The gradients of the stationary operand, and those of the streamed operand, part by part."""

    resident: Any
    parts: list[Part]


def travel(
    task: Task,
    operand: Operand,
    tiles: Tiles,
    rotations: tuple[Rotation, ...],
    visit: Callable[..., Any],
    visit_own: Callable[..., Any],
    resident_grad: Any,
) -> Streamed:
    """Streams an operand through its rotations, and returns all gradients.

    `visit(resident_grad, operand, tiles, hops, direction)` computes one ring step. It returns the step's contribution
    to the gradient of the streamed operand, and the gradient of the stationary operand with the step added. In a closed
    ring `visit_own` computes the step of a shard's own rows, and adds to earlier sums of both gradients; an open ring
    does not use it. A shard's contribution to the gradient of its own rows is not sent, so the gradient takes as many
    permutes as the operand. Each permute is issued before the computation of a step and not needed until after it, so
    that the two can overlap. If there is a halo, a shard therefore computes with its own rows in two parts: one while
    the halo arrives, and one while its gradient returns.
    """
    rotating = [rotation for rotation in rotations if rotation.steps]
    if task.schedule.is_closed:
        own_grad, resident_grad = go_around(task, operand, tiles, rotating, visit, visit_own, resident_grad)
        return Streamed(resident_grad, [Part(operand.layout, own_grad)])
    halos = [task.send(operand, rotation) for rotation in rotations]
    *first, last = (operand.of_part(side) for side in operand.side.in_two_parts())
    parts = []

    def visit_part(part: Operand, tiles: Tiles, resident_grad: Any, hops: int = 0, direction: int = 1) -> Any:
        grad, resident_grad = visit(resident_grad, part, tiles, abs(hops), direction)
        parts.append(Part(part.layout, grad, -hops))
        return resident_grad

    for part in first:
        resident_grad = visit_part(part, task.take(part), resident_grad)
    earlier: Any = [halo.arrays for halo in halos]
    for rotation in rotating:
        # An ordering barrier with the part that is computed meanwhile, as for halos.
        arriving = task.collectives.hop(after(tiles, earlier), rotation.direction), resident_grad
        arrived, resident_grad = jax.lax.optimization_barrier(arriving)
        grad, resident_grad = _rotate(_hopping(task), operand, rotation, arrived, visit, resident_grad)
        parts.append(Part(operand.layout, grad))
        earlier = grad
    for rotation, halo in zip(rotations, halos, strict=True):
        arrived, resident_grad = halo.behind(resident_grad)
        resident_grad = visit_part(halo.operand, arrived, resident_grad, rotation.halo_hops, rotation.direction)
    resident_grad = visit_part(last, task.take(last), resident_grad)
    return Streamed(resident_grad, parts)


def go_around(
    task: Task,
    operand: Operand,
    tiles: Tiles,
    rotations: list[Rotation],
    visit: Callable[..., Any],
    visit_own: Callable[..., Any],
    resident: Any,
    add: Callable[[Any, Any], Any] = _add,
) -> tuple[Any, Any]:
    """Streams an operand around a closed ring, and returns the gradients of the streamed and the stationary operand.

    `visit` may return other results in place of the streamed operand's gradient; then `add` adds them.
    """

    def visit_group(
        resident: Any, operand: Operand, tiles: Tiles, crossings: Any, direction: int, visit_first: Any = visit
    ) -> tuple[Any, Any]:
        before = crossings * task.schedule.inner_size

        def visit_later(resident: Any, operand: Operand, tiles: Tiles, hops: Any, direction: int) -> Any:
            return visit(resident, operand, tiles, before + hops, direction)

        if task.schedule.is_nested:
            # Otherwise XLA sends the first rows of several groups at once, before it computes, and holds them all.
            tiles = wait(tiles, resident)
        own_sums, resident = visit_first(resident, operand, tiles, before, direction)
        for rotation in rotations:
            around, _ = task.schedule.turns(rotation)
            arriving = task.collectives.hop(tiles, direction)
            moves = _hopping(task, add)
            sums, resident = _rotate(moves, operand, around, arriving, visit_later, resident)
            own_sums = add(own_sums, sums)
        return own_sums, resident

    if not task.schedule.is_nested:
        return visit_group(resident, operand, tiles, 0, 1, visit_own)
    _, across = task.schedule.turns(*rotations)
    arriving = task.collectives.cross(tiles)
    own_sums, resident = visit_group(resident, operand, after(tiles, arriving), 0, 1, visit_own)
    arriving = after(arriving, own_sums)
    sums, resident = _rotate(_crossing(task, add), operand, across, arriving, visit_group, resident)
    return add(own_sums, sums), resident


class _Moves(NamedTuple):
    """How tiles, and the sums of their gradients, move between two ring steps, and how sums are added.

    `order` keeps a visit after the moves that are issued before it. `tie` returns tiles and sums, tied to each other.
    """

    hop: Callable[..., Any]
    rotate: Callable[..., Any]
    order: Callable[[Any, Any], Any]
    tie: Callable[[Any, Any], tuple[Any, Any]]
    platform: str | None
    add: Callable[[Any, Any], Any]


def _hopping(task: Task, add: Callable[[Any, Any], Any] = _add) -> _Moves:
    # The barrier ties the tiles to the step that they overlap, as a loop's carry does. Otherwise XLA may send them only
    # after it, and wait. Around a closed ring it sends them in time, and without the barrier it may narrow the sums.
    barrier = lambda tiles, sums: jax.lax.optimization_barrier((tiles, sums))
    tie = (lambda tiles, sums: (task.read_behind(tiles, sums), sums)) if task.schedule.is_closed else barrier
    # Sums wrap around the ends of an open ring, unlike their tiles: otherwise they would not return.
    hop, rotate = task.collectives.hop, task.collectives.rotate
    return _Moves(hop, rotate, lambda tiles, _: tiles, tie, task.implementation.platform, add)


def _crossing(task: Task, add: Callable[[Any, Any], Any]) -> _Moves:
    # A visit has permutes of its own, those around a group. If sums did not depend on the tiles that crossed before
    # them, XLA would combine both in one message, which neither overlaps.
    cross = task.collectives.cross
    return _Moves(cross, cross, after, lambda tiles, sums: (tiles, wait(sums, tiles)), None, add)


def _rotate(
    moves: _Moves, operand: Operand, rotation: Rotation, arrays: Tiles, visit: Callable[..., Any], resident: Any
) -> tuple[Any, Any]:
    """Rotates tiles that have made the first hop, with the sums of their gradients, and sends the sums back."""
    size, direction = rotation.steps, rotation.direction

    def rotate_and_visit(carry: Any, hops: Any) -> tuple[Any, None]:
        arrays, sums, resident = carry
        arriving, sums = moves.hop(arrays, direction), moves.rotate(sums, direction)
        arrays = moves.order(arrays, (arriving, sums))
        addend, resident = visit(resident, operand, arrays, hops, direction)
        return (*moves.tie(arriving, moves.add(sums, addend)), resident), None

    arriving = moves.hop(arrays, direction) if size > 1 else ()
    sums, resident = visit(resident, operand, moves.order(arrays, arriving), 1, direction)
    if size > 1:
        carry, hops = (*moves.tie(arriving, sums), resident), jnp.arange(2, size, dtype=jnp.uint32)
        num_steps = unroll(hops, moves.platform)
        (arrays, sums, resident), _ = jax.lax.scan(rotate_and_visit, carry, hops, unroll=num_steps)
        sums = moves.rotate(sums, direction)
        addend, resident = visit(resident, operand, moves.order(arrays, sums), size, direction)
        sums = moves.add(sums, addend)
    return moves.rotate(sums, -direction * size), resident
