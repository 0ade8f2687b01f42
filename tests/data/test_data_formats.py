"""The loaders on small binary files written here in each published format, whole, in other layouts, and damaged."""

import gzip
import pickle
import pickletools
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import loadmat, savemat

from fedstat.data import SOURCES, load, open_folder, partition, save_folder, svhn, to_float
from fedstat.data.cifar import unpickle

RNG = np.random.default_rng(0)


@pytest.fixture
def small():
    """Read files of a few rows: the published counts differ, and that is no concern of these tests."""

    def read(name, place, **options):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*were published")
            return load(name, place, **options)

    return read


def idx(values):
    values = np.asarray(values, dtype=np.uint8)
    return b"\0\0\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_mnist(place, spelling="-", pack=lambda b: b, end="", prefix="", rows=(5, 3)):
    place.mkdir(parents=True, exist_ok=True)
    x = [RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8) for n in rows]
    y = [RNG.integers(1, 10, n, dtype=np.uint8) for n in rows]
    parts = ("train", "test" if prefix else "t10k")
    for part, images, labels in zip(parts, x, y, strict=True):
        (place / f"{prefix}{part}-images{spelling}idx3-ubyte{end}").write_bytes(pack(idx(images)))
        (place / f"{prefix}{part}-labels{spelling}idx1-ubyte{end}").write_bytes(pack(idx(labels)))
    return np.concatenate(x), np.concatenate(y)


@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize(("spelling", "pack", "end"), [("-", bytes, ""), (".", bytes, ""), ("-", gzip.compress, ".gz")])
def test_idx_is_read_in_every_spelling_zipped_or_not(tmp_path, small, folder, spelling, pack, end):
    x, y = write_mnist(tmp_path / folder, spelling, pack, end)
    data = small("mnist", tmp_path)
    np.testing.assert_array_equal(data.x[:, 0], x)
    np.testing.assert_array_equal(data.y, y)
    assert data.y.dtype == np.int64
    assert data.split.values.tolist() == ["train"] * 5 + ["test"] * 3
    assert data.x.values.flags.writeable  # torch warns of arrays that are not
    np.testing.assert_array_equal(small("mnist", tmp_path, split="test").x[:, 0], x[5:])


def test_emnist_is_turned_upright_and_letters_start_at_0(tmp_path, small):
    x, y = write_mnist(tmp_path / "emnist", prefix="emnist-letters-")
    data = small("emnist-letters", tmp_path)
    np.testing.assert_array_equal(data.x[:, 0], x.swapaxes(1, 2))
    np.testing.assert_array_equal(data.y, y - 1)
    assert [len(c) for c in (data.y.attrs["names"],)] == [26]
    write_mnist(tmp_path / "emnist", prefix="emnist-balanced-")
    assert len(small("emnist-balanced", tmp_path).y.attrs["names"]) == 47


def test_another_number_of_rows_is_accepted_with_a_warning(tmp_path):
    write_mnist(tmp_path)
    with pytest.warns(UserWarning, match="MNIST: the train subset has 5 rows, but 60,000 were published"):
        load("mnist", tmp_path, split="train")


