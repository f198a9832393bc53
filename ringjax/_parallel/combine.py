"""The combination of branches: results of each, for the rows that it keeps, merge into a total over all tokens.

B batch, n tokens of the shard, N heads, query or key/value heads: a total is a tuple of tokens [B, n, N, D].

On CPUs every pass over all tokens is slow. So branches are added one by one, each only to the rows that it keeps, and
the first writes its results without adding. The dense branches of a fused kernel are added all at once, in one pass
over the tokens. Kernels for TPUs start from the total and overwrite it, so a branch has no result arrays of its own.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ringjax._kernels.attention_step import DropoutCounters
from ringjax._kernels.interface import width_axis
from ringjax._kernels.softmax import merge_rows
from ringjax._mesh.order import behind, in_turn
from ringjax._parallel import gather, ring
from ringjax._parallel.layout import Layout, Operand, Task, operand_of_keys
from ringjax._parallel.plan import Plan
from ringjax._schedule.schedule import in_order_of_sums

Total = tuple[Array, ...]
Strategies = dict[str, Callable[[Task], Any]]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs and the lse of queries, and perhaps their greatest logits, as a total of branches.

    Args:
      part: the branches, which exchange the same tokens.
      counters: the counters of dropout, None without dropout.
      groups: the query heads of each key/value head.
      are_final: for each array, whether the total of the part is final, with nothing else added to it.
    """

    part: Plan
    counters: DropoutCounters | None
    groups: int
    are_final: Sequence[bool]

    by_strategy: ClassVar[Strategies] = {
        "ring": ring.forward,
        "all_gather": gather.forward,
        "gather_queries": gather.forward_of_queries,
    }

    @property
    def identity(self) -> tuple[float, ...]:
        """What a total has where nothing is added, for each of its arrays."""
        return (0.0, -jnp.inf, -jnp.inf)[: 2 + self.part.has_maximum]

    def layouts(self, layout: Layout) -> tuple[Layout, ...]:
        """Returns the layouts of the arrays of a total, given that of queries."""
        return (layout,) * len(self.identity)

    def dtypes(self, arrays: Any, total: Total) -> list[Any]:
        """Returns the dtypes of the first branch's results: those of the arguments where nothing is added to them."""
        (query,), *_ = arrays
        return [query.dtype if self._is_only(0) else total[0].dtype, *(array.dtype for array in total[1:])]

    def task(self, layout: Layout, arrays: Any, total: Total, earlier: Any, before: Total | None = None) -> Task:
        """Returns the task of a branch.

        It sends only after the arrays `earlier` have arrived. `before` has the total's rows if it adds in place.
        """
        del total
        (query,), (key, value), documents = arrays
        queries = Operand(layout, (query,), documents[0], lambda query: query)
        keys = operand_of_keys(layout, key, value, documents[1])
        return Task(queries, keys, self._counters(layout), self.part, earlier, self._is_only(0), before=before)

    def finish(self, task: Task, found: Any) -> Any:
        """Returns the results of a branch on the shards that keep its rows, given those of the shards that compute."""
        implementation = task.implementation
        finished = found if task.schedule.rotates_outputs else implementation.finish(found)
        out, *narrow = finished[: len(self.identity)]
        with_width = lambda array: jnp.expand_dims(array, width_axis(implementation.rows_axis))
        if task.schedule.gathers_queries:
            return self.merge(gather.send_back(task, out, *map(with_width, narrow)))
        results = *task.narrow([out], task.queries.tokens), *narrow
        out, *narrow = task.collectives.deal_back(results, task.queries.side)
        return out, *map(with_width, narrow)

    def put(self, layout: Layout, total: Total, results: Total) -> Total:
        """Writes the results of a branch to a total that has none yet."""
        return tuple(map(layout.put, total, results))

    def add(self, layout: Layout, total: Total, results: Total) -> Total:
        """Adds the results of a branch to those of others."""
        return self.put(layout, total, self.merge([tuple(map(layout.take, total)), results]))

    @staticmethod
    def merge(totals: list[Total]) -> Total:
        """Returns the total of several; an lse has a width axis of size one, where its layout has that axis."""
        return merge_rows(totals, width_axis=-1)

    def _is_only(self, number: int) -> bool:
        """Returns whether an array is final and comes from the only branch of the part."""
        return self.are_final[number] and len(self.part.schedules) == 1

    def _counters(self, layout: Layout) -> DropoutCounters | None:
        counters = self.counters
        return counters if counters is None else counters._replace(head=layout.rows.heads.of_heads(counters.head))


