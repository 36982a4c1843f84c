"""What to try next: each rule speaks where its numbers say so, and is silent just short of that."""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from telescope.cli.show.advice import RULES, Advice, advise, has_fallen, is_higher
from telescope.cli.show.curves import NumberCurve, make_curve
from telescope.cli.show.figures import EnvironmentFigures, GroupFigures, RunFigures, RunSettings, TimeFigures

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = RunSettings(
    number_of_steps=40,
    learning_rate=1e-5,
    group_size=8,
    max_tokens=100,
    max_model_len=300,
    seq_len=300,
    max_async_rollout=4,
    max_off_policy_steps=8,
    max_concurrent_prompts_per_server=32,
    environments=("sums",),
    environment_names={"sums": "my_sums"},
)
TIME = TimeFigures(
    steps=20,
    step_s=10.0,
    trainer_works=0.7,
    trainer_waits=0.2,
    checkpoint_stall=0.0,
    other=0.1,
    weight_update_s=1.0,
    pause_share=0.01,
    servers=2,
    servers_generate=0.9,
    requests_at_once=40.0,
    queued_s=0.0,
    generating_s=5.0,
    scoring_s=0.1,
    slowest_ratio=2.0,
)
NOISE = (0.01, -0.01, 0.02, -0.02, 0.0)


def curve(name: str, first: float, last: float, count: int = 40) -> NumberCurve:
    """In a straight line, with some noise."""
    spread = max(abs(first), abs(last))
    values = [first + (last - first) * step / (count - 1) + NOISE[step % 5] * spread for step in range(count)]
    made = make_curve(name, values)
    assert made is not None
    return made


def figures(*curves: NumberCurve, **changes: Any) -> RunFigures:
    """Of a run that learns well, with other curves and values in place of its own."""
    own = (
        curve("reward/policy", 0.2, 0.6),
        curve("entropy", 1.0, 0.6),
        curve("cut off %", 5.0, 5.0),
        curve("format", 0.9, 0.99),
        curve("staleness", 1.0, 1.0),
        curve("logprob gap", 0.01, 0.01),
    )
    named = {one.name: one for one in (*own, *curves)}
    usual: dict[str, Any] = {
        "run_dir": "/runs/mine",
        "state": "running",
        "step": 40,
        "settings": SETTINGS,
        "arguments": ("env=[sums]", "environments.sums.kwargs.file=/data/a b.jsonl", "number_of_steps=40"),
        "groups": GroupFigures(begun=100, complete=90, discarded=20, discarded_reward=0.1),
        "environments": (EnvironmentFigures(label="sums", scored=800, failed=4, reward=0.4, truncated=40),),
        "time": TIME,
        "updates": 40,
    }
    return RunFigures(**{**usual, "curves": tuple(named.values()), **changes})


def settings(**changes: Any) -> RunSettings:
    return msgspec.structs.replace(SETTINGS, **changes)


def time(**changes: Any) -> TimeFigures:
    return msgspec.structs.replace(TIME, **changes)


FLAT = curve("reward/policy", 0.3, 0.3)
NAMED = settings(model="tiny", embedded=True)
FAILING = EnvironmentFigures(
    label="sums", scored=90, failed=10, reward=0.4, truncated=0, causes=(("grader: KeyError: 'x'", 9),)
)


def environment(**changes: Any) -> tuple[EnvironmentFigures, ...]:
    return (msgspec.structs.replace(FAILING, **changes),)


