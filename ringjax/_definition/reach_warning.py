"""Warns of a pattern whose queries see little."""

from ringjax._definition.pattern import DilatedPattern
from ringjax._definition.warning import once, warn


class ReachWarning(UserWarning):
    """Most queries of a pattern see nothing beyond their smallest branch.

    To stop instead of training such a pattern, make the warning an error. :meth:`DilatedPattern.reach` says the share.

    Example:
      >>> import warnings
      >>> warnings.simplefilter("error", ReachWarning)  # for the rest of the program
      >>> from ringjax import Segments
      >>> query = jnp.ones((1, 64, 2, 8))
      >>> pattern = Segments(4), Segments(64, rate=8)  # 2 heads keep 2 tokens of 8
      >>> ringjax.ring_dilated_attention(query, query, query, pattern=pattern)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
        ...
      ringjax._definition.reach_warning.ReachWarning: 25% of the queries see beyond their smallest branch, ...
    """


@once
def warn_of_reach(pattern: DilatedPattern, length: int, num_kv_heads: int) -> None:
    """Warns, once for each pattern, where fewer than half of the queries see beyond their smallest branch."""
    extents = {min(branch.extent, length) for branch in pattern.branches}
    if len(extents) == 1:  # there is nothing beyond
        return
    share = pattern.reach(length, num_kv_heads).in_any_head
    if share < 0.5:
        warn(
            f"{share:.0%} of the queries see beyond their smallest branch, of {min(extents)} tokens, in any of the "
            f"{num_kv_heads} key/value heads: a head keeps one token of each rate, so use rates up to the number of "
            "heads, or more heads",
            ReachWarning,
        )
