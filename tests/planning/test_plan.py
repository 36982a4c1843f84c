"""`python -m telescope plan` in process: what it prints, what it refuses, and the pure functions behind it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from telescope.cli.plan import main
from telescope.compose.load import load_points, places_for
from telescope.config.model_shapes import shape_of
from telescope.config.run import RunConfig
from telescope.config.sections import LoraSettings
from telescope.planning.cards import CARDS
from telescope.planning.forecast import (
    PackedStep,
    assume_latencies,
    choose_split,
    cluster_of,
    forecast,
    kv_tokens,
    pack_step,
    try_splits,
)
from telescope.planning.latencies import Latencies, constant
from telescope.planning.memory import (
    PlanRefused,
    check_memory,
    divide,
    estimate_rank,
    estimate_server,
    find_fewest_again,
)

SMALL = ("model=qwen2.5-0.5b", "rollout.max_tokens=512", "number_of_steps=12", "cluster.trainer_num_workers=1")


def composed(*overrides: str) -> RunConfig:
    (point,) = load_points(list(overrides), places_for(None), {})
    assert point.config is not None
    return point.config


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*arguments: str) -> tuple[int, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out + err

    return run


def test_a_plan_for_megatron_says_what_it_does_not_count(say: Callable[..., tuple[int, str]]) -> None:
    """Two stages are one model's: with two ranks they train all rows together."""
    code, said = say(*SMALL, "backend=megatron", "backend.pipeline_parallel_size=2", "cluster.trainer_num_workers=2")
    assert code == 0
    assert "as long as those of backend=fsdp, without the wait of its stages for each other." in said
    code, said = say(*SMALL, "backend=megatron")
    assert code == 0
    assert "as long as those of backend=fsdp." in said


def test_the_plan_of_a_gpu_run_says_memory_times_and_the_best_split(say: Callable[..., tuple[int, str]]) -> None:
    code, said = say(*SMALL, "--gpus", "4")
    assert code == 0
    assert "494,032,768 parameters (0.494B)" in said
    assert "12,288 bytes a token" in said
    assert "Uncalibrated: times derived from the data sheet of an H100" in said
    assert len(re.findall(r"^ +[123] +[123] +[\d,]+ ", said, re.MULTILINE)) == 3
    chosen = re.search(r"Best: cluster.inference_num_workers=(\d) cluster.trainer_num_workers=(\d)", said)
    assert chosen is not None
    assert int(chosen[1]) + int(chosen[2]) == 4
    assert f"A trainer rank of {chosen[2]} needs about " in said  # of the division that is recommended
    assert re.search(r"Trainer: trains \d+%, sends weights \d+%, idle \d+%\. Servers: generate \d+%", said)
    assert "Age of trained groups in versions: 0: " in said


def test_without_a_gpu_and_a_run_nothing_is_simulated(say: Callable[..., tuple[int, str]]) -> None:
    code, said = say("cluster.device=cpu")
    assert code == 0
    assert "Not simulated: --calibrate RUN_DIR takes the times of a run" in said
    assert "tiny has 234,080 parameters" in said


def test_what_cannot_fit_is_refused_with_the_numbers(say: Callable[..., tuple[int, str]]) -> None:
    code, said = say("model=any", "model.name=Qwen/Qwen2.5-7B", "--gpus", "2")
    assert code == 1
    assert re.search(r"A trainer rank needs about \d+\.\d GiB, and an H100 has 79\.0 GiB: .*113\.5 GiB on cluster\.", said)
    code, said = say("model=qwen2.5-3b", "--card", "h100", "inference.gpu_memory_utilization=0.08")
    assert code == 1
    assert "Raise the utilization, lower max_model_len, or take a smaller model." in said
    code, said = say(*SMALL, "--gpus", "1")
    assert code == 1
    assert "gpus=1 can't be divided: inference and training need one each" in said
    code, said = say(*SMALL, "--card", "h100", "--completion-tokens", "600")
    assert code == 1
    assert "--completion-tokens 600 must lie between 1 and rollout.max_tokens=512" in said


def test_a_transport_of_cpus_is_planned_for_them_and_refused_for_a_card(say: Callable[..., tuple[int, str]]) -> None:
    code, said = say("model=tiny", "cluster.device=cpu", "weight_sync.transport=gloo")
    assert code == 0
    assert "A trainer rank of 1 needs about" in said
    assert say(*SMALL, "weight_sync.transport=gloo", "--card", "h100") == (
        1,
        "weight_sync.transport=gloo is for CPUs; on GPUs set weight_sync.transport=auto\n",
    )


