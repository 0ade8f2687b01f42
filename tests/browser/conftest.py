"""A server of JupyterLab for all tests of notebooks."""

from collections.abc import Iterator

import pytest
from jupyter_in_chromium import Lab, jupyter_lab, skip_without


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Start JupyterLab; tests write their notebooks to its folder."""
    skip_without(["jupyterlab", "ipykernel", "playwright"])
    with jupyter_lab(tmp_path_factory.mktemp("home")) as lab:
        yield lab
