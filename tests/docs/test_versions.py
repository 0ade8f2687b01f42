"""Versions: the oldest that are allowed are those that are tried, and files that name fedstat's own agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import fedstat
from fedstat.reporting.document import REFERENCES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def bounds(*groups):
    return dict(one.split(">=") for group in groups for one in group if ">=" in one)


def test_the_oldest_versions_that_are_tried_are_the_bounds_of_pyproject():
    needed, extras = bounds(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    tried = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints-minimum.txt").read_text(), re.MULTILINE))
    assert needed.keys() - {"torch"} <= tried.keys()  # of torch only one version is at hand
    allowed = needed | bounds(extras["sweep"], extras["test"])
    assert tried == {name: allowed.get(name, version) for name, version in tried.items()}


def test_the_citation_is_of_this_version_and_names_its_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["authors"] == PROJECT["authors"]
    assert fedstat.__version__ == PROJECT["version"] == REFERENCES["fedstat"].fields["version"]
    assert [one["notes"] for one in citation["references"]] == [
        "FedSplit, FedFac",
        "Factorized-FL",
        "FedDecomp",
        "FedCP",
    ]


def test_continuous_integration_and_hooks_run_targets_and_tools_that_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    run = {step["run"].removeprefix("make ") for job in jobs.values() for step in job["steps"] if "run" in step}
    assert run <= targets | {"docs"}
    versions = set(jobs["check"]["strategy"]["matrix"]["python"])
    assert versions == {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"], "nothing is fetched"
