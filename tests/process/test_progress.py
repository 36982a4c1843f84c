"""What the terminal shows of a run, whatever of it is known."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from telescope._launch.progress import (
    Console,
    LogCopy,
    ProgressDisplay,
    describe_newest,
    format_duration,
    format_status,
    format_summary,
    shorten,
)
from telescope.orchestrator.peers import name_few
from telescope.runlog.layout import RunDirectory

STATUS = {
    "state": "running", "step": 12, "steps": 60, "reward": 0.4123, "reward_rollouts": 96, "exact": 0.375, "exact_rollouts": 64,
    "sampled_tokens_per_s": 5130.0, "lag": 1.24, "queue": 14, "in_flight": 96, "eta_s": 65, "doing": "train step 12",
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_says_everything_in_one_row() -> None:
    assert format_status(STATUS) == (
        "step 12/60 · reward 0.412 (n=96) · exact 38% (n=64) · 5.1k sampled tok/s · lag 1.2 · queue 14 · ETA 1:05 · "
        "in flight 96 · train step 12"
    )


def test_each_of_several_environments_is_told_where_there_is_room_for_all() -> None:
    sums = {"reward": 0.31, "rollouts": 48, "exact": 0.25, "exact_rollouts": 46}
    letters = {"reward": 0.9, "rollouts": 48, "exact": None}
    environments = {"sums": sums, "letters": letters, "new": {"reward": None}}
    status = {"step": 12, "reward": 0.605, "reward_rollouts": 96, "environments": environments}
    line = "step 12 · reward 0.605 (n=96)"
    whole = f"{line} · sums 0.310 (n=48) exact 25% (n=46) · letters 0.900 (n=48)"
    assert format_status(status) == format_status(status, len(whole)) == whole
    assert format_status(status, len(whole) - 1) == line
    assert format_status({**status, "environments": {}}) == format_status({**status, "environments": "?"}) == line


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ({}, ""),
        ({"state": "starting", "message": "waiting for server-0"}, "starting · waiting for server-0"),
        ({"step": 1, "reward": None, "lag": "?", "sampled_tokens_per_s": 12}, "step 1 · reward – · 12 sampled tok/s"),
    ],
)
def test_what_is_not_known_is_left_out(status: dict[str, object], line: str) -> None:
    assert format_status(status) == line


def test_durations_are_read_as_clocks() -> None:
    assert [format_duration(seconds) for seconds in (0, 59.6, 65, 7384, -3)] == ["0:00", "1:00", "1:05", "2:03:04", "0:00"]


def test_a_terminal_gets_one_line_written_over(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    errors = Terminal()
    console = Console(errors, io.StringIO())
    progress = ProgressDisplay(run, console)
    progress.show()
    run.status_json.write_text('{"step": 1, "steps": 2}')
    progress.show()
    run.status_json.write_text('{"step": 2, "ste')  # half a file, or another process's mistake
    progress.show()
    run.status_json.write_text('{"step": 2, "steps": 2}')
    progress.show()
    console.say("done")
    first, _, rest = errors.getvalue().partition("not ready yet")
    assert first == "\r\x1b[K0:00 · starting: the orchestrator is "
    assert rest == "\r\x1b[Kstep 1/2\r\x1b[Kstep 2/2\r\x1b[Kdone\n"


def test_an_alert_is_a_line_of_its_own_once_and_of_many_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path / "run")
    errors, now = io.StringIO(), [100.0]
    monkeypatch.setattr("telescope._launch.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = ProgressDisplay(run, Console(errors, io.StringIO()))
    failed = "the checkpoint of step 6 failed"
    for alerts, alert in ((0, ""), (1, failed), (1, failed), (2, "a"), (4, "c")):
        run.status_json.write_text(json.dumps({"step": 1, "steps": 9, "alerts": alerts, "alert": alert}))
        progress.show()
        now[0] += 4.0
    assert errors.getvalue().splitlines() == [
        "step 1/9",
        "alert: the checkpoint of step 6 failed",
        "alert: c (2 more before it: the stream `alerts`)",
    ]


def starting(ready: int, *missing: str) -> str:
    """What the orchestrator of 303 processes says until all are there."""
    words = f"waiting for {name_few([*missing, *('more',) * (303 - ready - len(missing))])}"
    return json.dumps({"state": "starting", "step": 0, "processes": 303, "ready": ready, "missing": missing, "doing": words})


def test_hundreds_of_processes_that_start_are_counted_on_a_terminal_and_one_that_is_late_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = RunDirectory.create(tmp_path / "run")
    errors = Terminal()
    progress = ProgressDisplay(run, Console(errors, io.StringIO()))
    progress.start(7, 303)
    progress.show()
    run.log("server-9").write_text("INFO 01:02 begins\n\x1b[32mLoading weights:  50%\r\x1b[0mLoading weights:  62%\n\n")
    run.status_json.write_text(starting(297, "server-9", "server-11", "server-12"))
    progress.show()
    run.status_json.write_text('{"state": "running", "step": 0, "steps": 2, "processes": 303, "ready": 303, "missing": []}')
    progress.show()
    assert re.sub(r"\d+:\d\d · ", "", errors.getvalue()).split("\r\x1b[K")[1:] == [
        "starting 303 processes, 7 begun",
        "starting: the orchestrator is not ready yet",
        "starting: 297 of 303 processes are ready, waiting for server-9, server-11, server-12 and 3 more · "
        "server-9: loading weights, 62 %",
        "step 0/2",
    ]


def test_a_line_is_cut_between_two_words() -> None:
    assert shorten("step 12 · 1234 tokens", 21) == "step 12 · 1234 tokens"
    assert shorten("step 12 · 1234 tokens", 20) == "step 12 · 1234 …"
    assert shorten("step 12 · 1234 tokens", 13) == "step 12 · …"
    assert shorten("incomprehensible", 13) == "incomprehen …"


def test_a_process_is_quoted_without_what_stands_before_its_words(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text(f"2026-12-01 12:24:50,009 INFO telescope.workers.main: {'loads the prompts ' * 7}\n")
    assert describe_newest(log, "worker-0") == f"{'loads the prompts ' * 5}loads …"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", ""),
        ("(EngineCore pid=7) WARNING 12-01 12:24:39 [cpu_worker.py:114] libtcmalloc is not found", "starting its engine"),
        ("Fetching 8 files:   0%|          | 0/8 [00:00<?, ?it/s]\rFetching 8 files:  25%|##5   | 2/8 [00:04<00:12, 2.1s/it]",
         "downloading the model, 25 %"),
        ("INFO 12-01 [__init__.py:7] has begun\nmodel.safetensors:  31%|###1      | 309M/988M [00:03<00:06, 101MB/s]\nslow",
         "downloading the model, 31 %"),
        ("Fetching 8 files: 100%|##########| 8/8 [00:16<00:00]\nINFO 12-01 [utils.py:253] non-default args: {}\nWarning: old",
         "starting its engine"),
        ("Loading weights: 50%\nWarning: model.safetensors is large", "loading weights, 50 %"),
        ("2026-12-01 12:24:43,1 INFO telescope.inference.server: looks for the model", "looks for the model"),
        ("Loading safetensors checkpoint shards:  38% Completed | 3/8 [00:05<00:08, 1.7s/it]", "loading weights, 3 of 8 files"),
        ("(EngineCore pid=7) INFO 12-01 [default_loader.py:502] Loading weights took 12.7 seconds", "preparing the model, its "
         "weights are loaded"),
        ("INFO [monitor.py:40] Starting torch.compile\nW1201 utils.cpp:68] Warning: NUMA binding", "compiling the model"),
        ("Capturing CUDA graphs (decode, FULL):  45%|##  | 30/67 [00:02<00:03, 12.1it/s]", "capturing CUDA graphs, 30 of 67"),
        ("2026-12-01 12:24:43,1 INFO telescope.inference.vllm.engine: updates are 24 copies of 0.00 GB", "warming up"),
        ("2026-12-01 12:24:43,1 INFO telescope.inference.vllm.gpu_memory: waiting for room on the GPU: 2.00 GiB are free, 4.00 "
         "are needed", "waiting for room on the GPU: 2.00 GiB are free, 4.00 are needed"),
    ],
)  # fmt: skip
def test_a_server_that_starts_is_told_in_words_and_not_in_its_engines(tmp_path: Path, lines: str, words: str) -> None:
    (tmp_path / "log").write_text(lines)
    assert describe_newest(tmp_path / "log", "server-0") == words


def test_a_run_of_evals_has_no_steps() -> None:
    assert format_status({"step": 0, "steps": 0, "doing": "generating"}) == "evals alone · generating"


def test_elsewhere_a_start_is_a_line_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path / "run")
    errors, now = io.StringIO(), [100.0]
    monkeypatch.setattr("telescope._launch.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = ProgressDisplay(run, Console(errors, io.StringIO()))
    for begun in range(1, 304):
        progress.start(begun, 303)
        now[0] += 0.01
    run.log("server-9").write_text("Loading weights")
    for second in range(140):
        ready = 5 if second < 12 else 297
        run.status_json.write_text(starting(ready, "server-9", "server-11", "server-12"))
        progress.show()
        now[0] += 1.0
    quoted = "server-9: loading weights"
    assert errors.getvalue().splitlines() == [
        f"0:00 · starting 303 processes, logs in {run.path}/logs",
        f"0:10 · starting: 5 of 303 processes are ready, waiting for server-9, server-11, server-12 and 295 more · {quoted}",
        f"0:20 · starting: 297 of 303 processes are ready, waiting for server-9, server-11, server-12 and 3 more · {quoted}",
        f"1:20 · starting: 297 of 303 processes are ready, waiting for server-9, server-11, server-12 and 3 more · {quoted}",
        f"2:20 · starting: 297 of 303 processes are ready, waiting for server-9, server-11, server-12 and 3 more · {quoted}",
    ]


def test_a_terminal_that_went_away_ends_nothing() -> None:
    closed = io.StringIO()
    console = Console(closed, closed)
    closed.close()
    console.say("nobody hears this")
    console.result("nor this")


def test_logs_are_copied_in_whole_lines(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    errors = io.StringIO()
    copy = LogCopy(run, ("server-0", "worker-0"), Console(errors, io.StringIO()))
    run.log("server-0").write_text("one\ntw")
    copy.copy()
    with run.log("server-0").open("a") as file:
        file.write("o\nthr")
    copy.copy()
    copy.copy(last=True)
    assert errors.getvalue() == "server-0 | one\nserver-0 | two\nserver-0 | thr\n"


def test_the_summary_is_a_small_table() -> None:
    summary = {
        "steps": 60,
        "reward_policy_first": 0.30123,
        "rollouts": {"trained": 960, "failed": 2},
        "reasons": {},
        "exit_reason": None,
    }
    assert format_summary(summary) == (
        "  steps                60\n"  # a fact a line, unknown ones left out
        "  reward policy first  0.3012\n"
        "  rollouts             trained 960, failed 2"
    )
