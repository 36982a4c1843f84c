"""`python -m telescope env check`: what it shows, what it warns of, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from telescope.cli.env import main
from telescope.cli.env.check_policies import GoldenAnswers
from telescope.environments.base import Prompt, Reward, SingleTurn
from telescope.environments.graders.pool import GraderProcess
from telescope.records import PromptRef, RolloutOrder, Sampling
from tests.environments.test_answer_form import BETWEEN_MARKS, KEPT, OPENED, STRIPPED, chatml, open_template

ODD = '''
import os
from telescope.environments.base import Prompt, Reward, SingleTurn

class Odd(SingleTurn):
    """Everything that is worth a warning."""

    reward_min = 0.0
    reward_max = 1.0
    metrics_ranges = {"share": (0.0, 1.0), "never": (0.0, 1.0)}
    splits = ("train",)
    broken: int = -1
    """The prompt whose reward raises."""
    drawn: bool = False
    """Whether prompts depend on the process."""

    def prompts(self, split):
        last = str(os.getpid()) if self.drawn else "bbbbb"
        return [Prompt(({"role": "user", "content": "a" * n},), answer="ab") for n in (1, 2, 3, 40)] + [
            Prompt(({"role": "user", "content": last},), answer="c")
        ]

    def reward(self, prompt, answer):
        size = len(prompt.turns[0]["content"])
        if size == self.broken:
            raise KeyError("gold")
        metrics = {"share": 2.0} if size == 1 else {"share": 0.5, "now_and_then": 1.0}
        return Reward(float(size), metrics, tags=("long",) if size > 2 else ())
'''


@pytest.fixture
def odd(tmp_path: Path) -> list[str]:
    home = tmp_path / "plugins" / "environments"
    home.mkdir(parents=True)
    (home / "odd.py").write_text(ODD)
    return ["check", "odd", "--config-dir", str(tmp_path), "rollout.max_tokens=8", "inference.max_model_len=28"]


def test_the_right_answers_of_countdown_earn_one_and_the_tokens_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "countdown", "num_numbers=2", "--prompts", "2", "--no-second-process", "rollout.max_tokens=16"]) == 0
    said = capsys.readouterr().out
    assert "environments.countdown: 100,000 train, 512 eval prompts" in said
    assert "sampled" in said
    assert "<|assistant|>" in said
    rows = [line.split() for line in said.splitlines() if line.strip().startswith(("0 ", "1 ", "2 ", "3 "))]
    assert [(row[0], row[1], row[2], row[3]) for row in rows] == [
        ("0", "0", "1", "1"),
        ("1", "0", "1", "1"),
        ("2", "1", "1", "1"),
        ("3", "1", "1", "1"),
    ]
    metrics = [line.split() for line in said.splitlines() if line.startswith(("exact", "valid_format", "all_numbers"))]
    assert metrics == [[name, "1", "1", "1", "0", "to", "1"] for name in ("exact", "valid_format", "all_numbers")]
    assert "warning: all 4 rewards are 1: nothing can be learnt from that (the right answers were played, not" in said
    assert "4 of 4 rollouts scored, 1 warning" in said


def test_each_oddity_has_its_warning(odd: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*odd, "--no-second-process", "--samples", "1"]) == 0
    said = capsys.readouterr().out
    for warning in (
        "1 train prompts have more than 20 tokens and are left out",
        "3 rewards lie outside what is stated, e.g. 2",
        "metric share lies outside what is stated, e.g. 2",
        "metric now_and_then is there in 3 of 4 rollouts",
        "metric never has a stated range and never came",
    ):
        assert f"warning: {warning}" in said
    assert "[long]" in said
    assert "stated rewards: 0 to 1" in said


def test_a_failure_is_told_with_its_kind_and_the_exit_code(odd: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*odd, "--no-second-process", "broken=2"]) == 1
    said = capsys.readouterr().out
    assert "failure of the grader, 2 times: environments.odd: KeyError: 'gold' (" in said
    assert "6 of 8 rollouts scored" in said


def test_answers_come_from_a_file_turn_by_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "answers.jsonl"
    script.write_text(json.dumps("nonsense") + "\n" + json.dumps(["ab", "ba"]) + "\n")
    arguments = ["check", "reverse_letters", "--answers", str(script), "--prompts", "1", "--no-second-process"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "'nonsense'" in said
    assert "'ab'" in said
    script.write_text("[1]\n")
    assert main(arguments) == 1
    assert "line 1 must be a text" in capsys.readouterr().err


def test_the_tiny_model_answers_in_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "countdown", "--model", "tiny", "--prompts", "2", "--samples", "4", "--no-second-process"]
    assert main([*arguments, "rollout.max_tokens=16"]) == 0
    first = capsys.readouterr().out
    assert "8 of 8 rollouts scored" in first


def test_a_preset_is_chosen_as_for_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "guess_letter", "experiment=guess_letter", "model=tiny", "--prompts", "1", "--no-second-process"]
    assert main(arguments) == 0
    assert "2 of 2 rollouts scored" in capsys.readouterr().out


def test_a_preset_of_ones_own_is_an_environment_by_its_name(odd: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With its settings, which further words change."""
    home = Path(odd[odd.index("--config-dir") + 1])
    (home / "env").mkdir()
    (home / "env" / "odder.yaml").write_text("name: odd\nkwargs: {broken: 1}\n")
    assert main(["check", "odder", *odd[2:], "--no-second-process"]) == 1
    said = capsys.readouterr().out
    assert "environments.odder: 4 train prompts" in said
    assert "6 of 8 rollouts scored" in said
    assert main(["check", "odder", "broken=-1", *odd[2:], "--no-second-process"]) == 0


