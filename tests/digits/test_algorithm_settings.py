"""What the algorithms refuse, with which remedy; what they warn of; and that naming them costs no torch."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from telescope.algorithms.base import GeometricMask, IcePop
from telescope.algorithms.cispo import CISPO
from telescope.algorithms.dr_grpo import DrGRPO
from telescope.algorithms.grpo import GRPO
from telescope.algorithms.gspo import GSPO
from telescope.algorithms.reinforce_pp import ReinforcePP
from telescope.algorithms.rloo import RLOO
from telescope.algorithms.sapo import SAPO

MASK = {"name": "sequence_mask"}
SAMPLER = {"ppo_clip_ref_logprobs": "rollout"}
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
        (GSPO, {"corrections": [{"name": "icepop"}]}, "icepop is not possible with GSPO"),
        (GSPO, {"corrections": [{"name": "tis"}]}, "tis is not possible with GSPO"),
        (GRPO, {"use_tis": True, "use_ppo_clip": True, **SAMPLER}, "would correct twice: set ppo_clip_ref_logprobs=batch"),
        (CISPO, {"use_tis": True, **SAMPLER}, "would correct twice: set ppo_clip_ref_logprobs=batch"),
        (SAPO, {"use_tis": True, **SAMPLER}, "would correct twice: set ppo_clip_ref_logprobs=batch"),
        (SAPO, {"corrections": [{"name": "icepop"}], **SAMPLER}, "would correct twice: set .*, or leave icepop out"),
        (GRPO, {"use_tis": True, "corrections": [{"name": "icepop"}]}, "use_tis=true and icepop both weight tokens"),
        (GRPO, {"use_tis": True, "corrections": [{"name": "tis"}]}, "use_tis=true and tis both weight tokens"),
        (GRPO, {"corrections": [{"name": "icepop", "low": 5.0}]}, r"corrections\[0\] \(icepop.*low=5.0 must be below high=5.0"),
        (GRPO, {"corrections": [MASK, MASK]}, "names sequence_mask more than once"),
        (GRPO, {"corrections": [MASK, {"name": "icepopp"}]}, r"corrections\[1\] must have a name, one of tis, icepop, sequ"),
        (
            GRPO,
            {"corrections": [{"name": "icepop", "lo": 1}]},
            r"corrections\[0\] \(icepop, whose settings are low, high\): there is no setting lo",
        ),
        (GRPO, {"corrections": [{"name": "tis", "cap": "2"}]}, "cap: Input should be a valid number"),
        (GRPO, {"corrections": {"name": "tis"}}, "corrections must be a list"),
        (GRPO, {"overlong_penalty": 0.5}, "does nothing without overlong_buffer_tokens"),
        (GRPO, {"kl_ref_estimator": "k4"}, "kl_ref_estimator"),
        (GRPO, {"entropy_coef": -0.1}, "entropy_coef"),
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
        (GRPO, {"use_ppo_clip": True, **SAMPLER}),
        (CISPO, {"use_tis": True, "ppo_clip_ref_logprobs": "batch"}),
        (SAPO, {"use_tis": True, "ppo_clip_ref_logprobs": "batch"}),
        (GRPO, {"use_ppo_clip": True, "dual_clip_c": 3.0}),
        (GSPO, {"use_tis": False, "use_ppo_clip": False}),
        (GSPO, {"corrections": [MASK]}),
        (GRPO, {"use_ppo_clip": True, "corrections": [MASK, {"name": "geometric_mask"}]}),
        (GRPO, {"use_tis": True, "corrections": [MASK]}),
    ],
)
def test_possible_combinations_pass(kind, given):
    kind(**given)


@pytest.mark.parametrize(
    ("kind", "given", "reference", "told"),
    [
        (GRPO, {"use_tis": True, "use_ppo_clip": True}, "batch", "use_tis=true"),
        (RLOO, {"use_tis": True, "use_ppo_clip": True}, "batch", "use_tis=true"),
        (DrGRPO, {"corrections": [{"name": "icepop"}], "use_ppo_clip": True}, "batch", "icepop"),
        (CISPO, {"use_tis": True}, "batch", "use_tis=true"),
        (GRPO, {"use_tis": True, "use_ppo_clip": True, "ppo_clip_ref_logprobs": "batch"}, "batch", ""),
        (GRPO, {"use_ppo_clip": True}, "rollout", ""),
        (GRPO, {"use_ppo_clip": True, "corrections": [MASK]}, "rollout", ""),
        (GRPO, {"use_tis": True}, "rollout", ""),
        (CISPO, {}, "rollout", ""),
    ],
)
def test_the_reference_of_the_ratio_follows_the_weights_unless_it_is_set_and_that_is_said(kind, given, reference, told):
    algorithm = kind(**given)
    assert algorithm.ratio_reference == reference
    said = [each for each in algorithm.warnings(asynchronous=True, updates=2) if "ppo_clip_ref_logprobs=batch" in each]
    assert [f"{told} corrects for the sampler" in each for each in said] == [True] * bool(told)
    if told:
        (idle,) = algorithm.warnings(asynchronous=True, updates=1)
        assert "with one update a step that ratio is always 1" in idle


@pytest.mark.parametrize("kind", [GRPO, RLOO, ReinforcePP, DrGRPO])
def test_asynchronous_data_without_any_correction_get_a_warning(kind):
    (sentence,) = kind().warnings(asynchronous=True)
    assert "without any correction" in sentence
    assert "use_tis=true" in sentence
    assert kind().warnings(asynchronous=False) == []
    assert kind(use_tis=True).warnings(asynchronous=True) == []
    assert kind(corrections=[{"name": "icepop"}]).warnings(asynchronous=True) == []
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


@pytest.mark.parametrize("which", ["kl_ref", "kl_rollout"])
def test_a_penalty_whose_gradient_has_mean_zero_gets_a_warning(which):
    (sentence,) = GRPO(**{f"{which}_coef": 0.1, f"{which}_estimator": "k1"}).warnings(asynchronous=False)
    assert f"{which}_estimator=k1 has a gradient of mean 0" in sentence
    assert GRPO(**{f"{which}_coef": 0.1, f"{which}_estimator": "k2"}).warnings(asynchronous=False) == []


def test_corrections_survive_the_way_through_json():
    algorithm = GRPO(corrections=[{"name": "icepop", "low": 0.25, "high": 4.0}, {"name": "geometric_mask"}])
    assert algorithm.corrections == (IcePop(low=0.25, high=4.0), GeometricMask(low=0.99, high=1.01))
    text = algorithm.model_dump_json()
    assert '"corrections":[{"name":"icepop","low":0.25,"high":4.0}' in text
    assert GRPO.model_validate_json(text, strict=True) == algorithm


def test_what_a_loss_reads_is_asked_for_and_nothing_else():
    needs = lambda each: (each.needs_old, each.needs_reference, each.trains_entropy)  # noqa: E731
    assert needs(GRPO()) == (False, False, False)
    assert needs(GRPO(use_tis=True)) == (True, False, False)
    assert needs(GRPO(corrections=[MASK])) == (True, False, False)
    assert needs(CISPO(ppo_clip_ref_logprobs="batch")) == (True, False, False)
    assert needs(GRPO(kl_ref_coef=0.1)) == (False, True, False)
    assert needs(GRPO(entropy_coef=0.1)) == (False, False, True)


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
    for name in ("packing", "minibatches", "summaries", "learning_rate"):
        code += f"import telescope.maths.{name}\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
