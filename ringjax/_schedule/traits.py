"""What costs depend on of an implementation, without its code."""

from typing import NamedTuple


class Traits(NamedTuple):
    """In what an implementation differs from others, for those that count or arrange what it computes.

    It may be that
    - dense branches `are_added_at_once`, in one pass over tokens, and not one by one to their rows;
    - it `rounds_gradients`, those of one meeting, to the dtype of the arrays: compilers send them so;
    - the backward `takes_output` and its cotangent of each query, and not the cotangent and what both make, delta;
    - gradients of keys have rows last, `rows_last`, and are laid out anew to be summed over devices;
    - it `copies_arguments` that are the rows of a shard as they are;
    - it `copies_rows`, all that it reads, so that branches are to be computed one after the other;
    - it `adds_to_sums` of earlier branches where these are, which costs no more than to begin with nothing;
    - it `keeps_logits`, those of a tile, in the memory of arrays;
    - it `takes_whole_tiles`, those of the schedule: all pairs of tiles that meet.
    """

    are_added_at_once: bool = False
    rounds_gradients: bool = False
    takes_output: bool = False
    rows_last: bool = False
    copies_arguments: bool = False
    copies_rows: bool = False
    adds_to_sums: bool = False
    keeps_logits: bool = False
    takes_whole_tiles: bool = False


# Of XLA's tiles, which serve where nothing else does.
OF_TILES = Traits(rows_last=True, copies_arguments=True, keeps_logits=True, takes_whole_tiles=True)
