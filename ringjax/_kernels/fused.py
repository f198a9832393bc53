"""Implementations by a fused kernel, for whole chunks in which all pairs attend, or those of a mask it knows.

Arrays have the kernels' layout [B, R, N, H]: B batch times chunks, R the padded rows of a chunk, N all heads.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Shaped

from ringjax._kernels.attention_step import AttentionStep, DropoutCounters, PaddedRows
from ringjax._kernels.interface import Request
from ringjax._kernels.kernel import KernelGradients, KernelImplementation, KernelPartial
from ringjax._kernels.softmax import Keys, Weighting, accumulation_dtype, merge
from ringjax._kernels.sub_blocks import ChunkView, Pairs, SubBlock, has_sequences, see, switch, window_of
from ringjax._schedule.schedule import BranchSchedule
from ringjax._schedule.side import Side

# The most sequences of one kernel call, forward and backward: cuDNN's memory grows with their number, in the backward
# by twice that of the rows for each.
MOST_SEQUENCES = 16, 8


@runtime_checkable
class Kernel(Protocol):
    """A fused kernel; its queries have N heads, its keys and values K, a divisor of N."""

    def attend(
        self, query: Array, key: Array, value: Array, pairs: Pairs, scale: float
    ) -> tuple[Float[Array, "B Rq N V"], Float[Array, "B Rq N"]]:
        """Returns the output and the lse of each row: zeros and -inf for a row that attends to nothing."""
        ...

    def differentiate(
        self, queries: "FusedQueries", keys: Keys, pairs: Pairs, scale: float
    ) -> tuple[Float[Array, "B Rq N H"], Float[Array, "B Rk K H"], Float[Array, "B Rk K V"]]:
        """Returns what these pairs add to the gradients, given each query's output and lse over all of its keys."""
        ...

    def obstacle(
        self, query: Any, key: Any, value: Any, platform: str, widening: int = 0, has_sequences: bool = False
    ) -> str | None:
        """Returns why the kernel cannot compute these arrays on this platform, None if it can.

        The backward may need heads that are wider by `widening`.
        """
        ...


class FusedQueries(NamedTuple):
    """What the backward needs of each row of queries; `lse_grad` is None where it is zero."""

    query: Float[Array, "B Rq N H"]
    out_grad: Float[Array, "B Rq N V"]
    out: Float[Array, "B Rq N V"]
    lse: Float[Array, "B Rq N"]
    lse_grad: Float[Array, "B Rq N"] | None = None


