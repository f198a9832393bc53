"""The wheel as users install it: what is in it, that it runs on its own, and what type checkers see from outside."""

import os
import pickle
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from readme_renderer import markdown

import ringjax

ROOT = Path(__file__).parent.parent
USE = """
from typing import assert_type

import jax
import jax.numpy as jnp

import ringjax

array = jnp.ones((1, 16, 2, 4))
out = ringjax.ring_dilated_attention(array, array, array, segment_lengths=(4,), dilation_rates=(1,))
both = ringjax.ring_dilated_attention(
    array, array, array, segment_lengths=(4,), dilation_rates=(1,), return_residual=True
)
dense = ringjax.dilated_attention_reference(array, array, array, segment_lengths=(4,), dilation_rates=(1,))
assert_type(out, jax.Array)
assert_type(both, tuple[jax.Array, jax.Array])
assert_type(dense, jax.Array)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the wheel's contents, and a program beside it."""
    folder = tmp_path_factory.mktemp("package")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    (folder / "use.py").write_text(USE)
    return folder


def run(folder, *command):
    environment = {**os.environ, "PYTHONPATH": str(folder / "site"), "MYPYPATH": str(folder / "site")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_names_of_the_package():
    """All that users import, and nothing that the package imports for itself."""
    public = [name for name in dir(ringjax) if not name.startswith("__")]
    assert public == sorted(ringjax.__all__)
    assert "RingDilatedAttention" in public


@pytest.mark.parametrize("name", sorted({*ringjax.__all__} - {"linen", "nn", "RingDilatedAttention"}))
def test_what_is_public_names_its_public_path(name):
    public = getattr(ringjax, name)
    assert f"{public.__module__}.{public.__qualname__}" == f"ringjax.{name}"
    assert pickle.loads(pickle.dumps(public)) is public


def test_a_checkout_runs_without_being_installed(tmp_path):
    """Its version is not known then."""
    (tmp_path / "ringjax").symlink_to(ROOT / "ringjax")
    code = """
from importlib import metadata
known = metadata.version
def version(name):
    if name == "ringjax":
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.version = version
import ringjax
print(ringjax.__version__)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "0+unknown\n"


@pytest.mark.slow
def test_the_wheel_runs_on_its_own(installed):
    assert (installed / "site" / "ringjax" / "py.typed").exists()
    assert sorted(path.name for path in (installed / "site").iterdir() if path.suffix != ".dist-info") == ["ringjax"]
    # Imported where it is needed, and no sooner: it takes longer to import than all of the package.
    late = {"flax", "matplotlib", "jax.experimental.pallas"}
    code = f"import sys, ringjax, use; print(ringjax.__file__, ringjax.__version__, {late} & {{*sys.modules}}, "
    code += "ringjax.RingDilatedAttention.__name__)"
    done = run(installed, sys.executable, "-W", "error", "-c", code)
    path = str(installed / "site/ringjax/__init__.py")
    assert done.stdout.split() == [path, "0.1.0", "set()", "RingDilatedAttention"]


def test_the_description_is_one_that_the_index_renders(installed):
    (path,) = (installed / "site").glob("*.dist-info/METADATA")
    metadata = message_from_string(path.read_text())
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = markdown.render(metadata.get_payload())
    assert page is not None
    assert page.count("<table>") == 2
    assert "<img" in page


@pytest.mark.quick("basedpyright")
@pytest.mark.parametrize(
    "checker",
    [["basedpyright", "--level", "error", "--pythonpath", sys.executable], ["mypy", "--follow-imports=silent"]],
    ids=lambda c: c[0],
)
def test_types_from_outside(checker, installed):
    name, *options = checker
    program = Path(sys.executable).parent / name
    (installed / "bad.py").write_text(USE.replace("segment_lengths=(4,)", "segment_length=(4,)"))
    done = run(installed, program, *options, "use.py", "bad.py")
    assert done.returncode == 1
    assert "bad.py:10:" in done.stdout
    assert "use.py:" not in done.stdout
