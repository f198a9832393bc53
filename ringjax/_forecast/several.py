"""The bytes of what several branches keep at once, by count: one of them is computed, others are under way or done."""

from collections.abc import Sequence
from typing import NamedTuple

from ringjax._forecast.factors import LANES
from ringjax._forecast.kept import Kept
from ringjax._schedule.cost import Work
from ringjax._schedule.schedule import BranchSchedule


class Held(NamedTuple):
    """The bytes that a branch keeps, or some that are counted together, of a `kind`.

    Its `output` is in the dtype of the caller's, and of all tokens if it `is_whole`. Branches are added to sums of all
    tokens, `sums`, of which `query_sums` are those of queries. If it `is_in_groups`, its segments are added to these in
    groups; if it `adds_in_place`, it has no sums of its own.
    """

    bytes: float
    kind: str
    is_gathered: bool = False
    is_whole: bool = False
    is_in_groups: bool = False
    adds_in_place: bool = False
    query_sums: float = 0
    sums: float = 0
    output: float = 0


def held_by(kept: Kept, adds_in_place: bool = False) -> Held:
    """Returns what one branch keeps."""
    schedule = kept.schedule
    is_in_groups = schedule.is_local and schedule.queries.num_groups > 1
    sums = kept.query_sums, kept.sums
    how = schedule.is_gathered, schedule.branch.keeps_all, is_in_groups, adds_in_place
    return Held(kept.bytes, _kind_of(schedule), *how, *sums, kept.output)


def _kind_of(schedule: BranchSchedule) -> str:
    """How a branch gets its rows."""
    if schedule.queries.chunks == "residues" and not schedule.is_local:
        return "sorted"
    if schedule.traits.copies_arguments:
        return "tiles of all rows" if schedule.branch.keeps_all and not schedule.is_local else "tiles"
    if schedule.is_local:
        return "local"
    if schedule.is_gathered:
        return "gathered"
    return "ring" if schedule.is_closed or schedule.exchange_size > 1 else "neighbours"


# The factors of this module come near to what compilers chose, as those in `factors`.

# GPUs. Of what a branch keeps, the share that is there as well when the one that keeps most is computed: for the output
# and with the gradient. Rows of neighbours are on their way from the beginning, and rows in another order are there.
_SHARES = {
    "sorted": (0.65, 0.92),
    "tiles of all rows": (0.55, 0.55),
    "tiles": (0.43, 0.46),
    "exchanged": (0.05, 0.05),
    "neighbours": (0.65, 0.8),
    "gathered": (0.65, 0.65),
}
_SHARE = 0.5, 0.73
_SHARE_BESIDE_GATHERED = 0.2, 0.65  # the most of any of these
_SUMS = 0.12, 0.16  # as often as the tokens themselves


def at_once(held: Sequence[Held], work: Work, has_gradient: bool) -> float:
    """Returns the bytes of several branches on GPUs, which compute what they can."""
    most, *others = sorted(held, reverse=True)
    most_share = _SHARE_BESIDE_GATHERED[has_gradient] if most.is_gathered else 1
    share = lambda one: min(_SHARES.get(one.kind, _SHARE)[has_gradient], most_share)
    keep = most.bytes + sum(share(one) * one.bytes for one in others)
    # Where some branches have no sums, others are added as cheaply.
    sums = [one.sums for one in held]
    keep += _SUMS[has_gradient] * max(sums) * work.itemsize / work.sum_itemsize if others and all(sums) else 0
    if has_gradient:
        return keep
    # Where nothing comes from neighbours, a local output of all tokens lies where that of all branches will.
    waits = any(one.kind in ("neighbours", "sorted") for one in held)
    return keep + sum(one.output for one in others if waits or not (one.kind == "local" and one.is_whole))


class Turn(NamedTuple):
    """How much is there of what keeps most, of the others, of rings among them, and of outputs and sums.

    Outputs, which are as large as gradients of queries, are those of the others in the dtype of sums. The `sums` are of
    all tokens, `query_sums` of queries alone.
    """

    most: float = 1
    others: float = 0
    rings: float = 0
    outputs: float = 0
    query_sums: float = 0
    sums: float = 0


