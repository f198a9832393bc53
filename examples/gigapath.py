"""Encodes pathology slides with Prov-GigaPath's slide encoder, on any devices, without flash-attn.

- `python examples/gigapath.py`: a synthetic slide of 10,000 tiles and random weights, on one device.
- `python examples/gigapath.py --weights slide_encoder.pth --tiles slide.h5 --out embeddings.npz`: a slide's own tiles,
  `features` [T, 1536] and `coords` [T, 2] in pixels, as .h5, .npz or .pt; weights as .pth, .safetensors or .npz.
- `python examples/gigapath.py --weights slide_encoder.pth --finetune labels.csv --checkpoints run`: trains the encoder
  and a linear head; the table has the columns `slide`, a file as above, and `label`. `--resume` goes on after a stop.
- `--mesh seq=8`: on eight devices; on a machine without so many, they are simulated.

Wrong input ends it with exit code 2 and one line, and nothing is written; a training that cannot go on, with 1.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from parts.checkpoints import RunError
from parts.distribution import make_mesh, on_all_devices, parse_mesh
from parts.finetune import Settings, read_labels
from parts.finetune import run as run_finetuning
from parts.options import Formatter, Parser, check_writable, in_options
from parts.slide_encoder import SlideEncoder
from parts.slides import Slide, read_slide, read_weights, synthetic_slide

NUM_TILES = 10_000
DTYPES = ("float32", "bfloat16")
# The options that a training must be resumed with.
OF_MODEL = "heads", "global_pool", "padding", "max_wsi_size", "tile_size", "dtype", "dropout", "drop_path"
# What arguments of the encoder are called here.
OPTIONS = {"num_heads": "--heads", "max_wsi_size": "--max-wsi-size", "tile_size": "--tile-size"}
MOST_TILES = 2**31  # positions are numbers of 32 bits
MOST_PIXELS = 2**26  # of a heatmap, one for each place of a tile
STRATEGIES = ("ring", "all_gather", "all_to_all", "auto")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(description=__doc__, formatter_class=Formatter)
    add = parser.add_argument
    add("--weights", type=Path, help="a checkpoint of the slide encoder; random weights by default")
    add("--tiles", type=Path, help=f"a slide's tiles; a synthetic slide of {NUM_TILES} by default")
    add("--heads", type=int, default=16, help="the number of heads of the checkpoint")
    add("--global-pool", action="store_true", help="the mean over the tiles, instead of the first token's state")
    add("--padding", choices=("torchscale", "none"), default="torchscale", help="as trained, or without phantom keys")
    add("--max-wsi-size", type=int, default=262144, help="the largest slide in pixels a side, which sets the segments")
    add("--tile-size", type=int, default=256, help="the tiles in pixels a side")
    add("--mesh", type=parse_mesh, help="the devices along the tiles, such as seq=8; one by default")
    add("--strategy", choices=STRATEGIES, default="ring", help="how devices share a segment")
    add("--dtype", choices=DTYPES, default="float32", help="the dtype of the computation")
    add("--out", type=Path, help="an .npz file for `output` [D] and `layers` [layers + 1, D], one output of each layer")
    add("--heatmap", type=Path, help="a .png file: the slide token's attention in the last layer, over the slide")
    add("--finetune", type=Path, help="a table of slides and labels: train the encoder with a linear head")
    add("--checkpoints", type=Path, help="the folder of the checkpoints of a training")
    add("--resume", nargs="?", type=int, const=0, help="go on from the last checkpoint, or from that of this epoch")
    add("--epochs", type=int, default=5, help="passes over all slides; the first one warms up")
    add("--accumulate", type=int, default=32, help="slides for one step of the optimizer")
    add("--learning-rate", type=float, help="the highest rate; 4e-3 for 256 slides of a step by default")
    add("--dropout", type=float, default=0.1, help="the rate at which training drops numbers")
    add("--drop-path", type=float, default=0.1, help="the rate at which it drops what the last layer adds")
    add("--seed", type=int, default=0, help="of the head, the order of slides, and what is dropped")
    return parser.parse_args(argv)


def check_arguments(arguments: argparse.Namespace) -> None:
    """Checks the mesh, and what will be written.

    Raises:
      ValueError: for axes that a slide has no use for, a file of another kind, or a folder that there is not.
    """
    for axis, size in (arguments.mesh or {}).items():
        if axis != "seq" and size > 1:
            raise ValueError(f"--mesh {axis}={size} would compute the same on each: one slide is cut along seq alone")
    if (arguments.finetune is None) != (arguments.checkpoints is None):
        raise ValueError("--finetune and --checkpoints go together: give a table, and the folder to write into")
    for name in ("tiles", "out", "heatmap") if arguments.finetune else ("resume",):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} is {'not' if arguments.finetune else 'only'} for --finetune: leave it out")
    for name in ("heads", "max_wsi_size", "tile_size", "epochs", "accumulate"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be 1 at least")
    for name in ("dropout", "drop_path"):
        if not 0 <= getattr(arguments, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(arguments, name)} must be at least 0 and less than 1"
            )
    if (arguments.max_wsi_size // arguments.tile_size) ** 2 >= MOST_TILES:
        raise ValueError(
            f"--max-wsi-size {arguments.max_wsi_size} holds 2^31 or more tiles of --tile-size {arguments.tile_size}: "
            "give a smaller slide, or larger tiles"
        )
    for name, suffix in (("out", ".npz"), ("heatmap", ".png"), ("checkpoints", "")):
        if getattr(arguments, name) is not None:
            check_writable(f"--{name}", getattr(arguments, name), suffix)


def make_encoder(arguments: argparse.Namespace, width: int) -> SlideEncoder:
    """Returns the encoder, with the weights of the checkpoint, if there is one."""
    options = {
        "global_pool": arguments.global_pool,
        "padding": arguments.padding,
        "max_wsi_size": arguments.max_wsi_size,
        "tile_size": arguments.tile_size,
        "mesh": None if arguments.mesh is None else make_mesh(arguments.mesh),
        "strategy": arguments.strategy,
        "dtype": jnp.dtype(arguments.dtype),
        "dropout_rate": arguments.dropout,
        "drop_path_rate": arguments.drop_path,
        "remat": arguments.finetune is not None,
    }
    if arguments.weights is None:
        encoder = SlideEncoder(num_heads=arguments.heads, in_features=width, **options, rngs=nnx.Rngs(0))
    else:
        encoder = SlideEncoder.from_torch(read_weights(arguments.weights), num_heads=arguments.heads, **options)
    if encoder.patch.in_features != width:
        raise ValueError(
            f"--tiles has embeddings of width {width}, and the encoder takes {encoder.patch.in_features}: give those "
            "of its own tile encoder"
        )
    return on_all_devices(encoder, encoder.mesh)


# With updates, all parameters would be copied to results.
@nnx.jit(static_argnames="with_attention", graph_updates=False)
def encode(
    encoder: SlideEncoder, embeddings: jax.Array, coordinates: jax.Array, with_attention: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns a slide's output [D], one of each layer [layers + 1, D], and the attention to its tiles [T]."""
    states, output = encoder(embeddings[None], coordinates[None])
    pool = lambda state: state[0, 1:].mean(axis=0) if encoder.global_pool else state[0, 0]
    attention = encoder.attention_of_slide(states)[0].mean(axis=0) if with_attention else None
    return output[0], encoder.norm(jnp.stack([pool(state) for state in states])), attention