def test_a_file_that_hydra_does_not_see_is_told(odd: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    home = Path(odd[odd.index("--config-dir") + 1])
    (home / "env").mkdir()
    (home / "env" / "odder.yml").write_text("name: odd\n")
    assert main([*odd, "--no-second-process"]) == 1
    assert "env/odder.yml is not read: presets end in .yaml, so rename it to odder.yaml" in capsys.readouterr().err


def test_long_names_of_metrics_keep_the_columns_in_line(odd: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(odd[3]) / "plugins/environments/odd.py"
    file.write_text(ODD.replace("now_and_then", "a_name_of_more_than_twenty_two_letters"))
    assert main([*odd, "--no-second-process", "--samples", "1"]) == 0
    said = capsys.readouterr().out.splitlines()
    rows = [line for line in said if line.startswith(("metric ", "reward ", "share ", "a_name_of_more"))]
    assert len({len(line.rpartition("   ")[0]) for line in rows}) == 1


HANGS = "        import threading; threading.Event().wait()\n"
HUNG_SET_UP = f"""
    async def set_up(self):
        from telescope.environments.threads import run_function
        await run_function(self.load)

    def load(self):
{HANGS}"""


@pytest.mark.parametrize(
    ("text", "setting", "said"),
    [
        (ODD.replace("        size =", f"{HANGS}        size ="), "rollout.timeout_s=0.5", "ran out in the environment's own"),
        (ODD + HUNG_SET_UP, "environments.odd.set_up_timeout_s=0.5", "set_up_timeout_s=0.5"),
    ],
    ids=["reward", "set_up"],
)
def test_a_thread_that_hangs_does_not_keep_the_check_from_ending(odd: list[str], text: str, setting: str, said: str) -> None:
    (Path(odd[3]) / "plugins/environments/odd.py").write_text(text)
    arguments = [*odd, "--no-second-process", "--prompts", "1", "--samples", "1", setting]
    ended = subprocess.run(
        [sys.executable, "-m", "telescope", "env", *arguments], capture_output=True, text=True, timeout=110, check=False
    )
    assert ended.returncode == 1
    assert said in ended.stdout + ended.stderr


def test_what_cannot_be_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "countdwn"]) == 1
    assert "there is no environment 'countdwn'. Did you mean countdown?" in capsys.readouterr().err
    assert main(["check", "countdown", "num_numbrs=3"]) == 1
    assert "num_numbers" in capsys.readouterr().err
    assert main(["check", "countdown", "--answers", "nowhere.jsonl"]) == 1
    assert "--answers nowhere.jsonl can't be read" in capsys.readouterr().err
    assert main(["check", "countdown", "nothing"]) == 2
    assert "'nothing' is not key=value" in capsys.readouterr().err
    assert main(["chek"]) == 2
    assert "usage: telescope env" in capsys.readouterr().err


