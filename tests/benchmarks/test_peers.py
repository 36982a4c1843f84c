"""Telescope beside other systems: what makes the figures of `benchmarks.peers`, without a GPU, a server or TRL."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import threading
import time
from enum import Enum
from pathlib import Path

import pytest

from benchmarks.peers import compare, host, ours, table, trl, trl_arguments, trl_worker
from benchmarks.peers.result import PeerResult, PeerStep, UnusableResult, read_result, summarise, write_result
from benchmarks.peers.workload import Workload
from telescope.runlog.layout import RunDirectory
from tests.deadlines import refuse_late
from tests.ports import free_port

WORK = Workload("0.6B", 128, 1024, 256, 8, 1e-6, "bfloat16")


def steps(*seconds: float, tokens: int = 1000) -> tuple[PeerStep, ...]:
    return tuple(
        PeerStep(number, one, tokens, 256 * 1024, training_s=one / 2, generation_s=one, in_flight=64.0)
        for number, one in enumerate(seconds, 1)
    )


def result(system: str = "telescope", mode: str = "two_cards", **changes: object) -> PeerResult:
    given = {"workload": WORK, "cards": ("card", "card"), "masters": "float32", "steps": steps(50, 40, 2, 2, 2, 2, 2)}
    return PeerResult(system=system, mode=mode, variant="", **(given | changes))  # type: ignore[arg-type]


# ---- figures of a run ------------------------------------------------------------------------------------------------


def test_figures_are_medians_of_the_counted_steps() -> None:
    figures = summarise(steps(1, 2, 10), rollouts=256)
    assert (figures.seconds, figures.tokens_per_s, figures.answer_tokens) == (2, 500, 1024)
    assert (figures.trainer_idle, figures.sampler_idle, figures.in_flight, figures.over_longest) == (0.5, 0, 64, 1)


def test_a_share_that_one_step_does_not_know_is_not_told() -> None:
    figures = summarise([*steps(1), PeerStep(2, 1.0, 1000, 256)], rollouts=256)
    assert figures.trainer_idle is None
    assert figures.over_longest is None


def test_the_first_two_steps_are_not_counted() -> None:
    assert [step.seconds for step in result().counted] == [2] * 5
    with pytest.raises(UnusableResult, match="give more --steps"):
        summarise(result(steps=steps(1, 1)).counted, 256)


def test_a_file_of_figures_comes_back_as_it_was(tmp_path: Path) -> None:
    written = result(settings={"a": [1]}, handicaps=("older",), commands=(("python", "-m"),))
    write_result(written, tmp_path / "below" / "one.json")
    assert read_result(tmp_path / "below" / "one.json") == written


def test_a_file_that_is_not_there_or_another_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnusableResult, match=r"none\.json is not there: run the peer's command"):
        read_result(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"steps": []}')
    with pytest.raises(UnusableResult, match=r"other\.json is not a file of figures"):
        read_result(tmp_path / "other.json")


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_table_has_ratios_goals_and_handicaps() -> None:
    slow = result("trl", "server", steps=steps(1, 1, 5, 5, 5, 5, 5), masters="bfloat16", handicaps=("by turns",))
    text = "\n".join(table.page([result(), slow]))
    assert "| telescope two_cards | 500 | 2.00 | 5 | 50% | 0% | 64 | 1.00 | float32 |" in text
    assert "- telescope two_cards / trl server: 2.50 (goal: 4.3)" in text
    assert "- step / longest part of telescope two_cards: 1.000 (goal: at most 1.03)" in text
    assert "- by turns" in text
    assert "- Weights that are updated: float32 in telescope two_cards, bfloat16 in trl server." in text


def test_turns_of_a_line_are_taken_together() -> None:
    again = result(steps=steps(1, 1, 4, 4, 4, 4, 4, 4))
    ((_, figures),) = table.gather([result(), again], at_least=5).values()
    assert (figures.steps, figures.seconds) == (11, 4)


def test_other_work_or_other_cards_are_refused_with_every_difference() -> None:
    other = result("trl", "server", workload=dataclasses.replace(WORK, rollouts=128), cards=("other", "other"))
    with pytest.raises(UnusableResult) as refused:
        table.check_equal([result(), other])
    assert "rollouts is 256 of telescope two_cards and 128 of trl server" in str(refused.value)
    assert "cards is ('card', 'card') of telescope two_cards" in str(refused.value)


def test_a_line_with_too_few_steps_is_refused() -> None:
    with pytest.raises(UnusableResult, match="telescope two_cards has 1 steps after the first 2, and 5 are wanted"):
        list(table.page([result(steps=steps(1, 1, 1))]))
    assert list(table.page([result(steps=steps(1, 1, 1))], at_least=1))


def test_shorter_answers_are_a_handicap_that_is_told() -> None:
    short = result("trl", "async", steps=tuple(dataclasses.replace(step, answer_tokens=256 * 1000) for step in steps(*[1] * 7)))
    text = "\n".join(table.page([result(), short]))
    assert "Answers of trl async have 1000.0 tokens on average, of 1024 that they may have." in text


# ---- ours ------------------------------------------------------------------------------------------------------------


def test_requests_are_counted_within_a_step_only() -> None:
    turns = [(0, 4), (2, 6), (9, 12), (20, 30)]
    assert ours.load(turns, 1, 11) == (7e-9, 0.9)
    assert ours.load([], 0, 10) == (0, 0)


def test_steps_are_read_from_a_run_directory(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    folder = run.path / "live" / "orchestrator"
    folder.mkdir()
    second = 1_000_000_000
    metrics = {"timing_step_total": 2.0, "timing_step_active": 1.5, "tokens": 48.0, "trained_tokens": 32.0}
    told = [
        {"seq": 1, "time_ns": 12 * second, "mono_ns": 0, "step": 2, "metrics": metrics | {"timing_weight_sync/total": 0.25}},
        {"seq": 0, "time_ns": 10 * second, "mono_ns": 0, "step": 1, "metrics": metrics},
    ]
    turn = {"seq": 2, "time_ns": 0, "mono_ns": 0, "placed_ns": 9 * second, "done_ns": 11 * second}
    (folder / "step_metrics-000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    (folder / "turns-000001.jsonl").write_text(json.dumps(turn) + "\n")
    first, last = ours.read_steps(run)
    assert first == PeerStep(1, 2.0, 48, 32, training_s=1.5, generation_s=1.0, weights_s=None, in_flight=0.5)
    assert (last.step, last.generation_s, last.weights_s) == (2, 1.0, 0.25)


@pytest.mark.parametrize("layout", ours.CARDS)
def test_our_settings_compose(layout: str, tmp_path: Path) -> None:
    from telescope.compose.load import load_points, places_for

    (tmp_path / "config.json").write_text("{}")
    given = ours.overrides(WORK, tmp_path, layout, 8, cpu=False)
    places = places_for(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    (point,) = load_points([*given, "env=letters"], places, {})
    assert point.config is not None, point.problems
    assert point.config.orchestrator.max_async_rollout == (0 if layout == "one_card_in_turns" else 2)
    assert point.config.rollout.max_tokens == 1024
    assert point.config.number_of_steps == 8 + ours.LAST_STEPS


# ---- TRL -------------------------------------------------------------------------------------------------------------


def trl_settings(mode: str, variant: str, modules: tuple[str, ...] = (), **changes: object) -> trl_arguments.TrlSettings:
    choices = trl_arguments.TrlChoices(mode, variant, 8, **changes)  # type: ignore[arg-type]
    return trl_arguments.arguments(WORK, choices, modules, Path("out"))


@pytest.mark.parametrize("mode", ["server", "colocate", "async"])
@pytest.mark.parametrize("variant", ["defaults", "tuned"])
def test_a_step_of_trl_is_one_update_of_all_its_rollouts(mode: str, variant: str) -> None:
    given = trl_settings(mode, variant).trainer
    assert given["per_device_train_batch_size"] * given["gradient_accumulation_steps"] == 256
    assert (given["num_generations"], given["max_completion_length"]) == (8, 1024)
    assert given["bf16"] is True


def test_only_the_tuned_variant_leaves_trls_defaults() -> None:
    plain, tuned = trl_settings("server", "defaults"), trl_settings("server", "tuned")
    assert "gradient_checkpointing" not in plain.trainer
    assert tuned.trainer["gradient_checkpointing"] is False
    assert "--max-model-len" not in plain.server
    assert tuned.server[-2:] == ["--max-model-len", "1152"]
    assert set(tuned.trainer) - {"output_dir", "max_steps", "seed"} <= set(tuned.reasons)


def test_the_servers_arguments_are_those_of_trls_page() -> None:
    server = trl_settings("async", "defaults", port=9000).server
    assert server[server.index("--weight-transfer-config") + 1] == '{"backend": "nccl"}'
    assert server[server.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert server[server.index("--port") + 1] == "9000"
    assert trl_settings("colocate", "tuned").server == []


def test_attention_is_the_best_that_trls_python_has() -> None:
    assert trl_settings("server", "tuned").trainer["model_init_kwargs"] == {"dtype": "float32"}
    installed = trl_settings("server", "tuned", ("flash_attn",)).trainer["model_init_kwargs"]
    assert installed == {"dtype": "float32", "attn_implementation": "flash_attention_2"}
    hub = trl_settings("server", "tuned", ("kernels",), hub_kernels=True, masters="bfloat16").trainer["model_init_kwargs"]
    assert hub == {"dtype": "bfloat16", "attn_implementation": "kernels-community/flash-attn2", "use_kernels": True}
    assert "model_init_kwargs" not in trl_settings("async", "tuned", ("flash_attn",)).trainer


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="per_device_train_batch_size=48 does not divide the 256 rollouts"):
        trl_settings("server", "tuned", per_device=48)


def test_what_differs_from_a_default_is_recorded() -> None:
    class Kind(Enum):
        LINEAR = "linear"
        CONSTANT = "constant"

    @dataclasses.dataclass
    class Config:
        needed: str
        kept: int = 3
        rate: float = 0.1
        kind: Kind = Kind.LINEAR
        places: list[Path] = dataclasses.field(default_factory=list)
        made: int = dataclasses.field(default=0, init=False)

    changed = trl_worker.changed_settings(Config("out", rate=0.2, kind=Kind.CONSTANT, places=[Path("a")]))
    assert changed == {"needed": "out", "rate": 0.2, "kind": "constant", "places": [repr(Path("a"))]}


def test_the_reward_is_that_of_the_letters() -> None:
    from benchmarks.plugins.environments.letters import Letters

    prompts = Letters(length=4)
    expected = [prompts.reward(prompts.prompts("train")[0], answer).total for answer in ("a", "d", "c")]
    assert trl_worker.coin(["a", "d", [{"role": "assistant", "content": "c"}]]) == expected
    assert set(expected) == {0.0, 1.0}


def test_weights_that_go_before_generation_are_not_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(trl_worker.time, "monotonic", lambda: clock[0])

    class Generation:
        def sync_weights(self) -> None:
            clock[0] += 1

    class Trainer:
        use_vllm, vllm_generation = True, Generation()

        def _generate_single_turn(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], None]:
            self.vllm_generation.sync_weights()
            clock[0] += 4
            return [[1, 2, 3]] * len(prompt_ids), None

    trainer, watch = Trainer(), trl_worker.Stopwatch()
    watch.start()
    trl_worker.watch_grpo(trainer, watch)
    trainer._generate_single_turn([[7, 7], [8, 8]])
    clock[0] += 5
    watch.end_step(1)
    (row,) = watch.steps
    step = trl.read_step(row, "server", [(1.0, 0), (2.0, 8), (3.0, 4)])
    assert step == PeerStep(1, 10.0, 10, 6, training_s=5.0, generation_s=4.0, weights_s=1.0, in_flight=4.0)


def test_an_asynchronous_step_is_what_its_trainer_logs() -> None:
    logs = {
        "batch/samples_per_step": 16.0, "sample/forwarded_tokens_mean": 40.0, "sample/trained_tokens_mean": 30.0,
        "perf/fwd_bwd_s": 1.5, "perf/optimizer_s": 0.5, "perf/weight_sync_s": 0.25,
    }  # fmt: skip
    row = {"step": 3, "started": 10.0, "ended": 14.0, "seconds": 4.0} | trl_worker.step_of_async(logs)
    step = trl.read_step(row, "async", [(11.0, 2.0), (12.0, 0.0), (20.0, 9.0)])
    assert step == PeerStep(3, 4.0, 640, 480, training_s=2.0, generation_s=2.0, weights_s=0.25, in_flight=1.0)
    assert trl_worker.step_of_async({"loss": 1.0}) == {}


def test_running_requests_are_read_from_a_servers_metrics() -> None:
    text = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting 9\n'
    assert trl.running_requests(text) == 3
    with pytest.raises(ValueError, match="num_requests_running"):
        trl.running_requests("vllm:num_requests_waiting 9\n")


# ---- the machine, and the whole table --------------------------------------------------------------------------------


def test_cards_are_those_that_may_be_used_in_their_order() -> None:
    listed = "0, GPU-a, NVIDIA H200, 580.1\n1, GPU-b, NVIDIA H200, 580.1\n"
    assert [card.ident for card in host.visible_cards(listed, None)] == ["0", "1"]
    assert [card.ident for card in host.visible_cards(listed, "GPU-b,0")] == ["GPU-b", "0"]
    assert host.visible_cards(listed, "") == []


def test_a_turn_has_a_command_for_each_line() -> None:
    planned = list(compare.plan_turn(2, "4B", 3, "peer/python", Path("/out"), ["--steps", "12"], with_async=True))
    assert [file.name for file, _ in planned] == [
        "ours_4B_two_cards_3.json", "trl_4B_server_tuned_3.json", "trl_4B_server_defaults_3.json", "trl_4B_async_tuned_3.json",
    ]  # fmt: skip
    assert planned[1][1][1:] == [
        "-m", "benchmarks.peers.trl", "--shape", "4B", "--mode", "server", "--variant", "tuned", "--python", "peer/python",
        "--steps", "12", "--out", "/out/trl_4B_server_tuned_3.json",
    ]  # fmt: skip
    assert len(list(compare.plan_turn(1, "0.6B", 1, "python", Path("/out"), [], with_async=True))) == 4


# ---- processes -------------------------------------------------------------------------------------------------------

HANGS = "import signal; signal.pause()"
SERVER = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'vllm:num_requests_running{engine="0"} 5\\n')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def test_a_server_is_waited_for_watched_and_ended(tmp_path: Path) -> None:
    port = free_port()
    with trl.served([sys.executable, "-c", SERVER, str(port)], tmp_path / "log", os.environ, port) as watch:
        deadline, pause = time.monotonic() + 60, threading.Event()
        while not watch.seen:
            refuse_late(deadline, "nothing was seen of the server")
            pause.wait(0.05)
    assert {number for _, number in watch.seen} == {5.0}
    with pytest.raises(OSError, match=r"refused"):
        socket.create_connection(("127.0.0.1", port), 5)


def test_a_server_that_ends_at_once_is_told_with_its_log(tmp_path: Path) -> None:
    ends = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(SystemExit, match=r"(?s)vLLM server was not ready.*no such model"),
        trl.served(ends, tmp_path / "log", os.environ, free_port()),
    ):
        pass


@pytest.mark.parametrize(
    ("code", "limit_s", "said"),
    [
        ("raise SystemExit('bad setting')", 60, r"(?s)exit code 1.*bad setting"),
        (HANGS, 0.5, "did not end within --limit-s=0.5"),
    ],
)
def test_a_run_that_fails_or_hangs_ends_the_benchmark(code: str, limit_s: float, said: str, tmp_path: Path) -> None:
    process = host.start([sys.executable, "-c", code], tmp_path / "log", os.environ, tmp_path)
    with pytest.raises(SystemExit, match=said):
        host.wait(process, tmp_path / "log", limit_s, "the run")
    assert process.poll() is not None
