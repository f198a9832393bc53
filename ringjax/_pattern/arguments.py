"""The checks of a call's arguments, before anything is traced further."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, UInt

from ringjax._pattern import dropout
from ringjax._pattern.branch import MAX_POSITIONS
from ringjax._pattern.counts import is_integer, is_real

DTYPES = ("float32", "bfloat16", "float16", "float64")
# Numbers whose products and quotients stay normal numbers of float32.
_LEAST, _MOST = 1e-18, 1e18


def check_arrays(query: Any, key: Any, value: Any) -> None:
    """Checks the dtypes and shapes of an attention's arguments.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    arrays = {"query": query, "key": key, "value": value}
    for name, array in arrays.items():
        if isinstance(array, jax.ShapeDtypeStruct):
            raise TypeError(f"{name} is a ShapeDtypeStruct: pass arrays, or call jax.eval_shape on the function")
        if not hasattr(array, "dtype") or jnp.dtype(array.dtype).name not in DTYPES:
            kind = getattr(array, "dtype", type(array).__name__)
            raise TypeError(f"{name} is of {kind}: pass an array of one of {', '.join(DTYPES)}")
        if array.ndim < 3:
            raise ValueError(f"{name} has the shape {array.shape}: pass at least [length, heads, width]")
        if not all(isinstance(size, int) for size in array.shape[-3:]):
            raise TypeError(f"{name} has the shape {array.shape}: of symbolic dimensions only those of batches may be")
        if 0 in array.shape[-3:]:
            raise ValueError(f"{name} has the shape {array.shape}: length, heads and width must be at least 1")
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
    for name in ("key", "value"):
        if arrays[name].shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name} and query differ in batch: {shapes}; make these dimensions equal")
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(f"key and value differ in length: {shapes}; make these dimensions equal")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value differ in their heads: {shapes}; give both the same number")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key and query differ in their width: {shapes}; make their last dimensions equal")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"query has {query.shape[-2]} heads and key has {key.shape[-2]}: "
            "the number of key/value heads must divide the number of query heads"
        )


def check_numbers(
    scale: Any, logits_soft_cap: Any, dropout_rate: Any, query_offset: Any = 0, block_size: Any = None
) -> None:
    """Checks the numbers of a call.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    reals = {"scale": scale, "logits_soft_cap": logits_soft_cap, "dropout_rate": dropout_rate}
    for name, number in reals.items():
        is_optional = name != "dropout_rate"
        if not (is_real(number) or (number is None and is_optional)):
            raise TypeError(f"{name}={number!r} must be a number, known when the call is traced")
    if scale and not _LEAST <= abs(scale) <= _MOST:
        raise ValueError(f"scale={scale!r} must be 0, or between {_LEAST} and {_MOST}: float32 has no room for more")
    if logits_soft_cap is not None and not _LEAST <= logits_soft_cap <= _MOST:
        raise ValueError(
            f"logits_soft_cap={logits_soft_cap!r} must be positive, such as 50.0, between {_LEAST} and {_MOST}: "
            "leave it out for none"
        )
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate={dropout_rate!r} must be in [0, 1): it is the share of weights to drop")
    is_array = isinstance(query_offset, jax.Array | np.ndarray)
    of_integers = jnp.issubdtype(query_offset.dtype, jnp.integer) if is_array else is_integer(query_offset)
    if not of_integers or np.shape(query_offset) != ():
        raise TypeError(f"query_offset={query_offset!r} must be an integer, or an array of one without dimensions")
    if not isinstance(query_offset, Tracer) and int(query_offset) < 0:
        raise ValueError(f"query_offset={query_offset} must not be negative: the first key is at 0, the queries after")
    if block_size is not None and (not is_integer(block_size) or block_size < 1):
        raise ValueError(f"block_size={block_size!r} must be a positive integer: leave it out for the default")


def check_implementation(implementation: Any, implementations: Any) -> None:
    """Checks what names an implementation.

    Raises:
      ValueError: naming the argument, its value and the remedy.
    """
    if not (implementation is None or (isinstance(implementation, str) and implementation in implementations)):
        known = ", ".join(map(repr, implementations))
        raise ValueError(f"implementation={implementation!r} is unknown: use one of {known}, or None for the fastest")


def check_precision(precision: Any) -> None:
    """Checks that products can be of a precision.

    Raises:
      ValueError: naming the argument, its value and the remedy.
    """
    if precision is None:
        return
    array = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        hash(precision)
        jax.eval_shape(functools.partial(jnp.einsum, "ij,jk", precision=precision), array, array)
    except (TypeError, ValueError) as error:
        words = "is none that products can be of: pass 'default', 'high', 'highest', or a jax.lax.Precision"
        raise ValueError(f"precision={precision!r} {words}") from error


def check_positions(length: int, key_length: int, query_offset: int) -> None:
    """Checks that all positions are numbers of int32.

    Raises:
      ValueError: naming the argument, its value and the remedy.
    """
    if query_offset + length > MAX_POSITIONS:
        raise ValueError(
            f"query_offset={query_offset} and {length} queries end beyond position {MAX_POSITIONS}: "
            "positions are 32-bit integers; start earlier"
        )
    if key_length > MAX_POSITIONS:
        raise ValueError(f"key has {key_length} tokens, of at most {MAX_POSITIONS}: positions are 32-bit integers")


def read_documents(document_ids: Any, query: Any, key: Any) -> tuple[Int[Array, "*B T"] | None, Any]:
    """Returns the documents of queries and of keys.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    if document_ids is None:
        return None, None
    named = check_documents(document_ids)
    if len(named) == 1 and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"document_ids is one array for {query.shape[-3]} queries and {key.shape[-3]} keys: "
            "give a pair, one array of queries and one of keys"
        )
    pairs = zip(named.items(), (query, key), strict=False)
    of_queries, *of_keys = (read_ids(name, ids, tokens.shape[:-2]) for (name, ids), tokens in pairs)
    return of_queries, of_keys[0] if of_keys else of_queries


