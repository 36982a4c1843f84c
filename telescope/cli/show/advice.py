"""What to try next: rules over the figures of a run, each with the numbers that it rests on, a reason and the line to type.

Pure: a rule is a function of `RunFigures`, and says nothing where its numbers are not there. It rests on nothing that the page
does not show. The order of `RULES` is the order in which a person would mend things: what ends or blinds a run comes before
what slows it down. Refuses to read a run (figures.py does) and to change one.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from telescope.cli.show.curves import EDGE, NumberCurve
from telescope.cli.show.figures import EnvironmentFigures, RunFigures
from telescope.config.resume import find_obstacles_to_resume
from telescope.maths.evals import share_interval

MANY_FAILED = 0.05
"""Of an environment's attempts; a run itself alerts from there."""
MANY_EQUAL = 0.5
"""Of scored groups: more than half of what is sampled trains nothing. The default run discards a third."""
FEWEST_GROUPS = 8
FEWEST_SCORED = 64
"""Answers before that none is right says something: as many as eight groups have."""
MANY_TRUNCATED_PCT = 20.0
FEW_PARSED = 0.5
MORE_SAMPLES = 20
"""Wrong answers, to find out what is wrong with them."""
DETERMINISTIC_NATS = 0.05
"""Entropy a token below which samples of one prompt hardly differ."""
HARDLY_MOVED = 0.05
"""Change of the entropy, as a share of it, below which the policy has hardly changed."""
SURE = 2.0
"""Standard errors by which a change is more than noise."""
SURE_OF_BEST = 4.0
"""The same of a fall from the best place of a curve: among many places one is high by chance."""
FELL = 0.1
"""Of the best reward, that it must have lost."""
SOLVED = 0.95
SMALL_RATE = "trainer.learning_rate=1e-6"
SLOW_STEPS = 20
"""Versions before a reward that stands still is the learning rate's fault."""
OLD_VERSIONS = 2.0
MANY_TOO_OLD = 0.1
WIDE_GAP_NATS = 0.2
"""Mean |sampler - trainer| of log-probs; samples that are some versions old have hundredths."""
MANY_SKIPPED = 0.1
LONG_WAIT = 0.5
"""Of the steps' time, that the trainer has no batch."""
FEWEST_STEPS = 2 * EDGE
"""That are timed, before a wait is a sign."""
WIDE_NOISE = 0.25
"""Of the largest value of a curve: where its noise is wider, a change that matters could hide in it."""
LONG_IDLE = 0.4
"""Of the steps' time, that a server has no request."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """`rule`: its name; `found`: the numbers; `reason`: what they mean and what helps; `command`: the line to type.
    `resume`: of changed settings, whether the run itself can go on with them."""

    rule: str
    found: str
    reason: str
    command: str
    resume: str = ""


Rule = Callable[[RunFigures], Advice | None]


def advise(figures: RunFigures, rules: Sequence[Rule] | None = None) -> list[Advice]:
    """What each rule says that has something to say, the most pressing first."""
    return [advice for rule in (RULES if rules is None else rules) if (advice := rule(figures)) is not None]


# ---- what the reward has done


def count_versions(curve: NumberCurve) -> str:
    return f"{curve.count} version{'s' * (curve.count != 1)}"


def is_higher(curve: NumberCurve) -> bool:
    """At the end than at the beginning, by more than noise."""
    return curve.error is not None and curve.change > max(SURE * curve.error, 1e-9)


def has_fallen(curve: NumberCurve) -> bool:
    """From its best, by more than noise and a share of it."""
    lost = curve.best - curve.last
    return curve.error is not None and lost > max(SURE_OF_BEST * curve.error, 1e-9) and lost > FELL * abs(curve.best)


def is_flat(curve: NumberCurve) -> bool:
    """There are enough values, and the end is not above the beginning by more than noise."""
    return curve.count >= 2 * EDGE and curve.error is not None and not is_higher(curve)


def is_unclear(curve: NumberCurve) -> bool:
    """No change is seen, and there are too few values, or too few rollouts for their spread, to say that there is none."""
    if is_higher(curve) or has_fallen(curve):
        return False
    return curve.count < 2 * EDGE or _noise(curve) > WIDE_NOISE * max(abs(curve.low), abs(curve.high))


def _flat_reward(figures: RunFigures) -> NumberCurve | None:
    """The reward's curve where it stands still and answers could be better; else None."""
    reward, exact = figures.find("reward/policy"), figures.find("exact")
    solved = exact is not None and exact.last >= SOLVED
    return reward if reward is not None and is_flat(reward) and not is_unclear(reward) and not solved else None


