"""Argument names of other libraries, and what to use instead of each."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MASK = "no array of pairs exists; say is_causal, document_ids or query_offset, and the rest by pattern"
_WINDOW = "say pattern=[ringjax.Window(size)]"
_SEGMENTS = "say document_ids; segments are those of a pattern"
_BIAS = "no array of pairs exists, and none can be added to logits; jax.nn.dot_product_attention takes one"
_BY_MODULE = "say it when the module is made"

OF_FUNCTION = {
    "mask": _MASK,
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "bias": _BIAS,
    "causal": "say is_causal",
    "segment_ids": _SEGMENTS,
    "q_segment_ids": _SEGMENTS,
    "kv_segment_ids": _SEGMENTS,
    "window_size": _WINDOW,
    "local_window_size": _WINDOW,
    "sliding_window": _WINDOW,
    "sm_scale": "say scale",
    "softmax_scale": "say scale",
    "attn_bias": _BIAS,
    "dropout_rng": "say dropout_seed",
    "dropout_p": "say dropout_rate",
    "deterministic": "leave dropout_rate out where nothing is to be dropped",
    "enable_gqa": "give key and value fewer heads than query",
    "cu_seqlens": "say document_ids, the number of each token's document",
    "softcap": "say logits_soft_cap",
}
OF_MODULE = {
    "is_causal": _BY_MODULE,
    "causal": "say is_causal when the module is made",
    "pattern": _BY_MODULE,
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "bias": _BIAS,
    "segment_ids": _SEGMENTS,
    "window_size": "say pattern=[ringjax.Window(size)] when the module is made",
}
OF_NNX = {**OF_MODULE, "dropout_rng": "say rngs"}
OF_LINEN = {**OF_MODULE, "decode": _BY_MODULE}
OF_MAKING = {"causal": "say is_causal", "window_size": _WINDOW, "attention_fn": "it has its own attention"}


def naming_what_serves(remedies: dict[str, str]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Returns a decorator that refuses argument names of other libraries, with errors that say what to use instead."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs.keys() & remedies.keys():
                raise TypeError(f"{function.__qualname__} has no argument {name!r}: {remedies[name]}")
            return function(*args, **kwargs)

        return wrapped

    return decorate