def check_documents(document_ids: Any) -> dict[str, Any]:
    """Returns the one or two arrays of documents by name, after a check of their types.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    if not isinstance(document_ids, tuple | list):
        return {"document_ids": _check_ids("document_ids", document_ids)}
    if len(document_ids) != 2:
        count = len(document_ids)
        raise ValueError(f"document_ids has {count} entries: give one array, or two, of queries and of keys")
    names = "document_ids[0]", "document_ids[1]"
    return {name: _check_ids(name, ids) for name, ids in zip(names, document_ids, strict=True)}


def _check_ids(name: str, ids: Any) -> Any:
    dtype = getattr(ids, "dtype", type(ids).__name__)
    if not hasattr(ids, "dtype") or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name} is of {dtype}: pass an array of integers, such as int32")
    return ids


def _is_known(ids: Any) -> bool:
    """Whether the numbers of documents are there to be read: not traced, and not of other processes too."""
    return not isinstance(ids, Tracer) and getattr(ids, "is_fully_addressable", True)


def read_ids(name: str, ids: Any, shape: tuple[int, ...]) -> Int[Array, "..."]:
    """Returns the documents of tokens [*shape], in 32 bits at most.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    _check_ids(name, ids)
    if ids.shape != shape:
        raise ValueError(
            f"{name} has the shape {ids.shape}: it numbers the document of each token, so make that {shape}"
        )
    bounds = jnp.iinfo(jnp.int32)
    dtype = jnp.dtype(ids.dtype)
    if jnp.iinfo(dtype).max > bounds.max and _is_known(ids) and np.size(ids):
        known = np.asarray(ids)  # jax would trace the reductions of a constant
        least, most = known.min(), known.max()
        if least < bounds.min or most > bounds.max:
            raise ValueError(f"{name} has numbers from {least} to {most}: use 32-bit integers, such as 0, 1, 2, ...")
    is_narrow = dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.signedinteger)
    return jnp.asarray(ids, dtype if is_narrow else jnp.int32)


def read_seed(dropout_seed: Any, dropout_rate: float) -> UInt[Array, "2"] | None:
    """Returns the words of the seed, None where nothing is dropped.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    if not dropout_rate:
        return None
    remedy = "use an integer of 64 bits, an array of one, or a key of jax.random"
    if dropout_seed is None:
        raise ValueError(f"dropout_rate={dropout_rate} needs a dropout_seed: {remedy}")
    is_array = isinstance(dropout_seed, jax.Array | np.ndarray | np.generic)
    dtype = dropout_seed.dtype if is_array else type(dropout_seed)
    is_key = is_array and (jnp.issubdtype(dtype, jax.dtypes.prng_key) or _is_raw_key(dropout_seed))
    if not (is_key or (jnp.issubdtype(dtype, jnp.integer) if is_array else is_integer(dropout_seed))):
        raise TypeError(f"dropout_seed={dropout_seed!r} is of {dtype}: {remedy}")
    if np.size(dropout_seed) != 1 and not (is_array and _is_raw_key(dropout_seed)):
        raise ValueError(f"dropout_seed has the shape {np.shape(dropout_seed)}: {remedy}")
    if not is_array and not -(2**63) <= dropout_seed < 2**64:
        raise ValueError(f"dropout_seed={dropout_seed} has more than 64 bits: {remedy}")
    is_one = is_array and not _is_raw_key(dropout_seed)
    return dropout.make_seed(dropout_seed.reshape(()) if is_one else dropout_seed)


def _is_raw_key(seed: Any) -> bool:
    """Whether an array is a key of the older kind: two words, or four."""
    return seed.dtype == jnp.uint32 and seed.shape in ((2,), (4,))