def places(slide: Slide, tile_size: int) -> np.ndarray:
    """Returns the column and the row of each tile in a heatmap [T, 2].

    Raises:
      ValueError: if they lie so far apart that no picture has room for them.
    """
    tiles = slide.coordinates.astype(np.float64) // tile_size
    tiles -= tiles.min(axis=0)
    if np.prod(tiles.max(axis=0) + 1) > MOST_PIXELS:
        width, height = tiles.max(axis=0) + 1
        raise ValueError(
            f"--heatmap of {width:.3g} x {height:.3g} places of --tile-size {tile_size} is too large: see that --tiles "
            "has coordinates in pixels"
        )
    return tiles


def draw(path: Path, slide: Slide, attention: np.ndarray, tile_size: int) -> None:
    """Draws the attention over the slide, over that of equal shares."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # which takes its time

    tiles = places(slide, tile_size).astype(int)
    image = np.full(tiles.max(axis=0) + 1, np.nan)
    image[tuple(tiles.T)] = attention * len(attention)
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(image.T, cmap="viridis", interpolation="none")
    axes.set_xlabel("tile, along the first coordinate")
    axes.set_ylabel("tile, along the second coordinate")
    figure.colorbar(shown, label="attention of the slide's token, over that of equal shares")
    figure.savefig(path, dpi=150)


def train(arguments: argparse.Namespace) -> None:
    """Fine-tunes on the slides of a table."""
    labelled = read_labels(arguments.finetune)
    width = read_slide(labelled.paths[0], "--finetune").embeddings.shape[1]
    rate = 4e-3 * arguments.accumulate / 256 if arguments.learning_rate is None else arguments.learning_rate
    settings = Settings(arguments.epochs, arguments.accumulate, rate, arguments.seed)
    options = {name: getattr(arguments, name) for name in OF_MODEL} | {"weights": str(arguments.weights)}
    folder, resume = arguments.checkpoints, arguments.resume
    run_finetuning(make_encoder(arguments, width), labelled, settings, options, folder, resume)


def run(arguments: argparse.Namespace) -> None:
    """Encodes the slide, and writes what was asked for."""
    slide = synthetic_slide(NUM_TILES, 1536) if arguments.tiles is None else read_slide(arguments.tiles)
    if arguments.heatmap is not None:
        places(slide, arguments.tile_size)  # before the slide is encoded
    encoder = make_encoder(arguments, slide.embeddings.shape[1])
    devices = 1 if encoder.mesh is None else encoder.mesh.size
    print(f"{len(slide.embeddings):,} tiles on {devices} of {jax.default_backend()}: compiling, encoding", flush=True)
    begin = time.perf_counter()
    found = encode(encoder, *map(jnp.asarray, slide), with_attention=arguments.heatmap is not None)
    output, layers, attention = jax.device_get(found)
    print(f"done in {time.perf_counter() - begin:.1f} s; the output has the norm {np.linalg.norm(output):.3f}")
    if arguments.out is not None:
        np.savez(arguments.out, output=np.asarray(output, np.float32), layers=np.asarray(layers, np.float32))
    if arguments.heatmap is not None:
        draw(arguments.heatmap, slide, np.asarray(attention, np.float64), arguments.tile_size)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; wrong input ends it with exit code 2."""
    arguments = parse_arguments(argv)
    try:
        check_arguments(arguments)
        (run if arguments.finetune is None else train)(arguments)
    except (ValueError, OSError, RunError) as error:
        print(f"gigapath.py: error: {in_options(error, OPTIONS)}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, RunError) else 2) from error


if __name__ == "__main__":
    main()
