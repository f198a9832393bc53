"""torchscale's LongNetDecoder and LongNetEncoder on ringjax, with weights that were trained there.

Norms before or after, SubLN, DeepNorm, xPos or learned positions, tied outputs: as torchscale's configurations have
them. Mixtures of experts, multiway networks and cross-attention are not here. B sequences, T tokens, D the width.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Int

import ringjax
from parts.longnet_layers import Arrangement, Padding, XPos, make_layers, phantoms, run_layers
from parts.torch_checkpoint import fill, to_numpy

_FIRST_POSITION = 2  # torchscale's learned positions begin there, as fairseq's do

LAYER_NAMES = {
    "attention_norm": "self_attn_layer_norm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.inner_norm": "self_attn.inner_attn_ln",
    "attention.out": "self_attn.out_proj",
    "norm": "final_layer_norm",
    "up": "ffn.fc1",
    "inner_norm": "ffn.ffn_layernorm",
    "down": "ffn.fc2",
}
NAMES = {
    "embedding": "embed_tokens",
    "positions": "embed_positions",
    "embedding_norm": "layernorm_embedding",
    "layer_norm": "layer_norm",
    "projection": "output_projection",
    **{f"layers.{own}": f"layers.{{}}.{name}" for own, name in LAYER_NAMES.items()},
}


class LongNet(nnx.Module):
    """What both models are: tokens or their embeddings to the states of each layer, and an output.

    Args:
      num_layers: the number of layers.
      width: the width D of the states.
      num_heads: the number of heads.
      segment_lengths: the segment length of each branch.
      dilation_rates: the rate of each branch.
      vocab_size: the number of tokens' kinds; without, calls take embeddings.
      ffn_width: the width inside the networks; ``4 * width`` by default.
      arrangement: what lies between attention and networks.
      normalize_output: whether a norm comes last; as `arrangement.normalize_before` by default.
      project: whether the output is logits of tokens; as there is a `vocab_size` by default.
      tie: whether these logits are products with the embeddings.
      scale_embedding: whether embeddings are multiplied with the root of their width.
      normalize_embedding: whether they are normalised.
      num_positions: the number of learned positions; none by default.
      xpos_scale_base: of xPos, such as 512; none by default.
      padding: ``"torchscale"`` as the weights were trained, with phantom keys where segments are not full, or
        ``"none"``.
      dropout_rate: how often training drops a number of the embeddings and of what layers add.
      drop_path_rate: how often it drops all that a part of the last layer adds; of the first, never.
      remat: whether gradients compute each layer again instead of keeping what is inside.
      dtype: the dtype of the computation; that of the parameters by default.
      param_dtype: the dtype of the parameters.
      mesh: the mesh to run on; by default as :func:`ringjax.ring_dilated_attention` finds it.
      strategy: how devices share a segment, see :func:`ringjax.ring_dilated_attention`.
      rngs: the random streams of the weights.
    """

    is_causal: ClassVar[bool]

    def __init__(
        self,
        num_layers: int,
        width: int,
        num_heads: int,
        *,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        vocab_size: int | None = None,
        ffn_width: int | None = None,
        arrangement: Arrangement = Arrangement(),
        normalize_output: bool | None = None,
        project: bool | None = None,
        tie: bool = False,
        scale_embedding: bool = False,
        normalize_embedding: bool = False,
        num_positions: int | None = None,
        xpos_scale_base: float | None = None,
        padding: Padding = "torchscale",
        dropout_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        remat: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        mesh: Any = None,
        strategy: Any = "ring",
        rngs: nnx.Rngs,
    ) -> None:
        if padding not in ("torchscale", "none"):
            raise ValueError(f"padding={padding!r} is unknown: use 'torchscale' or 'none'")
        for name, rate in (("dropout_rate", dropout_rate), ("drop_path_rate", drop_path_rate)):
            if not 0 <= rate < 1:
                raise ValueError(f"{name}={rate} must be at least 0 and less than 1")
        if xpos_scale_base is not None and width // num_heads % 2:
            raise ValueError(f"xPos turns pairs, but a head of {num_heads} has the odd width {width // num_heads}")
        if xpos_scale_base is not None and jnp.dtype(dtype or param_dtype) == jnp.float16:
            raise ValueError("dtype=float16 has no room for the factors of xPos: use bfloat16 or float32")
        if vocab_size is None and (project or tie):
            raise ValueError("project or tie is True, but vocab_size=None: give it, or leave them out")
        self.width, self.num_heads, self.mesh, self.padding, self.remat = width, num_heads, mesh, padding, remat
        self.segment_lengths, self.dilation_rates = tuple(segment_lengths), tuple(dilation_rates)
        self.dropout_rate, self.path_rates = dropout_rate, tuple(np.linspace(0, drop_path_rate, num_layers).tolist())
        self.scale, self.num_positions = width**0.5 if scale_embedding else 1.0, num_positions
        self.tie = tie and project is not False
        self.dtype = jnp.dtype(dtype or param_dtype)  # of the states
        self.xpos = None if xpos_scale_base is None else XPos(xpos_scale_base)
        attention = {
            "num_heads": num_heads,
            "segment_lengths": self.segment_lengths,
            "dilation_rates": self.dilation_rates,
            "offsets": "blocked",
            "is_causal": self.is_causal,
            "documents_are_sorted": True,
            "position_embedding": self.xpos,
            "mesh": mesh,
            "strategy": strategy,
        }
        types = {"dtype": dtype, "param_dtype": param_dtype}
        norm = lambda has: nnx.LayerNorm(width, epsilon=1e-5, **types, rngs=rngs) if has else nnx.data(None)
        table = lambda size: nnx.Embed(size, width, **types, rngs=rngs) if size else nnx.data(None)
        self.embedding = table(vocab_size)
        self.positions = table(num_positions + _FIRST_POSITION if num_positions else None)
        self.embedding_norm = norm(normalize_embedding)
        shared = {"arrangement": arrangement, "attention": attention, "types": types}
        self.layers = make_layers(num_layers, rngs, width=width, ffn_width=ffn_width or 4 * width, **shared)
        self.layer_norm = norm(arrangement.normalize_before if normalize_output is None else normalize_output)
        linear = lambda size: nnx.Linear(width, size, use_bias=False, **types, rngs=rngs)
        self.projection = linear(vocab_size) if vocab_size and project is not False and not tie else nnx.data(None)

    def embed(self, tokens: Int[Array, "B T"] | Float[Array, "B T D"], first: Any = 0) -> Float[Array, "B T D"]:
        """Returns the states before the first layer, of tokens or embeddings; `first` is the first one's position."""
        tokens = jnp.asarray(tokens)
        self.check_length(tokens.shape[1])
        if jnp.issubdtype(tokens.dtype, jnp.integer):
            if self.embedding is None:
                raise ValueError(f"tokens of {tokens.dtype} are given, but vocab_size=None: give embeddings")
            check_within("tokens", tokens, 0, self.embedding.num_embeddings - 1)
            tokens = self.embedding(tokens)  # [B, T, D]
        states = self.scale * tokens.astype(self.dtype)
        if self.positions is not None:
            states += self.positions(_FIRST_POSITION + first + jnp.arange(states.shape[1]))
        return states if self.embedding_norm is None else self.embedding_norm(states)

    def check_length(self, length: int) -> None:
        """Checks that there are positions for so many tokens.

        Raises:
          ValueError: if there are too many.
        """
        if self.xpos and length > XPos.MOST * self.xpos.scale_base:
            raise ValueError(
                f"{length} tokens are too many for xpos_scale_base={self.xpos.scale_base}, whose factors leave float32 "
                f"beyond {XPos.MOST} times as many: give fewer"
            )
        if self.num_positions and length > self.num_positions:
            raise ValueError(f"{length} tokens are too many for num_positions={self.num_positions}: give fewer")

    def run(
        self, states: Float[Array, "B T D"], lengths: Int[Array, "B"] | None = None, key: Array | None = None
    ) -> tuple[Float[Array, "B T D"], list[Float[Array, "B T D"]], Int[Array, "B T"]]:
        """Runs the layers over sequences of which the first `lengths` tokens are there, padded to fit the mesh.

        Returns:
          The last states, padded; the states before the first layer and after each; and documents, padded: 0 for the
          tokens that there are, and -1.
        """
        length = states.shape[1]
        if lengths is not None:
            lengths = jnp.asarray(lengths)
            check_within("num_tokens", lengths, 0, length)
        document_ids = None if lengths is None else jnp.where(jnp.arange(length) < lengths[:, None], 0, -1)
        states, document_ids = ringjax.pad_to_mesh(states, document_ids, mesh=self.mesh)
        # Fused kernels serve more of what has no documents: where nothing is padded, none are needed.
        is_padded = lengths is not None or states.shape[1] > length
        options = {"document_ids": document_ids if is_padded else None}
        options["sinks"] = self.sinks_of(states.shape[1], length if lengths is None else lengths)
        last, every = self.apply_layers(states, key, **options)
        return last, [ringjax.unpad(states, length) for states in every], document_ids

    def apply_layers(
        self, states: Array, key: Array | None, **options: Any
    ) -> tuple[Float[Array, "B T D"], list[Float[Array, "B T D"]]]:
        """Returns the last states and all states; the options are the attention's."""
        rates = {"dropout_rate": self.dropout_rate, "remat": self.remat}
        return run_layers(self.layers, states, jnp.asarray(self.path_rates), key=key, **rates, **options)

    def output(self, states: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Returns the output of the last states: normalised, and the logits of tokens if there are any."""
        states = states if self.layer_norm is None else self.layer_norm(states)
        if self.tie and self.embedding is not None:
            return self.embedding.attend(states)
        return states if self.projection is None else self.projection(states)

    def sinks_of(self, num_rows: int, lengths: int | Int[Array, "B"]) -> Float[Array, "*B T N"] | None:
        """Returns the logits that stand for the phantoms of so many rows, of which the first `lengths` are tokens."""
        if self.padding == "none" or self.is_causal:
            return None
        shared = self.num_heads, self.segment_lengths, self.dilation_rates
        of_length = lambda length: phantoms(jnp.arange(num_rows), length, *shared)
        return of_length(lengths) if isinstance(lengths, int) else jax.vmap(of_length)(lengths)

    @classmethod
    def from_torch(
        cls, state_dict: Mapping[str, Any], *, arrangement: Arrangement | None = None, **options: Any
    ) -> Self:
        """Returns the model with the weights of one of torchscale's.

        Args:
          state_dict: NumPy arrays or torch tensors, by torchscale's own names.
          arrangement: what lies between attention and networks; by default norms before, and SubLN if there are its
            norms. To be said where there is no norm of the output.
          **options: what a checkpoint does not say: `segment_lengths`, `dilation_rates`, `num_heads` where there is no
            xPos, and where it is another than by default `scale_embedding`, `xpos_scale_base`, `padding`, `dtype`. For
            a decoder whose output has no array of its own, `tie=True` or `project=False`.

        Raises:
          ValueError: for a name that is missing or unknown, or an array of another shape, by its name.
        """
        arrays = to_numpy(state_dict)
        sizes = sizes_of(arrays)
        if arrangement is None:
            if not sizes["normalize_output"]:
                raise ValueError(
                    "the checkpoint has no layer_norm.weight: say in arrangement whether norms come before or after"
                )
            arrangement = Arrangement(subln="layers.0.self_attn.inner_attn_ln.weight" in arrays)
        of_xpos = sizes.get("num_heads")
        if of_xpos and options.get("num_heads", of_xpos) != of_xpos:
            raise ValueError(
                f"num_heads={options['num_heads']}, but xPos of the checkpoint is for {of_xpos}: give these"
            )
        if sizes.get("project") is False and options.get("tie"):
            sizes["project"] = True
        elif sizes.get("project") is False and cls.is_causal and "project" not in options:
            raise ValueError(
                "the checkpoint has embed_tokens.weight and no output_projection.weight: say tie=True if these are one "
                "array, project=False if there is no output"
            )
        options = {**sizes, "arrangement": arrangement, **options}
        return fill(nnx.eval_shape(lambda: cls(**options, rngs=nnx.Rngs(0))), arrays, NAMES)


def check_within(name: str, numbers: Array, least: int, most: int) -> None:
    """Checks numbers, where this process knows them.

    Raises:
      ValueError: if one is less or more than these.
    """
    if isinstance(numbers, Tracer) or not numbers.is_fully_addressable or not numbers.size:
        return
    for number in (int(numbers.min()), int(numbers.max())):
        if not least <= number <= most:
            raise ValueError(f"{name} has {number}, but is to be from {least} to {most}: give others")


def sizes_of(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns what the arrays of a checkpoint say of its model; takes out of them what is no parameter.

    Raises:
      ValueError: if they are not those of a LongNet.
    """
    if "layers.0.ffn.fc1.weight" not in arrays:
        raise ValueError("the checkpoint has no layers.0.ffn.fc1.weight: give the state_dict of a LongNet")
    ffn_width, width = arrays["layers.0.ffn.fc1.weight"].shape
    layers = {name.split(".")[1] for name in arrays if name.startswith("layers.")}
    sizes = {"num_layers": len(layers), "width": width, "ffn_width": ffn_width}
    if buffers := [name for name in arrays if name.endswith(".xpos.scale")]:
        sizes["xpos_scale_base"] = XPos().scale_base
        sizes["num_heads"] = width // (2 * len(arrays[buffers[0]]))
        for name in buffers:
            del arrays[name]
    embeddings, projection = (arrays.get(f"{name}.weight") for name in ("embed_tokens", "output_projection"))
    if embeddings is not None:
        sizes |= {"vocab_size": len(embeddings), "project": projection is not None}
        sizes["tie"] = projection is not None and np.array_equal(embeddings, projection)
        if sizes["tie"]:
            del arrays["output_projection.weight"]
    if "embed_positions.weight" in arrays:
        sizes["num_positions"] = len(arrays["embed_positions.weight"]) - _FIRST_POSITION
    sizes["normalize_embedding"] = "layernorm_embedding.weight" in arrays
    sizes["normalize_output"] = "layer_norm.weight" in arrays
    return sizes


class LongNetEncoder(LongNet):
    """The encoder: each token sees those before and after it; see :class:`LongNet`."""

    is_causal = False

    def __call__(
        self,
        tokens: Int[Array, "B T"] | Float[Array, "B T D"],
        num_tokens: Int[Array, "B"] | None = None,
        *,
        key: Array | None = None,
    ) -> tuple[list[Float[Array, "B T D"]], Float[Array, "B T E"]]:
        """Encodes sequences.

        Args:
          tokens: [B, T] tokens, or [B, T, D] their embeddings.
          num_tokens: [B], how many of the T tokens of each sequence there are; all by default. torchscale's own
            attention sees those beyond, too.
          key: in training, the random key of what is dropped.

        Returns:
          A list of the states [B, T, D], before the first layer and after each; and the output, [B, T, D] or the
          logits of tokens.
        """
        last, every, _ = self.run(self.embed(tokens), num_tokens, key)
        return every, ringjax.unpad(self.output(last), tokens.shape[1])


class LongNetDecoder(LongNet):
    """The decoder: each token sees those before it; see :class:`LongNet`."""

    is_causal = True

    def __call__(
        self,
        tokens: Int[Array, "B T"] | Float[Array, "B T D"],
        *,
        decode: bool = False,
        prefill: bool = False,
        key: Array | None = None,
    ) -> tuple[list[Float[Array, "B T D"]], Float[Array, "B T E"]]:
        """Decodes.

        Args:
          tokens: [B, T] tokens, or [B, T, D] their embeddings.
          decode: whether they follow those in the cache, see :meth:`init_cache`.
          prefill: in decoding, whether they are a sequence from its beginning.
          key: in training, the random key of what is dropped.

        Returns:
          A list of the states [B, T, D], before the first layer and after each; and the output, [B, T, D] or the
          logits of the next tokens.
        """
        if not decode:
            if prefill:
                raise ValueError("prefill=True, but decode=False leaves the cache as it is: make decode True")
            last, every, _ = self.run(self.embed(tokens), None, key)
            return every, ringjax.unpad(self.output(last), tokens.shape[1])
        if key is not None:
            raise ValueError("key is given, but decode=True drops nothing: leave it out")
        index = self.layers.attention.cache_index
        states = self.embed(tokens, 0 if prefill or index is None else index.get_value()[0])
        last, every = self.apply_layers(states, None, decode=True, prefill=prefill)
        return every, self.output(last)

    def init_cache(self, batch_size: int, max_length: int, dtype: Any = jnp.float32) -> None:
        """Makes the caches of sequences that are to be continued, of at most so many tokens."""
        self.check_length(max_length)
        shape = batch_size, max_length, self.width
        nnx.vmap(lambda layer: layer.attention.init_cache(shape, dtype))(self.layers)
