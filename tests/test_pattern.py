"""The pattern against its definition, pair by pair."""

import itertools
import re
import warnings

import jax
import numpy as np
import pytest

from ringjax import DilatedPattern, ReachWarning, Segments, Window, ring_dilated_attention
from ringjax._pattern.pattern import read_pattern
from ringjax._pattern.reach_warning import warn_of_reach
from ringjax._pattern.warning import warning_anew

BRANCHES = ((4, 1), (5, 2), (13, 3))


@pytest.mark.parametrize("heads", ["all", "grouped"])
@pytest.mark.parametrize("merge", ["lse", "union"])
@pytest.mark.parametrize("offsets", ["interleaved", "blocked", "branch"])
@pytest.mark.parametrize(("key_length", "query_offset", "is_causal"), [(13, 0, False), (13, 0, True), (16, 7, True)])
def test_multiplicity_counts_the_branches_that_hold_a_pair(offsets, merge, heads, key_length, query_offset, is_causal):
    length, num_heads = 13, 4
    pattern = DilatedPattern.of_lengths(*zip(*BRANCHES, strict=True), offsets, merge, heads)
    count = pattern.multiplicity(length, num_heads, is_causal, key_length, query_offset)
    for head, row, s in itertools.product(range(num_heads), range(length), range(key_length)):
        expected, t = 0, query_offset + row
        for branch, (w, r) in enumerate(BRANCHES):
            if heads == "grouped" and branch != (0, 0, 1, 2)[head]:
                continue
            offset = {"interleaved": head % r, "blocked": head // -(-num_heads // r), "branch": branch % r}[offsets]
            kept = (t % w) % r == offset and (s % w) % r == offset
            expected += kept and t // w == s // w and (s <= t or not is_causal)
        assert count[head, row, s] == (expected if merge == "lse" else expected > 0)


@pytest.mark.parametrize("window", [Window(1), Window(4), Window(3, 2), Window(5, 4), Window(40, 3)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_by_its_definition(window, is_causal):
    """Pair by pair, its counts of keys and its cache with them."""
    length, query = 29, np.arange(29)
    pattern = DilatedPattern([window], offsets="blocked")
    count = pattern.multiplicity(length, 3, is_causal)
    for t, s in itertools.product(range(length), repeat=2):
        distance = abs(t - s)
        expected = distance < window.size * window.rate and distance % window.rate == 0 and (s <= t or not is_causal)
        assert (count[:, t, s] == expected).all()
    for start, stop in ((0, length), (7, 12), (20, 60)):
        seen = window.count(query, start, stop, 0, length, is_causal)
        np.testing.assert_array_equal(seen, count[0, :, start:stop].sum(axis=1))
    row = np.arange(window.num_cached(length))
    for last in range(length):
        token, is_row = window.cached(row, last, np.array([[0]]))
        needed = set(np.nonzero(count[0, last + 1])[0]) - {last + 1} if last + 1 < length else set()
        assert {s for s in needed if s <= last} <= set(token[is_row])


@pytest.mark.parametrize(("num_heads", "sizes"), [(3, [1, 1, 1]), (5, [2, 2, 1]), (7, [3, 2, 2]), (12, [4, 4, 4])])
def test_groups_take_the_extra_heads_first(num_heads, sizes):
    pattern = DilatedPattern.of_lengths(*zip(*BRANCHES, strict=True), heads="grouped")
    groups = [pattern.heads_of(branch, num_heads) for branch in range(3)]
    assert [len(group) for group in groups] == sizes
    assert [head for group in groups for head in group] == list(range(num_heads))


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
    pattern = DilatedPattern.of_lengths((8,), (rate,), offsets)
    assert pattern.offset(np.arange(heads), pattern.branches[0], 5, heads).tolist() == expected


def test_patterns_are_values(unchecked):
    pattern = DilatedPattern.of_lengths([4, np.int64(8)], [1, 2])
    assert pattern == DilatedPattern.of_lengths((4, 8), (1, 2))
    assert (
        len({pattern, DilatedPattern.of_lengths((4, 8), (1, 2)), DilatedPattern.of_lengths((4, 8), (1, 2), "blocked")})
        == 2
    )
    assert pattern == DilatedPattern([Segments(4), Segments(8, rate=2)])
    assert pattern.branches == (Segments(4, 1), Segments(8, 2))


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
        DilatedPattern.of_lengths(lengths, rates, offsets)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Segments(0), ValueError, "length=0 of Segments is below 1"),
        (lambda: Segments(8, 0), ValueError, "rate=0 of Segments is below 1"),
        (lambda: Segments(2.0), TypeError, "length=2.0 of Segments must be an integer"),
        (lambda: Window(0), ValueError, "size=0 of Window is below 1"),
        (lambda: Window(4, -1), ValueError, "rate=-1 of Window is below 1"),
        (lambda: Window(1.5), TypeError, "size=1.5 of Window must be an integer"),
        (lambda: Segments(True), TypeError, "length=True of Segments must be an integer"),
        (lambda: DilatedPattern.of_lengths((True,), (1,)), TypeError, "segment_lengths=(True,) must be a sequence of"),
        (lambda: DilatedPattern([Segments(4)]).reach(0, 1), ValueError, "length=0 must be a positive integer"),
        (lambda: DilatedPattern([Segments(4)]).plot(0), ValueError, "length=0 must be a positive integer"),
        (
            lambda: DilatedPattern([Segments(4)]).plot(8, 2, head=2),
            ValueError,
            "head=2 must be one of the num_kv_heads=2 heads, from 0 on",
        ),
        (
            lambda: DilatedPattern([Segments(4)]).plot(8, num_devices=0),
            ValueError,
            "num_devices=0 must be a positive integer",
        ),
        (
            lambda: DilatedPattern([Window(4), Window(8)], heads="grouped").reach(8, 1),
            ValueError,
            "heads='grouped' deals 1 key/value heads out over 2 branches",
        ),
        (lambda: Segments(2, 4), ValueError, "Segments(length=2, rate=4) has a rate above its length"),
        (lambda: DilatedPattern([]), ValueError, "pattern has no branches"),
        (lambda: DilatedPattern(8), TypeError, "pattern has the branch 8: make each a ringjax.Segments"),
        (lambda: DilatedPattern([(4, 1)]), TypeError, "pattern has the branch (4, 1): make each a ringjax.Segments"),
    ],
)
def test_wrong_branches_are_refused(make, error, words, unchecked):
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("offsets", ["interleaved", "blocked", "branch"])
@pytest.mark.parametrize("heads", ["all", "grouped"])
def test_reach_counts_pairs(heads, offsets, is_causal):
    length, num_heads = 29, 4
    pattern = DilatedPattern.of_lengths(*zip(*BRANCHES, strict=True), offsets, heads=heads)
    count = pattern.multiplicity(length, num_heads, is_causal)
    t, s = np.arange(length)[:, None], np.arange(length)
    is_beyond = (count * (t // 4 != s // 4)).any(axis=2)
    reach = pattern.reach(length, num_heads, is_causal)
    np.testing.assert_allclose(reach.num_keys, count.sum(axis=2).mean(axis=1))
    np.testing.assert_allclose(reach.beyond, is_beyond.mean(axis=1))
    assert reach.in_any_head == is_beyond.any(axis=0).mean()


def test_reach_of_very_long_sequences():
    """Branches that span more than what is counted still lie beyond each other."""
    pattern = DilatedPattern.of_lengths((65536, 131072, 262144, 524288, 2**20), (1, 2, 4, 8, 16))
    reach = pattern.reach(2**20, 16)
    assert reach.in_any_head == 1
    np.testing.assert_allclose(reach.beyond, 1 / 2, atol=1e-3)  # the tokens that the second branch keeps
    np.testing.assert_allclose(reach.num_keys, 65536 * (1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16), rtol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReachWarning)
        warn_of_reach(pattern, 2**20, 16, is_causal=True)


def test_reach_of_many_heads_is_that_of_those_that_differ():
    pattern, times = DilatedPattern([Segments(2048), Segments(16384, 8)]), 512
    few, many = pattern.reach(2**18, 8), pattern.reach(2**18, 8 * times)
    assert many.in_any_head == few.in_any_head
    np.testing.assert_array_equal(many.beyond, np.tile(few.beyond, times))
    np.testing.assert_array_equal(many.num_keys, np.tile(few.num_keys, times))


@pytest.mark.parametrize(
    ("pattern", "length", "heads", "is_causal", "warns"),
    [
        ([Window(1024), Segments(32768)], 1200, 8, True, False),  # the sequence ends soon
        ([Window(1024), Segments(32768, 8)], 1300, 8, True, False),
        ([Segments(2048), Segments(8192, 4), Segments(32768, 16)], 2049, 16, False, False),
        ([Segments(2048), Segments(8192, 4), Segments(32768, 16)], 32768, 2, True, True),
        ([Segments(2048), Segments(8192, 4), Segments(32768, 16)], 32768, 2, False, False),  # just half
        ([Segments(256), Segments(4096, 16)], 4096, 4, True, True),
        ([Segments(64), Segments(64, 2)], 256, 2, True, False),  # nothing is beyond
    ],
)
def test_what_could_be_seen_is_what_counts(pattern, length, heads, is_causal, warns):
    with warning_anew(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for more in (0, 1):  # once, whatever the length
            warn_of_reach(DilatedPattern(pattern), length + more, heads, is_causal)
    assert len(caught) == warns


def test_patterns_that_do_not_reach_warn_once():
    call = lambda rate, heads: jax.eval_shape(
        lambda x: ring_dilated_attention(x, x, x, pattern=[Segments(256), Segments(4096, rate)]),
        jax.ShapeDtypeStruct((1, 4096, heads, 8), "float32"),
    )
    words = r"25% of the queries .* any of the 4 key/value heads, .* such as Segments\(length=4096, rate=4\), more "
    with pytest.warns(ReachWarning, match=words + "key/value heads, or a window with a rate"):
        call(16, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReachWarning)
        call(16, 4)
        call(4, 4)
        jax.eval_shape(lambda x: ring_dilated_attention(x, x, x, pattern=[Segments(8, 8)]), np.zeros((1, 64, 1, 8)))


USUAL = "interleaved", "lse", "all"


def test_both_forms_of_a_pattern_say_the_same():
    branches = [Segments(4), Segments(8, rate=2)]
    for choices in (USUAL, ("blocked", "union", "grouped")):
        expected = DilatedPattern(branches, *choices)
        assert read_pattern(branches, None, None, *choices) == expected
        assert read_pattern(None, (4, 8), (1, 2), *choices) == expected
        assert read_pattern(expected, None, None, *USUAL) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, None, None, *USUAL), "pattern is missing: say which tokens attend with pattern="),
        ((None, (4,), None, *USUAL), "dilation_rates is missing"),
        (([Segments(4)], (4,), None, *USUAL), "is given beside segment_lengths=(4,): leave one out"),
        ((DilatedPattern([Segments(4)]), None, None, "blocked", "lse", "all"), "offsets='blocked' is given beside a"),
    ],
)
def test_patterns_that_are_said_twice_or_not_at_all(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        read_pattern(*arguments)


@pytest.mark.parametrize("method", ["reach", "multiplicity", "plot"])
def test_whether_it_is_causal_is_true_or_false(method, unchecked):
    with pytest.raises(TypeError, match="is_causal='no' must be True or False"):
        getattr(DilatedPattern([Segments(4)]), method)(length=8, num_kv_heads=1, is_causal="no")


@pytest.mark.parametrize(
    ("branch", "same"),
    [
        (Window(2**63 - 1), Window(2**20)),
        (Window(2**62, 2), Window(2**20, 2)),
        (Window(2**40, 2**40), Window(2**20, 2**20)),
        (Segments(10**20, 3), Segments(2**20, 3)),
    ],
)
def test_numbers_beyond_those_of_positions(branch, same):
    """They mean what smaller ones do that are beyond the sequence as well."""
    one, other = DilatedPattern([branch, Segments(5)]), DilatedPattern([same, Segments(5)])
    for is_causal in (False, True):
        np.testing.assert_array_equal(one.multiplicity(24, 2, is_causal), other.multiplicity(24, 2, is_causal))
        reached, expected = one.reach(24, 2, is_causal), other.reach(24, 2, is_causal)
        assert reached.in_any_head == expected.in_any_head
        np.testing.assert_array_equal(reached.num_keys, expected.num_keys)


@pytest.mark.parametrize("arguments", [(-1, 1), (4, 0), (4.5, 1)], ids=str)
def test_pairs_of_no_tokens_are_not_counted(arguments):
    name = "num_kv_heads" if arguments[1] == 0 else "length"
    with pytest.raises(ValueError, match=f"{name}=.* must be a positive integer"):
        DilatedPattern([Segments(4)]).multiplicity(*arguments)


def test_rates_do_not_count_tokens():
    with pytest.raises(ValueError, match="rate=0 of Window is below 1: one of so many tokens, from 1 on"):
        Window(4, 0)
    with pytest.raises(ValueError, match="lengths count tokens, rates say of how many one is kept"):
        DilatedPattern.of_lengths((4,), (0,))


def test_offsets_that_keep_the_same_tokens_in_all_heads_are_said():
    """A lower rate is no remedy there."""
    pattern = DilatedPattern([Segments(256), Segments(4096, 8)], offsets="branch")
    with warning_anew(), pytest.warns(ReachWarning, match="so use offsets='interleaved', which keeps other tokens in"):
        warn_of_reach(pattern, 4096, 8, True)
