"""The number of rows of queries, and of keys, that XLA computes at once, by platform."""

from ringjax._kernels.interface import Request
from ringjax._schedule.make import MAX_BLOCK_ROWS

GPUS = "cuda", "rocm"  # as jax names their platforms
SHARED_BLOCK_ROWS = 128
MIN_BLOCK_ROWS = 64
MAX_LOGITS = 2**24
MIN_GPU_BLOCK_ROWS, MAX_GPU_BLOCK_ROWS = 128, 2048


def most_rows(request: Request, num_devices: int, shard_length: int, batch_heads: int, extent: int) -> int:
    """Returns the most rows of a tile.

    Args:
      request: what a call asks of implementations.
      num_devices: the devices along the sequence.
      shard_length: the queries or the keys of each of them, whichever are more.
      batch_heads: the number of batches times heads of a tile.
      extent: the most tokens that a branch spans.
    """
    if request.block_size is not None:
        return request.block_size
    itemsize = request.query.dtype.itemsize
    if request.platform in GPUS:
        return choose_gpu_block_size(shard_length * request.query.shape[-1] * itemsize, num_devices, extent)
    return choose_block_size(batch_heads, itemsize, share_cache=request.platform == "cpu" and num_devices > 1)


def choose_block_size(batch_heads: int, itemsize: int, share_cache: bool = False) -> int:
    """Returns the most rows of queries, and of keys, that one tile of logits spans.

    It spans fewer rows in narrow dtypes, whose logits are as wide as others, and so larger relative to the rows. It
    also spans fewer with many batches and heads, which fill a tile by themselves, and if CPU devices of one process
    share a cache.
    """
    rows = SHARED_BLOCK_ROWS if share_cache else min(128 * itemsize, MAX_BLOCK_ROWS)
    while rows > MIN_BLOCK_ROWS and batch_heads * rows**2 > MAX_LOGITS:
        rows //= 2
    return rows


def choose_gpu_block_size(head_bytes: int, num_devices: int, extent: int) -> int:
    """Returns the most rows of queries, and of keys, that one tile of logits spans on GPUs.

    A step there launches many kernels, whatever its size, so tiles are large. On one device the float32 logits of a
    head may take three times the bytes of its queries or keys, `head_bytes`. In a ring, which holds more arrays, they
    may take a quarter of these. Tiles larger than the `extent` of all branches would be mostly masked.
    """
    most = 3 * head_bytes if num_devices == 1 else head_bytes // 4
    rows = MIN_GPU_BLOCK_ROWS
    while rows < min(MAX_GPU_BLOCK_ROWS, extent) and 4 * (2 * rows) ** 2 <= most:
        rows *= 2
    return rows