def test_a_folder_that_is_no_run_is_refused(say: Callable[..., tuple[int, str]], tmp_path: object) -> None:
    code, said = say("cluster.device=cpu", "--calibrate", str(tmp_path))
    assert code == 1
    assert f"--calibrate {tmp_path}: {tmp_path} has no config.json: it is not a run directory" in said


def test_a_model_of_unknown_size_is_planned_without_memory(say: Callable[..., tuple[int, str]]) -> None:
    code, said = say("model=any", "model.name=someone/something", "--card", "h100")
    assert code == 0
    assert "No estimate of memory: model.name=someone/something: its size is not known here." in said


def test_a_bigger_card_holds_more_and_reads_faster() -> None:
    config, shape = composed(*SMALL), shape_of("Qwen/Qwen2.5-0.5B")
    small, large = CARDS["h100"], CARDS["h200"]
    assert kv_tokens(config, shape, large) > kv_tokens(config, shape, small)
    assert assume_latencies(config, shape, large).engine.step_s < assume_latencies(config, shape, small).engine.step_s


def test_the_assumed_decode_times_meet_the_measured_3b_model() -> None:
    """One H200, 3B, bfloat16: 64 sequences in 3.7 ms, 256 in 7.7 ms; see docs/planning.md."""
    engine = assume_latencies(composed("model=qwen2.5-3b"), shape_of("Qwen/Qwen2.5-3B"), CARDS["h200"]).engine
    assert 64 / engine.tokens_per_s(64, 64 * 400) == pytest.approx(3.7e-3, rel=0.15)
    assert 256 / engine.tokens_per_s(256, 256 * 400) == pytest.approx(7.7e-3, rel=0.15)


def test_the_assumed_training_meets_the_measured_small_model() -> None:
    """One H200, 0.6B, rows of 16,384 tokens of samples of 2,048, eager: 36,348 tokens/s with checkpointing, 45,900 without."""
    shape = shape_of("Qwen/Qwen3-0.6B")
    for checkpointing, rate in (("true", 36_348), ("false", 45_900)):
        config = composed(
            "model=qwen3-0.6b", "cluster.trainer_num_workers=1", "trainer.seq_len=16384", "rollout.max_tokens=3700",
            f"backend.gradient_checkpointing={checkpointing}", "backend.compile=false",
        )  # fmt: skip
        load = assume_latencies(config, shape, CARDS["h200"], completion_tokens=1800)
        assert 1 / load.train_token_s == pytest.approx(rate, rel=0.15)


@pytest.mark.parametrize(
    ("overrides", "least", "most"),
    [
        (("trainer.seq_len=16384", "backend.compile=true", "backend.gradient_checkpointing=false"), 9.6, 9.6),
        (("trainer.seq_len=4096", "backend.compile=false", "backend.gradient_checkpointing=true"), 20.4, 22.9),
    ],
)
def test_a_measured_step_of_short_samples_is_told_within_a_quarter(
    overrides: tuple[str, ...], least: float, most: float
) -> None:
    """4B on one H200, 128 rollouts of 128 + 1,024 tokens: 14 of them in a row of 16,384, three in one of 4,096."""
    config = composed("model=qwen3-4b", "cluster.trainer_num_workers=1", "rollout.max_tokens=1024", *overrides)
    load = assume_latencies(config, shape_of("Qwen/Qwen3-4B"), CARDS["h200"], completion_tokens=1024)
    assert load.completion_tokens.mean == pytest.approx(1024)
    seconds = load.train_step_s + load.train_token_s * 128 * 1152
    assert 0.75 * most < seconds < 1.25 * least


