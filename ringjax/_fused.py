"""Implementations by a fused kernel: whole chunks of rows, of which all pairs attend, or all up to the diagonal.

Laid out as such kernels have them: [B, R, N, H], B the batch and the chunks, R the slots of a chunk, N all heads.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Shaped

from ringjax._block import Keys, Weighting, accumulation_dtype, merge
from ringjax._meeting import Meeting, Noise, Slots
from ringjax._protocol import Implementation, Request
from ringjax._schedule import BranchSchedule
from ringjax._side import Side


@runtime_checkable
class Kernel(Protocol):
    """A fused kernel; its queries have N heads, its keys and values K, a divisor."""

    def attend(
        self, query: Array, key: Array, value: Array, is_causal: bool, scale: float
    ) -> tuple[Float[Array, "B Rq N V"], Float[Array, "B Rq N"]]:
        """Returns the output and the lse of each row."""
        ...

    def differentiate(
        self, queries: "FusedQueries", keys: Keys, is_causal: bool, scale: float
    ) -> tuple[Float[Array, "B Rq N H"], Float[Array, "B Rk K H"], Float[Array, "B Rk K V"]]:
        """Returns what these pairs add to the gradients, given the output and the lse over all pairs of the rows."""
        ...

    def obstacle(self, query: Any, key: Any, value: Any, platform: str, widening: int = 0) -> str | None:
        """Returns why it cannot compute such arrays on such a platform, None where it can.

        Gradients may ask for arrays that are wider by `widening`.
        """
        ...


class FusedPartial(NamedTuple):
    """The attention on some of the keys."""

    out: Float[Array, "B Rq N V"]
    lse: Float[Array, "B Rq N"]


class FusedQueries(NamedTuple):
    """What the backward needs of each row of queries; `lse_grad` is None where it is zero."""

    query: Float[Array, "B Rq N H"]
    out_grad: Float[Array, "B Rq N V"]
    out: Float[Array, "B Rq N V"]
    lse: Float[Array, "B Rq N"]
    lse_grad: Float[Array, "B Rq N"] | None = None


class FusedGradients(NamedTuple):
    """Sums of gradients under way."""

    query: Float[Array, "B Rq N H"]
    key: Float[Array, "B Rk K H"]
    value: Float[Array, "B Rk K V"]


@dataclasses.dataclass(frozen=True)
class Fused(Implementation):
    """The implementation by a fused kernel, of branches that are dense."""

    kernel: Kernel

    slots_axis = 1
    platform = "cuda"
    is_added_at_once = True

    def obstacle(self, request: Request, branch: BranchSchedule) -> str | None:
        arrays = request.query, request.key, request.value
        reason = self.kernel.obstacle(*arrays, request.platform, ALIGNMENT if request.has_lse_grad else 0)
        return reason or _obstacle_of_request(request) or _obstacle_of_branch(branch)

    def prepare(self, request: Request, branch: BranchSchedule) -> BranchSchedule:
        del request
        return branch.in_whole_chunks()

    def lay_out(self, side: Side, rows: Shaped[Array, "B m K D"], groups: int | None = None) -> Array:
        """Puts chunks beside batches, and all heads in one dimension."""
        return rearrange(rows, "B (C R) K (G H) -> (B C) R (K G) H", C=side.num_chunks, G=groups or 1)

    def take_back(self, side: Side, tiles: Array, heads: int) -> Shaped[Array, "B m K D"]:
        """Undoes `lay_out`, given the number of key/value heads."""
        return rearrange(tiles, "(B C) R (K G) H -> B (C R) K (G H)", C=side.num_chunks, K=heads)

    def see_queries(self, slots: Slots, noise: Noise | None = None) -> Array:
        """Returns the order of a shard's rows among those of others: smaller where the first to compute are earlier."""
        del noise
        return self.see_keys(slots)

    def see_keys(self, slots: Slots) -> Array:
        """Returns the order of a shard's rows, as `see_queries` does."""
        holder, slot = slots.branch.origin(slots.shards[0], 0)
        return holder * slots.side.num_slots + slot

    def start(self, query: Float[Array, "B Rq N H"], value: Float[Array, "B Rk K V"]) -> FusedPartial:
        """Returns the attention on nothing."""
        row = jnp.zeros_like(query[..., 0], accumulation_dtype(query, value))  # [B, R, N]
        return FusedPartial(jnp.zeros_like(row[..., None], shape=(*row.shape, value.shape[-1])), row - jnp.inf)

    def forward(
        self, query: Float[Array, "B Rq N H"], keys: Keys, meeting: Meeting, weighting: Weighting, partial: FusedPartial
    ) -> FusedPartial:
        """Merges the attention of queries on keys with that on others."""

        def attend(query: Array, keys: Keys, is_causal: bool = False) -> tuple[Array, Array]:
            out, lse = self.kernel.attend(query, *keys, is_causal, weighting.scale)
            return out, lse.astype(partial.lse.dtype)

        def all_on_early(query: Array, keys: Keys) -> tuple[Array, Array]:
            return attend(query, jax.tree.map(_early, keys))

        def late_on_all(query: Array, keys: Keys) -> tuple[Array, Array]:
            out, lse = attend(_late(query), keys)
            return _pad_early(out), _pad_early(lse, -jnp.inf)

        def nothing(query: Array, keys: Keys) -> tuple[Array, Array]:
            nothing = self.start(query, keys.value)
            return nothing.out.astype(query.dtype), nothing.lse

        out, lse = _switch(meeting, attend, all_on_early, late_on_all, nothing)(query, keys)
        return FusedPartial(*merge((partial.out, out), (partial.lse, lse)))

    def finish(self, partial: FusedPartial) -> tuple[Array, Array]:
        """Returns the output and the lse of each row."""
        return partial.out, partial.lse

    def of_queries(self, out: Array, lse: Array, out_grad: Array, lse_grad: Array | None) -> tuple[Array, ...]:
        """Returns what the backward needs of each query, beside itself: arrays [*B, n, N, ...] of any width."""
        attends = lse > -jnp.inf
        more = () if lse_grad is None else (jnp.where(attends, lse_grad, 0)[..., None],)
        return out_grad, out, jnp.where(attends, lse, jnp.inf)[..., None], *more

    def make_queries(self, *arrays: Array) -> FusedQueries:
        """Makes what `backward` takes, of arrays that are laid out."""
        query, out_grad, out, *narrow = arrays
        return FusedQueries(query, out_grad, out, *(array[..., 0] for array in narrow))

    def start_gradients(self, queries: FusedQueries, keys: Keys, step: Any = 0, **given: Array) -> FusedGradients:
        """Returns the gradients of nothing but those given."""
        del step
        dtype = accumulation_dtype(queries.query, *keys)
        arrays = {"query": queries.query, **keys._asdict()}
        return FusedGradients(
            **given, **{name: jnp.zeros_like(array, dtype) for name, array in arrays.items() if name not in given}
        )

    def backward(
        self, queries: FusedQueries, keys: Keys, meeting: Meeting, weighting: Weighting, grads: FusedGradients
    ) -> FusedGradients:
        """Adds what the pairs that meet contribute to sums of gradients under way."""

        def differentiate(queries: FusedQueries, keys: Keys, is_causal: bool = False) -> tuple[Array, ...]:
            return _differentiate(self.kernel, queries, keys, is_causal, weighting.scale)

        def all_on_early(queries: FusedQueries, keys: Keys) -> tuple[Array, ...]:
            query_grad, *keys_grad = differentiate(queries, jax.tree.map(_early, keys))
            return query_grad, *map(_pad_late, keys_grad)

        def late_on_all(queries: FusedQueries, keys: Keys) -> tuple[Array, ...]:
            query_grad, *keys_grad = differentiate(jax.tree.map(_late, queries), keys)
            return _pad_early(query_grad), *keys_grad

        def nothing(queries: FusedQueries, keys: Keys) -> tuple[Array, ...]:
            return tuple(jnp.zeros_like(array) for array in (queries.query, *keys))

        addends = _switch(meeting, differentiate, all_on_early, late_on_all, nothing)(queries, keys)
        return FusedGradients(*map(jnp.add, grads, addends))

    def finish_gradients(self, grads: FusedGradients, weighting: Weighting) -> tuple[Array, Array, Array]:
        """Returns the gradients of queries, keys and values."""
        del weighting  # the kernel's
        return grads.query, grads.key, grads.value


