"""A Python environment of a test's own, for packages that can't or should not stand beside all others."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

INSTALL_S = 1200


def installed(folder: Path, *packages: str) -> Path:
    """The interpreter of a new environment that sees ours, and has these packages in front of it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=INSTALL_S)
    python = folder / "bin" / "python"
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60).stdout.strip())
    (own / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--disable-pip-version-check", *packages]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return python
