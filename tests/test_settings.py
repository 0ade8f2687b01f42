"""Settings are declared once: what their fields say is what commands show and what wrong values are told."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from typing import Literal

import pytest

from fedstat import fl, motivation, sim
from fedstat._cli import Parser
from fedstat._utils.settings import add_arguments, check_fields, read_arguments, setting
from fedstat.attack.experiment import Attack
from fedstat.decompose.__main__ import DecomposeSettings as Decompose
from fedstat.fl import prepare
from fedstat.fl.job import ComputeConfig, TrainConfig
from fedstat.ntk.__main__ import TheoremSettings as Theorems
from fedstat.study import Settings

NAN = float("nan")
# What command lines cannot give, or not so; the rest stands in tests/torture/command_lines.py.
WRONG = {
    sim.Settings: [
        ({"p": "x"}, "p must be a finite number in [0, 1], but got 'x'"),
        ({"alpha": []}, "alpha must hold at least one value and none twice, but got ()"),
        ({"methods": "tru"}, "'fedavg', 'local', but got 'tru'. Did you mean 'true'?"),
        ({"clients": 2.5}, "clients must be an integer >= 1, but got 2.5"),
        ({"n_test": True}, "n_test must be an integer >= 1, but got True"),
        ({"rounds": None}, "rounds must be an integer >= 1, but got None"),
        ({"lr": NAN}, "lr must be a finite number in (0, inf), but got nan"),
        ({"tau": 1.0}, "tau must be a finite number in (0, 1), but got 1.0"),
        ({"means": "share"}, "means must be one of 'independent', 'shared', but got 'share'. Did you mean 'shared'?"),
    ],
    motivation.Settings: [
        ({"cases": "idd"}, "cases must be one of 'iid', 'one-class', but got 'idd'. Did you mean 'iid'?"),
    ],
    Settings: [
        ({"scenario": 3}, "scenario must be a string, but got 3"),
        ({"scenario": "x" * 1001}, "scenario must have at most 1,000 characters"),
        ({"net": "ml"}, "but got 'ml'. Did you mean 'mlp'?"),
        ({"norm": "grou"}, "norm must be one of 'group', 'batch', but got 'grou'. Did you mean 'group'?"),
        ({"max_samples": 1.5}, "max_samples must be an integer >= 1, but got 1.5"),
        ({"participation": "x"}, "participation must be a number or a list of numbers, but got 'x'"),
        ({"probe": "split-halves"}, "but got 'split-halves'. Did you mean 'split-half'?"),
        ({"options": [True]}, "options must be a string or a list of strings, but got [True]"),
        ({"clip": -1}, "clip must be a finite number in (0, inf), but got -1"),
        ({"clip": 1.0, "noise_multiplier": 1.0, "delta": 2.0}, "It is the probability with which ε may fail"),
        ({"noise_multiplier": 1.0}, "noise_multiplier has no effect without clip"),
    ],
    Attack: [
        ({"clients": 0}, "clients must be an integer >= 1, but got 0"),
        ({"labels": "gven"}, "labels must be one of 'given', 'inferred', 'both', but got 'gven'"),
    ],
    Theorems: [
        ({"theorem": 3}, "theorem must be one of 1, 2, but got 3"),
    ],
    Decompose: [
        ({"sensitivity": True, "n_factors": 1}, "Remove --n-factors, --init and --max-iter"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "wrong", "message"), [(kind, *case) for kind, cases in WRONG.items() for case in cases], ids=str
)
def test_a_wrong_setting_is_named_with_what_is_allowed(kind, wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**wrong)


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__module__)
def test_help_shows_every_field_with_its_text(kind):
    cli = Parser()
    add_arguments(cli, kind)
    shown = " ".join(cli.format_help().split())
    for one in fields(kind):
        assert f"--{one.name.replace('_', '-')}" in shown
        assert one.metadata["help"].split()[0] in shown


@dataclass
class _Own:
    """Settings of every type."""

    size: int = setting(3, "data", "size", low=1, high=9, aliases=("--n",))
    rates: tuple[float, ...] = setting((0.1, 1.0), "training", "rates", above=0)
    way: Literal["fast", "exact"] | None = setting(None, "training", "way to compute")
    limit: float = setting(1.0, "data", "limit", low=0, infinite=True)
    hidden: bool = setting(False, "data", "hide it")
    doubled: int = setting(2, "data", "doubled", low=0, parse=lambda text: 2 * int(text))

    def __post_init__(self) -> None:
        check_fields(self)


def test_options_come_from_the_fields():
    cli = Parser()
    groups = add_arguments(cli, _Own)
    assert [*groups] == ["data", "training"]
    argv = ["--n", "4", "--rates", "1", "2", "--way", "exact", "--hidden", "--doubled", "3"]
    chosen = read_arguments(cli.parse_args(argv), _Own)
    assert chosen == {"size": 4, "rates": (1.0, 2.0), "way": "exact", "hidden": True, "doubled": 6}
    assert read_arguments(cli.parse_args([]), _Own) == {}
    assert "--way {fast,exact}" in cli.format_help()
    assert "rates (default 0.1 1.0)" in cli.format_help()


def test_one_value_or_a_list_becomes_a_tuple():
    assert _Own(rates=0.5).rates == (0.5,)
    assert _Own(rates=[0.5, 1]).rates == (0.5, 1)


def test_bounds_are_kept():
    assert _Own(limit=float("inf")).limit == float("inf")
    for wrong in ({"size": 10}, {"size": 0}, {"rates": (0.1, 0)}, {"limit": -1}, {"limit": NAN}, {"way": "slow"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            _Own(**wrong)
    with pytest.raises(ValueError, match="size must be an integer from 1 to 9, but got 10"):
        _Own(size=10)
    with pytest.raises(ValueError, match="hidden must be true or false, but got 1"):
        _Own(hidden=1)


def test_training_has_one_set_of_defaults():
    keywords = {name: one.default for name, one in inspect.signature(fl.train).parameters.items()}
    for config in (TrainConfig(), ComputeConfig()):
        for one in fields(config):
            if one.name not in ("optimizer", "aggregator"):
                assert keywords[one.name] == getattr(config, one.name), one.name
    by_keywords = {
        "optimizer": prepare.optimizer_named(keywords["optimizer"], keywords["lr"]).name,
        "aggregator": prepare.aggregator_named(keywords["aggregator"]).name,
    }
    for made in (Settings().training(), TrainConfig()):
        named = {"optimizer": made.optimizer.name, "aggregator": made.aggregator.name}
        assert named == by_keywords
        assert vars(made) | named == vars(TrainConfig()) | named
