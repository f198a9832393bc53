"""The differentiation rule around all branches, outside shard_map, and what one shard does for it.

Below the rule everything sees one shard: B batch, n tokens of the shard, K key/value heads, G query heads of each,
N = K * G, H and V the widths.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int, Integer, UInt

from ringjax import _gather, _ring
from ringjax._block import Keys, accumulation_dtype, merge
from ringjax._branches import Addition, Layout, add_branches
from ringjax._meeting import Noise, Tiles
from ringjax._order import after
from ringjax._plan import Plan
from ringjax._promotion import with_own_promotion

# Each strategy is a module of two functions: `forward` and `backward` of one branch on one shard.
STRATEGIES: dict[str, Any] = {"ring": _ring, "all_gather": _gather}


class Context(NamedTuple):
    """What attention depends on beside its arguments, and is not differentiated by."""

    query_documents: Int[Array, "*B T"] | None = None
    key_documents: Int[Array, "*B S"] | None = None
    seed: UInt[Array, "2"] | None = None
    query_offset: Integer[Array, ""] | None = None

    @property
    def documents(self) -> tuple[Array | None, Array | None]:
        """The documents of queries and of keys."""
        return self.query_documents, self.key_documents


# The rule stands outside shard_map: its residuals are the arguments and the results, sharded as the caller has them.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def ring_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    context: Context,
    plan: Plan,
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Computes the output and the lse of attention over all shards, as the plan says."""
    return _map(_shard_forward, "qkkddrr", "qq", (query, key, value, *context), plan)


def _map(shard: Callable[..., Any], inputs: str, outputs: str, arrays: tuple[Array | None, ...], plan: Plan) -> Any:
    """Maps a function of shards. Under vmap its axis is one more of the batch: so each skips the tiles that it can.

    But where instances draw for themselves, or begin at positions of their own.
    """

    def run(plan: Plan, *arrays: Array | None) -> Any:
        mapped = plan.placement.map(functools.partial(shard, plan=plan), inputs, outputs)
        if plan.elsewhere is None:
            return mapped(*arrays)
        elsewhere = functools.partial(run, dataclasses.replace(plan, branches=plan.elsewhere, elsewhere=None))
        return jax.lax.platform_dependent(*arrays, cuda=mapped, default=elsewhere)

    folded = jax.custom_batching.custom_vmap(functools.partial(run, plan))

    @folded.def_vmap
    def _(size: int, is_batched: Any, *arrays: Array | None) -> Any:
        seed, (_, is_moved) = arrays[-2], is_batched[-2:]
        if seed is not None or is_moved:
            axes = jax.tree.map(lambda has: 0 if has else None, tuple(is_batched))
            results = jax.vmap(functools.partial(run, plan), axes)(*arrays)
        else:
            spread = lambda array, has: array if has else jnp.broadcast_to(array, (size, *array.shape))
            whole = jax.tree.map(spread, arrays[:-2], tuple(is_batched[:-2]))
            results = _map(shard, inputs, outputs, (*whole, *arrays[-2:]), plan.with_batch())
        return results, jax.tree.map(lambda _: True, results)

    return folded(*arrays)


def _ring_attention_fwd(query: Any, key: Any, value: Any, context: Any, plan: Plan) -> tuple[Any, Any]:
    arrays = query.value, key.value, value.value
    context = jax.tree.map(lambda array: array.value, context, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))
    # Named, so that rematerialisation can keep them: then its second forward does not go around the ring.
    results: Any = ring_attention(*arrays, context, plan)
    out, lse = map(checkpoint_name, results, ("ringjax_out", "ringjax_lse"))
    return (out, lse), (*arrays, context, out, lse)


