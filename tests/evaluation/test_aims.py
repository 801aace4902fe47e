"""The aims of docs/statistics.md, measured again by the benchmarks: `make campaign`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"


COMMANDS = (["coverage.py"], ["ladder_power.py", "--ladders", "60"], ["report_at_scale.py"])


@pytest.mark.campaign
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0].removesuffix(".py"))
def test_every_aim_is_met(command: list[str], tmp_path: Path) -> None:
    if command[0] != "coverage.py" and not (SHARED / "simulation" / "ladder.py").is_file():
        pytest.skip("the simulation of known runs is not beside this repository")
    extra = [str(tmp_path / "store")] if command[0] == "report_at_scale.py" else []
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    path = [sys.executable, f"benchmarks/{command[0]}", *extra, *command[1:]]
    found = subprocess.run(path, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