def _is_surely_above(part: int, whole: int, share: float) -> bool:
    """By more than so few would differ by chance (Wilson's interval). Where rows are cut or damaged the part may be the larger
    one: then it is all."""
    return whole > 0 and share_interval(min(part, whole) / whole, 0.0, whole, 1)[0] > share


# ---- rules


def find_none_right(figures: RunFigures) -> Advice | None:
    """What earns nothing whatever it says has nothing to learn from; whether task, reward or model is to blame shows in a few
    answers."""
    above = figures.settings.pass_above
    best = {one: one.best_reward for one in figures.environments if one.best_reward is not None}
    none_right = [one for one in best if one.scored >= FEWEST_SCORED and best[one] <= above and not _rises(figures, one)]
    if not none_right:
        return None
    worst = min(none_right, key=lambda one: best[one])
    whose = "" if len(figures.environments) == 1 else f" at {worst.label}"
    where, command = _look_at_answers(figures, worst)
    return Advice(
        rule="none right",
        found=f"none of {worst.scored:,} answers{whose} has a reward above {above:g} (eval.pass_above); the best has "
        f"{best[worst]:.3g}",
        reason=f"See what the model answers, and what the reward says of it{where}: the prompt may not say the form, the "
        "reward may miss right answers, or the task is too hard for this model.",
        command=command,
    )


def _rises(figures: RunFigures, environment: EnvironmentFigures) -> bool:
    """The reward of that environment."""
    reward = figures.find("reward/policy" if len(figures.environments) == 1 else f"reward {environment.label}")
    return reward is not None and is_higher(reward)


def _look_at_answers(figures: RunFigures, environment: EnvironmentFigures) -> tuple[str, str]:
    """(where, the line to type): a small model answers on this machine's CPU, a larger one where it can be served, once the run
    leaves it the room; else there are the answers that the run has."""
    settings = figures.settings
    if settings.embedded:
        limit = settings.environment_max_tokens.get(environment.label) or settings.max_tokens
        words = () if limit is None else (f"rollout.max_tokens={limit}",)
        return "", _check_environment(figures, environment.label, "--model", settings.model, *words)
    if figures.saved and figures.state not in ("running", "waiting") and not settings.fake:
        return ", above; then ask it", shlex.join(["telescope", "chat", figures.run_dir])
    return ", above; this shows more", shlex.join(["telescope", "show", figures.run_dir, "--samples", str(MORE_SAMPLES)])


def find_failures(figures: RunFigures) -> Advice | None:
    """Attempts that end without a score teach nothing, and may be the answers that matter."""
    worst = max(figures.environments, key=lambda one: one.failed_share, default=None)
    if worst is None or worst.failed_share < MANY_FAILED:
        return None
    cause = worst.causes[0][0] if worst.causes else "no cause is known"
    return Advice(
        rule="failures",
        found=f"{worst.failed} of {worst.failed + worst.scored} attempts at {worst.label} failed; most often: {cause}",
        reason="Failed attempts are not trained on. Play the environment alone, where its error is shown whole.",
        command=_check_environment(figures, worst.label),
    )


def find_fixed_weights(figures: RunFigures) -> Advice | None:
    """With a learning rate of 0 the weights stay what they are."""
    if figures.settings.learning_rate != 0.0:
        return None
    return Advice(
        rule="learning rate of 0",
        found="the learning rate is 0 (trainer.learning_rate)",
        reason="The weights do not move: every change of the curves is noise. Leave the setting out, or give a rate.",
        command=_start_over(figures, without=("trainer.learning_rate",))
        if _has(figures, "trainer.learning_rate")
        else _start_over(figures, SMALL_RATE),
        resume=_explain_resume(figures, SMALL_RATE, what=SMALL_RATE),
    )


