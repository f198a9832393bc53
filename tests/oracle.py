"""What the tests share: random arguments, and all results of an attention with their gradients."""

import functools
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
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
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


def loss(attention: Any, **arguments: Any) -> Any:
    """A function of (query, key, value, *document_ids) whose gradient depends on all of out and every finite lse."""

    def function(query, key, value, *document_ids):
        labels = {"document_ids": document_ids if len(document_ids) == 2 else document_ids[0]} if document_ids else {}
        out, lse = attention(query, key, value, return_residual=True, **labels, **arguments)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sin(out.astype(lse.dtype)).sum() + jnp.cos(finite).sum(), (out, lse)

    return function


def with_gradients(function: Any) -> Any:
    """Returns (out, lse, dquery, dkey, dvalue) of a loss."""

    def results(*arrays):
        (_, outputs), grads = jax.value_and_grad(function, (0, 1, 2), has_aux=True)(*arrays)
        return *outputs, *grads

    return results


def ring_results(arrays: Any, **arguments: Any) -> Any:
    return jax.device_get(jax.jit(with_gradients(loss(ringjax.ring_dilated_attention, **arguments)))(*arrays))


def reference_results(arrays: Any, **arguments: Any) -> Any:
    return jax.device_get(_reference(tuple(sorted(arguments.items())))(*arrays))


@functools.cache
def _reference(arguments: Any) -> Any:
    return jax.jit(with_gradients(loss(ringjax.dilated_attention_reference, **dict(arguments))))


def assert_close(actual: Any, expected: Any, atol: float = 1e-9) -> None:
    actual, expected = (dict(zip(NAMES, results, strict=True)) for results in (actual, expected))
    chex.assert_trees_all_equal_shapes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=0, atol=atol)
