"""Draws patterns and the costs of strategies; needs matplotlib, which is an extra."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ringjax._pattern.branch import MAX_POSITIONS
from ringjax._pattern.counts import check_count, check_flags, is_integer
from ringjax._pattern.pattern import DilatedPattern
from ringjax._schedule.make import make_schedule
from ringjax._schedule.schedule import BranchSchedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_COLUMNS = 3  # more would be too small to read


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot as plt  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('pictures need matplotlib: pip install "ringjax[plot]"', name="matplotlib") from error
    return plt


def plot_pattern(
    pattern: DilatedPattern,
    length: int = 64,
    num_kv_heads: int = 1,
    head: int = 0,
    is_causal: bool = False,
    num_devices: int | None = None,
) -> "Figure":
    """Draws the pattern: how often each pair counts, in each branch and in all, and how many keys a query sees.

    Args:
      pattern: the pattern.
      length: the number of tokens.
      num_kv_heads: the number of key/value heads K.
      head: the head to draw.
      is_causal: draw only the pairs whose key is not after their query.
      num_devices: draw the boundaries of so many devices, and say what they send.

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: for a number below 1, or a head that does not exist.
      TypeError: if `is_causal` is neither true nor false.
      ModuleNotFoundError: without matplotlib, the extra ``plot``.
    """
    counts = {"length": length, "num_kv_heads": num_kv_heads, "num_devices": num_devices}
    for name, number in counts.items():
        if not (name == "num_devices" and number is None):
            check_count(name, number)
    check_flags(is_causal=is_causal)
    if not (is_integer(head) and 0 <= head < num_kv_heads):
        raise ValueError(f"head={head!r} must be one of the num_kv_heads={num_kv_heads} heads, from 0 on")
    plt = _pyplot()
    count = len(pattern.branches)
    panels = count + (count > 1) + 1
    columns = min(panels, _MOST_COLUMNS)
    rows = -(-panels // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(3.4 * columns, 4.4 * rows), layout="constrained", squeeze=False)
    figure.get_layout_engine().set(hspace=0.06)
    axes = grid.ravel()
    for unused in axes[panels:]:
        unused.axis("off")
    multiplicity = functools.partial(_multiplicity, length=length, num_kv_heads=num_kv_heads, is_causal=is_causal)
    schedules = [None] * count
    if num_devices is not None:
        schedules = make_schedule(pattern, length, num_devices, num_kv_heads, is_causal)
    for number, branch in enumerate(pattern.branches):
        runs = head in pattern.heads_of(number, num_kv_heads)
        pairs = multiplicity(pattern, only=number)[head] if runs else np.zeros((length, length), np.int64)
        title = str(branch) if runs else f"{branch}\nnot of head {head}"
        schedule = schedules[number]
        _draw_pairs(axes[number], pairs, count, f"{title}\n{_route(schedule)}" if schedule else title, num_devices)
    total = multiplicity(pattern)
    if count > 1:
        _draw_pairs(axes[count], total[head], count, "all branches: how often a pair counts", num_devices)
    _draw_legend(axes[panels - 2], int(total[head].max()), count)
    _draw_field(axes[panels - 1], total, head)
    causal = "causal" if is_causal else "not causal"
    figure.suptitle(f"head {head} of {num_kv_heads}, {causal}, {length} tokens")
    return figure


def _multiplicity(
    pattern: DilatedPattern, length: int, num_kv_heads: int, is_causal: bool, only: int | None = None
) -> np.ndarray:
    """Returns how often pairs count, [K, T, T], in one branch or in all."""
    if only is None:
        return pattern.multiplicity(length, num_kv_heads, is_causal)
    position, branch = np.arange(length), pattern.branches[only]
    offset = pattern.offset(np.arange(num_kv_heads), branch, only, num_kv_heads)[:, None, None]
    holds = branch.holds(position[:, None], position, offset)
    return (holds & (position <= position[:, None]) if is_causal else holds).astype(np.int64)


def _color(count: int, most: int) -> Any:
    return _pyplot().get_cmap("viridis_r")(count / max(most, 1))


def _draw_pairs(axes: "Axes", pairs: np.ndarray, most: int, title: str, num_devices: int | None) -> None:
    """Draws how often each pair counts; a row is a query, a column a key."""
    plt = _pyplot()
    axes.imshow(np.ma.masked_equal(pairs, 0), cmap="viridis_r", vmin=0, vmax=most, interpolation="nearest")
    axes.set_title(title, fontsize="medium")
    axes.set(xlabel="key", ylabel="query")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(plt.MaxNLocator(6, integer=True))
    share = -(-len(pairs) // num_devices) if num_devices else len(pairs)
    for boundary in range(share, len(pairs), share):
        axes.axhline(boundary - 0.5, color="gray", linewidth=0.6)
        axes.axvline(boundary - 0.5, color="gray", linewidth=0.6)


def _draw_legend(axes: "Axes", largest: int, most: int) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415

    names = {count: f"counts {count} times" if count > 1 else "counts once" for count in range(1, largest + 1)}
    handles = [Patch(color=_color(count, most), label=name) for count, name in names.items()]
    handles.append(Patch(facecolor="white", edgecolor="gray", label="is not held"))
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize="small")


def _draw_field(axes: "Axes", total: np.ndarray, head: int) -> None:
    """Draws how many keys each query sees, in the head and in any."""
    seen = (total > 0).sum(axis=2)
    axes.plot(seen[head], label=f"head {head}")
    axes.plot((total > 0).any(axis=0).sum(axis=1), linestyle="--", label="any head")
    axes.set_title("receptive field", fontsize="medium")
    axes.set(xlabel="position of the query", ylabel="keys seen", ylim=(0, None), box_aspect=1)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize="small")


def _route(schedule: BranchSchedule) -> str:
    """Returns in words what is sent where."""
    if schedule.is_local:
        return "nothing travels"
    words = []
    for rotation in schedule.key_rotations:
        way = "on" if rotation.direction > 0 else "back"
        if rotation.steps:
            hops = "hops" if rotation.steps > 1 else "hop"
            words.append(f"{rotation.steps} {hops} of {schedule.keys.num_padded_rows} rows")
        if rotation.halo:
            rows, hops = rotation.halo_rows(schedule.keys), abs(rotation.halo_hops)
            words.append(f"{rows} rows {hops} {'devices' if hops > 1 else 'device'} {way}")
    return ", ".join(words)


def plot_plans(compare: Callable[..., Any], path: str) -> None:
    """Draws the bytes, memory and time of each strategy against the number of devices and of tokens.

    Args:
      compare: returns the comparison of other sizes, given `num_devices` or `num_tokens`.
      path: the picture to write.
    """
    plt = _pyplot()
    call = compare().call
    tokens = (call.num_queries * 2**power // 16 for power in range(9))
    # Which divide the devices: those that exchange, on each group of devices along the last axis of the sequence.
    unit = (call.exchange_size or 1) * call.num_devices // (call.num_inner_devices or call.num_devices)
    most = max(1024, call.num_devices)
    sweeps = {
        "num_devices": ("devices", [unit * 2**power for power in range(11) if 2 <= unit * 2**power <= most]),
        "num_tokens": ("tokens", [count for count in tokens if call.num_devices <= count <= MAX_POSITIONS]),
    }
    measures: dict[str, Callable[[Any], float]] = {
        "MiB sent by a device": lambda one: (one.num_bytes("forward") + one.num_bytes("backward")) / 2**20,
        "MiB held at least": lambda one: one.memory.at_least / 2**20,
        "bound of time in ms": lambda one: one.seconds * 1e3,
    }
    figure, axes = plt.subplots(len(measures), 2, figsize=(11, 10), layout="constrained", sharex="col")
    for column, (name, (unit_of_sizes, sizes)) in enumerate(sweeps.items()):
        found = {size: compare(**{name: size}) for size in sizes}
        names = [one.strategy for one in next(iter(found.values())).forecasts]
        lines = {name: [one.forecasts[index] for one in found.values()] for index, name in enumerate(names)}
        lines["recommended"] = [one.best for one in found.values()]
        for index, (label, forecasts) in enumerate(lines.items()):
            style = {"marker": "osdx"[index % 4], "linestyle": ("-", "--", ":", "-.")[index % 4], "label": label}
            for row, measure in enumerate(measures.values()):
                axes[row, column].plot(list(found), list(map(measure, forecasts)), **style)
        for row, unit in enumerate(measures):
            axes[row, column].set_ylabel(unit)
            _scale(axes[row, column])
            axes[row, column].set_xscale("log", base=2)
            axes[row, column].grid(alpha=0.3)
        axes[-1, column].set_xlabel(unit_of_sizes)
    axes[0, 0].legend()
    figure.suptitle(f"{call.num_queries:,} tokens, {call.num_devices} devices, and more or fewer of either")
    figure.savefig(path, metadata={"Date": None} if path.endswith("svg") else None)
    plt.close(figure)


def _scale(axes: "Axes") -> None:
    """Sets a logarithmic scale with plain numbers, which includes zero if a value is 0."""
    plt = _pyplot()
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    if values.all():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    else:
        axes.set_yscale("symlog", linthresh=values[values > 0].min(initial=1e9))
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.yaxis.set_minor_formatter(plt.NullFormatter())
