"""docs/metrics.md has every metric that a step reports."""

from __future__ import annotations

import re

import pytest

from tests.run.conftest import ROOT, Start

PAGE = ROOT / "docs" / "metrics.md"
PLACEHOLDER = re.compile(r"<\w+>|…")


def documented(text: str) -> list[re.Pattern[str]]:
    """What the names in backticks stand for. One that begins with `/` or `_` goes on a name before it: `/std` behind
    `reward/policy/version` is `reward/policy/version/std` or `reward/policy/std`; `<label>` is any word."""
    found, last = list[str](), ""
    for name in re.findall(r"`([\w/<>…]+)`", text):
        if name[0] in "/_":
            cuts = [last, *(last[: cut.start()] for cut in re.finditer(r"[/_]", last))]
            found += [f"{cut}{name}" for cut in cuts if cut]
        else:
            found.append(name)
            last = name
    patterns = (".+".join(map(re.escape, PLACEHOLDER.split(name))) for name in found)
    return [re.compile(pattern) for pattern in patterns]


def undocumented(metrics: set[str], text: str) -> list[str]:
    known = documented(text)
    return sorted(name for name in metrics if not any(pattern.fullmatch(name) for pattern in known))


def test_a_run_without_an_engine_reports_what_is_documented(start: Start):
    run = start("experiment=fake", "number_of_steps=3")
    assert run.wait() == 0, run.said()
    assert undocumented({name for row in run.rows("step_metrics") for name in row["metrics"]}, PAGE.read_text()) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_of_two_environments_reports_what_is_documented(start: Start):
    run = start(
        *(
            "env=[countdown,reverse_letters]",
            "number_of_steps=3",
            "algorithm.use_ppo_clip=true",
            "trainer.number_of_minibatches=2",
        ),
        *(
            "algorithm.use_tis=false",
            "algorithm.corrections=[{name: icepop}]",
            "algorithm.kl_ref_coef=0.01",
            "orchestrator.prompts_batch_size_for_trainer=4",
        ),
        *("rollout.normalize_rewards=true", "algorithm.overlong_filter=true"),
        *(f"environments.{name}.reward_{end}" for name in ("countdown", "reverse_letters") for end in ("min=0", "max=1")),
    )
    assert run.wait(500) == 0, run.said()
    names = {name for row in run.rows("step_metrics") for name in row["metrics"]}
    assert {"loss", "reward/policy", "env/countdown/reward"} <= names
    assert undocumented(names, PAGE.read_text()) == []


@pytest.mark.parametrize(
    ("name", "text", "known"),
    [
        ("reward/policy/std", "`reward/policy/version` says … `/std`", True),
        ("flow/rollouts_trained", "`flow/rollouts_generated`, `_trained`", True),
        ("env/words/sample/exact", "`env/<label>/reward`, `/rollouts`, `/sample/<metric>`", True),
        ("rollouts/prompt_tokens/max", "`rollouts/prompt_tokens/…`", True),
        ("reward/other", "`reward/policy`", False),
        ("reward/policy/std", "`reward/policy`", False),
    ],
)
def test_what_a_page_documents(name: str, text: str, known: bool):
    assert undocumented({name}, text) == ([] if known else [name])
