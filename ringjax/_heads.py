"""What the Flax modules share: the settings of their attention, and what happens between their projections."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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
from ringjax._options import ModuleOptions, read_checked
from ringjax._pattern.arguments import DTYPES
from ringjax._pattern.counts import (
    check_count,
    check_flags,
    check_optional_count,
    is_flag,
    is_integer,
    is_real,
    read_flag,
)
from ringjax._pattern.option import options_of
from ringjax._pattern.options import IN_PATTERN
from ringjax._pattern.other_names import OF_MAKING
from ringjax._pattern.pattern import DilatedPattern
from ringjax._pattern.promotion import own_promotion
from ringjax._pattern.rotary import check_positions, read_frequencies, rotary_embedding

# Takes heads [..., T, N, H], their positions, [T] by default, and whether they are keys; returns heads.
PositionEmbedding = Callable[[Array, Array, bool], Array]
Positions = tuple[Array | None, Array | None]  # of queries and of keys
Rope = tuple[tuple[float, ...], float]  # the frequencies of a rotary embedding, and its factor


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
        head_dim = _read_head_dim(num_heads, head_dim, qkv_features, in_features)
        rope = _read_rope(rope_theta, rope, position_embedding, head_dim)
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
    ) -> Float[Array, "*B T N H"]:
        """Embeds `positions`, by default the global ones, in projected heads, and computes their attention."""
        of_queries, of_keys = positions
        query, key = self._embed(query, of_queries, query_offset), self._embed(key, of_keys, is_key=True)
        options = dict(self.options)
        options |= {} if dropout_seed is not None else {"dropout_rate": 0.0}
        options |= {} if document_ids is not None else {"documents_are_sorted": None}
        out = ring_dilated_attention(
            query,
            key,
            value,
            pattern=self.pattern,
            document_ids=document_ids,
            query_offset=query_offset,
            sinks=sinks,
            dropout_seed=dropout_seed,
            **options,
        )
        return cast(Array, out)

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
        if lengths is not None:
            lengths = jnp.asarray(lengths, jnp.int32)
            is_token = token_positions(query, *self._mesh[:2]) < lengths[..., None]  # [*B, T]
            out = jnp.where(is_token[..., None, None], out, 0)
        return out, decoder.prefill(embedded, value, cache, lengths)

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


def _read_head_dim(num_heads: Any, head_dim: Any, qkv_features: Any, in_features: int) -> int:
    """Returns the width of a head, given as `head_dim` or by `qkv_features`, or else by the width of the inputs."""
    check_count("num_heads", num_heads)
    if head_dim is not None:
        check_count("head_dim", head_dim)
        if qkv_features not in (None, num_heads * head_dim):
            raise ValueError(
                f"head_dim={head_dim} of num_heads={num_heads} disagrees with qkv_features={qkv_features}: give either"
            )
        return head_dim
    qkv_features = in_features if qkv_features is None else qkv_features
    check_count("qkv_features", qkv_features)
    if qkv_features % num_heads:
        raise ValueError(f"qkv_features={qkv_features} does not divide over num_heads={num_heads}: make it a multiple")
    return qkv_features // num_heads


def _read_rope(theta: Any, rope: Any, position_embedding: Any, head_dim: int) -> Rope | None:
    """Returns the frequencies and the factor of the rotary embedding, None without one."""
    given = {"rope_theta": theta, "rope": rope, "position_embedding": position_embedding}
    given = [name for name, value in given.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{given[0]} is given beside {given[1]}: give either")
    if theta is not None:
        return tuple(read_frequencies("rope_theta", theta, None, head_dim).tolist()), 1.0
    if rope is None:
        return None
    if not (isinstance(rope, tuple) and len(rope) == 2 and is_real(rope[1])):
        raise TypeError(f"rope={rope!r} must be frequencies and a factor, such as ringjax.rope_frequencies returns")
    return tuple(read_frequencies("rope", None, rope[0], head_dim).tolist()), float(rope[1])


def read_positions(positions: Any, key_positions: Any, inputs: tuple[Array, Array], query_offset: Any) -> Positions:
    """Returns the positions to embed in queries and in keys, None for the global ones.

    Without `key_positions`, keys have the `positions` of the queries if both have the same inputs.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    if positions is None and key_positions is None:
        return None, None
    if not is_integer(query_offset) or query_offset:
        raise ValueError(f"query_offset={query_offset} is given beside positions: give either")
    if key_positions is None and inputs[0] is inputs[1]:
        key_positions = positions
    for name, value, array in zip(("positions", "key_positions"), (positions, key_positions), inputs, strict=True):
        if value is not None:
            check_positions(name, value, array.shape[-2])
    return positions, key_positions


def check_dtype(name: str, dtype: Any) -> None:
    """Checks that modules can compute in a dtype, or keep numbers in it.

    Raises:
      TypeError: naming the argument, its value and the remedy.
    """
    try:
        known = "" if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        known = ""
    if known not in DTYPES:
        raise TypeError(f"{name}={dtype!r} must be a floating dtype, one of {', '.join(DTYPES)}")