class Gradients(Outputs):
    """The gradients of queries, keys and values, as a total of branches."""

    by_strategy: ClassVar[Strategies] = {
        "ring": ring.backward,
        "all_gather": gather.backward,
        "gather_queries": gather.backward_of_queries,
    }

    @property
    def identity(self) -> tuple[float, ...]:
        """What a total has where nothing is added, for each of its arrays."""
        return 0.0, 0.0, 0.0

    def layouts(self, layout: Layout) -> tuple[Layout, ...]:
        """Returns the layouts of the arrays of a total, given that of queries."""
        return layout, layout.of_keys(), layout.of_keys()

    def dtypes(self, arrays: Any, total: Total) -> list[Any]:
        """Returns the dtypes of the first branch's gradients, as `Outputs` does."""
        (query, _), keys, _ = arrays
        of_each = enumerate(zip((query, *keys), total, strict=True))
        return [array.dtype if self._is_only(number) else one.dtype for number, (array, one) in of_each]

    def task(self, layout: Layout, arrays: Any, total: Total, earlier: Any, before: Total | None = None) -> Task:
        """Returns the task of a branch, with the residuals that its implementation needs of queries; see `Outputs`."""
        (query, residuals), (key, value), documents = arrays
        tokens = query, *residuals[layout.rows.schedule.implementation]
        queries = Operand(layout, tokens, documents[0], layout.implementation.make_queries)
        keys = operand_of_keys(layout, key, value, documents[1])
        return Task(queries, keys, self._counters(layout), self.part, earlier, self._is_only(1), total, before)

    def finish(self, task: Task, found: ring.Addends) -> ring.Addends:
        """Returns the gradients of a branch on the shards that keep its rows."""
        if found.query is None:
            return found
        query_grad = found.query.astype(task.queries.tokens[0].dtype) if self._is_only(0) else found.query
        return found._replace(query=task.collectives.deal_back(query_grad, task.queries.side))

    def put(self, layout: Layout, total: Total, results: Any) -> Total:
        """Writes the gradients of a branch to a total that has none yet."""
        *tiles, parts = results
        of_each = zip(self.layouts(layout), total, tiles, strict=True)
        grads = [grad if addend is None else one.put(grad, addend) for one, grad, addend in of_each]
        return self._add_parts(grads, parts)

    def add(self, layout: Layout, total: Total, results: Any) -> Total:
        """Adds the gradients of a branch one after the other: in one fused pass each would be in memory twice."""
        *tiles, parts = results
        grads = list(total)
        for number, (one, addend) in enumerate(zip(self.layouts(layout), tiles, strict=True)):
            if addend is not None:
                grads[number] = one.put(grads[number], behind(addend, grads[:number]), jnp.add)
        return self._add_parts(grads, parts)

    @staticmethod
    def merge(totals: list[Total]) -> Total:
        """Returns the sum of several."""
        return functools.reduce(lambda some, others: jax.tree.map(jnp.add, some, others), totals)

    def _add_parts(self, grads: list[Array], parts: Any) -> Total:
        for number, layout, rows in parts:
            grads[number] = layout.put_rows(grads[number], rows, jnp.add)
        return tuple(grads)


def combine(kind: Outputs, arrays: Any, total: Total, earlier: Any = None) -> Total:
    """Returns the total of all branches of a part; each communicates after the previous one has finished.

    Args:
      kind: what is computed for each branch, and how it is added.
      arrays: the tokens of queries and of keys, and their documents.
      total: arrays filled with the identity of the sum.
      earlier: the arrays that the first branch that communicates waits for.
    """
    fused, is_first = [], True
    for number, schedule in enumerate(in_order_of_sums(kind.part.schedules)):
        layout = Layout(kind.part.rows(schedule), kind.part.implementation(schedule), kind.groups)
        waits_for = None if schedule.is_local else earlier
        if schedule.addition == "at once" and schedule.is_dense:
            task = kind.task(layout, arrays, total, waits_for)
            results = kind.finish(task, kind.by_strategy[schedule.strategy](task))
            fused.append((layout, results))
        else:
            arrays = in_turn(arrays, total, layout.implementation.platform) if number else arrays
            place = functools.partial(_place, kind, is_first=is_first, earlier=waits_for)
            side = layout.rows.side
            if side.num_groups > 1 and not layout.rows.already_taken:
                dtypes = kind.dtypes(arrays, total) if is_first else [array.dtype for array in total]
                place = functools.partial(_group_by_group, place, dtypes)
            results = total = place(layout, arrays, total)
            is_first = False
        earlier = earlier if schedule.is_local else results
    totals = [] if is_first else [total]
    for layout, results in fused:
        of_each = zip(kind.layouts(layout), results, total, kind.identity, strict=False)
        totals.append(tuple(one.spread(tiles, tokens.shape[2], fill) for one, tiles, tokens, fill in of_each))
    return totals[0] if len(totals) == 1 else kind.merge(totals)


def _place(kind: Outputs, layout: Layout, arrays: Any, total: Total, *, is_first: bool, earlier: Any) -> Total:
    """Returns the total with the results of a branch; if it continues sums, its kernel adds to them in place."""
    before = None
    if not is_first and layout.rows.schedule.continues:
        before = tuple(one.take(array) for one, array in zip(kind.layouts(layout), total, strict=True))
    task = kind.task(layout, arrays, total, earlier, before)
    results = kind.finish(task, kind.by_strategy[task.schedule.strategy](task))
    return (kind.put if is_first or before is not None else kind.add)(layout, total, results)


def _group_by_group(place: Any, dtypes: Sequence[Any], layout: Layout, arrays: Any, total: Total) -> Total:
    """Runs `place` group by group, so that only the rows of one group are copied; the total has these dtypes."""
    side = layout.rows.side
    size = side.shard_length // side.num_groups

    def place_group(group: Any, total: Total) -> Total:
        cut = lambda array: jax.lax.dynamic_slice_in_dim(array, group * size, size, axis=1)

        def paste(array: Array, part: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), group * size, axis=1)

        of_group = layout._replace(rows=layout.rows.of_group(group))
        return jax.tree.map(paste, total, place(of_group, jax.tree.map(cut, arrays), jax.tree.map(cut, total)))

    total = tuple(array.astype(dtype) for array, dtype in zip(total, dtypes, strict=True))
    return jax.lax.fori_loop(0, side.num_groups, place_group, total)