def find_equal_groups(figures: RunFigures) -> Advice | None:
    """Groups whose rewards are all equal have no advantage."""
    groups, settings = figures.groups, figures.settings
    if groups.complete < FEWEST_GROUPS or not _is_surely_above(groups.discarded, groups.complete, MANY_EQUAL):
        return None
    found = f"{groups.discarded} of {groups.complete} scored groups had equal rewards"
    reward, all_zero, label = groups.discarded_reward, groups.discarded_all_zero, _find_only_environment(figures)
    worst = max(figures.environments, key=lambda one: one.equal_groups, default=None)
    if not label and worst is not None and worst.equal_groups:
        reward, all_zero, label = worst.equal_reward, worst.equal_all_zero, worst.label
        found += f", {worst.equal_groups} of them at {label}"
    label = label or "NAME"
    if reward is not None and reward > settings.pass_above:
        return _advise_change(
            figures,
            f"+environments.{label}.curriculum={{}}",
            rule="too easy",
            found=f"{found}, {reward:.3g} on average",
            reason="Most prompts are always solved and teach nothing. Take harder ones, or draw by how often each is solved.",
        )
    mean = "" if reward is None else f", {reward:.3g} on average"
    zero = f", {all_zero} of them 0 throughout" if all_zero else ""
    return Advice(
        rule="too hard",
        found=f"{found}{mean}{zero}",
        reason="Nothing can be compared in them. Take easier prompts or a larger model, give part of the reward for part of "
        "the way, or sample each prompt more often (rollout.group_size). First see that the reward takes right answers.",
        command=_check_environment(figures, label),
    )


def find_truncated(figures: RunFigures) -> Advice | None:
    """Answers that end at the limit on tokens have mostly not come to their result."""
    cut, settings = figures.find("cut off %"), figures.settings
    if cut is None or cut.last < MANY_TRUNCATED_PCT or settings.max_tokens is None:
        return None
    worst = max(figures.environments, key=lambda one: one.truncated / max(1, one.scored), default=None)
    own = settings.environment_max_tokens.get(worst.label) if worst is not None else None
    name = f"environments.{worst.label}.max_tokens" if worst is not None and own is not None else "rollout.max_tokens"
    limit = own or settings.max_tokens
    changes = [f"{name}={2 * limit}"]
    if settings.max_model_len is not None:
        needed = settings.max_model_len + limit
        changes.append(f"inference.max_model_len={needed}")
        if settings.seq_len is not None and settings.seq_len < needed:
            changes.append(f"trainer.seq_len={needed}")
    share = f"{cut.last:.0f} % of the answers"
    if worst is not None and own is not None:
        share = f"{worst.truncated} of {worst.scored} answers at {worst.label}"
    return _advise_change(
        figures,
        *changes,
        rule="cut off",
        found=f"{share} ended at {name}={limit}",
        reason="What is cut off has seldom come to its answer. Give more room; or, if they ramble, let length cost reward "
        "(algorithm.overlong_buffer_tokens).",
    )


def find_unparsed(figures: RunFigures) -> Advice | None:
    """An answer in another form than the reward expects scores nothing, however right it is."""
    form, label, whose = figures.find("format"), _find_only_environment(figures), ""
    forms = [(one.form, one.label) for one in figures.environments if one.form is not None]
    if not label and forms:
        form, label = min(forms, key=lambda one: one[0].last)
        whose = f" at {label}"
    if form is None or form.last > FEW_PARSED:
        return None
    return Advice(
        rule="form",
        found=f"the form of {form.last:.0%} of the answers{whose} is what the reward expects (at first {form.first:.0%})",
        reason="The rest scores nothing, right or wrong. Show the form in the prompt, or let the parser take more.",
        command=_check_environment(figures, label or "NAME"),
    )


def find_fallen_reward(figures: RunFigures) -> Advice | None:
    """The policy was better than it is."""
    reward, rate = figures.find("reward/policy"), figures.settings.learning_rate
    if reward is None or not rate or not has_fallen(reward):
        return None
    return _advise_change(
        figures,
        *_hold_back(figures, rate),
        rule="fell",
        found=f"the reward was {reward.best:.3g} and is {reward.last:.3g} (noise ±{_noise(reward):.2g}); "
        f"trainer.learning_rate={rate:g}",
        reason="The updates are too large, or the policy has drifted off: a third of the rate, and a penalty on the divergence "
        "from the base model.",
        better=figures.best_version,
        lost=True,
    )