# Two shards of a balanced ring, each with an early and a late half of rows: of the shard whose early half is earlier,
# the late half is later, because the numbers of the halves of a shard have the same sum on all. So either all queries
# come after the early keys, and before the late ones, or the late queries come after all keys, and the early ones
# before: each time half of the pairs, without a mask. A shard's own rows are in order: causal attention.


def _switch(
    meeting: Meeting,
    whole: Callable[..., Any],
    all_on_early: Callable[..., Any],
    late_on_all: Callable[..., Any],
    nothing: Callable[..., Any],
) -> Callable[..., Any]:
    """Returns the case of a meeting: where it is known beforehand, that case alone."""
    branch = meeting.branch
    queries, keys = meeting.queries, meeting.keys
    case, cases = 0, [lambda *arrays: whole(*arrays, is_causal=branch.is_causal)]
    if branch.is_balanced:
        case = jnp.where(keys < queries, 1, jnp.where(keys > queries, 2, 0))
        cases += [all_on_early, late_on_all]
    if branch.num_shards % branch.ring_size:
        case = jnp.where(meeting.is_new, case, len(cases))
        cases += [nothing]
    return lambda *arrays: jax.lax.switch(case, cases, *arrays) if len(cases) > 1 else cases[0](*arrays)


def _early(array: Array) -> Array:
    return array[:, : array.shape[1] // 2]


def _late(array: Array) -> Array:
    return array[:, array.shape[1] // 2 :]


def _pad_early(array: Array, value: float = 0.0) -> Array:
    return jnp.concatenate([jnp.full_like(array, value), array], axis=1)


def _pad_late(array: Array) -> Array:
    return jnp.concatenate([array, jnp.zeros_like(array)], axis=1)


# Kernels know no cotangent l of the lse: they compute dS = P (g . v - g . out). With one more column, of ones in v, of
# l in g and of zeros in out, that is P (g . v + l - g . out), as it should be. Widths grow by what kernels align to.
ALIGNMENT = 8


def _differentiate(
    kernel: Kernel, queries: FusedQueries, keys: Keys, is_causal: bool, scale: float
) -> tuple[Array, Array, Array]:
    if queries.lse_grad is None:
        return kernel.differentiate(queries, keys, is_causal, scale)
    widen = lambda array, column: jnp.concatenate([array, _first_of(column, array)], axis=-1)
    query, out_grad, out, lse, lse_grad = queries
    wide = FusedQueries(widen(query, 0), widen(out_grad, lse_grad), widen(out, 0), lse)
    grads = kernel.differentiate(wide, Keys(widen(keys.key, 0), widen(keys.value, 1)), is_causal, scale)
    query_grad, key_grad, value_grad = (grad[..., :-ALIGNMENT] for grad in grads)
    return query_grad, key_grad, value_grad


def _first_of(column: Any, array: Array) -> Array:
    """Columns of zeros, but for the first."""
    column = jnp.broadcast_to(jnp.asarray(column, array.dtype), array.shape[:-1])[..., None]
    return jnp.pad(column, [(0, 0)] * (array.ndim - 1) + [(0, ALIGNMENT - 1)])


def _obstacle_of_request(request: Request) -> str | None:
    if request.needs:
        return f"no fused kernel knows {', '.join(request.needs)}"
    if request.unmapped:
        # To the compiler's partitioner a kernel is opaque: it would gather what these axes cut.
        axes = request.unmapped
        return f"the mesh axes {axes} are Auto: say with spec=P(...) what they cut, or make them Explicit"
    return None


def _obstacle_of_branch(branch: BranchSchedule) -> str | None:
    name = f"the branch {branch.branch}"
    if branch.is_general:
        return "queries and keys lie at different positions"
    if branch.earlier:
        return f"{name} of a union leaves out pairs of earlier branches"
    if not branch.is_dense:
        return f"{name} on {branch.num_shards} shards has slots without rows, or rows that meet and do not all attend"
    if branch.strategy == "all_gather" and not branch.is_local:
        return f"{name} spans devices, and strategy='all_gather' brings keys of other lengths to each"
    return None
