"""tools/damage.py: every command with every damage of each file that it reads."""

import re
import subprocess
import sys

import pytest
from runs import REPO_ROOT


@pytest.mark.slow
def test_no_damage_is_silent_or_a_traceback():
    command = [sys.executable, "-m", "tools.damage"]
    done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [int(count) for count in re.findall(r"\d+", done.stdout.splitlines()[-1])]
    assert sum(counts) >= 400 and counts[-2:] == [0, 0]
