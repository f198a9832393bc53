"""Checks the arguments of a call before it is traced further."""

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
# Products and quotients of two numbers in this range are normal float32 numbers.
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


def check_scale(name: str, scale: Any) -> None:
    """Checks the logit scale, or None for the default.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    _check_number(name, scale, is_optional=True)
    if scale and not _LEAST <= abs(scale) <= _MOST:
        raise ValueError(f"{name}={scale!r} must be 0, or between {_LEAST} and {_MOST}: float32 has no room for more")


def check_soft_cap(name: str, cap: Any) -> None:
    """Checks the cap of logits, or None for none.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    _check_number(name, cap, is_optional=True)
    if cap is not None and not _LEAST <= cap <= _MOST:
        raise ValueError(
            f"{name}={cap!r} must be positive, such as 50.0, between {_LEAST} and {_MOST}: leave it out for none"
        )


def check_dropout_rate(name: str, rate: Any) -> None:
    """Checks the share of weights to drop.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    _check_number(name, rate)
    if not 0 <= rate < 1:
        raise ValueError(f"{name}={rate!r} must be in [0, 1): it is the share of weights to drop")


def _check_number(name: str, number: Any, is_optional: bool = False) -> None:
    if not (is_real(number) or (number is None and is_optional)):
        raise TypeError(f"{name}={number!r} must be a number, known when the call is traced")


def check_offset(name: str, offset: Any) -> None:
    """Checks the position of the first query.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    is_array = isinstance(offset, jax.Array | np.ndarray)
    of_integers = jnp.issubdtype(offset.dtype, jnp.integer) if is_array else is_integer(offset)
    if not of_integers or np.shape(offset) != ():
        raise TypeError(
            f"{name}={offset!r} must be one integer, or an integer array of shape (): give lengths to "
            "ringjax.decode_attention if sequences differ"
        )
    if not isinstance(offset, Tracer) and int(offset) < 0:
        raise ValueError(f"{name}={offset} must not be negative: the first key is at 0, the queries after")


def check_precision(name: str, precision: Any) -> None:
    """Checks that matrix products accept a precision.

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
        raise ValueError(f"{name}={precision!r} {words}") from error


def check_positions(length: int, key_length: int, query_offset: int) -> None:
    """Checks that all positions fit int32.

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
    """Returns the document numbers of queries and of keys.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    if document_ids is None:
        return None, None
    named = _named("document_ids", document_ids)
    if len(named) == 1 and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"document_ids is one array for {query.shape[-3]} queries and {key.shape[-3]} keys: "
            "give a pair, one array of queries and one of keys"
        )
    pairs = zip(named.items(), (query, key), strict=False)
    of_queries, *of_keys = (read_ids(name, ids, tokens.shape[:-2]) for (name, ids), tokens in pairs)
    return of_queries, of_keys[0] if of_keys else of_queries


def check_documents(name: str, ids: Any) -> None:
    """Checks the types of one or two arrays of document numbers, or None.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    if ids is not None:
        for one, array in _named(name, ids).items():
            _check_ids(one, array)


def _named(name: str, ids: Any) -> dict[str, Any]:
    """Returns the one or two arrays of document numbers, by argument name."""
    if not isinstance(ids, tuple | list):
        return {name: ids}
    if len(ids) != 2:
        raise ValueError(f"{name} has {len(ids)} entries: give one array, or two, of queries and of keys")
    return {f"{name}[{number}]": one for number, one in enumerate(ids)}


def _check_ids(name: str, ids: Any) -> Any:
    dtype = getattr(ids, "dtype", type(ids).__name__)
    if not hasattr(ids, "dtype") or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name} is of {dtype}: pass an array of integers, such as int32")
    return ids


def _is_known(ids: Any) -> bool:
    """Returns whether document numbers can be read: they are not traced, and this process can address all of them."""
    return not isinstance(ids, Tracer) and getattr(ids, "is_fully_addressable", True)


def read_ids(name: str, ids: Any, shape: tuple[Any, ...]) -> Int[Array, "..."]:
    """Returns the document numbers of tokens [*shape], as integers of at most 32 bits.

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
        known = np.asarray(ids)  # in NumPy, because jax would trace the reductions
        least, most = known.min(), known.max()
        if least < bounds.min or most > bounds.max:
            raise ValueError(f"{name} has numbers from {least} to {most}: use 32-bit integers, such as 0, 1, 2, ...")
    is_narrow = dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.signedinteger)
    return jnp.asarray(ids, dtype if is_narrow else jnp.int32)


def read_seed(dropout_seed: Any, dropout_rate: float) -> UInt[Array, "2"] | None:
    """Returns the two words of the seed, or None without dropout.

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
    """Returns whether an array is a raw key of `jax.random`, of two or four words."""
    return seed.dtype == jnp.uint32 and seed.shape in ((2,), (4,))
