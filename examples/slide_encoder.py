"""Prov-GigaPath's slide encoder on ringjax: a LongNet over the tiles of a pathology slide, with its trained weights.

Xu et al., A whole-slide foundation model for digital pathology from real-world data, Nature 2024; its attention is that
of LongNet (arXiv 2307.02486). B slides, T tiles, D the width of the states.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import ringjax

Padding = Literal["torchscale", "none"]
RATES = (1, 2, 4, 8, 16)
# The original pads the keys of a segment with zeros after their projection, and masks none of them: see `phantoms`.
_NONE = -1e30


def segment_lengths_of(max_wsi_size: int, tile_size: int) -> tuple[int, ...]:
    """Returns the five segment lengths for slides of so many pixels a side, in tiles of so many: 1024 to all tiles."""
    most = int(math.log2((max_wsi_size // tile_size) ** 2))
    return tuple(int(2**exponent) for exponent in np.linspace(math.log2(1024), most, 5))


# Where a segment is not full, or its length is no multiple of the rate, the original has keys of zeros: phantoms, each
# with a logit of 0 and no value. A row that sees c of them in all its branches has the lse log(exp L + c) in place of
# L, and its output is smaller by exp L / (exp L + c): that is a sink of the logit log c.


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


def positions_2d(coordinates: Float[Array, "B T 2"], width: int, tile_size: int) -> Float[Array, "B T D"]:
    """Returns the sin-cos embeddings of tiles at coordinates in pixels."""
    row, column = jnp.moveaxis(jnp.floor(coordinates / tile_size), -1, 0)
    frequency = jnp.asarray(10000.0 ** -(np.arange(width // 4) / (width / 4)), row.dtype)
    angles = [axis[..., None] * frequency for axis in (column, row)]
    return jnp.concatenate([wave(angle) for angle in angles for wave in (jnp.sin, jnp.cos)], axis=-1)


class Noise(NamedTuple):
    """What training drops: numbers at a `rate`, and at a `path_rate` all that a part of a layer adds to a slide."""

    key: Array
    rate: float
    path_rate: Any


def _thin(array: Float[Array, "B T D"], noise: Noise | None, part: int) -> Float[Array, "B T D"]:
    """Drops what a part of a layer adds, and scales what is kept in proportion."""
    if noise is None:
        return array
    for number, (rate, shape) in enumerate(((noise.rate, array.shape), (noise.path_rate, (array.shape[0], 1, 1)))):
        kept = jax.random.bernoulli(jax.random.fold_in(noise.key, 2 * part + number), 1 - rate, shape)
        array = jnp.where(kept, array / (1 - rate), 0).astype(array.dtype)
    return array


class Layer(nnx.Module):
    """A layer: attention and a network, each after a norm and with one inside (SubLN, arXiv 2210.06423)."""

    def __init__(self, width: int, ffn_width: int, attention: dict[str, Any], types: dict[str, Any], rngs: nnx.Rngs):
        norm = functools.partial(nnx.LayerNorm, epsilon=1e-5, **types, rngs=rngs)
        self.attention_norm = norm(width)
        inner = functools.partial(nnx.LayerNorm, epsilon=1e-5)
        self.attention = ringjax.RingDilatedAttention(
            in_features=width, inner_norm=inner, documents_are_sorted=True, **attention, **types, rngs=rngs
        )
        self.norm, self.inner_norm = norm(width), norm(ffn_width)
        self.up = nnx.Linear(width, ffn_width, **types, rngs=rngs)
        self.down = nnx.Linear(ffn_width, width, **types, rngs=rngs)

    def __call__(
        self, states: Float[Array, "B T D"], noise: Noise | None = None, **options: Any
    ) -> Float[Array, "B T D"]:
        """Maps states to states; the options are the attention's."""
        states = states + _thin(self.attention(self.attention_norm(states), **options), noise, 0)
        hidden = nnx.gelu(self.up(self.norm(states)), approximate=False)
        return states + _thin(self.down(self.inner_norm(hidden)), noise, 1)


