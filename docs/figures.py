"""Writes the figures of the benchmarks into the pages: `python docs/figures.py`, after a benchmark has run.

A page says where a figure is from, in a comment that no reader sees, and where it ends:
`<!-- figure ring_speed["ring over one device, forward"]["ratio of rates"] -->0.86<!-- end -->`.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
_FIGURE = re.compile(r"(<!-- figure (.*?) -->)(.*?)(<!-- end -->)", re.DOTALL)
_PART = re.compile(r'\["([^"]*)"\]|\.(\w+)')


def results() -> dict[str, dict[str, dict[str, str]]]:
    """Returns the figures of the benchmarks: of each file, each row named by its texts, and each column.

    Shares are there in percent as well. A row of its own says what they were measured on.
    """
    found: dict[str, dict[str, dict[str, str]]] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        result = json.loads(path.read_text())
        rows = found[path.stem] = {"measured on": {"processor": result.get("processor", ""), **result["versions"]}}
        for row in result["rows"]:
            name = ", ".join(value for value in row.values() if isinstance(value, str))
            figures = {key: value for key, value in row.items() if isinstance(value, int | float)}
            rows[name] = {key: _digits(value) for key, value in figures.items()}
            rows[name] |= {f"{key}, percent": f"{100 * value:.3g} %" for key, value in figures.items()}
    return found


def _digits(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 100 else f"{value:,.0f}"


def with_figures(text: str) -> str:
    """Returns a page with the figures that its comments name, as they were measured last."""
    found = results()

    def figure(match: re.Match[str]) -> str:
        before, source, _, after = match.groups()
        name = re.match(r"\w+", source)
        value = found[name[0]] if name else {}
        for item, attribute in _PART.findall(source):
            value = value[item or attribute]
        return f"{before}{value}{after}"

    return _FIGURE.sub(figure, text)


def main() -> None:
    """Writes all pages."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        path.write_text(with_figures(path.read_text()))


if __name__ == "__main__":
    main()
