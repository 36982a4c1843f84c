"""Numbers that a command could do nothing with are refused, in place of a check of nothing that says all is well."""

from __future__ import annotations

from importlib import import_module

import pytest

from telescope.cli.arguments import above_zero, from_one, from_zero

COMMANDS = [
    ("telescope.cli.env.check", ["countdown", "--prompts", "0"], "argument --prompts: '0' is not a whole number from 1 on"),
    ("telescope.cli.env.check", ["countdown", "--samples", "-1"], "argument --samples: '-1' is not a whole number from 1 on"),
    ("telescope.cli.doctor", ["logprobs", "--samples", "0"], "argument --samples: '0' is not a whole number from 1 on"),
    ("telescope.cli.bundle", ["out", "--part-mb", "0"], "argument --part-mb: '0' is not a whole number from 1 on"),
    ("telescope.cli.replay", ["run", "--step", "0"], "argument --step: '0' is not a whole number from 1 on"),
    ("telescope.cli.runs", ["tail", "run", "-n", "0"], "argument -n/--lines: '0' is not a whole number from 1 on"),
    ("telescope.cli.runs", ["stop", "run", "--timeout", "nan"], "argument --timeout: 'nan' is not a number from 0 on"),
    ("telescope.cli.runs", ["stop", "run", "--timeout=-1"], "argument --timeout: '-1' is not a number from 0 on"),
    ("telescope.cli.export", ["1", "--run-dir", "r", "--to", "t", "--shard-gb", "-2"],
     "argument --shard-gb: '-2' is not a number above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "arguments", "sentence"), COMMANDS)
def test_a_number_out_of_range_is_wrong_usage(module: str, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture):
    try:
        code = import_module(module).main(arguments)
    except SystemExit as left:  # argparse's own way out, which some of them take
        code = left.code
    assert code == 2
    assert sentence in capsys.readouterr().err


def test_numbers_in_range_are_taken_as_they_are():
    assert (from_one("1"), from_one("40"), above_zero("0.5"), from_zero("0")) == (1, 40, 0.5, 0.0)
