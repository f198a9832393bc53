"""What one shard computes: the results of all branches of which the same tokens are exchanged, forward and backward.

B batch, n tokens of the shard, N its query heads, K its key/value heads: all that is of queries is [B, n, N, width].
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ringjax._kernels.meeting import Noise
from ringjax._kernels.softmax import add_shares, find_shares
from ringjax._kernels.strides import Combine, put
from ringjax._mesh.order import behind
from ringjax._parallel import gather, ring
from ringjax._parallel.addition import Addition, Total, add_branches
from ringjax._parallel.layout import Layout, Operand, Task, operand_of_keys
from ringjax._parallel.plan import Plan

# What meets where in a branch, by its strategy: a module of two functions, `forward` and `backward` of one task.
BY_STRATEGY: dict[str, Any] = {"ring": ring, "all_gather": gather}


class Shard(NamedTuple):
    """What a shard computes with: its tokens, their documents and what dropout is drawn from.

    `queries` has the queries, `groups` heads of them for each key/value head, and in the backward what it needs of them
    by the name of the implementation; `keys` has the keys and values.
    """

    queries: tuple[Any, ...]
    keys: tuple[Array, ...]
    documents: tuple[Array | None, ...]
    noise: Noise | None
    groups: int

    @property
    def arrays(self) -> Any:
        """The arrays of tokens."""
        return self.queries, self.keys, self.documents


def add_results(part: Plan, shard: Shard, dtype: Any, earlier: Any, is_final: bool) -> Total:
    """Returns the output and the lse of all branches in a part.

    Sums are of this dtype; where those of the part are final, `is_final`, nothing is added to them.
    """
    (query,), (_, value) = shard.queries, shard.keys
    is_branch_final = is_final and len(part.schedules) == 1

    def attend(layout: Layout, arrays: Any, total: Any, earlier: Any, before: Any) -> Any:
        del total
        (query,), (key, value), documents = arrays
        queries = Operand(layout, (query,), documents[0], lambda query: query)
        keys = operand_of_keys(layout, key, value, documents[1])
        task = Task(queries, keys, _noise_of(layout, shard.noise), part, earlier, is_branch_final, before=before)
        out, lse = layout.implementation.finish(BY_STRATEGY[task.schedule.strategy].forward(task))
        out, lse = task.ways.swap_back((*task.narrow([out], [query]), lse))
        return out, jnp.expand_dims(lse, layout.implementation.width_axis)

    def merge_one(layout: Layout, total: Any, results: Any) -> Any:
        before = tuple(map(layout.take, total))
        return tuple(map(layout.put, total, merge_many([before, results])))

    def put_first(layout: Layout, total: Any, results: Any) -> Any:
        return tuple(map(layout.put, total, results))

    def layouts(layout: Layout) -> tuple[Layout, ...]:
        return layout, layout

    def merge_many(parts: list[Any]) -> Any:
        outs, lses = zip(*parts, strict=True)  # each lse has the width one, wherever that is
        shares, lse = find_shares(lses)
        return add_shares(outs, shares), lse

    zeros = lambda width: jnp.zeros_like(query, dtype, shape=(*query.shape[:-1], width))
    total = zeros(value.shape[-1]), zeros(1) - jnp.inf
    dtypes = query.dtype if is_branch_final else dtype, total[1].dtype
    addition = Addition((0.0, -jnp.inf), shard.groups, layouts, dtypes, merge_one, put_first, merge_many)
    return add_branches(attend, addition, shard.arrays, total, part, earlier)


def add_gradients(part: Plan, shard: Shard, zero: Array, earlier: Any, are_final: Sequence[bool]) -> Any:
    """Returns the gradients of all branches in a part.

    They are of the dtype of `zero`. Nothing is added to those of queries, keys and values that `are_final`.
    """
    arrays = shard.queries[0], *shard.keys
    are_branch_final = [len(part.schedules) == 1 and is_one for is_one in are_final]

    def differentiate(layout: Layout, arrays: Any, total: Any, earlier: Any, before: Any) -> Any:
        (query, residuals), (key, value), documents = arrays
        tokens = query, *residuals[layout.rows.schedule.implementation]
        queries = Operand(layout, tokens, documents[0], layout.implementation.make_queries)
        keys = operand_of_keys(layout, key, value, documents[1])
        task = Task(queries, keys, _noise_of(layout, shard.noise), part, earlier, are_branch_final[1], total, before)
        addends = BY_STRATEGY[task.schedule.strategy].backward(task)
        if addends.query is None:
            return addends
        query_grad = addends.query.astype(query.dtype) if are_branch_final[0] else addends.query
        return addends._replace(query=task.ways.swap_back(query_grad))

    def layouts(layout: Layout) -> tuple[Layout, ...]:
        return layout, layout.of_keys(), layout.of_keys()

    def put_one(
        layout: Layout, total: Any, addends: Any, combine: Combine = put, wait: Any = lambda addend, _: addend
    ) -> Any:
        *tiles, parts = addends
        grads = list(total)
        for number, (one, addend) in enumerate(zip(layouts(layout), tiles, strict=True)):
            if addend is not None:
                grads[number] = one.put(grads[number], wait(addend, grads[:number]), combine)
        for number, some, rows in parts:
            grads[number] = some.put_rows(grads[number], rows, jnp.add)
        return tuple(grads)

    def add_many(parts: list[Any]) -> Any:
        return functools.reduce(lambda some, others: jax.tree.map(jnp.add, some, others), parts)

    total = tuple(jnp.zeros_like(array, zero.dtype) + zero for array in arrays)
    dtypes = tuple(
        array.dtype if is_one else zero.dtype for array, is_one in zip(arrays, are_branch_final, strict=True)
    )
    # One sum after the other: a compiler that makes one pass of all has each twice at once.
    add_one = functools.partial(put_one, combine=jnp.add, wait=behind)
    addition = Addition((0.0, 0.0, 0.0), shard.groups, layouts, dtypes, add_one, put_one, add_many)
    return add_branches(differentiate, addition, shard.arrays, total, part, earlier)


def _noise_of(layout: Layout, noise: Noise | None) -> Noise | None:
    return noise if noise is None else noise._replace(head=layout.rows.heads.of_heads(noise.head))
