"""The differentiation rule around all shards, outside shard_map."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from ringjax._mesh.axes import Axes, cut_of_batch
from ringjax._mesh.order import when_lowered
from ringjax._parallel.device import Backward, Context, device_backward, device_forward
from ringjax._parallel.plan import Plan
from ringjax._pattern.promotion import own_promotion


# The rule stands outside shard_map: its residuals are the arguments and the results, sharded as the caller has them.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def ring_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    context: Context,
    plan: Plan,
) -> tuple[Array, ...]:
    """Computes the output, the lse and perhaps the greatest logits of attention over all shards, as the plan says."""
    outputs = "qqq" if plan.has_maximum else "qq"
    with _one_trace():
        return _map(device_forward, "qkk" + Context.KINDS, outputs, (query, key, value, *context), plan)


def _one_trace() -> Any:
    """Sets the current abstract mesh explicitly, so that JAX traces the same map once.

    JAX traces the function that has a rule, and then the rule's forward, for which it sets an empty mesh if none is
    set. Here that mesh is set for both: otherwise each would have a trace of its own.
    """
    return jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())


@functools.partial(jax.jit, static_argnames=("function", "inputs", "outputs", "plan"), inline=True)
def _map(function: Callable[..., Any], inputs: str, outputs: str, arrays: tuple[Array | None, ...], plan: Plan) -> Any:
    """Maps a function over devices. Under vmap the new axis is one more batch dimension: each instance skips its tiles.

    If instances have different offsets, it is an ordinary vmap instead.
    """
    over_devices = _over_devices(function, inputs, outputs, plan)
    folded = jax.custom_batching.custom_vmap(over_devices)

    @folded.def_vmap
    def _(size: int, is_batched: Any, *arrays: Array | None) -> Any:
        cuts = (cut_of_batch(array) for array, has in zip(arrays, is_batched, strict=True) if array is not None and has)
        cut = next(filter(None, cuts), ())
        if Context(*is_batched[-len(Context._fields) :]).query_offset:
            results = _vmap_offsets(over_devices, is_batched, arrays, cut)
        else:
            folded_plan = plan.with_batch(cut or plan.placement.idle_axes(size))
            spread = functools.partial(_spread, size, folded_plan)
            with _one_trace():
                results = _map(function, inputs, outputs, tuple(map(spread, inputs, arrays, is_batched)), folded_plan)
        return results, jax.tree.map(lambda _: True, results)

    return folded(*arrays)


def _over_devices(function: Callable[..., Any], inputs: str, outputs: str, plan: Plan) -> Callable[..., Any]:
    """Returns the function over whole arrays, with one version for each platform if only lowering tells which it is."""
    mapped = plan.placement.map(functools.partial(function, plan=plan), inputs, outputs)
    if plan.elsewhere is None:
        return mapped
    plan_elsewhere = dataclasses.replace(plan, schedules=plan.elsewhere, elsewhere=None)
    elsewhere = _over_devices(function, inputs, outputs, plan_elsewhere)
    names = (plan.implementation(schedule).platform for schedule in plan.schedules)
    return when_lowered(elsewhere, {name: mapped for name in names if name is not None})


def _spread(size: int, plan: Plan, kind: str, array: Array | None, has_batch: Any) -> Array | None:
    """Gives an array the batch dimension of a vmap, unless its kind is "r": the same for all instances."""
    if array is None or kind == "r":
        return array
    array = array if has_batch else jnp.broadcast_to(array, (size, *array.shape))
    return plan.placement.reshard(array, kind)


def _vmap_offsets(function: Callable[..., Any], is_batched: Any, arrays: Any, cut: Axes) -> Any:
    """Maps a function of all devices over instances with different offsets, which cannot share one schedule."""
    refusal = NotImplementedError(
        "query_offset differs between the instances of a jax.vmap that an axis of the mesh cuts: leave its "
        "spmd_axis_name out, and shard no dimension that it maps along an Explicit axis"
    )
    if cut:
        raise refusal
    try:
        return jax.vmap(function, [0 if has else None for has in is_batched])(*arrays)
    except NameError as error:  # inside of shard_map jax does not know the name of the axis
        raise refusal from error


def _ring_attention_fwd(query: Any, key: Any, value: Any, context: Any, plan: Plan) -> tuple[Any, Any]:
    arrays = query.value, key.value, value.value
    context = jax.tree.map(lambda array: array.value, context, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))
    results: Any = ring_attention(*arrays, context, plan)
    out, lse, *maximum = results
    # Named, so that a checkpoint policy can save them: rematerialization then does not go around the ring. The lse of
    # a row that attends to nothing is -inf. It is saved as a finite number, since `jax.debug_infs` would report -inf.
    out, kept_lse = map(checkpoint_name, (out, jnp.maximum(lse, _lowest(lse))), ("ringjax_out", "ringjax_lse"))
    return (out, _with_infinity(kept_lse), *maximum), (*arrays, context, out, kept_lse)


def _lowest(lse: Array) -> float:
    return float(jnp.finfo(lse.dtype).min)


def _with_infinity(kept_lse: Array) -> Array:
    return jnp.where(kept_lse == _lowest(kept_lse), -jnp.inf, kept_lse)


@own_promotion()
def _ring_attention_bwd(plan: Plan, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    query, key, value, context, out, kept_lse = residuals
    lse = _with_infinity(kept_lse)
    # The cotangent of an unused result is a symbolic zero. A greatest logit has no gradient.
    out_grad, lse_grad = (None if isinstance(cotangent, SymbolicZero) else cotangent for cotangent in cotangents[:2])
    return *_backward(Backward(query, key, value, out, lse, out_grad, lse_grad), context, plan), None


ring_attention.defvjp(_ring_attention_fwd, _ring_attention_bwd, symbolic_zeros=True)


@contextlib.contextmanager
def naming_the_reference() -> Iterator[None]:
    """Makes JAX's forward-mode error name the function that supports it; under jax.jit JAX raises its own later."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            "ring_dilated_attention has no forward mode (jax.jvp, jax.jacfwd, jax.hessian): differentiate "
            "dilated_attention_reference instead"
        ) from error


# Second derivatives would differentiate the backward's loops, whose lengths are data. This rule refuses them.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _backward(given: Backward, context: Context, plan: Plan) -> tuple[Array, Array, Array]:
    with _one_trace():
        return _map(device_backward, Backward.KINDS + Context.KINDS, "qkk", (*given, *context), plan)


def _no_second_derivative(*_: Any) -> Any:
    raise NotImplementedError(
        "ring_dilated_attention has no second derivative: differentiate dilated_attention_reference instead"
    )


_backward.defvjp(_no_second_derivative, _no_second_derivative)
