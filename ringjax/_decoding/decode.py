"""Decoding: the attention of the tokens that follow those in a cache, and the cache after them.

B batch, c tokens of a call, K key/value heads, G query heads of each, R rows of a branch's cache, H and V the widths.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Shaped

from ringjax._decoding.cache import Cache
from ringjax._kernels.softmax import Weighting, accumulation_dtype, divisor_of, merge, shift_of
from ringjax._mesh.axes import psum, vary
from ringjax._mesh.order import after
from ringjax._mesh.placement import Placement
from ringjax._pattern.branch import MAX_POSITIONS, Branch
from ringjax._pattern.pattern import DilatedPattern
from ringjax._pattern.sinks import add_sinks, read_sinks


class DecodedBranch(NamedTuple):
    """A branch on one shard: its heads, and their offsets here and in earlier branches."""

    branch: Branch
    heads: slice
    offset: Int[Array, "K 1"]
    earlier: list[tuple[Branch, Int[Array, "K 1"]]]

    def attends(
        self, query: Int[Array, "*#B c"], key: Int[Array, "*#B #K R"], is_key: Bool[Array, "*#B #K R"]
    ) -> Bool[Array, "*#B #K c R"]:
        """Returns which queries attend to which keys, given the tokens of both."""
        query, key = query[..., None, :, None], key[..., :, None, :]  # [*B, 1, c, 1], [*B, k, 1, R]
        attends = _holds(self.branch, query, key, self.offset)
        for branch, offset in self.earlier:
            attends &= ~_holds(branch, query, key, offset)
        return attends & is_key[..., None, :]


def _holds(branch: Branch, query: Array, key: Array, offset: Int[Array, "K 1"]) -> Bool[Array, "*#B #K c R"]:
    # With a rate of one all heads have the offset zero: one mask serves all.
    return branch.holds(query, key, (offset if branch.offset_rate > 1 else offset[:1])[..., None], is_causal=True)


def make_decoder(
    pattern: DilatedPattern, num_kv_heads: int, weighting: Weighting, placement: Placement, rewind: int = 0
) -> "Decoder":
    """Returns a decoder. It shards heads only if they are not grouped, and mesh axes cut queries and keys alike."""
    is_cut = pattern.heads == "all" and placement.heads == placement.kv_heads
    placement = placement if is_cut else placement._replace(heads=(), kv_heads=())
    return Decoder(pattern, num_kv_heads, weighting, placement, rewind)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder: its fields are all that is static."""

    pattern: DilatedPattern
    num_kv_heads: int
    weighting: Weighting
    placement: Placement
    rewind: int = 0  # how many tokens can be taken back

    @functools.partial(jax.jit, static_argnums=0)
    def prefill(
        self,
        key: Float[Array, "*B T K H"],
        value: Float[Array, "*B T K V"],
        cache: Cache,
        lengths: Int[Array, "*#B"] | None = None,
    ) -> Cache:
        """Returns the cache after the first tokens, which lie on the mesh as the placement says: all, or `lengths`."""
        placement = self.placement
        length = jnp.full_like(cache.length, placement.length(key)) if lengths is None else lengths

        def fill(key: Array, value: Array, length: Array, *caches: Array) -> tuple[Array, ...]:
            keys, values, tokens = _thirds(caches)
            filled: list[Array] = []
            for given, rows_of_branches in ((key, keys), (value, values)):
                for branch, rows in zip(self.branches(), rows_of_branches, strict=True):
                    filled.append(self._fill(branch, given, rows, length, filled[-1:]))
            for branch, rows in zip(self.branches(), tokens, strict=True):
                token, is_row = self._tokens_of_rows(branch, rows.shape[-3], length)
                filled.append(jnp.broadcast_to(_by_rows(jnp.where(is_row, token + 1, 0)), rows.shape) + 0 * rows)
            return tuple(filled)

        caches = *cache.keys, *cache.values, *cache.tokens
        kinds = "k" * len(caches)
        bounds, kind = self._bounds(length)
        mapped = placement.map(fill, inputs="kk" + kind + kinds, outputs=kinds)
        laid_out = [placement.lay_out(array, "k") for array in (key, value, *caches)]
        filled = mapped(*laid_out[:2], bounds, *laid_out[2:])
        return Cache(*_thirds(filled), jnp.asarray(length, jnp.int32), cache.max_length)

    def _bounds(self, length: Array) -> tuple[Array, str]:
        """Returns lengths as [*B, 1], or as [1] for all sequences, and how they lie on the mesh."""
        kind = "D" if length.ndim else "r"
        return self.placement.reshard(length[..., None], kind), kind

    def _tokens_of_rows(self, branch: DecodedBranch, rows: int, length: Array) -> tuple[Array, Array]:
        """Returns the token of each of the shard's rows after `length` tokens, [*B, K, R], and whether it has one."""
        row = self.shard * rows + jnp.arange(rows, dtype=jnp.int32)
        return branch.branch.cached(row, length[..., None] - 1, branch.offset, self.rewind)

    def _fill(self, branch: DecodedBranch, tokens: Array, rows: Array, length: Array, sent: list[Array]) -> Array:
        axes, num_shards, shard = self.placement.axes, self.placement.num_shards, self.shard
        tokens = tokens[..., branch.heads, :]
        dtype = rows.dtype

        def take(row: Array) -> Array:
            token, is_row = branch.branch.cached(row, length[..., None] - 1, branch.offset, self.rewind)
            local = token - shard * tokens.shape[-3]
            is_here = is_row & (local >= 0) & (local < tokens.shape[-3])
            return _take(tokens, jnp.where(is_here, local, 0), is_here).astype(dtype)

        first = jnp.arange(rows.shape[-3], dtype=jnp.int32)
        if not axes:
            return take(first)
        # Each shard in turn is sent its rows, so that no device holds the rows of two shards at once. The sum is in
        # float32 at least, but runs only once for a prompt.

        def send(receiver: Any, own: Array) -> Array:
            sent = psum(take(receiver * first.size + first), axes)
            return jnp.where(receiver == shard, sent, own)

        # A cache made inside the caller's own shard_map does not vary over devices yet.
        own = vary(rows, axes)
        return jax.lax.fori_loop(0, num_shards, send, after(own, sent))

    def step(
        self,
        query: Float[Array, "*B c N H"],
        key: Float[Array, "*B c K H"],
        value: Float[Array, "*B c K V"],
        cache: Cache,
        sinks: Float[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "*B c N V"], Cache]:
        """Returns the attention of the next c tokens, NaN beyond the cache's length, and the cache after them.

        Raises:
          ValueError: if the tokens are known to exceed the length of the cache, or for sinks of another shape.
          TypeError: for sinks that are no floats.
        """
        count = query.shape[-3]
        if not count:
            raise ValueError(f"the inputs have the shape [..., {count}, features]: decode one token at least")
        if not isinstance(cache.length, Tracer):
            longest = int(jnp.max(cache.length))
            if longest + count > int(cache.max_length):
                raise ValueError(
                    f"the cache holds {longest} tokens of at most {int(cache.max_length)}, and {count} come: "
                    "call init_cache with a larger length"
                )
        return self._step(query, key, value, cache, read_sinks(sinks, query))

    @functools.partial(jax.jit, static_argnums=0)
    def _step(self, query: Array, key: Array, value: Array, cache: Cache, sinks: Array | None) -> tuple[Array, Cache]:
        placement = self.placement

        def attend(query: Array, key: Array, value: Array, length: Array, *caches: Array) -> tuple[Array, ...]:
            return self._attend(query, key, value, length, *_thirds(caches))

        caches = *cache.keys, *cache.values, *cache.tokens
        kinds = "k" * len(caches)
        laid_out = [placement.lay_out(array, "k") for array in caches]
        arrays = [placement.reshard(array, kind) for array, kind in zip((query, key, value), "QKK", strict=True)]
        bounds, kind = self._bounds(cache.length)
        mapped = placement.map(attend, inputs="QKK" + kind + kinds, outputs="QQ" + kinds)
        out, lse, *caches = mapped(*arrays, bounds, *laid_out)
        if sinks is not None:
            out, _ = add_sinks(out, lse, sinks)
        length = cache.length + query.shape[-3]
        is_within = (length <= cache.max_length)[..., None, None, None]
        out = jnp.where(is_within, out.astype(query.dtype), jnp.nan)
        return out, Cache(*_thirds(caches), length, cache.max_length)

    def branches(self) -> Iterator[DecodedBranch]:
        """Yields the branches on this shard."""
        placement = self.placement
        shards = jax.lax.axis_size(placement.heads)
        first = jax.lax.axis_index(placement.heads) * (self.num_kv_heads // shards) if shards > 1 else 0
        before = []
        within = [branch.within(*[MAX_POSITIONS] * 3) for branch in self.pattern.branches]
        for number, branch in enumerate(within):
            numbers = self.pattern.heads_of(number, self.num_kv_heads)
            heads = slice(numbers.start, numbers.stop) if shards == 1 else slice(None)
            head = first + numbers.start + jnp.arange(len(numbers) // shards, dtype=jnp.int32)
            offsets = [
                (one, self.pattern.offset(head, one, i, self.num_kv_heads)[:, None])
                for i, one in [(number, branch), *before]
            ]
            yield DecodedBranch(branch, heads, offsets[0][1], offsets[1:])
            if self.pattern.merge == "union" and self.pattern.heads == "all":
                before.append((number, branch))

    @property
    def shard(self) -> Any:
        """The number of this shard."""
        return jax.lax.axis_index(self.placement.axes) if self.placement.axes else 0

    def _attend(
        self, query: Array, key: Array, value: Array, length: Array, keys: Any, values: Any, tokens: Any
    ) -> tuple[Array, ...]:
        count, num_heads = key.shape[-3:-1]
        groups = query.shape[-2] // num_heads
        grouped = query.reshape(*query.shape[:-2], num_heads, groups, query.shape[-1])  # [*B, c, K, G, H]
        token = length + jnp.arange(count, dtype=jnp.int32)  # [*B, c] or [c]
        cached, new, changed = [], [], []
        for branch, *rows in zip(self.branches(), keys, values, tokens, strict=True):
            cached_key, cached_value, cached_count = rows
            own_key, own_value = (array[..., branch.heads, :] for array in (key, value))
            own_token = token[..., None, :]
            attend = functools.partial(self.attend_branch, branch, grouped, token)
            cached_token, is_row = self._tokens_of_rows(branch, cached_key.shape[-3], length)
            is_there = cached_count[..., 0].swapaxes(-2, -1) == cached_token + 1  # [*B, K, R]
            is_key, is_lost = is_row & is_there, is_row & ~is_there
            cached.append(attend(cached_key, cached_value, cached_token, is_key, is_lost))
            new.append(attend(own_key, own_value, own_token, jnp.ones_like(own_token, bool)))
            of_rows = self._tokens_of_rows(branch, cached_key.shape[-3], length + count)
            counts = jnp.broadcast_to(token[..., None, None] + 1, (*own_key.shape[:-1], 1))  # [*B, c, K, 1]
            own = own_key, own_value, counts
            changed.append([_write(of_rows, one, given, length) for one, given in zip(rows, own, strict=True)])
        parts = [self.over_shards(*merge_all(cached)), *new]
        out, lse = merge_all(parts)
        out, lse = out.reshape(*query.shape[:-1], value.shape[-1]), lse.reshape(query.shape[:-1])  # [*B, c, N, V]
        return out, lse, *(array for of_kind in zip(*changed, strict=True) for array in of_kind)

    def attend_branch(
        self,
        branch: DecodedBranch,
        query: Array,
        token: Array,
        key: Array,
        value: Array,
        key_token: Array,
        is_key: Array,
        is_lost: Array | None = None,
    ) -> tuple[Array, Array]:
        """Returns the attention of queries [*B, c, K, G, H] on some rows of a branch, given the tokens of both.

        It is NaN where a query would see a row that `is_lost`: later tokens have taken its place.
        """
        attends = branch.attends(token, key_token, is_key)
        out, lse = _attend_rows(query[..., branch.heads, :, :], key, value, attends, self.weighting)
        if is_lost is not None:
            lacks = branch.attends(token, key_token, is_lost).any(axis=-1)  # [*B, k, c]
            out = jnp.where(lacks.swapaxes(-2, -1)[..., None, None], jnp.nan, out)
        return _of_all_heads(out, lse, branch.heads, query.shape[-3])

    def over_shards(self, out: Array, lse: Array) -> tuple[Array, Array]:
        """Returns the output and the lse, merged over the shards of keys."""
        axes = self.placement.axes
        if not axes:
            return out, lse
        maximum = jax.lax.pmax(lse, axes)
        weight = jnp.exp(lse - shift_of(maximum))
        denominator = psum(weight, axes)
        divisor = divisor_of(denominator)
        return psum(out * weight[..., None], axes) / divisor[..., None], maximum + jnp.log(divisor)


def _attend_rows(
    query: Float[Array, "*B c K G H"],
    key: Float[Array, "*B R K H"],
    value: Float[Array, "*B R K V"],
    attends: Bool[Array, "*#B #K c R"],
    weighting: Weighting,
) -> tuple[Float[Array, "*B c K G V"], Float[Array, "*B c K G"]]:
    dtype = accumulation_dtype(query, key, value)
    multiply = functools.partial(jnp.einsum, precision=weighting.precision, preferred_element_type=dtype)
    scores = weighting.scores(multiply("...ckgh,...rkh->...ckgr", query, key))
    mask = attends.swapaxes(-3, -2)[..., None, :]  # [*B, c, K, 1, R]
    logits = jnp.where(mask, scores * weighting.logit_scale, -jnp.inf)
    maximum = logits.max(axis=-1, initial=-jnp.inf)
    weights = jnp.exp(logits - shift_of(maximum)[..., None])
    total = weights.sum(axis=-1)
    divisor = divisor_of(total)
    out = multiply("...ckgr,...rkv->...ckgv", weights.astype(value.dtype), value)
    return out / divisor[..., None], maximum + jnp.log(divisor)


def _of_all_heads(
    out: Float[Array, "*B c k G V"], lse: Float[Array, "*B c k G"], heads: slice, num_heads: int
) -> tuple[Float[Array, "*B c K G V"], Float[Array, "*B c K G"]]:
    """Returns the results of some heads among those of all heads: the others attend to nothing."""
    if lse.shape[-2] == num_heads:
        return out, lse
    shape = (*lse.shape[:-2], num_heads, lse.shape[-1])
    all_out = jnp.zeros_like(out, shape=(*shape, out.shape[-1])).at[..., heads, :, :].set(out)
    return all_out, jnp.full_like(lse, -jnp.inf, shape=shape).at[..., heads, :].set(lse)


def _write(of_rows: tuple[Array, Array], rows: Shaped[Array, "*B R K D"], tokens: Array, length: Array) -> Array:
    """Returns the rows of the cache after tokens [*B, c, K, D] number `length` and following."""
    token, is_row = of_rows
    source = token - length[..., None]
    is_new = is_row & (source >= 0)
    new = _take(tokens, jnp.where(is_new, source, 0), is_new)
    return jnp.where(_by_rows(is_new), new.astype(rows.dtype), rows)


def _take(tokens: Shaped[Array, "*B n K D"], index: Int[Array, "*b K R"], is_row: Bool[Array, "*b K R"]) -> Array:
    index = _by_rows(index)
    index = index.reshape((1,) * (tokens.ndim - index.ndim) + index.shape)
    taken = jnp.take_along_axis(tokens, index, axis=-3, mode="promise_in_bounds")  # [*B, R, K, D]
    return jnp.where(_by_rows(is_row), taken, 0)


def _by_rows(array: Shaped[Array, "*b K R"]) -> Shaped[Array, "*b R K 1"]:
    return array.swapaxes(-2, -1)[..., None]


def merge_all(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Returns the output and the lse over the rows of all parts."""
    return merge([out for out, _ in parts], [lse for _, lse in parts])


def _thirds(arrays: Any) -> tuple[tuple[Array, ...], tuple[Array, ...], tuple[Array, ...]]:
    """Parts the rows of all branches: keys, values, and the tokens that they are of."""
    arrays = tuple(arrays)
    count = len(arrays) // 3
    return arrays[:count], arrays[count : 2 * count], arrays[2 * count :]
