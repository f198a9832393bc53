"""The branches of one shard: how rows are laid out where they are computed, and how all results become one total.

A total is a tuple of tokens [B, n, K, GD]: n tokens of the shard, K key/value heads, G query heads of each.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ringjax._plan import Plan
from ringjax._rows import Combine, Rows

Total = tuple[Array, ...]


class Layout(NamedTuple):
    """The rows of queries, or of keys, of a branch as its implementation has them."""

    rows: Rows
    implementation: Any

    def of_keys(self) -> "Layout":
        """Returns the layout of keys."""
        return self._replace(rows=self.rows.of_keys())

    def take(self, tokens: Array, groups: int | None = None) -> Array:
        """Takes rows of tokens, and lays them out; those of queries in groups."""
        rows = self.rows.take(self.rows.heads.cut(tokens))
        return self.implementation.lay_out(self.rows.branch, rows, groups)

    def take_documents(self, documents: Int[Array, "B n"]) -> Int[Array, "J B C classes R"]:
        """Takes the documents of rows, for each class of heads."""
        rows = self.rows.of_classes()
        tokens = jnp.broadcast_to(documents[:, :, None, None], (*documents.shape, rows.offset.size, 1))
        return self.implementation.lay_out(rows.branch, rows.take(tokens))[..., 0]

    def put(self, tokens: Array, tiles: Array, *combine: Combine) -> Array:
        """Puts rows that are laid out in their places among tokens."""
        heads = self.rows.heads
        return heads.paste(tokens, self.rows.put(heads.cut(tokens), self._take_back(tiles), *combine))

    def spread(self, tiles: Array, num_heads: int, fill: float) -> Array:
        """Returns tokens of so many heads with rows that are laid out in their places, and `fill` elsewhere."""
        heads, part = self.rows.heads, self.rows.spread(self._take_back(tiles), fill)
        if heads.size == num_heads:
            return part
        return heads.paste(jnp.full_like(part, fill, shape=(*part.shape[:2], num_heads, part.shape[3])), part)

    def _take_back(self, tiles: Array) -> Array:
        return self.implementation.take_back(self.rows.branch, tiles, self.rows.heads.size)


class Addition(NamedTuple):
    """How results of branches are added: `fills` are what changes nothing, `groups` the heads of each array of a total.

    `one(layout, total, results)` adds the results of a branch to the rows that they are of, `many(parts)` adds totals,
    their heads apart: [B, n, K, G, D].
    """

    fills: Sequence[float]
    groups: Sequence[int]
    one: Callable[[Layout, Total, Total], Total]
    many: Callable[[list[Total]], Total]


# On CPUs every pass over all tokens costs: branches are added one by one, to the rows that they keep. A fused kernel
# leaves its rows narrow and whole, and all its branches are added in one pass over the tokens.


def add_branches(
    compute: Callable[..., Total],
    addition: Addition,
    arrays: Any,
    total: Total,
    plan: Plan,
    earlier: Any = None,
) -> Total:
    """Adds what `compute(layout, arrays, earlier)` makes of arrays of tokens [B, n, ...] in each branch to a total.

    What a branch sends goes after the collectives that gave the arrays `earlier`, and those of the branch before.
    """
    fused = []
    for branch in plan.branches:
        layout = Layout(plan.rows(branch), plan.implementation(branch))
        compute_branch = functools.partial(compute, earlier=earlier if branch.ring_size > 1 else None)
        if layout.implementation.IS_FUSED:
            results = compute_branch(layout, arrays)
            fused.append((layout, results))
        else:
            results = total = _add_by_group(compute_branch, addition, layout, arrays, total)
        earlier = results if branch.ring_size > 1 else earlier
    return _add_fused(fused, addition, total) if fused else total


def _add_fused(fused: list[tuple[Layout, Total]], addition: Addition, total: Total) -> Total:
    def apart(tokens: Array, groups: int) -> Array:
        return tokens.reshape(*tokens.shape[:3], groups, -1)  # [B, n, K, G, D]

    parts = [total]
    for layout, results in fused:
        spread = functools.partial(layout.spread, num_heads=total[0].shape[2])
        parts.append(tuple(spread(tiles, fill=fill) for tiles, fill in zip(results, addition.fills, strict=True)))
    added = addition.many([tuple(map(apart, part, addition.groups)) for part in parts])
    return tuple(array.reshape(tokens.shape) for array, tokens in zip(added, total, strict=True))


def _add_by_group(
    compute: Callable[[Layout, Any], Total], addition: Addition, layout: Layout, arrays: Any, total: Total
) -> Total:
    """Adds a branch, group by group, so that only the rows of one group are copied."""
    branch = layout.rows.branch
    add = lambda layout, arrays, total: addition.one(layout, total, compute(layout, arrays))
    if branch.num_groups == 1:
        return add(layout, arrays, total)
    size = branch.shard_length // branch.num_groups

    def add_group(group: Any, total: Total) -> Total:
        cut = lambda array: jax.lax.dynamic_slice_in_dim(array, group * size, size, axis=1)
        paste = lambda array, part: jax.lax.dynamic_update_slice_in_dim(array, part, group * size, axis=1)
        of_group = layout._replace(rows=layout.rows.of_group(group))
        return jax.tree.map(paste, total, add(of_group, jax.tree.map(cut, arrays), jax.tree.map(cut, total)))

    return jax.lax.fori_loop(0, branch.num_groups, add_group, total)