def test_auto_is_decided_for_the_card_and_for_each_split_and_said(say: Callable[..., tuple[int, str]]) -> None:
    model = ("model=qwen3-4b", "cluster.trainer_num_workers=1", "cluster.inference_num_workers=1")
    code, out = say(*model, "--card", "h200")
    assert code == 0
    assert "\nChosen for H200: trainer.seq_len=16384 (of" in out
    assert "\nThey are trained in packed rows of 16384 tokens, on 1 rank.\n" in out
    code, out = say(*model, "--gpus", "3", "--card", "h100")
    assert code == 0
    assert "\nThey are trained in packed rows, on 1 rank.\n" in out
    best = re.search(r"\nBest: .* cluster.trainer_num_workers=(\d);", out)
    assert best is not None
    assert re.search(rf"\nChosen for H100: trainer.seq_len=\d+ .*\n.*\nA trainer rank of {best[1]} needs", out)
    code, out = say(
        *model, "trainer.seq_len=8192", "backend.compile=false", "backend.gradient_checkpointing=true", "--card", "h200"
    )
    assert (code, "Chosen" in out) == (0, False)
    code, out = say("model=any", "model.name=someone/something", "--card", "h100")
    assert "\nChosen: trainer.seq_len=4096, backend.compile=false, backend.gradient_checkpointing=true: the size of" in out


SHORT = ("trainer.seq_len=4096",)


@pytest.mark.parametrize(
    ("overrides", "card", "said"),
    [
        ((*SHORT, "backend.compile=true", "backend.gradient_checkpointing=false"), "h200", "trainer.seq_len=65536"),
        ((*SHORT, "backend.compile=true", "backend.gradient_checkpointing=false"), "h100", "trainer.seq_len=32768"),
        ((), "h200", None),
        (("trainer.seq_len=65536",), "h200", None),
        ((*SHORT, "model=qwen3-4b", "backend.gradient_checkpointing=false", "backend.compile=true"), "h200", None),
        (("backend=fake",), "h200", None),
    ],
)
def test_the_plan_says_where_a_gpu_would_wait_for_its_host(
    say: Callable[..., tuple[int, str]], overrides: tuple[str, ...], card: str, said: str | None
) -> None:
    code, out = say("model=qwen3-0.6b", "cluster.trainer_num_workers=1", *overrides, "--card", card)
    assert code == 0
    remarks = [line for line in out.splitlines() if "leaves a GPU waiting for its host" in line]
    assert [f"{said}, the largest power of two that fits" in line for line in remarks] == [True] * (said is not None)


LONG = ("model=qwen3-0.6b", "cluster.trainer_num_workers=1", "trainer.seq_len=81920", "backend.compile=true", "--card", "h100")
NONE = "backend.gradient_checkpointing=false"


def test_the_plan_names_the_fewest_layers_that_have_to_compute_again(say: Callable[..., tuple[int, str]]) -> None:
    """Of a rank that does not fit, of one that leaves room, and none where so many do; with one less it does not fit."""
    code, out = say(*LONG, NONE)
    assert code == 1
    named = re.search(r"It would fit with .*backend\.gradient_checkpointing=full backend\.checkpointed_layers=(\d+)", out)
    assert named is not None
    number = int(named[1])
    assert 4 < number < 28
    code, out = say(*LONG, "backend.gradient_checkpointing=full")
    assert code == 0
    needed = re.search(r"\nA trainer rank leaves room: it needs about ([\d.]+ GiB)", out)
    assert needed is not None
    assert f"\nA trainer rank of 1 needs about {needed[1]}: tensors of " in out  # one number for one thing
    assert (
        f" backend.checkpointed_layers={number} fits as well, by the estimate of memory, and of the 28 layers {number} " in out
    )
    code, out = say(*LONG, f"backend.checkpointed_layers={number}")
    assert code == 0
    assert "leaves room" not in out
    code, out = say(*LONG, f"backend.checkpointed_layers={number - 1}")
    assert code == 1
    assert f"backend.checkpointed_layers={number}, or " in out
    assert "recompute_pointwise" not in out
    code, out = say(*LONG, f"backend.checkpointed_layers={number}", "backend.recompute_pointwise=false")
    assert code == 1
    assert re.search(r"backend\.checkpointed_layers=\d+, or backend\.recompute_pointwise=true[,;] or", out)


def test_a_rank_with_room_for_everything_is_told_to_keep_it(say: Callable[..., tuple[int, str]]) -> None:
    short = [part.replace("81920", "8192") for part in LONG]
    assert "H100. backend.gradient_checkpointing=false fits as well" in say(*short, "backend.gradient_checkpointing=full")[1]
    both = "backend.gradient_checkpointing=false backend.checkpointed_layers=null fits as well"
    assert both in say(*short, "backend.gradient_checkpointing=selective", "backend.checkpointed_layers=9")[1]
    for few in (NONE, "backend.checkpointed_layers=2"):
        assert "leaves room" not in say(*short, few)[1]