@dataclasses.dataclass(frozen=True)
class Fused(KernelImplementation):
    """The implementation by a fused kernel, for branches whose mask the kernel can express."""

    kernel: Kernel

    rows_axis = 1
    platform = "cuda"
    addition = "at once"

    def serve(self, request: Request, schedule: BranchSchedule) -> tuple[BranchSchedule, str | None]:
        """Returns the schedule in whole chunks, and why the kernel cannot serve it, None if it can."""
        schedule, has_documents = schedule.in_whole_chunks(), _has_documents(request)
        if schedule.balance == "stripes" and request.balance is None:
            schedule = schedule.in_zigzag()  # which kernels can mask by row index
        arrays, widening = (request.query, request.key, request.value), ALIGNMENT if request.needs_lse else 0
        in_sequences = not schedule.is_general and has_sequences(schedule, has_documents)
        reason = self.kernel.obstacle(*arrays, request.platform, widening, in_sequences)
        return schedule, reason or _obstacle_of_request(request) or _obstacle_of_branch(schedule, request)

    def lay_out(self, side: Side, rows: Shaped[Array, "B m N D"], groups: int | None = None) -> Array:
        """Moves chunks into the batch dimension."""
        del groups
        return rearrange(rows, "B (C R) N D -> (B C) R N D", C=side.num_chunks)

    def take_back(self, side: Side, tiles: Array) -> Shaped[Array, "B m N D"]:
        return rearrange(tiles, "(B C) R N D -> B (C R) N D", C=side.num_chunks)

    def see(self, padded: PaddedRows, counters: DropoutCounters | None = None) -> ChunkView:
        """Returns the view of queries, or of keys."""
        del counters
        return see(padded)

    def forward(
        self,
        query: Float[Array, "B Rq N H"],
        keys: Keys,
        step: AttentionStep,
        weighting: Weighting,
        partial: KernelPartial,
    ) -> KernelPartial:
        """Merges the attention of queries on these keys with that on others, `partial`."""

        def attend(block: SubBlock, query: Array, keys: Keys) -> tuple[Array, Array]:
            some = query[:, block.queries], *(array[:, block.keys] for array in keys)

            def on_sequences(pairs: Pairs) -> tuple[Array, Array]:
                query, key, value = map(block.reverse, some)
                out, lse = self.kernel.attend(query, key, value, pairs, weighting.scale)
                return block.reverse(out), block.reverse(lse).astype(partial.lse.dtype)

            # No row is in two sequences, and a call without a row's sequence gives it zeros and minus infinity.
            join = lambda one, other: (one[0] + other[0], jnp.maximum(one[1], other[1]))
            out, lse = block.over(on_sequences, join, MOST_SEQUENCES[0])
            is_promised = block.is_promised[:, None, None]
            out, lse = jnp.where(is_promised[..., None], out, jnp.nan), jnp.where(is_promised, lse, jnp.nan)
            return _pad(out, block.queries, query), _pad(lse, block.queries, query, -jnp.inf)

        def attend_all(blocks: list[SubBlock], query: Array, keys: Keys) -> tuple[Array, Array]:
            found = [attend(block, query, keys) for block in blocks]
            if len(found) == 1:
                return found[0]
            nothing = self.finish(self.start(query, keys))
            out, lse = merge(*zip(*(found or [nothing]), strict=True))
            return out.astype(query.dtype), lse

        out, lse = switch(step, attend_all, query, keys)
        if not step.is_only:
            return KernelPartial(*merge((partial.out, out), (partial.lse, lse)))
        # Merging with an empty partial would be one more pass over the output, a tenth of a short window's time.
        return KernelPartial(out.astype(query.dtype if step.is_final else partial.out.dtype), lse)

    def residuals(self, out: Array, lse: Array, out_grad: Array, lse_grad: Array | None) -> tuple[Array, ...]:
        attends = lse > -jnp.inf
        more = () if lse_grad is None else (jnp.where(attends, lse_grad, 0)[..., None],)
        return out_grad, out, jnp.where(attends, lse, jnp.inf)[..., None], *more

    def make_queries(self, *arrays: Array) -> FusedQueries:
        query, out_grad, out, *narrow = arrays
        return FusedQueries(query, out_grad, out, *(array[..., 0] for array in narrow))

    def start_gradients(
        self, queries: FusedQueries, keys: Keys, zeros: Sequence[Array], **given: Array
    ) -> KernelGradients:
        del zeros
        dtype = accumulation_dtype(queries.query, *keys)
        arrays = {"query": queries.query, **keys._asdict()}
        return KernelGradients(
            **given, **{name: jnp.zeros_like(array, dtype) for name, array in arrays.items() if name not in given}
        )

    def backward(
        self, queries: FusedQueries, keys: Keys, step: AttentionStep, weighting: Weighting, grads: KernelGradients
    ) -> KernelGradients:

        def differentiate(block: SubBlock, queries: FusedQueries, keys: Keys) -> tuple[Array, ...]:
            of = lambda rows, tree: jax.tree.map(lambda array: block.reverse(array[:, rows]), tree)
            some = of(block.queries, queries), of(block.keys, keys)
            on_sequences = lambda pairs: _differentiate(self.kernel, *some, pairs, weighting.scale)
            join = lambda one, other: jax.tree.map(jnp.add, one, other)
            query_grad, *keys_grad = map(block.reverse, block.over(on_sequences, join, MOST_SEQUENCES[1]))
            whole = (block.queries, queries.query), (block.keys, keys.key)
            return _pad(query_grad, *whole[0]), *(_pad(grad, *whole[1]) for grad in keys_grad)

        def differentiate_all(blocks: list[SubBlock], queries: FusedQueries, keys: Keys) -> tuple[Array, ...]:
            zeros = tuple(jnp.zeros_like(array) for array in (queries.query, *keys))
            found = [differentiate(block, queries, keys) for block in blocks]
            return functools.reduce(lambda one, other: jax.tree.map(jnp.add, one, other), found or [zeros])

        addends = switch(step, differentiate_all, queries, keys)
        return KernelGradients(*map(jnp.add, grads, addends))


