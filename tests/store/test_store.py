"""A run on disk opens at any moment, knows where it comes from, and is never overwritten by accident."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading

import numpy as np
import pytest
import xarray as xr
import zarr
from small_runs import NET, dense, same

import fedstat
from fedstat import store
from fedstat.fl import algorithms, nets, train
from fedstat.store import Group, Variable, files, write

LAYOUT = {
    "metrics": Group(
        xr.Dataset(coords={"round": ("round", np.arange(1, 5)), "client": ("client", np.arange(3))}),
        {
            "accuracy": Variable(("round", "client"), "float32", {"round": 2}, {"long_name": "test accuracy"}),
            "shared": Variable(("round",), "bool"),
        },
    ),
    "split/fc1": Group(
        xr.Dataset(coords={"unit": ("unit", np.array(["a", "b"], object))}), {"nu": Variable(("unit",), "float64")}
    ),
}


def create(path, **config):
    return store.create(path, LAYOUT, store.provenance("A run", {"seed": 3, **config}, command="made up"))


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (None, "has layout 1 of an earlier fedstat, but this fedstat reads layout 4. Make it again, or read it"),
        (3, "has layout 3 of an earlier fedstat, but this fedstat reads layout 4. Make it again, or read it"),
        (5, "has layout 5 of a newer fedstat, but this fedstat reads layout 4. Update fedstat: pip"),
    ],
)
def test_a_store_of_another_layout_gets_one_error_with_both_versions(number, says, tmp_path):
    path, options = tmp_path / "run.zarr", {"net": NET, "algorithm": algorithms.fedavg(), "rounds": 1}
    train(dense(), out=path, **options)
    root = path / "zarr.json"
    content = json.loads(root.read_text())
    content["attributes"] |= {"layout": number}
    if number is None:
        del content["attributes"]["layout"]
    root.write_text(json.dumps(content))
    for read in (
        store.open_run, store.config_of, fedstat.icc, fedstat.report, fedstat.fl.finish, fedstat.load,
        lambda path: store.open_run(path, verify=False), lambda path: train(dense(), out=path, resume=True, **options),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"run\.zarr {re.escape(says)}"):
            read(path)


def test_what_is_written_is_read_and_the_rest_is_missing(tmp_path):
    writer = create(tmp_path / "run.zarr")
    writer.write("metrics/accuracy", (slice(1, 3),), np.full((2, 3), 0.5))
    writer.write("metrics/shared", (1,), True)
    writer.commit()
    run = store.open_run(tmp_path / "run.zarr")
    expected = np.full((4, 3), np.nan)
    expected[1:3] = 0.5
    np.testing.assert_array_equal(run["metrics/accuracy"], expected)
    assert run["metrics/shared"].values.tolist() == [False, True, False, False]
    assert run["metrics/accuracy"].attrs["long_name"] == "test accuracy"
    assert run["split/fc1"]["unit"].values.tolist() == ["a", "b"]
    assert np.isnan(run["split/fc1/nu"]).all()


@pytest.mark.parametrize(
    ("dtype", "missing"), [("int8", -1), ("int16", -1), ("int64", 0), ("uint8", 0), ("float32", np.nan)]
)
def test_a_longer_store_has_the_values_of_the_old_one_and_missing_values_read_as_their_dtype_says(
    dtype, missing, tmp_path
):
    path = tmp_path / "run.zarr"
    groups = [{"a": store.group({"x": range(n)}, labels=("x", dtype))} for n in (2, 4)]
    settings = [{"n": n} for n in (2, 4)]
    attrs = [store.provenance("A run", config, command="made up") for config in settings]
    with store.create(path, groups[0], attrs[0]) as writer:
        writer.write("a/labels", (), np.zeros(2, dtype))
        writer.commit()
    store.extend(path, groups[1], {"config": attrs[1]["config"]}, {"n": (2, 4)})
    np.testing.assert_array_equal(store.open_run(path)["a/labels"], [0, 0, missing, missing])


@pytest.mark.parametrize("size", [1_000, 100_000])
def test_only_chunks_above_64_kib_pass_to_another_thread(tmp_path, size, monkeypatch):
    values = np.random.default_rng(0).normal(size=size)  # does not compress
    layout = {"group": Group(xr.Dataset(coords={"x": np.arange(size)}), {"value": Variable(("x",), "f8")})}
    keys = []
    real = files.Journaled.set_sync

    def noting(self, key, value):
        keys.append((key, threading.current_thread().name))
        real(self, key, value)

    monkeypatch.setattr(files.Journaled, "set_sync", noting)
    writer = store.create(tmp_path / "run.zarr", layout, store.provenance("A run", {}, command="made up"))
    writer.write("group/value", (), values)
    writer.commit()
    names = {name.startswith("asyncio_") for key, name in keys if key == "group/value/c.0"}
    assert names == {size > 2**13}
    np.testing.assert_array_equal(store.open_run(tmp_path / "run.zarr")["group/value"], values)


def test_a_layout_has_the_files_that_xarray_and_zarr_write_for_each_group(tmp_path):
    columns = {
        "int64": np.arange(3), "int32": np.arange(3, dtype="i4"), "float": np.array([0, np.nan, 2]),
        "zero": np.zeros(3), "bool": np.arange(3) > 1, "text": np.array(["a", "", "c"], object),
        "many": np.arange(10_000), "complex": np.array([1j, 0, 2]), "date": np.arange(3).astype("M8[s]"),
        "numbers of NumPy": np.array([np.int64(3), np.int64(0), np.int64(2)], object),
    }  # fmt: skip
    groups = {
        f"{kind}/{name}": Group(
            xr.Dataset({} if kind != "constant" else {"y": ("x", v)}, {"x": ("x", v, {"unit": kind})}),
            {"shared": Variable(("x",), "bool"), "nu": Variable(("x",), "f8", {"x": 2}, {"long_name": kind})},
        )
        for kind in ("plain", "other text", "constant")
        for name, v in columns.items()
    }
    write.lay_out(tmp_path / "run", groups, {"seed": 3})
    plain = zarr.open_group(tmp_path / "plain", mode="w")
    for name, group in groups.items():
        encoding = dict.fromkeys(group.coords.variables, files.CODED)
        group.coords.to_zarr(tmp_path / "plain", group=name, mode="a", consolidated=False, encoding=encoding)
        for key, v in group.variables.items():
            plain[name].create_array(
                key, shape=group.coords.x.shape, chunks=(v.chunk.get("x", group.coords.sizes["x"]),), dtype=v.dtype,
                fill_value=False if v.dtype == "bool" else np.nan, dimension_names=v.dims, attributes=dict(v.attrs),
                chunk_key_encoding={"name": "default", "separator": "."}, **files.CODED,
            )  # fmt: skip
    for name in groups:
        stored, expected = (
            {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
            for root in (tmp_path / "run" / name, tmp_path / "plain" / name)
        )
        assert len(expected) >= 4
        assert stored == expected, name


def test_provenance_names_settings_versions_and_time(tmp_path):
    create(tmp_path / "run.zarr", lr=0.1).finish()
    attrs = store.open_run(tmp_path / "run.zarr").attrs
    assert json.loads(attrs["config"]) == {"seed": 3, "lr": 0.1}
    assert json.loads(attrs["versions"]).keys() >= {"python", "torch", "numpy", "fedstat"}
    assert attrs["title"] == "A run"
    assert attrs["seed"] == 3
    assert attrs["started"] <= attrs["ended"]


def test_an_existing_path_is_not_touched(tmp_path):
    (tmp_path / "run.zarr").mkdir()
    (tmp_path / "run.zarr" / "precious").write_text("data")
    with pytest.raises(FileExistsError, match="exists already"):
        create(tmp_path / "run.zarr")
    assert (tmp_path / "run.zarr" / "precious").read_text() == "data"


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda _, mode: not mode & os.W_OK)  # root may write anywhere
    with pytest.raises(PermissionError, match="cannot be written: you may not write to"):
        create(tmp_path / "new" / "run.zarr")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_layout_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(write, "lay_out", fail)
    with pytest.raises(KeyboardInterrupt):
        create(tmp_path / "run.zarr")
    assert not list(tmp_path.iterdir())


def test_of_two_runs_started_at_once_one_is_refused_and_the_other_is_whole(tmp_path, monkeypatch):
    lay_out = write.lay_out

    def slow(*parts):
        lay_out(*parts)
        monkeypatch.undo()
        create(tmp_path / "run.zarr", lr=0.2).finish()  # the other process is faster

    monkeypatch.setattr(write, "lay_out", slow)
    with pytest.raises(FileExistsError, match="by another process"):
        create(tmp_path / "run.zarr", lr=0.1)
    assert store.config_of(tmp_path / "run.zarr")["lr"] == 0.2
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]


def test_resuming_with_other_settings_names_them(tmp_path):
    with create(tmp_path / "run.zarr", lr=0.1):
        pass
    with store.resume(tmp_path / "run.zarr", {"seed": 3, "lr": 0.1}, command="made up") as writer:
        assert not writer.finished
    with pytest.raises(ValueError, match=r"other settings \(lr: 0.1 stored, 0.2 now\)"):
        store.resume(tmp_path / "run.zarr", {"seed": 3, "lr": 0.2}, command="made up")


def test_no_run_is_said_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no run at"):
        store.open_run(tmp_path)


def test_a_damaged_run_is_named(tmp_path):
    create(tmp_path / "run.zarr").finish()
    (tmp_path / "run.zarr" / "metrics" / "zarr.json").write_text("{")
    with pytest.raises(ValueError, match=r"run.zarr is damaged: metrics/zarr.json has 1 bytes in place of \d+"):
        store.open_run(tmp_path / "run.zarr")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with a split and with weights before averaging."""
    path = tmp_path_factory.mktemp("trained") / "run.zarr"
    train(dense(), NET, algorithms.fedfac(["fc1"], kappa=0.5), rounds=2, checkpoints=[2], out=path)
    return path


