"""The strategy "all_gather", and few queries: each shard gathers the keys, or the queries, of others, then computes."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ringjax._kernels.attention_step import AttentionStep, PaddedRows, Tiles
from ringjax._parallel.layout import Operand, Task
from ringjax._parallel.ring import Addends


def forward(task: Task) -> Any:
    """Returns the attention of one branch, on the shards that compute it."""
    queries, keys, step = _meet(task)
    partial = task.start(queries, keys)
    return task.implementation.forward(queries.arrays, keys.arrays, step, task.plan.weighting, partial)


def backward(task: Task) -> Addends:
    """Returns a branch's gradients: of queries on the shards that compute them, of keys on those that keep them."""
    implementation, plan = task.implementation, task.plan
    queries, keys, step = _meet(task)
    grads = implementation.start_gradients(queries.arrays, keys.arrays, task.zeros(), **task.before_of("query"))
    grads = implementation.backward(queries.arrays, keys.arrays, step, plan.weighting, grads)
    query_grad, *keys_grad = implementation.finish_gradients(grads, plan.weighting)
    key_grad, value_grad = task.collectives.scatter(tuple(keys_grad), task.keys.side)
    if task.before is not None:
        key_grad, value_grad = map(jnp.add, task.before[1:], (key_grad, value_grad))
    return Addends(query_grad, key_grad, value_grad)


def _meet(task: Task) -> tuple[Tiles, Tiles, AttentionStep]:
    implementation = task.implementation
    queries, keys = task.take_dealt(task.queries), task.collectives.gather(task.take(task.keys), task.keys.side)
    own = implementation.see(task.padded(task.queries, queries), task.counters)
    others = implementation.see(_of_all(task, task.keys, keys))
    return queries, keys, task.meet(own, others)


def _of_all(task: Task, operand: Operand, tiles: Tiles) -> PaddedRows:
    """Returns the padded rows of gathered tiles."""
    rows, size = operand.layout.rows, task.schedule.gather_size
    shards = rows.shard // size * size + jnp.arange(size, dtype=jnp.int32)
    return PaddedRows(rows, shards, False, tiles.documents)


# Few queries of a long context: each shard gathers all of them, and computes their attention on its own keys, which
# stay where they are. The outputs go back to the shards of their queries, which add them by their lse. The backward
# gathers queries with their residuals, and sums the gradients of queries over shards; those of keys are complete.


def forward_of_queries(task: Task) -> Any:
    """Returns the attention of all queries on the keys of each shard."""
    queries, keys, step = _meet_queries(task)
    partial = task.start(queries, keys)
    return task.implementation.forward(queries.arrays, keys.arrays, step, task.plan.weighting, partial)


def send_back(task: Task, *results: Array) -> list[tuple[Array, ...]]:
    """Returns the results of a shard's queries on each shard's keys, given those of all queries on its own keys."""
    return task.collectives.send_back(results, task.queries.side)


def backward_of_queries(task: Task) -> Addends:
    """Returns the gradients of one branch, of each row on the shard that keeps it."""
    implementation, plan = task.implementation, task.plan
    queries, keys, step = _meet_queries(task)
    grads = implementation.start_gradients(queries.arrays, keys.arrays, task.zeros())
    grads = implementation.backward(queries.arrays, keys.arrays, step, plan.weighting, grads)
    query_grad, *keys_grad = implementation.finish_gradients(grads, plan.weighting)
    key_grad, value_grad = task.narrow(keys_grad, task.keys.tokens)
    return Addends(task.collectives.scatter(query_grad, task.queries.side), key_grad, value_grad)


def _meet_queries(task: Task) -> tuple[Tiles, Tiles, AttentionStep]:
    implementation = task.implementation
    queries, keys = task.collectives.gather(task.take(task.queries), task.queries.side), task.take(task.keys)
    others = implementation.see(_of_all(task, task.queries, queries), task.counters)
    return queries, keys, task.meet(others, implementation.see(task.padded(task.keys, keys)))
