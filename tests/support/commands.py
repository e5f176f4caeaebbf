"""The command from outside."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NOBODY = "host=127.0.0.1 port=1 dbname=none"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `armcore-trio` as a process with these variables and no others."""
    command = [sys.executable, "-m", "armcore_trio", *arguments]
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
