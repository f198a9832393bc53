"""The layers of torchscale's LongNet (arXiv 2307.02486): dilated attention, a network, and what lies between them.

B sequences, T tokens, D the width of the states, N heads.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import ringjax

Padding = Literal["torchscale", "none"]
ACTIVATIONS = {"gelu": functools.partial(nnx.gelu, approximate=False), "relu": nnx.relu, "swish": nnx.swish}
_NONE = -1e30


# torchscale pads the keys of a segment with zeros after their projection, and masks none of them. Where a segment is
# not full, or its length is no multiple of the rate, there are keys of zeros: phantoms, each with a logit of 0 and no
# value. A row that sees c of them in all its branches has the lse log(exp L + c) in place of L, and its output is
# smaller by exp L / (exp L + c): that is a sink of the logit log c. A causal row sees none: they come after it.


def phantoms(
    position: Array, length: int | Array, num_heads: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int]
) -> Float[Array, "T N"]:
    """Returns for each row and head the logit of a sink that stands for the phantoms that it sees.

    Where a rate does not divide the segment length and there are several segments, the original puts rows in wrong
    places. There the paper is followed: such segments have no phantoms but those of the last.

    Args:
      position: [T] the numbers of rows.
      length: the number of tokens that there are; it may be traced.
      num_heads: the number of heads N.
      segment_lengths: the segment length of each branch.
      dilation_rates: the rate of each branch.
    """
    head, position = jnp.arange(num_heads), position[:, None]
    count = jnp.zeros((position.shape[0], num_heads), jnp.int32)
    for segment_length, rate in zip(segment_lengths, dilation_rates, strict=True):
        size = jnp.minimum(segment_length, length)
        num_segments = -(-length // size)
        stop = jnp.where(num_segments == 1, -(-size // rate) * rate, size)
        begin = jnp.where(position // size == num_segments - 1, length - (num_segments - 1) * size, size)
        offset = head // -(-num_heads // rate)
        before = lambda end, offset=offset, rate=rate: (end + rate - 1 - offset) // rate  # kept positions before `end`
        is_kept = position % size % rate == offset
        count += jnp.where(is_kept, before(stop) - before(begin), 0)
    return jnp.where(count > 0, jnp.log(jnp.maximum(count, 1).astype(jnp.float32)), _NONE)


@dataclasses.dataclass(frozen=True)
class XPos:
    """Rotary positions of which far ones weigh less (arXiv 2212.10554), in pairs of neighbors as torchscale has them.

    The weight of a pair falls with ``zeta ** (distance / scale_base)``, made of a factor of the query's position and
    one of the key's. Beyond `MOST` times `scale_base` tokens these or their gradients leave float32.
    """

    scale_base: float = 512.0

    MOST = 32

    def __call__(
        self, heads: Float[Array, "*B T N H"], positions: Int[Array, "T"], is_key: bool
    ) -> Float[Array, "*B T N H"]:
        """Embeds the positions of tokens in their heads."""
        width, dtype = heads.shape[-1], jnp.promote_types(heads.dtype, jnp.float32)
        pair = jnp.arange(width // 2, dtype=dtype)
        zeta = (2 * pair + 0.4 * width) / (1.4 * width)
        position = positions.astype(dtype)[:, None, None]  # [T, 1, 1]
        size = zeta ** (position / (-self.scale_base if is_key else self.scale_base))
        angle = position * 10_000.0 ** (-2 * pair / width)  # [T, 1, H / 2]
        cos, sin = jnp.cos(angle) * size, jnp.sin(angle) * size
        first, second = jnp.moveaxis(heads.astype(dtype).reshape(*heads.shape[:-1], -1, 2), -1, 0)
        return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(heads.shape)


class Noise(NamedTuple):
    """What training drops: numbers at a `rate`, and at a `path_rate` all that a part of a layer adds to a sequence."""

    key: Array
    rate: float
    path_rate: Any


def drop(array: Float[Array, "B T D"], noise: Noise | None, part: int) -> Float[Array, "B T D"]:
    """Drops what a part of a layer adds, and scales what is kept in proportion.

    What is dropped of a token depends on its position, so not on how many tokens of padding follow.
    """
    if noise is None:
        return array
    of_numbers, of_path = jax.random.split(jax.random.fold_in(noise.key, part))
    batch, length, width = array.shape
    of_token = lambda position: jax.random.fold_in(of_numbers, position)
    draw = lambda position: jax.random.bernoulli(of_token(position), 1 - noise.rate, (batch, width))
    kept = jax.vmap(draw, out_axes=1)(jnp.arange(length))  # [B, T, D]
    kept &= jax.random.bernoulli(of_path, 1 - noise.path_rate, (batch, 1, 1))
    return jnp.where(kept, array / ((1 - noise.rate) * (1 - noise.path_rate)), 0).astype(array.dtype)


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """What lies between attention and networks.

    Attributes:
      normalize_before: whether a norm comes before each part, or after its result is added.
      subln: whether each part has a norm inside (SubLN, arXiv 2210.06423).
      deepnorm: whether what a part adds to weighs more with more layers (DeepNorm, arXiv 2203.00555).
      activation: ``"gelu"``, ``"relu"`` or ``"swish"``.
    """

    normalize_before: bool = True
    subln: bool = True
    deepnorm: bool = False
    activation: str = "gelu"

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            names = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"activation={self.activation!r} is unknown: use one of {names}")
        if self.deepnorm and self.subln:
            raise ValueError("deepnorm=True has no norms inside: make subln False")

    def residual_weight(self, num_layers: int) -> float:
        """What the states before a part are multiplied with."""
        return (2.0 * num_layers) ** 0.25 if self.deepnorm else 1.0

    def gain(self, num_layers: int) -> float:
        """What new kernels of values, outputs and networks are multiplied with."""
        gain = (8.0 * num_layers) ** -0.25 if self.deepnorm else 1.0
        return gain * math.sqrt(math.log(2 * num_layers)) if self.subln else gain


class Layer(nnx.Module):
    """Attention and a network, each added to the states."""

    def __init__(
        self,
        width: int,
        ffn_width: int,
        num_layers: int,
        arrangement: Arrangement,
        attention: dict[str, Any],
        types: dict[str, Any],
        rngs: nnx.Rngs,
    ):
        norm = functools.partial(nnx.LayerNorm, epsilon=1e-5)
        make = functools.partial(norm, **types, rngs=rngs)
        self.arrangement, self.weight = arrangement, arrangement.residual_weight(num_layers)
        self.attention_norm = make(width)
        self.attention = ringjax.RingDilatedAttention(
            in_features=width, inner_norm=norm if arrangement.subln else None, **attention, **types, rngs=rngs
        )
        self.norm = make(width)
        self.inner_norm = make(ffn_width) if arrangement.subln else nnx.data(None)
        self.up = nnx.Linear(width, ffn_width, **types, rngs=rngs)
        self.down = nnx.Linear(ffn_width, width, **types, rngs=rngs)
        for linear in (self.attention.value, self.attention.out, self.up, self.down):
            linear.kernel.set_value(linear.kernel.get_value() * arrangement.gain(num_layers))

    def __call__(
        self, states: Float[Array, "B T D"], noise: Noise | None = None, **options: Any
    ) -> Float[Array, "B T D"]:
        """Maps states to states; the options are the attention's."""
        before = self.arrangement.normalize_before
        parts = (self.attention_norm, functools.partial(self.attention, **options)), (self.norm, self._network)
        for number, (norm, part) in enumerate(parts):
            added = drop(part(norm(states) if before else states), noise, number)
            states = self.weight * states + added
            states = states if before else norm(states)
        return states

    def _network(self, states: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        hidden = ACTIVATIONS[self.arrangement.activation](self.up(states))
        return self.down(hidden if self.inner_norm is None else self.inner_norm(hidden))


def make_layers(num_layers: int, rngs: nnx.Rngs, **options: Any) -> Layer:
    """Returns a layer whose parameters are those of so many; the options are a layer's."""
    return nnx.split_rngs(splits=num_layers)(nnx.vmap(lambda rngs: Layer(num_layers=num_layers, **options, rngs=rngs)))(
        rngs
    )


def run_layers(
    layers: Layer,
    states: Float[Array, "B T D"],
    path_rates: Float[Array, "layers"],
    *,
    key: Array | None = None,
    dropout_rate: float = 0.0,
    remat: bool = False,
    **options: Any,
) -> tuple[Float[Array, "B T D"], list[Float[Array, "B T D"]]]:
    """Returns the states after all layers, and a list of those before the first and after each.

    Args:
      layers: layers, by `make_layers`.
      states: [B, T, D], before the first.
      path_rates: [layers], how often training drops what a part of a layer adds.
      key: in training, the random key of what is dropped.
      dropout_rate: how often training drops a number.
      remat: whether gradients compute each layer again.
      **options: those of the attention.
    """
    keys = None
    if key is not None:
        first, *rest = jax.random.split(key, len(path_rates) + 1)
        states, keys = drop(states, Noise(first, dropout_rate, 0.0), 0), jnp.stack(rest)

    @nnx.scan(in_axes=(nnx.Carry, 0, 0, 0), out_axes=(nnx.Carry, 0))
    def run(states: Array, layer: Layer, key: Any, path_rate: Array) -> tuple[Array, Array]:
        noise = None if key is None else Noise(key, dropout_rate, path_rate)
        attend = lambda layer, states: layer(states, noise, **options)
        states = (nnx.remat(attend) if remat else attend)(layer, states)
        return states, states

    last, later = run(states, layers, keys, path_rates)
    return last, [states, *later]
