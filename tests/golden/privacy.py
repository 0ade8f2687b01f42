"""Make privacy.json: ε of a run's releases by Google's dp-accounting, each composed by hand from its own events.

dp-accounting 0.6 needs attrs < 24, which fedstat's pinned versions exclude: run this in an environment of its own,
    pip install dp-accounting==0.6.0 && python tests/golden/privacy.py   (seconds)
Every run is a list of [number of releases, share of clients, noise multipliers released together].
"""

import json
from importlib.metadata import version
from pathlib import Path

RUNS = {
    "one Gaussian release of all clients": [[1, 1.0, [1.0]]],
    "FedAvg": [[30, 0.1, [1.0]]],
    "FedAvg, little noise": [[20, 0.1, [0.5]]],
    "FedAvg, all clients": [[10, 1.0, [4.0]]],
    "FedFac dynamic": [[30, 0.1, [1.0, 2.0]]],
    "FedFac dynamic, all clients": [[5, 1.0, [6.0, 3.0]]],
    "FedFac static": [[1, 1.0, [3.0]], [30, 0.1, [1.0]]],
}
DELTA = 1e-5


def event(dp, share, sigmas):
    together = dp.ComposedDpEvent([dp.GaussianDpEvent(s) for s in sigmas])
    return dp.PoissonSampledDpEvent(share, together) if share < 1 else together


def equivalent(dp, share, sigmas):
    """As the PLD accountant takes only one Gaussian release of a sample, the release that is all of them."""
    one = dp.GaussianDpEvent(sum(s**-2 for s in sigmas) ** -0.5)
    return dp.PoissonSampledDpEvent(share, one) if share < 1 else one


def main():
    import dp_accounting as dp  # where it is installed
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    found = {}
    for name, releases in RUNS.items():
        rdp, pld = RdpAccountant(), PLDAccountant()
        for count, share, sigmas in releases:
            rdp.compose(event(dp, share, sigmas), count)
            pld.compose(equivalent(dp, share, sigmas), count)
        found[name] = {"releases": releases, "rdp": rdp.get_epsilon(DELTA), "pld": pld.get_epsilon(DELTA)}
    made = {"by": f"dp-accounting {version('dp-accounting')}", "delta": DELTA, "runs": found}
    Path(__file__).with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