@with_own_promotion
def _ring_attention_bwd(plan: Plan, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    *arrays, context, out, lse = residuals
    # A result that nobody used has a symbol for its cotangent.
    grads = (None if isinstance(cotangent, SymbolicZero) else cotangent for cotangent in cotangents)
    return *_backward(*arrays, out, lse, *grads, context, plan), None


ring_attention.defvjp(_ring_attention_fwd, _ring_attention_bwd, symbolic_zeros=True)


# Second derivatives would differentiate the backward's loops, whose lengths are data: refused here, by name.
@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def _backward(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    lse: Array,
    out_grad: Array | None,
    lse_grad: Array | None,
    context: Context,
    plan: Plan,
) -> tuple[Array, Array, Array]:
    arrays = query, key, value, out, lse, out_grad, lse_grad, *context
    return _map(_shard_backward, "qkkqqqqddrr", "qkk", arrays, plan)


def _no_second_derivative(*_: Any) -> Any:
    raise NotImplementedError(
        "ring_dilated_attention has no second derivative: differentiate dilated_attention_reference instead"
    )


_backward.defvjp(_no_second_derivative, _no_second_derivative)


def _axes(arrays: Any, plan: Plan) -> frozenset[str]:
    """The mesh axes along which any of the arrays varies, and the sequence's."""
    axes = frozenset().union(*map(_varying_axes, jax.tree.leaves(arrays)))
    return axes if plan.placement.axis_name is None else axes | {plan.placement.axis_name}


def _cast(array: Array, axes: frozenset[str]) -> Array:
    return jax.lax.pcast(array, tuple(axes - _varying_axes(array)), to="varying")


def _group(
    query: Float[Array, "*B n N H"],
    key: Float[Array, "*B s K H"],
    value: Float[Array, "*B s K V"],
    axes: frozenset[str],
    plan: Plan,
) -> tuple[Float[Array, "b n k GH"], Float[Array, "b s k H"], Float[Array, "b s k V"]]:
    """Gives all arguments the same mesh axes to vary along, one batch dimension, and heads that match."""
    query, key, value = (_cast(array, axes).reshape(-1, *array.shape[-3:]) for array in (query, key, value))
    if plan.local_heads < key.shape[2]:  # fewer key/value heads than devices along the heads: each needs one of them
        pick = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=plan.first_head, slice_size=plan.local_heads, axis=2
        )
        key, value = pick(key), pick(value)
    return _group_heads(query, plan), key, value


