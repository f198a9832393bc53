"""The examples in docstrings and in the README run, its commands are those that are tested, its figures measured.

The site's own examples run when it is built.
"""

import doctest
import importlib
import json
import operator
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import draw_pattern
import gigapath
import jax
import jax.numpy as jnp
import matplotlib as mpl
import pytest
import train_lm
from figures import with_figures
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import make_mesh

import ringjax
from benchmarks.__main__ import RESULTS, page_of_results
from ringjax import ring_dilated_attention
from ringjax._pattern.warning import warning_anew
from ringjax._tools.command import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MODULES = [
    "_attention",
    "_attention_fn",
    "_decode_attention",
    "_pattern.branch",
    "_mesh.device_order",
    "_tools.explain",
    "_mesh.unused",
    "_mesh.padding",
    "_pattern.pattern",
    "_pattern.reach_warning",
    "_tools.plan",
    "_pattern.reference",
    "_pattern.rope",
    "_pattern.rotary",
    "_weights",
    "linen",
    "nn",
]


def is_defined_in(module, public):
    """Whether a module defines what names the package as its module."""
    name = getattr(public, "__name__", None)
    return re.search(rf"^(class|def) {name}\b", Path(module.__file__).read_text(), re.MULTILINE) is not None


class Finder(doctest.DocTestFinder):
    """Finds also what is public, which names the package as its module."""

    def _from_module(self, module, object):
        is_public = getattr(object, "__module__", None) == "ringjax"
        return is_defined_in(module, object) if is_public else super()._from_module(module, object)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(f"ringjax.{name}")
    known = {**vars(module), "jax": jax, "jnp": jnp, "ringjax": ringjax}
    tests = Finder(exclude_empty=True).find(module, globs=known)
    with warning_anew():  # other tests may have seen what is warned of once
        results = [doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test) for test in tests]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0


def run_code(code, **variables):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.quick("8")
@pytest.mark.parametrize("devices", ["1", "8"])
def test_code_of_the_readme(devices):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in block.splitlines() if line]) <= 15
    result = run_code(block, JAX_NUM_CPU_DEVICES=devices)
    assert result.returncode == 0, result.stderr
    assert "(1, 3360, 64)" in result.stdout
    assert devices == "1" or "'seq'" in result.stdout


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 90


def test_commands_of_the_readme():
    commands = [line.strip() for line in README.splitlines() if line.startswith("    python -m venv")]
    assert len(commands) == 2
    assert commands[0].endswith("examples/train_lm.py")
    tests = commands[1].rsplit("&&", 1)[1].split(maxsplit=1)[1]
    assert tests in (ROOT / ".ci" / "run").read_text()


def test_figures_of_the_readme():
    """They are those of the last measurements."""
    results = ROOT / "benchmarks" / "results"
    found = {}
    for name in ("local_speed", "ring_speed"):
        for row in json.loads((results / f"{name}.json").read_text())["rows"]:
            figure = next(value for value in row.values() if isinstance(value, float))
            found[row.get("case", row.get("claim")), row["direction"]] = f"{figure:.2g}"
    rows = {
        "one device, to the least loop": "causal, T=8192",
        "ring of eight simulated devices": "ring over one device",
        "the same ring, to `ringattention`": "ring over ringattention",
        "the same ring, to `jax.nn.dot_product_attention`": "ring over dot_product_attention",
    }
    for text, name in rows.items():
        (line,) = (line for line in README.splitlines() if line.startswith(f"| {text}"))
        assert line.split(" | ")[1:] == [found[name, "forward"], f"{found[name, 'gradient']} |"]
    assert f"ran {found['one device over torch', 'forward']} times as fast as torch" in README
    measured_on = json.loads((results / "ring_speed.json").read_text())["processor"]
    assert measured_on == "2 cores, AMD EPYC"
    assert all(words in README for words in ("two CPU cores", "AMD EPYC"))


