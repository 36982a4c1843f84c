"""What `auto` becomes: on a CPU what it always was, on a card the fastest that fits, and never where a user gave a value."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from telescope.config.automatic import Choice, Decision, RankCard, Surroundings, decide, find_misfit, find_open, keep_decided
from telescope.config.conflicts import conflicts
from telescope.config.model_shapes import shape_of
from telescope.config.run import RunConfig, as_json, config_hash, dump_run, load_run
from tests.config.conftest import compose_one

GIB = 2**30
SETTINGS = ("trainer.seq_len", "backend.compile", "backend.gradient_checkpointing")
CPU = Surroundings(device="cpu")
ALONE = ("cluster.trainer_num_workers=1", "cluster.inference_num_workers=1")


def on(gib: float = 140, **other: Any) -> Surroundings:
    """A rank on an H200 of which it may take so many GiB."""
    card = RankCard(name="NVIDIA H200", room=int(gib * GIB), flops=989e12, bandwidth=4.8e12)
    given: dict[str, Any] = {"device": "gpu", "card": card, **other}
    return Surroundings(**given)


@functools.cache
def composed(*overrides: str) -> RunConfig:
    point = compose_one(*overrides)
    assert point.config is not None, point.problems
    return point.config


def decided(where: Surroundings, *overrides: str) -> Decision:
    found = decide(composed(*overrides), where)
    assert find_open(found.config) == ()
    assert conflicts(found.config) == []
    return found


def values(found: Decision | RunConfig) -> tuple[Any, ...]:
    config = found if isinstance(found, RunConfig) else found.config
    backend = config.backend
    return config.trainer.seq_len, *(getattr(backend, name, None) for name in ("compile", "gradient_checkpointing"))


def needed_gib(config: RunConfig) -> float:
    rank = config.backend.rank_memory(
        shape_of(config.model.name), config.model, config.trainer, ranks=config.cluster.trainer_num_workers,
        longest=config.inference.max_model_len,
    )  # fmt: skip
    assert rank is not None
    return rank.needed / GIB


@pytest.mark.parametrize("overrides", [("model=tiny",), ("model=qwen3-4b",), ("model=qwen3-4b", "backend=megatron")])
def test_all_of_them_are_auto_by_default_and_on_a_cpu_what_they_always_were(overrides: tuple[str, ...]) -> None:
    """The hash as well: a run on a CPU is the same run as when these were plain defaults."""
    found = decided(CPU, *overrides)
    rows, again = (2048, False) if "model=tiny" in overrides else (4096, True)  # its preset has given these
    assert (values(found), found.sentence) == ((rows, False, again), "")
    plain = ("backend.compile=false", f"backend.gradient_checkpointing={json.dumps(again)}", f"trainer.seq_len={rows}")
    assert config_hash(found.config) == config_hash(composed(*overrides, *plain))


def test_a_4b_model_on_an_h200_is_compiled_with_long_rows_and_computes_nothing_again() -> None:
    found = decided(on(), "model=qwen3-4b", *ALONE)
    assert values(found) == (16_384, True, False)
    assert found.sentence == (
        "Chosen for NVIDIA H200: trainer.seq_len=16384 (of the rows that fit the shortest that is as fast as any), "
        "backend.compile=true (a step trains 1.5 times as fast with it, by what was measured on an H200), "
        "backend.gradient_checkpointing=false (everything fits: a rank needs about 119 of 140 GiB)."
    )


@pytest.mark.parametrize("gib", [16, 24, 48, 79, 95, 140])
def test_what_is_chosen_fits(gib: int) -> None:
    found = decided(on(gib), "model=qwen3-0.6b", *ALONE)
    assert values(found)[1] is True
    assert needed_gib(found.config) <= 0.95 * gib


def test_in_less_room_as_few_layers_as_possible_compute_again() -> None:
    """80 GB have 4B's weights and moments, and not all of its activations: rows are cut before much is computed twice."""
    layers = {}
    for gib in (79, 85, 95):
        backend = decided(on(gib), "model=qwen3-4b", *ALONE).config.backend
        layers[gib] = getattr(backend, "checkpointed_layers", None) or (36 if backend.checkpointing else 0)
    assert layers[79] >= layers[85] >= layers[95]
    assert 0 < layers[79] < 36
    told = decided(on(79), "model=qwen3-4b", *ALONE).sentence
    assert f"backend.checkpointed_layers={layers[79]} (of 36)" in told
    assert "as little as possible is computed again: a rank needs about" in told


