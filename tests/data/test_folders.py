"""Images of users in folders of classes, clients and subsets, compared with Pillow; and what is said of other files."""

from __future__ import annotations

import os

import numpy as np
import pytest
from PIL import Image

from fedstat import data, fl
from fedstat.data import partition
from fedstat.fl import algorithms, nets

RNG = np.random.default_rng(0)


def drawn(path, mode="RGB", size=(4, 5), kind=None):
    """Write an image of random pixels and return them, (channel, row, column)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    pixels = RNG.integers(0, 256, (*size, *channels), dtype=np.uint8)
    Image.fromarray(pixels).save(path, kind)
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize("clients", [False, True])
@pytest.mark.parametrize("subsets", [(), ("train", "test"), ("test", "train", "validation")])
def test_folders_are_classes_clients_and_subsets(tmp_path, mode, clients, subsets):
    expected = []
    for subset in subsets or [""]:
        for client in ("north", "south") if clients else [""]:
            for name in ("cat", "dog", "eel"):
                for i in range(2):
                    path = tmp_path.joinpath(*filter(None, (subset, client, name)), f"{i}.png")
                    expected.append((path, subset or "train", client, name, drawn(path, mode)))
    expected.sort(key=lambda row: row[0].parts)
    (tmp_path / ".DS_Store").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_text("hidden")
    found = data.from_folder(tmp_path)
    assert found.x.dims == ("sample", "channel", "row", "column")
    assert (found.x.dtype, found.x.attrs) == (np.uint8, {"scale": 255})
    np.testing.assert_array_equal(found.x, [row[4] for row in expected])
    assert found["split"].values.tolist() == [row[1] for row in expected]
    assert [found.y.attrs["names"][i] for i in found.y.values] == [row[3] for row in expected]
    assert ("user" in found.coords) == clients
    if clients:
        assert found.user.values.tolist() == [row[2] for row in expected]


def test_jpeg_files_are_those_of_pillow(tmp_path):
    for name in ("a/1.jpg", "a/2.JPEG", "b/1.Jpg"):
        drawn(tmp_path / name, size=(32, 48), kind="JPEG")
    found = data.from_folder(str(tmp_path))
    for pixels, path in zip(found.x.values, ("a/1.jpg", "a/2.JPEG", "b/1.Jpg"), strict=True):
        with Image.open(tmp_path / path) as image:
            np.testing.assert_array_equal(pixels, np.asarray(image).transpose(2, 0, 1))


def test_images_of_several_sizes_and_modes_are_converted_on_request(tmp_path):
    drawn(tmp_path / "a/1.png", "L", (8, 6))
    drawn(tmp_path / "a/2.png", "RGB", (3, 3))
    Image.new("P", (5, 5)).save(tmp_path / "a/3.png")
    Image.new("1", (5, 5)).save(tmp_path / "a/4.png")
    drawn(tmp_path / "b/1.png", "RGBA", (9, 2))
    for mode, channels in (("L", 1), ("RGB", 3), ("RGBA", 4)):
        found = data.from_folder(tmp_path, size=(4, 5), mode=mode).x
        assert found.shape == (5, channels, 4, 5)
        with Image.open(tmp_path / "a/2.png") as image:
            expected = np.asarray(image.convert(mode).resize((5, 4), Image.Resampling.BILINEAR))
        np.testing.assert_array_equal(found[1], expected.reshape(4, 5, channels).transpose(2, 0, 1))
    assert data.from_folder(tmp_path, size=6, mode="L").x.shape[2:] == (6, 6)


def test_other_sizes_and_modes_are_refused_by_name(tmp_path):
    drawn(tmp_path / "a/1.png")
    drawn(tmp_path / "b/1.png", size=(5, 4))
    with pytest.raises(
        ValueError, match=r"b/1\.png must have 4 × 5 pixels, as .*a/1\.png has, but has 5 × 4\. .* by size="
    ):
        data.from_folder(tmp_path)
    drawn(tmp_path / "b/1.png", "L")
    with pytest.raises(
        ValueError, match=r"b/1\.png must have the mode RGB, as .*a/1\.png has, but has L\. .* by mode="
    ):
        data.from_folder(tmp_path)
    Image.new("P", (5, 4)).save(tmp_path / "a/1.png")
    with pytest.raises(ValueError, match=r"a/1\.png must have the mode one of L, RGB, RGBA, but has P\."):
        data.from_folder(tmp_path)
    Image.fromarray(np.zeros((4, 5), np.uint16)).save(tmp_path / "a/1.png")
    with pytest.raises(ValueError, match=r"a/1\.png must have 8 bits per channel, but has Pillow's mode I;16"):
        data.from_folder(tmp_path, mode="L")
    for size, says in (
        ((1, 2, 3), "size must be a number, or rows"),
        (0, "size must be an integer >= 1"),
        ((4, 0.5), "size"),
    ):
        with pytest.raises(ValueError, match=says):
            data.from_folder(tmp_path, size=size)
    with pytest.raises(ValueError, match="mode must be one of 'L', 'RGB', 'RGBA', but got 'CMYK'"):
        data.from_folder(tmp_path, mode="CMYK")


def test_one_image_is_of_one_class_only(tmp_path):
    drawn(tmp_path / "a/1.png")
    with pytest.raises(ValueError, match=r"must hold at least two classes, but all 1 samples are of the class a\."):
        data.from_folder(tmp_path)


@pytest.mark.parametrize(("names", "says"), [
    (["1.png", "2.png"], "must lie as CLASS/IMAGE.png .*but there is 1.png"),
    (["a/1.png", "b/c/1.png"], "but there are a/1.png and b/c/1.png"),
    (["train/1.png", "test/1.png"], "but there is test/1.png"),
    (["a/b/c/1.png"], "but there is a/b/c/1.png"),
    (["a/1.png", "a/labels.txt"], r"labels\.txt must be an image"),
    (["a/1.png", "b/1.gif"], r"1\.gif must be an image"),
])  # fmt: skip
def test_files_in_other_places_are_named(tmp_path, names, says):
    for name in names:
        drawn(tmp_path / name, kind="PNG")
    with pytest.raises(ValueError, match=says):
        data.from_folder(tmp_path)


def test_missing_empty_and_damaged_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="none must be a folder of images, but does not exist"):
        data.from_folder(tmp_path / "none")
    with pytest.raises(
        FileNotFoundError, match=r"must hold images \(.png, .jpg, .jpeg\) as CLASS/IMAGE.png.*holds none"
    ):
        data.from_folder(tmp_path)
    drawn(tmp_path / "a/1.png")
    drawn(tmp_path / "b/1.png")
    with pytest.raises(FileNotFoundError, match=r"a/1\.png must be a folder of images, but is none"):
        data.from_folder(tmp_path / "a/1.png")
    content = (tmp_path / "b/1.png").read_bytes()
    for damage in (content[:60], b"text", b""):
        (tmp_path / "b/1.png").write_bytes(damage)
        with pytest.raises(ValueError, match=r"b/1\.png is damaged"):
            data.from_folder(tmp_path)
    (tmp_path / "b/1.png").unlink()
    (tmp_path / "b/1.png").symlink_to(tmp_path / "a/1.png")
    with pytest.raises(ValueError, match=r"b/1\.png is not a regular file but a link"):
        data.from_folder(tmp_path)
    (tmp_path / "b/1.png").unlink()
    os.mkfifo(tmp_path / "b/1.png")
    with pytest.raises(ValueError, match=r"b/1\.png is not a regular file"):
        data.from_folder(tmp_path)


def test_images_that_exceed_the_limit_are_not_decoded(tmp_path, monkeypatch):
    for name in ("a/1.png", "a/2.png", "b/1.png"):
        drawn(tmp_path / name, size=(40, 50))
    monkeypatch.setenv("FEDSTAT_MAX_BYTES", "17999")
    with pytest.raises(ValueError, match=r"its 3 images would take 18,000 bytes, but at most 17,999 are read"):
        data.from_folder(tmp_path)
    monkeypatch.setenv("FEDSTAT_MAX_BYTES", "7999")
    with pytest.raises(ValueError, match=r"\d\.png: its 40 × 50 pixels would take 8,000 bytes"):
        data.from_folder(tmp_path, size=2)


def test_a_folder_trains(tmp_path):
    for client in ("north", "south"):
        for subset in ("train", "test"):
            for name in ("a", "b"):
                for i in range(3):
                    drawn(tmp_path / subset / client / name / f"{i}.png", "L", (6, 6))
    fed = data.to_float(partition.natural(data.from_folder(tmp_path)))
    run = fl.train(fed, nets.mlp([36, 4, 2]), algorithms.fedavg(), rounds=1)
    assert np.isfinite(run["metrics/loss"]).all()
    assert run["metrics"].sizes["client"] == 2


@pytest.mark.parametrize("name", ["val", "Test"])
def test_subsets_of_other_names_are_no_clients(tmp_path, name):
    for subset in ("train", name):
        for of_class in ("cat", "dog"):
            drawn(tmp_path / subset / of_class / "0.png")
    with pytest.raises(ValueError, match=f"must be named train, test, validation, but there is .*{name}"):
        data.from_folder(tmp_path)
