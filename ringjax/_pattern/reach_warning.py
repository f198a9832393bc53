"""Warns about patterns in which few queries see beyond their smallest branch."""

import dataclasses
import functools
from typing import Any

import numpy as np

from ringjax._pattern.branch import MAX_POSITIONS, spaced_tokens
from ringjax._pattern.pattern import DilatedPattern
from ringjax._pattern.warning import warn_once


class ReachWarning(UserWarning):
    """Most of the queries that could see beyond their smallest branch see nothing there.

    To stop instead of training with the pattern, make the warning an error. :meth:`DilatedPattern.reach` returns the
    share.

    Example:
      >>> import warnings
      >>> warnings.simplefilter("error", ReachWarning)  # for the rest of the program
      >>> from ringjax import Segments
      >>> query = jnp.ones((1, 64, 2, 8))
      >>> pattern = Segments(4), Segments(64, rate=8)  # 2 heads keep 2 tokens of 8
      >>> ringjax.ring_dilated_attention(query, query, query, pattern=pattern)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
        ...
      ringjax.ReachWarning: 25% of the queries see beyond their smallest branch, ...
    """


def warn_of_reach(pattern: DilatedPattern, length: int, num_kv_heads: int, is_causal: bool) -> None:
    """Warns, once for each pattern and number of heads, if few queries see beyond their smallest branch."""
    problem = find_problem(pattern, length, num_kv_heads, is_causal)
    if problem is not None:
        warn_once((pattern, num_kv_heads), problem, ReachWarning)


def find_problem(pattern: DilatedPattern, length: int, num_kv_heads: int, is_causal: bool) -> str | None:
    """Returns the warning's text if fewer than half of the queries that could see beyond their smallest branch do.

    A query could see beyond it if it would with rates of 1. The share is that of a sequence at least as long as the
    longest branch, because a short sequence says nothing about the pattern.
    """
    extents = [min(branch.extent, MAX_POSITIONS) for branch in pattern.branches]
    smallest, longest = min(extents), max(extents)
    if not smallest < min(length, longest):
        return None
    share, most = _shares(pattern, max(length, longest), num_kv_heads, is_causal)
    if share >= most / 2:
        return None
    widest: Any = max(pattern.branches, key=lambda branch: branch.offset_rate)
    served = dataclasses.replace(widest, rate=min(widest.rate, num_kv_heads))
    remedy = f"use rates up to the number of key/value heads, such as {served}, more key/value heads"
    if pattern.offsets != "interleaved":
        remedy = "use offsets='interleaved', which keeps other tokens in each head, lower rates"
    return (
        f"{share:.0%} of the queries see beyond their smallest branch, of {smallest} tokens, in any of the "
        f"{num_kv_heads} key/value heads, where {most:.0%} would with rates of 1: in segments a head keeps one token "
        f"of each rate, so {remedy}, or a window with a rate"
    )


@functools.lru_cache(maxsize=256)
def _shares(pattern: DilatedPattern, length: int, num_kv_heads: int, is_causal: bool) -> tuple[float, float]:
    """Returns the share of queries that see beyond their smallest branch, and the share that would with rates of 1."""
    query, branches = spaced_tokens(length), pattern.within(length, num_kv_heads)
    seen = lambda branch: [np.clip(position, 0, length - 1) for position in branch.seen(query, is_causal)]
    first, last = seen(min(branches, key=lambda branch: branch.extent))
    beyond = [(start < first) | (stop > last) for start, stop in map(seen, branches)]
    return pattern.reach(length, num_kv_heads, is_causal).in_any_head, float(np.any(beyond, axis=0).mean())
