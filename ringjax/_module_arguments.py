"""The arguments of the Flax modules and of their calls: what they may be, and what they are read as."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ringjax._pattern.arguments import DTYPES
from ringjax._pattern.counts import (
    check_count,
    check_flags,
    check_optional_count,
    is_flag,
    is_integer,
    is_real,
    read_flag,
)
from ringjax._pattern.rotary import check_positions, read_frequencies

# Takes heads [..., T, N, H], their positions, [T] by default, and whether they are keys; returns heads.
PositionEmbedding = Callable[[Array, Array, bool], Array]
Positions = tuple[Array | None, Array | None]  # of queries and of keys
Rope = tuple[tuple[float, ...], float]  # the frequencies of a rotary embedding, and its factor


def read_head_dim(num_heads: Any, head_dim: Any, qkv_features: Any, in_features: int) -> int:
    """Returns the width of a head, given as `head_dim` or by `qkv_features`, or else by the width of the inputs."""
    check_count("num_heads", num_heads)
    if head_dim is not None:
        check_count("head_dim", head_dim)
        if qkv_features not in (None, num_heads * head_dim):
            raise ValueError(
                f"head_dim={head_dim} of num_heads={num_heads} disagrees with qkv_features={qkv_features}: give either"
            )
        return head_dim
    qkv_features = in_features if qkv_features is None else qkv_features
    check_count("qkv_features", qkv_features)
    if qkv_features % num_heads:
        raise ValueError(f"qkv_features={qkv_features} does not divide over num_heads={num_heads}: make it a multiple")
    return qkv_features // num_heads


def read_rope(theta: Any, rope: Any, position_embedding: Any, head_dim: int) -> Rope | None:
    """Returns the frequencies and the factor of the rotary embedding, None without one."""
    given = {"rope_theta": theta, "rope": rope, "position_embedding": position_embedding}
    given = [name for name, value in given.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{given[0]} is given beside {given[1]}: give either")
    if theta is not None:
        return tuple(read_frequencies("rope_theta", theta, None, head_dim).tolist()), 1.0
    if rope is None:
        return None
    if not (isinstance(rope, tuple) and len(rope) == 2 and is_real(rope[1])):
        raise TypeError(f"rope={rope!r} must be frequencies and a factor, such as ringjax.rope_frequencies returns")
    return tuple(read_frequencies("rope", None, rope[0], head_dim).tolist()), float(rope[1])


def read_positions(positions: Any, key_positions: Any, inputs: tuple[Array, Array], query_offset: Any) -> Positions:
    """Returns the positions to embed in queries and in keys, None for the global ones.

    Without `key_positions`, keys have the `positions` of the queries if both have the same inputs.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    if positions is None and key_positions is None:
        return None, None
    if not is_integer(query_offset) or query_offset:
        raise ValueError(f"query_offset={query_offset} is given beside positions: give either")
    if key_positions is None and inputs[0] is inputs[1]:
        key_positions = positions
    for name, value, array in zip(("positions", "key_positions"), (positions, key_positions), inputs, strict=True):
        if value is not None:
            check_positions(name, value, array.shape[-2])
    return positions, key_positions


def check_dtype(name: str, dtype: Any) -> None:
    """Checks that modules can compute in a dtype, or keep numbers in it.

    Raises:
      TypeError: naming the argument, its value and the remedy.
    """
    try:
        known = "" if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        known = ""
    if known not in DTYPES:
        raise TypeError(f"{name}={dtype!r} must be a floating dtype, one of {', '.join(DTYPES)}")


# The arguments of modules that `check_module` checks.
_FLAGS = "normalize_qk", "decode", "use_bias", "sow_max_logit"
_MAKERS = "kernel_init", "out_kernel_init", "bias_init", "out_bias_init", "sinks_init", "inner_norm", "qk_norm"
CHECKED = "sinks", "out_features", "dtype", "param_dtype", "use_out_bias", "deterministic", *_FLAGS, *_MAKERS