# The arguments of modules that `check_module` checks.
_FLAGS = "normalize_qk", "decode", "use_bias"
_MAKERS = "kernel_init", "out_kernel_init", "bias_init", "out_bias_init", "sinks_init", "inner_norm", "qk_norm"
CHECKED = "sinks", "out_features", "dtype", "param_dtype", "use_out_bias", "deterministic", *_FLAGS, *_MAKERS


def check_module(given: Mapping[str, Any]) -> None:
    """Checks the arguments of a module that its `Settings` do not have, those of `CHECKED`.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    if not is_flag(given["sinks"]):
        raise TypeError(
            f"sinks must be True or False, not of {type(given['sinks'])}: for a parameter pass True and sinks_init, "
            "and give an array of sinks to the call"
        )
    check_flags(**{name: given[name] for name in _FLAGS})
    for name in ("use_out_bias", "deterministic"):
        read_flag(name, given[name])
    check_optional_count("out_features", given["out_features"])
    for name in ("dtype", "param_dtype"):
        if given[name] is not None:
            check_dtype(name, given[name])
    for name in _MAKERS:
        if given[name] is not None and not callable(given[name]):
            raise TypeError(f"{name}={given[name]!r} must be a function or a class that makes it")
    if given["normalize_qk"] and given["qk_norm"] is not None:
        raise ValueError("qk_norm is given beside normalize_qk=True, which makes a LayerNorm: give either")


def read_inputs(
    inputs_q: Any, inputs_k: Any, inputs_v: Any, widths: Sequence[int | None] = (None, None, None)
) -> tuple[Array, Array, Array]:
    """Returns the inputs of queries, keys and values, arrays [..., T, D] of the `widths` that are known.

    Raises:
      TypeError, ValueError: naming the argument and the remedy.
    """
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    for name, inputs, width in zip("qkv", (inputs_q, inputs_k, inputs_v), widths, strict=True):
        _check_inputs(f"inputs_{name}", inputs, width)
    return inputs_q, inputs_k, inputs_v


def _check_inputs(name: str, inputs: Any, in_features: int | None) -> None:
    """Checks that inputs [..., T, D] are arrays, of width `in_features` if it is given.

    Raises:
      TypeError, ValueError: naming the argument and the remedy.
    """
    shape = getattr(inputs, "shape", None)
    if shape is None:
        raise TypeError(f"{name} is of {type(inputs).__name__}: pass an array [..., length, features]")
    if len(shape) < 2:
        raise ValueError(f"{name} has the shape {shape}: pass at least [length, features]")
    if in_features is not None and shape[-1] != in_features:
        raise ValueError(
            f"Incompatible input dimension, got {shape[-1]} but module expects {in_features}: {name} has the shape "
            f"{shape}"
        )


def read_steps(prefill: Any, decode: Any, lengths: Any) -> tuple[bool, bool]:
    """Returns whether a call fills a cache, and whether it decodes.

    Raises:
      ValueError: if it fills one and does not decode, or `lengths` of prompts are given and it fills none.
      TypeError: for anything but truth values, and lengths that are no integers.
    """
    prefill, decode = read_flag("prefill", prefill), read_flag("decode", decode)
    if lengths is not None and not prefill:
        raise ValueError("lengths is given, but prefill=False takes tokens that are all there: leave it out")
    dtype = getattr(lengths, "dtype", type(lengths).__name__)
    if lengths is not None and not (hasattr(lengths, "dtype") and jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"lengths is of {dtype}: pass an array of integers, one for each prompt")
    if prefill and not decode:
        raise ValueError("prefill=True, but decode=False leaves the cache as it is: make decode True")
    return prefill, decode


def check_decoding(document_ids: Any, query_offset: Any, is_self_attention: bool, draws_dropout: bool) -> None:
    """Checks the arguments of a call that decodes.

    Raises:
      ValueError: naming the argument that means nothing there, and the remedy.
    """
    if document_ids is not None:
        raise ValueError("document_ids is given, but decode=True continues one document: leave it out")
    if not is_integer(query_offset) or query_offset:
        raise ValueError(
            f"query_offset={query_offset}, but decode=True knows the position from its cache: leave it out"
        )
    if not is_self_attention:
        raise ValueError("inputs_k or inputs_v is given, but decode=True caches keys of inputs_q alone: leave them out")
    if draws_dropout:
        raise ValueError("deterministic=False, but decode=True draws no dropout: make it True")


def check_flax_arguments(mask: Any, sow_weights: bool) -> None:
    """Checks that no argument of Flax's modules is given that attention in a ring cannot serve.

    Raises:
      ValueError: naming the argument and the remedy.
    """
    if mask is not None:
        raise ValueError("mask is given, but no array of pairs exists: say is_causal, document_ids or query_offset")
    if sow_weights:
        raise ValueError("sow_weights=True, but no array of weights exists that could be sown: leave it out")


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