CASES: dict[str, tuple[RunFigures, RunFigures, str, str]] = {
    "none right": (
        figures(FLAT, environments=environment(failed=0, scored=64, best_reward=0.5), settings=NAMED),
        figures(FLAT, environments=environment(failed=0, scored=64, best_reward=0.6), settings=NAMED),
        "none of 64 answers has a reward above 0.5 (eval.pass_above); the best has 0.5",
        "telescope env check my_sums --model tiny rollout.max_tokens=100 'file=/data/a b.jsonl'",
    ),
    "failures": (
        figures(environments=(FAILING,)),
        figures(environments=environment(failed=4, scored=96)),
        "10 of 100 attempts at sums failed; most often: grader: KeyError: 'x'",
        "telescope env check my_sums 'file=/data/a b.jsonl'",
    ),
    "learning rate of 0": (
        figures(settings=settings(learning_rate=0.0)),
        figures(settings=settings(learning_rate=1e-9)),
        "the learning rate is 0 (trainer.learning_rate)",
        "trainer.learning_rate=1e-6",
    ),
    "too hard": (
        figures(groups=GroupFigures(begun=100, complete=90, discarded=60, discarded_reward=0.02, discarded_all_zero=50)),
        figures(groups=GroupFigures(begun=100, complete=90, discarded=44, discarded_reward=0.02, discarded_all_zero=44)),
        "60 of 90 scored groups had equal rewards, 0.02 on average, 50 of them 0 throughout",
        "telescope env check my_sums 'file=/data/a b.jsonl'",
    ),
    "too easy": (
        figures(groups=GroupFigures(begun=100, complete=90, discarded=60, discarded_reward=0.9)),
        figures(groups=GroupFigures(begun=7, complete=7, discarded=7, discarded_reward=0.9)),
        "60 of 90 scored groups had equal rewards, 0.9 on average",
        "'+environments.sums.curriculum={}'",
    ),
    "form": (
        figures(curve("format", 0.3, 0.4)),
        figures(curve("format", 0.3, 0.6)),
        "of the answers is what the reward expects (at first 31%)",
        "telescope env check my_sums",
    ),
    "cut off": (
        figures(curve("cut off %", 10.0, 40.0)),
        figures(curve("cut off %", 10.0, 15.0)),
        "of the answers ended at rollout.max_tokens=100",
        "rollout.max_tokens=200 inference.max_model_len=400 trainer.seq_len=400",
    ),
    "logprob gap": (
        figures(curve("logprob gap", 0.02, 0.5)),
        figures(curve("logprob gap", 0.02, 0.5), settings=settings(fake=True)),
        "nats apart",
        "telescope doctor logprobs",
    ),
    "skipped updates": (
        figures(updates_skipped=5),
        figures(updates_skipped=3),
        "5 of 40 updates were left out",
        "trainer.learning_rate=3.3e-06",
    ),
    "fell": (
        figures(curve("reward/policy", 0.6, 0.2)),
        figures(curve("reward/policy", 0.6, 0.57)),
        "the reward was 0.5",
        "trainer.learning_rate=3.3e-06 algorithm.kl_ref_coef=0.001",
    ),
    "no entropy": (
        figures(FLAT, curve("entropy", 0.3, 0.01)),
        figures(curve("entropy", 0.3, 0.01)),  # it learns
        "reward 0.3 → 0.3",
        "trainer.learning_rate=3.3e-06 algorithm.kl_ref_coef=0.001",
    ),
    "slow": (
        figures(FLAT, curve("entropy", 1.0, 1.0)),
        figures(FLAT, curve("entropy", 1.0, 0.8)),  # the policy moves
        "over 40 versions; trainer.learning_rate=1e-05",
        "trainer.learning_rate=3e-05",
    ),
    "too old": (
        figures(groups=GroupFigures(begun=110, complete=90, too_old=20)),
        figures(groups=GroupFigures(begun=110, complete=90, too_old=5)),
        "20 groups were retired as too old, 90 were scored",
        "orchestrator.max_off_policy_steps=16",
    ),
    "stale samples": (
        figures(FLAT, curve("staleness", 1.0, 4.0)),
        figures(curve("staleness", 1.0, 4.0)),  # it learns all the same
        "versions old; reward 0.3 → 0.3",
        "orchestrator.max_async_rollout=2",
    ),
    "slow scoring": (
        figures(time=time(trainer_waits=0.6, trainer_works=0.3, scoring_s=9.0), settings=settings(env_num_workers=6)),
        figures(time=time(trainer_waits=0.4, trainer_works=0.3, scoring_s=9.0)),
        "a rollout is generated in 5 s and scored in 9 s",
        "cluster.env_num_workers=12",
    ),
    "nobody works": (
        figures(time=time(trainer_waits=0.6, trainer_works=0.3, servers_generate=0.5, requests_at_once=200.0)),
        figures(time=time(trainer_waits=0.6, trainer_works=0.3, servers_generate=0.5, steps=2)),
        "servers have no request 50% of it",
        "orchestrator.max_concurrent_prompts_per_server=64",
    ),
    "servers limit": (
        figures(time=time(trainer_waits=0.6, trainer_works=0.3)),
        figures(time=time(trainer_waits=0.6, trainer_works=0.3, servers_generate=None)),
        "the trainer waits for a batch 60% of the time; servers have a request 90% of it",
        "telescope plan --calibrate /runs/mine",
    ),
    "trainer limits": (
        figures(time=time(servers_generate=0.3)),
        figures(time=time(servers_generate=0.7)),
        "the trainer works 70% of the time, and servers have no request 70% of it",
        "telescope plan --calibrate /runs/mine",
    ),
    "failed": (
        figures(state="failed", step=0, curves=(), groups=GroupFigures(), environments=(), time=None),
        figures(state="stopped"),
        "the run failed before its first step was done",
        "telescope runs tail /runs/mine --once",
    ),
    "it learns": (
        figures(state="done", checkpoints=(20, 40)),
        figures(state="running", checkpoints=(20,)),
        "over 40 versions",
        "telescope runs resume /runs/mine number_of_steps=80",
    ),
    "too early": (
        figures(curve("reward/policy", 0.3, 0.3, count=9), state="done"),
        figures(curve("reward/policy", 0.2, 0.6, count=9), state="done"),  # higher by more than noise
        "scored to the end: 9; reward 0.3 → 0.3 (noise ±0.0077, 800 rollouts)",
        "number_of_steps=80",
    ),
}


