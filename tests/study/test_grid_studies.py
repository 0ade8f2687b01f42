"""Studies and sweeps in one grid, and tables of their variants."""

from __future__ import annotations

import pytest
from _tables import Reference, accuracy

from fedstat.study import collect
from fedstat.study.grid import cells, of_study, run_all


def test_studies_cross_only_what_belongs_together_and_sweeps_are_expanded(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(
        """
        [scale.one]
        rounds = 1
        [[dataset]]
        scenario = "a"
        studies = ["main", "sweep"]
        [[dataset]]
        scenario = "b"
        studies = ["main"]
        [[method]]
        algorithm = "fedavg"
        [[method]]
        algorithm = "fedprox"
        studies = ["sweep"]
        sweep = { mu = [0.1, 1], lr = [0.01, 0.1] }
        [[method]]
        algorithm = "fedper"
        studies = ["main"]
        """
    )

    def found(**study):
        return [(one.scenario, one.algorithm, one.given.get("mu"), one.lr) for one in cells(path, scale="one", **study)]

    plain, swept = 0.1, [("a", "fedprox", mu, lr) for mu in (0.1, 1) for lr in (0.01, 0.1)]
    shared = [("a", "fedavg", None, plain), ("b", "fedavg", None, plain)]
    assert found(study="main") == [
        shared[0], ("a", "fedper", None, plain), shared[1], ("b", "fedper", None, plain)
    ]  # fmt: skip
    assert found(study="sweep") == [shared[0], *swept]
    assert sorted(map(str, found())) == sorted(map(str, {*found(study="main"), *found(study="sweep")}))
    with pytest.raises(ValueError, match=r"study must be one of 'main', 'sweep'.* but got 'mian'"):
        found(study="mian")
    path.write_text(path.read_text().replace("[0.1, 1]", "0.1"))
    with pytest.raises(ValueError, match=r"mu in a sweep of .* must be a list of values, but got 0.1"):
        found()


def test_variants_of_a_study_are_told_apart_by_what_differs_in_it(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(
        """
        clients = 4
        max_samples = 20
        rounds = 1
        participation = 1.0
        keep_weights = "none"
        [[dataset]]
        partition = "iid"
        [[method]]
        algorithm = "fedavg"
        studies = ["weak", "strong"]
        [[method]]
        algorithm = "fedprox"
        studies = ["weak", "strong"]
        mu = 0.1
        [[method]]
        algorithm = "fedprox"
        studies = ["strong"]
        mu = 10
        """
    )
    for _ in run_all(cells(path), tmp_path / "runs"):
        pass
    runs = collect.collect(tmp_path / "runs")
    assert list(of_study(runs, path, "weak").table["method"]) == ["fedavg", "fedprox"]
    strong = of_study(runs, path, "strong")
    assert sorted(strong.table["method"]) == ["fedavg", "fedprox, mu=0.1", "fedprox, mu=10.0"]
    paper = Reference({"one": {"digits, iid": {"fedprox, mu=10.0": 0.5}}})
    made = accuracy(strong, paper, name="one", title="T", reference="fedavg")
    published = dict(zip(made.values["method"], made.values["paper"].fillna(0), strict=True))
    assert published == {"fedavg": 0, "fedprox, mu=0.1": 0, "fedprox, mu=10.0": 0.5}
    assert "FedProx, mu=10.0" in made.text()
    path.write_text(path.read_text().replace("max_samples = 20", "max_samples = 30"))
    with pytest.raises(ValueError, match=r"must have runs of the study 'weak', but has none. Train them with"):
        of_study(runs, path, "weak")
    path.write_text(f"{path.read_text()}\n[scale.quick]\nrounds = 2\n[scale.cpu]\nrounds = 3\n")
    with pytest.raises(ValueError, match=r"--study weak --scale quick \(or --scale cpu\)$"):
        of_study(runs, path, "weak")
