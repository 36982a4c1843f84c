"""What importing a part brings along, in a fresh interpreter: the command line stays quick, pure floors stay pure."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIND = """
import importlib, pkgutil, sys
import telescope
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for part in pkgutil.walk_packages(getattr(package, "__path__", ()), name + "."):
        if not part.name.endswith("__main__"):
            importlib.import_module(part.name)
print(*sorted({"torch", "transformers", "vllm", "hydra", "zmq", "wandb"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("parts", "brought"),
    [
        (("telescope.records", "telescope.settings", "telescope.maths", "telescope.algorithms", "telescope.flow"), set()),
        (("telescope.config", "telescope.environments"), set()),
        (("telescope._launch",), {"zmq"}),
        (("telescope.wire",), {"zmq"}),
        (("telescope.run", "telescope.compose", "telescope.cli"), {"hydra", "zmq"}),
        (("telescope.orchestrator", "telescope.runlog"), {"zmq"}),
    ],
)
def test_a_part_imports_nothing_heavy(parts: tuple[str, ...], brought: set[str]) -> None:
    answer = subprocess.run([sys.executable, "-c", FIND, *parts], capture_output=True, text=True, timeout=100, check=False)
    assert answer.returncode == 0, answer.stderr
    assert set(answer.stdout.split()) <= brought
