"""Prov-GigaPath's slide encoder on ringjax: a LongNet over the tiles of a pathology slide, with its trained weights.

Xu et al., A whole-slide foundation model for digital pathology from real-world data, Nature 2024; its attention is that
of LongNet (arXiv 2307.02486). B slides, T tiles, D the width of the states.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import ringjax
from parts.longnet_layers import Padding
from parts.torch_checkpoint import fill, to_numpy
from parts.torchscale_longnet import NAMES as NAMES_OF_LONGNET
from parts.torchscale_longnet import LongNetEncoder

RATES = (1, 2, 4, 8, 16)
NAMES = {"patch": "patch_embed.proj", "cls_token": "cls_token", "norm": "norm"}
NAMES |= {f"encoder.{own}": f"encoder.{name}" for own, name in NAMES_OF_LONGNET.items()}


def segment_lengths_of(max_wsi_size: int, tile_size: int) -> tuple[int, ...]:
    """Returns the five segment lengths for slides of so many pixels a side, in tiles of so many: 1024 to all tiles.

    Raises:
      ValueError: for a slide of fewer tiles than the last rate.
    """
    if max_wsi_size < 4 * tile_size:
        raise ValueError(f"max_wsi_size={max_wsi_size} is less than 4 tiles of {tile_size} pixels a side: give more")
    most = int(math.log2((max_wsi_size // tile_size) ** 2))
    return tuple(int(2**exponent) for exponent in np.linspace(math.log2(1024), most, 5))


def positions_2d(coordinates: Float[Array, "B T 2"], width: int, tile_size: int) -> Float[Array, "B T D"]:
    """Returns the sin-cos embeddings of tiles at coordinates in pixels."""
    row, column = jnp.moveaxis(jnp.floor(coordinates / tile_size), -1, 0)
    frequency = jnp.asarray(10000.0 ** -(np.arange(width // 4) / (width / 4)), row.dtype)
    angles = [axis[..., None] * frequency for axis in (column, row)]
    return jnp.concatenate([wave(angle) for angle in angles for wave in (jnp.sin, jnp.cos)], axis=-1)


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
        if width % 4:
            raise ValueError(
                f"width={width} must be a multiple of 4: positions are sines and cosines of two coordinates"
            )
        self.num_layers, self.global_pool, self.tile_size, self.mesh = num_layers, global_pool, tile_size, mesh
        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.patch = nnx.Linear(in_features, width, **types)
        self.cls_token = nnx.Param(0.02 * jax.random.normal(rngs.params(), (width,), param_dtype))
        self.encoder = LongNetEncoder(
            num_layers,
            width,
            num_heads,
            segment_lengths=segment_lengths or segment_lengths_of(max_wsi_size, tile_size),
            dilation_rates=dilation_rates,
            ffn_width=ffn_width,
            padding=padding,
            dropout_rate=dropout_rate,
            drop_path_rate=drop_path_rate,
            remat=remat,
            mesh=mesh,
            strategy=strategy,
            **types,
        )
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, **types)

    def __call__(
        self,
        embeddings: Float[Array, "B T C"],
        coordinates: Float[Array, "B T 2"],
        num_tiles: Int[Array, "B"] | None = None,
        *,
        key: Array | None = None,
    ) -> tuple[list[Float[Array, "B 1+T D"]], Float[Array, "B D"]]:
        """Encodes slides.

        Args:
          embeddings: [B, T, C], of the tiles.
          coordinates: [B, T, 2], of the tiles' corners, in pixels.
          num_tiles: [B], how many of the T tiles of each slide there are; all by default.
          key: in training, the random key of what is dropped.

        Returns:
          A list of the states [B, 1 + T, D], before the first layer and after each, the first token's first; and the
          output [B, D].
        """
        states = self._embed(embeddings, coordinates)
        last, every, document_ids = self.encoder.run(states, None if num_tiles is None else num_tiles + 1, key)
        return every, self._pool(last, document_ids)

    def attention_of_slide(self, states: list[Float[Array, "B 1+T D"]]) -> Float[Array, "B N T"]:
        """Returns the weights with which the slide's token attends to each tile in the last layer, for each head."""
        last = jax.tree.map(lambda array: array[-1], self.encoder.layers)
        hidden = last.attention_norm(states[-2])
        query, key, length = last.attention.query(hidden), last.attention.key(hidden), hidden.shape[1]
        pattern, sinks = last.attention.settings.pattern, self.encoder.sinks_of(length, length)
        return ringjax.attention_weights(query, key, [0], pattern=pattern, sinks=sinks)[..., 0, 1:]

    def _embed(self, embeddings: Array, coordinates: Array) -> Float[Array, "B 1+T D"]:
        tiles = self.patch(embeddings)
        tiles += positions_2d(coordinates, tiles.shape[-1], self.tile_size).astype(tiles.dtype)
        first = jnp.broadcast_to(self.cls_token.astype(tiles.dtype), (tiles.shape[0], 1, tiles.shape[-1]))
        return jnp.concatenate([first, tiles], axis=1)

    def _pool(self, states: Array, document_ids: Array) -> Float[Array, "B D"]:
        states = self.encoder.output(states)
        position = jnp.arange(states.shape[1])
        # As a mean also the first token alone: a mesh that cuts the tokens has no row to take.
        is_pooled = (document_ids >= 0) & (position > 0 if self.global_pool else position == 0)
        return self.norm(states.mean(axis=1, where=is_pooled[..., None]))

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
        arrays = to_numpy(state_dict)
        arrays.pop("pos_embed", None)
        for name in ("patch_embed.proj.weight", "encoder.layers.0.ffn.fc1.weight"):
            if name not in arrays:
                raise ValueError(
                    f"the checkpoint has no {name}: give the slide encoder's, the entry 'model' of its file"
                )
        width, in_features = arrays["patch_embed.proj.weight"].shape
        layers = {name.split(".")[2] for name in arrays if name.startswith("encoder.layers.")}
        sizes = {"num_layers": len(layers), "width": width, "in_features": in_features}
        sizes["ffn_width"] = arrays["encoder.layers.0.ffn.fc1.weight"].shape[0]
        return fill(nnx.eval_shape(lambda: cls(**sizes, dtype=dtype, **options, rngs=nnx.Rngs(0))), arrays, NAMES)