def find_no_entropy(figures: RunFigures) -> Advice | None:
    """A policy that is certain of each token does not find anything better."""
    reward, entropy, rate = _flat_reward(figures), figures.find("entropy"), figures.settings.learning_rate
    if reward is None or entropy is None or not rate or entropy.last >= DETERMINISTIC_NATS:
        return None
    return _advise_change(
        figures,
        *_hold_back(figures, rate),
        rule="no entropy",
        found=f"entropy {entropy.first:.3g} → {entropy.last:.3g} nats a token; reward {reward.first:.3g} → {reward.last:.3g} "
        f"(noise ±{_noise(reward):.2g})",
        reason="The samples of a prompt hardly differ, so nothing better is found. A lower rate and a penalty on the "
        "divergence from the base model keep answers apart.",
        lost=True,
    )


def find_slow_learning(figures: RunFigures) -> Advice | None:
    """Rewards differ within groups, and the policy does not move."""
    reward, entropy, rate = _flat_reward(figures), figures.find("entropy"), figures.settings.learning_rate
    if reward is None or entropy is None or not rate or reward.count < SLOW_STEPS or has_fallen(reward):
        return None
    moved = abs(entropy.change) / max(abs(entropy.first), 1e-9)
    if entropy.last < DETERMINISTIC_NATS or moved > HARDLY_MOVED or figures.groups.equal_share >= MANY_EQUAL:
        return None
    return _advise_change(
        figures,
        f"trainer.learning_rate={3 * rate:.2g}",
        rule="slow",
        found=f"reward {reward.first:.3g} → {reward.last:.3g} (noise ±{_noise(reward):.2g}) and entropy {entropy.first:.3g} → "
        f"{entropy.last:.3g} over {count_versions(reward)}; trainer.learning_rate={rate:g}",
        reason="There is something to learn, and the policy has hardly changed: three times the rate.",
    )


def find_gap(figures: RunFigures) -> Advice | None:
    """Trainer and servers should give one token the same probability."""
    gap = figures.find("logprob gap")
    if gap is None or gap.last < WIDE_GAP_NATS or figures.settings.fake:
        return None
    return Advice(
        rule="logprob gap",
        found=f"log-probs of trainer and servers are {gap.last:.2g} nats apart (at first {gap.first:.2g})",
        reason="Some hundredths are usual. Servers may compute another model than the trainer; this compares the two alone.",
        command=_command(figures, ["telescope", "doctor", "logprobs"]),
    )


def find_skipped_updates(figures: RunFigures) -> Advice | None:
    """An update that was left out has taught nothing."""
    rate = figures.settings.learning_rate
    if not figures.updates_skipped or figures.updates_skipped < MANY_SKIPPED * figures.updates or not rate:
        return None
    return _advise_change(
        figures,
        f"trainer.learning_rate={rate / 3:.2g}",
        rule="skipped updates",
        found=f"{figures.updates_skipped} of {figures.updates} updates were left out",
        reason="Their gradient was no finite number, or filters had left nothing to train: the alerts say which. Of the first, "
        "a third of the rate helps most often.",
    )


def find_old_samples(figures: RunFigures) -> Advice | None:
    """What was sampled long ago says little of the policy that it trains."""
    age, groups, ahead = figures.find("staleness"), figures.groups, figures.settings.max_async_rollout
    lost = groups.too_old / max(1, groups.too_old + groups.complete)
    if lost >= MANY_TOO_OLD and figures.settings.max_off_policy_steps is not None:
        limit = figures.settings.max_off_policy_steps
        return _advise_change(
            figures,
            f"orchestrator.max_off_policy_steps={2 * limit}",
            rule="too old",
            found=f"{groups.too_old} groups were retired as too old, {groups.complete} were scored",
            reason="The slowest answers are thrown away, which favours short ones. Retire them later, or run less far ahead "
            "(orchestrator.max_async_rollout).",
        )
    reward = figures.find("reward/policy")
    if age is None or not ahead or age.last <= OLD_VERSIONS or reward is None or is_higher(reward) or is_unclear(reward):
        return None
    return _advise_change(
        figures,
        f"orchestrator.max_async_rollout={ahead // 2}",
        rule="stale samples",
        found=f"samples are {age.last:.2g} versions old; reward {reward.first:.3g} → {reward.last:.3g} "
        f"(noise ±{_noise(reward):.2g})",
        reason="Old samples pull the policy to where it was. Let generation run less far ahead of training.",
    )


