"""What the algorithms refuse, with which remedy; what they warn of; and that naming them costs no torch."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from telescope.algorithms.cispo import CISPO
from telescope.algorithms.dr_grpo import DrGRPO
from telescope.algorithms.grpo import GRPO
from telescope.algorithms.gspo import GSPO
from telescope.algorithms.reinforce_pp import ReinforcePP
from telescope.algorithms.rloo import RLOO
from telescope.algorithms.sapo import SAPO

ALL = [GRPO, RLOO, ReinforcePP, DrGRPO, CISPO, GSPO, SAPO]


def test_the_defaults_are_those_of_the_design():
    assert {kind.__name__: kind().advantage_norm for kind in ALL} == {
        "GRPO": "group",
        "RLOO": "none",
        "ReinforcePP": "batch",
        "DrGRPO": "none",
        "CISPO": "group",
        "GSPO": "group",
        "SAPO": "group",
    }
    assert (GRPO().clip_low, GRPO().clip_high) == (0.4, 0.5)
    assert (GSPO().clip_low, GSPO().clip_high) == (3e-4, 4e-4)
    assert (CISPO().clip_low, CISPO().clip_high) == (1.0, 0.5)
    assert (SAPO().sapo_tau_pos, SAPO().sapo_tau_neg) == (1.0, 1.05)
    assert (GRPO().use_tis, GRPO().tis_cap, GRPO().tis_logprob_clamp) == (False, 2.0, 20.0)
    assert GRPO().loss_aggregation == "token_mean"
    assert SAPO().loss_aggregation == "seq_mean_token_mean"


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (RLOO, {"advantage_norm": "group"}, "advantage_norm=group would make RLOO another algorithm: use none or batch"),
        (DrGRPO, {"advantage_norm": "group"}, "use none or batch"),
        (ReinforcePP, {"advantage_norm": "none"}, "use batch"),
        (CISPO, {"use_ppo_clip": True}, "use_ppo_clip=true is not possible with CISPO"),
        (GSPO, {"use_ppo_clip": True}, "use_ppo_clip=true is not possible with GSPO"),
        (SAPO, {"use_ppo_clip": True}, "use_ppo_clip=true is not possible with SAPO"),
        (GSPO, {"use_tis": True}, "use_tis=true is not possible with GSPO"),
        (GSPO, {"use_tis": True, "ppo_clip_ref_logprobs": "batch"}, "use_tis=true is not possible with GSPO"),
        (GSPO, {"use_icepop": True}, "use_icepop=true is not possible with GSPO"),
        (GRPO, {"use_tis": True, "use_ppo_clip": True}, "would correct twice: set ppo_clip_ref_logprobs=batch"),
        (CISPO, {"use_tis": True}, "would correct twice: set ppo_clip_ref_logprobs=batch"),
        (SAPO, {"use_tis": True}, "would correct twice: set ppo_clip_ref_logprobs=batch"),
        (SAPO, {"use_icepop": True}, "would correct twice"),
        (GRPO, {"use_tis": True, "use_icepop": True}, "set one of them to false"),
        (GRPO, {"use_icepop": True, "icepop_low": 5.0}, "icepop_low=5.0 must be below icepop_high=5.0"),
        (GRPO, {"dual_clip_c": 3.0}, "set use_ppo_clip=true, or dual_clip_c=null"),
        (GRPO, {"use_ppo_clip": True, "dual_clip_c": 1.5}, "must be above 1 \\+ clip_high = 1.5"),
        (GRPO, {"clip_low": 1.5}, "clip_low"),
        (GRPO, {"sapo_tau_pos": 1.0}, "sapo_tau_pos"),
        (DrGRPO, {"loss_aggregation": "token_mean"}, "loss_aggregation"),
        (GSPO, {"loss_aggregation": "token_mean"}, "loss_aggregation"),
    ],
)
def test_impossible_combinations_are_refused_with_the_remedy(kind, given, words):
    with pytest.raises(ValidationError, match=words):
        kind(**given)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (GRPO, {"use_tis": True, "use_ppo_clip": True, "ppo_clip_ref_logprobs": "batch"}),
        (GRPO, {"use_tis": True}),
        (CISPO, {"use_tis": True, "ppo_clip_ref_logprobs": "batch"}),
        (SAPO, {"use_tis": True, "ppo_clip_ref_logprobs": "batch"}),
        (GRPO, {"use_ppo_clip": True, "dual_clip_c": 3.0}),
        (GSPO, {"use_tis": False, "use_ppo_clip": False}),
    ],
)
def test_possible_combinations_pass(kind, given):
    kind(**given)


@pytest.mark.parametrize("kind", [GRPO, RLOO, ReinforcePP, DrGRPO])
def test_asynchronous_data_without_any_correction_get_a_warning(kind):
    (sentence,) = kind().warnings(asynchronous=True)
    assert "without any correction" in sentence
    assert "use_tis=true" in sentence
    assert kind().warnings(asynchronous=False) == []
    assert kind(use_tis=True).warnings(asynchronous=True) == []
    assert kind(use_icepop=True).warnings(asynchronous=True) == []
    assert kind(use_ppo_clip=True).warnings(asynchronous=True) == []


@pytest.mark.parametrize("kind", [CISPO, GSPO, SAPO])
def test_algorithms_with_a_ratio_of_their_own_are_a_correction(kind):
    assert kind().warnings(asynchronous=True) == []


@pytest.mark.parametrize("given", [(GRPO, True), (CISPO, False), (GSPO, False), (SAPO, False)])
def test_a_ratio_that_is_always_one_gets_a_warning(given):
    kind, clip = given
    algorithm = kind(use_ppo_clip=clip, ppo_clip_ref_logprobs="batch")
    for asynchronous in (True, False):
        (sentence,) = algorithm.warnings(asynchronous=asynchronous, updates=1)
        assert "the ratio is always 1" in sentence
    assert algorithm.warnings(asynchronous=True, updates=2) == []


def test_batch_reference_with_tis_corrects():
    assert CISPO(use_tis=True, ppo_clip_ref_logprobs="batch").warnings(asynchronous=True) == []


@pytest.mark.parametrize("kind", [GRPO, RLOO, DrGRPO, CISPO, GSPO, SAPO])
def test_one_sample_a_prompt_is_refused_where_rewards_are_compared(kind):
    (sentence,) = kind().group_errors(group_size=1, min_group_size=1)
    assert sentence.startswith("rollout.group_size=1 must be at least 2")
    assert kind().group_errors(group_size=2, min_group_size=2) == []


def test_reinforce_pp_takes_one_sample_a_prompt_but_no_lone_survivor():
    assert ReinforcePP().group_errors(group_size=1, min_group_size=1) == []
    assert ReinforcePP().group_errors(group_size=8, min_group_size=1)[0].startswith("rollout.min_group_size=1 must be")


def test_no_algorithm_imports_torch():
    names = ["grpo", "rloo", "reinforce_pp", "dr_grpo", "cispo", "gspo", "sapo"]
    code = "import sys\n" + "".join(f"import telescope.algorithms.{name}\n" for name in names)
    code += "import telescope.maths.packing, telescope.maths.batching, telescope.maths.summaries, telescope.maths.schedules\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