def _pad(array: Array, rows: slice, like: Array, value: float = 0.0) -> Array:
    """Pads the array of some `rows` of `like` to all of its rows, with `value` elsewhere."""
    ends = [(0, 0), (rows.start, like.shape[1] - rows.stop), *[(0, 0)] * (array.ndim - 2)]
    return jnp.pad(array, ends, constant_values=value)


# Kernels take no cotangent l of the lse: they compute dS = P (g . v - g . out). One more column, with ones in v, l in g
# and zeros in out, makes this P (g . v + l - g . out), as required. Widths grow by the kernels' alignment.
ALIGNMENT = 8


def _differentiate(
    kernel: Kernel, queries: FusedQueries, keys: Keys, pairs: Pairs, scale: float
) -> tuple[Array, Array, Array]:
    if queries.lse_grad is None:
        return kernel.differentiate(queries, keys, pairs, scale)
    widen = lambda array, column: jnp.concatenate([array, _first_of(column, array)], axis=-1)
    query, out_grad, out, lse, lse_grad = queries
    wide = FusedQueries(widen(query, 0), widen(out_grad, lse_grad), widen(out, 0), lse)
    grads = kernel.differentiate(wide, Keys(widen(keys.key, 0), widen(keys.value, 1)), pairs, scale)
    query_grad, key_grad, value_grad = (grad[..., :-ALIGNMENT] for grad in grads)
    return query_grad, key_grad, value_grad


def _first_of(column: Any, array: Array) -> Array:
    """Returns `ALIGNMENT` columns: the given one, then zeros."""
    column = jnp.broadcast_to(jnp.asarray(column, array.dtype), array.shape[:-1])[..., None]
    return jnp.pad(column, [(0, 0)] * (array.ndim - 1) + [(0, ALIGNMENT - 1)])


def _has_documents(request: Request) -> bool:
    return "document_ids" in request.needs


def _obstacle_of_request(request: Request) -> str | None:
    needs = [name for name in request.needs if name != "document_ids"]
    if needs:
        return f"no fused kernel knows {', '.join(needs)}"
    if _has_documents(request) and not request.documents_are_sorted:
        return "documents may lie in any order: say documents_are_sorted=True where their numbers do not decrease"
    return request.obstacle_to_kernels()


def _obstacle_of_branch(schedule: BranchSchedule, request: Request) -> str | None:
    name, has_documents = f"the branch {schedule.branch}", _has_documents(request)
    side, is_strided = schedule.queries, schedule.branch.is_by_group and not schedule.branch.keeps_all
    reasons = {
        "queries and keys lie at different positions": schedule.is_general,
        f"{name} is dealt in stripes, and fused kernels mask rows by their index": schedule.balance == "stripes",
        f"{name} of a union leaves out pairs of earlier branches": schedule.earlier_branches,
        f"{name} is neither of segments nor a window": not schedule.branch.is_by_group and window_of(schedule) is None,
        f"{name} spans devices, and strategy='all_gather' brings keys of other lengths to each": schedule.is_gathered,
        f"{name} has other rows of a document on each head": is_strided and has_documents,
        f"{name} on {schedule.num_shards} shards has rows of padding, or rows that meet and do not all attend": (
            (is_strided and not schedule.is_dense) or (schedule.is_zigzag and side.chunk_rows != side.num_padded_rows)
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    window = window_of(schedule)
    return reason or (None if window is None else _obstacle_of_window(schedule, window, name, has_documents))


def _obstacle_of_window(schedule: BranchSchedule, window: int, name: str, has_documents: bool) -> str | None:
    side = schedule.queries
    if not schedule.is_causal:
        return f"{name} sees later tokens as well, and fused kernels have windows of earlier ones alone"
    if has_documents:
        return f"{name} is cut by documents"
    if not side.is_full or (schedule.branch.modulus > 1 and side.chunks != "phases"):
        return f"{name} on {schedule.num_shards} shards has rows of padding, or rows that meet and do not all attend"
    if not schedule.is_local and 2 * (window - 1) > side.chunk_rows:
        return f"{name} sees more than half of the tokens of a device before"
    return None