def find_waiting(figures: RunFigures) -> Advice | None:
    """Trainer or servers stand idle."""
    time = figures.time
    if time is None or time.servers_idle is None or time.steps < FEWEST_STEPS:
        return None
    waits, idle = f"the trainer waits for a batch {time.trainer_waits:.0%} of the time", f"{time.servers_idle:.0%}"
    scoring, generating = time.scoring_s or 0.0, time.generating_s or 0.0
    if time.trainer_waits >= LONG_WAIT and scoring > max(generating, 1e-3):
        return _advise_change(
            figures,
            f"cluster.env_num_workers={2 * (figures.settings.env_num_workers or 1)}",
            rule="slow scoring",
            found=f"{waits}; a rollout is generated in {generating:.2g} s and scored in {scoring:.2g} s",
            reason="The environment is what limits the run. Give it more worker processes, or make its reward faster.",
        )
    if time.trainer_waits >= LONG_WAIT and time.servers_idle >= LONG_IDLE:
        return _fill_servers(figures, f"{waits}, and servers have no request {idle} of it", time.requests_at_once or 0.0)
    if time.trainer_waits >= LONG_WAIT:
        return Advice(
            rule="servers limit",
            found=f"{waits}; servers have a request {1 - time.servers_idle:.0%} of it",
            reason="Generation is what limits the run: more servers, or fewer trainer ranks. The plan simulates it with this "
            "run's own times.",
            command=_command(figures, ["telescope", "plan", "--calibrate", figures.run_dir]),
        )
    if time.servers_idle >= LONG_IDLE and time.trainer_works >= LONG_WAIT:
        return Advice(
            rule="trainer limits",
            found=f"the trainer works {time.trainer_works:.0%} of the time, and servers have no request {idle} of it",
            reason="Training is what limits the run: more trainer ranks, or fewer servers. The plan simulates it with this "
            "run's own times.",
            command=_command(figures, ["telescope", "plan", "--calibrate", figures.run_dir]),
        )
    return None


def _fill_servers(figures: RunFigures, found: str, at_once: float) -> Advice:
    """Both sides are idle: servers take no more at once, or there are not more rollouts to be had yet."""
    settings = figures.settings
    groups, ahead = settings.max_concurrent_prompts_per_server or 32, settings.max_async_rollout or 0
    found = f"{found}; {at_once:.3g} requests at once"
    if at_once >= groups * (settings.group_size or 1) / 2:
        return _advise_change(
            figures,
            f"orchestrator.max_concurrent_prompts_per_server={2 * groups}",
            rule="nobody works",
            found=found,
            reason="All slots are taken, and the slowest answers hold a batch up. Let a server take more at once.",
        )
    return _advise_change(
        figures,
        f"orchestrator.max_async_rollout={max(1, 2 * ahead)}",
        rule="nobody works",
        found=found,
        reason="Slots are free: single slow answers, or processes that lack a core, hold a batch up. Generation that runs "
        "further ahead fills the gaps, with older samples.",
    )


def find_failure(figures: RunFigures) -> Advice | None:
    """The run did not come to its end."""
    if figures.state not in ("failed", "lost"):
        return None
    how = "failed" if figures.state == "failed" else "was lost, and nobody wrote its end,"
    found = f"the run {how} {f'after step {figures.step}' if figures.step else 'before its first step was done'}"
    if figures.checkpoints:
        return Advice(
            rule="failed",
            found=found,
            reason=f"Mend what the first lines name; then it can go on from the checkpoint of step {figures.checkpoints[-1]}.",
            command=shlex.join(["telescope", "runs", "resume", figures.run_dir]),
        )
    return Advice(
        rule="failed",
        found=found,
        reason="Nothing is saved that it could go on from. The first lines say why, as far as that is known; the log has more.",
        command=shlex.join(["telescope", "runs", "tail", figures.run_dir, "--once"]),
    )


