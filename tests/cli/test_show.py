"""`telescope show RUN_DIR`, on run directories that are made up row by row: going on, ended, failed, damaged, empty."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from telescope.cli.main import main
from telescope.cli.show.advice import Advice, advise
from telescope.cli.show.curves import make_curve
from telescope.cli.show.figures import EvalFigures, RepeatedAlert, RunFigures, RunSettings, measure_overlap, read_figures
from telescope.cli.show.page import PageStyle, describe
from telescope.runlog import checkpoints
from telescope.runlog.holder import hold
from telescope.runlog.identity import new_identity, write_identity
from telescope.runlog.layout import RunDirectory
from telescope.runlog.schema import STREAMS
from telescope.runlog.sealing import seal

SECOND = 1_000_000_000
CONFIG = {
    "number_of_steps": 12,
    "trainer": {"learning_rate": 1e-5, "seq_len": 300},
    "rollout": {"group_size": 2, "max_tokens": 100},
    "inference": {"max_model_len": 300, "engine": "vllm"},
    "orchestrator": {"max_async_rollout": 1, "max_off_policy_steps": 8, "max_concurrent_prompts_per_server": 32},
    "environments": {"sums": {"name": "sums"}},
    "eval": {"pass_above": 0.5},
}


def write(run: RunDirectory, stream: str, rows: Iterable[Mapping[str, Any]], *, segment: int = 0, sealed: bool = False) -> None:
    path = run.live("orchestrator", stream, segment)
    path.parent.mkdir(parents=True, exist_ok=True)
    base = {"time_ns": 0, "mono_ns": 0}
    lines = [json.dumps({**base, "seq": segment * 10_000 + number, **row}) for number, row in enumerate(rows)]
    path.write_text("\n".join(lines) + "\n")
    if sealed:
        seal(run, "orchestrator", STREAMS[stream], segment)


def rollout(number: int, reward: float, **more: Any) -> dict[str, Any]:
    return {
        "rollout_id": number, "group_id": number // 2, "environment": "sums", "index": number // 2, "status": "scored",
        "reward": reward, "finish_reason": "stop", "prompt": f"what is {number} + 1?", "completion": f"it is {number}",
        "golden_answers": [str(number + 1)], "started_ns": SECOND, "generated_ns": 3 * SECOND, "scored_ns": 4 * SECOND, **more,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """12 steps of 10 s, from a reward of 0 to one of 0.55; sealed but for the newest rollouts."""
    run = RunDirectory.create(tmp_path / "run")
    write_identity(run, new_identity("mine", datetime.now(UTC), ""))
    run.config_json.write_text(json.dumps(CONFIG))
    run.cmdline.write_text(f"python -m telescope.run 'env=[sums]' number_of_steps=12 run_dir={run.path}\n")
    run.exit_json.write_text('{"exit_code": 0}')
    run.status_json.write_text('{"step": 12, "steps": 12}')
    policy = [
        {
            "version": version,
            "cut_off": version == 12,
            "metrics": {
                "reward/policy": version / 20, "sample/exact": version / 24, "reward/policy/unfinished": 1.0,
                "rollouts/completion_tokens/mean": 50.0 - version, "rollouts/stop_reason_length_pct": 10.0,
                "groups/begun": 4.0, "groups/discarded": 1.0,
            },
        }
        for version in range(13)
    ]  # fmt: skip
    steps = [
        {
            "step": step,
            "time_ns": (100 + 10 * step) * SECOND,
            "metrics": {
                "entropy": 1.0 - step / 20, "kl_divergence_inference": 0.01, "staleness_mean": 1.0, "grad_norm": 0.5,
                "rollouts/scored": 9.0, "rollouts/failed/grader": 1.0, "updates": 1.0, "timing_step_total": 10.0,
                "timing_step_active": 7.0, "timing_waiting_for_data": 2.0, "timing_weight_sync/total": 0.5,
                "timing_weight_sync/pause/max": 0.1,
            },
        }
        for step in range(1, 13)
    ]  # fmt: skip
    groups = [{"group_id": number, "state": "pending", "reason": ""} for number in range(10)]
    groups += [{"group_id": number, "state": "complete", "reason": ""} for number in range(8)]
    groups += [{"group_id": number, "state": "discarded", "reason": "zero_advantage"} for number in range(2)]
    groups += [
        {"group_id": 8, "state": "cancelled", "reason": "off_policy"},
        {"group_id": 9, "state": "failed", "reason": "no luck"},
    ]
    failed = [{"status": "error", "environment": "sums", "failure": "grader", "cause": "KeyError: 'x'"}] * 3
    for number in range(2):
        write(run, "policy", policy[7 * number : 7 * number + 7], segment=number, sealed=True)
    write(run, "step_metrics", steps, sealed=True)
    write(run, "groups", groups, sealed=True)
    write(run, "rollouts", [*(rollout(number, 0.0) for number in range(8)), *failed], sealed=True)
    write(run, "rollouts", [rollout(number, number % 2) for number in range(8, 16)], segment=1)
    busy = [{"server": f"server-{one}", "done_ns": (115 + 10 * step) * SECOND, "queued_s": 0.5, "generated_s": 5.0}
            for step in range(12) for one in range(2)]  # fmt: skip
    write(run, "turns", busy)
    write(run, "alerts", [{"level": "warning", "source": "core", "message": f"{count} groups are late"} for count in (1, 2, 3)])
    for step, whole in ((10, True), (12, False)):  # of weights alone no run goes on
        facts = checkpoints.Complete(1, step, step, "mine", "a", "", 1, whole, 0, 0.0, checkpoints.now())
        checkpoints.finish(checkpoints.begin(run.checkpoints, step, "a"), facts)
    evals = [{"eval": "held", "step": step, "state": "complete", "reward": step / 20, "reward_error": 0.02} for step in (0, 10)]
    write(run, "evals", [*evals, {"eval": "held", "step": 12, "state": "cut off"}])
    return run


def shown(run: RunDirectory, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    capsys.readouterr()
    assert main(["show", str(run.path), *options]) == 0
    return capsys.readouterr().out


def test_a_run_that_never_left_its_start_up_says_who_was_not_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = RunDirectory.create(tmp_path / "run")
    write_identity(run, new_identity("mine", datetime.now(UTC), ""))
    run.config_json.write_text(json.dumps(CONFIG))
    run.exit_json.write_text('{"exit_code": 130, "interrupted": 2}')
    said = "".join(shown(run, capsys).split())
    assert f"orchestrator never became ready. Read {run.path}/logs/orchestrator.log.".replace(" ", "") in said
    run.status_json.write_text('{"state": "starting", "missing": ["server-0", "worker-0"]}')
    said = "".join(shown(run, capsys).split())
    assert f"server-0 and 1 more never became ready. Read {run.path}/logs/server-0.log.".replace(" ", "") in said


def test_every_part_of_the_page_is_read_from_the_rows(run: RunDirectory, capsys: pytest.CaptureFixture[str]):
    page = shown(run, capsys, "--width", "100")
    assert page.startswith(f"{run.path} · done · step 12 of 12\n  Reward 0.1 → 0.45 over 12 versions of the weights: higher (")
    lines = {line[2:17].strip(): line.split() for line in page.splitlines()}
    assert lines["reward/policy"][-4:] == ["0.1", "0.45", "0", "0.55"]  # the version that was cut off does not count
    assert lines["exact"][-4:-2] == ["0.0833", "0.375"]
    assert lines["answer tokens"][-4:-2] == ["48", "41"]
    assert lines["equal groups %"][-1] == "25"
    assert lines["failed %"][-1] == "10"
    assert lines["entropy"][-4:] == ["0.85", "0.5", "0.4", "0.95"]
    assert lines["held"][-2:] == ["0", "0.5"]
    assert "2 times, steps 0 to 10; the last: 0.500 ± 0.020\n" in page
    said = " ".join(page.split())
    assert "10 begun, 8 scored; 2 discarded for equal rewards (20% of the begun, 25% of the scored)" in said
    assert "of the scored), with a mean reward of 0; 2 of them" in said
    assert "with 0 throughout; 1 too old; 1 failed" in said
    assert "groups failed: no luck × 1" in page
    assert "sums: 3 of 19 attempts failed" in page
    assert "grader: KeyError: 'x' × 3" in page
    assert "alert (× 3): core: 3 groups are late" in page


def test_wrong_and_right_answers_are_of_different_prompts_the_newest_first(run: RunDirectory, capsys):
    page = shown(run, capsys, "--samples", "3").splitlines()
    wrong = page.index("Wrong (reward 0.5 or less), of the newest 16 answers: prompt → answer | golden")
    assert page[wrong + 1 : wrong + 4] == [
        f"       0 what is {number} + 1? → it is {number} | {number + 1}" for number in (14, 12, 10)
    ]
    right = page.index("Right (reward above 0.5), of the newest 16 answers: prompt → answer | golden")
    assert page[right + 1] == "       1 what is 15 + 1? → it is 15 | 16"
    assert not page[right + 4]
    assert "what is" not in shown(run, capsys, "--samples", "0")


def test_where_all_answers_are_wrong_the_page_says_so(run: RunDirectory, capsys):
    write(run, "rollouts", [rollout(number, 0.5) for number in range(8, 16)], segment=1)
    page = shown(run, capsys)
    assert "None of the newest 16 answers has a reward above 0.5 (eval.pass_above)." in page
    assert "Right (" not in page


def test_the_best_version_is_the_one_in_the_middle_of_the_best_place_and_weights_alone_are_saved_too(run: RunDirectory):
    figures = read_figures(run, "done", 0)
    assert (figures.checkpoints, figures.saved, figures.best_version) == ((10,), (10, 12), 9)  # of versions 7 to 11
    made = make_curve("reward/policy", [0.1, 0.2, 0.7, 0.8, 0.9, 0.8, 0.3, 0.2])
    assert made is not None
    assert (made.best, made.best_at) == (pytest.approx(0.8), 4)  # of the values 2 to 5


def test_the_page_says_who_waits_for_whom(run: RunDirectory, capsys):
    page = shown(run, capsys, "--width", "120")
    assert "trainer    70% working, 20% waiting for a batch, 10% else" in page
    assert "servers    50% with a request, 50% idle; 1 requests at once on each of 2" in page
    assert "rollouts   2 s generating, 1 s scoring, 0.5 s queued a request; the slowest 5 % take 1.0 × the median" in page
    assert "weights    0.5 s an update, generation paused 1.0% of the time" in page
    assert "  The servers wait for the trainer.\n" in page


def test_time_with_a_request_is_counted_within_the_steps_alone():
    assert measure_overlap([(0, 2), (1, 3)], [(0, 4)]) == pytest.approx((0.75, 4 / 3))
    assert measure_overlap([(0, 10)], [(2, 4), (6, 8)]) == pytest.approx((1.0, 1.0))
    assert measure_overlap([(5, 6)], [(0, 10)]) == pytest.approx((0.2, 1.0))  # from the first request on
    assert measure_overlap([], [(0, 10)]) == (0.0, 0.0)
    assert measure_overlap([(5, 6)], []) == (0.0, 0.0)


def test_what_to_try_next_rests_on_the_run_and_names_its_own_command(run: RunDirectory, capsys):
    page = shown(run, capsys)
    assert "1. 3 of 19 attempts at sums failed; most often: grader: KeyError: 'x'." in page
    assert f"telescope runs resume {run.path} number_of_steps=24" in page  # from the checkpoint of step 10
    assert "\n       telescope plan --calibrate" in page
    assert "'env=[sums]' number_of_steps=12\n" in page


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_page_keeps_to_the_width_but_for_commands_and_to_two_screens(run: RunDirectory, capsys, width: int):
    long = [
        rollout(
            number, number % 2, prompt="a long question " * 90, completion="so and so " * 400, golden_answers=["word " * 90]
        )
        for number in range(8, 40)
    ]
    write(run, "rollouts", long, segment=1)
    lines = shown(run, capsys, "--width", str(width)).splitlines()
    assert max(len(line) for line in lines if not line.startswith("       telescope ")) <= width
    assert len(lines) <= 100
    assert not any("\x1b" in line for line in lines)
    drawn = next(line for line in lines if "reward/policy" in line)
    assert "█" in drawn


def test_less_than_eighty_columns_are_eighty(run: RunDirectory, capsys):
    assert shown(run, capsys, "--width", "20") == shown(run, capsys, "--width", "80")


def test_an_encoding_without_blocks_gets_ascii(run: RunDirectory):
    figures = read_figures(run, "done", 5)
    page = "\n".join(describe(figures, advise(figures), PageStyle(80, encoding="ascii")))
    assert page.isascii()
    assert "_.:" in page or "_.::-" in page


def test_a_terminal_has_titles_in_bold(run: RunDirectory):
    figures = read_figures(run, "done", 5)
    page = describe(figures, [], PageStyle(80, colours=True))
    assert page[0].startswith("\x1b[1m")
    assert page[0].endswith("\x1b[0m")


def test_what_a_model_writes_can_not_move_the_cursor(run: RunDirectory, capsys):
    write(run, "rollouts", [rollout(number, 0.0, completion="\x1b[2Jboo\r\n\x07!") for number in range(8, 16)], segment=1)
    page = shown(run, capsys)
    assert "[2Jboo !" in page
    assert not set(page) & set("\x1b\r\x07")


def test_json_has_all_numbers_and_the_advice(run: RunDirectory, capsys):
    told = json.loads(shown(run, capsys, "--json"))
    assert (told["state"], told["step"], told["groups"]["too_old"]) == ("done", 12, 1)
    assert told["curves"][0]["name"] == "reward/policy"
    assert len(told["curves"][0]["points"]) == 12
    assert told["advice"][0]["rule"] == "failures"
    assert told["time"]["trainer_works"] == pytest.approx(0.7)
    assert [one["reward"] for one in told["right"]] == [1.0] * 4


def test_a_run_that_goes_on_is_shown_as_it_stands(run: RunDirectory, capsys):
    run.exit_json.unlink()
    hold(run)
    assert shown(run, capsys).startswith(f"{run.path} · running · step 12 of 12\n")


def test_a_run_that_failed_before_a_step_says_why_and_where_to_look(tmp_path: Path, capsys):
    run = RunDirectory.create(tmp_path / "run")
    write_identity(run, new_identity("mine", datetime.now(UTC), ""))
    run.exit_json.write_text('{"exit_code": 70}')
    run.run_failure.write_text("server-0 was killed by SIGKILL.\n")
    page = shown(run, capsys)
    assert page.startswith(f"{run.path} · failed · step 0\n  server-0 was killed by SIGKILL.\n")
    assert f"telescope runs tail {run.path} --once" in page


def test_several_environments_are_told_apart(run: RunDirectory, capsys):
    run.config_json.write_text(json.dumps({**CONFIG, "environments": {"sums": {"name": "sums"}, "words": {"name": "words"}}}))
    metrics = {
        "reward/policy": 0.5, "env/sums/reward": 0.25, "env/words/reward": 0.75,
        "env/words/sample/valid_format": 0.25, "env/words/sample/valid_format/count": 8.0,
    }  # fmt: skip
    write(run, "policy", [{"version": 20, "metrics": metrics}], segment=5)
    words = [rollout(number, 1, environment="words", prompt="spell it") for number in range(8, 16)]
    write(
        run, "rollouts", [*words, {"status": "error", "environment": "words", "failure": "prompt", "cause": "long"}], segment=1
    )
    page = shown(run, capsys)
    assert "  reward sums    " in page
    assert "  reward words   " in page
    assert "words: 1 of 9 attempts failed, reward 1" in page
    assert "words: spell it → it is 15" in page
    told = {one["label"]: one for one in json.loads(shown(run, capsys, "--json"))["environments"]}
    assert (told["sums"]["equal_groups"], told["sums"]["equal_reward"], told["words"]["equal_groups"]) == (2, 0.0, 0)
    assert (told["sums"]["form"], told["words"]["form"]["last"]) == (None, 0.25)


def test_a_page_of_the_newest_rows_alone_says_so(run: RunDirectory, capsys, monkeypatch: pytest.MonkeyPatch):
    assert "of the newest 200,000" not in shown(run, capsys)
    monkeypatch.setattr("telescope.cli.show.figures.NEWEST", 19)  # as many as there are rollouts
    monkeypatch.setattr("telescope.cli.show.page.NEWEST", 19)
    assert "Counts and times are of the newest 19 rows of groups, turns.\n" in shown(run, capsys)
    assert json.loads(shown(run, capsys, "--json"))["cut"] == ["groups", "turns"]


@pytest.mark.parametrize(
    "name", ["policy/orchestrator-000000", "step_metrics/orchestrator-000000", "rollouts/orchestrator-000000"]
)
def test_a_damaged_block_is_named_and_the_rest_is_shown(run: RunDirectory, capsys, name: str):
    block = run.path / "blocks" / f"{name}.parquet"
    block.write_bytes(block.read_bytes()[:100])
    page = shown(run, capsys)
    assert "  damaged    blocks/" in page
    assert f"{Path(name).name}.parquet" in page
    assert "Right (" in page
    if name.startswith("policy"):
        assert "over 5 versions of the weights" in page  # of the other block
    assert json.loads(shown(run, capsys, "--json"))["damaged"][0].startswith(str(block))


def test_an_alert_is_wrapped_and_whole_and_an_eval_of_equal_prompts_has_its_interval():
    sentence = " ".join(f"word{number}" for number in range(90))
    alert = RepeatedAlert(source="core", level="warning", count=1, message=sentence)
    curve = make_curve("own", [0.0])
    assert curve is not None
    own = EvalFigures(name="own", reward=curve, steps=(3,), error=0.0, words="0.000 (95 %: 0.000 to 0.658)", prompts=2)
    lines = describe(RunFigures(run_dir="r", alerts=(alert,), evals=(own,)), [], PageStyle(80))
    assert f"alert: core: {sentence}" in " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 80
    assert "    once, at step 3; the last: 0.000 (95 %: 0.000 to 0.658) over 2 prompts" in lines


@pytest.mark.parametrize("error", [None, 0.0])
def test_an_eval_has_its_interval_where_its_standard_error_says_nothing(run: RunDirectory, capsys, error: float | None):
    row = {"eval": "held", "step": 9, "state": "complete", "reward": 1.0, "reward_error": error, "prompts": 1}
    write(run, "evals", [{**row, "reward_low": 0.2065, "reward_high": 1.0}])
    assert "    once, at step 9; the last: 1.000 (95 %: 0.206 to 1.000) over 1 prompt\n" in shown(run, capsys)


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ([0.1, 0.2, 0.1, 0.2], "too few to judge ("),
        ([0.1, 0.6, 0.2, 0.7, 0.3] * 4, "too much noise to judge ("),
        ([0.3, 0.31, 0.29, 0.3, 0.3] * 4, "no change that is more than noise ("),
        ([0.6, 0.61, 0.2, 0.21], "lower ("),  # four versions are enough for the rule `fell`, and so for this
        ([0.3] * 5 + [0.6] * 5 + [0.3] * 5, "it has fallen from 0.601 ("),
        ([0.1] * 5 + [0.6] * 5 + [0.3] * 5, "higher, and it has fallen from 0.601 ("),
    ],
)
def test_the_first_lines_and_the_rules_agree_on_the_reward(rewards: list[float], told: str):
    spread = [reward + 0.001 * (place % 2) for place, reward in enumerate(rewards)]
    reward = make_curve("reward/policy", spread)
    assert reward is not None
    settings = RunSettings(learning_rate=1e-5, number_of_steps=20)
    figures = RunFigures(run_dir="r", step=20, curves=(reward,), settings=settings, state="done")
    rules = [one.rule for one in advise(figures)]
    assert f"of the weights: {told}" in " ".join(" ".join(describe(figures, [], PageStyle(100))).split())
    assert ("too early" in rules) == ("to judge" in told)
    assert ("fell" in rules) == ("lower" in told or "fallen" in told)


def test_below_advice_stands_whether_the_run_can_go_on_with_it_with_the_command_whole():
    command = f"telescope runs resume r trainer.learning_rate={'1' * 90}"
    told = Advice(
        rule="fell", found="it fell", reason="Less.", command="telescope run", resume=f"Or go on from step 4 with it: {command}"
    )
    lines = describe(RunFigures(run_dir="r"), [told], PageStyle(80))
    assert lines[-3:] == ["       telescope run", "  Or go on from step 4 with it:", f"       {command}"]


def test_of_a_folder_of_runs_the_table_is_shown_and_the_line_for_one_of_them(run: RunDirectory, tmp_path: Path, capsys):
    assert main(["runs", "list", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert main(["show", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{table}\nOne of them: telescope show {run.path}\n"
    assert main(["show", str(tmp_path), "--json"]) == 1
    assert "`telescope runs list` has those of a folder" in capsys.readouterr().err


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path, capsys):
    assert main(["show", str(tmp_path / "nowhere")]) == 1
    assert "nowhere is not a run directory: it has no run.json; `telescope runs list`" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--samples", "-1"], ["--width", "0"], ["--samples", "x"]])
def test_wrong_usage_is_exit_code_two(run: RunDirectory, capsys, wrong: list[str]):
    with pytest.raises(SystemExit) as ended:
        main(["show", str(run.path), *wrong])
    assert ended.value.code == 2
