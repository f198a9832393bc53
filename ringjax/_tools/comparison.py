"""Compares the strategies of a call, in a table, in figures and in a sentence."""

import dataclasses
import functools
import json
import re
import textwrap
from typing import Any

from ringjax._call import Call
from ringjax._kernels.implementation import NAME_OF
from ringjax._mesh.axes import AxisName
from ringjax._pattern.branch import Window
from ringjax._pattern.pattern import DilatedPattern, Reach
from ringjax._pattern.reach_warning import find_problem
from ringjax._schedule.strategy import OF_BRANCHES
from ringjax._tools.forecast import Forecast, all_forecasts, choose
from ringjax._tools.machine import Machine


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison of the strategies of a call; `str` returns a table.

    Args:
      call: the call, in integers.
      machine: the figures of the devices.
      forecasts: what each strategy takes.
      best: the forecast with the least time bound, which may mix strategies.
      has_gradient: whether the gradient is counted.
      axis_name: the mesh axis of the sequence, or its axes.
      spec: the mesh axes that cut batches, the sequence and heads; empty if only the sequence is cut.
    """

    call: Call
    machine: Machine
    forecasts: tuple[Forecast, ...]
    best: Forecast
    has_gradient: bool
    axis_name: AxisName = "seq"
    spec: tuple[Any, ...] = ()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The figures of each strategy."""
        more = [] if self.best in self.forecasts else [self.best]
        return [self._row(one) for one in (*self.forecasts, *more)]

    def _row(self, one: Forecast) -> dict[str, Any]:
        both = one.forward + one.backward
        rings = [schedule for schedule in one.implemented if schedule.strategy == "ring"]
        hops = sum(rotation.hops for ring in rings for rotation in ring.key_rotations)
        return {
            "strategy": one.strategy,
            "exchange_size": max(schedule.ulysses_size for schedule in one.implemented),
            "balance": "+".join(dict.fromkeys(one.balance for one in one.implemented if one.is_dealt)) or "none",
            "busiest_over_mean": one.in_step,
            "hops": hops,
            "messages": sum(message.times for message in one.messages),
            "bytes_forward": one.num_bytes("forward"),
            "bytes_backward": one.num_bytes("backward"),
            "bytes_between_nodes": sum(
                message.num_bytes * message.times
                for message in one.messages
                if not self.machine.is_inside(message, self.call.num_devices)
            ),
            "bytes_held_at_least": one.memory.at_least,
            "bytes_held_at_most": one.memory.at_most,
            "pairs": one.pairs,
            "pairs_computed": one.computed,
            "operations": sum(one.operations),
            "seconds_products": both.products,
            "seconds_memory": both.memory,
            "seconds_links_hidden": both.hidden,
            "seconds_links_exposed": both.exposed,
            "seconds": both.total,
        }

    @property
    def implementations(self) -> list[dict[str, str]]:
        """The implementation that serves each branch of the best strategy, and why no preferred one does."""
        found = []
        for schedule, implemented in zip(self.best.schedules, self.best.implemented, strict=True):
            obstacles = self.call.obstacles(self.best.schedules, schedule)
            why = "; ".join(f"not {name}: {reason}" for name, reason in obstacles)
            name = NAME_OF[implemented.implementation]
            found.append({"branch": str(schedule.branch), "implementation": name, "why": why})
        return found

    @functools.cached_property
    def reach(self) -> Reach:
        """How many queries see beyond their smallest branch."""
        return self.call.pattern.reach(self.call.num_queries, self.call.work.num_kv_heads, self.call.is_causal)

    @functools.cached_property
    def problem(self) -> str | None:
        """The warning of a call if few queries see beyond their smallest branch, else None."""
        call = self.call
        return find_problem(call.pattern, call.num_queries, call.work.num_kv_heads, call.is_causal)

    @property
    def recommendation(self) -> str:
        """The recommendation in a sentence."""
        if not any(one.messages for one in self.forecasts):
            return f'Nothing has to travel: all strategies do the same, take the default, "ring".{self._what_fits()}'
        return f"Take {self._beside_others()}.{self._which_mesh()}{self._which_window()}{self._what_fits()}"

    def _which_mesh(self) -> str:
        """Returns a sentence on how to lay out a mesh for rings between groups; empty if any mesh serves."""
        size = self.best.ring_ulysses_size
        if not self.machine.is_grid or size == 1:
            return ""
        return (
            f" Make the mesh with ringjax.make_mesh(..., exchange_size={size}): else no hop between groups is hidden."
        )

    def _which_window(self) -> str:
        """Returns a sentence on a window that sees all pairs of short documents in less time; empty if none does."""
        call, branches = self.call, self.call.pattern.branches
        is_dense = len(branches) == 1 and branches[0].keeps_all and branches[0].extent >= call.num_keys
        longest = call.longest_document
        if longest is None or not is_dense or 2 * longest > call.num_keys:
            return ""
        of_window = dataclasses.replace(call, pattern=DilatedPattern([Window(longest)]))
        other = choose(of_window, self.machine, self.has_gradient)
        if other.seconds > 0.95 * self.best.seconds:
            return ""
        return (
            f" If no document has more than {longest:,} tokens, as here, pattern=[ringjax.Window({longest})] sees the "
            f'same: the bound of its "{other.strategy}" is {_time(other.seconds)}.'
        )

    def _beside_others(self) -> str:
        """Returns the best strategy, and its bound compared with the default, or the next if it is the default."""
        best, bound = self.best.strategy, _time(self.best.seconds)
        name = f'"{best}"' if isinstance(best, str) else f"{best}, one for each branch"
        # `explain` adds the explained call under a name of its own, which is left out here.
        others = {one.strategy: one.seconds for one in self.forecasts if one.strategy in {*OF_BRANCHES} - {best}}
        if not others:
            return f"{name}: no other serves, and its bound is {bound}"
        if "ring" in others:
            saved = 1 - self.best.seconds / others["ring"]
            share = f"{saved:.0%} less" if saved >= 0.01 else "less than 1% less"
            return f'{name}: its bound is {bound}, {share} than that of the default, "ring"'
        other = min(others, key=lambda name: others[name])
        ratio = others[other] / self.best.seconds
        more = "less than 1% more" if ratio < 1.01 else f"{ratio:.2f} times as long"
        default = ", the default" if best == "ring" else ""
        return f'{name}{default}: its bound is {bound}, and that of the next, "{other}", is {more}'

    def _what_fits(self) -> str:
        """Returns a sentence on what does not fit the memory of a device; empty if everything fits."""
        limit, memory = self.machine.memory, f"the {mebibytes(self.machine.memory)} of a device"
        if self.best.memory.at_least > limit:
            return f" None fits {memory}: take more devices, a smaller batch, or a narrower dtype."
        too_large = [f'"{one.strategy}"' for one in self.forecasts if one.memory.at_least > limit]
        said = f" More than {memory} would be held by {', '.join(too_large)}." if too_large else ""
        if self.best.memory.at_most > limit:
            said += f" Whether it fits {memory} only a compiler can say: see --compile."
        return said

    @property
    def example(self) -> str:
        """The call to paste."""
        return f"ringjax.ring_dilated_attention(query, key, value, {', '.join(self._options(with_arrays=True))})"

    @property
    def module_example(self) -> str | None:
        """The module to paste, except for the width of inputs; None if values and queries differ in width."""
        query, key, value, *_ = self.call.request
        if value.shape[-1] != query.shape[-1]:
            return None
        sizes = [f"num_heads={query.shape[-2]}", "in_features=in_features", f"num_kv_heads={key.shape[-2]}"]
        sizes += [f"qkv_features={query.shape[-2] * query.shape[-1]}"]
        dtype = f"dtype=jnp.{query.dtype}"
        return f"ringjax.RingDilatedAttention({', '.join([*sizes, *self._options(), dtype])}, rngs=rngs)"

    def _options(self, *, with_arrays: bool = False) -> list[str]:
        call = self.call
        branches = ", ".join(f"ringjax.{branch}" for branch in call.pattern.branches)
        usual = DilatedPattern(call.pattern.branches)
        chosen = {name: getattr(call.pattern, name) for name in ("offsets", "merge", "heads")}
        choices = [f"{name}={value!r}" for name, value in chosen.items() if value != getattr(usual, name)]
        options = [f"pattern=[{branches}]", *choices, f"is_causal={call.is_causal}", f"strategy={self.best.strategy!r}"]
        options += [f"{name}={value!r}" for name, value in options_with(call, self.best.strategy).items()]
        if "document_ids" in call.request.needs and with_arrays:
            options.append("document_ids=document_ids")
        # What is not known here has the name of its option.
        options += [f"{name}={name}" for name in ("logits_soft_cap", "dropout_rate") if name in call.request.needs]
        if "dropout_rate" in call.request.needs and with_arrays:
            options.append("dropout_seed=dropout_seed")
        if "return_max_logit" in call.request.needs:
            options.append("return_max_logit=True" if with_arrays else "sow_max_logit=True")
        if self.axis_name != "seq":
            options.append(f"axis_name={self.axis_name!r}")
        if self.spec:
            options.append(f"spec=jax.P({', '.join(map(repr, self.spec))})")
        return options

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures, for JSON."""
        return {
            "device": self.machine.name,
            "tokens": self.call.num_queries,
            "devices": self.call.num_devices,
            "has_gradient": self.has_gradient,
            "strategies": self.rows,
            "implementations": self.implementations,
            "share_that_sees_beyond": self.reach.in_any_head,
            "share_that_sees_beyond_per_head": float(self.reach.beyond.mean()),
            "recommended": self.best.strategy,
            "recommendation": self.recommendation,
            "call": self.example,
            "module": self.module_example,
        }

    def to_json(self) -> str:
        """Returns all figures in JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def __str__(self) -> str:
        return self.report(self.example, *filter(None, [self.module_example]))

    def report(self, *examples: str) -> str:
        """Returns the table and the recommendation, with examples behind them."""
        call, machine = self.call, self.machine
        what = "forward and gradient" if self.has_gradient else "forward"
        bounds = "bounds: products at the peak rate, links at full rate"
        times = "forecasts, of measured figures" if machine.is_measured else bounds
        title = [
            f"{_tokens(call)} on {call.num_devices} devices ({machine.name}), {what}.",
            f"A device has its part of {_sizes(call)}, in {call.request.query.dtype}.",
            f"Times are {times}.",
        ]
        if call.query_offset is None:
            title.append("Where the queries are is not known here: they are counted as the last ones.")
        if call.packings:
            count = sum(len(packing.starts) for packing in call.packings)
            title.append(
                f"Counted over {len(call.packings)} sequence{'s' if len(call.packings) > 1 else ''} with {count:,} "
                "packed documents in all. In each step of a ring all devices wait for the busiest."
            )
        served = [
            f"{one['branch']}: {one['implementation']}{' (' + one['why'] + ')' if one['why'] else ''}"
            for one in self.implementations
        ]
        if len({min(branch.extent, call.num_queries) for branch in call.pattern.branches}) > 1:
            served.append(
                f"{self.reach.in_any_head:.0%} of the queries see beyond their smallest branch in one head at least, "
                f"and {self.reach.beyond.mean():.0%} do in a head on average."
            )
        warned = [] if self.problem is None else [f"Warning: {self.problem}."]
        said = [*served, *warned, "", self.recommendation, *examples]
        return "\n".join([*map(wrap, title), "", *self._table(), "", *map(wrap, said)])

    def _table(self) -> list[str]:
        labels = {
            "strategy": "strategy",
            "exchange": "exchange_size",
            "balance": "balance",
            **({"busiest over the mean": "busiest_over_mean"} if self.call.packings else {}),
            "hops": "hops",
            "messages": "messages",
            "sent forward": "bytes_forward",
            "backward": "bytes_backward",
            "between nodes": "bytes_between_nodes",
            "holds at least": "bytes_held_at_least",
            "at most": "bytes_held_at_most",
            "products": "seconds_products",
            "memory": "seconds_memory",
            "links hidden": "seconds_links_hidden",
            "exposed": "seconds_links_exposed",
            "bound": "seconds",
        }
        # Each strategy has a column: there are few strategies, and a line cannot hold the figures of one.
        cells = [list(labels)] + [[_cell(key, row[key]) for key in labels.values()] for row in self.rows]
        cells[1:] = [list(map(str.rjust, column, [max(map(len, column))] * len(column))) for column in cells[1:]]
        cells[0] = [label.ljust(max(map(len, labels))) for label in labels]
        return ["  ".join(line) for line in zip(*cells, strict=True)]


