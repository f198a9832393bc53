"""Imports run downwards only, the core needs no tool, and every module says its one job in its first line."""

import ast
import re
import subprocess
import sys
import traceback
import types
from pathlib import Path

import jax.numpy as jnp
import pytest
from oracle import make_mesh

import ringjax
from ringjax import Segments
from ringjax._kernels import tiles

PACKAGE = Path(__file__).parent.parent / "ringjax"
# From the ground up: each may import itself and what stands before it. Names are folders, or files of the package.
FLOORS = """
    _version _pattern _schedule _mesh _kernels _options _parallel _decoding _call _recording _attention
    _attention_fn _decode_attention _weights _module_arguments _heads linen nn _tools __main__ __init__
""".split()  # noqa: SIM905
# The one name that the core takes of the tools, when it is called: strategy="auto".
LAZY = {"_call": "ringjax._tools.forecast"}
MODULES = sorted(str(path.relative_to(PACKAGE).with_suffix("")) for path in PACKAGE.rglob("*.py"))
# What the library needs no device for is integers alone.
WITHOUT_JAX = [name for name in MODULES if name.startswith("_schedule/")] + ["_pattern/branch", "_pattern/pattern"]


def imports(path: Path) -> set[str]:
    """The modules that a module imports, as it names them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            is_folder = node.module.startswith("ringjax") and (PACKAGE.parent / node.module.replace(".", "/")).is_dir()
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if is_folder else {node.module}
    return names


def own_imports(name: str) -> set[str]:
    """The modules of the package that one of its modules imports, as paths without endings."""
    found = {other for other in imports(PACKAGE / f"{name}.py") if other.split(".")[0] == "ringjax"}
    return {other.removeprefix("ringjax.").replace(".", "/") for other in found - {LAZY.get(name)}}


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_downwards(name):
    floor = FLOORS.index(name.partition("/")[0])
    above = {other for other in own_imports(name) if FLOORS.index(other.partition("/")[0]) > floor}
    assert not above
    if name in WITHOUT_JAX:
        assert "jax" not in {other.partition(".")[0] for other in imports(PACKAGE / f"{name}.py")}


def test_no_two_files_import_each_other():
    needs = {name: own_imports(name) - {name} for name in MODULES}
    while needs:
        free = {name for name, others in needs.items() if not others & {*needs}}
        assert free, f"a circle among {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}


def test_the_core_imports_no_tool():
    """The function and the module run, with a gradient, while the folder of the tools cannot be imported."""
    program = """
import sys, types
package = types.ModuleType("ringjax"); package.__path__ = [sys.argv[1]]
sys.modules |= {"ringjax": package, "ringjax._tools": None}
import jax, jax.numpy as jnp
from flax import nnx
from ringjax._pattern.branch import Segments
from ringjax.nn import RingDilatedAttention
attention = RingDilatedAttention(2, 8, pattern=[Segments(4)], is_causal=True, rngs=nnx.Rngs(0))
print(jax.grad(lambda inputs: attention(inputs).sum())(jnp.ones((1, 8, 8))).shape)
"""
    command = [sys.executable, "-c", program, str(PACKAGE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "(1, 8, 8)\n", done.stderr


def test_the_way_to_a_tile_is_short(monkeypatch):
    """Counts the library's own functions, from the call to the first product of a ring's tile."""
    stacks, installed = [], Path(ringjax.__file__).parent

    def stop(*_, **__):
        stacks.append([frame.name for frame in traceback.extract_stack() if str(installed) in frame.filename])
        raise RuntimeError("reached")

    monkeypatch.setattr(tiles, "jnp", types.SimpleNamespace(**(vars(jnp) | {"einsum": stop})))
    array = jnp.ones((1, 40, 3, 5))
    with pytest.raises(RuntimeError, match="reached"):
        ringjax.ring_dilated_attention(array, array, array, pattern=[Segments(40)], mesh=make_mesh(seq=8))
    assert stacks[0][0] == "ring_dilated_attention"
    assert len(stacks[0]) <= 15, stacks[0]


@pytest.mark.parametrize("name", MODULES)
def test_platforms_are_told_apart_by_kernels_and_the_mesh(name):
    """The kernels, what orders collectives or devices, and the names of platforms; tools know devices anyway."""
    text = (PACKAGE / f"{name}.py").read_text()
    switches = re.findall(r"platform_dependent|platform [!=]= |platform in ", text)
    assert not switches or name.startswith(("_kernels/", "_tools/", "_mesh/"))


@pytest.mark.parametrize("name", MODULES)
def test_modules_state_their_job(name):
    docstring = ast.get_docstring(ast.parse((PACKAGE / f"{name}.py").read_text()))
    assert docstring.splitlines()[0].endswith((".", ":"))


@pytest.mark.parametrize("name", MODULES)
def test_functions_inside_others_have_no_shapes(name):
    """The tests check the shapes of functions that are defined once, see `shape_checks`."""
    is_function = lambda node: isinstance(node, ast.FunctionDef)
    for outer in filter(is_function, ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text()))):
        for inner in filter(is_function, ast.walk(outer)):
            arguments = [argument.annotation for argument in ast.walk(inner.args) if isinstance(argument, ast.arg)]
            annotations = filter(None, [*arguments, inner.returns] if inner is not outer else [])
            parts = (part for annotation in annotations for part in ast.walk(annotation))
            assert not any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts), inner.name
