"""What the tests share: random arguments, and all results of an attention with their gradients."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import ringjax

NAMES = ("out", "lse", "query_grad", "key_grad", "value_grad")


def make_mesh(kind: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    count = int(np.prod(list(sizes.values())))
    axis_types = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types, devices=jax.devices()[:count])


def random_arguments(
    length: int,
    heads: tuple[int, int] = (2, 1),
    widths: tuple[int, int] = (5, 3),
    batch: tuple[int, ...] = (1,),
    key_length: int | None = None,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    key_length = length if key_length is None else key_length
    shapes = [(length, heads[0], widths[0]), (key_length, heads[1], widths[0]), (key_length, heads[1], widths[1])]
    query, key, value = (rng.normal(size=(*batch, *shape)) for shape in shapes)
    return query, key, value


def random_documents(length: int, batch: tuple[int, ...] = (1,), is_sorted: bool = True, seed: int = 0) -> np.ndarray:
    """Document numbers of tokens: in each batch other ones, in runs or in any order, the last of them padding."""
    documents = np.random.default_rng(seed).integers(0, 4, size=(*batch, length))
    documents = np.sort(documents, axis=-1) if is_sorted else documents
    documents[..., length - length // 8 :] = -1
    return documents.astype(np.int32)


def loss(attention: Any, uses: str = "both", **arguments: Any) -> Any:
    """A function of (query, key, value, *document_ids) whose gradient depends on out, on every finite lse, or both."""

    def function(query, key, value, *document_ids):
        labels = {"document_ids": document_ids if len(document_ids) == 2 else document_ids[0]} if document_ids else {}
        out, lse = attention(query, key, value, return_residual=True, **labels, **arguments)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        terms = {"out": jnp.sin(out.astype(lse.dtype)).sum(), "lse": jnp.cos(finite).sum()}
        return sum(term for name, term in terms.items() if uses in (name, "both")), (out, lse)

    return function


def with_gradients(function: Any, argnums: tuple[int, ...] = (0, 1, 2)) -> Any:
    """Returns (out, lse, dquery, dkey, dvalue) of a loss."""

    def results(*arrays):
        (_, outputs), grads = jax.value_and_grad(function, argnums, has_aux=True)(*arrays)
        return *outputs, *grads

    return results


def ring_results(arrays: Any, attention: Any = ringjax.ring_dilated_attention, **arguments: Any) -> Any:
    """Returns what `with_gradients(loss(...))` does, and the gradient of sinks that are given."""
    sinks = arguments.pop("sinks", None)
    if sinks is None:
        return jax.device_get(jax.jit(with_gradients(loss(attention, **arguments)))(*arrays))

    def function(query, key, value, sinks, *documents):
        return loss(attention, sinks=sinks, **arguments)(query, key, value, *documents)

    return jax.device_get(jax.jit(with_gradients(function, (0, 1, 2, 3)))(*arrays[:3], sinks, *arrays[3:]))


# The oracle in closed form, in NumPy: what the definition says, with its gradient written out. It shares no code with
# the library.


def reference_results(arrays: Any, uses: str = "both", **arguments: Any) -> Any:
    """Returns what `with_gradients(loss(...))` does of dense attention, in float64."""
    query, key, value, *documents = (np.asarray(array) for array in arrays)
    query, key, value = (array.astype(np.float64) for array in (query, key, value))
    groups = query.shape[-2] // key.shape[-2]
    repeat = lambda array: np.repeat(array, groups, axis=-2)
    weighting = {name: arguments.pop(name, None) for name in ("scale", "logits_soft_cap", "sinks")}
    scale = query.shape[-1] ** -0.5 if weighting["scale"] is None else weighting["scale"]
    cap = weighting["logits_soft_cap"]
    kept, count = _kept(query, key, arguments), _count(query, key, documents, **arguments)  # [..., N, T, S]

    x = scale * np.einsum("...tnh,...snh->...nts", query, repeat(key))
    logits = x if cap is None else cap * np.tanh(x / cap)
    with np.errstate(divide="ignore"):
        logits = logits + np.log(count)
    maximum = logits.max(axis=-1, keepdims=True)
    sinks = weighting["sinks"]
    if sinks is not None:
        sink = np.moveaxis(np.broadcast_to(sinks, query.shape[:-1]), -1, -2)[..., None]  # [..., N, T, 1]
        maximum = np.maximum(maximum, sink)
    weights = np.exp(logits - np.where(np.isfinite(maximum), maximum, 0))
    total = weights.sum(axis=-1, keepdims=True) + (0 if sinks is None else np.exp(sink - maximum))
    is_covered = total > 0
    weights = weights / np.where(is_covered, total, 1)
    lse = np.where(is_covered, maximum + np.log(np.where(is_covered, total, 1)), -np.inf)
    out = np.einsum("...nts,...snv->...tnv", kept * weights, repeat(value))
    lse_grad = np.where(is_covered & (uses != "out"), -np.sin(np.where(is_covered, lse, 0)), 0)
    out_grad = np.cos(out) * (uses != "lse")

    value_grad = np.einsum("...nts,...tnv->...snv", kept * weights, out_grad)
    weights_grad = kept * np.einsum("...tnv,...snv->...nts", out_grad, repeat(value))
    delta = (weights * weights_grad).sum(axis=-1, keepdims=True)
    x_grad = weights * (weights_grad - delta + lse_grad) * (1 if cap is None else 1 - np.tanh(x / cap) ** 2)
    query_grad = scale * np.einsum("...nts,...snh->...tnh", x_grad, repeat(key))
    key_grad = scale * np.einsum("...nts,...tnh->...snh", x_grad, query)
    sum_groups = lambda grad: grad.reshape(*grad.shape[:-2], -1, groups, grad.shape[-1]).sum(axis=-2)
    results = out, np.moveaxis(lse[..., 0], -1, -2), query_grad, sum_groups(key_grad), sum_groups(value_grad)
    if sinks is None:
        return results
    sinks_grad = np.moveaxis((np.exp(sink - lse) * (lse_grad - delta))[..., 0], -1, -2)  # [..., T, N]
    lead = tuple(range(sinks_grad.ndim - sinks.ndim))
    ones = tuple(-axis for axis, size in enumerate(sinks.shape[::-1], 1) if size == 1)
    return *results, sinks_grad.sum(axis=lead).sum(axis=ones, keepdims=True)


def greatest_logits(arrays: Any, **arguments: Any) -> np.ndarray:
    """The greatest logit [N] of all pairs that attend, scaled and capped."""
    query, key, _, *documents = (np.asarray(array) for array in arrays)
    scale, cap = arguments.pop("scale", None), arguments.pop("logits_soft_cap", None)
    count = _count(query, key, documents, **arguments)  # [..., N, T, S]
    repeated = np.repeat(key, query.shape[-2] // key.shape[-2], axis=-2).astype(np.float64)
    logits = np.einsum("...tnh,...snh->...nts", query, repeated) * (query.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    seen = np.where(count > 0, logits, -np.inf).max(axis=(-2, -1))  # [..., N]
    return seen.max(axis=tuple(range(seen.ndim - 1)))


def _branches(arguments: Any) -> list[tuple[str, int, int]]:
    """The kind of each branch, with its two numbers."""
    if "pattern" in arguments:
        return [(type(branch).__name__, *vars(branch).values()) for branch in arguments["pattern"]]
    lists = arguments["segment_lengths"], arguments["dilation_rates"]
    return [("Segments", *numbers) for numbers in zip(*lists, strict=True)]


def _count(query: Any, key: Any, documents: Any, **arguments: Any) -> np.ndarray:
    """How often each pair counts, [..., N, T, S]."""
    t, s = arguments.get("query_offset", 0) + np.arange(query.shape[-3])[:, None], np.arange(key.shape[-3])
    num_heads, branches = key.shape[-2], _branches(arguments)
    count = np.zeros((num_heads, t.size, s.size), int)
    size, extra = divmod(num_heads, len(branches))
    runs = np.repeat(np.arange(len(branches)), [size + (number < extra) for number in range(len(branches))])
    for number, (kind, w, r) in enumerate(branches):
        for head in range(num_heads):
            if arguments.get("heads") == "grouped" and runs[head] != number:
                continue
            offset = {"interleaved": head % r, "blocked": head // -(-num_heads // r), "branch": number % r}
            offset = offset[arguments.get("offsets", "interleaved")]
            count[head] += {
                "Segments": (t % w % r == offset) & (s % w % r == offset) & (t // w == s // w),
                "Window": (abs(t - s) < w * r) & ((t - s) % r == 0),
            }[kind]
    if arguments.get("merge") == "union":
        count = np.minimum(count, 1)
    count = np.repeat(count * (s <= t) if arguments.get("is_causal") else count, query.shape[-2] // num_heads, axis=0)
    if not documents:
        return count
    of_queries, of_keys = documents if len(documents) == 2 else documents * 2
    of_queries, of_keys = of_queries[..., None, :, None], of_keys[..., None, None, :]
    return count * ((of_queries == of_keys) & (of_queries >= 0))


def _kept(query: Any, key: Any, arguments: dict[str, Any]) -> Any:
    """What the weights are multiplied with, [..., N, T, S]: MurmurHash3's finalizer over chains of words."""
    rate = arguments.get("dropout_rate", 0.0)
    if not rate:
        return 1.0

    def mix(state: Any) -> Any:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor) % 2**32
        return state ^ (state >> np.uint64(16))

    *batch, length, num_heads, _ = query.shape
    differs = not arguments.get("broadcast_dropout", False)
    numbers = (
        np.arange(np.prod(batch, dtype=int)).reshape(*batch, 1, 1, 1) * differs,
        np.arange(num_heads)[:, None, None] * differs,
        arguments.get("query_offset", 0) + np.arange(length)[:, None],
    )
    seed, words = arguments["dropout_seed"], []
    with np.errstate(over="ignore"):
        for salt in (0, 1):
            state = np.uint64(salt)
            for word in (seed % 2**32, (seed >> 32) % 2**32, *numbers):
                state = mix((state + np.uint64(0x9E3779B9)) % 2**32 ^ np.asarray(word, np.uint64))
            words.append(state)
        bits = mix((words[0] + (words[1] | np.uint64(1)) * np.arange(key.shape[-3], dtype=np.uint64)) % 2**32)
    return (bits >= round(rate * 2**32)) / (1 - rate)


def tolerance(atol: float = 1e-9) -> float:
    """What results may differ by, in float64; where x64 is off, as users have it, arrays are of float32."""
    return atol if jax.config.jax_enable_x64 else max(atol, 2e-5)


def assert_close(actual: Any, expected: Any, atol: float = 1e-9) -> None:
    names = (*NAMES, "sinks_grad")  # the last where there are sinks
    actual, expected = (dict(zip(names, results, strict=False)) for results in (actual, expected))
    chex.assert_trees_all_equal_shapes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=0, atol=tolerance(atol))