class SlideEncoder(nnx.Module):
    """The encoder: embeddings of tiles and their coordinates to states, and one output for the slide.

    Args:
      num_layers: the number of layers.
      width: the width D of the states, a multiple of 4.
      num_heads: the number of heads.
      in_features: the width of the tiles' embeddings.
      ffn_width: the width inside the networks; ``4 * width`` by default.
      segment_lengths: the segment length of each branch, in tiles; by default from the sizes of slide and tile.
      dilation_rates: the rate of each branch.
      padding: ``"torchscale"`` as the weights were trained, with phantom keys where segments are not full, or
        ``"none"``.
      global_pool: whether the output is the mean over the tiles, instead of the first token's state.
      dropout_rate: the rate at which training drops numbers of the embeddings and of what layers add.
      drop_path_rate: the rate at which it drops all that a part of the last layer adds; of the first, none.
      remat: whether gradients compute each layer again instead of keeping what is inside: for slides of many tiles.
      max_wsi_size: the largest slide, in pixels a side.
      tile_size: the tiles, in pixels a side.
      dtype: the dtype of the computation; that of the parameters by default.
      param_dtype: the dtype of the parameters.
      mesh: the mesh to run on; by default as :func:`ringjax.ring_dilated_attention` finds it.
      strategy: how devices share a segment, see :func:`ringjax.ring_dilated_attention`.
      rngs: the random streams of the weights.
    """

    def __init__(
        self,
        num_layers: int = 12,
        width: int = 768,
        num_heads: int = 16,
        *,
        in_features: int = 1536,
        ffn_width: int | None = None,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] = RATES,
        padding: Padding = "torchscale",
        global_pool: bool = False,
        dropout_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        remat: bool = False,
        max_wsi_size: int = 262144,
        tile_size: int = 256,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        mesh: Any = None,
        strategy: Any = "ring",
        rngs: nnx.Rngs,
    ) -> None:
        if padding not in ("torchscale", "none"):
            raise ValueError(f"padding={padding!r} is unknown: use 'torchscale' or 'none'")
        if width % 4:
            raise ValueError(
                f"width={width} must be a multiple of 4: positions are sines and cosines of two coordinates"
            )
        self.padding, self.global_pool, self.tile_size = padding, global_pool, tile_size
        self.remat = remat
        self.dropout_rate, self.path_rates = dropout_rate, tuple(np.linspace(0, drop_path_rate, num_layers).tolist())
        self.segment_lengths = tuple(segment_lengths or segment_lengths_of(max_wsi_size, tile_size))
        self.dilation_rates, self.num_heads, self.mesh = tuple(dilation_rates), num_heads, mesh
        attention = {
            "num_heads": num_heads,
            "segment_lengths": self.segment_lengths,
            "dilation_rates": self.dilation_rates,
            "offsets": "blocked",
            "mesh": mesh,
            "strategy": strategy,
        }
        types = {"dtype": dtype, "param_dtype": param_dtype}
        make = lambda rngs: Layer(width, ffn_width or 4 * width, attention, types, rngs)
        self.patch = nnx.Linear(in_features, width, **types, rngs=rngs)
        self.cls_token = nnx.Param(0.02 * jax.random.normal(rngs.params(), (width,), param_dtype))
        self.layers = nnx.split_rngs(splits=num_layers)(nnx.vmap(make))(rngs)
        self.layer_norm = nnx.LayerNorm(width, epsilon=1e-5, **types, rngs=rngs)
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, **types, rngs=rngs)

    def __call__(
        self,
        embeddings: Float[Array, "B T C"],
        coordinates: Float[Array, "B T 2"],
        num_tiles: Int[Array, "B"] | None = None,
        *,
        key: Array | None = None,
    ) -> tuple[Float[Array, "layers B 1+T D"], Float[Array, "B D"]]:
        """Encodes slides.

        Args:
          embeddings: [B, T, C], of the tiles.
          coordinates: [B, T, 2], of the tiles' corners, in pixels.
          num_tiles: [B], how many of the T tiles of each slide there are; all by default.
          key: in training, the random key of what is dropped.

        Returns:
          The states [layers + 1, B, 1 + T, D], before the first layer and after each, the first token's first; and the
          output [B, D].
        """
        states, length = self._embed(embeddings, coordinates), embeddings.shape[1] + 1
        lengths, document_ids = length, None
        if num_tiles is not None:
            lengths = num_tiles + 1
            document_ids = jnp.where(jnp.arange(length) < lengths[:, None], 0, -1)
        states, document_ids = ringjax.pad_to_mesh(states, document_ids, mesh=self.mesh)
        # Fused kernels serve more of what has no documents: where nothing is padded, none are needed.
        is_padded = num_tiles is not None or states.shape[1] > length
        options = {"document_ids": document_ids if is_padded else None}
        options["sinks"] = self._sinks(states.shape[1], lengths)
        keys, path_rates = None, jnp.asarray(self.path_rates)
        if key is not None:
            first, *keys = jax.random.split(key, len(self.path_rates) + 1)
            states, keys = _thin(states, Noise(first, self.dropout_rate, 0.0), 0), jnp.stack(keys)

        @nnx.scan(in_axes=(nnx.Carry, 0, 0, 0), out_axes=(nnx.Carry, 0))
        def run(states: Array, layer: Layer, key: Any, path_rate: Array) -> tuple[Array, Array]:
            noise = None if key is None else Noise(key, self.dropout_rate, path_rate)
            attend = lambda layer, states: layer(states, noise, **options)
            states = (nnx.remat(attend) if self.remat else attend)(layer, states)
            return states, states

        last, later = run(states, self.layers, keys, path_rates)
        every = jnp.concatenate([states[None], later])
        return ringjax.unpad(every, length), self._pool(last, document_ids)

    def attention_of_slide(self, states: Float[Array, "layers B 1+T D"]) -> Float[Array, "B N T"]:
        """Returns the weights with which the slide's token attends to each tile in the last layer, for each head."""
        last = jax.tree.map(lambda array: array[-1], self.layers)
        hidden = last.attention_norm(states[-2])
        query, key, length = last.attention.query(hidden), last.attention.key(hidden), hidden.shape[1]
        sinks = self._sinks(length, length)
        pattern = last.attention.settings.pattern
        return ringjax.attention_weights(query, key, [0], pattern=pattern, sinks=sinks)[..., 0, 1:]

    def _sinks(self, num_rows: int, lengths: int | Int[Array, "B"]) -> Float[Array, "*B T N"] | None:
        """Returns the logits that stand for the phantoms of so many rows, of which the first `lengths` are tokens."""
        if self.padding == "none":
            return None
        shared = self.num_heads, self.segment_lengths, self.dilation_rates
        of_slide = lambda length: phantoms(jnp.arange(num_rows), length, *shared)
        return of_slide(lengths) if isinstance(lengths, int) else jax.vmap(of_slide)(lengths)

    def _embed(self, embeddings: Array, coordinates: Array) -> Float[Array, "B 1+T D"]:
        tiles = self.patch(embeddings)
        tiles += positions_2d(coordinates, tiles.shape[-1], self.tile_size).astype(tiles.dtype)
        first = jnp.broadcast_to(self.cls_token.astype(tiles.dtype), (tiles.shape[0], 1, tiles.shape[-1]))
        return jnp.concatenate([first, tiles], axis=1)

    def _pool(self, states: Array, document_ids: Array) -> Float[Array, "B D"]:
        states = self.layer_norm(states)
        if not self.global_pool:
            return self.norm(states[:, 0])
        is_tile = (document_ids >= 0) & (jnp.arange(states.shape[1]) > 0)
        return self.norm(states.mean(axis=1, where=is_tile[..., None]))

    @classmethod
    def from_torch(cls, state_dict: Mapping[str, Any], *, dtype: Any = None, **options: Any) -> "SlideEncoder":
        """Returns the encoder with the weights of a checkpoint of the original.

        Args:
          state_dict: NumPy arrays or torch tensors, by the checkpoint's own names: ``torch.load(...)["model"]``.
          dtype: the dtype of the computation; that of the parameters, float32, by default.
          **options: what a checkpoint does not say, such as `num_heads`, `padding` and `global_pool`.

        Raises:
          ValueError: for a name that is missing or unknown, or an array of another shape, by its name.
        """
        arrays = {name: np.asarray(array) for name, array in state_dict.items() if name != "pos_embed"}
        for name in ("patch_embed.proj.weight", "encoder.layers.0.ffn.fc1.weight"):
            if name not in arrays:
                raise ValueError(
                    f"the checkpoint has no {name}: give the slide encoder's, the entry 'model' of its file"
                )
        width, in_features = arrays["patch_embed.proj.weight"].shape
        layers = {name.split(".")[2] for name in arrays if name.startswith("encoder.layers.")}
        sizes = {"num_layers": len(layers), "width": width, "in_features": in_features}
        sizes["ffn_width"] = arrays["encoder.layers.0.ffn.fc1.weight"].shape[0]
        encoder = nnx.eval_shape(lambda: cls(**sizes, dtype=dtype, **options, rngs=nnx.Rngs(0)))
        definition, abstract = nnx.split(encoder)
        flat = dict(nnx.to_flat_state(abstract))
        found = {path: variable.replace(_read(arrays, path, variable)) for path, variable in flat.items()}
        if arrays:
            raise ValueError(f"the checkpoint has arrays that the encoder has not: {', '.join(sorted(arrays)[:5])}")
        return nnx.merge(definition, nnx.from_flat_state(found))