def find(advice: list[Advice], rule: str) -> Advice | None:
    return next((one for one in advice if one.rule == rule), None)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_gives_its_numbers_and_the_line_to_type_and_is_silent_short_of_them(rule: str):
    speaks, silent, found, command = CASES[rule]
    advice = find(advise(speaks), rule)
    assert advice is not None
    assert found in f"{advice.found} {advice.reason}"
    assert command in advice.command
    assert advice.reason.endswith(".")
    assert find(advise(silent), rule) is None


def test_no_rule_is_without_a_case():
    spoken = {one.rule for speaks, *_ in CASES.values() for one in advise(speaks)}
    assert spoken == set(CASES)
    assert all(any(rule(speaks) for speaks, *_ in CASES.values()) for rule in RULES)


def test_every_rule_is_in_the_docs_under_its_name():
    told = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/why_not.md").read_text(), re.MULTILINE)
    assert sorted(rule for rule in told if rule in CASES) == sorted(CASES)


def test_of_a_run_that_learns_and_is_busy_no_rule_says_anything():
    assert advise(figures()) == []


def test_of_a_run_of_which_nothing_is_known_no_rule_says_anything():
    assert advise(RunFigures(run_dir="/runs/mine")) == []


SEVERAL = settings(environments=("sums", "hard"), environment_names={"sums": "my_sums", "hard": "hard"})


@pytest.mark.parametrize(
    ("reward", "rule", "found", "command"),
    [
        (0.02, "too hard", "45 of them at hard, 0.02 on average, 40 of them 0 throughout", "telescope env check hard"),
        (0.9, "too easy", "45 of them at hard, 0.9 on average", "+environments.hard.curriculum={}"),
    ],
)
def test_of_several_environments_the_one_with_most_equal_groups_is_named(reward: float, rule: str, found: str, command: str):
    """Not the first: whether its prompts are too hard is judged by its own rewards."""
    easy = EnvironmentFigures(label="sums", scored=400, failed=0, reward=0.5, truncated=0, equal_groups=15, equal_reward=0.5)
    hard = msgspec.structs.replace(easy, label="hard", equal_groups=45, equal_reward=reward, equal_all_zero=40)
    groups = GroupFigures(begun=100, complete=90, discarded=60, discarded_reward=0.3)
    advice = find(advise(figures(settings=SEVERAL, environments=(easy, hard), groups=groups)), rule)
    assert advice is not None
    assert advice.found.startswith(f"60 of 90 scored groups had equal rewards, {found}")
    assert command in advice.command
    unknown = find(advise(figures(settings=SEVERAL, environments=(), groups=groups)), "too hard")
    assert unknown is not None
    assert "telescope env check NAME" in unknown.command


