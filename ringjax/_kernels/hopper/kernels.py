"""Kernels for Hopper GPUs: attention of tiles of queries on tiles of keys, with any mask, forward and backward.

They compute what `tpu.kernels` computes on TPUs. A warpgroup computes some rows of the stationary tile, and holds their
sums in registers. Products are of 16-bit numbers, sums in float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ringjax._kernels.hopper.buffers import TILE_ROWS, plgpu
from ringjax._kernels.hopper.call import OWN_ROWS, GpuStep, launch
from ringjax._kernels.mask import is_allowed
from ringjax._kernels.operands import KEYS, LEAST, LOG2E, QUERIES, Given, forward_call, gradient_call
from ringjax._kernels.softmax import Weighting
from ringjax._pattern import dropout

# The rows of a streamed tile that gradients take at once: as many as registers can hold the weights of.
_PART_ROWS = 64
# The layout of a tile's values in the registers of a warpgroup: that of the matrix unit's results.
_TILE = plgpu.Layout.WGMMA
_COLUMN, _ROW = _TILE.reduce(1), _TILE.reduce(0)
STAYS, PASSES = 0, 1  # the axes of a tile of pairs: stationary and streamed rows

Sums = tuple[Array, ...]


def parts_of(rows: int) -> tuple[int, ...]:
    """Returns the possible numbers of streamed tiles in one step."""
    del rows
    return (1,)


# Inside kernels. Pallas' interpreter has no matrix unit with register operands, and multiplies arrays instead.


def _transposed(ref: Any) -> Any:
    return ref.transpose((1, 0))


def _multiply(one: Any, other: Any, interpret: Any, meanwhile: Callable[[], None] = lambda: None) -> Array:
    """Returns the product of stationary rows with a matrix; calls `meanwhile` before it waits for the result."""
    if interpret:
        meanwhile()
        return jnp.dot(one[...], other[...], preferred_element_type=jnp.float32)

    def run(total: Any) -> Any:
        plgpu.wgmma(total, one, other)
        meanwhile()
        return total[...]

    return pl.run_scoped(run, plgpu.ACC((one.shape[0], other.shape[1]), jnp.float32))


def _add_products(sums: Sums, pairs: Sequence[tuple[Any, Any]], interpret: Any) -> Sums:
    """Adds products of stationary rows, or their weights, with matrices: a pair for each of the sums."""
    if interpret:
        dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
        return tuple(total + dot(one[...], other[...]) for total, (one, other) in zip(sums, pairs, strict=True))

    def run(refs: Any) -> None:
        for ref, (one, other) in zip(refs, pairs, strict=True):
            plgpu.wgmma(ref, one, other)

    return tuple(pl.run_state(run)(tuple(map(plgpu.ACC.init, sums))))


def _zeros(width: int) -> Array:
    return plgpu.layout_cast(jnp.zeros((OWN_ROWS, width), jnp.float32), _TILE)


def _rows(ref: Any) -> Array:
    """Reads rows of sums.

    The type of a value that is read varies along mesh axes, that of an operation's result in a kernel does not, and a
    loop needs equal types: so the value is multiplied.
    """
    return plgpu.load(ref, layout=_TILE, optimized=False) * 1.0


def _per_row(ref: Any, axis: int) -> Array:
    """Reads the value of each row, laid out for an axis of pairs."""
    return plgpu.load(ref, layout=_ROW if axis == PASSES else _COLUMN, optimized=False)


def _axis(side: int, stationary: int) -> int:
    """Returns the axis of the rows of a side in a tile of pairs."""
    return STAYS if side == stationary else PASSES


def _widen(array: Array, axis: int, shape: tuple[int, ...]) -> Array:
    """Broadcasts per-row values to all pairs."""
    return jax.lax.broadcast_in_dim(array, shape, [axis])


def _read(refs: Any, axis: int, shape: tuple[int, ...]) -> Any:
    """Reads the values of rows along an axis, for all pairs."""
    return jax.tree.map(lambda ref: _widen(_per_row(ref, axis), axis, shape), refs)


def _masks(refs: Any, stationary: int, shape: tuple[int, ...]) -> list[Any]:
    """Reads the masks of queries and keys, for all pairs."""
    return [_read(of_side, _axis(side, stationary), shape) for side, of_side in zip((QUERIES, KEYS), refs, strict=True)]


def _mask(scores: Array, refs: Any, stationary: int, is_full: Any) -> Array:
    """Returns the scores of pairs that attend, and minus infinity for others."""
    hide = lambda: jnp.where(is_allowed(*_masks(refs, stationary, scores.shape)), scores, -jnp.inf)
    return jax.lax.cond(is_full, lambda: scores, hide)


def _scores(weighting: Weighting, product: Array) -> Array:
    """Returns what `Weighting.scores` does, to within 2e-6 of the cap."""
    if weighting.logits_soft_cap is None:
        return product
    # tanh(x) = 1 - 2 / (1 + exp(2 x)). A GPU's own tanh errs by 5e-4, its exponential and inverse root by 2^-22; a
    # polynomial takes twice as many instructions as these, and registers that the sums need.
    inverse_root = jax.lax.rsqrt(1 + jnp.exp2(product * (2 * LOG2E * weighting.scale / weighting.logits_soft_cap)))
    return 1 - 2 * (inverse_root * inverse_root)


def _is_kept(refs: Any, stationary: int, shape: tuple[int, ...], rate: float) -> Array:
    queries, keys = refs
    words = _read(queries.stream, _axis(QUERIES, stationary), shape)
    start, step = (jax.lax.bitcast_convert_type(word, jnp.uint32) for word in words)
    return dropout.is_kept(start, step, _read(keys.position, _axis(KEYS, stationary), shape), rate)


@dataclasses.dataclass(frozen=True)
class _Forward:
    """The online softmax of each query: its maximum, as an exponent of two, its denominator, and its numerator.

    If it `has_maximum`, it returns the greatest logit too, which has a sum of its own where earlier results begin it:
    then the maximum begins with their lse.
    """

    weighting: Weighting
    width: int
    interpret: Any
    has_maximum: bool = False

    takes_turns = True

    def start(self, before: tuple[Any, ...]) -> Sums:
        if not before:
            row = lambda fill: plgpu.layout_cast(jnp.full(OWN_ROWS, fill, jnp.float32), _COLUMN)
            return row(LEAST), row(0.0), _zeros(self.width)
        # The earlier result counts as one key with weight one.
        out, lse, *greatest = before
        lse = _per_row(lse, STAYS)
        total = jnp.where(lse == -jnp.inf, 0.0, 1.0)
        return jnp.maximum(lse * LOG2E, LEAST), total, _rows(out), *(_per_row(one, STAYS) * LOG2E for one in greatest)

    def step(self, step: GpuStep, sums: Sums) -> Sums:
        masks, (query,), (key, value), *_ = step.given
        (former, total, out, *greatest), rate = sums, self.weighting.dropout_rate
        logit_scale = self.weighting.logit_scale * LOG2E

        def hand_over() -> None:
            step.arrive()
            step.take_turn()

        step.wait(0)
        scores = _multiply(query, _transposed(key), self.interpret, hand_over)
        scores = _mask(_scores(self.weighting, scores), masks, QUERIES, step.is_full)
        if not rate:
            step.release(0)
        of_tile = scores.max(axis=1) * logit_scale
        maximum = jnp.maximum(former, of_tile)
        greatest = [jnp.maximum(one, of_tile) for one in greatest]
        weights = jnp.exp2(scores * logit_scale - _widen(maximum, STAYS, scores.shape))
        decay = jnp.exp2(former - maximum)
        out, total = out * _widen(decay, STAYS, out.shape), total * decay + weights.sum(axis=1)
        if rate:
            is_kept = _is_kept(masks, QUERIES, weights.shape, rate)
            weights = jnp.where(is_kept, weights * self.weighting.kept_scale, 0.0)
            step.release(0)
        weights = weights.astype(value.dtype)
        # Complete before the turn ends: one warpgroup makes weights while the other one multiplies.
        out, total, maximum, weights = jax.lax.optimization_barrier((out, total, maximum, weights))
        step.arrive()
        step.wait(1)
        step.take_turn()
        (out,) = _add_products((out,), [(weights, value)], self.interpret)
        step.release(1)
        return maximum, total, out, *greatest

    def finish(self, sums: Sums, before: tuple[Any, ...]) -> Sums:
        del before
        maximum, total, out, *greatest = sums
        is_empty = total == 0
        inverse = jnp.where(is_empty, 0.0, 1 / total)
        lse = jnp.where(is_empty, -jnp.inf, maximum * math.log(2) + jnp.log(total))
        if self.has_maximum:
            greatest = [one * math.log(2) for one in greatest or [jnp.where(is_empty, -jnp.inf, maximum)]]
        return out * _widen(inverse, STAYS, out.shape), lse, *greatest


# The backward, which `_kernels.softmax` derives. Each of its two kernels recomputes the weights. The kernel of keys
# computes them transposed: a tile of pairs has the stationary rows first.


@dataclasses.dataclass(frozen=True)
class _Gradient:
    weighting: Weighting
    widths: tuple[int, ...]
    interpret: Any

    takes_turns = False

    def start(self, before: tuple[Any, ...]) -> Sums:
        del before
        return tuple(map(_zeros, self.widths))

    def weigh(self, one: Any, other: Any, lse: Any, masks: Any, stationary: int, is_full: Any) -> tuple[Array, Array]:
        """Returns the weights of pairs after dropout; and weights times the slope of a cap, negative where dropped."""
        dtype, rate = one.dtype, self.weighting.dropout_rate
        scores = _scores(self.weighting, _multiply(one, _transposed(other), self.interpret))
        seen = _mask(scores, masks, stationary, is_full)
        lse = _read(lse, _axis(QUERIES, stationary), seen.shape)
        weights = jnp.exp2(seen * (self.weighting.logit_scale * LOG2E) - lse * LOG2E)
        if rate:
            weights = jnp.where(_is_kept(masks, stationary, seen.shape, rate), weights, -weights)
        found = self.keep(weights, weights).astype(dtype)
        if self.weighting.logits_soft_cap is not None:
            # Computed here, because registers have no room for the scores beside other weights.
            weights = jax.lax.optimization_barrier(weights * (1 - scores * scores))
        return found, weights

    def logits_grad(self, weights: Array, weights_grad: Array, delta: Any, stationary: int) -> Array:
        """Returns the gradient of logits without the scale."""
        delta = _read(delta, _axis(QUERIES, stationary), weights.shape)
        return jnp.abs(weights) * (self.keep(weights_grad, weights) - delta)

    def keep(self, array: Array, weights: Array) -> Array:
        """Applies dropout, if any: scales up the entries of positive weights, and zeroes the others."""
        rate = self.weighting.dropout_rate
        return jnp.where(weights > 0, array * self.weighting.kept_scale, 0.0) if rate else array

    def finish(self, sums: Sums, before: tuple[Any, ...]) -> Sums:
        scales = self.weighting.scale, 1.0
        grads = tuple(total * scale for total, scale in zip(sums, scales, strict=False))
        if not before:
            return grads
        loaded = map(_rows, before)
        return tuple(grad + former for grad, former in zip(grads, loaded, strict=True))


def _parts(tree: Any) -> list[Any]:
    """Cuts references to a streamed tile into references to its parts of `_PART_ROWS` rows."""
    starts = range(0, TILE_ROWS, _PART_ROWS)
    return [jax.tree.map(lambda ref, start=start: ref.at[pl.ds(start, _PART_ROWS)], tree) for start in starts]


class _QueryGradient(_Gradient):
    """The gradient of queries."""

    def step(self, step: GpuStep, sums: Sums) -> Sums:
        (query_masks, key_masks), (query, out_grad), (key, value), stats, _ = step.given
        step.wait(0)
        step.wait(1)
        for key_part, value_part, masks in zip(*map(_parts, (key, value, key_masks)), strict=True):
            _, weights = self.weigh(query, key_part, stats.lse, (query_masks, masks), QUERIES, step.is_full)
            weights_grad = _multiply(out_grad, _transposed(value_part), self.interpret)
            grad = self.logits_grad(weights, weights_grad, stats.delta, QUERIES)
            sums = _add_products(sums, [(grad.astype(key.dtype), key_part)], self.interpret)
        step.release(1)
        step.release(0)
        return sums


class _KeyGradient(_Gradient):
    """The gradients of keys and of values."""

    def step(self, step: GpuStep, sums: Sums) -> Sums:
        (query_masks, key_masks), (query, out_grad), (key, value), stats, _ = step.given
        key_sum, value_sum = sums
        step.wait(0)
        step.wait(1)
        streamed = map(_parts, (query, out_grad, stats, query_masks))
        for query_part, out_grad_part, some, masks in zip(*streamed, strict=True):
            found, weights = self.weigh(key, query_part, some.lse, (masks, key_masks), KEYS, step.is_full)
            # Beside the sums, registers have room for these weights only.
            pairs = (found, out_grad_part), (value, _transposed(out_grad_part))
            zeros = plgpu.layout_cast(jnp.zeros_like(weights), _TILE)
            value_sum, weights_grad = _add_products((value_sum, zeros), pairs, self.interpret)
            grad = self.logits_grad(weights, weights_grad, some.delta, KEYS)
            (key_sum,) = _add_products((key_sum,), [(grad.astype(query.dtype), query_part)], self.interpret)
        step.release(1)
        step.release(0)
        return key_sum, value_sum


def forward(given: Given, before: Sums | None = None) -> tuple[Array, ...]:
    """Returns what `tpu.kernels.forward` does, with heads after rows."""
    kernel = _Forward(given.weighting, given.value.shape[-1], given.interpret, given.has_maximum)
    return tuple(launch(forward_call(kernel, given, before)))


def backward_queries(given: Given, before: Sums | None = None) -> Float[Array, "B T N H"]:
    """Returns what `tpu.kernels.backward_queries` does, with heads after rows."""
    kernel = _QueryGradient(given.weighting, (given.query.shape[-1],), given.interpret)
    (grad,) = launch(gradient_call(kernel, given, QUERIES, before))
    return grad


def backward_keys(given: Given, before: Sums | None = None) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """Returns what `tpu.kernels.backward_keys` does, with heads after rows."""
    widths = given.key.shape[-1], given.value.shape[-1]
    kernel = _KeyGradient(given.weighting, widths, given.interpret)
    key_grad, value_grad = launch(gradient_call(kernel, given, KEYS, before))
    return key_grad, value_grad
