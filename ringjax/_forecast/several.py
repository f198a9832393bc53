"""The bytes of what several branches keep at once, by count: one of them is computed, others are under way or done."""

from collections.abc import Sequence
from typing import NamedTuple

from ringjax._forecast.factors import LANES
from ringjax._forecast.kept import Kept
from ringjax._schedule.cost import Work
from ringjax._schedule.schedule import BranchSchedule


class Held(NamedTuple):
    """The bytes that a branch keeps, or some that are counted together, of a `kind`.

    Its `output` is in the dtype of the caller's, and of all tokens if it `is_whole`. Branches are added to `sums` of
    all tokens: those with rows `in_order` of these where they are, and if it `adds_in_place`, it has no sums of its
    own. The `results` are the largest array of sums of its own rows.
    """

    bytes: float
    kind: str
    is_gathered: bool = False
    is_whole: bool = False
    in_order: bool = False
    adds_in_place: bool = False
    sums: float = 0
    results: float = 0
    output: float = 0

    @property
    def rests(self) -> bool:
        """Whether its rows are all tokens where they are: kernels for TPUs read them, and write to the sums."""
        return self.in_order and self.kind in ("local", "neighbours")


def held_by(kept: Kept, adds_in_place: bool = False) -> Held:
    """Returns what one branch keeps."""
    schedule = kept.schedule
    how = schedule.is_gathered, schedule.branch.keeps_all, schedule.continues, adds_in_place
    return Held(kept.bytes, _kind_of(schedule), *how, kept.sums, kept.results, kept.output)


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
    """How much is there on TPUs when a branch has its turn: of wide heads, and of narrow ones.

    By its kind, of what it keeps; but so much of that if it `rests`. Else its results are `returned`: put among the
    sums, or added to them. Of sums in the dtype of what the caller gets most lie where that will. What travels and
    adds in place has counted its own sums, and the caller's arrays hold some of the others: the rest is `added`.
    """

    shares: dict[str, tuple[float, float]]
    rest: tuple[float, float]
    returned: tuple[float, float]
    sums: float
    added: float = 0


# TPUs. Where sums are of more bits than what the caller gets, and of as many.
_OF_GRADIENTS = {"local": (0.3, 0.7), "neighbours": (1.1, 0.45), "sorted": (1.25, 1)}
_GRADIENTS = Turn(_OF_GRADIENTS, rest=(0.45, 0.25), returned=(0.75, 1.15), sums=0.9, added=0.5)
_GRADIENTS_OF_SAME = Turn(_OF_GRADIENTS, rest=(0.85, 0.9), returned=(0.75, 1.15), sums=0.3)
_OUTPUT = Turn({}, rest=(1.1, 0.15), returned=(0, 0), sums=1)
_OUTPUT_OF_SAME = Turn({}, rest=(1.2, 0), returned=(0, 0), sums=0.45)
_OTHERS = 0.15  # of what others keep that have results of their own


def in_turn(held: Sequence[Held], work: Work, has_gradient: bool) -> float:
    """Returns the bytes of several branches on TPUs, in the order in which they are added: at the turn of one."""
    if len(held) == 1:
        return held[0].bytes
    if work.itemsize == work.sum_itemsize:
        turn = _GRADIENTS_OF_SAME if has_gradient else _OUTPUT_OF_SAME
    else:
        turn = _GRADIENTS if has_gradient else _OUTPUT
    is_narrow, sums = work.width % LANES != 0, max(one.sums for one in held)
    apart = [0 if one.rests or one.adds_in_place else one.bytes for one in held]
    return max(
        _at_its_turn(one, turn, is_narrow, sums, is_first=number == 0) + _OTHERS * (sum(apart) - apart[number])
        for number, one in enumerate(held)
    )


def _at_its_turn(one: Held, turn: Turn, is_narrow: bool, sums: float, *, is_first: bool) -> float:
    """Returns the bytes of a branch, and of the sums of all: there before, but for the first."""
    added_to = turn.sums * sums
    if one.rests:
        return turn.rest[is_narrow] * one.bytes + added_to
    own = turn.shares.get(one.kind, (1, 1))[is_narrow] * one.bytes
    if one.adds_in_place:
        return own + turn.added * sums
    before = 0 if is_first else added_to
    if one.in_order:
        return own + before
    if one.kind == "sorted":  # results in two orders
        return max(own, 2 * one.results) + before
    return max(own + before, turn.returned[is_narrow] * one.results + added_to)