def test_of_several_environments_the_one_whose_form_fails_is_named():
    good = EnvironmentFigures(label="sums", scored=400, failed=0, reward=0.5, truncated=0, form=curve("format sums", 0.9, 0.95))
    bad = msgspec.structs.replace(good, label="hard", form=curve("format hard", 0.2, 0.3))
    advice = find(advise(figures(settings=SEVERAL, environments=(good, bad))), "form")  # of all together it is over a half
    assert advice is not None
    assert "of the answers at hard is what the reward expects" in advice.found
    assert advice.command == "telescope env check hard"
    both = figures(curve("format", 0.3, 0.4), settings=SEVERAL, environments=(good,))
    assert find(advise(both), "form") is None


def test_a_task_that_is_solved_is_not_one_that_does_not_learn():
    solved = figures(FLAT, curve("exact", 0.97, 0.98), curve("entropy", 0.3, 0.01), curve("staleness", 1.0, 4.0))
    assert find(advise(solved), "no entropy") is None


def test_a_line_to_type_has_the_run_s_own_arguments_with_the_new_value_in_place_of_the_old():
    advice = find(
        advise(figures(settings=settings(learning_rate=0.0), arguments=("a=1", "trainer.learning_rate=0"))),
        "learning rate of 0",
    )
    assert advice is not None
    assert shlex.split(advice.command) == ["telescope", "run", "a=1"]
    still = figures(settings=settings(learning_rate=0.0), checkpoints=(20,))
    told = find(advise(still), "learning rate of 0")
    assert told is not None
    assert "it can go on from step 20 with trainer.learning_rate=1e-6: telescope runs resume /runs/mine trainer" in told.resume
    slow = find(advise(figures(FLAT, curve("entropy", 1.0, 1.0), arguments=("trainer.learning_rate=1e-5", "a=1"))), "slow")
    assert slow is not None
    assert shlex.split(slow.command) == ["telescope", "run", "a=1", "trainer.learning_rate=3e-05"]


def test_where_the_arguments_are_not_known_an_ellipsis_stands_for_them():
    advice = find(advise(figures(FLAT, curve("entropy", 1.0, 1.0), arguments=None)), "slow")
    assert advice is not None
    assert advice.command == "telescope run … trainer.learning_rate=3e-05"


def test_a_run_that_learns_and_saved_nothing_is_run_for_longer_with_checkpoints():
    advice = find(advise(figures(state="done")), "it learns")
    assert advice is not None
    assert re.search(r"number_of_steps=80 checkpoint\.every=20$", advice.command)


@pytest.mark.parametrize(("count", "higher_at_most", "fallen_at_most"), [(12, 25, 10), (40, 25, 10), (300, 25, 16)])
def test_noise_alone_is_seldom_taken_for_a_rise_and_seldom_for_a_fall(count: int, higher_at_most: int, fallen_at_most: int):
    draw = random.Random(1)
    curves = [make_curve("reward/policy", [draw.gauss(0.3, 0.05) for _ in range(count)]) for _ in range(400)]
    known = [one for one in curves if one is not None]
    assert sum(map(is_higher, known)) <= higher_at_most
    assert sum(map(has_fallen, known)) <= fallen_at_most


def test_where_slots_are_free_more_of_them_would_not_help():
    advice = find(advise(figures(time=time(trainer_waits=0.6, trainer_works=0.3, servers_generate=0.5))), "nobody works")
    assert advice is not None
    assert advice.command.endswith(" orchestrator.max_async_rollout=8")
    synchronous = figures(
        time=time(trainer_waits=0.6, trainer_works=0.3, servers_generate=0.5), settings=settings(max_async_rollout=0)
    )
    assert find(advise(synchronous), "nobody works").command.endswith(" orchestrator.max_async_rollout=1")


