"""Failures are told by their rate: an alarm fires while they happen, stays silent where they are few, and is not repeated."""

from __future__ import annotations

from telescope.orchestrator.failure_rates import FailureRates

CAUSE = "KeyError: 'gold' (quiz.py, line 12)"


def play(rates: FailureRates, attempts: int, every: int, label: str = "quiz") -> list[str]:
    """Every so-manyth attempt fails; what is said."""
    found = []
    for number in range(1, attempts + 1):
        failed = every and number % every == 0
        found.append(rates.note_failure(label, CAUSE) if failed else rates.note_score(label))
    return [sentence for sentence in found if sentence]


def test_a_reward_that_raises_on_every_tenth_answer_is_told_with_its_cause():
    assert play(FailureRates(), 100, 10) == [
        f"10 of 100 rollouts of environments.quiz got no score (10%), 10 of them by one cause: {CAUSE}"
    ]


def test_few_failures_are_not_told():
    assert play(FailureRates(), 1000, 25) == []
    assert play(FailureRates(), 99, 2) == []


def test_a_rate_is_told_once_and_again_when_it_has_doubled_or_been_low():
    rates = FailureRates()
    assert len(play(rates, 500, 10)) == 1
    assert len(play(rates, 200, 5)) == 1
    play(rates, 100, 0)
    assert len(play(rates, 100, 10)) == 1


def test_one_environment_among_healthy_ones_is_told():
    rates = FailureRates()
    assert play(rates, 500, 0, "good") == []
    assert [sentence.split(" got ")[0] for sentence in play(rates, 100, 2, "bad")] == ["50 of 100 rollouts of environments.bad"]


def test_the_end_of_a_run_has_the_evidence_there_is():
    rates = FailureRates()
    assert rates.describe("too easy or too hard") == ""
    play(rates, 1000, 2)
    assert rates.describe("too easy or too hard") == (
        f"in all, 500 of 1,000 rollouts of environments.quiz got no score (50%), 500 of them by one cause: {CAUSE}"
    )
    healthy = FailureRates()
    play(healthy, 1000, 50)
    assert healthy.describe("") == ""


def test_what_the_reason_says_is_not_said_again():
    rates = FailureRates()
    play(rates, 200, 2)
    assert rates.describe(f"8 groups failed in a row; the last cause: {CAUSE}") == ""


def test_a_cause_that_names_each_prompt_fills_no_memory():
    rates = FailureRates()
    for number in range(10_000):
        rates.note_failure("quiz", f"KeyError: {number}")
    assert len(rates._failed["quiz"]) == 101
    assert rates.describe("").endswith("9,900 of them by one cause: many different ones")