@pytest.mark.parametrize(("drawn", "said", "code"), [("false", "the same", 0), ("true", "OTHERS", 1)])
def test_a_second_process_must_make_the_same_prompts(
    odd: list[str], drawn: str, said: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*odd, f"drawn={drawn}", "--samples", "1"]) == code
    assert f"prompts in another process: {said}" in capsys.readouterr().out


TAGGED = """
from telescope.environments.base import Prompt, Reward, SingleTurn
from telescope.environments.graders.pool import grade

def judge(answer, right):
    return float(answer == f"<a>{right}</a>")

class Tagged(SingleTurn):
    reward_min = 0.0
    reward_max = 1.0
    splits = ("train",)

    def prompts(self, split):
        return [Prompt(({"role": "user", "content": "ab"[n % 2] * (n + 1)},), answer=str(n)) for n in range(4)]

    async def reward(self, prompt, answer):
        return Reward(await grade(judge, answer, prompt.answer))
"""
SAID = """
    def right_answer(self, prompt):
        return f"<a>{prompt.answer}</a>"
"""


SUMMED = """
from telescope.environments.base import Prompt, Reward, SingleTurn

class Summed(SingleTurn):
    reward_min = 0.0
    reward_max = 1.0
    metrics_ranges = {"whole": (0.0, 1.0)}

    def prompts(self, split):
        return [Prompt(({"role": "user", "content": str(n)},), answer=str(n)) for n in range(4)]

    def reward(self, prompt, answer):
        return Reward(TOTAL, metrics={"whole": TOTAL})
"""


@pytest.fixture
def tagged(tmp_path: Path) -> list[str]:
    home = tmp_path / "plugins" / "environments"
    home.mkdir(parents=True)
    (home / "tagged.py").write_text(TAGGED)
    return ["check", "tagged", "--config-dir", str(tmp_path), "--no-second-process"]


def rewards(said: str) -> list[str]:
    _, _, table = said.partition("\nrollout  prompt   reward")
    return [line.split()[2] for line in table.partition("\n\n")[0].splitlines()[1:]]


def test_right_answers_that_the_reward_does_not_take_are_warned_of_and_their_form_can_be_said(
    tagged: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tagged) == 0
    said = capsys.readouterr().out
    assert rewards(said) == ["0"] * 8
    assert "warning: the right answers of 4 prompts do not earn the 1 that is stated, e.g. prompt 0 earns 0" in said
    (Path(tagged[3]) / "plugins/environments/saying.py").write_text(TAGGED.replace("Tagged", "Saying") + SAID)
    assert main(["check", "saying", *tagged[2:]]) == 0
    said = capsys.readouterr().out
    assert rewards(said) == ["1"] * 8
    assert "do not earn" not in said


