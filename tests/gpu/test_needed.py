"""Each check that needs a GPU says so in one sentence where there is none, and ends with exit code 2."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

CHECKS = sorted(path.stem for path in Path(__file__).parent.glob("check_*.py"))


def test_there_are_checks() -> None:
    assert len(CHECKS) >= 13


@pytest.mark.parametrize("name", CHECKS)
def test_without_a_gpu_a_check_says_so_and_does_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("telescope._launch.this_host.list_installed_gpus", lambda: ())
    monkeypatch.setattr(sys, "argv", [f"tests.gpu.{name}"])
    check = importlib.import_module(f"tests.gpu.{name}")
    with pytest.raises(SystemExit) as ended:
        sys.exit(check.main())
    assert ended.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("this check needs ")
    assert err.count("\n") == 1


def test_a_pytorch_without_cuda_is_no_help_though_cards_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.gpu.needed import need_gpus

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("telescope._launch.this_host.list_installed_gpus", lambda: ("0", "1"))
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(SystemExit):
        need_gpus(2)
    assert "needs a PyTorch built with CUDA" in capsys.readouterr().err
    monkeypatch.setattr("torch.version.cuda", "12.8")
    need_gpus(2)
