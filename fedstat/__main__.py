"""``python -m fedstat``: the commands there are."""

from fedstat import __version__

COMMANDS = {
    "fedstat.sim": "simulation study on model (8): ways to split neurons, side by side",
    "fedstat.sim.recovery": "for which κ factor analysis finds the true split",
    "fedstat.decompose": "weights of any origin -> shared and client-specific units",
    "fedstat.motivation": "neurons' outputs over clients: entropy, its peaks, its relation to the split",
    "fedstat.ntk": "FedFac's theorems against training",
}

if __name__ == "__main__":
    print(f"fedstat {__version__}\n")
    for name, purpose in COMMANDS.items():
        print(f"  python -m {name:<22} {purpose}")
    print("\nEach has --help. In Python: import fedstat; help(fedstat)")