def test_grader_processes_are_kept_between_rollouts_and_their_start_is_no_time_of_the_environment(
    tagged: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts: list[float] = []
    really = GraderProcess.start

    async def start(memory_mb: int) -> GraderProcess:
        starts.append(memory_mb)
        await asyncio.sleep(5.0)
        return await really(memory_mb)

    monkeypatch.setattr(GraderProcess, "start", start)
    assert main([*tagged, "--prompts", "4", "--samples", "4"]) == 0
    said = capsys.readouterr().out
    assert len(starts) <= 4
    (longest,) = re.findall(r"own time: median .* longest ([0-9.]+) ms", said)
    assert float(longest) < 5000


def test_a_whole_reward_that_is_a_sum_is_the_whole_but_for_rounding(
    tagged: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0.7 + 0.2 + 0.1 < 1.0 < 1.0000000000000002
    for at, total in enumerate(("0.7 + 0.2 + 0.1", "1.0000000000000002")):
        text = SUMMED.replace("Summed", f"Summed{at}").replace("TOTAL", total)
        (Path(tagged[3]) / f"plugins/environments/summed{at}.py").write_text(text)
        assert main(["check", f"summed{at}", *tagged[2:]]) == 0
        said = capsys.readouterr().out
        assert rewards(said) == ["1"] * 8
        assert "do not earn" not in said
        assert "outside what is stated" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("reasoning_gym", "task=chain_sum", "rollout.max_tokens=32", "inference.max_model_len=512"),
        ("countdown", "answer_tag=answer", "rollout.max_tokens=48", "inference.max_model_len=128"),
        ("wordle", "rollout.max_tokens=32", "inference.max_model_len=1024"),
        ("hendrycks_math", "data_dir={data}", "eval_split=null", "held_out=1", "rollout.max_tokens=32"),
        ("questions", "path={data}", "question_field=problem", "scoring=number", "answer_form=boxed", "rollout.max_tokens=32"),
        ("gpqa_diamond", "data_dir={gpqa}", "rollout.max_tokens=32", "inference.max_model_len=512"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_the_right_answer_is_said_in_the_form_that_the_task_wants(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, gpqa = tmp_path / "train.jsonl", tmp_path / "gpqa.csv"
    rows = [{"problem": f"What is {n} and 1?", "solution": f"so \\boxed{{{n + 1}}}", "answer": str(n + 1)} for n in range(9)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ",".join(["Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3))])
    gpqa.write_text(f"Question,{options}\n" + "".join(f"q{n},right,wrong,false,no\n" for n in range(4)))
    words = [word.replace("{data}", str(data)).replace("{gpqa}", str(gpqa)) for word in arguments]
    long = ["cluster.env={VLLM_ALLOW_LONG_MAX_MODEL_LEN: '1'}"]
    assert main(["check", *words, *long, "--prompts", "2", "--samples", "1", "--no-second-process"]) == 0
    said = capsys.readouterr().out
    assert rewards(said) == ["1", "1"], said
    assert "do not earn" not in said


def test_oddities_of_the_chat_template_are_warnings(odd: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    template = "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}.{% endfor %}"
    assert main([*odd, "--no-second-process", "--samples", "1", f'model.chat_template="{template}"']) == 0
    said = capsys.readouterr().out
    for warning in ("writes '.' behind an answer", "writes the same with and without add_", "writes the date"):
        assert f"warning: the chat template {warning}" in said
    assert main([*odd, "--no-second-process", "--samples", "1"]) == 0
    assert "the chat template" not in capsys.readouterr().out


class Known(SingleTurn):
    def prompts(self, split: str) -> list[Prompt]:
        return [Prompt(({"role": "user", "content": "6 * 7"},), answer="42")]

    def reward(self, prompt: Prompt, answer: str) -> Reward:
        return Reward(1.0)


MARKED = chatml(
    "{%- if m.thinking -%}<|START_THINKING|>{{ m.thinking }}<|END_THINKING|>{%- endif -%}{{ m.content }}",
    header="<|START_THINKING|>",
)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        pytest.param(KEPT, "42", id="nothing opened"),
        pytest.param(BETWEEN_MARKS, "42", id="nothing opened, own marks"),
        pytest.param(OPENED, "\n</think>\n42", id="a tag"),
        pytest.param(STRIPPED, "</think>42", id="a tag, and no field for thoughts"),
        pytest.param(MARKED, "<|END_THINKING|>42", id="a mark of its own"),
    ],
)
async def test_the_right_answer_is_said_behind_the_thought_that_the_template_has_opened(source: str, said: str) -> None:
    template, task = open_template(source), Known()
    policy = GoldenAnswers(template, task, {"train": task.prompts("train")})
    prompt = template.render(task.prompts("train")[0].turns)
    order = RolloutOrder(0, 0, 0, 0, PromptRef("task", "train", 0), 1)
    sampled = await policy.answer(order, 0, prompt.ids, Sampling(1.0, 100, 1))
    assert template.decode(sampled.ids[:-1].tolist()) == said


LEAVES = """
import os, signal
from pathlib import Path
from telescope.environments.base import Prompt, SingleTurn

class Leaves(SingleTurn):
    splits = ("train",)
    place: str

    async def set_up(self):
        Path(self.place).write_text("a sandbox somewhere else")

    async def tear_down(self):
        Path(self.place).unlink()

    def prompts(self, split):
        return [Prompt(({"role": "user", "content": "a"},), answer="b")]

    def reward(self, prompt, answer):
        assert Path(self.place).exists()
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
"""


def test_what_an_environment_has_made_goes_with_ctrl_c_even_where_its_reward_hangs(tmp_path: Path) -> None:
    home = tmp_path / "plugins" / "environments"
    home.mkdir(parents=True)
    (home / "leaves.py").write_text(LEAVES)
    command = [sys.executable, "-m", "telescope", "env", "check", "leaves", f"place={tmp_path}/made", "-cd", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "Interrupted.")
    assert not (tmp_path / "made").exists()