def test_the_figures_of_a_gpu_in_the_readme_are_measured():
    """From the least to the most of a peer's, over forward and gradient, widths and masks."""
    rows = json.loads((RESULTS / "gpu_longnet.json").read_text())["rows"]
    for peer, words in (("dense", "as fast as cuDNN's dense attention"), ("torch", "as fast as in torch")):
        figures = [figure for row in rows for name, figure in row.items() if name.endswith(f"faster than {peer}")]
        assert f"{min(figures):.2g} to {max(figures):.2g} times {words}" in README


PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]


def anchor(heading):
    """The name by which links reach a heading, on a git host and on the site."""
    words = re.sub(r"[`*]|<!--.*?-->", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words.strip().lower()))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(page):
    """In the repository, where pages are read as well as on the site; nothing is fetched."""
    links = re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", page.read_text())
    relative = [(page.parent / path if path else page, name) for path, name in links if "://" not in path]
    for path, name in relative:
        assert path.exists(), path
        if name and path.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert name[1:] in map(anchor, headings), f"{path}{name}"
    assert relative or page.name != "README.md"


def test_the_readme_of_the_index_has_whole_links():
    """Those of pages lead to the site, that of the picture to the picture."""
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    text = README
    for rule in hook["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 20
    assert all(link.startswith("https://") for link in links)
    assert "https://ringjax.readthedocs.io/en/latest/notebooks/first_steps.html" in links
    assert "https://raw.githubusercontent.com/ringjax/ringjax/main/docs/pattern.svg" in links


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_figures_of_pages_are_those_measured_last(page):
    """`python docs/figures.py` writes them; a page without them is unreadable on a git host."""
    text = page.read_text()
    assert "{{" not in text
    assert with_figures(text) == text


def test_code_of_the_front_page():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    assert len([line for line in block.splitlines() if line]) <= 10
    result = run_code(block, JAX_NUM_CPU_DEVICES="8")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "(1, 4096, 64)\n"


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_have_their_outputs(path):
    """Of each cell that prints or draws, and nothing of the machine that ran it."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert sum(bool(cell["outputs"]) for cell in cells) >= len(cells) / 2
    text = json.dumps([cell["outputs"] for cell in cells])
    assert not re.search(r"/root/|/tmp/|/home/|site-packages|\d\d:\d\d:\d\d", text)
    assert not any({"execution", "ExecuteTime"} & {*cell["metadata"]} for cell in cells)


def test_each_guarantee_names_the_tests_that_hold_it():
    text = (ROOT / "docs" / "guarantees.md").read_text().split("\n## ")[0]
    guarantees = text.split("\n- **")[1:]
    assert len(guarantees) == 7
    for guarantee in guarantees:
        tests = re.findall(r"`(tests/\w+\.py)`", guarantee)
        assert tests, guarantee
        assert all((ROOT / path).exists() for path in tests)


def test_the_page_of_results_is_that_of_the_results():
    """A result that was measured again is on the page, too."""
    assert (RESULTS / "README.md").read_text() == page_of_results()


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs" / "api.md").read_text()
    documented = re.findall(r"^   (\w[\w.]+)$", text, re.MULTILINE)
    public = {*ringjax.__all__} - {"linen", "nn"} | {"linen.RingDilatedAttention"}
    assert {*documented} == public
    for name in public:  # with an example, which `test_docstrings` runs
        value = operator.attrgetter(name)(ringjax)
        assert ">>> " in value.__doc__, name
        assert any(is_defined_in(importlib.import_module(f"ringjax.{module}"), value) for module in MODULES), name


def test_commands_of_the_guide_to_scaling(capsys):
    text = (ROOT / "docs" / "scaling.md").read_text()
    with pytest.raises(SystemExit, match="0"):
        train_lm.parse_arguments(["--help"])
    known = capsys.readouterr().out
    commands = re.findall(r"train_lm\.py(.*(?:\\\n.*)*)", text) + re.findall(r"(?:args|command): (.*)", text)
    flags = {flag for command in commands for flag in re.findall(r"(--[a-z-]+)", command)}
    assert {"--distributed", "--mesh", "--coordinator", "--resume", "--profile"} <= flags
    assert all(flag in known for flag in flags)


def test_commands_of_the_guide_to_planning(capsys):
    text = (ROOT / "docs" / "planning.md").read_text()
    notebook = (ROOT / "docs" / "notebooks" / "planning_a_run.ipynb").read_text()
    commands = re.findall(r"^    ringjax (plan (?:[^\n]*\\\n)*[^\n]*)", text, re.MULTILINE) + re.findall(
        r"`ringjax (plan [^`]*)`", README + notebook
    )
    assert len(commands) == 4
    for command in commands:
        assert main(command.replace("\\\n", " ").split()) == 0
        assert "Take " in capsys.readouterr().out


def test_the_command_for_one_node_rings():
    text = (ROOT / "docs" / "scaling.md").read_text()
    (command,) = re.findall(r"train_lm\.py (--mesh seq=8 --dtype bfloat16(?:[^\n]*\\\n)*[^\n]*)", text)
    arguments = train_lm.parse_arguments(command.replace("\\\n", " ").split())
    mesh = make_mesh(seq=8)
    sharding = NamedSharding(mesh, P(None, "seq"))
    shape = jax.ShapeDtypeStruct((1, arguments.sequence_length, arguments.heads, 32), jnp.bfloat16, sharding=sharding)
    pattern = {"segment_lengths": arguments.segment_lengths, "dilation_rates": arguments.dilation_rates}
    attend = lambda array: ring_dilated_attention(array, array, array, **pattern, is_causal=True, mesh=mesh)
    lowered = jax.jit(attend).lower(shape).as_text()
    # In and after the loop of the one branch that spans devices: keys, values, and the halves that are swapped.
    assert lowered.count("collective_permute") >= 2
    assert max(arguments.dilation_rates) <= arguments.heads


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (train_lm, "the peak; it warms up and then decays (default: 0.02)"),
        (train_lm, "of the pattern's branches (default: 256,2048,8192)"),
        (train_lm, "of the parameters and the order of the data (default: 0)"),
        (draw_pattern, "length of the sequence (default: 32)"),
        (draw_pattern, "LongNet's by default options: "),
        (gigapath, "the tiles in pixels a side (default: 256)"),
    ],
)
def test_the_help_shows_defaults(program, words, capsys):
    with pytest.raises(SystemExit):
        program.parse_arguments(["--help"])
    assert words in " ".join(capsys.readouterr().out.split())


def test_the_picture_is_that_of_its_code(tmp_path, monkeypatch, capsys):
    path = tmp_path / "pattern.svg"
    monkeypatch.chdir(tmp_path)
    with mpl.rc_context():
        draw_pattern.main([str(path)])
    for arguments, code in (([], 2), (["--help"], 0)):  # neither writes a file
        with pytest.raises(SystemExit) as ended:
            draw_pattern.main(arguments)
        assert (ended.value.code, [path.name for path in tmp_path.iterdir()]) == (code, ["pattern.svg"])
        assert "FILE" in "".join(capsys.readouterr())
    for arguments, words in (
        ("x.svg foo", "'foo' is no branch: write segments:LENGTH[:RATE] or window:SIZE[:RATE]"),
        ("x.svg segments:a", "'a' is no positive whole number"),
        ("x.svg segments:2:4", "'segments:2:4': Segments(length=2, rate=4) has a rate above its length"),
        ("x.svg --tokens 0", "'0' is no positive whole number"),
        ("x.svg --head 9", "--head 9 must be one of the --kv-heads 4 heads"),
        ("nowhere/x.svg", "nowhere/x.svg"),
        ("x.weird", "FILE x.weird must end in one of .png, .svg, .pdf"),
        ("x.svg --tokens 1M", "--tokens 1048576 is above 4096: a picture has no room for more"),
    ):
        with pytest.raises(SystemExit) as ended:
            draw_pattern.main(arguments.split())
        assert (ended.value.code, [path.name for path in tmp_path.iterdir()]) == (2, ["pattern.svg"])
        assert words in capsys.readouterr().err
    shapes = lambda text: sorted(re.findall(r"(?:fill|stroke): (#\w+)", text))
    assert shapes(path.read_text()) == shapes((ROOT / "docs" / "pattern.svg").read_text())