def test_more_layers_than_the_model_has_are_refused_by_its_known_shape(say: Callable[..., tuple[int, str]]) -> None:
    code, out = say("model=qwen3-0.6b", "backend.checkpointed_layers=29", "--card", "h100")
    assert (code, "backend.checkpointed_layers=29 is more than the 28 layers of the model" in out) == (1, True)


def test_settings_become_the_simulators_cluster() -> None:
    config = composed(
        *SMALL, "weight_sync.in_flight=abort", "inference.enable_prefix_caching=false", "cluster.env_num_workers=3",
        "orchestrator.max_concurrent_prompts_per_server=5", "rollout.group_size=4", "cluster.inference_num_workers=6",
    )  # fmt: skip
    cluster = cluster_of(config)
    assert (cluster.servers, cluster.ranks, cluster.workers, cluster.server_capacity) == (6, 1, 3, 20)
    assert cluster.abort_at_update
    assert not cluster.prefix_caching


def test_rows_are_packed_for_the_fullest_rank() -> None:
    config = composed(*SMALL, "orchestrator.prompts_batch_size_for_trainer=4", "rollout.group_size=4", "trainer.seq_len=4096")
    even = constant(100), constant(412)
    assert pack_step(config, *even) == PackedStep(2, 4096)  # 16 of 512 tokens in rows of 4,096
    assert pack_step(divide(config, 1, 3), *even) == PackedStep(1, 6 * 512)  # 6, 5 and 5
    assert pack_step(config, constant(1000), constant(412)) == PackedStep(8, 2 * 1412)  # two a row, and 1,272 are empty


def test_ranks_that_share_rows_hold_parts_of_them_and_pack_together() -> None:
    """Four ranks in pairs: half the activations each, the rows of two ranks, and no division into an odd number of ranks."""
    config = composed(*SMALL, "cluster.trainer_num_workers=4", "orchestrator.prompts_batch_size_for_trainer=4")
    paired = composed(
        *SMALL,
        "cluster.trainer_num_workers=4",
        "orchestrator.prompts_batch_size_for_trainer=4",
        "backend.context_parallel_size=2",
    )
    shape = shape_of("Qwen/Qwen2.5-0.5B")
    alone, together = estimate_rank(config, shape), estimate_rank(paired, shape)
    assert alone is not None
    assert together is not None
    assert (2 * together.kept, 2 * together.at_work) == (alone.kept, alone.at_work)
    assert together.weights == alone.weights
    load = assume_latencies(paired, shape, CARDS["h100"])
    assert load.train_token_s > assume_latencies(config, shape, CARDS["h100"]).train_token_s
    lengths = load.prompt_tokens, load.completion_tokens
    assert pack_step(paired, *lengths) == pack_step(divide(config, 1, 2), *lengths)
    ranks = [split.ranks for split in try_splits(paired, 6, lambda divided: assume_latencies(divided, shape, CARDS["h100"]))]
    assert ranks == [4, 2]


def test_a_megatron_rank_is_estimated_and_told_what_would_make_room(say: Callable[..., tuple[int, str]]) -> None:
    given = ("model=qwen3-4b", "backend=megatron", "backend.use_distributed_optimizer=false")
    given += ("cluster.trainer_num_workers=2", "trainer.seq_len=32768", "--card", "h100")
    code, said = say(*given)
    assert code == 1
    assert "A trainer rank needs about" in said
    assert (
        "It would fit with backend.optimizer_cpu_offload=true, or backend.context_parallel_size=2, or "
        "backend.tensor_parallel_size=2, or backend.pipeline_parallel_size=2; or with shorter rows." in said
    )
    code, said = say(*given, "backend.tensor_parallel_size=2")
    assert code == 0
    assert "A trainer rank of 2 needs about" in said
    assert "The steps of backend=megatron are taken to be as long as those of backend=fsdp." in said
    code, said = say(*given, "backend.optimizer_cpu_offload=true", "backend.optimizer_offload_fraction=0.75")
    assert code == 0
    assert re.search(r"It has \d+\.\d\d? GiB in its host's memory besides", said)
    assert "as long as those of backend=fsdp, without the way of its moments over the bus." in said
    config = composed("model=qwen3-4b", "backend=megatron", "cluster.trainer_num_workers=2", "backend.tensor_parallel_size=2")
    assert find_fewest_again(config, shape_of("Qwen/Qwen3-4B"), 10**15) == {"gradient_checkpointing": False}