def test_a_missing_file_names_itself_the_places_and_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.delenv("FEDSTAT_DATA", raising=False)
    with pytest.raises(FileNotFoundError) as error:
        load("mnist", split="train")
    for part in (
        "train-images-idx3-ubyte.gz",
        str(tmp_path / "me" / "fedstat_data" / "mnist"),
        "lecun",
        "FEDSTAT_DATA",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("name", [n for n in SOURCES if n != "digits"])
def test_every_set_says_where_it_is_had(name, tmp_path):
    says = rf"not found in .*\(http.*python -m fedstat data fetch {name}\."
    with pytest.raises(FileNotFoundError, match=says):
        load(name, tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[:-10], "byte 3926: the header says 3936 bytes, but got 3926"),
        (lambda b: b + b"xy", "byte 3936: the header says 3936 bytes, but got 3938"),
        (lambda b: b[:9], "byte 9: it ends within its header"),
        (lambda b: b"\x89PNG" + b[4:], "byte 0: idx of unsigned bytes starts with 00 00 08"),
        (lambda b: b[:3] + b"\0" + b[4:], "byte 0: idx of unsigned bytes starts with 00 00 08"),
        (lambda b: b[:3] + b"\5" + b[4:], "byte 0: .* but got 00 00 08 05"),
        (lambda b: b"\0\0\x09" + b[3:], "byte 0: .* but got 00 00 09 03"),
        (lambda _: b"", "byte 0"),
        (lambda b: gzip.compress(b)[:-500], r"byte \d+: .*Download it again"),
        (lambda b: gzip.compress(b)[:40] + b"\xff" * 40 + gzip.compress(b)[80:], r"byte \d+: "),
    ],
)
def test_damaged_idx_names_the_file_and_the_byte(tmp_path, damage, message):
    write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"train-images-idx3-ubyte is damaged at {message}"):
        load("mnist", tmp_path, split="train")


def test_two_sets_of_emnist_are_the_same_images():
    """By class and by merge: 814,255 images (Cohen et al. 2017, table II)."""
    rows = [SOURCES[name].rows for name in ("emnist-byclass", "emnist-bymerge")]
    assert rows[0] == rows[1]
    assert sum(rows[0].values()) == 814_255


def test_images_without_labels_are_an_error(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.ones(4)))
    with pytest.raises(ValueError, match=r"5 images in .* and 4 labels in"):
        load("mnist", tmp_path, split="train")


def write_cifar(place, hundred=False, **changes):
    place.mkdir(parents=True, exist_ok=True)
    x = RNG.integers(0, 256, (4, 3072), dtype=np.uint8)
    labels = {"fine_labels": [0, 99, 5, 3], "coarse_labels": [1, 19, 0, 2]} if hundred else {"labels": [0, 9, 5, 3]}
    batch = {"data": x, "filenames": [""] * 4, **labels, **changes}
    names = ["train", "test"] if hundred else [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name in names:
        (place / name).write_bytes(pickle.dumps({k.encode(): v for k, v in batch.items()}, protocol=2))
    fine = [b"f%d" % i for i in range(100)]
    meta = {b"fine_label_names": fine, b"coarse_label_names": [b"c"]} if hundred else {b"label_names": [b"a"]}
    (place / ("meta" if hundred else "batches.meta")).write_bytes(pickle.dumps(meta, protocol=2))
    return x


def test_cifar_batches_are_joined_in_order(tmp_path, small):
    x = write_cifar(tmp_path / "cifar-10-batches-py")
    data = small("cifar-10", tmp_path)
    assert data.x.shape == (24, 3, 32, 32)
    np.testing.assert_array_equal(data.x[-4:].values.reshape(4, -1), x)
    write_cifar(tmp_path, hundred=True)
    hundred = small("cifar-100", tmp_path, split="test")
    assert (hundred.y.values.tolist(), hundred.coarse.values.tolist()) == ([0, 99, 5, 3], [1, 19, 0, 2])
    assert hundred.y.attrs["names"] == [f"f{i}" for i in range(100)]


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_code_is_refused_unrun(tmp_path, protocol):
    (tmp_path / "evil").write_bytes(pickle.dumps({b"data": Bomb(tmp_path / "ran")}, protocol=protocol))
    message = r"the pickle (asks for (pathlib|__builtin__|builtins|posix|_io)\.|has the operation DICT,)"
    with pytest.raises(ValueError, match=rf"evil is damaged at byte \d+: {message}"):
        unpickle(tmp_path / "evil")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "value", [np.array([Path()], dtype=object), np.array([None]), np.zeros(2, dtype="U3"), np.zeros(2, dtype="i4,f8")]
)
def test_arrays_of_anything_but_numbers_are_refused(tmp_path, value):
    (tmp_path / "odd").write_bytes(pickle.dumps(value, protocol=2))
    with pytest.raises(ValueError, match="which no data file needs"):
        unpickle(tmp_path / "odd")


