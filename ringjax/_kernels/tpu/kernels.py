"""Kernels for TPUs: attention of tiles of queries on tiles of keys, with any mask, forward and backward.

They compute what `tiles` computes with XLA. Letters: B batch, K key/value heads, N query heads, T queries, S
keys, H width of queries and keys, V width of values, Rq and Rk the rows of a tile of queries and of keys.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ringjax._kernels.block_list import FULL, PARTIAL, SOME, Step
from ringjax._kernels.mask import is_allowed
from ringjax._kernels.operands import KEYS, LEAST, LOG2E, QUERIES, Given, KernelCall, Sizes, forward_call, gradient_call
from ringjax._kernels.softmax import Weighting
from ringjax._kernels.tpu.call import launch
from ringjax._pattern import dropout

LANES = 128  # the columns of a register
STEP_ROWS = 2048  # the most rows of the streamed tiles of a step
# If a tile has more than `_MANY_ROWS` queries, keys of a full block are multiplied `_KEYS_AT_ONCE` at a time.
_MANY_ROWS, _KEYS_AT_ONCE = 512, 256

Sums = tuple[Array, ...]


def parts_of(rows: int) -> tuple[int, ...]:
    """Returns the possible numbers of streamed tiles of `rows` rows in one step, the largest first."""
    return (*(count for count in (4, 2) if count * rows <= STEP_ROWS), 1)


def _parts(of_mask: Array) -> int:
    return next(count for count in parts_of(of_mask.shape[-1]) if of_mask.shape[0] % count == 0)


# Inside kernels. Per-row values lie along lanes, [1, R]. If they have to lie along sublanes, they are transposed once
# for a step, to equal columns, [R, LANES].


def _column(row: Array) -> Array:
    return jnp.broadcast_to(row, (LANES, row.shape[-1])).T


def _columns(refs: Any) -> Any:
    return jax.tree.map(lambda ref: _column(ref[0]), refs)


def _widen(columns: Any, width: int) -> Any:
    """Returns `width` of equal columns, or one that broadcasts."""
    repeat = lambda column: jnp.tile(column, (1, width // LANES)) if width % LANES == 0 else column[:, :1]
    return jax.tree.map(repeat, columns)


def _fold_lanes(array: Array) -> Array:
    """Adds up the registers of a row, lane by lane: [R, LANES]. Adding up lanes is slow, and done once at the end."""
    return functools.reduce(jnp.add, (array[:, lane : lane + LANES] for lane in range(0, array.shape[1], LANES)))


def _rows(refs: Any, at: Any) -> Any:
    return jax.tree.map(lambda ref: ref[0, :, at], refs)


# Arrays have the rows of a head as [R, H], or, if `rows_last`, as [H, R]. Then the stationary tile is transposed, once.
# Streamed tiles are multiplied as they are, along one axis or the other.


def _staying(refs: tuple[Any, ...], transposed: tuple[Any, ...], step: Step) -> tuple[Any, ...]:
    """Returns references to the stationary tile, [R, H]: to its `transposed` copies, if there are any."""
    if not transposed:
        return tuple(ref.at[0] for ref in refs)

    @pl.when(step.is_first)
    def _() -> None:
        for ref, buffer in zip(refs, transposed, strict=True):
            buffer[...] = ref[0].T

    return transposed


def _passing(ref: Any, at: Any, sizes: Sizes) -> Array:
    return ref[0, :, at] if sizes.rows_last else ref[0, at, :]


def _turn(array: Array, sizes: Sizes) -> Array:
    """Converts rows from the layout of arrays to [R, H], and back."""
    return array.T if sizes.rows_last else array


def _for_parts(
    step: Step,
    parts: int,
    prepare: Callable[[bool], Any],
    compute: Callable[[Any, Any, bool], None],
    has_cut_path: bool,
) -> None:
    """Computes the active blocks of a step, one for each part.

    `prepare(is_cut)` returns what all of them need, and `compute(prepared, part, is_cut)` is called for each, with a
    mask if `is_cut`. An unrolled loop over the parts keeps the units busy, but takes long to compile: loops with a mask
    are unrolled only if `has_cut_path`.
    """

    def in_a_row(is_cut: bool) -> None:
        prepared = prepare(is_cut)
        for part in range(parts):
            compute(prepared, part, is_cut)

    def in_a_loop() -> None:
        prepared = prepare(True)

        @pl.loop(0, parts)
        def _(part: Any) -> None:
            pl.when(step.is_active(part))(lambda: compute(prepared, part, True))

    pl.when(step.case == FULL)(functools.partial(in_a_row, False))
    if has_cut_path:
        pl.when(step.case == PARTIAL)(functools.partial(in_a_row, True))
        if parts > 1:
            pl.when(step.case == SOME)(in_a_loop)
    else:
        pl.when((step.case == PARTIAL) | (step.case == SOME))(in_a_loop)


def _multiply(one: Array, other: Array, axis: int, weighting: Weighting) -> Array:
    dimensions = ((1,), (axis,)), ((), ())
    # Products of two bfloat16 are exact in float32, so the compiler has no higher precision for them.
    precision = weighting.precision if one.dtype == jnp.float32 else None
    return jax.lax.dot_general(one, other, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _products(one: Array, other: Array, sizes: Sizes, weighting: Weighting) -> Array:
    """Multiplies stationary rows with streamed rows: [R of one, R of other]."""
    return _multiply(one, other, 0 if sizes.rows_last else 1, weighting)


def _sums(weights: Array, other: Array, sizes: Sizes, weighting: Weighting) -> Array:
    """Adds up streamed rows, with weights [R of one, R of other]: [R of one, H]."""
    return _multiply(weights.astype(other.dtype), other, 1 if sizes.rows_last else 0, weighting)


def _drop(array: Array, masks: Any, weighting: Weighting) -> Array:
    queries, keys = masks
    start, step = (jax.lax.bitcast_convert_type(word, jnp.uint32) for word in queries.stream)
    is_kept = dropout.is_kept(start, step, keys.position, weighting.dropout_rate)
    return jnp.where(is_kept, array * weighting.kept_scale, 0)


def forward(given: Given, before: Sums | None = None) -> tuple[Array, ...]:
    """Returns the output [B, N, _, _] and the lse [B, N, T] of each query: zeros and -inf for an empty one.

    If `given` says so, it returns the greatest logit of each query as well. Given the results of other keys, `before`,
    it returns those of all keys.
    """
    kernel = functools.partial(_forward_kernel, weighting=given.weighting)
    # The maximum of the softmax begins with the lse of earlier keys, so the greatest logit has a sum of its own.
    of_logits = [LANES] * (given.has_maximum and before is not None)
    widths = LANES, LANES, given.width(given.value), *of_logits
    return tuple(_run(forward_call(kernel, given, before), given, widths))


def _run(call: KernelCall, given: Given, widths: tuple[int, ...]) -> list[Array]:
    """Runs a kernel that keeps sums of these widths for stationary rows, and these rows if they are transposed."""
    rows, stay = call.sizes.rows[call.stationary], call.queries if call.stationary == QUERIES else call.keys
    sums = tuple(pltpu.VMEM((rows, width), jnp.float32) for width in widths)
    transposed = tuple(pltpu.VMEM((rows, given.width(array)), array.dtype) for array in stay)
    scratch = sums, transposed if call.sizes.rows_last else ()
    streamed = call.mask.keys.position if call.stationary == QUERIES else call.mask.queries.last
    return launch(call._replace(scratch=scratch, parts=_parts(streamed)))


def _forward_kernel(step: Step, given: Any, results: Any, scratch: Any, sizes: Sizes, weighting: Weighting) -> None:
    (query_mask, key_mask), (query_ref,), (key_ref, value_ref), _, before = given
    softmax, transposed = scratch
    maximum_ref, denominator_ref, numerator_ref, *greatest_refs = softmax
    rows, width, logit_scale = sizes.rows[KEYS], numerator_ref.shape[1], weighting.logit_scale * LOG2E
    pl.when(step.is_first)(lambda: _start_softmax(softmax, before, sizes))
    (query_ref,) = _staying((query_ref,), transposed, step)

    def prepare(is_cut: bool) -> Any:
        return _columns(query_mask) if is_cut or weighting.dropout_rate else None

    def attend(columns: Any, part: Any, is_cut: bool) -> None:
        is_busy = is_cut or weighting.dropout_rate > 0  # has more work than products and their weights
        is_split = sizes.rows[QUERIES] > _MANY_ROWS and rows % _KEYS_AT_ONCE == 0 and not is_busy
        size = _KEYS_AT_ONCE if is_split else rows
        for start in range(0, rows, size):
            attend_to(columns, pl.ds(part * rows + start, size), is_cut)

    def attend_to(columns: Any, at: Any, is_cut: bool) -> None:
        scores = weighting.scores(_products(query_ref[...], _passing(key_ref, at, sizes), sizes, weighting))  # [Rq, Rk]
        masks = _widen(columns, at.size), _rows(key_mask, at)
        if is_cut:
            scores = jnp.where(is_allowed(*masks), scores, -jnp.inf)
        # The maximum is an exponent of two, the same in all lanes.
        former, greatest = maximum_ref[...], scores.max(axis=1, keepdims=True) * logit_scale
        maximum = jnp.maximum(former, greatest)  # [Rq, LANES]
        for ref in greatest_refs:
            ref[...] = jnp.maximum(ref[...], greatest)
        weights = jnp.exp2(scores * logit_scale - _widen(maximum, at.size))
        decay = jnp.exp2(former - maximum)
        denominator_ref[...] = decay * denominator_ref[...] + _fold_lanes(weights)
        maximum_ref[...] = maximum
        if weighting.dropout_rate:
            weights = _drop(weights, masks, weighting)
        added = _sums(weights, _passing(value_ref, at, sizes), sizes, weighting)  # [Rq, V]
        numerator_ref[...] = numerator_ref[...] * _widen(decay, width) + added

    _for_parts(step, sizes.parts[KEYS], prepare, attend, has_cut_path=True)
    pl.when(step.is_last)(lambda: _finish_softmax(results, softmax, sizes))


def _start_softmax(softmax: Any, before: Any, sizes: Sizes) -> None:
    """Starts the softmax of a tile: the results `before` count as one key of weight one, the sum of its lanes."""
    maximum_ref, denominator_ref, numerator_ref, *greatest_refs = softmax
    if before:
        before_out, before_lse, *before_greatest = before
        for ref, greatest in zip(greatest_refs, before_greatest, strict=True):
            ref[...] = _column(greatest[0]) * LOG2E
        lse = _column(before_lse[0])
        maximum_ref[...] = jnp.maximum(lse * LOG2E, LEAST)
        denominator_ref[...] = jnp.where(lse == -jnp.inf, 0.0, 1 / LANES)
        numerator_ref[...] = _turn(before_out[0], sizes)
    else:
        maximum_ref[...] = jnp.full_like(maximum_ref, LEAST)
        denominator_ref[...] = jnp.zeros_like(denominator_ref)
        numerator_ref[...] = jnp.zeros_like(numerator_ref)


def _finish_softmax(results: Any, softmax: Any, sizes: Sizes) -> None:
    """Writes the output, the lse and the greatest logit of a tile."""
    (out_ref, lse_ref, *greatest_refs), (maximum_ref, denominator_ref, numerator_ref, *own) = results, softmax
    denominator = jnp.broadcast_to(denominator_ref[...].sum(axis=1, keepdims=True), denominator_ref.shape)
    is_empty = denominator == 0
    out = numerator_ref[...] * _widen(jnp.where(is_empty, 0, 1 / denominator), numerator_ref.shape[1])
    out_ref[0] = _turn(out, sizes).astype(out_ref.dtype)
    lse = jnp.where(is_empty, -jnp.inf, maximum_ref[...] * math.log(2) + jnp.log(denominator))  # [Rq, LANES]
    lse_ref[0] = lse.T[:1]
    for ref in greatest_refs:
        greatest = own[0][...] if own else jnp.where(is_empty, -jnp.inf, maximum_ref[...])
        ref[0] = (greatest * math.log(2)).T[:1]


# The backward, which `_kernels.softmax` derives. Each of its two kernels recomputes the weights. The kernel of keys
# computes them transposed, so that none of its products has a transposed operand.


def backward_queries(given: Given, before: Sums | None = None) -> Float[Array, "B N _ _"]:
    """Returns the gradient of queries, added to that `before`."""
    kernel = functools.partial(_query_gradient_kernel, weighting=given.weighting)
    (grad,) = _run(gradient_call(kernel, given, QUERIES, before), given, (given.width(given.query),))
    return grad


def _query_gradient_kernel(
    step: Step, given: Any, results: Any, scratch: Any, sizes: Sizes, weighting: Weighting
) -> None:
    (query_mask, key_mask), (query_ref, out_grad_ref), (key_ref, value_ref), stats, before = given
    (grad_ref,), ((sum_ref,), transposed), rows = results, scratch, sizes.rows[KEYS]
    query_ref, out_grad_ref = _staying((query_ref, out_grad_ref), transposed, step)

    @pl.when(step.is_first)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def prepare(is_cut: bool) -> Any:
        return _columns(stats), _columns(query_mask) if is_cut or weighting.dropout_rate else None

    def differentiate(columns: Any, part: Any, is_cut: bool) -> None:
        at = pl.ds(part * rows, rows)
        key, value = _passing(key_ref, at, sizes), _passing(value_ref, at, sizes)
        stats, queries = _widen(columns, rows)
        scores = weighting.scores(_products(query_ref[...], key, sizes, weighting))  # [Rq, Rk]
        weights_grad = _products(out_grad_ref[...], value, sizes, weighting)
        masks = queries, _rows(key_mask, at)
        _, logits_grad = _tile_gradients(scores, weights_grad, stats, masks, is_cut, weighting)
        sum_ref[...] += _sums(logits_grad, key, sizes, weighting)

    _for_parts(step, sizes.parts[KEYS], prepare, differentiate, has_cut_path=False)

    @pl.when(step.is_last)
    def _() -> None:
        grad = _turn(sum_ref[...] * weighting.scale, sizes)
        grad_ref[0] = grad + before[0][0] if before else grad.astype(grad_ref.dtype)


def backward_keys(given: Given, before: Sums | None = None) -> tuple[Float[Array, "B K _ _"], Float[Array, "B K _ _"]]:
    """Returns the gradients of keys and of values, added to those `before`."""
    kernel = functools.partial(_key_gradient_kernel, weighting=given.weighting)
    widths = given.width(given.key), given.width(given.value)
    key_grad, value_grad = _run(gradient_call(kernel, given, KEYS, before), given, widths)
    return key_grad, value_grad


def _key_gradient_kernel(
    step: Step, given: Any, results: Any, scratch: Any, sizes: Sizes, weighting: Weighting
) -> None:
    (query_mask, key_mask), (query_ref, out_grad_ref), (key_ref, value_ref), stats, before = given
    (key_sum_ref, value_sum_ref), transposed = scratch
    rows = sizes.rows[QUERIES]
    key_ref, value_ref = _staying((key_ref, value_ref), transposed, step)

    @pl.when(step.is_first)
    def _() -> None:
        key_sum_ref[...] = jnp.zeros_like(key_sum_ref)
        value_sum_ref[...] = jnp.zeros_like(value_sum_ref)

    def prepare(is_cut: bool) -> Any:
        return _columns(key_mask) if is_cut or weighting.dropout_rate else None

    def differentiate(columns: Any, part: Any, is_cut: bool) -> None:
        at = pl.ds(part * rows, rows)
        query, out_grad = _passing(query_ref, at, sizes), _passing(out_grad_ref, at, sizes)
        scores = weighting.scores(_products(key_ref[...], query, sizes, weighting))  # [Rk, Rq]
        weights_grad = _products(value_ref[...], out_grad, sizes, weighting)
        masks = _rows(query_mask, at), _widen(columns, rows)
        weights, logits_grad = _tile_gradients(scores, weights_grad, _rows(stats, at), masks, is_cut, weighting)
        value_sum_ref[...] += _sums(weights, out_grad, sizes, weighting)
        key_sum_ref[...] += _sums(logits_grad, query, sizes, weighting)

    _for_parts(step, sizes.parts[QUERIES], prepare, differentiate, has_cut_path=False)

    @pl.when(step.is_last)
    def _() -> None:
        sums = key_sum_ref[...] * weighting.scale, value_sum_ref[...]
        for number, (one, ref) in enumerate(zip(sums, results, strict=True)):
            grad = _turn(one, sizes)
            ref[0] = grad + before[number][0] if before else grad.astype(ref.dtype)


def _tile_gradients(
    scores: Array, weights_grad: Array, stats: Any, masks: Any, is_cut: bool, weighting: Weighting
) -> tuple[Array, Array]:
    """Returns the weights of pairs after dropout, and the gradient of their logits without the scale."""
    lse, delta = stats
    logits = scores * (weighting.logit_scale * LOG2E)
    if is_cut:
        logits = jnp.where(is_allowed(*masks), logits, -jnp.inf)
    weights = jnp.exp2(logits - lse * LOG2E)
    kept = lambda array: _drop(array, masks, weighting) if weighting.dropout_rate else array
    logits_grad = weights * (kept(weights_grad) - delta)
    if weighting.logits_soft_cap is not None:
        logits_grad *= 1 - scores * scores
    return kept(weights), logits_grad
