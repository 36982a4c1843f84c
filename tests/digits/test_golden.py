"""The worked cases, through scripts/check_golden.py."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/check_golden.py"
GOLDEN = ROOT / "tests/digits/golden/algorithms.json"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("check_golden")


def test_all_82_worked_cases_are_met_to_1e_9():
    command = [sys.executable, str(SCRIPT), str(GOLDEN)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "82 cases: all within 1e-9" in result.stdout


@pytest.mark.parametrize("quantity", ["advantages", "loss", "grad_current"])
def test_one_wrong_digit_in_a_case_is_noticed(script: ModuleType, tmp_path: Path, quantity: str):
    content = json.loads(GOLDEN.read_text())
    content["cases"] = content["cases"][:1]
    expected = content["cases"][0]["expected"]
    if quantity == "loss":
        expected["loss"] += 1e-8
    elif quantity == "advantages":
        expected["advantages"][3] += 1e-8
    else:
        expected["grad_current"][2][1] += 1e-8
    (tmp_path / "wrong.json").write_text(json.dumps(content))
    assert script.main([str(tmp_path / "wrong.json")]) == 1


@pytest.mark.parametrize("quantity", ["advantages", "loss", "turns"])
def test_one_wrong_digit_in_a_case_with_turns_is_noticed(script: ModuleType, tmp_path: Path, quantity: str):
    content = json.loads(GOLDEN.read_text())
    content["cases"] = [case for case in content["cases"] if "turns" in case]
    assert len(content["cases"]) == 4
    for case in content["cases"]:
        if quantity == "loss":
            case["expected"]["loss"] += 1e-8
        elif quantity == "advantages":
            case["expected"]["advantages"][3][1] += 1e-8
        else:
            case["turns"][0] = [3, 2]  # the second turn's last token to the first
        (tmp_path / "wrong.json").write_text(json.dumps({"cases": [case]}))
        assert script.main([str(tmp_path / "wrong.json")]) == 1, case["name"]


def test_a_file_without_cases_proves_nothing(script: ModuleType, tmp_path: Path):
    (tmp_path / "empty.json").write_text('{"cases": []}')
    assert script.main([str(tmp_path / "empty.json")]) == 1
