"""The strategy "ring": rows travel to the shards that see them, one scan for each direction."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ringjax._kernels.attention_step import AttentionStep, Tiles
from ringjax._kernels.interface import width_axis
from ringjax._kernels.softmax import merge_rows
from ringjax._mesh.order import after, unroll
from ringjax._parallel.layout import Layout, Operand, Task
from ringjax._parallel.streams import Part, go_around, travel
from ringjax._schedule.schedule import Rotation


class Addends(NamedTuple):
    """The gradients of one branch: of queries on the shards that compute them, of keys on those that keep them.

    `parts` are gradients of some rows of the streamed operand, each with the index of its argument and its layout. In
    an open ring that operand has no other gradients.
    """

    query: Array | None
    key: Array | None
    value: Array | None
    parts: tuple[tuple[int, Layout, Array], ...] = ()


def forward(task: Task) -> Any:
    """Returns the attention of one branch, on the shards that compute it, as the implementation's `finish` takes it.

    If queries went around, it is finished.
    """
    schedule, implementation = task.schedule, task.implementation
    if schedule.rotates_outputs:
        return _forward_of_queries(task)
    queries = task.take_dealt(task.queries)
    own = implementation.see(task.padded(task.queries, queries), task.counters)

    def attend(
        operand: Operand, direction: int, carry: Any, hops: Any, send: Any = lambda keys: keys
    ) -> tuple[Any, None]:
        # One ring step, as a scan takes it. Keys are sent on before the step, so that the two overlap.
        keys, partial = carry
        arriving = send(keys)
        step = _meet(task, own, implementation.see(task.padded(operand, keys, hops, direction)), hops, direction)
        partial = implementation.forward(queries.arrays, keys.arrays, step, task.plan.weighting, partial)
        return (task.read_behind(arriving, partial), partial), None

    # Halos go furthest, so they are sent first, and are in transit while a shard computes with its own keys.
    with_halos = [rotation for rotation in schedule.key_rotations if rotation.halo]
    halos = [task.send(task.keys, rotation) for rotation in with_halos]
    keys = task.take_dealt(task.keys)
    partial = task.start(queries, keys)
    rotating = [rotation for rotation in schedule.key_rotations if rotation.steps]
    if not rotating:
        (_, partial), _ = attend(task.keys, 1, (keys, partial), 0)
    for number, rotation in enumerate(rotating):
        arriving = after(keys, partial if number else [halo.arrays for halo in halos])
        if schedule.is_nested:
            partial = _attend_across(task, rotation, attend, (arriving, partial))
        else:  # the first rotation begins with a shard's own keys
            partial = _attend_around(task, rotation, attend, (arriving, partial), first_hop=min(number, 1))
    for rotation, halo in zip(with_halos, halos, strict=True):
        tiles, partial = halo.behind(partial)
        (_, partial), _ = attend(halo.operand, rotation.direction, (tiles, partial), rotation.steps + 1)
    return partial


def _forward_of_queries(task: Task) -> tuple[Array, ...]:
    """Returns the finished attention of one branch, whose queries go around with their results so far."""
    implementation, task = task.implementation, task._replace(is_branch_final=False)  # sums have their own dtype
    queries, keys = task.take_dealt(task.queries), task.take_dealt(task.keys)
    own = implementation.see(task.padded(task.keys, keys))

    def visit(resident: Any, operand: Operand, queries: Tiles, hops: Any, direction: int) -> tuple[Any, Any]:
        seen = implementation.see(task.padded(operand, queries, hops, direction), task.counters)
        step, partial = _meet(task, seen, own, hops, direction), task.start(queries, keys)
        partial = implementation.forward(queries.arrays, keys.arrays, step, task.plan.weighting, partial)
        return implementation.finish(partial)[: 2 + task.plan.has_maximum], resident

    def add(some: tuple[Array, ...], others: tuple[Array, ...]) -> tuple[Array, ...]:
        return merge_rows([some, others], width_axis(implementation.rows_axis))

    rotations = list(task.schedule.query_rotations)
    results, _ = go_around(task, task.queries, queries, rotations, visit, visit, (), add)
    return results


def _attend_around(
    task: Task, rotation: Rotation, attend: Callable[..., Any], carry: Any, first_hop: int = 0, before: Any = 0
) -> Any:
    """Adds the attention on keys that rotate, from their hop number `first_hop` on.

    If they have crossed groups, they have already made `before` hops.
    """
    hop = functools.partial(task.collectives.hop, hops=rotation.direction)
    attend = functools.partial(attend, task.keys, rotation.direction)
    keys, partial = carry
    hops = before + jnp.arange(first_hop, rotation.steps, dtype=jnp.uint32)
    num_steps = unroll(hops, task.implementation.platform)
    carry = hop(keys) if first_hop else keys, partial
    carry, _ = jax.lax.scan(functools.partial(attend, send=hop), carry, hops, unroll=num_steps)
    (_, partial), _ = attend(carry, before + rotation.steps)
    return partial


def _attend_across(task: Task, rotation: Rotation, attend: Callable[..., Any], carry: Any) -> Any:
    """Adds the attention on keys that go around each group, and cross to the next group meanwhile."""
    around, across = task.schedule.turns(rotation)
    attend_around = functools.partial(_attend_around, task, around, attend)

    def cross_and_attend(carry: Any, crossings: Array) -> tuple[Any, None]:
        keys, partial = carry
        arriving = task.collectives.cross(keys)
        before = crossings * task.schedule.inner_size
        return (arriving, attend_around((after(keys, arriving), partial), before=before)), None

    carry, _ = jax.lax.scan(cross_and_attend, carry, jnp.arange(across.steps, dtype=jnp.uint32))
    return attend_around(carry, before=across.steps * task.schedule.inner_size)


def backward(task: Task) -> Addends:
    """Returns the gradients of one branch."""
    schedule, implementation, plan = task.schedule, task.implementation, task.plan
    queries, keys = task.take_dealt(task.queries), task.take_dealt(task.keys)
    see_queries = lambda *where: implementation.see(task.padded(*where), task.counters)
    see_keys = lambda *where: implementation.see(task.padded(*where))
    of_earlier = task.before_of("query", "key", "value")
    grads = implementation.start_gradients(queries.arrays, keys.arrays, task.zeros(), **of_earlier)
    own = see_keys(task.keys, keys) if schedule.rotates_queries else see_queries(task.queries, queries)

    def visit_keys(
        keys_grad: Any, operand: Operand, queries: Tiles, hops: Any, direction: int, **before: Array
    ) -> tuple[Any, Any]:
        zeros, (key_grad, value_grad) = task.zeros(hops, keys_grad), keys_grad
        given = {"key": key_grad, "value": value_grad, **before}
        grads = implementation.start_gradients(queries.arrays, keys.arrays, zeros, **given)
        step = _meet(task, see_queries(operand, queries, hops, direction), own, hops, direction)
        grads = implementation.backward(queries.arrays, keys.arrays, step, plan.weighting, grads)
        return grads.query, (grads.key, grads.value)

    def visit_queries(
        query_grad: Array | None, operand: Operand, keys: Tiles, hops: Any, direction: int, **before: Array
    ) -> tuple[Any, Any]:
        zeros = task.zeros(hops, (query_grad,))
        grads = implementation.start_gradients(queries.arrays, keys.arrays, zeros, query=query_grad, **before)
        step = _meet(task, own, see_keys(operand, keys, hops, direction), hops, direction)
        grads = implementation.backward(queries.arrays, keys.arrays, step, plan.weighting, grads)
        return (grads.key, grads.value), grads.query

    if schedule.rotates_queries:
        visit_own = functools.partial(visit_keys, **task.before_of("query"))
        sent = travel(task, task.queries, queries, schedule.query_rotations, visit_keys, visit_own, tuple(grads[1:]))
        with_sent = lambda grad: grads._replace(query=grad, key=sent.resident[0], value=sent.resident[1])
        numbers = (0,)
    else:
        visit_own = functools.partial(visit_queries, **task.before_of("key", "value"))
        sent = travel(task, task.keys, keys, schedule.key_rotations, visit_queries, visit_own, grads.query)
        with_sent = lambda grad: grads._replace(query=sent.resident, key=grad[0], value=grad[1])
        numbers = 1, 2
    finish = lambda grad: implementation.finish_gradients(with_sent(grad), plan.weighting)
    addends = finish(sent.parts[0].grad)
    if schedule.is_closed:
        keys_grad = task.narrow(addends[1:], task.keys.tokens)
        return Addends(addends[0], *task.collectives.deal_back(keys_grad, task.keys.side))
    parts = tuple(one for part in sent.parts for one in _hop_back(task, part, finish(part.grad), numbers))
    query, key, value = (None if number in numbers else addend for number, addend in enumerate(addends))
    return Addends(query, key, value, parts)


def _hop_back(
    task: Task, part: Part, grads: Sequence[Array], numbers: Sequence[int]
) -> list[tuple[int, Layout, Array]]:
    """Returns the gradients of some streamed rows on the shard that keeps them, each with its number and layout."""
    rows = tuple(part.layout.take_back(grads[number]) for number in numbers)
    rows = task.collectives.hop_rows(rows, part.hops).take_apart() if part.hops else rows
    return [(number, part.layout, array) for number, array in zip(numbers, rows, strict=True)]


def _meet(task: Task, queries: Any, keys: Any, hops: Any, direction: int) -> AttentionStep:
    shard = task.queries.layout.rows.shard.astype(jnp.uint32)
    return task.meet(queries, keys, task.schedule.is_new(shard, hops, direction), hops)
