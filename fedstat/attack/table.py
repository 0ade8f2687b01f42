"""The attack on a study's runs as a table beside published values, and its command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedstat._table_command import Asked, command
from fedstat._utils.lazy import pd
from fedstat.attack.experiment import leakage
from fedstat.results.leakage import MARGIN, LeakageResult
from fedstat.results.tables import interval, number
from fedstat.study.accuracy import of_study
from fedstat.study.collect import Grid, ordered, title_of
from fedstat.study.reference import Reference
from fedstat.study.summary import Table


def study_of(file: str, description: str, *, argv: Sequence[str] | None = None) -> int:
    """Exit status of a command that attacks the runs of one study, those of the first seed.

    Runs are trained again, from the data in the folder FEDSTAT_DATA. See
    :func:`fedstat._table_command.study_of` for the arguments.
    """
    script = Path(file).resolve()
    grid_file = script.parents[2] / "simulations" / f"{script.parent.name}.toml"

    def build(grid: Grid, asked: Asked) -> Table:
        found = of_study(grid, grid_file, script.stem).table
        result = leakage(found.loc[found["seed"] == found["seed"].min(), "path"].tolist())
        return table(result, asked.paper, name=script.stem, title=description.partition("\n")[0])

    return command(file, description, {"": build}, argv=argv)


def table(result: LeakageResult, paper: Reference, *, name: str, title: str) -> Table:
    """PSNR of the images recovered from each method, over all rounds.

    Parameters
    ----------
    result : LeakageResult
        Of one run per method.
    paper : Reference
    name : str
        The published table.
    title : str
    """
    values = result.augment()
    places = ordered(values["run"])
    values = values.assign(method=values["run"]).sort_values(
        ["labels", "run"], key=lambda x: x.map(places.index) if x.name == "run" else x, ignore_index=True
    )
    published = next(iter(paper.tables.get(name, {}).values()), {})
    values["paper"] = values["method"].map(published)
    rounds = ", ".join(map(str, result.data["round"].values))
    equal = "clients" if result.data.sizes["client"] > 1 else ""
    many = f"{result.data.sizes['client']} clients × {result.data.sizes['image']} images, by rounds done: {rounds}"
    blocks = {
        f"labels {mode}; {many}": pd.DataFrame(
            {
                "method": title_of(str(x["method"])),
                "PSNR, dB [95 %]": interval(x["estimate"], x["conf_low"], x["conf_high"], 2, sign=False, equal=equal),
                "max": number(x["maximum"], 2),
                "guess": number(x["guess"], 2),
                "over the guess [95 %]": interval(x["gain"], x["gain_low"], x["gain_high"], 2, equal=equal),
                "better": f"{100 * x['share_better']:.0f} %",
                "verdict": x["verdict"],
                "by the paper's definition": number(x["estimate_paper"], 2),
                "paper": number(x["paper"], 2),
            }
            for x in rows.to_dict("records")
        )
        for mode, rows in values.groupby("labels", sort=False)
    }
    said = (
        "PSNR: of images on [0, 1], squared errors averaged over channels too; by the paper's definition added up",
        "[95 %]: Student's, over clients' means, the clients of one run (one seed)",
        "guess: PSNR of the mean training image of the class that the attacker knows or infers; it needs no gradient",
        "better: share of images that are nearer than this guess",
        "recovered: intervals over the guess and over other clients' images of the class lie above 0",
        f"traces: only the second does; nothing: it lies below {MARGIN:g} dB; undecided: none of these",
        f"paper: reference values at the paper's own scale, {paper.source}",
    )
    return Table(title, values, blocks, said)
