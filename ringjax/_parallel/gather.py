"""The strategy "all_gather": each shard gathers the keys of its segment, then computes."""

from typing import Any

import jax.numpy as jnp

from ringjax._kernels.attention_step import AttentionStep, PaddedRows, Tiles
from ringjax._parallel.layout import Task
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
    key_grad, value_grad = task.collectives.scatter(tuple(keys_grad))
    if task.before is not None:
        key_grad, value_grad = map(jnp.add, task.before[1:], (key_grad, value_grad))
    return Addends(query_grad, key_grad, value_grad)


def _meet(task: Task) -> tuple[Tiles, Tiles, AttentionStep]:
    schedule, implementation = task.schedule, task.implementation
    queries, keys = task.take_dealt(task.queries), task.collectives.gather(task.take(task.keys))
    rows, size = task.keys.layout.rows, schedule.gather_size
    gathered = rows.shard // size * size + jnp.arange(size, dtype=jnp.int32)
    own = implementation.see(task.padded(task.queries, queries), task.counters)
    others = implementation.see(PaddedRows(rows, gathered, False, keys.documents))
    return queries, keys, task.meet(own, others)
