"""What the Flax modules share: between the projections, and around them on a mesh."""

import functools
from typing import Any, cast

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ringjax._attention import ring_dilated_attention
from ringjax._mesh import token_positions
from ringjax._rotary import rotary_embedding


def attend(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B T K H"],
    value: Float[Array, "*B T K H"],
    *,
    rope_theta: float | None,
    mesh: Any,
    axis_name: str,
    **pattern: Any,
) -> Float[Array, "*B T N H"]:
    """Computes attention of projected heads, after rotating them to their global positions if `rope_theta` is given."""
    if rope_theta is not None:
        rotate = functools.partial(
            rotary_embedding, positions=token_positions(query, mesh, axis_name), theta=rope_theta
        )
        query, key = rotate(query), rotate(key)
    out = ring_dilated_attention(query, key, value, mesh=mesh, axis_name=axis_name, **pattern)
    return cast(Array, out)


def head_dim(num_heads: int, num_kv_heads: int, qkv_features: int, rope_theta: float | None) -> int:
    """Returns the width of a head.

    Raises:
      ValueError: if the numbers do not divide, or the rotary embedding has no pairs to rotate.
    """
    if qkv_features % num_heads:
        raise ValueError(f"qkv_features={qkv_features} does not divide over num_heads={num_heads}: make it a multiple")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
    width = qkv_features // num_heads
    if rope_theta is not None and width % 2:
        raise ValueError(f"rope_theta={rope_theta} rotates pairs, but a head has the odd width {width}: make it even")
    if rope_theta is not None and not rope_theta > 0:
        raise ValueError(f"rope_theta={rope_theta} must be positive, such as 10000")
    return width


def output_sharding(inputs: Array) -> NamedSharding | None:
    """Returns the sharding of an output that lies as the inputs do, where their mesh has types that ask for it."""
    sharding = jax.typeof(inputs).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return NamedSharding(sharding.mesh, P(*sharding.spec[:-1], None))