def _group_heads(array: Float[Array, "*B n N H"], plan: Plan) -> Float[Array, "b n k GH"]:
    # Side by side: a dimension of their own would be of size one for many, which XLA:CPU may lay out anew.
    length, heads, width = array.shape[-3:]
    return array.reshape(-1, length, plan.local_heads, heads // plan.local_heads * width)


def _varying_axes(array: Array) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying


class _Branch(NamedTuple):
    """What one shard has for one branch: the rows, what draws their dropout, and the documents of all tokens.

    What it sends waits for the arrays `earlier`.
    """

    layout: Layout
    noise: Noise | None
    documents: tuple[Array | None, Array | None]
    plan: Plan
    earlier: Any = None

    def queries(self, arrays: Any) -> Tiles:
        """Returns rows of queries with their documents, where they are computed."""
        return self.plan.swap(self.layout.rows.branch, self._tiles(self.layout, arrays, self.documents[0]))

    def keys(self, key: Array, value: Array) -> Tiles:
        """Returns rows of keys and values with their documents, where they are kept."""
        layout = self.layout.of_keys()
        return self._tiles(layout, Keys(layout.take(key), layout.take(value)), self.documents[1])

    def _tiles(self, layout: Layout, arrays: Any, documents: Array | None) -> Tiles:
        return after(Tiles(arrays, None if documents is None else layout.take_documents(documents)), self.earlier)

    def run(self, direction: str, arrays: Any, key: Array, value: Array) -> Any:
        """Runs the strategy in one direction, given rows of queries that are laid out, and tokens of keys."""
        rows, noise = self.layout.rows, self.noise
        if noise is not None:
            noise = noise._replace(head=rows.heads.of_heads(noise.head))
        strategy = getattr(STRATEGIES[self.plan.strategy], direction)
        return strategy(self.queries(arrays), self.keys(key, value), rows, noise, self.plan)


def _shard_forward(query: Array, key: Array, value: Array, *context: Any, plan: Plan) -> tuple[Array, Array]:
    plan = plan.at(Context(*context).query_offset)
    axes = _axes((query, key, value, context), plan)
    arrays, context = _group(query, key, value, axes, plan), _group_context(Context(*context), axes)
    noise = plan.noise(context.seed, query.shape[:-3], query.shape[-2])
    groups = query.shape[-2] // plan.local_heads

    def attend(layout: Layout, arrays: Any, earlier: Any) -> Any:
        (query, key, value), documents = arrays
        branch = _Branch(layout, noise, documents, plan, earlier)
        partial = branch.run("forward", layout.take(query, groups), key, value)
        out, lse = plan.swap_back(layout.rows.branch, layout.implementation.finish(partial))
        return out, lse[..., None]

    def merge_one(layout: Layout, total: Any, results: Any) -> Any:
        before = tuple(layout.take(array, groups) for array in total)
        return tuple(map(layout.put, total, merge_many([before, results])))

    def merge_many(parts: list[Any]) -> Any:
        out, lse = merge([out for out, _ in parts], [lse[..., 0] for _, lse in parts])
        return out, lse[..., None]

    out_shape = (*query.shape[:-1], value.shape[-1])
    out = jnp.zeros_like(query, accumulation_dtype(query, key, value), shape=out_shape)
    total: Any = _group_heads(out, plan), _group_heads(out[..., :1] - jnp.inf, plan)
    total = jax.tree.map(lambda array: _cast(array, axes), total)
    addition = Addition((0.0, -jnp.inf), (groups, groups), merge_one, merge_many)
    out, lse = add_branches(attend, addition, (arrays, context.documents), total, plan)
    return out.astype(query.dtype).reshape(out_shape), lse.reshape(query.shape[:-1])


def _group_context(context: Context, axes: frozenset[str]) -> Context:
    """Gives documents one batch dimension, and the mesh axes that the arguments vary along."""
    cast = lambda array: None if array is None else _cast(array.reshape(-1, array.shape[-1]), axes)
    return context._replace(query_documents=cast(context.query_documents), key_documents=cast(context.key_documents))


def _shard_backward(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    lse: Array,
    out_grad: Array | None,
    lse_grad: Array | None,
    *context: Any,
    plan: Plan,
) -> tuple[Array, Array, Array]:
    plan = plan.at(Context(*context).query_offset)
    axes = _axes((query, key, value, context), plan)
    # Grouping is linear: its transpose sums a gradient over the axes along which its argument is the same.
    arrays, ungroup = jax.vjp(functools.partial(_group, axes=axes, plan=plan), query, key, value)
    context = _group_context(Context(*context), axes)
    noise = plan.noise(context.seed, query.shape[:-3], query.shape[-2])
    dtype = lse.dtype
    out_grad = jnp.zeros_like(out) if out_grad is None else out_grad
    # A compiler that merged this ring's permutes with the forward's would keep every shard alive in between, and one
    # that knew that the gradients begin as zeros would make these arrays long before they are needed.
    arrays, out_grad, zero = jax.lax.optimization_barrier((arrays, out_grad, jnp.zeros((), dtype)))
    groups = query.shape[-2] // plan.local_heads
    # What the backward of each implementation needs of a query, before any rows are taken.
    of_queries = {
        branch.implementation: [
            _group_heads(array, plan) for array in plan.implementation(branch).of_queries(out, lse, out_grad, lse_grad)
        ]
        for branch in plan.branches
    }

    def differentiate(layout: Layout, arrays: Any, earlier: Any) -> Any:
        (query, key, value), of_queries, documents = arrays
        more = of_queries[layout.rows.branch.implementation]
        queries = layout.implementation.make_queries(*(layout.take(array, groups) for array in (query, *more)))
        branch = _Branch(layout, noise, documents, plan, earlier)
        query_grad, *keys_grad = branch.run("backward", queries, key, value)
        return plan.swap_back(layout.rows.branch, query_grad), *keys_grad

    def add_one(layout: Layout, total: Any, addends: Any) -> Any:
        layouts = layout, layout.of_keys(), layout.of_keys()
        return tuple(one.put(grad, addend, jnp.add) for one, grad, addend in zip(layouts, total, addends, strict=True))

    def add_many(parts: list[Any]) -> Any:
        return functools.reduce(lambda some, others: jax.tree.map(jnp.add, some, others), parts)

    grads = tuple(jnp.zeros_like(array, dtype) + zero for array in arrays)
    addition = Addition((0.0, 0.0, 0.0), (groups, 1, 1), add_one, add_many)
    # The forward's rings come first, and those of layers behind it.
    earlier = lse, out_grad, lse_grad
    grads = add_branches(differentiate, addition, (arrays, of_queries, context.documents), grads, plan, earlier)
    return ungroup(tuple(grad.astype(array.dtype) for grad, array in zip(grads, arrays, strict=True)))