# TPUs. Results are arrays from the beginning, in which others lie until then: all sums, if they are of the same dtype.
_FORWARD, _FORWARD_OF_SAME = Turn(0.8, outputs=0.65, sums=0.95), Turn(0.8, outputs=1.7)
_FORWARD_OF_NARROW = Turn(1, sums=0.8)  # of the same dtype, too: kernels write outputs of narrow heads as the caller's
_EXCHANGED, _GATHERED = Turn(1, 0.125), Turn(1.09, 0.42)
# Of rings, whose sums of keys travel, and of others: where sums are of more bits than results, and of as many.
_RING, _RING_OF_SAME = Turn(0.93, rings=0.33, outputs=1.05, query_sums=0.55), Turn(1, 0.48)
_OTHER, _OTHER_OF_SAME = Turn(0.88, 0.22, query_sums=0.33, sums=0.77), Turn(0.92, 0.2)
_BY_GROUP = Turn(0.95, 0.2)  # where groups of segments are added to the sums of the first branch


def in_turn(held: Sequence[Held], work: Work, has_gradient: bool) -> float:
    """Returns the bytes of several branches on TPUs, which take one after the other."""
    most, *others = sorted(held, reverse=True)
    if not others:
        return most.bytes
    if any(one.adds_in_place for one in held):
        return _in_place(held, work, has_gradient)
    is_same, is_narrow = work.itemsize == work.sum_itemsize, work.width % LANES != 0
    if most.kind == "exchanged":
        turn = _EXCHANGED
    elif not has_gradient:
        turn = (_FORWARD_OF_NARROW if is_narrow else _FORWARD_OF_SAME) if is_same else _FORWARD
    elif most.kind == "gathered":
        turn = _GATHERED
    elif most.kind == "ring":
        turn = _RING_OF_SAME if is_same else _RING
    elif held[0].kind != "local" and all(one.is_in_groups for one in held[1:]):
        turn = _BY_GROUP
    else:
        turn = _OTHER_OF_SAME if is_same else _OTHER
    query_sums, sums = (max(values) for values in zip(*((one.query_sums, one.sums) for one in held), strict=True))
    beside = turn.query_sums * query_sums + turn.sums * sums
    for one in others:
        share = turn.others + turn.rings * (one.kind == "ring")
        beside += share * one.bytes + turn.outputs * one.output * work.sum_itemsize / work.itemsize
    return turn.most * most.bytes + beside


class Place(NamedTuple):
    """How much is there, before any branch adds in place and then.

    Before: of what keeps most, of the others, and beside others of sums of all tokens. Then: of what keeps most of the
    branches that add in place, and of the sums.
    """

    most: float
    others: float
    sums_beside: float
    adding: float
    sums: float


# By whether sums are of more bits than results; of gradients of wide heads and of narrow ones.
_GRADIENTS, _GRADIENTS_OF_NARROW = Place(1.12, 0.25, 0.35, 1.12, 0.05), Place(0.9, 0.8, 0.35, 0.9, 0.55)
_GRADIENTS_OF_SAME = Place(0.9, 0.1, 0, 0.7, 0.8)
_OUTPUTS, _OUTPUTS_OF_SAME = Place(0.9, 0.05, 0.8, 0.6, 0.9), Place(1.1, 0, 0.4, 0.5, 1)


def _in_place(held: Sequence[Held], work: Work, has_gradient: bool) -> float:
    """Returns the bytes of several branches on TPUs, some of which write where the sums are."""
    if work.itemsize == work.sum_itemsize:
        place = _GRADIENTS_OF_SAME if has_gradient else _OUTPUTS_OF_SAME
    elif has_gradient:
        place = _GRADIENTS_OF_NARROW if work.width % LANES else _GRADIENTS
    else:
        place = _OUTPUTS
    sums, adding = max(one.sums for one in held), max(one.bytes for one in held if one.adds_in_place)
    most, *others = sorted((one.bytes for one in held if not one.adds_in_place), reverse=True)
    before = place.most * most + place.others * sum(others) + place.sums_beside * sums * bool(others)
    return max(before, place.adding * adding + place.sums * sums)