@pytest.mark.parametrize("where", [CPU, on(), on(30), Surroundings(device="gpu"), on(compiler=False)])
@pytest.mark.parametrize(
    "given", [(8192, True, True), (4096, False, False), (32_768, True, "selective"), (16_384, False, "full")]
)
def test_what_a_user_gave_is_never_changed(where: Surroundings, given: tuple[Any, ...]) -> None:
    typed = [f"{name}={json.dumps(value)}" for name, value in zip(SETTINGS, given, strict=True)]
    for left_out in range(3):
        overrides = [text for place, text in enumerate(typed) if place != left_out]
        found = decided(where, "model=qwen3-0.6b", *ALONE, *overrides)
        kept = [value for place, value in enumerate(values(found)) if place != left_out]
        assert kept == [value for place, value in enumerate(given) if place != left_out]
        assert {choice.setting for choice in found.choices} <= {SETTINGS[left_out], "backend.checkpointed_layers"}
    everything = composed("model=qwen3-0.6b", *typed)
    assert decide(everything, where) == Decision(everything)


def test_layers_that_a_user_named_stay_and_then_they_do_compute_again() -> None:
    found = decided(on(), "model=qwen3-0.6b", *ALONE, "backend.checkpointed_layers=5").config.backend
    assert (found.checkpointing, getattr(found, "checkpointed_layers", None)) == ("full", 5)


def test_compilation_is_left_out_where_it_can_not_be() -> None:
    flex = decided(on(), "model=qwen3-0.6b", *ALONE, "backend.attention=flex")
    assert values(flex)[1] is False
    bare = decided(on(compiler=False), "model=qwen3-0.6b", *ALONE)
    assert values(bare)[1] is False
    assert "backend.compile=false (it needs a C and a C++ compiler and Python's headers, and this host lacks" in bare.sentence
    old = decided(on(old_cards=True), "model=qwen3-0.6b", *ALONE)
    assert values(old)[1] is False
    assert "backend.compile=false (a GPU here is older than those that layers are compiled for, of compute" in old.sentence


@pytest.mark.parametrize(
    ("where", "overrides", "reason"),
    [
        (on(), ("model=any", "model.name=someone/something"), "the size of model.name=someone/something is not known before"),
        (Surroundings(device="gpu"), ("model=qwen3-4b",), "no card of the ranks can be seen from here"),
        (on(), ("model=qwen3-4b", "backend=fake"), "backend=fake does not tell what a rank needs"),
    ],
)
def test_what_is_not_known_is_not_guessed(where: Surroundings, overrides: tuple[str, ...], reason: str) -> None:
    found = decided(where, *overrides)
    assert values(found) == (4096, *((None, None) if "backend=fake" in overrides else (False, True)))
    assert found.sentence.startswith("Chosen: trainer.seq_len=4096")
    assert f": {reason}" in found.sentence


def test_where_nothing_fits_what_needs_least_is_taken() -> None:
    """Compiled layers hold less than eager ones, also of a run that is too short for them otherwise."""
    short = ("model=qwen3-4b", *ALONE, "number_of_steps=2")
    found = decided(on(40), *short)
    assert values(found) == (4096, True, "full")
    others = [
        decide(composed(*short, *(f"backend.{text}" for text in way)), on(40)).config
        for way in (("compile=false", "gradient_checkpointing=true"), ("compile=true", "gradient_checkpointing=selective"))
    ]
    assert needed_gib(found.config) < min(map(needed_gib, others))
    assert found.sentence == (
        "Chosen: trainer.seq_len=4096, backend.compile=true, backend.gradient_checkpointing=full: by the estimate of memory "
        "nothing fits on this card (NVIDIA H200), and this comes nearest: a rank needs about "
        f"{needed_gib(found.config):.0f} of 40 GiB."
    )