def test_a_run_that_was_lost_goes_on_from_its_checkpoint():
    advice = find(advise(figures(state="lost", checkpoints=(20, 30))), "failed")
    assert advice is not None
    assert advice.command == "telescope runs resume /runs/mine"
    assert "from the checkpoint of step 30" in advice.reason


def test_a_penalty_that_the_run_has_is_advised_to_grow():
    fallen = curve("reward/policy", 0.6, 0.2)
    advice = find(advise(figures(fallen, settings=settings(kl_ref_coef=0.01))), "fell")
    assert advice is not None
    assert advice.command.endswith("algorithm.kl_ref_coef=0.02")


def test_the_limit_of_an_environment_s_own_is_the_one_to_raise():
    own = settings(environment_max_tokens={"sums": 50})
    advice = find(advise(figures(curve("cut off %", 10.0, 40.0), settings=own)), "cut off")
    assert advice is not None
    assert "environments.sums.max_tokens=100 inference.max_model_len=350 trainer.seq_len=350" in advice.command
    assert advice.found == "40 of 800 answers at sums ended at environments.sums.max_tokens=50"


def test_where_nothing_is_right_the_first_advice_is_to_see_what_the_model_answers():
    groups = GroupFigures(begun=100, complete=100, discarded=100, discarded_reward=0.0, discarded_all_zero=100)
    nothing = curve("reward/policy", 0.0, 0.0)
    advice = advise(figures(nothing, groups=groups, environments=environment(best_reward=0.0, reward=0.0), settings=NAMED))
    assert [one.rule for one in advice][:3] == ["none right", "failures", "too hard"]
    rising = figures(environments=environment(failed=0, scored=800, best_reward=0.4), settings=NAMED)  # parts of a reward
    assert find(advise(rising), "none right") is None


def test_of_several_environments_the_one_without_a_right_answer_is_named():
    """The best answer of all is another's, and so is the rise of the reward."""
    easy = EnvironmentFigures(label="sums", scored=400, failed=0, reward=0.5, best_reward=1.0, truncated=0)
    bad = msgspec.structs.replace(easy, label="bad", scored=70, reward=0.1, best_reward=0.2)
    hard = msgspec.structs.replace(easy, label="hard", scored=80, reward=0.0, best_reward=0.0)
    curves = (curve("reward sums", 0.2, 0.8), curve("reward hard", 0.0, 0.0), curve("reward bad", 0.1, 0.1))
    run = figures(*curves, settings=SEVERAL, environments=(easy, bad, hard))
    advice = find(advise(run), "none right")
    assert advice is not None
    assert advice.found == "none of 80 answers at hard has a reward above 0.5 (eval.pass_above); the best has 0"
    rising = figures(curve("reward hard", 0.0, 0.4), settings=SEVERAL, environments=(easy, hard))
    assert find(advise(rising), "none right") is None


@pytest.mark.parametrize(
    ("changes", "where", "command"),
    [
        ({"state": "done", "saved": (40,)}, "above; then ask it", "telescope chat /runs/mine"),
        ({"state": "running", "saved": (40,)}, "above; this shows more", "telescope show /runs/mine --samples 20"),
        ({"state": "done"}, "above; this shows more", "telescope show /runs/mine --samples 20"),
    ],
)
def test_a_model_that_is_not_small_does_not_answer_on_this_machines_cpu(changes: dict[str, Any], where: str, command: str):
    nothing = environment(failed=0, scored=64, best_reward=0.0)
    run = figures(FLAT, environments=nothing, settings=settings(model="Qwen/Qwen2.5-7B"), **changes)
    advice = find(advise(run), "none right")
    assert advice is not None
    assert advice.command == command
    assert where in advice.reason


