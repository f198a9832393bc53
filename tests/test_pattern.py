"""The pattern against its definition, pair by pair."""

import itertools

import numpy as np
import pytest

from ringjax import DilatedPattern


@pytest.mark.parametrize("offsets", ["interleaved", "blocked"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_multiplicity_counts_the_branches_that_hold_a_pair(offsets, is_causal):
    length, heads = 13, 3
    pattern = DilatedPattern((4, 5, 13, 20), (1, 2, 3, 5), offsets)
    count = pattern.multiplicity(length, heads, is_causal)
    for head, t, s in itertools.product(range(heads), range(length), range(length)):
        expected = 0
        for w, r in ((4, 1), (5, 2), (13, 3), (20, 5)):
            offset = head % r if offsets == "interleaved" else head // -(-heads // r)
            kept = (t % w) % r == offset and (s % w) % r == offset
            expected += kept and t // w == s // w and (s <= t or not is_causal)
        assert count[head, t, s] == expected


@pytest.mark.parametrize(
    ("offsets", "heads", "rate", "expected"),
    [
        ("interleaved", 5, 3, [0, 1, 2, 0, 1]),
        ("interleaved", 2, 4, [0, 1]),
        ("blocked", 5, 3, [0, 0, 1, 1, 2]),
        ("blocked", 4, 4, [0, 1, 2, 3]),
        ("blocked", 4, 8, [0, 1, 2, 3]),
        ("blocked", 8, 2, [0, 0, 0, 0, 1, 1, 1, 1]),
        ("branch", 3, 4, [1, 1, 1]),
        ("branch", 2, 8, [5, 5]),
    ],
)
def test_offsets(offsets, heads, rate, expected):
    pattern = DilatedPattern((8,), (rate,), offsets)
    assert pattern.offset(np.arange(heads), rate, heads, branch=5).tolist() == expected


def test_patterns_are_values(unchecked):
    pattern = DilatedPattern([4, np.int64(8)], [1, 2])
    assert pattern == DilatedPattern((4, 8), (1, 2))
    assert len({pattern, DilatedPattern((4, 8), (1, 2)), DilatedPattern((4, 8), (1, 2), "blocked")}) == 2
    assert list(pattern.branches) == [(4, 1), (8, 2)]


@pytest.mark.parametrize(
    ("lengths", "rates", "offsets", "error", "words"),
    [
        ((), (), "interleaved", ValueError, "segment_lengths=() is empty"),
        ((4, 8), (1,), "interleaved", ValueError, "2 and 1 entries"),
        ((0,), (1,), "interleaved", ValueError, "segment_lengths=(0,) has a value below 1"),
        ((4,), (-1,), "interleaved", ValueError, "dilation_rates=(-1,) has a value below 1"),
        ((4, 2), (1, 4), "interleaved", ValueError, "rate 4 above its segment length 2"),
        ((4,), (1,), "random", ValueError, "offsets='random' is unknown"),
        ((4.0,), (1,), "interleaved", TypeError, "segment_lengths=(4.0,) must be a sequence of integers"),
        (4, (1,), "interleaved", TypeError, "segment_lengths=4 must be a sequence of integers"),
    ],
)
def test_wrong_patterns_are_refused(lengths, rates, offsets, error, words, unchecked):
    with pytest.raises(error) as caught:
        DilatedPattern(lengths, rates, offsets)
    assert words in str(caught.value)
