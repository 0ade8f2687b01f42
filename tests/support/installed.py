"""Whether an installed fedstat is whole: python installed.py CLONE, where the wheel and not the clone is installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import files, version
from pathlib import Path

import numpy as np

import fedstat
from fedstat.reporting.document import bibliography


def main(clone: Path) -> None:
    """Leave with what is wrong, or print what was found."""
    package = Path(fedstat.__file__).parent
    if not package.is_relative_to(sys.prefix):
        sys.exit(f"fedstat must come from the wheel, in {sys.prefix}, but is {package}")

    tracked = subprocess.run(["git", "-C", clone, "ls-files", "fedstat"], capture_output=True, text=True, check=True)  # noqa: S607
    if absent := sorted(set(tracked.stdout.split()) - {str(file) for file in files("fedstat") or []}):
        sys.exit(f"the wheel lacks {', '.join(absent)}")
    if not (package / "py.typed").is_file():
        sys.exit("the wheel has no py.typed: type checkers would not see its types")
    if fedstat.__version__ != version("fedstat"):
        sys.exit(f"fedstat says that it is {fedstat.__version__}, but {version('fedstat')} is installed")

    rng = np.random.default_rng(0)
    alike = rng.normal(size=(1, 1, 20)) + 0.5 * rng.normal(size=(10, 4, 20))
    found = fedstat.split(np.concatenate([alike, rng.normal(size=(10, 2, 20))], axis=1), n_factors=1, tau=1 / 3)
    if found.shared.tolist() != [True] * 4 + [False] * 2:
        sys.exit(f"a split of four alike units and two others came out as {found.shared.tolist()}")
    for name in dir(fedstat):
        getattr(fedstat, name)
    if not bibliography().startswith("@software{fedstat,"):
        sys.exit("the bibliography, fedstat/reporting/references.bib, cannot be read from the wheel")
    whole = "a split, all public names, the bibliography"
    print(f"fedstat {fedstat.__version__} in {package}: {len(tracked.stdout.split())} files, {whole}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