def test_a_changed_byte_of_any_metadata_is_named_when_a_run_is_opened(trained, tmp_path):
    """Of each file one byte, at places that move through the files; then each file is deleted."""
    path = shutil.copytree(trained, tmp_path / "run.zarr")
    files = [file for file in sorted(path.rglob("zarr.json")) if file.parent != path]
    assert len(files) > 40
    for i, file in enumerate(files):
        sound, name = file.read_bytes(), file.relative_to(path).as_posix()
        changed = bytearray(sound)
        changed[i * 37 % len(sound)] ^= 1
        file.write_bytes(changed)
        with pytest.raises(store.DamageError, match=f"run.zarr is damaged: {name} has another checksum than"):
            store.open_run(path)
        file.unlink()
        with pytest.raises(store.DamageError, match=f"run.zarr is damaged: {name} is missing"):
            store.open_run(path)
        file.write_bytes(sound)
    same(store.open_run(path), store.open_run(trained))


@pytest.mark.filterwarnings("ignore:Object at")
@pytest.mark.parametrize("verify", [None, False])
def test_no_array_is_lost_without_a_word_where_there_are_no_checksums(trained, tmp_path, verify):
    path = shutil.copytree(trained, tmp_path / "run.zarr")
    shutil.rmtree(path / store.JOURNAL)
    (path / "metrics" / "notes").mkdir()
    assert "round" in store.open_run(path, verify=verify)["metrics"].coords
    file = path / "metrics/round/zarr.json"
    file.write_text(file.read_text().replace('"data_type"', '"datD_type"'))
    with pytest.raises(store.DamageError, match=r"run.zarr is damaged: the metadata of 'metrics/round' describe no"):
        store.open_run(path, verify=verify)