def test_splits_are_those_that_the_settings_of_the_backend_allow() -> None:
    """Each of two replicas has groups of two ranks, and several: so eight ranks of ten cards, and not 1 to 7 or 9."""
    config = composed(
        *SMALL, "cluster.trainer_num_workers=8", "orchestrator.prompts_batch_size_for_trainer=8", "backend.replicas=2",
        "backend.reshard_after_forward=2",
    )  # fmt: skip
    shape = shape_of("Qwen/Qwen2.5-0.5B")
    ranks = [split.ranks for split in try_splits(config, 10, lambda divided: assume_latencies(divided, shape, CARDS["h100"]))]
    assert ranks == [8]


@pytest.mark.parametrize(("overrides", "gpus", "sentence"), [
    ([], 1, "gpus=1 can't be divided: inference and training need one each"),
    ([], 1_000_000, "gpus=1000000 are more than a run may have: 1024 for servers and as many for ranks"),
    (["inference.tensor_parallel_size=4", "cluster.inference_num_workers=4"], 3,
     "gpus=3 can't be divided: no number of servers of inference.tensor_parallel_size=4 leaves as many ranks as the settings "
     "of backend=fsdp allow: give another --gpus"),
])  # fmt: skip
def test_cards_that_can_not_be_divided_are_refused_in_words(overrides: list[str], gpus: int, sentence: str) -> None:
    with pytest.raises(PlanRefused, match=f"^{re.escape(sentence)}"):
        list(try_splits(composed(*SMALL, *overrides), gpus, lambda divided: pytest.fail("nothing is simulated")))


def test_the_divisions_of_many_cards_are_chosen_among_the_possible_ones() -> None:
    """Of 91 cards 30 divisions have servers of 3 cards: 24 of these are shown, the first and the last among them."""
    config = composed(*SMALL, "inference.tensor_parallel_size=3", "cluster.inference_num_workers=3", "number_of_steps=1")

    def refuse(divided: RunConfig) -> Latencies:
        raise PlanRefused("not now")

    servers = [split.servers for split in try_splits(config, 91, refuse)]
    assert len(servers) == 24
    assert (servers[0], servers[-1]) == (3, 90)
    assert all(count % 3 == 0 for count in servers)


def test_weights_take_their_transports_time() -> None:
    """3B in bfloat16 over NCCL took 37 ms until all was in, and 7.7 ms to commit (benchmarks/results/updates)."""
    shape, card = shape_of("Qwen/Qwen2.5-3B"), CARDS["h200"]
    times = {
        transport: assume_latencies(composed("model=qwen2.5-3b", f"weight_sync.transport={transport}"), shape, card)
        for transport in ("auto", "nccl", "cuda_ipc", "disk")
    }
    assert times["auto"].sync_s == times["nccl"].sync_s == pytest.approx(0.037, rel=0.1)
    assert times["nccl"].pause_s == 0.007
    assert times["cuda_ipc"].sync_s == pytest.approx(0.1, rel=0.1)
    assert times["disk"].sync_s > 5


def test_every_division_is_tried_and_the_fastest_is_best() -> None:
    config, shape = composed(*SMALL), shape_of("Qwen/Qwen2.5-0.5B")

    def load_of(divided: RunConfig) -> object:
        if divided.cluster.trainer_num_workers == 1:
            raise PlanRefused("too small")
        return assume_latencies(divided, shape, CARDS["h100"])

    divisions = list(try_splits(config, 5, load_of))  # type: ignore[arg-type]
    assert [(split.servers, split.ranks) for split in divisions] == [(1, 4), (2, 3), (3, 2), (4, 1)]
    assert divisions[-1].problem == "too small"
    chosen = choose_split(divisions)
    assert chosen is not None
    assert chosen.outcome is not None
    assert chosen.outcome.tokens_per_s == max(split.outcome.tokens_per_s for split in divisions if split.outcome)
    assert len(list(try_splits(composed(*SMALL, "number_of_steps=1"), 200, load_of))) == 24  # type: ignore[arg-type]


def test_a_forecast_trains_what_the_configuration_says() -> None:
    config = composed(*SMALL, "orchestrator.max_async_rollout=0")
    outcome = forecast(config, assume_latencies(config, shape_of("Qwen/Qwen2.5-0.5B"), CARDS["h100"]))
    assert len(outcome.steps) == 12
    assert all(step.rollouts == 128 for step in outcome.steps)
    assert outcome.counts.age_max == 0