@pytest.mark.parametrize("cut", [0, 1, 30, 400, 3000, -1])
def test_a_truncated_pickle_names_the_byte(tmp_path, cut):
    write_cifar(tmp_path)
    path = tmp_path / "test_batch"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"test_batch is damaged at byte \d+"):
        load("cifar-10", tmp_path, split="test")


def test_every_flipped_byte_of_a_pickle_is_read_or_refused_cleanly(tmp_path):
    content = pickle.dumps({b"data": np.arange(6, dtype=np.uint8), b"labels": [1, 2]}, protocol=2)
    path = tmp_path / "flipped"
    refused = set()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x15]) + content[at + 1 :])
        try:
            unpickle(path)
        except ValueError as error:
            assert "flipped is damaged at byte" in str(error)  # noqa: PT017
            refused.add(at)
    for operation, name, start in pickletools.genops(content):
        if operation.name == "GLOBAL":
            assert refused >= {*range(start, start + len(name) + 2)}, name
    assert len(refused) > 0.75 * len(content)  # the others are values, names of columns and numbers of the memo


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": np.zeros((4, 3000), np.uint8)}, "4 rows of 3072 bytes, but got uint8 of shape"),
        ({"data": np.zeros((4, 3072))}, "but got float64"),
        ({"labels": [0, 1, 2]}, "of 3 rows"),
        ({"labels": [0, 1, 2, 10]}, "labels must be integers from 0 to 9"),
        ({"labels": [0, 1, 2, -1]}, "labels must be integers from 0 to 9"),
        ({"labels": [0.0, 1.0, 2.0, 3.0]}, "labels must be integers, but 'labels' holds other values"),
    ],
)
def test_a_batch_that_is_no_batch_is_an_error(tmp_path, changes, message):
    write_cifar(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load("cifar-10", tmp_path, split="test")


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("of", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
@pytest.mark.parametrize("n", [1, 3, 40])
def test_matlab_files_are_read_as_scipy_reads_them(tmp_path, n, of, compressed):
    x, y = RNG.integers(0, 256, (32, 32, 3, n), dtype=np.uint8), RNG.integers(1, 11, (n, 1)).astype(of)
    path = tmp_path / "a.mat"
    savemat(path, {"other": {"a": 1}, "X": x, "words": np.array(["a"], object), "y": y}, do_compression=compressed)
    with path.open("rb") as stream:
        found = dict(svhn._read_arrays(path, stream))
    expected = loadmat(path)
    assert list(found) == ["X", "y"]
    for name, array in found.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name])


def test_svhn_label_10_is_the_digit_0(tmp_path, small):
    x = RNG.integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    for part in ("train", "test"):
        savemat(tmp_path / f"{part}_32x32.mat", {"X": x, "y": np.array([[1], [10], [9], [10]], dtype=np.uint8)})
    data = small("svhn", tmp_path)
    assert data.y.values.tolist() == [1, 0, 9, 0] * 2
    np.testing.assert_array_equal(data.x[6].transpose("row", "column", "channel"), x[..., 2])


@pytest.mark.parametrize(
    "content", [{"X": np.zeros((32, 32, 3, 2)), "y": [[1], [2]]}, {"X": [1]}, {"X": [1], "y": [11]}]
)
def test_a_mat_file_of_something_else_is_an_error(tmp_path, content):
    savemat(tmp_path / "test_32x32.mat", content)
    with pytest.raises(ValueError, match=r"test_32x32\.mat is damaged at byte 0"):
        load("svhn", tmp_path, split="test")


@pytest.mark.parametrize("cut", [0, 60, 200, 4000])
def test_a_truncated_mat_file_names_the_byte(tmp_path, cut):
    path = tmp_path / "test_32x32.mat"
    savemat(path, {"X": RNG.integers(0, 256, (32, 32, 3, 4), dtype=np.uint8), "y": np.ones((4, 1), np.uint8)})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"test_32x32\.mat is damaged at byte \d+"):
        load("svhn", tmp_path, split="test")


