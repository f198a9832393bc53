"""What costs depend on of an implementation, without its code."""

from typing import NamedTuple


class Traits(NamedTuple):
    """In what an implementation differs from others, for those that count or arrange what it computes.

    It may be that
    - dense branches `are_added_at_once`, in one pass over tokens, and not one by one to their rows;
    - the backward `takes_output` and its cotangent of each query, and not the cotangent and what both make, delta;
    - gradients of keys have rows last, `rows_last`, and are laid out anew to be summed over devices.
    """

    are_added_at_once: bool = False
    takes_output: bool = False
    rows_last: bool = False


OF_TILES = Traits(rows_last=True)  # of XLA's tiles, which serve where nothing else does