def test_memory_is_that_of_the_settings() -> None:
    config, shape = composed(*SMALL), shape_of("Qwen/Qwen2.5-0.5B")
    check_memory(config, shape, CARDS["h100"])
    plain = estimate_rank(config, shape)
    sgd = estimate_rank(composed(*SMALL, "backend.optimizer=sgd"), shape)
    fake = estimate_rank(composed("experiment=fake"), shape)
    assert plain is not None
    assert sgd is not None
    assert plain.total - sgd.total == plain.moments == 8 * shape.parameters
    assert fake is None
    assert estimate_server(config, shape, CARDS["h100"]).kv_bytes_per_token == 12_288


def test_adapters_need_a_fraction_of_that_and_compiled_layers_less() -> None:
    """4B on an H200: what was measured there ran (131.1 GiB compiled, of which `plan` once said 166), and fits."""
    shape = shape_of("Qwen/Qwen3-4B")
    long = ("model=qwen3-4b", "cluster.trainer_num_workers=1", "trainer.seq_len=16384", "inference.max_model_len=16384")
    everything = ("backend.gradient_checkpointing=false", "backend.reshard_after_forward=false")
    config = composed(*long, *everything, "backend.compile=true")
    check_memory(config, shape, CARDS["h200"])
    eager = config.backend.model_copy(update={"compile": False})
    with pytest.raises(PlanRefused):
        check_memory(config.model_copy(update={"backend": eager}), shape, CARDS["h200"])
    adapters = config.model.model_copy(update={"lora": LoraSettings(rank=16)})
    compiled, adapted = estimate_rank(config, shape), estimate_rank(config.model_copy(update={"model": adapters}), shape)
    assert compiled is not None
    assert adapted is not None
    assert compiled.needed == int(1.03 * compiled.total) + 2**30
    assert adapted.gradients == 4 * 33_030_144
    served = config.inference.model_copy(update={"max_model_len": 8192})
    joined = estimate_rank(config.model_copy(update={"inference": served}), shape)  # no sample fills a row: attention in parts
    assert joined is not None
    assert joined.kept - compiled.kept == 16_384 * 36 * 2 * 4096


def test_4b_at_65k_needs_two_h100_or_moments_on_the_host() -> None:
    """What `plan` says of it, and that each remedy it names is one."""
    long = (
        "model=any", "model.name=Qwen/Qwen3-4B", "trainer.seq_len=65536", "inference.max_model_len=65536",
        "inference.gpu_memory_utilization=0.9", "rollout.max_tokens=60000", "cluster.trainer_num_workers=1",
        "orchestrator.prompts_batch_size_for_trainer=8",
    )  # fmt: skip
    shape, card = shape_of("Qwen/Qwen3-4B"), CARDS["h100"]
    with pytest.raises(PlanRefused) as refused:
        check_memory(composed(*long), shape, card)
    said = str(refused.value)
    assert "A trainer rank needs about 92.0 GiB, and an H100 has 79.0 GiB" in said
    remedies = ("cluster.trainer_num_workers=2", "backend.optimizer=adamw_8bit", "backend.offload=optimizer")
    assert said.endswith(f"It would fit with {', or '.join((*remedies, 'backend.offload=parameters'))}; or with shorter rows.")
    for remedy in remedies:
        check_memory(composed(*long, remedy), shape, card)


def test_a_remedy_leaves_each_stretch_of_a_model_a_layer(say: Callable[..., tuple[int, str]]) -> None:
    """Of 36 layers 2 stages can have 6 stretches each, and 8 stages can't."""
    code, said = say(
        "model=qwen3-4b", "backend=megatron", "backend.pipeline_parallel_size=2", "backend.virtual_pipeline_size=6",
        "cluster.trainer_num_workers=8", "trainer.seq_len=262144", "inference.max_model_len=32768", "--card", "h100",
    )  # fmt: skip
    assert code == 1
    assert "A trainer rank needs about" in said
    assert "backend.pipeline_parallel_size=8" not in said


