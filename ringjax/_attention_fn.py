"""The attention function for Flax's own modules; it refuses arguments that it cannot honor."""

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

from jaxtyping import Array

from ringjax._attention import ring_dilated_attention
from ringjax._options import FactoryOptions, read_checked
from ringjax._pattern.option import taking
from ringjax._pattern.options import IN_PATTERN
from ringjax._pattern.other_names import OF_FUNCTION
from ringjax._pattern.pattern import DilatedPattern


@taking(FactoryOptions)
def attention_fn(**options: Unpack[FactoryOptions]) -> Callable[..., Array]:
    """Returns a function that `nnx.MultiHeadAttention` and `linen.MultiHeadDotProductAttention` take as `attention_fn`.

    Flax's module sets the dropout; with its default ``broadcast_dropout=True`` all batches and heads drop the same
    weights. Calls may also set `is_causal`.

    Args:
      **options: as :func:`ring_dilated_attention` takes them.

    Returns:
      A function of query [..., T, N, H], key [..., S, K, H] and value [..., S, K, V] that returns [..., T, N, V]. It
      raises a ValueError if it is called with a mask, a bias, or anything else that it cannot honor.

    Raises:
      TypeError: for an unknown option, or one of another type.
      ValueError: for a wrong pattern, see :class:`DilatedPattern`, and a wrong option.

    Example:
      >>> from flax import nnx
      >>> attend = attention_fn(segment_lengths=(4, 16), dilation_rates=(1, 4), is_causal=True)
      >>> attention = nnx.MultiHeadAttention(4, 32, attention_fn=attend, decode=False, rngs=nnx.Rngs(0))
      >>> attention(jnp.ones((2, 16, 32))).shape
      (2, 16, 32)
    """
    pattern, _ = read_checked(FactoryOptions, options, OF_FUNCTION, "attention_fn")
    fixed: dict[str, Any] = {name: value for name, value in options.items() if name not in IN_PATTERN}
    return _Attend(pattern, bool(fixed.pop("is_causal", False)), fixed)


@dataclasses.dataclass(frozen=True, eq=False)
class _Attend:
    """What `attention_fn` returns: instances with equal options are equal, so that Flax traces their modules once."""

    pattern: DilatedPattern
    is_always_causal: bool
    options: dict[str, Any]

    # Flax's linen module passes only the keywords that this signature names, and none of its keywords may get lost.
    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> Array:
        """Computes attention as Flax's modules ask for it."""
        del force_fp32_for_softmax  # the softmax is always in float32 at least
        refused = {
            "bias": (bias, "it would have to travel with every pair"),
            "mask": (
                mask,
                "say is_causal, document_ids or query_offset to ringjax.attention_fn instead; where Flax's module made "
                "it, under decode=True, take ringjax.RingDilatedAttention or ringjax.linen.RingDilatedAttention",
            ),
            "module": (module, "no array of weights exists that it could sow: leave sow_weights out"),
            "qk_attn_weights_einsum": (qk_attn_weights_einsum, "the products are in the ring"),
            "attn_weights_value_einsum": (attn_weights_value_einsum, "the products are in the ring"),
        }
        for name, (argument, remedy) in refused.items():
            if argument is not None:
                raise ValueError(f"{name} is given to ringjax's attention_fn, which cannot honour it: {remedy}")
        arrays = [array if dtype is None else array.astype(dtype) for array in (query, key, value)]
        is_dropping = dropout_rate > 0 and not deterministic
        out: Any = ring_dilated_attention(
            *arrays,
            pattern=self.pattern,
            is_causal=self.is_always_causal or is_causal,
            dropout_rate=dropout_rate if is_dropping else 0.0,
            dropout_seed=dropout_rng if is_dropping else None,
            broadcast_dropout=broadcast_dropout,
            **{"precision": precision, **self.options},
        )
        return out

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Attend) and self._identity == other._identity)

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> Any:
        """What `==` and `hash` use: the options, or the object itself if they cannot be hashed, like arrays."""
        identity = self.pattern, self.is_always_causal, tuple(sorted(self.options.items()))
        try:
            hash(identity)
        except TypeError:
            return id(self)
        return identity