def _tokens(call: Call) -> str:
    if (call.num_queries, call.query_offset) == (call.num_keys, 0):
        return f"{call.num_queries:,} tokens"
    first = "" if call.query_offset is None else f", the first at {call.query_offset:,},"
    return f"{call.num_queries:,} queries{first} and {call.num_keys:,} keys"


def _sizes(call: Call) -> str:
    work = call.work
    widths = f"{work.width}" if work.width == work.value_width else f"{work.width} and {work.value_width}"
    sequences = f"{work.batch} sequence{'s' if work.batch > 1 else ''}"
    return f"{sequences}, with {work.num_heads} query and {work.local_heads(1)} key/value heads of width {widths}"


def compare(
    call: Call, machine: Machine, has_gradient: bool = True, axis_name: AxisName = "seq", spec: tuple[Any, ...] = ()
) -> Comparison:
    """Returns the comparison of the strategies of a call."""
    machine = machine.beside(call.work.head_parts)
    forecasts = tuple(all_forecasts(call, machine, has_gradient))
    return Comparison(call, machine, forecasts, choose(call, machine, has_gradient), has_gradient, axis_name, spec)


def options_with(call: Call, strategy: str | tuple[str, ...]) -> dict[str, Any]:
    """Returns the options of a call, besides its strategy, that differ from the default."""
    exchanges = "all_to_all" in strategy
    options = {"exchange_size": call.exchange_size if exchanges else None, "implementation": call.implementation}
    options |= {name: getattr(call.request, name) for name in ("balance", "block_size", "precision")}
    options["documents_are_sorted"] = call.request.documents_are_sorted or None
    return {name: value for name, value in options.items() if value is not None}


def wrap(text: str) -> str:
    """Returns a text wrapped to 88 columns, all lines but the first indented, without cutting the text of a branch."""
    text = re.sub(r"\w+\([^()]*\)", lambda branch: branch[0].replace(" ", "\xa0"), text)
    lines = textwrap.wrap(text, 88, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\xa0", " ")


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _cell(key: str, value: Any) -> str:
    if isinstance(value, tuple):  # a strategy for each branch
        return "mixed"
    if key.startswith("seconds"):
        return _time(value) if value else "-"
    if key == "busiest_over_mean":
        return f"{value:.2f}"
    if key.startswith("bytes"):
        return mebibytes(value) if value else "-"
    return str(value)


def mebibytes(num_bytes: int) -> str:
    """Returns a number of bytes in MiB, as a text of four digits at least."""
    number = num_bytes / 2**20
    return f"{number:,.0f} MiB" if number >= 1000 else f"{number:.4g} MiB"
