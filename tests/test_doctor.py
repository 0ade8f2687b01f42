"""``fedstat doctor``: what is missing, too old or broken is named with the way out, and the rest still told."""

from __future__ import annotations

import os
import platform
import re
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import fedstat
from fedstat.reporting import doctor
from fedstat.reporting.doctor import Package

ROOT = Path(fedstat.__file__).parents[1]
DISTRIBUTIONS = cache(metadata.packages_distributions)


@pytest.fixture(autouse=True)
def no_search_of_all_packages_for_each_test(monkeypatch):
    monkeypatch.setattr(metadata, "packages_distributions", DISTRIBUTIONS)


@pytest.fixture
def sound(monkeypatch):
    """A machine on which every package can be imported, without trying."""
    monkeypatch.setattr(doctor, "probed", lambda _: ({}, {"threads": 3, "gpus": ["a GPU, 80 GiB"], "blas": ["b 1"]}))


@pytest.mark.usefixtures("sound")
def test_all_is_well_where_every_package_is_sound(capsys, tmp_path):
    assert doctor.main(["--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "threads of torch: 3" in said
    assert "a GPU, 80 GiB" in said
    assert f"Data sets in {tmp_path}\n" in said
    assert "GPU         a GPU" in said
    assert len(said.splitlines()) < 50
    assert said.startswith(f"fedstat {metadata.version('fedstat')} in {Path(fedstat.__file__).parent}\n")
    extras = re.findall(r"^  (\w+) ", said.partition("Extras")[2].partition("Machine")[0], re.MULTILINE)
    assert extras == ["data", "flower", "huggingface", "mlflow", "optuna", "privacy", "sweep", "tensorboard", "wandb"]


def test_extras_for_users_are_those_that_the_documentation_installs():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    installed = {extra for page in pages for extra in re.findall(r"pip install .*\[([a-z]+)\]", page.read_text())}
    _, extras = doctor.asked_for()
    assert installed <= set(extras) <= set(metadata.metadata("fedstat").get_all("Provides-Extra"))
    assert all(extras.values())


def test_a_broken_torch_is_named_with_the_command_that_mends_it(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "probed", lambda _: ({"torch": "ImportError: libx.so"}, {}))
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "  torch cannot be imported: ImportError: libx.so: pip install --force-reinstall 'torch>=" in said
    assert "threads of torch: unknown" in said
    assert max(map(len, said.partition("Machine")[2].partition("Folder")[0].splitlines())) <= 80


@pytest.mark.usefixtures("sound")
def test_a_missing_package_and_one_that_is_too_old_are_named(monkeypatch, capsys):
    wrong = [
        doctor._package(Requirement("no-such-package-of-fedstat>=2")),
        doctor._package(Requirement("numpy<1")),
    ]
    monkeypatch.setattr(
        doctor, "asked_for", lambda: (wrong, {"sweep": [Package(Requirement("dask"), None, "missing")]})
    )
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "no-such-package-of-fedstat missing: pip install 'no-such-package-of-fedstat>=2'" in said
    assert "does not fit <1: pip install 'numpy<1'" in said
    assert "dask missing: pip install 'fedstat[sweep]'" in said


def test_modules_are_tried_where_they_can_bring_down_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "raises_here.py").write_text("raise ImportError('no library')")
    (tmp_path / "ends_python.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    broken, machine = doctor.probed(["json", "raises_here", "ends_python", "threadpoolctl"])
    assert broken == {"raises_here": "ImportError: no library", "ends_python": "its import ends Python (status 3)"}
    assert "blas" in machine


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_the_instructions_that_torch_and_onednn_use_are_told(monkeypatch, capsys):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    _, machine = doctor.probed(["torch"])
    if platform.machine() == "x86_64":
        assert machine["onednn"] == "Intel SSE4.1"
        assert machine["torch"] == "DEFAULT"
    monkeypatch.setattr(doctor, "probed", lambda _: ({}, machine))
    doctor.main([])
    assert f"  CPU         torch: {machine['torch']}; oneDNN: {machine['onednn']}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("sound")
def test_data_sets_are_found_by_the_files_that_loading_would_read(tmp_path, capsys):
    file = tmp_path / "svhn" / "train_32x32.mat"
    file.parent.mkdir()
    file.write_bytes(b"not a data set")
    assert doctor.main(["--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"  svhn              {file}\n" in said
    assert "Missing data sets: mnist" in said
    assert doctor.main(["--data-dir", str(tmp_path), "--read"]) == 0
    assert "is damaged" in next(line for line in capsys.readouterr().out.splitlines() if str(file) in line)
