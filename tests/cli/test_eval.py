"""`telescope eval`: what a command line means, where results lie, and how two of them compare. tests/run has whole runs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from telescope._launch.next_commands import list_next_lines
from telescope._launch.prepare_attempt import ResumePoint, begin_at
from telescope.cli import eval as command
from telescope.cli.completion import candidates
from telescope.cli.eval_compare import PromptScore, compare, pair_prompts
from telescope.cli.eval_jobs import EvalJob, digest_evals, list_jobs
from telescope.cli.resume import WrongOverride
from telescope.cli.targets import TargetRefused, describe_key, judge, make_settings
from telescope.config.evals import list_setup
from telescope.config.models import model_folder
from telescope.config.resume import find_obstacles_to_resume
from telescope.config.run import RunConfig, as_json, dump_run, load_run
from telescope.config.validate import validate
from telescope.runlog.eval_rows import find_standalone, read_ended, read_eval_rows, standalone_folder
from telescope.runlog.identity import new_identity, write_identity
from telescope.runlog.layout import RunDirectory
from telescope.runlog.writer import RunLog

FAKE: dict[str, Any] = {
    "algorithm": {"name": "grpo"},
    "backend": {"name": "fsdp"},
    "environments": {"countdown": {"name": "countdown"}},
    "inference": {"engine": "fake"},
    "trainer": {"seq_len": 8192},
    "checkpoint": {"every": 2},
    "number_of_steps": 4,
}


def asked(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"steps": "last", "to": None, "model": None, "key_env": None, "config_dir": None, **given})


def config(**changes: Any) -> RunConfig:
    found, problems = validate({**FAKE, **changes})
    assert found is not None, problems
    return found


def make_run(path: Path, made: RunConfig, steps: Sequence[int] = (), evaluated: str = "") -> RunDirectory:
    run = RunDirectory.create(path)
    run.config_json.write_text(dump_run(made))
    write_identity(run, new_identity("x", datetime.now(UTC), "0" * 16, evaluated=evaluated))
    for step in steps:
        folder = run.checkpoints / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "complete.json").write_text("{}")
    return run


def make_played(job: EvalJob, *rows: tuple[str, str]) -> RunDirectory:
    """The run of the job, with a row of each (eval, state)."""
    run = make_run(job.folder, job.config, evaluated=job.identity)
    log = RunLog(run, "orchestrator")
    for name, state in rows:
        known = {"prompts": 1, "samples": 1, "scored": 1, "failed": 0}
        log.append("evals", {"eval": name, "step": job.config.number_of_steps, "state": state, **known})
    log.close()
    return run


def jobs_of(run: RunDirectory, *overrides: str, **given: Any) -> list[EvalJob]:
    return list(list_jobs(str(run.path), asked(**given), overrides))


# ---- what a command line means


def test_of_a_run_each_step_has_a_folder_in_it_and_its_own_exported_weights(tmp_path: Path):
    run = make_run(tmp_path / "run", config(evals={"math": {"environment": "countdown"}}), [2, 4])
    first, *others = jobs_of(run, steps="all")
    assert [job.config.number_of_steps for job in (first, *others)] == [0, 2, 4]
    assert (first.weights, first.config.model.name) == (None, "tiny")
    for job in others:
        assert job.weights is not None
        assert job.weights.parent == job.folder.parent
        assert job.weights.name.startswith(f"{job.folder.name}.")
        assert job.config.model.name == str(job.weights)
    digests = {job.folder.parent.name for job in (first, *others)}
    assert len(digests) == 1
    assert first.folder == standalone_folder(run, digests.pop(), 0)
    assert not first.config.trains
    assert not first.config.saves
    assert [one.name for one in first.config.active_evals] == ["math"]


def test_the_last_checkpoint_is_the_default_and_steps_are_named_in_any_order(tmp_path: Path):
    run = make_run(tmp_path / "run", config(), [2, 4])
    assert [job.config.number_of_steps for job in jobs_of(run)] == [4]
    assert [job.config.number_of_steps for job in jobs_of(run, steps="4,0,4")] == [4, 0]
    with pytest.raises(TargetRefused, match="no checkpoint of step 3; there are 2, 4"):
        jobs_of(run, steps="3")
    with pytest.raises(WrongOverride, match="give numbers with commas between"):
        jobs_of(run, steps="two")
    with pytest.raises(TargetRefused, match=r"has no checkpoint .*--steps 0"):
        jobs_of(make_run(tmp_path / "young", config()))


def test_adapters_are_merged_so_that_the_servers_have_none(tmp_path: Path):
    run = make_run(tmp_path / "run", config(model={"name": "tiny", "dtype": "bfloat16", "lora": {"rank": 4}}), [2])
    for job in jobs_of(run, steps="0,2"):
        assert (job.config.model.lora, job.config.model.dtype) == (None, "bfloat16")


def test_without_evals_of_its_own_a_run_is_evaluated_on_what_it_trains_on(tmp_path: Path):
    (job,) = jobs_of(make_run(tmp_path / "run", config()), steps="0")
    assert [(one.name, one.label) for one in job.config.active_evals] == [("countdown", "countdown")]
    assert list(job.config.played) == ["countdown"]


def test_evals_that_the_command_line_names_are_all_that_are_played(tmp_path: Path):
    run = make_run(tmp_path / "run", config(evals={"quick": {"environment": "countdown", "num_prompts": 9}}))
    overrides = ("evals.quick.num_samples=4", "+evals.letters={environment:reverse_letters,kwargs:{num_eval:3}}")
    (job,) = jobs_of(run, *overrides, "evals.letters.temperature=0.5", "eval.pass_above=0.25", steps="0")
    quick, letters = job.config.active_evals
    assert (quick.name, quick.num_prompts, quick.num_samples, quick.pass_above) == ("quick", 9, 4, 0.25)
    assert (letters.name, letters.temperature, letters.num_samples) == ("letters", 0.5, 1)
    assert job.config.played["letters"].kwargs["num_eval"] == 3
    (alone,) = jobs_of(run, "evals.letters={environment:reverse_letters}", steps="0")
    assert [one.name for one in alone.config.active_evals] == ["letters"]
    assert alone.folder.parent != job.folder.parent


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("evals.quick=4", "an eval has settings"),
        ("evals.quick.number=4", "an eval has no setting number"),
        ("rollout.max_tokenz=4", "not a setting of this run"),
        ("evals={}", "name an eval"),
    ],
)
def test_overrides_that_mean_nothing_are_refused(tmp_path: Path, override: str, sentence: str):
    with pytest.raises(WrongOverride, match=sentence):
        jobs_of(make_run(tmp_path / "run", config()), override, steps="0")


def test_two_commands_are_one_where_they_play_the_same(tmp_path: Path):
    plain = config(evals={"countdown": {}})
    same = config(evals={"countdown": {}}, cluster={"inference_num_workers": 4}, name="other")
    assert digest_evals(plain) == digest_evals(same)
    for changes in ({"num_samples": 2}, {"temperature": 0.5}, {"num_prompts": 3}, {"pass_above": 0.1}):
        assert digest_evals(config(evals={"countdown": changes})) != digest_evals(plain)
    assert digest_evals(plain, "a") != digest_evals(plain, "b")


def test_what_is_served_otherwise_is_another_result():
    served: tuple[dict[str, Any], ...] = (
        {},
        {"inference": {"engine": "fake", "dtype": "float16"}},
        {"inference": {"engine": "vllm"}},
        {"inference": {"engine": "vllm", "quantization": "fp8"}},
        {"inference": {"engine": "vllm", "vllm": {"block_size": 32}}},
        {"model": {"name": "tiny", "dtype": "bfloat16"}},
        {"environments": {"countdown": {"name": "countdown", "reward_min": -1.0}}},
        {"rollout": {"timeout_s": 1.0}},
        {"rollout": {"max_attempts": 1}},
    )
    assert len({digest_evals(config(evals={"countdown": {}}, **changes)) for changes in served}) == len(served)


def test_other_weights_in_a_folder_are_another_model(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(model_folder("tiny"), folder)
    (old,) = list_jobs(str(folder), asked(), ("evals.countdown={}",))
    (same,) = list_jobs(str(folder), asked(), ("evals.countdown={}",))
    assert old.folder == same.folder
    os.utime(next(folder.glob("*.safetensors")), ns=(1, 1))
    (new,) = list_jobs(str(folder), asked(), ("evals.countdown={}",))
    assert new.folder != old.folder


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path):
    given = asked(to=tmp_path / "out")
    (job,) = list_jobs("tiny", given, ("evals.countdown={}",))
    make_played(job, ("countdown", "complete"))
    assert job.is_played
    for other, overrides in (("tiny_reverse", ("evals.countdown={}",)), ("tiny", ("evals.countdown={num_prompts:3}",))):
        (another,) = list_jobs(other, given, overrides)
        with pytest.raises(TargetRefused, match="holds the result of another model"):
            _ = another.is_played
    trained = make_run(tmp_path / "trained", config())
    (onto,) = list_jobs("tiny", asked(to=trained.path), ("evals.countdown={}",))
    for act in (lambda: onto.is_played, lambda: onto.prepare(print)):
        with pytest.raises(TargetRefused, match="holds a run of another command: name another folder with --to"):
            act()


def test_a_run_that_trains_and_one_that_does_not_take_over_no_directory_of_each_other():
    trains, alone = (
        as_json(one)
        for one in (
            config(),
            config(cluster={"trainer_num_workers": 0}, checkpoint={}, evals={"m": {"environment": "countdown"}}),
        )
    )
    for old, new in ((trains, alone), (alone, trains)):
        assert "a run that trains and one that plays evals" in find_obstacles_to_resume(old, new)[0]
    assert find_obstacles_to_resume(trains, trains) == find_obstacles_to_resume(alone, alone) == []


def test_a_step_that_was_trained_anew_is_played_anew(tmp_path: Path):
    run = make_run(tmp_path / "run", config(evals={"countdown": {}}), [2, 4])
    (old,) = jobs_of(run)
    make_played(old, ("countdown", "complete"))
    sent = old.folder.with_name(f"{old.folder.name}.wandb")
    sent.touch()
    assert old.weights is not None
    old.weights.mkdir()
    assert old.is_played
    (run.checkpoints / "step_00000004" / "complete.json").write_text('{"attempt": "another"}')
    (new,) = jobs_of(run)
    assert (new.folder, new.is_played) == (old.folder, False)
    assert new.weights is not None
    assert new.weights != old.weights
    new.weights.mkdir()
    assert new.prepare(print).checkpoint.resume is False
    assert not new.folder.exists()
    assert not sent.exists()
    assert (old.weights.exists(), new.weights.exists()) == (False, True)
    assert len(list(new.folder.parent.glob(f"{new.folder.name}.before-*"))) == 1
    assert list(find_standalone(run)) == []
    old.weights.mkdir()
    with pytest.raises(TargetRefused, match="was trained anew meanwhile"):
        old.prepare(print)


def test_an_attempt_that_goes_another_way_sets_results_of_later_steps_aside(tmp_path: Path):
    made = config(evals={"countdown": {}})
    run = make_run(tmp_path / "run", made, [2, 4])
    earlier, later = jobs_of(run, steps="2,4")
    for job in (earlier, later):
        make_played(job, ("countdown", "complete"))
    sent = later.folder.with_name(f"{later.folder.name}.wandb")
    sent.touch()
    begin_at(run, made, ResumePoint(2, run.checkpoints / "step_00000002"), 2)
    assert [row["step"] for row in read_eval_rows(run, "evals")] == [2]
    assert (earlier.is_played, later.is_played, sent.exists()) == (True, False, False)


def test_what_a_killed_export_left_is_swept(tmp_path: Path):
    (job,) = jobs_of(make_run(tmp_path / "run", config(), [2]))
    assert job.weights is not None
    job.weights.mkdir(parents=True)
    ended = subprocess.Popen(["true"])
    ended.wait(10)
    left, others = (job.weights.with_name(f".{job.weights.name}.partial-{pid}") for pid in (ended.pid, os.getpid()))
    left.mkdir()
    others.mkdir()
    job.prepare(print)
    assert (left.exists(), others.exists(), job.weights.exists()) == (False, True, True)
    job.finish(print)
    assert not job.weights.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster": {"inference_num_workers": 4}, "eval": {"every": 2, "num_servers": 1}},
        {"eval": {"every": 1, "stop_after": 1}},
        {"eval": {"every": 2}, "checkpoint": {"every": 2, "keep_best": "countdown:max"}},
    ],
)
def test_what_says_when_a_run_is_evaluated_is_not_the_evals_own(tmp_path: Path, changes: dict[str, Any]):
    (job,) = jobs_of(make_run(tmp_path / "run", config(**changes), [2]))
    assert (job.config.eval.num_servers, job.config.eval.stop_after, job.config.checkpoint.keep_best) == ("auto", None, None)


def test_a_run_with_router_replay_is_evaluated_without_it():
    made = config()
    replayed = made.model_copy(update={"trainer": made.trainer.model_copy(update={"router_replay": True})})
    assert not judge(make_settings(replayed, 2)).trainer.router_replay


@pytest.mark.parametrize("override", ["cluster.trainer_num_workers=1", "+number_of_steps=7", "run_dir=x", "model.name=other"])
def test_what_the_command_decides_is_refused(tmp_path: Path, override: str):
    run = make_run(tmp_path / "run", config(), [2])
    for target in (str(run.path), "tiny"):
        with pytest.raises(WrongOverride, match=r"leave (it|model=)"):
            list(list_jobs(target, asked(), ("evals.countdown={}", override)))


def test_a_folder_with_an_equals_sign_is_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = make_run(tmp_path / "lr=0.1", config(evals={"countdown": {}}), [2])
    make_played(jobs_of(run)[0], ("countdown", "complete"))
    assert command.main([str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == str(run.path)


def test_one_folder_is_for_one_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main(["tiny", "tiny_reverse", "--to", str(tmp_path / "out"), "evals.countdown={}"]) == 2
    assert "is the folder of one result, and there are 2 targets" in capsys.readouterr().err


def test_a_job_that_is_refused_leaves_the_others_to_be_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = make_run(tmp_path / "run", config(evals={"countdown": {}}), [2, 4])
    for job in jobs_of(run, steps="0,4"):
        make_played(job, ("countdown", "complete"))

    def gone(self: EvalJob, say: Any) -> RunConfig:
        raise TargetRefused("no complete checkpoint of step 2")

    monkeypatch.setattr(EvalJob, "prepare", gone)
    assert command.main([str(run.path), "--steps", "all", "--json"]) == 1
    told = capsys.readouterr()
    assert [json.loads(line)["step"] for line in told.out.splitlines()] == [0, 4]
    assert "no complete checkpoint of step 2" in told.err


def test_an_eval_that_changed_is_not_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_run(tmp_path / "run", config(evals={"countdown": {}}), [2])
    (job,) = jobs_of(run)
    make_played(job, ("countdown", "changed"))
    assert command.main([str(run.path)]) == 1
    assert f"remove {job.folder} to play it anew" in capsys.readouterr().err


def test_an_eval_that_changes_while_it_is_played_says_which_folder_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = make_run(tmp_path / "run", config(evals={"countdown": {}}))

    def play(job: EvalJob) -> int:
        make_played(job, ("countdown", "changed"))
        return 70

    monkeypatch.setattr(command, "_play", play)
    assert command.main([str(run.path), "--steps", "0"]) == 1
    assert f"{jobs_of(run, steps='0')[0].folder} to play it anew" in capsys.readouterr().err


def test_the_command_is_written_down_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_KEY", "a key of this test")
    given = asked(model="some/model", key_env="A_KEY", to=tmp_path / "out", config_dir=str(tmp_path))
    (job,) = list_jobs("http://h/v1", given, ("evals.countdown={}",))
    options = ("--model", "some/model", "--key-env", "A_KEY", "--to", str(tmp_path / "out"), "-cd", str(tmp_path))
    assert job.arguments == ("http://h/v1", *options, "evals.countdown={}")


def test_an_eval_learns_nothing_that_could_be_shown(tmp_path: Path):
    trained = make_run(tmp_path / "run", config(), [2])
    (job,) = jobs_of(trained)
    assert list_next_lines(config(run_dir=str(trained.path)), 0)
    make_played(job)
    assert list_next_lines(job.config, 0) == []


def test_a_model_needs_an_eval_and_a_url_a_model(tmp_path: Path):
    with pytest.raises(WrongOverride, match="name what is to be played"):
        list(list_jobs("tiny", asked(), ()))
    with pytest.raises(WrongOverride, match="--model NAME"):
        list(list_jobs("http://127.0.0.1:1/v1", asked(), ("evals.countdown={}",)))
    (job,) = list_jobs("tiny", asked(to=tmp_path / "out"), ("evals.letters={environment:reverse_letters}",))
    assert (job.folder, job.config.number_of_steps, list(job.config.played)) == (tmp_path / "out", 0, ["letters"])
    (job,) = list_jobs("http://127.0.0.1:1/v1", asked(model="some/model"), ("evals.countdown={}",))
    assert job.config.servers == 0
    assert job.config.inference.remote is not None
    assert (job.config.inference.remote.model, job.config.inference.remote.api_key) == ("some/model", None)
    assert job.folder.name.startswith("127.0.0.1-1-some-model-")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://user:geheim123@host/v1", "must hold no user name and no password: --key-env"),
        ("https://geheim123@host/v1", "must hold no user name and no password: --key-env"),
        ("https://host/v1?key=geheim123", "must end with its path"),
        ("https:///v1", "names no host"),
    ],
)
def test_an_address_holds_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, sentence: str):
    assert command.main([url, "--model", "m", "--to", str(tmp_path / "out"), "evals.countdown={}"]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "geheim123" not in said
    assert not (tmp_path / "out").exists()
    found, problems = validate(
        {
            **{name: value for name, value in FAKE.items() if name != "checkpoint"},
            "cluster": {"trainer_num_workers": 0},
            "evals": {"countdown": {}},
            "number_of_steps": 0,
            "inference": {"engine": "remote", "remote": {"url": url, "model": "m"}},
        }
    )
    assert found is None
    (problem,) = problems
    assert f"inference.remote.url {sentence}" in problem.sentence
    assert "geheim123" not in problem.sentence


def test_a_key_goes_where_it_is_meant_to(monkeypatch: pytest.MonkeyPatch):
    def key_of(url: str, key_env: str | None = None) -> tuple[str | None, str]:
        (job,) = list_jobs(url, asked(model="m", key_env=key_env), ("evals.countdown={}",))
        assert job.config.inference.remote is not None
        return job.config.inference.remote.api_key, describe_key(job.config.inference.remote, os.environ)

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert key_of("https://host/v1") == (None, "")
    with pytest.raises(WrongOverride, match="--key-env TYPO: that variable is not set"):
        key_of("https://host/v1", "TYPO")
    with pytest.raises(WrongOverride, match="and not the key itself") as refused:
        key_of("https://host/v1", "sk-9f8e7d")
    assert "sk-9f8e7d" not in str(refused.value)
    monkeypatch.setenv("OPENAI_API_KEY", "k-9f8e7d6c5b")
    reference = "${oc.env:OPENAI_API_KEY}"
    assert key_of("https://host:1/v1") == (reference, "The key in OPENAI_API_KEY is sent to host:1.")
    assert key_of("http://127.0.0.1:1/v1")[0] == reference
    assert key_of("http://[::1]:1/v1")[0] == reference
    for other in ("host", "127.evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "[::ffff:8.8.8.8]", "127.1"):
        unsent, said = key_of(f"http://{other}/v1")
        assert unsent is None
        assert "OPENAI_API_KEY is not sent in plain text" in said
    sent, said = key_of("http://host/v1", "OPENAI_API_KEY")
    assert sent == reference
    assert "in plain text: who sees the network can read it" in said


def test_failed_samples_are_told_beside_the_table():
    row = {"target": "http://h/v1", "eval": "m", "failed": 7, "scored": 17, "reward_scored": 1.0, "run_dir": "runs/x"}
    assert "7 samples of m failed" in command._describe_failed(row)
    assert "1.000 is the mean of the 17 others" in command._describe_failed(row)


def test_its_key_is_a_reference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_KEY", "k-9f8e7d6c5b")
    (job,) = list_jobs("http://h/v1", asked(model="m", key_env="A_KEY"), ("evals.countdown={}",))
    assert job.config.inference.remote is not None
    assert job.config.inference.remote.api_key == "${oc.env:A_KEY}"
    assert "k-9f8e7d6c5b" not in dump_run(job.config)


def test_it_says_how_it_is_used(capsys: pytest.CaptureFixture[str]):
    assert command.main([]) == 2
    assert "name what is to be evaluated" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        command.main(["--help"])
    assert left.value.code == 0
    assert "telescope eval compare" in capsys.readouterr().out
    assert candidates("telescope eval c") == ["compare"]
    assert "eval.num_samples=" in candidates("telescope eval runs/x eval.num_s")


def test_combinations_without_a_trainer_are_judged():
    for changes, sentence in (
        ({"number_of_steps": 0}, "number_of_steps=0 trains nothing"),
        ({"cluster": {"trainer_num_workers": 0}, "checkpoint": {}}, "there are no evals to play"),
        ({"cluster": {"trainer_num_workers": 0}, "evals": {"countdown": {}}}, "checkpoint.every=2 saves what trainer ranks"),
        ({"inference": {"engine": "remote", "remote": {"url": "http://h/v1", "model": "m"}}}, "nothing can be trained on it"),
        ({"inference": {"engine": "remote"}}, "go together"),
    ):
        found, problems = validate({**FAKE, **changes})
        assert found is None
        assert any(sentence in problem.sentence for problem in problems), problems


# ---- rows


def write_result(
    run: RunDirectory, name: str, step: int, rewards: Sequence[Sequence[float | None]], texts: str = "p", *, old: bool = False
) -> None:
    """A complete eval with a row a sample; None: given up. `old`: the row does not say how it was played."""
    log = RunLog(run, f"orchestrator-{name}")
    for index, of_prompt in enumerate(rewards):
        for sample, reward in enumerate(of_prompt):
            row = {
                "eval": name,
                "step": step,
                "index": index,
                "sample": sample,
                "rollout_id": index * 10 + sample,
                "attempt": 0,
            }
            more = {"status": "error"} if reward is None else {"status": "scored", "reward": reward}
            log.append("eval_samples", {**row, **more, "prompt": f"{texts}{index}", "golden_answers": [str(index)]})
    known: dict[str, Any] = {"prompts": len(rewards), "samples": len(rewards[0]), "pass_above": 0.5, "scored": 1, "failed": 0}
    made = load_run(run.config_json)
    if not old and (one := next((one for one in made.active_evals if one.name == name), None)) is not None:
        known["setup"] = list_setup(one, made.played[one.label], made.rollout, made.inference, made.model)
    log.append("evals", {"eval": name, "step": step, "state": "complete", **known})
    log.close()


def test_rows_of_standalone_evals_stand_behind_the_runs_own_with_their_digest(tmp_path: Path):
    run = make_run(tmp_path / "run", config())
    write_result(run, "countdown", 4, [[1.0]])
    alone = make_run(standalone_folder(run, "abc", 2), config())
    write_result(alone, "countdown", 2, [[0.5]])
    assert [(one.digest, one.step) for one in find_standalone(run)] == [("abc", 2)]
    rows = read_eval_rows(run, "evals")
    assert [(row["step"], row.get("standalone")) for row in rows] == [(4, None), (2, "abc")]
    assert read_ended(run) == {("countdown", 4)}


def test_a_job_is_played_when_each_of_its_evals_is_over(tmp_path: Path):
    run = make_run(tmp_path / "run", config(evals={"countdown": {}, "letters": {"environment": "reverse_letters"}}), [2])
    (job,) = jobs_of(run)
    assert not job.is_played
    alone = make_played(job)
    assert not job.is_played
    write_result(alone, "countdown", 2, [[1.0]])
    assert not job.is_played
    write_result(alone, "letters", 2, [[1.0]])
    assert job.is_played
    assert load_run(alone.config_json).number_of_steps == 2


# ---- two results


def two_results(tmp_path: Path, first: Any, second: Any, **changes: Any) -> tuple[str, str]:
    run = make_run(tmp_path / "run", config(evals={"countdown": {"num_samples": len(first[0])}}))
    write_result(run, "countdown", 2, first)
    other = make_run(tmp_path / "other", config(evals={"countdown": {"num_samples": len(second[0]), **changes}}))
    write_result(other, "countdown", 4, second)
    return str(run.path), str(other.path)


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert compare([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_one_answer_a_prompt_is_compared_by_mcnemar(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = two_results(tmp_path, [[1.0], [0.0], [0.0], [0.0], [0.0]], [[1.0], [1.0], [1.0], [1.0], [None]])
    found = compared(capsys, first, second)
    assert (found["prompts"], found["passed_by_first_alone"], found["passed_by_second_alone"]) == (5, 0, 3)
    assert found["pass_p"] == 0.25
    assert found["difference_mean"] == pytest.approx(0.6)
    assert [one["index"] for one in found["changed"]] == [1, 2, 3]
    assert compare([first, f"{second}@4", "--eval", "countdown", "--changed", "1"]) == 0
    said = capsys.readouterr().out
    assert "3 prompts changed" in said
    assert said.count("→") == 1


def test_several_answers_are_compared_by_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = compared(
        capsys, *two_results(tmp_path, [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], [[1.0, 1.0], [0.0, 0.0], [1.0, None]])
    )
    assert (found["reward_first"], found["reward_second"]) == (0.5, 0.5)
    assert (found["difference_mean"], found["pass_test"]) == (0.0, "paired t")
    assert found["difference_p"] == pytest.approx(1.0)


def test_prompts_that_one_alone_has_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = two_results(tmp_path, [[1.0], [0.0], [1.0]], [[1.0], [1.0]])
    assert compare([first, second]) == 0
    assert "2 of 3 prompts are in both" in capsys.readouterr().out


def test_another_sampling_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = two_results(tmp_path, [[1.0], [0.0]], [[1.0], [1.0]], temperature=0.5)
    assert compare([first, second]) == 1
    assert "temperature 1.0 and 0.5" in capsys.readouterr().err
    assert compare([first, second, "--other-sampling"]) == 0
    assert "played differently: temperature 1.0 and 0.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"evals": {"m": {"environment": "reverse_letters"}}}, "environment countdown and reverse_letters"),
        ({"evals": {"m": {"environment": "countdown", "kwargs": {"num_eval": 3}}}}, "kwargs "),
        ({"inference": {"engine": "fake", "dtype": "float16"}}, "dtype auto and float16"),
        ({"model": {"name": "tiny", "chat_template": "{{ messages }}"}}, "chat_template None and "),
        ({"model": {"name": "tiny", "enable_thinking": True}}, "enable_thinking False and True"),
    ],
)
def test_what_was_played_otherwise_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], sentence: str
):
    settings: dict[str, Any] = {"evals": {"m": {"environment": "countdown"}}}
    first, second = make_run(tmp_path / "a", config(**settings)), make_run(tmp_path / "b", config(**{**settings, **changes}))
    write_result(first, "m", 4, [[0.1], [0.2], [0.3]])
    write_result(second, "m", 4, [[1.0], [0.9], [1.0]])
    assert compare([str(first.path), str(second.path)]) == 1
    assert f"played differently ({sentence}" in capsys.readouterr().err
    assert compare([str(first.path), str(second.path), "--other-sampling"]) == 0


def test_another_seed_is_no_other_setup():
    settings: dict[str, Any] = {"evals": {"m": {"environment": "countdown"}}}
    setups = []
    for made in (config(**settings), config(**settings, seed=5)):
        (one,) = made.active_evals
        setups.append(list_setup(one, made.played[one.label], made.rollout, made.inference, made.model))
    assert setups[0] == setups[1] == json.loads(json.dumps(setups[0]))


def test_other_environments_are_not_paired_by_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = make_run(tmp_path / "a", config(evals={"m": {"environment": "countdown"}}))
    second = make_run(tmp_path / "b", config(evals={"m": {"environment": "reverse_letters"}}))
    write_result(first, "m", 4, [[0.1], [0.2]])
    write_result(second, "m", 4, [[1.0], [0.9]], texts="other")
    assert compare([str(first.path), str(second.path), "--other-sampling"]) == 1
    assert "two environments (environment countdown and reverse_letters" in capsys.readouterr().err


def test_how_a_result_was_played_stands_in_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = two_results(tmp_path, [[1.0], [0.0]], [[1.0], [1.0]], temperature=0.5)
    RunDirectory(Path(second)).config_json.write_text(RunDirectory(Path(first)).config_json.read_text())  # as a resume does
    assert compare([first, second]) == 1
    assert "temperature 1.0 and 0.5" in capsys.readouterr().err


def test_a_row_that_does_not_say_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_run(tmp_path / "old", config(evals={"countdown": {}}))
    write_result(run, "countdown", 2, [[1.0], [0.0]], old=True)
    assert compare([str(run.path), two_results(tmp_path, [[1.0], [0.0]], [[1.0], [1.0]])[0]]) == 0
    said = capsys.readouterr().out
    assert said.count("does not say how it was played") == 1
    assert f"{run.path}, step 2 does not say" in said


def test_several_results_of_one_step_are_refused_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_run(tmp_path / "run", config(evals={"countdown": {}}))
    alone = make_run(standalone_folder(run, "abc", 4), config(evals={"countdown": {}}))
    write_result(run, "countdown", 4, [[0.0], [1.0]])
    write_result(alone, "countdown", 4, [[1.0], [1.0]])
    assert compare([f"{run.path}@4", str(alone.path)]) == 1
    said = capsys.readouterr().err
    assert f"in {run.path} and in {alone.path}: --own takes the first" in said
    found = compared(capsys, f"{run.path}@4", str(alone.path), "--own")
    assert (found["reward_first"], found["reward_second"]) == (0.5, 1.0)
    other = make_run(standalone_folder(run, "def", 2), config(evals={"countdown": {}, "more": {"environment": "countdown"}}))
    another = make_run(standalone_folder(run, "fed", 2), config(evals={"countdown": {}}))
    write_result(other, "countdown", 2, [[0.0], [1.0]])
    write_result(other, "more", 2, [[0.0], [1.0]])
    write_result(another, "countdown", 2, [[0.0], [1.0]])
    assert compare([f"{run.path}@2", str(other.path), "--eval", "more"]) == 0
    assert compare([f"{run.path}@2", str(other.path)]) == 1
    assert "name one of these folders" in capsys.readouterr().err


def test_a_difference_without_a_spread_has_no_p(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = two_results(tmp_path, [[0.0], [0.0]], [[1.0], [1.0]])
    assert compare([first, second]) == 0
    assert "reward B − A +1.0000, the same of each prompt: without a spread" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["nowhere", "run@3", "run --eval maths"])
def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str):
    first, _ = two_results(tmp_path, [[1.0]], [[1.0]])
    name, *more = where.split()
    assert compare([first, str(tmp_path / name), *more]) == 1
    assert "telescope eval compare: " in capsys.readouterr().err


def score(index: int, text: str, answer: str) -> PromptScore:
    return PromptScore(index, text, (answer,), (1.0,), 1)


def test_under_another_template_prompts_are_paired_by_place_and_answer():
    first = [score(0, "<u>a", "1"), score(1, "<u>b", "2"), score(2, "<u>c", "3")]
    second = [score(0, "user: a", "1"), score(1, "user: b", "2"), score(2, "user: d", "4")]
    pairs, by = pair_prompts(first, second)
    assert ([(one.index, two.index) for one, two in pairs], by) == ([(0, 0), (1, 1)], "place and answer")
    moved = [score(5, "<u>b", "2"), score(6, "<u>a", "1")]
    pairs, by = pair_prompts(first, moved)
    assert ([(one.index, two.index) for one, two in pairs], by) == ([(0, 6), (1, 5)], "text")


def test_prompts_that_moved_and_failed_are_not_lost():
    def failed(index: int) -> PromptScore:
        return PromptScore(index, "", (), (0.0,), 0)

    first = [score(index, f"p{index}", "x") for index in range(4)]
    moved = [score(0, "p1", "x"), score(1, "p0", "x")]
    pairs, _ = pair_prompts(first, [*moved, failed(2), failed(3)])
    assert [(one.index, two.reward) for one, two in pairs] == [(0, 1.0), (1, 1.0), (2, 0.0), (3, 0.0)]
    both = [*first[:2], first[2], failed(3)]  # the last one failed in both, or each lost one of the other's
    pairs, _ = pair_prompts(both, [*moved, failed(2), failed(3)])
    assert [(one.reward, two.reward) for one, two in pairs[2:]] == [(1.0, 0.0), (0.0, 0.0)]
    pairs, _ = pair_prompts(first, [*moved, failed(2)])  # which of two it is, nobody knows
    assert len(pairs) == 2
    back, _ = pair_prompts([*moved, failed(2), failed(3)], first)
    assert sorted((one.reward, two.index) for one, two in back) == [(0.0, 2), (0.0, 3), (1.0, 0), (1.0, 1)]