# The original's names of our modules; layers have their number before.
_LAYER = {
    "attention_norm": "self_attn_layer_norm",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "out_proj",
    "norm": "final_layer_norm",
    "up": "ffn.fc1",
    "down": "ffn.fc2",
}
_NAMES = {"patch": "patch_embed.proj", "layer_norm": "encoder.layer_norm", "norm": "norm", "cls_token": "cls_token"}


def _read(arrays: dict[str, np.ndarray], path: tuple[Any, ...], variable: Any) -> Array:
    """Takes the array of a variable out of the checkpoint's.

    Raises:
      ValueError: if there is none, or one of another shape.
    """
    shape, dtype = variable.get_value().shape, variable.get_value().dtype

    def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in arrays:
            raise ValueError(f"the checkpoint has no {name}")
        array = arrays.pop(name)
        array = array.T if path[-1] == "kernel" else array  # torch has outputs first
        if array.size != math.prod(shape):
            raise ValueError(f"{name} of the checkpoint has the shape {array.shape}, which cannot be made {shape}")
        return array.reshape(shape)

    if path[0] != "layers":
        return jnp.asarray(take(_name(path, _NAMES), shape), dtype)
    layers = (take(f"encoder.layers.{number}.{_name_in_layer(path[1:])}", shape[1:]) for number in range(shape[0]))
    return jnp.asarray(np.stack(list(layers)), dtype)


def _name(path: tuple[Any, ...], names: Mapping[str, str]) -> str:
    kinds = {"kernel": "weight", "scale": "weight", "bias": "bias"}
    return ".".join(kinds[part] if part in kinds else names[part] for part in path)


def _name_in_layer(path: tuple[Any, ...]) -> str:
    inner = "inner_attn_ln" if path[0] == "attention" else "ffn.ffn_layernorm"
    return _name(path, {**_LAYER, "inner_norm": inner})