@pytest.mark.parametrize(("discarded", "complete", "told"), [(6, 8, False), (12, 16, True), (24, 32, True), (60, 90, True)])
def test_few_equal_groups_may_be_chance(discarded: int, complete: int, told: bool):
    """The 95 % interval of 12 in 16 begins at 0.505, that of 6 in 8 at 0.409."""
    advice = advise(figures(groups=GroupFigures(begun=99, complete=complete, discarded=discarded, discarded_reward=0.0)))
    assert (find(advice, "too hard") is not None) is told


def test_more_equal_groups_than_scored_ones_are_all_of_them():
    """Where rows are cut or damaged."""
    advice = advise(figures(groups=GroupFigures(begun=9, complete=8, discarded=9, discarded_reward=0.0)))
    assert find(advice, "too hard") is not None


def test_a_course_that_is_all_noise_is_too_short_to_tell_and_no_reason_to_change_a_setting():
    made = make_curve("reward/policy", [0.1, 0.6, 0.2, 0.7, 0.3] * 5)
    assert made is not None
    old = curve("staleness", 1.0, 4.0)
    advice = advise(figures(made, old, curve("entropy", 1.0, 1.0), state="done"))
    assert [one.rule for one in advice] == ["too early"]
    assert "0.38 → 0.38 (noise ±0.33, 800 rollouts)" in advice[0].found
    assert advise(figures(made, state="running"))[0].command == "telescope show /runs/mine"


@pytest.mark.parametrize(
    ("rule", "changes", "resume"),
    [
        (
            "fell",
            {"checkpoints": (10, 20, 40), "state": "done", "best_version": 22},
            "Or go on from step 20, before it fell, with it: telescope runs resume /runs/mine trainer.learning_rate=3.3e-06 "
            "algorithm.kl_ref_coef=0.001 checkpoint.resume=20",
        ),
        (
            "fell",
            {"checkpoints": (20, 40), "best_version": 3},
            "This needs a new run: what is saved (step 20, 40) has the fault already.",
        ),
        (
            "no entropy",
            {"checkpoints": (10, 20, 40), "state": "done", "best_version": 22},
            "Or go on with it from an earlier step than 40 (STEP is one of 10, 20): telescope runs resume /runs/mine "
            "trainer.learning_rate=3.3e-06 algorithm.kl_ref_coef=0.001 checkpoint.resume=STEP",
        ),
        (
            "no entropy",
            {"checkpoints": (40,)},
            "This needs a new run: what is saved (step 40) has the fault already.",
        ),
        (
            "slow",
            {"checkpoints": (20, 40), "state": "done"},
            "Or go on from step 40 with it and more steps: telescope runs resume /runs/mine trainer.learning_rate=3e-05 "
            "number_of_steps=80",
        ),
        ("slow", {"checkpoints": (20,), "saved": (20, 40), "state": "done"}, "=3e-05 number_of_steps=80"),  # 40: weights alone
        ("too early", {"checkpoints": (40,), "state": "done"}, "runs resume /runs/mine number_of_steps=80"),
        ("cut off", {"checkpoints": (20,), "state": "running"}, "Once it has ended, it can go on from step 20 with it: "),
        ("cut off", {}, "This needs a new run: nothing is saved that this one could go on from."),
        (
            "stale samples",
            {"checkpoints": (20,)},
            "This needs a new run: `telescope runs resume` keeps orchestrator.max_async_rollout.",
        ),
        ("too easy", {"checkpoints": (20,)}, "`telescope runs resume` keeps environments.sums.curriculum."),
    ],
)
def test_of_a_changed_setting_it_is_said_whether_the_run_can_go_on_with_it(rule: str, changes: dict[str, Any], resume: str):
    advice = find(advise(msgspec.structs.replace(CASES[rule][0], **changes)), rule)
    assert advice is not None
    assert resume in advice.resume


@pytest.mark.parametrize("rule", sorted(CASES))
def test_each_line_that_changes_a_setting_says_it(rule: str):
    advice = find(advise(CASES[rule][0]), rule)
    assert advice is not None
    assert bool(advice.resume) == (advice.command.startswith("telescope run ") and rule != "it learns")