def find_more_to_come(figures: RunFigures) -> Advice | None:
    """It learns, and the run is over."""
    reward, steps = figures.find("reward/policy"), figures.settings.number_of_steps
    if figures.state not in ("done", "stopped") or reward is None or not steps:
        return None
    if not is_higher(reward) or has_fallen(reward):
        return None
    found = f"reward {reward.first:.3g} → {reward.last:.3g} (noise ±{_noise(reward):.2g}) over {count_versions(reward)}"
    if figures.checkpoints:
        return Advice(
            rule="it learns",
            found=found,
            reason=f"It may go on: the checkpoint of step {figures.checkpoints[-1]} is there.",
            command=shlex.join(["telescope", "runs", "resume", figures.run_dir, f"number_of_steps={2 * steps}"]),
        )
    return Advice(
        rule="it learns",
        found=found,
        reason="It may go on, and nothing is saved that it could go on from: run it for longer, and save on the way.",
        command=_start_over(figures, f"number_of_steps={2 * steps}", f"checkpoint.every={max(1, steps // 2)}"),
    )


def find_too_short(figures: RunFigures) -> Advice | None:
    """A change can't be told from noise, nor that there is none."""
    reward, steps = figures.find("reward/policy"), figures.settings.number_of_steps
    if (reward is not None and not is_unclear(reward)) or not figures.step or not steps:
        return None
    found = f"versions of the weights that have been scored to the end: {0 if reward is None else reward.count}"
    if reward is not None and reward.error is not None:
        of = sum(one.scored for one in figures.environments)
        found += f"; reward {reward.first:.3g} → {reward.last:.3g} (noise ±{_noise(reward):.2g}, {of:,} rollouts)"
    reason = (
        f"Too short to tell: with {2 * EDGE} versions the first and the last {EDGE} are compared."
        if reward is None or reward.count < 2 * EDGE
        else "Too short to tell: a change as large as that noise could hide in it. More steps, or more rollouts in each."
    )
    if figures.state == "running":
        command = shlex.join(["telescope", "show", figures.run_dir])
        return Advice(rule="too early", found=found, reason=reason, command=command)
    return _advise_change(figures, f"number_of_steps={max(2 * steps, 4 * EDGE)}", rule="too early", found=found, reason=reason)


RULES: tuple[Rule, ...] = (
    find_none_right,
    find_failures,
    find_fixed_weights,
    find_equal_groups,
    find_unparsed,
    find_truncated,
    find_gap,
    find_skipped_updates,
    find_failure,
    find_too_short,
    find_fallen_reward,
    find_no_entropy,
    find_slow_learning,
    find_old_samples,
    find_more_to_come,
    find_waiting,
)


# ---- lines to type


def _noise(curve: NumberCurve) -> float:
    return SURE * (curve.error or 0.0)


def _find_only_environment(figures: RunFigures) -> str:
    """Its label; empty where there are several, or none is known."""
    return figures.settings.environments[0] if len(figures.settings.environments) == 1 else ""


def _check_environment(figures: RunFigures, label: str, *options: str) -> str:
    """With what the run's command says of the environment and of where plug-ins are."""
    arguments, own = figures.arguments or (), f"environments.{label}.kwargs."
    words = ["telescope", "env", "check", figures.settings.environment_names.get(label, label), *options]
    for option, value in pairwise(arguments):
        if option in ("--config-dir", "-cd"):
            words += [option, value]
    words += [word.lstrip("+").removeprefix(own) for word in arguments if word.lstrip("+").startswith(own)]
    return shlex.join(words)


def _has(figures: RunFigures, setting: str) -> bool:
    return any(_name_of(word) == setting for word in figures.arguments or ())


def _name_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _hold_back(figures: RunFigures, rate: float) -> tuple[str, str]:
    """A third of the learning rate, and a penalty on the divergence from the base model, or twice the one there is."""
    penalty = 2 * (figures.settings.kl_ref_coef or 0.0005)
    return f"trainer.learning_rate={rate / 3:.2g}", f"algorithm.kl_ref_coef={penalty:g}"


