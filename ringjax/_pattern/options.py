"""The options that say what attention computes: one entry for each, with its type, default, check and sentence.

Functions and modules take keywords, defaults and docstrings from here; `ringjax._options` adds those that say how.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

import numpy as np
from jaxtyping import Array, Integer

from ringjax._pattern.arguments import (
    check_documents,
    check_dropout_rate,
    check_offset,
    check_scale,
    check_soft_cap,
)
from ringjax._pattern.branch import Branch
from ringjax._pattern.counts import check_flag
from ringjax._pattern.option import Option
from ringjax._pattern.pattern import DilatedPattern, Heads, Merge, Offsets, read_pattern
from ringjax._pattern.sinks import check_sinks

_Ids = Integer[Array | np.ndarray, "*B T"]
Documents = _Ids | tuple[_Ids, Integer[Array | np.ndarray, "*B S"]]


class _Pattern(TypedDict, total=False):
    pattern: Annotated[
        DilatedPattern | Sequence[Branch] | None,
        Option(
            None,
            "the branches, a sequence of :class:`Segments` and :class:`Window`, or a :class:`DilatedPattern`, which "
            "also says `offsets`, `merge` and `heads`.",
        ),
    ]


class ChoiceOptions(TypedDict, total=False):
    """The pattern as lists of lengths and rates, and the options that go with its branches."""

    segment_lengths: Annotated[
        Sequence[int] | None,
        Option(
            None,
            "instead of a pattern, the segment length of each branch, in tokens; any, dividing T or not.",
        ),
    ]
    dilation_rates: Annotated[
        Sequence[int] | None,
        Option(None, "the dilation rate of each branch, at most its segment length."),
    ]
    offsets: Annotated[
        Offsets, Option("interleaved", '``"interleaved"``, ``"blocked"`` or ``"branch"``, see :class:`DilatedPattern`.')
    ]
    merge: Annotated[
        Merge,
        Option(
            "lse",
            '``"lse"``, where a pair counts once for each branch that holds it, or ``"union"``, where it counts once.',
        ),
    ]
    heads: Annotated[
        Heads,
        Option("all", '``"all"``, where every head runs every branch, or ``"grouped"``, where each runs one.'),
    ]
    is_causal: Annotated[
        bool,
        Option(
            False,
            "whether a query sees only keys whose position is not after its own: a token that changes, from one finite "
            "value to another, changes no row before it.",
            check_flag,
        ),
    ]
    logits_soft_cap: Annotated[
        float | None,
        Option(
            None,
            "the cap c of scaled logits, which are then ``c tanh(logits / c)``; none by default.",
            check_soft_cap,
        ),
    ]


class PatternOptions(_Pattern, ChoiceOptions, total=False):
    """Which pairs attend to each other."""


class ScaleOptions(TypedDict, total=False):
    """The logit scale."""

    scale: Annotated[
        float | None,
        Option(
            None,
            "what the logits are multiplied with, a number, 0 or between 1e-18 and 1e18 in size; ``1 / sqrt(H)`` by "
            "default.",
            check_scale,
        ),
    ]


class SinkOptions(TypedDict, total=False):
    """What takes part in the softmax beside keys."""

    sinks: Annotated[
        Array | np.ndarray | None,
        Option(
            None,
            "a logit for each query head, [N] or what broadcasts to [..., T, N]: it takes part in the softmax of the "
            'head\'s rows and has no value (gpt-oss; zeros are "softmax off by one"). It is differentiated, neither '
            "scaled nor capped nor dropped, and is part of the lse.",
            check_sinks,
        ),
    ]


class TokenOptions(SinkOptions, total=False):
    """The options about the tokens of one call."""

    document_ids: Annotated[
        Documents | None,
        Option(
            None,
            "integers [..., T], or a pair of [..., T] and [..., S] for queries and keys. Where S is not T, it must be "
            "a pair. Tokens attend only within their own document. Tokens with a negative number attend to nothing and "
            "give zeros. Tiles whose documents do not meet are skipped. The numbers must fit 32 bits, which is checked "
            "where they are known.",
            check_documents,
        ),
    ]
    query_offset: Annotated[
        int | Integer[Array | np.ndarray, ""],
        Option(
            0,
            "the position of the first query, not negative; that of the first key is 0. All positions are below "
            "2**31 - 1. Each integer compiles a program of its own. A scalar integer array serves all offsets with one "
            "program. No device is left out: queries travel to all keys, or keys to all queries, whichever is fewer "
            "bytes.",
            check_offset,
        ),
    ]


class DropoutOptions(TypedDict, total=False):
    """Which attention weights are dropped."""

    dropout_rate: Annotated[
        float,
        Option(
            0.0,
            "the probability with which an attention weight is dropped, in [0, 1); kept weights are divided by "
            "``1 - dropout_rate``. Which weights are dropped depends only on the seed, the batch, the head and the "
            "positions of query and key, not on the mesh. Where several branches hold a pair, all of them drop it or "
            "none does.",
            check_dropout_rate,
        ),
    ]
    broadcast_dropout: Annotated[
        bool, Option(False, "whether all batches and heads drop the same weights.", check_flag)
    ]


class SeedOptions(TypedDict, total=False):
    """The seed of dropout."""

    dropout_seed: Annotated[
        Any,
        Option(
            None,
            "an integer of 64 bits, an array of one, or a key of `jax.random`; asked for where weights are dropped.",
        ),
    ]


class ResultOptions(TypedDict, total=False):
    """What is returned."""

    return_residual: Annotated[
        bool,
        Option(False, "whether to return the log-sum-exp of each row too, with its exact gradient.", check_flag),
    ]


class LogitOptions(TypedDict, total=False):
    """What is returned of the logits."""

    return_max_logit: Annotated[
        bool,
        Option(
            False,
            "whether to return, last, the greatest logit of each query head [N], as QK-clip needs it: over all pairs "
            "that the call sees, scaled and capped, without sinks; minus infinity where there are none. It has no "
            "gradient.",
            check_flag,
        ),
    ]


class WeightsOptions(PatternOptions, ScaleOptions, TokenOptions, total=False):
    """The options of :func:`attention_weights`."""


class ReferenceOptions(PatternOptions, ScaleOptions, TokenOptions, DropoutOptions, SeedOptions, total=False):
    """The options of :func:`dilated_attention_reference`, except those on which the type of its result depends."""


class AllReferenceOptions(ReferenceOptions, ResultOptions, LogitOptions, total=False):
    """The options of :func:`dilated_attention_reference`."""


# The options that `pattern_of` reads into one pattern.
IN_PATTERN = "pattern", "segment_lengths", "dilation_rates", "offsets", "merge", "heads"


def pattern_of(asked: Any) -> DilatedPattern:
    """Returns the pattern that options give, as branches or as lists of lengths and rates."""
    lists = asked.segment_lengths, asked.dilation_rates
    return read_pattern(asked.pattern, *lists, asked.offsets, asked.merge, asked.heads)