READERS = {
    "load": lambda run: run.load(),
    "summary": fedstat.summary,
    "report": fedstat.report,
    "icc": fedstat.icc,
    "fa": lambda run: fedstat.fa(run, n_factors=1),
    "split": fedstat.split,
    "bootstrap": lambda run: fedstat.bootstrap(run, n_factors=1, n_boot=2),
    "client_weights": lambda run: fedstat.fl.client_weights(run, "fc1").values,
    "client_clusters": lambda run: fedstat.client_clusters(run, n_clusters=2),
    "compare_runs": lambda run: fedstat.study.compare_runs({"a": [run], "b": [run]}),
    "score_curves": lambda run: fedstat.plot.score_curves(run),
    "client_boxplot": lambda run: fedstat.plot.client_boxplot(run),
    "communality": lambda run: fedstat.plot.communality(run),
    "partition": lambda run: fedstat.plot.partition(run),
    "rounds": lambda run: fedstat.plot.rounds(run),
}
GONE = {
    "deleted": lambda path: shutil.rmtree(path),
    "moved": lambda path: path.rename(path.with_name("elsewhere.zarr")),
    "its groups deleted": lambda path: [shutil.rmtree(group) for group in path.iterdir() if group.is_dir()],
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("way", GONE)
def test_of_a_run_that_is_gone_no_numbers_are_made_up(trained, tmp_path, reader, way):
    path = shutil.copytree(trained, tmp_path / "run.zarr")
    run = store.open_run(path)
    GONE[way](path)
    with pytest.raises(FileNotFoundError, match=r"run\.zarr: \S+ was deleted or moved since .* its data are gone"):
        READERS[reader](run)


def test_a_run_opened_by_a_relative_path_is_read_from_another_folder(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = store.open_run(trained.name)
    monkeypatch.chdir(tmp_path)
    same(run, store.open_run(trained))
    assert run["metrics/accuracy"].notnull().all()


def test_of_a_killed_process_is_cleared_what_is_ours_and_nothing_else(tmp_path):
    """Drafts, half replaced stores and staged files; not a draft in the making, nor what only has such a name."""
    attrs = store.provenance("A run", {}, command="made up")
    for name in ("run.zarr", "run.zarr.partial-abcdefgh", "run.zarr.replaced-01234567"):
        store.create(tmp_path / name, LAYOUT, attrs).finish()
    (tmp_path / "run.zarr" / "journal" / "7").write_bytes(b"staged")
    mine = [
        tmp_path / "run.zarr.partial-mybackup",
        tmp_path / "run.zarr.replaced-0123456789",
        tmp_path / "run.zarr.old",
    ]
    for path in mine:
        path.mkdir()
        (path / "precious").write_text("data")
    (tmp_path / "run.zarr.partial-abcdefgh" / "journal" / "lock").touch()
    (tmp_path / "run.zarr.partial-atworkzz" / "journal").mkdir(parents=True)
    with store.resume(tmp_path / "run.zarr", {}, command="made up") as writer:
        assert writer.finished
    kept = [*mine, tmp_path / "run.zarr.partial-atworkzz", tmp_path / "run.zarr"]
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert not (tmp_path / "run.zarr" / "journal" / "7").exists()


def test_a_store_that_was_being_replaced_comes_back(tmp_path):
    with create(tmp_path / "run.zarr") as writer:
        writer.finish()
    (tmp_path / "run.zarr").rename(tmp_path / "run.zarr.replaced-01234567")
    assert store.open_run(tmp_path / "run.zarr").attrs["title"] == "A run"
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]


def test_what_replaces_a_store_through_a_link_stands_where_the_link_leads(tmp_path):
    attrs = store.provenance("A run", {}, command="made up")
    (tmp_path / "far").mkdir()
    (tmp_path / "run.zarr").symlink_to(tmp_path / "far" / "run.zarr")
    for number in (1, 2):
        result = xr.DataTree(xr.Dataset({"x": number}))
        store.save(
            tmp_path / "far" / "run.zarr" if number == 1 else tmp_path / "run.zarr", result, attrs, overwrite=True
        )
    assert (tmp_path / "run.zarr").is_symlink()
    assert store.open_run(tmp_path / "far" / "run.zarr", verify=True)["x"] == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_the_old_store_is_kept_while_something_else_stands_in_its_place(tmp_path):
    create(tmp_path / "run.zarr").finish()
    (tmp_path / "run.zarr").rename(tmp_path / "run.zarr.replaced-01234567")
    (tmp_path / "run.zarr").mkdir()
    store.settle(tmp_path / "run.zarr")
    assert (tmp_path / "run.zarr.replaced-01234567" / "zarr.json").exists()


def test_a_store_has_one_writer_at_a_time(tmp_path):
    with create(tmp_path / "run.zarr") as writer:
        with pytest.raises(BlockingIOError, match=r"is being written by another process\. Wait until that process"):
            store.resume(tmp_path / "run.zarr", {"seed": 3}, command="made up")
        writer.commit()
    with store.resume(tmp_path / "run.zarr", {"seed": 3}, command="made up"):
        pass


def test_a_run_that_fails_before_anything_is_committed_leaves_nothing(tmp_path):
    def fail(path):
        with create(path) as writer:
            writer.write("metrics/accuracy", (0,), 1.0)
            raise KeyError

    for name in ("run.zarr", "runs/new/run.zarr"):
        with pytest.raises(KeyError):
            fail(tmp_path / name)
        assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    with pytest.raises(KeyError):
        fail(tmp_path / "mine" / "runs" / "run.zarr")
    assert [p.name for p in tmp_path.rglob("*")] == ["mine"]


def test_a_commit_that_failed_half_way_can_be_done_again(tmp_path, monkeypatch):
    with create(tmp_path / "run.zarr") as writer:
        for name, value in (("metrics/accuracy", 0.5), ("metrics/shared", True)):
            writer.write(name, (slice(0, 2),), value)
        place, placed = writer.journal._place, []

        def fail_at_the_second(draft, key):
            if placed:
                raise OSError("interrupted")
            placed.append(key)
            place(draft, key)

        monkeypatch.setattr(writer.journal, "_place", fail_at_the_second)
        with pytest.raises(OSError, match="interrupted"):
            writer.commit()
        monkeypatch.undo()
        writer.write("metrics/accuracy", (2,), 0.25)
        writer.finish()
    run = store.open_run(tmp_path / "run.zarr", verify=True)
    assert run["metrics/accuracy"].values[:, 0].tolist()[:3] == [0.5, 0.5, 0.25]
    assert run["metrics/shared"].values.tolist() == [True, True, False, False]


def test_a_long_log_is_written_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(store.journal, "_LINES", 5)
    with create(tmp_path / "run.zarr") as writer:
        for i in range(20):
            writer.write("metrics/accuracy", (i % 4,), float(i))
            writer.commit()
        assert len((tmp_path / "run.zarr" / "journal" / "log").read_bytes().splitlines()) <= 6
    assert not store.damage(tmp_path / "run.zarr", checksums=True)


def test_a_commit_between_the_log_and_the_files_is_no_damage(tmp_path, monkeypatch):
    with create(tmp_path / "run.zarr") as writer:
        writer.write("metrics/accuracy", (0,), 1.0)
        writer.commit()
        read_log = store.journal.read_log

        def and_then_commit(root):
            found = read_log(root)
            monkeypatch.undo()
            writer.write("metrics/accuracy", (1,), np.arange(3.0))
            writer.commit()
            return found

        monkeypatch.setattr(store.journal, "read_log", and_then_commit)
        assert not store.damage(tmp_path / "run.zarr", checksums=True)


def test_stores_are_the_one_at_a_path_or_those_inside_and_no_drafts(tmp_path):
    for name in ("b.zarr", "a"):
        store.save(tmp_path / name, xr.DataTree(), store.provenance("x", {}, command="made up"))
    (tmp_path / "empty.zarr").mkdir()
    (tmp_path / "figures").mkdir()
    for left in ("b.zarr.partial-0a1b_c2d", "b.zarr.replaced-0123abcd", "b.repeat"):
        (tmp_path / left / store.JOURNAL).mkdir(parents=True)
    assert [one.name for one in store.stores(tmp_path)] == ["a", "b.zarr", "empty.zarr"]
    assert store.stores(tmp_path / "a") == [tmp_path / "a"]
    for path in (tmp_path / "figures", tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"there is no run at .*, and none in it"):
            store.stores(path)


LAYERS = [*(f"fc{i}" for i in (9, 10, 1, 11, 2)), "conv.0", "attention", "b", "a", "zz"]  # neither sorted nor by number


def test_a_group_is_what_its_short_form_says():
    metrics = store.group(
        {"round": range(1, 5), "client": 3},
        accuracy=("round client", "float32", "test accuracy", {"round": 2}),
        shared=("round", "bool"),
    )
    split = store.group({"unit": ["a", "b"]}, nu=(("unit",), "float64"))
    for made, expected in ((metrics, LAYOUT["metrics"]), (split, LAYOUT["split/fc1"])):
        xr.testing.assert_identical(made.coords, expected.coords)
        assert made.variables == expected.variables
    assert split.coords["unit"].dtype == object


def test_a_group_has_its_chunk_sizes_and_its_known_arrays():
    sizes, attrs = np.array([4, 6, 8]), {"long_name": "layer of the network"}
    made = store.group(
        {"case": ["x"], "client": 3, "layer": ("layer", [1, 2], attrs), "n_test": ("client", sizes)},
        {"case": 1, "client": 2},
        w=("case client layer", "float32", {"units": "m"}, {"client": 3}),
        n_train=("client", sizes, "training samples"),
    )
    assert made.variables == {
        "w": Variable(("case", "client", "layer"), "float32", {"case": 1, "client": 3}, {"units": "m"})
    }
    assert list(made.coords.data_vars) == ["n_train"]
    assert made.coords["n_train"].attrs == {"long_name": "training samples"}
    assert made.coords["layer"].attrs == attrs
    assert made.coords["n_test"].dims == ("client",)


def test_a_group_leaves_out_dims_that_it_does_not_use():
    made = store.group({"round": 2, "client": 3, "n_train": ("client", [1, 2, 3])}, seconds=("round", "float64"))
    assert list(made.coords.coords) == ["round", "n_train"]


def test_arrays_may_have_the_names_of_arguments():
    made = store.group({"round": 2}, **{"coords": ("round", "bool"), "chunk": ("round", "bool"), "a b": ("", "bool")})
    assert list(made.variables) == ["coords", "chunk", "a b"]
    assert made.variables["a b"].dims == ()


def test_groups_are_joined():
    first = store.group({"round": 2, "client": 3}, loss=("round client", "float32"))
    made = first | store.group({"n_train": ("client", [1, 2, 3])}, epsilon=("round", "float64"))
    xr.testing.assert_identical(made.coords, first.coords.assign_coords(n_train=("client", [1, 2, 3])))
    assert list(made.variables) == ["loss", "epsilon"]


def laid_out(path):
    layer = Group(xr.Dataset(coords={"unit": np.arange(2)}), {"w": Variable(("unit",), "float32")})
    groups = {"zeta": layer, **{f"weights/{name}": layer for name in LAYERS}, "alpha": layer}
    store.create(path, groups, store.provenance("A run", {}, command="made up")).finish()


def saved(path):
    layer = xr.Dataset({"w": ("unit", np.zeros(2))})
    tree = xr.DataTree.from_dict({"/zeta": layer, **{f"/weights/{name}": layer for name in LAYERS}, "/alpha": layer})
    store.save(path, tree, store.provenance("A result", {}, command="made up"))


WRITERS = {"create": laid_out, "save": saved}


@pytest.mark.parametrize("made", WRITERS)
def test_groups_and_layers_have_their_order_whenever_a_store_is_opened(made, tmp_path):
    WRITERS[made](path := tmp_path / "run.zarr")
    others = {"create": "zeta weights alpha", "save": "zeta alpha weights"}[made].split()
    for _ in range(5):
        run = store.open_run(path, verify=False)
        assert list(run.children) == others
        assert list(run["weights"].children) == LAYERS
        run.close()


def test_a_run_keeps_the_networks_order_of_layers(tmp_path):
    net = nets.mlp([6, *[4] * 11, 1])
    how = {"checkpoints": [1], "keep_weights": ["fc12", "fc2", "fc10"], "out": tmp_path / "run.zarr"}
    for rounds in (1, 2):  # the second makes the first longer
        train(dense(), net, algorithms.fedfac(["fc10", "fc2"]), rounds=rounds, resume=rounds == 2, **how)
        run = store.open_run(tmp_path / "run.zarr")
        assert list(run["weights"].children) == ["fc2", "fc10", "fc12"]
        assert list(run["split"].children) == list(nets.layers(net))
    assert list(fedstat.icc(run, layer="*", stage="aggregated")) == ["fc2", "fc10", "fc12"]


def test_a_known_array_takes_no_chunk():
    with pytest.raises(ValueError, match=r"must be one chunk, but got chunk=\{'client': 2\}. Remove chunk"):
        store.group({"client": 4}, n=("client", np.arange(4), "samples", {"client": 2}))