def _advise_change(
    figures: RunFigures, *changes: str, rule: str, found: str, reason: str, better: int | None = None, lost: bool = False
) -> Advice:
    """A run with other values, and whether this one can go on with them. `lost`: its newest weights are what is to be mended;
    `better`: the version of them that was not, where it is known."""
    command = _start_over(figures, *changes)
    resume = _explain_return(figures, changes, better) if lost else _explain_resume(figures, *changes)
    return Advice(rule=rule, found=found, reason=reason, command=command, resume=resume)


def _explain_resume(figures: RunFigures, *changes: str, what: str = "it") -> str:
    """`what`: the changes in words. A run that has trained all its steps goes on with more of them alone."""
    if refused := _find_refusal(figures, changes):
        return refused
    steps, newest = figures.settings.number_of_steps, max(*figures.checkpoints, *figures.saved, 0)
    if steps and newest >= steps and "number_of_steps" not in map(_name_of, changes):
        changes, what = (*changes, f"number_of_steps={2 * steps}"), f"{what} and more steps"
    return f"{_when(figures)} from step {figures.checkpoints[-1]} with {what}: {_resume(figures, *changes)}"


def _explain_return(figures: RunFigures, changes: Sequence[str], better: int | None) -> str:
    """The newest checkpoint has what is to be mended: go on from an earlier one."""
    if refused := _find_refusal(figures, changes):
        return refused
    newest = figures.checkpoints[-1]
    earlier = [step for step in figures.checkpoints[:-1] if better is None or step <= better]
    if better is not None and newest <= better:
        return _explain_resume(figures, *changes)
    if not earlier:
        return f"This needs a new run: what is saved (step {', '.join(map(str, figures.checkpoints))}) has the fault already."
    if better is None:
        steps = ", ".join(map(str, earlier))
        command = _resume(figures, *changes, "checkpoint.resume=STEP")
        return f"{_when(figures)} with it from an earlier step than {newest} (STEP is one of {steps}): {command}"
    command = _resume(figures, *changes, f"checkpoint.resume={earlier[-1]}")
    return f"{_when(figures)} from step {earlier[-1]}, before it fell, with it: {command}"


def _find_refusal(figures: RunFigures, changes: Sequence[str]) -> str:
    """Why this run can't go on with the changes, by the rule of `runs resume` itself (`config.resume`), for which the old
    values are none, the new ones the changes; empty where it can."""
    named = {_name_of(change): change.partition("=")[2] for change in changes}
    if obstacles := find_obstacles_to_resume(_nest(dict.fromkeys(named)), _nest(named)):
        kept = [name for name in named if any(one.startswith(f"{name}=") for one in obstacles)]
        return f"This needs a new run: `telescope runs resume` keeps {', '.join(kept)}."
    return "" if figures.checkpoints else "This needs a new run: nothing is saved that this one could go on from."


def _when(figures: RunFigures) -> str:
    return "Once it has ended, it can go on" if figures.state in ("running", "waiting") else "Or go on"


def _resume(figures: RunFigures, *changes: str) -> str:
    return shlex.join(["telescope", "runs", "resume", figures.run_dir, *(change.lstrip("+~") for change in changes)])


def _nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`: the shape of a resolved configuration."""
    nested: dict[str, Any] = {}
    for path, value in settings.items():
        *above, last = path.split(".")
        here = nested
        for name in above:
            here = here.setdefault(name, {})
        here[last] = value
    return nested


def _start_over(figures: RunFigures, *changes: str, without: Sequence[str] = ()) -> str:
    """The run's command with other values."""
    return _command(figures, ["telescope", "run"], changes, without)


def _command(figures: RunFigures, words: Sequence[str], changes: Sequence[str] = (), without: Sequence[str] = ()) -> str:
    """With the run's own arguments, as far as they are known; `…` stands for those that are not."""
    if figures.arguments is None:
        return " ".join([*words, "…", *map(shlex.quote, changes)])
    dropped = {*map(_name_of, changes), *without}
    kept = [word for word in figures.arguments if "=" not in word or _name_of(word) not in dropped]
    return shlex.join([*words, *kept, *changes])
