"""The strategy "ring": rows travel to the shards that see them, one scan for each direction."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ringjax._cost import RowBytes, queries_travel
from ringjax._layout import Layout, Operand, Task
from ringjax._meeting import Meeting, Tiles
from ringjax._order import after
from ringjax._schedule import BranchSchedule, Leg


class Addends(NamedTuple):
    """What one branch adds to gradients: of its queries where computed, of its keys where kept.

    The `halos` are rows of some layout, for the gradient of that number.
    """

    query: Array
    key: Array
    value: Array
    halos: tuple[tuple[int, Layout, Array], ...] = ()


def forward(task: Task) -> Any:
    """Returns the attention of one branch, where it is computed."""
    branch, implementation, plan = task.branch, task.implementation, task.plan
    queries = task.take_swapped(task.queries)
    own = implementation.see_queries(task.slots(task.queries, queries), task.noise)

    def attend(partial: Any, operand: Operand, keys: Tiles, hops: Any = 0, direction: int = 1) -> Any:
        meeting = _meet(task, own, implementation.see_keys(task.slots(operand, keys, hops, direction)), hops, direction)
        return implementation.forward(queries.arrays, keys.arrays, meeting, plan.weighting, partial)

    # What goes furthest comes first: it is on its way while a shard computes with its own keys.
    halos = [task.send(task.keys, leg) for leg in branch.key_legs if leg.halo]
    keys = task.take_swapped(task.keys)
    partial = implementation.start(queries.arrays, keys.arrays.value)
    legs = [leg for leg in branch.key_legs if leg.rotations]
    if not legs:
        partial = attend(partial, task.keys, keys)
    for number, leg in enumerate(legs):

        def rotate_and_attend(carry: Any, hops: Array, direction: int = leg.direction) -> tuple[Any, None]:
            keys, partial = carry
            arriving = plan.hop(branch, keys, direction)
            return (arriving, attend(partial, task.keys, keys, hops, direction)), None

        # The first leg begins with a shard's own keys.
        keys_of_leg = after(keys, partial if number else halos)
        keys_of_leg = plan.hop(branch, keys_of_leg, leg.direction) if number else keys_of_leg
        hops = jnp.arange(min(number, 1), leg.rotations, dtype=jnp.uint32)
        (keys_of_leg, partial), _ = jax.lax.scan(rotate_and_attend, (keys_of_leg, partial), hops)
        partial = attend(partial, task.keys, keys_of_leg, leg.rotations, leg.direction)
    for leg, halo in zip(branch.key_legs, halos, strict=False):
        partial = attend(partial, task.keys.of_halo(leg), halo, leg.rotations + 1, leg.direction)
    return partial


def backward(task: Task) -> Addends:
    """Returns what one branch adds to the gradients of its queries and of its keys."""
    branch, implementation, plan = task.branch, task.implementation, task.plan
    queries, keys = task.take_swapped(task.queries), task.take_swapped(task.keys)
    see_queries = lambda *where: implementation.see_queries(task.slots(*where), task.noise)
    see_keys = lambda *where: implementation.see_keys(task.slots(*where))
    grads = implementation.start_gradients(queries.arrays, keys.arrays)
    do_queries_travel = queries_travel(branch, _row_bytes(queries, keys, grads, branch))
    own = see_keys(task.keys, keys) if do_queries_travel else see_queries(task.queries, queries)

    def visit_keys(keys_grad: Any, operand: Operand, queries: Tiles, hops: Any, direction: int) -> tuple[Any, Any]:
        grads = implementation.start_gradients(queries.arrays, keys.arrays, hops, key=keys_grad[0], value=keys_grad[1])
        meeting = _meet(task, see_queries(operand, queries, hops, direction), own, hops, direction)
        grads = implementation.backward(queries.arrays, keys.arrays, meeting, plan.weighting, grads)
        return grads.query, (grads.key, grads.value)

    def visit_queries(query_grad: Array, operand: Operand, keys: Tiles, hops: Any, direction: int) -> tuple[Any, Any]:
        grads = implementation.start_gradients(queries.arrays, keys.arrays, hops, query=query_grad)
        meeting = _meet(task, own, see_keys(operand, keys, hops, direction), hops, direction)
        grads = implementation.backward(queries.arrays, keys.arrays, meeting, plan.weighting, grads)
        return (grads.key, grads.value), grads.query

    if do_queries_travel:
        sent = _travel(task, task.queries, queries, branch.query_legs, visit_keys, tuple(grads[1:]))
        grads = type(grads)(sent.own, *sent.resident)
        halos = [(leg, grads._replace(query=halo)) for leg, halo in sent.halos]
    else:
        sent = _travel(task, task.keys, keys, branch.key_legs, visit_queries, grads.query)
        grads = type(grads)(sent.resident, *sent.own)
        halos = [(leg, grads._replace(key=halo[0], value=halo[1])) for leg, halo in sent.halos]
    query_grad, *keys_grad = implementation.finish_gradients(grads, plan.weighting)
    returned = []
    for leg, halo in halos:
        finished = implementation.finish_gradients(halo, plan.weighting)
        operands = [(0, task.queries)] if do_queries_travel else [(1, task.keys), (2, task.keys)]
        for number, operand in operands:
            layout = operand.layout.of_halo(leg)
            rows = plan.hop(branch, layout.take_back(finished[number]), -leg.halo_hops)
            returned.append((number, layout, rows))
    key_grad, value_grad = plan.swap_back(branch, tuple(keys_grad))
    return Addends(query_grad, key_grad, value_grad, tuple(returned))


def _meet(task: Task, queries: Any, keys: Any, hops: Any, direction: int) -> Meeting:
    shard = task.queries.layout.rows.shard.astype(jnp.uint32)
    return Meeting(task.branch, queries, keys, task.branch.is_new(shard, hops, direction))


def _row_bytes(queries: Tiles, keys: Tiles, grads: Any, branch: BranchSchedule) -> RowBytes:
    count = lambda tree: sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))
    return RowBytes(
        queries=count(queries) // branch.queries.num_slots,
        keys=count(keys) // branch.keys.num_slots,
        query_grad=count(grads.query) // branch.queries.num_slots,
        keys_grad=count(tuple(grads[1:])) // branch.keys.num_slots,
    )


class _Sent(NamedTuple):
    """The gradients of arrays that stayed, of those that travelled, and of the halos where these arrived."""

    resident: Any
    own: Any
    halos: list[tuple[Leg, Any]]


def _travel(
    task: Task, operand: Operand, tiles: Tiles, legs: tuple[Leg, ...], visit: Callable[..., Any], resident_grad: Any
) -> _Sent:
    """Sends an operand's rows on their ways, and returns all gradients.

    `visit(resident_grad, operand, tiles, hops, direction)` gives what one meeting contributes to the gradient of the
    travelling arrays, and adds the rest to the other. What a shard contributes to the gradient of its own arrays stays
    there: as many permutes of the gradient as of the arrays. Each is issued before the computation of a step and not
    needed until after it, so that the two can overlap.
    """
    arrived = [(leg, task.send(operand, leg)) for leg in legs if leg.halo]
    own_grad, resident_grad = visit(resident_grad, operand, tiles, 0, 1)
    earlier = [halo for _, halo in arrived]
    for leg in legs:
        if leg.rotations:
            visit_own = functools.partial(visit, direction=leg.direction)
            grad, resident_grad = _rotate(task, operand, leg, after(tiles, earlier), visit_own, resident_grad)
            own_grad = earlier = _add(own_grad, grad)
    halos = []
    for leg, halo in arrived:
        grad, resident_grad = visit(resident_grad, operand.of_halo(leg), halo, leg.rotations + 1, leg.direction)
        halos.append((leg, grad))
    return _Sent(resident_grad, own_grad, halos)


def _rotate(
    task: Task, operand: Operand, leg: Leg, own: Tiles, visit: Callable[..., Any], resident_grad: Any
) -> tuple[Any, Any]:
    """Rotates tiles and the sums of their gradients, and brings these back."""
    size, direction = leg.rotations, leg.direction
    hop = functools.partial(task.plan.hop, task.branch, hops=direction)
    # Sums go round the ends, where their tiles do not: else they would not come back.
    rotate = functools.partial(task.plan.rotate, task.branch)

    def rotate_and_visit(carry: Any, hops: Any) -> tuple[Any, None]:
        arrays, grad, resident_grad = carry
        arriving, grad = hop(arrays), rotate(grad, direction)
        addend, resident_grad = visit(resident_grad, operand, arrays, hops)
        return (arriving, _add(grad, addend), resident_grad), None

    arrays = hop(own)
    grad, resident_grad = visit(resident_grad, operand, arrays, 1)
    if size > 1:
        carry = (hop(arrays), grad, resident_grad)
        carry, _ = jax.lax.scan(rotate_and_visit, carry, jnp.arange(2, size, dtype=jnp.uint32))
        arrays, grad, resident_grad = carry
        addend, resident_grad = visit(resident_grad, operand, arrays, size)
        grad = _add(rotate(grad, direction), addend)
    return rotate(grad, -direction * size), resident_grad


def _add(some: Any, others: Any) -> Any:
    return jax.tree.map(jnp.add, some, others)
