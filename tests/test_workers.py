"""Processes of pytest-xdist that die while they run tests."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_killed_worker_ends_make_test_and_its_test_is_named(tmp_path):
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_killed.py").write_text("import os\n\ndef test_this():\n    os.kill(os.getpid(), 9)\n")
    (tmp_path / "test_long.py").write_text("import time\n\ndef test_that():\n    time.sleep(300)\n")
    make = ["make", "--dry-run", "--no-print-directory", "-C", str(ROOT), "test", "VENV=ENVIRONMENT", "OPTIONS="]
    command = subprocess.run(make, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    assert "ENVIRONMENT/bin/python -m pytest" in command
    done = subprocess.run(
        ["/bin/sh", "-c", command.replace("ENVIRONMENT/bin/python", sys.executable)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert "a worker died in test_killed.py::test_this" in done.stdout
