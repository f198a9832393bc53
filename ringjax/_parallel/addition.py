"""The addition of branches: how the results of all, each of the rows that it keeps, become one total.

A total is a tuple of tokens [B, n, N, D]: n tokens of the shard, N heads, query or key/value heads.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from ringjax._mesh.order import behind
from ringjax._parallel.layout import Layout
from ringjax._parallel.plan import Plan
from ringjax._schedule.schedule import in_order_of_sums

Total = tuple[Array, ...]


class Addition(NamedTuple):
    """How results of branches are added: `fills` are what changes nothing.

    Query heads are in `groups`; `layouts(layout)` are those of the arrays of a total, given that of queries. The
    `dtypes` are those of results that nothing is added to: they are put in place, not summed.
    `one(layout, total, results)` adds the results of a branch to the rows that they are of, `first(layout, total,
    results)` puts them in place of nothing, `many(parts)` adds totals.
    """

    fills: Sequence[float]
    groups: int
    layouts: Callable[[Layout], Sequence[Layout]]
    dtypes: Sequence[Any]
    one: Callable[[Layout, Total, Any], Total]
    first: Callable[[Layout, Total, Any], Total]
    many: Callable[[list[Total]], Total]


# On CPUs every pass over all tokens costs: so branches are added one by one, only to the rows that they keep, and the
# results of the first are put in place. The dense branches of a fused kernel are added all at once, in one pass over
# the tokens. Kernels for TPUs begin with the total, and write where it was: a branch has no results beside it.


def add_branches(
    compute: Callable[..., Any],
    addition: Addition,
    arrays: Any,
    total: Total,
    plan: Plan,
    earlier: Any = None,
) -> Total:
    """Adds what `compute(layout, arrays, total, earlier, before)` makes of arrays of tokens [B, n, ...] in each branch.

    The total is that before the branch, which this may have to come after; `before` are rows of it, laid out, if the
    branch adds its results to them itself. A branch sends only after the arrays `earlier` have arrived, and after the
    branch before it.
    """
    fused, is_first = [], True
    for number, schedule in enumerate(in_order_of_sums(plan.schedules)):
        layout = Layout(plan.rows(schedule), plan.implementation(schedule), addition.groups)
        compute_branch = functools.partial(compute, earlier=None if schedule.is_local else earlier)
        if schedule.traits.are_added_at_once and schedule.is_dense:
            results = compute_branch(layout, arrays, total, before=None)
            fused.append((layout, results))
        else:
            continues = not is_first and schedule.continues
            add = functools.partial(_add_one, compute_branch, addition, is_first=is_first, continues=continues)
            dtypes = addition.dtypes if is_first else [array.dtype for array in total]
            if schedule.traits.copies_rows and number:
                # Else a compiler begins several branches, and has the copies of all of them at once.
                arrays = behind(arrays, total)
            results = total = _add_by_group(add, layout, arrays, total, dtypes)
            is_first = False
        earlier = earlier if schedule.is_local else results
    if not fused:
        return total
    return _add_fused(fused, addition, total, is_first)


def _add_fused(fused: list[tuple[Layout, Any]], addition: Addition, total: Total, is_first: bool) -> Total:
    """Adds the results of some branches to a total, which holds nothing yet if they are the first."""
    parts = [] if is_first else [total]
    for layout, results in fused:
        of_each = zip(addition.layouts(layout), results, total, addition.fills, strict=False)
        parts.append(tuple(one.spread(tiles, tokens.shape[2], fill) for one, tiles, tokens, fill in of_each))
    return parts[0] if len(parts) == 1 else addition.many(parts)


def _add_one(
    compute: Callable[..., Any],
    addition: Addition,
    layout: Layout,
    arrays: Any,
    total: Total,
    *,
    is_first: bool,
    continues: bool,
) -> Total:
    """Adds the results of a branch to a total, or puts them in place of it where they `continue` it."""
    before = None
    if continues:
        before = tuple(one.take(array) for one, array in zip(addition.layouts(layout), total, strict=True))
    results = compute(layout, arrays, total, before=before)
    add = addition.first if is_first or continues else addition.one
    return add(layout, total, results)


def _add_by_group(
    add: Callable[[Layout, Any, Total], Total],
    layout: Layout,
    arrays: Any,
    total: Total,
    dtypes: Sequence[Any],
) -> Total:
    """Adds a branch, group by group, so that only the rows of one group are copied, to a total of these dtypes."""
    side = layout.rows.side
    if side.num_groups == 1 or layout.rows.already_taken:
        return add(layout, arrays, total)
    size = side.shard_length // side.num_groups

    def add_group(group: Any, total: Total) -> Total:
        cut = lambda array: jax.lax.dynamic_slice_in_dim(array, group * size, size, axis=1)

        def paste(array: Array, part: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), group * size, axis=1)

        of_group = layout._replace(rows=layout.rows.of_group(group))
        return jax.tree.map(paste, total, add(of_group, jax.tree.map(cut, arrays), jax.tree.map(cut, total)))

    total = tuple(array.astype(dtype) for array, dtype in zip(total, dtypes, strict=True))
    return jax.lax.fori_loop(0, side.num_groups, add_group, total)