def test_models_of_other_kinds_are_left_as_they_were(tmp_path: Path) -> None:
    """Their layers may hold more than is counted, and nobody has compiled them."""
    sizes = {
        "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    }  # fmt: skip
    config = composed("model=qwen3-0.6b", *ALONE)
    found = {}
    for kind in ("qwen3", "gemma3_text"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind, **sizes}))
        model = config.model.model_copy(update={"name": str(tmp_path / kind)})
        found[kind] = decide(config.model_copy(update={"model": model}), on())
    assert (values(found["qwen3"]), values(found["gemma3_text"])) == ((16_384, True, False), (4096, False, True))
    assert "is of another kind than llama, qwen2, qwen3" in found["gemma3_text"].sentence


@pytest.mark.parametrize("where", [CPU, on(), Surroundings(device="gpu")])
def test_a_row_holds_the_longest_sample_and_is_padded(where: Surroundings) -> None:
    long = decided(where, "model=qwen3-0.6b", *ALONE, "inference.max_model_len=40000", "rollout.max_tokens=30000")
    assert values(long)[0] == 40_000
    odd = decided(where, "model=qwen3-0.6b", *ALONE, "trainer.pad_to_multiple_of=100")
    assert values(odd)[0] % 100 == 0
    assert values(odd)[0] >= 4096
    cut = ("inference.max_model_len=400000", "rollout.max_tokens=30000", "trainer.overlong=truncate")
    assert values(decided(where, "model=qwen3-0.6b", *ALONE, *cut))[0] == 4096


def test_where_samples_are_cut_what_is_trained_does_not_depend_on_the_card() -> None:
    found = decided(on(), "model=qwen3-0.6b", *ALONE, "trainer.overlong=truncate")
    assert values(found) == (4096, True, False)
    assert "trainer.seq_len=4096 (with trainer.overlong=truncate samples are cut there, so it is the same" in found.sentence


@pytest.mark.parametrize(
    "overrides",
    [
        ("+model.lora.rank=16",),
        ("backend.context_parallel_size=2", "cluster.trainer_num_workers=2"),
        ("backend.offload=optimizer",),
        ("backend.offload=parameters",),
        ("backend.replicas=2", "cluster.trainer_num_workers=4"),
        ("algorithm.kl_ref_coef=0.01",),
    ],
)
def test_it_goes_with_all_that_shares_or_saves_memory(overrides: tuple[str, ...]) -> None:
    found = decided(on(60), "model=qwen3-0.6b", *ALONE, *overrides)
    assert values(found)[1] is True
    assert needed_gib(found.config) <= 0.95 * 60


def test_a_version_for_the_server_beside_takes_its_room() -> None:
    """4B in bfloat16 is 7.5 GiB."""
    alone, beside = (decided(on(90, handed_bytes=handed), "model=qwen3-4b", *ALONE).config for handed in (0, 2))
    assert needed_gib(beside) <= 0.95 * 90 - 7.4
    assert needed_gib(alone) > needed_gib(beside)


def test_megatron_computes_as_little_again_as_its_layers_can() -> None:
    """A row of 16,384 of 4B fits with the results of products kept, which Transformer Engine's layers can't."""
    own = ("model=qwen3-4b", "backend=megatron", *ALONE, "trainer.seq_len=16384")
    assert values(decided(on(), *own)) == (16_384, True, "selective")
    assert values(decided(on(), *own, "backend.fp8=true")) == (16_384, True, True)
    assert values(decided(on(), "model=qwen3-0.6b", *own[1:])) == (16_384, True, False)


def test_megatron_compiles_little_and_so_always_where_it_can() -> None:
    own = ("model=qwen3-0.6b", "backend=megatron", *ALONE, "number_of_steps=2")
    found = decided(on(), *own)
    assert values(found)[1] is True
    assert "backend.compile=true (this host has the compilers that it needs)" in found.sentence
    assert values(decided(on(compiler=False), *own))[1] is False


def test_a_run_too_short_to_win_back_the_time_of_compilation_is_not_compiled() -> None:
    """Two steps of 128 rollouts of 4B save less than 40 s, a hundred of them or of their updates more."""
    short = ("model=qwen3-4b", *ALONE)
    assert [values(decided(on(), *short, f"number_of_steps={steps}"))[1] for steps in (2, 100)] == [False, True]
    assert "so short a run would not win back the 40 s" in decided(on(), *short, "number_of_steps=2").sentence
    assert values(decided(on(), *short, "number_of_steps=2", "trainer.epochs_per_batch=40"))[1] is True
    assert values(decided(on(), "model=tiny", *ALONE))[1] is False  # the quickstart, on a GPU


