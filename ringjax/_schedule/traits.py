"""What costs depend on of an implementation, without its code."""

from typing import NamedTuple


class Traits(NamedTuple):
    """In what an implementation differs from others, for those that count or arrange what it computes.

    It may be that
    - dense branches `are_added_at_once`, in one pass over tokens, and not one by one to their rows;
    - it `rounds_gradients`, those of one meeting, to the dtype of the arrays: compilers send them so;
    - the backward `takes_output` and its cotangent of each query, and not the cotangent and what both make, delta;
    - it `copies_rows`, all that it reads, so that branches are to be computed one after the other;
    - it `adds_to_sums` of earlier branches where these are, which costs no more than to begin with nothing;
    - it `takes_whole_tiles`, those of the schedule: all pairs of tiles that meet.
    """

    are_added_at_once: bool = False
    rounds_gradients: bool = False
    takes_output: bool = False
    copies_rows: bool = False
    adds_to_sums: bool = False
    takes_whole_tiles: bool = False


# Of XLA's tiles, which serve where nothing else does.
OF_TILES = Traits(takes_whole_tiles=True)