def write_tiny(place):
    base = place / "tiny-imagenet-200"
    wnids = ["n02", "n01"]
    (base / "val" / "images").mkdir(parents=True)
    (base / "wnids.txt").write_text("\n".join(wnids))
    for wnid in wnids:
        (base / "train" / wnid / "images").mkdir(parents=True)
        for i in range(2):
            grey = np.full((64, 64), 50 * i + int(wnid[1:]), dtype=np.uint8)
            image = Image.fromarray(grey if i else np.stack([grey] * 3, axis=-1))
            image.save(base / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", quality=100)
    image.save(base / "val" / "images" / "val_0.JPEG")
    (base / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t62\t62\n")
    return base


def test_tiny_imagenet_is_read_from_its_folders(tmp_path, small):
    write_tiny(tmp_path)
    data = small("tiny-imagenet", tmp_path)
    assert data.x.shape == (5, 3, 64, 64)
    order = np.argsort(data.y[:4], kind="stable")
    assert data.y.values[order].tolist() == [0, 0, 1, 1]
    assert data.x[order, 0, 0, 0].values.tolist() == [1, 51, 2, 52]
    assert (int(data.y[4]), str(data.split[4].item())) == (1, "test")
    assert (data.x.std("channel") == 0).all()


def test_a_damaged_jpeg_and_a_damaged_list_are_named(tmp_path, small):
    base = write_tiny(tmp_path)
    path = base / "train" / "n01" / "images" / "n01_0.JPEG"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"n01_0\.JPEG is damaged at byte \d+"):
        small("tiny-imagenet", tmp_path)
    (base / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn09\n")
    with pytest.raises(ValueError, match=r"val_annotations\.txt is damaged at line 1"):
        small("tiny-imagenet", tmp_path, split="test")


def test_folder_keeps_everything_and_maps_x(tmp_path):
    fed = partition.iid(load("digits"), clients=3)
    again = open_folder(save_folder(fed, tmp_path / "kept"))
    assert again.identical(fed)
    base = again.x.values
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    assert partition.one_class(again, clients=10).x.values.base is not None
    again.x[0] = 9
    assert open_folder(tmp_path / "kept").identical(fed)
    with pytest.raises(FileExistsError):
        save_folder(fed, tmp_path / "kept")
    gap = np.array(["a", None] * 3, object)
    with pytest.raises(ValueError, match="user must have a value for each sample, but it is missing for 1, 3, 5"):
        save_folder(fed.isel(sample=slice(6)).assign_coords(user=("sample", gap)), tmp_path / "gap")
    with pytest.raises(FileNotFoundError, match="that save_folder wrote"):
        open_folder(tmp_path)


def test_to_float_standardises_by_channel(tmp_path, small):
    write_cifar(tmp_path)
    data = small("cifar-10", tmp_path, split="test")
    scaled = to_float(data, mean=(0.4, 0.5, 0.6), sd=(0.2, 0.3, 0.4))
    expected = (data.x / 255 - np.reshape([0.4, 0.5, 0.6], (3, 1, 1))) / np.reshape([0.2, 0.3, 0.4], (3, 1, 1))
    assert scaled.x.dtype == np.float32
    np.testing.assert_allclose(scaled.x, expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="already scaled"):
        to_float(scaled)
    with pytest.raises(ValueError, match="sd must be > 0"):
        to_float(data, sd=0)


def test_names_and_splits_that_are_not_there_are_named():
    with pytest.raises(ValueError, match="Did you mean 'mnist'"):
        load("minst")
    with pytest.raises(ValueError, match="split must be one of 'train', 'test'"):
        load("mnist", split="valid")
    with pytest.raises(ValueError, match="digits has no published test subset"):
        load("digits", split="test")
