"""The program that encodes slides: from files to files, and one line for what is wrong."""

import os
import zipfile

import gigapath
import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gigapath_formula import inputs, parameters
from parts.torch_checkpoint import to_numpy
from safetensors.numpy import save_file
from test_slide_encoder import CASES, RECORDED

CASE = "61 tiles"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A checkpoint and a slide, each in two kinds of files."""
    folder, case = tmp_path_factory.mktemp("slides"), CASES[CASE]
    weights = {name: array.astype(np.float32) for name, array in parameters(3, 64, case["in_chans"]).items()}
    save_file(weights, folder / "encoder.safetensors")
    np.savez(folder / "encoder.npz", **weights)
    embeddings, coordinates = (array[0] for array in inputs(case["length"], case["in_chans"]))
    np.savez(folder / "slide.npz", features=embeddings, coords=coordinates)
    with h5py.File(folder / "slide.h5", "w") as file:
        file["features"], file["coords"] = embeddings, coordinates
    return folder


@pytest.mark.quick("encoder.safetensors-slide.h5-options0")
@pytest.mark.parametrize(
    ("weights", "tiles", "options"),
    [
        ("encoder.safetensors", "slide.h5", []),
        ("encoder.npz", "slide.npz", ["--mesh", "seq=8", "--strategy", "all_to_all"]),
    ],
)
def test_from_files_to_files(files, tmp_path, capsys, weights, tiles, options):
    out, heatmap = tmp_path / "out.npz", tmp_path / "heat.png"
    arguments = ["--weights", files / weights, "--tiles", files / tiles, "--out", out, "--heatmap", heatmap, *options]
    gigapath.main([str(argument) for argument in arguments])
    with np.load(out) as found:
        np.testing.assert_allclose(found["output"], RECORDED[f"{CASE}/pooled"], rtol=0, atol=2e-4)
        assert found["layers"].shape == (4, 64)
    assert heatmap.read_bytes().startswith(b"\x89PNG")
    assert "61 tiles on" in capsys.readouterr().out


def test_parameters_are_copied_by_no_call(files):
    """They lie on each device before, and a program has none of them among its results."""
    options = ["--weights", str(files / "encoder.npz"), "--mesh", "seq=8"]
    encoder = gigapath.make_encoder(gigapath.parse_arguments(options), 24)
    parameters = jax.tree.leaves(nnx.state(encoder))
    assert all(array.sharding.device_set == {*jax.devices()} for array in parameters)
    slide = jnp.ones((61, 24)), jnp.ones((61, 2))
    results = gigapath.encode.trace(encoder, *slide, with_attention=False).out_info
    assert [result.shape for result in jax.tree.leaves(results)] == [(64,), (4, 64)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--weights nowhere.pth", "--weights nowhere.pth is no file: give one"),
        ("--weights slide.csv", "--weights slide.csv is of no known kind: give one of .pth, .pt, .safetensors, .npz"),
        ("--weights broken.npz", "--weights broken.npz cannot be read (no arrays by name)"),
        ("--weights slide.npz", "the checkpoint has no patch_embed.proj.weight: give the slide encoder's"),
        (
            "--weights code.npz",
            "--weights code.npz cannot be read (Object arrays cannot be loaded when allow_pickle=False)",
        ),
        ("--tiles encoder.npz", "--tiles encoder.npz has no features, but"),
        ("--tiles flat.npz", "has features and coords of the shapes ((4,), (4, 2)): make them [T, width] and [T, 2]"),
        ("--tiles narrow.npz", "has features and coords of the shapes ((4, 0), (4, 2)): make them [T, width]"),
        ("--tiles text.npz", "--tiles text.npz has features of <U1: give real numbers"),
        ("--tiles array.npz", "--tiles array.npz cannot be read (no arrays by name)"),
        ("--weights array.npz", "--weights array.npz cannot be read (no arrays by name)"),
        ("--weights words.npz", "--weights words.npz cannot be read (no arrays by name)"),
        ("--weights text.safetensors", "--weights text.safetensors cannot be read ("),
        ("--weights model.npz", "the checkpoint has no patch_embed.proj.weight"),
        ("--tile-size 0", "--tile-size 0 must be 1 at least"),
        ("--max-wsi-size 1000", "--max-wsi-size 1000 is less than 4 tiles of 256 pixels a side: give more"),
        ("--heads 7", "does not divide over --heads 7"),
        ("--tiles large.npz", "--tiles large.npz has numbers that are not finite: mend them"),
        ("--tiles nan.npz", "--tiles nan.npz has numbers that are not finite: mend them"),
        (
            "--weights encoder.npz --tiles wide.npz",
            "has embeddings of width 7, and the encoder takes 24: give those",
        ),
        ("--out result.txt", "--out result.txt must end in .npz"),
        ("--heatmap nowhere/heat.png", "--heatmap nowhere/heat.png cannot be written (No such file or directory)"),
        ("--out /proc/x.npz", "--out /proc/x.npz cannot be written (No such file or directory): name another file"),
        ("--finetune t.csv --checkpoints slide.npz", "--checkpoints slide.npz cannot be written (File exists)"),
        (
            "--tiles far.npz --heatmap heat.png",
            "--heatmap of 3.91e+05 x 3.91e+05 places of --tile-size 256 is too large",
        ),
        ("--tiles beyond.npz --heatmap heat.png", "--heatmap of 3.91e+31 x 3.91e+31 places of --tile-size 256 is too"),
        ("--tiles declared.npz", "--tiles declared.npz says that it holds more than memory has room for: cut it"),
        ("--tiles declared.h5", "--tiles declared.h5 says that it holds more than memory has room for: cut it"),
        (
            "--max-wsi-size 999999999999999",
            "--max-wsi-size 999999999999999 holds 2^31 or more tiles of",
        ),
        ("--mesh seq=100000", "--mesh data=1,fsdp=1,tensor=1,seq=100000 simulates 100000 devices: ask for 512 at most"),
        ("--mesh data=2,seq=2", "--mesh data=2 would compute the same on each: one slide is cut along seq alone"),
    ],
)
def test_wrong_input(files, monkeypatch, capsys, options, words):
    monkeypatch.chdir(files)
    monkeypatch.setattr(gigapath, "encode", lambda *_, **__: pytest.fail("it went on to compile"))
    (files / "broken.npz").write_bytes((files / "slide.npz").read_bytes()[:100])
    np.savez(files / "narrow.npz", features=np.ones((4, 0)), coords=np.ones((4, 2)))
    np.savez(files / "text.npz", features=np.array([["a"]]), coords=np.ones((1, 2)))
    np.savez(files / "large.npz", features=np.full((4, 24), 1e300), coords=np.ones((4, 2)))
    np.savez(files / "model.npz", model=np.ones(3))
    (files / "words.npz").write_text("no arrays")
    (files / "text.safetensors").write_text("no tensors")
    with (files / "array.npz").open("wb") as file:
        np.save(file, np.ones(3))
    np.savez(files / "flat.npz", features=np.ones(4), coords=np.ones((4, 2)))
    np.savez(files / "nan.npz", features=np.full((4, 24), np.nan), coords=np.ones((4, 2)))
    np.savez(files / "wide.npz", features=np.ones((4, 7)), coords=np.ones((4, 2)))
    corners = np.array([[0, 0], [256, 0], [0, 256], [1e8, 1e8]])
    np.savez(files / "far.npz", features=np.ones((4, 24)), coords=corners)
    np.savez(files / "beyond.npz", features=np.ones((4, 24)), coords=corners * 1e26)
    with zipfile.ZipFile(files / "declared.npz", "w") as archive, archive.open("features.npy", "w") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (10**9, 1536)}
        np.lib.format.write_array_header_1_0(file, header)
    with h5py.File(files / "declared.h5", "w") as file:
        file.create_dataset("features", (10**9, 1536), np.float32)
        file["coords"] = np.ones((4, 2))
    np.savez(files / "code.npz", **{"cls_token": np.array([os.system], dtype=object)})
    before = sorted(files.iterdir())
    with pytest.raises(SystemExit) as ended:
        gigapath.main(options.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert sorted(files.iterdir()) == before


def test_without_torch(files, monkeypatch, capsys):
    with zipfile.ZipFile(files / "encoder.pth", "w") as file:
        file.writestr("nothing", "")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(SystemExit):
        gigapath.main(["--weights", str(files / "encoder.pth")])
    assert "needs torch: pip install torch" in capsys.readouterr().err


def test_tensors_without_numbers():
    class Sparse:
        dtype, layout, device = "torch.float32", "torch.sparse_coo", "cpu"

        def detach(self):
            return self

        cpu = detach

        def __array__(self, *_, **__):
            raise TypeError("can't convert Sparse layout tensor to numpy")

    words = r"features is no dense tensor with numbers \(torch.sparse_coo torch.float32 on cpu\): save it as one"
    with pytest.raises(ValueError, match=words):
        to_numpy({"features": Sparse()})
