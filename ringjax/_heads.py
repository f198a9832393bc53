"""What the Flax modules share: the settings of their attention, and what happens between their projections."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ringjax._attention import ring_dilated_attention
from ringjax._decoding.cache import Cache, make_cache
from ringjax._decoding.decode import Decoder, make_decoder
from ringjax._kernels.softmax import Weighting, with_positive_scale
from ringjax._mesh.mesh import check_spec
from ringjax._mesh.placement import find_placement
from ringjax._mesh.sharded import token_positions
from ringjax._module_arguments import PositionEmbedding, Positions, Rope, check_dtype, read_head_dim, read_rope
from ringjax._options import ModuleOptions, read_checked
from ringjax._pattern.counts import check_count, check_flags, is_integer
from ringjax._pattern.option import options_of
from ringjax._pattern.options import IN_PATTERN
from ringjax._pattern.other_names import OF_MAKING
from ringjax._pattern.pattern import DilatedPattern
from ringjax._pattern.promotion import own_promotion
from ringjax._pattern.rotary import rotary_embedding


@dataclasses.dataclass(frozen=True)
class Settings:
    """The attention of a module, except its parameters; see :class:`ringjax.RingDilatedAttention`.

    `options` has the options of its calls, except those of the pattern.

    Raises:
      ValueError: if the numbers do not divide, or the rotary embedding has no pairs to rotate.
    """

    pattern: DilatedPattern
    options: Any  # by their names
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    position_embedding: PositionEmbedding | None

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        *,
        num_heads: Any,
        num_kv_heads: Any,
        in_features: int,
        qkv_features: Any,
        head_dim: Any,
        rope_theta: Any,
        rope: Any,
        position_embedding: Any,
    ) -> "Settings":
        """Returns the settings of a module with these options, for inputs of width `in_features`."""
        pattern, asked = read_checked(ModuleOptions, options, OF_MAKING, "RingDilatedAttention")
        fixed = FrozenDict({name: one for name, one in vars(asked).items() if name not in IN_PATTERN})
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = read_head_dim(num_heads, head_dim, qkv_features, in_features)
        rope = read_rope(rope_theta, rope, position_embedding, head_dim)
        return cls(pattern, fixed, num_heads, num_kv_heads, head_dim, rope, position_embedding)

    def __repr__(self) -> str:
        usual = {name: option.default for name, option in options_of(ModuleOptions).items()}
        given = {name: one for name, one in self.options.items() if one != usual[name]}
        given |= {name: getattr(self, name) for name in ("rope", "position_embedding") if getattr(self, name)}
        return f"Settings({', '.join([repr(self.pattern), *(f'{name}={one!r}' for name, one in given.items())])})"

    def __post_init__(self) -> None:
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        check_count("num_kv_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
        self.pattern.heads_of(0, num_kv_heads)
        if not (self.position_embedding is None or callable(self.position_embedding)):
            raise TypeError(
                f"position_embedding={self.position_embedding!r} must be a function of heads, positions and is_key"
            )

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.options["mesh"], Mesh):
            raise TypeError(
                "a module with mesh= has devices, which no file can hold: enter jax.set_mesh instead of mesh="
            )
        return dict(self.__dict__)

    def __deepcopy__(self, memo: Any) -> "Settings":
        return self  # nothing in it changes

    def check_causal(self) -> None:
        """Checks that a sequence can be continued.

        Raises:
          ValueError: if the attention is not causal.
        """
        if not self.options["is_causal"]:
            raise ValueError(
                "decode=True continues a sequence, but with is_causal=False tokens see later ones: make it True"
            )

    @property
    def _mesh(self) -> tuple[Any, str, P | None]:
        """The mesh, its sequence axis, and the spec of heads."""
        return self.options["mesh"], self.options["axis_name"], self.options["spec"]

    @property
    def qkv_features(self) -> int:
        """The width of all query heads together."""
        return self.num_heads * self.head_dim

    @own_promotion()
    def attend(
        self,
        query: Float[Array, "*B T N H"],
        key: Float[Array, "*B S K H"],
        value: Float[Array, "*B S K H"],
        document_ids: Any = None,
        query_offset: Any = 0,
        dropout_seed: Any = None,
        sinks: Any = None,
        positions: Positions = (None, None),
        sow: Callable[[Array], Any] | None = None,
    ) -> Float[Array, "*B T N H"]:
        """Embeds `positions`, by default the global ones, in projected heads, and computes their attention.

        It passes the greatest logit of each head to `sow`.
        """
        of_queries, of_keys = positions
        query, key = self._embed(query, of_queries, query_offset), self._embed(key, of_keys, is_key=True)
        options = dict(self.options)
        options |= {} if dropout_seed is not None else {"dropout_rate": 0.0}
        options |= {} if document_ids is not None else {"documents_are_sorted": None}
        results: Any = ring_dilated_attention(
            query,
            key,
            value,
            pattern=self.pattern,
            document_ids=document_ids,
            query_offset=query_offset,
            sinks=sinks,
            dropout_seed=dropout_seed,
            return_max_logit=sow is not None,
            **options,
        )
        if sow is None:
            return results
        out, greatest = results
        sow(greatest)
        return out

    def _embed(
        self, array: Float[Array, "*B T N H"], positions: Array | None, offset: Any = 0, is_key: bool = False
    ) -> Array:
        """Embeds positions: by default the global ones, which start at the offset."""
        if self.rope is None and self.position_embedding is None:
            return array
        at = token_positions(array, *self._mesh[:2]) + offset if positions is None else jnp.asarray(positions)
        if self.position_embedding is None:
            frequencies, factor = cast(Rope, self.rope)
            return rotary_embedding(array, at, frequencies=np.array(frequencies), factor=factor)
        embedded = self.position_embedding(array, at, is_key)
        shape = getattr(embedded, "shape", type(embedded).__name__)
        if shape != array.shape:
            raise ValueError(f"position_embedding made {shape} of {array.shape}: let it return heads of that shape")
        return embedded.astype(array.dtype)

    def make_cache(
        self,
        batch: tuple[int, ...],
        max_length: int,
        dtype: Any,
        spec: P | None = None,
        *,
        per_sequence: Any = False,
        rewind: Any = 0,
    ) -> Cache:
        """Returns an empty cache for sequences of `max_length` tokens, whose heads lie on the mesh as `spec` says.

        Raises:
          ValueError: if the attention is not causal, heads cannot lie as the spec says, or `rewind` is negative.
          TypeError: if the dtype is no floating one, the spec no spec, or `per_sequence` no truth value.
        """
        self.check_causal()
        check_flags(per_sequence=per_sequence)
        if not is_integer(rewind) or rewind < 0:
            raise ValueError(f"rewind={rewind!r} must be the number of tokens that may be taken back, 0 for none")
        check_dtype("dtype", dtype)
        check_spec("spec", spec)
        mesh, axis_name, own = self._mesh
        heads = jax.ShapeDtypeStruct((*batch, max_length, self.num_heads, self.head_dim), dtype)
        spec = own if spec is None else spec
        sizes = {"per_sequence": per_sequence, "rewind": int(rewind)}
        return make_cache(self.pattern, heads, self.num_kv_heads, mesh, axis_name, spec, **sizes)

    @own_promotion()
    def prefill(
        self,
        query: Array,
        key: Array,
        value: Array,
        cache: Cache,
        sinks: Any = None,
        positions: Positions = (None, None),
        rewind: int = 0,
        lengths: Array | None = None,
    ) -> tuple[Array, Cache]:
        """Returns the attention of sequences from their beginning, and the cache after all or `lengths` tokens of each.

        Raises:
          ValueError: if they are longer than the cache is for, or it has no length for each of them.
        """
        if lengths is not None and cache.length.shape != np.shape(lengths):
            raise ValueError(
                f"lengths has the shape {np.shape(lengths)}, and the cache has lengths {cache.length.shape}: pass one "
                "for each sequence, to a cache of init_cache(..., per_sequence=True)"
            )
        decoder = self._decoder(query, key, value, rewind)
        length = decoder.placement.length(key)
        if not isinstance(cache.max_length, Tracer) and length > int(cache.max_length):
            raise ValueError(
                f"the cache is for {int(cache.max_length)} tokens, and the inputs have {length}: "
                "call init_cache with a larger length"
            )
        self._check_cache(key, cache)
        out = self.attend(query, key, value, sinks=sinks, positions=positions)
        embedded = self._embed(key, positions[1], is_key=True)
        out = jnp.where(length <= cache.max_length, out, jnp.nan)
        lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)
        return out, decoder.prefill(embedded, value, cache, lengths)

    def clear_padding(self, out: Float[Array, "*B T E"], lengths: Any) -> Float[Array, "*B T E"]:
        """Returns the outputs of prompts with zeros behind their `lengths`; all of them without lengths."""
        if lengths is None:
            return out
        is_token = token_positions(out[..., None], *self._mesh[:2]) < jnp.asarray(lengths)[..., None]  # [*B, T]
        return jnp.where(is_token[..., None], out, 0)

    @own_promotion()
    def step(
        self,
        query: Array,
        key: Array,
        value: Array,
        cache: Cache,
        sinks: Any = None,
        positions: Positions = (None, None),
        rewind: int = 0,
    ) -> tuple[Array, Cache]:
        """Returns the attention of the tokens that follow those in the cache, and the cache after them."""
        following = cache.length[..., None] + jnp.arange(query.shape[-3], dtype=jnp.int32)
        of_queries, of_keys = (following if given is None else given for given in positions)
        query, key = self._embed(query, of_queries), self._embed(key, of_keys, is_key=True)
        query, _ = with_positive_scale(query, self.options["scale"])
        self._check_cache(key, cache)
        return self._decoder(query, key, value, rewind).step(query, key, value, cache, sinks)

    def _check_cache(self, key: Array, cache: Cache) -> None:
        batch, cached = key.shape[:-3], cache.keys[0].shape[:-3]
        if batch != cached:
            raise ValueError(f"the inputs have the batch {batch}, and the cache {cached}: call init_cache with {batch}")

    def _decoder(self, query: Array, key: Array, value: Array, rewind: int) -> Decoder:
        placement = find_placement(query, key, value, *self._mesh)
        soft_cap, precision = self.options["logits_soft_cap"], self.options["precision"]
        _, scale = with_positive_scale(query, self.options["scale"])
        weighting = Weighting(scale, soft_cap, precision=precision)
        return make_decoder(self.pattern, self.num_kv_heads, weighting, placement, rewind)


def normalize_inner(
    attended: Float[Array, "*B T N H"], norm: Callable[[Array], Array] | None
) -> Float[Array, "*B T N H"]:
    """Returns the heads after a norm of all heads of a token together."""
    if norm is None:
        return attended
    return norm(attended.reshape(*attended.shape[:-2], -1)).reshape(attended.shape)


def output_sharding(inputs: Array) -> NamedSharding | None:
    """Returns the sharding of an output that is sharded like the inputs, or None if their mesh has no Explicit axis."""
    sharding = jax.typeof(inputs).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return NamedSharding(sharding.mesh, P(*sharding.spec[:-1], None))