def check_module(given: Mapping[str, Any]) -> None:
    """Checks the arguments of a module that its `Settings` do not have, those of `CHECKED`.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    if not is_flag(given["sinks"]):
        raise TypeError(
            f"sinks must be True or False, not of {type(given['sinks'])}: for a parameter pass True and sinks_init, "
            "and give an array of sinks to the call"
        )
    check_flags(**{name: given[name] for name in _FLAGS})
    for name in ("use_out_bias", "deterministic"):
        read_flag(name, given[name])
    check_optional_count("out_features", given["out_features"])
    for name in ("dtype", "param_dtype"):
        if given[name] is not None:
            check_dtype(name, given[name])
    for name in _MAKERS:
        if given[name] is not None and not callable(given[name]):
            raise TypeError(f"{name}={given[name]!r} must be a function or a class that makes it")
    if given["normalize_qk"] and given["qk_norm"] is not None:
        raise ValueError("qk_norm is given beside normalize_qk=True, which makes a LayerNorm: give either")


def read_inputs(
    inputs_q: Any, inputs_k: Any, inputs_v: Any, widths: Sequence[int | None] = (None, None, None)
) -> tuple[Array, Array, Array]:
    """Returns the inputs of queries, keys and values, arrays [..., T, D] of the `widths` that are known.

    Raises:
      TypeError, ValueError: naming the argument and the remedy.
    """
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    for name, inputs, width in zip("qkv", (inputs_q, inputs_k, inputs_v), widths, strict=True):
        _check_inputs(f"inputs_{name}", inputs, width)
    return inputs_q, inputs_k, inputs_v


def _check_inputs(name: str, inputs: Any, in_features: int | None) -> None:
    """Checks that inputs [..., T, D] are arrays, of width `in_features` if it is given.

    Raises:
      TypeError, ValueError: naming the argument and the remedy.
    """
    shape = getattr(inputs, "shape", None)
    if shape is None:
        raise TypeError(f"{name} is of {type(inputs).__name__}: pass an array [..., length, features]")
    if len(shape) < 2:
        raise ValueError(f"{name} has the shape {shape}: pass at least [length, features]")
    if in_features is not None and shape[-1] != in_features:
        raise ValueError(
            f"Incompatible input dimension, got {shape[-1]} but module expects {in_features}: {name} has the shape "
            f"{shape}"
        )


def read_steps(prefill: Any, decode: Any, lengths: Any) -> tuple[bool, bool]:
    """Returns whether a call fills a cache, and whether it decodes.

    Raises:
      ValueError: if it fills one and does not decode, or `lengths` of prompts are given and it fills none.
      TypeError: for anything but truth values, and lengths that are no integers.
    """
    prefill, decode = read_flag("prefill", prefill), read_flag("decode", decode)
    if lengths is not None and not prefill:
        raise ValueError("lengths is given, but prefill=False takes tokens that are all there: leave it out")
    dtype = getattr(lengths, "dtype", type(lengths).__name__)
    if lengths is not None and not (hasattr(lengths, "dtype") and jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"lengths is of {dtype}: pass an array of integers, one for each prompt")
    if prefill and not decode:
        raise ValueError("prefill=True, but decode=False leaves the cache as it is: make decode True")
    return prefill, decode


def check_decoding(document_ids: Any, query_offset: Any, is_self_attention: bool, draws_dropout: bool) -> None:
    """Checks the arguments of a call that decodes.

    Raises:
      ValueError: naming the argument that means nothing there, and the remedy.
    """
    if document_ids is not None:
        raise ValueError("document_ids is given, but decode=True continues one document: leave it out")
    if not is_integer(query_offset) or query_offset:
        raise ValueError(
            f"query_offset={query_offset}, but decode=True knows the position from its cache: leave it out"
        )
    if not is_self_attention:
        raise ValueError("inputs_k or inputs_v is given, but decode=True caches keys of inputs_q alone: leave them out")
    if draws_dropout:
        raise ValueError("deterministic=False, but decode=True draws no dropout: make it True")


def check_flax_arguments(mask: Any, sow_weights: bool) -> None:
    """Checks that no argument of Flax's modules is given that attention in a ring cannot serve.

    Raises:
      ValueError: naming the argument and the remedy.
    """
    if mask is not None:
        raise ValueError("mask is given, but no array of pairs exists: say is_causal, document_ids or query_offset")
    if sow_weights:
        raise ValueError("sow_weights=True, but no array of weights exists that could be sown: leave it out")