def test_short_updates_do_not_ask_for_long_rows() -> None:
    few = ("orchestrator.prompts_batch_size_for_trainer=1", "rollout.group_size=2", "rollout.max_tokens=512")
    assert values(decided(on(), "model=qwen3-4b", *ALONE, *few))[0] == 4096


def test_a_run_that_does_not_train_says_nothing() -> None:
    evals = ("cluster.trainer_num_workers=0", "eval.every=1")
    config = composed("model=tiny", *evals)
    found = decide(config, on())
    assert (find_open(found.config), found.sentence) == ((), "")


# ---- written down, and gone on with


def test_the_file_of_a_run_has_values(tmp_path: Path) -> None:
    found = decided(on(), "model=qwen3-4b", *ALONE).config
    (tmp_path / "config.json").write_text(dump_run(found))
    assert load_run(tmp_path / "config.json") == found
    assert values(load_run(tmp_path / "config.json")) == (16_384, True, False)


def test_a_run_that_goes_on_keeps_what_it_began_with() -> None:
    """Also on another card, and one whose directory is older than `auto`."""
    overrides = ("model=qwen3-4b", *ALONE)
    begun = decided(on(79), *overrides).config
    kept = keep_decided(composed(*overrides), as_json(begun))
    assert kept == begun
    assert decide(kept, on()) == Decision(begun)
    old = {"trainer": {"seq_len": 4096}, "backend": {"name": "fsdp", "compile": False, "gradient_checkpointing": True}}
    assert values(keep_decided(composed(*overrides), old)) == (4096, False, True)
    given = keep_decided(composed(*overrides, "trainer.seq_len=8192"), old)
    assert values(given) == (8192, False, True)


def test_a_run_that_goes_on_and_does_not_fit_is_told_what_would() -> None:
    """Of two ranks each holds four times as much of the weights and moments as of eight."""
    of_eight, of_two = (
        composed("model=qwen3-4b", f"cluster.trainer_num_workers={ranks}", "cluster.inference_num_workers=1")
        for ranks in (8, 2)
    )
    begun = decide(of_eight, on(79)).config
    assert find_misfit(begun, on(79)) == ""
    kept = keep_decided(of_two, as_json(begun))
    said = find_misfit(kept, on(79))
    assert f"a rank needs about {needed_gib(kept):.1f} GiB by the estimate of memory, and has 79.0 of NVIDIA H200: " in said
    typed = said.partition("if it runs out of memory, resume it with ")[2].split()
    taken = composed("model=qwen3-4b", "cluster.trainer_num_workers=2", "cluster.inference_num_workers=1", *typed)
    assert find_open(taken) == ()
    assert needed_gib(kept) > 79 > needed_gib(taken)
    assert find_misfit(kept, on(30)).endswith("if it runs out of memory, give it more ranks (cluster.trainer_num_workers)")
    for where in (CPU, on(140), Surroundings(device="gpu")):
        assert find_misfit(kept, where) == ""


def test_only_what_does_not_go_with_todays_settings_is_decided_anew() -> None:
    old = {"trainer": {"seq_len": 4096}, "backend": {"compile": True, "gradient_checkpointing": False}}
    flex = keep_decided(composed("model=qwen3-4b", *ALONE, "backend.attention=flex"), old)
    assert values(flex) == (4096, "auto", False)
    padded = keep_decided(composed("model=qwen3-4b", *ALONE, "trainer.pad_to_multiple_of=96"), old)
    assert values(padded) == ("auto", True, False)


def test_what_an_older_directory_does_not_say_or_that_is_too_short_is_decided_now() -> None:
    longer = composed("model=qwen3-4b", *ALONE, "inference.max_model_len=8192")
    old = {"trainer": {"seq_len": 4096}, "backend": {"name": "megatron"}}
    assert find_open(keep_decided(longer, old)) == SETTINGS
    assert find_open(keep_decided(longer, {"trainer": {"seq_len": "auto"}})) == SETTINGS


def test_a_choice_reads_as_it_is_typed() -> None:
    assert [Choice("backend.compile", value, "").typed for value in (True, "full", 3)] == [
        "backend.compile=true", "backend.compile=full", "backend.compile=3",
    ]  # fmt: skip