def test_on_one_card_the_rank_fits_into_what_the_server_leaves_or_takes_turns(say: Callable[..., tuple[int, str]]) -> None:
    code, said = say(*SMALL, "cluster=one_gpu", "--hosts", "1x1", "--card", "h100")
    assert code == 0, said
    assert "Server and trainer share a card." in said
    assert "the version handed to the server 0.92 GiB" in said
    code, said = say("model=qwen2.5-3b", "cluster=one_gpu", "--hosts", "1x1", "--card", "h100")
    assert code == 1
    assert "5.75 GiB of it to hand versions to the server" in said or "5.7 GiB of it to hand versions to the server" in said
    assert "set cluster=one_gpu_in_turns, which gives a step the whole card" in said
    turns = ("model=qwen2.5-3b", "cluster=one_gpu_in_turns", "inference.gpu_memory_utilization=0.4", "--card", "h100")
    assert say(*turns)[0] == 0
    code, said = say("model=qwen2.5-3b", "cluster=one_gpu_in_turns", "--card", "h100")
    assert code == 1
    assert "between its steps, 5.7 GiB of it to hand versions to the server, and inference.gpu_memory_utilization=0.6" in said


def test_the_placement_names_hosts_gpus_threads_and_where_sockets_bind(say: Callable[..., tuple[int, str]]) -> None:
    servers = ("cluster.inference_num_workers=4", "inference.tensor_parallel_size=2", "cluster.inference_placement=SPREAD")
    code, said = say(
        "--placement", "--hosts", "1x0x4,2x4x32", *servers, "cluster.trainer_num_workers=4", "cluster.env_num_workers=2"
    )
    assert code == 0
    lines = said.splitlines()
    assert lines[:4] == [
        "3 hosts, on gpu; servers SPREAD, trainer ranks PACK:",
        "node-0: host-0, 4 cores, no GPU",
        "  orchestrator  1 thread",
        "  worker-0      1 thread",
    ]
    assert "  server-1      GPU 0, 1, 1 thread" in lines
    assert "  trainer-3     GPU 3, 1 thread" in lines
    assert "Sockets bind to each host's own address" in said
    assert "HTTP of servers: loopback, ports from 8100 on, the next free ones where those are taken." in said


def test_the_placement_of_the_docs_is_printed_as_there(say: Callable[..., tuple[int, str]]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/launching.md").read_text(encoding="utf-8")
    block = page.partition("    $ telescope plan ")[2].partition("\n\n")[0].replace("\\\n", "")
    command, *printed = (line.removeprefix("    ") for line in block.splitlines())
    code, said = say(*command.split())
    assert code == 0
    lines = said.splitlines()
    assert len(printed) == 10
    assert [line for line in printed if line.strip() != "…" and line not in lines] == []


def test_the_placement_of_a_slurm_job_is_on_the_nodes_that_it_asks_for(say: Callable[..., tuple[int, str]]) -> None:
    job = ("--placement", "cluster=slurm", "cluster.slurm.gpus_per_node=2", "cluster.slurm.cpus_per_node=32")
    code, said = say(*job, "cluster.slurm.inference={nodes: 2, gpus_per_node: 4}", "cluster.inference_placement=SPREAD")
    assert code == 0
    assert re.findall(r"^(?:node|  server|  trainer)-.*", said, re.MULTILINE) == [
        "node-0: node-0, 32 cores, 2 GPUs, for trainer ranks alone",
        "  trainer-0     GPU 0, 4 threads",
        "  trainer-1     GPU 1, 4 threads",
        "node-1: inference-node-0, 32 cores, 4 GPUs, for servers alone",
        "  server-0      GPU 0, 4 threads",
        "node-2: inference-node-1, 32 cores, 4 GPUs, for servers alone",
        "  server-1      GPU 0, 4 threads",
    ]
    code, said = say(*job, "cluster.inference_num_workers=3")
    assert (code, "where a server and a rank share one, but node-0 has 2: ask for fewer" in said) == (1, True)
    assert say(*job, "--hosts", "1x4", "cluster.inference_num_workers=3")[0] == 0


def test_an_impossible_placement_is_refused_with_the_numbers(say: Callable[..., tuple[int, str]]) -> None:
    code, said = say("--placement", "--hosts", "2x2", "cluster.trainer_num_workers=3", "cluster.trainer_placement=STRICT_PACK")
    assert code == 1
    assert (
        "3 trainer ranks of 1 GPU (cluster.trainer_placement=STRICT_PACK) do not fit on 2 hosts (host-0 with 2, host-1 wi"
        in said
    )
    code, said = say("--placement", "--hosts", "many")
    assert (code, "--hosts many is not a list of hosts" in said) == (2, True)
