"""The real engine against transformers: log-probs, versions, aborts, priorities, updates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from benchmarks.flow.cancel import one_abort
from telescope.backends.common.logprobs import logprobs
from telescope.inference.engine import Generated, RequestRefused, WeightsRefused
from telescope.inference.vllm.patches import COMMIT
from telescope.maths.support import WHOLE, Support
from telescope.records import Sampling, WeightManifest
from tests.inference.conftest import Served

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


COLD, HOT = 0.3, 2.0
"""Temperatures at which an answer never ends by itself, and at which it soon does."""


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 90, length).astype(np.int32)


@pytest_asyncio.fixture(loop_scope="session")
async def old(served: Served) -> Served:
    """The engine with the first model's weights, whatever the test before left."""
    if served.holds != "old":
        await served.serve("old")
    return served


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_transformers_after_temperature(old: Served, temperature: float):
    prompts = [prompt(5 + index, index) for index in range(8)]
    answers = await asyncio.gather(*(old.generate(p, 24, seed=i, temperature=temperature) for i, p in enumerate(prompts)))
    differences = np.concatenate(
        [
            np.abs(a.logprobs - old.reference_logprobs("old", p, a.ids, temperature))
            for p, a in zip(prompts, answers, strict=True)
        ]
    )
    assert differences.size >= 100
    assert differences.mean() < 1e-5 < 1e-3
    assert differences.max() < 1e-3


async def test_kept_log_probs_are_vllms_own_to_the_bit_where_requests_take_the_cache_from_each_other(old: Served):
    path = old.engine.logprobs
    assert (path.kept, path.asked) == (True, False)
    before, preempted = path.compared, old.engine.load.preemptions
    path.asked = True
    try:
        asked = [old.generate(prompt(5 + 2 * i, i), 440, seed=i, temperature=COLD * (i % 3 > 0)) for i in range(22)]
        await asyncio.gather(*asked)
    finally:
        path.asked = False
    assert old.engine.load.preemptions > preempted
    assert (path.compared - before, path.apart) == (22, 0)


async def test_answers_end_with_the_end_token_or_at_max_tokens(old: Served):
    answers = await asyncio.gather(*(old.generate(prompt(6, i), 12, seed=i, temperature=HOT) for i in range(128)))
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for answer in answers:
        ended = bool(answer.ids[-1] == 1)
        assert answer.finish_reason == ("stop" if ended else "length")
        assert 1 not in answer.ids[:-1]
        assert ended or len(answer.ids) == 12
        assert len(answer.ids) == len(answer.logprobs) == len(answer.versions)


async def test_a_seed_gives_the_same_answer_again_and_another_seed_another(old: Served):
    first, again, other = [(await old.generate(prompt(9), 20, seed=seed)).ids.tolist() for seed in (7, 7, 8)]
    assert first == again
    assert first != other


async def test_seeded_prompts_that_are_prefilled_in_pieces_keep_engine_and_answers_alive(old: Served):
    alone = await old.generate(prompt(400, 3), 8, seed=5)
    await old.engine.client.reset_prefix_cache()
    crowd = [old.generate(prompt(400, 100 + i), 8, seed=i) for i in range(30)]  # 12,000 tokens, 8,192 a step
    answers = await asyncio.gather(*crowd, old.generate(prompt(400, 3), 8, seed=5))
    assert answers[-1].ids.tolist() == alone.ids.tolist()


async def test_a_prompt_without_room_and_an_unknown_token_are_refused_in_words(old: Served):
    with pytest.raises(RequestRefused, match=r"512 tokens leaves no room for an answer: inference.max_model_len=512"):
        await old.generate(prompt(512))
    with pytest.raises(RequestRefused, match=r"token ids from 5 to 98; the model knows 0 to 97"):
        await old.generate(np.array([5, 98], dtype=np.int32))
    with pytest.raises(RequestRefused, match=r"max_tokens=0 must be at least 1"):
        await old.generate(prompt(5), 0)
    with pytest.raises(RequestRefused, match=r"temperature must be non-negative"):
        await old.generate(prompt(5), temperature=-1.0)


async def test_an_answer_is_cut_where_the_models_length_ends(old: Served):
    answers = await asyncio.gather(*(old.generate(prompt(508, i), 50, seed=i) for i in range(8)))
    assert max(len(answer.ids) for answer in answers) == 4
    assert "length" in {answer.finish_reason for answer in answers}


async def test_an_abort_stops_the_request_in_the_engine_within_a_step(old: Served):
    task = asyncio.create_task(long_request(old, "doomed", prompt(8)))
    await until_running(old, "doomed", 5)
    await old.engine.abort("doomed")
    aborted = await asyncio.wait_for(task, 60)
    other = await old.generate(prompt(8, 1), 3, seed=1)  # three more steps
    assert aborted.finish_reason == "abort"
    assert 5 <= len(aborted.ids) < 400
    assert len(aborted.logprobs) == len(aborted.versions) == len(aborted.ids)
    assert len(other.ids) >= 1
    assert not [name for name in await old.engine.running() if name.startswith("doomed")]


@pytest.mark.parametrize("others", [1, 15])
async def test_a_cancelled_request_is_out_of_the_engine_within_one_step_and_gets_no_further_token(old: Served, others: int):
    stops = [await one_abort(old.engine, f"cancel{others}-{index}", others=others, max_tokens=400) for index in range(5)]
    assert [stop.late_tokens for stop in stops] == [0] * 5
    assert max(stop.held_steps for stop in stops) <= 1
    assert all(5 <= stop.tokens < 400 for stop in stops)


async def test_an_abort_right_behind_its_request_is_not_lost(old: Served):
    task = asyncio.create_task(long_request(old, "doomed", prompt(8)))
    await asyncio.sleep(0)
    await old.engine.abort("doomed")
    aborted = await asyncio.wait_for(task, 60)
    assert aborted.finish_reason == "abort"
    assert len(aborted.ids) < 400


async def test_an_abort_of_a_request_that_nobody_knows_is_no_error(old: Served):
    await old.engine.abort("never-seen")


async def test_a_smaller_priority_goes_first(old: Served):
    """More requests than the engine takes at once; the last ones to come are the most urgent."""
    finished: list[int] = []

    async def one(index: int, priority: int) -> None:
        await old.generate(prompt(4, index), 12, seed=index, priority=priority)
        finished.append(index)

    late = [one(index, 5) for index in range(256 + 64)]
    urgent = [one(1000 + index, 0) for index in range(16)]
    await asyncio.gather(*late, *urgent)
    urgent_places = [place for place, index in enumerate(finished) if index >= 1000]
    waiting_places = [place for place, index in enumerate(finished) if 256 <= index < 1000]
    assert (len(urgent_places), len(waiting_places)) == (16, 64)
    assert np.mean(urgent_places) < np.mean(waiting_places)  # of those that found no room, they were taken first


async def across_two_updates(old: Served) -> tuple[Generated, list[int]]:
    """One long answer, updated twice on the way; the versions that it met."""
    task = asyncio.create_task(long_request(old, "long", prompt(10)))
    await until_running(old, "long", 10)
    met = [old.serving, await old.serve("new")]
    await until_running(old, "long", 60)
    met.append(await old.serve("third"))
    answer = await asyncio.wait_for(task, 60)
    spans = [(int(v), int((answer.versions == v).sum())) for v in dict.fromkeys(answer.versions.tolist())]
    assert [version for version, _ in spans] == met
    assert min(count for _, count in spans) >= 10
    assert (np.diff(answer.versions) >= 0).all()
    return answer, met


async def test_tokens_that_are_computed_anew_carry_their_own_version_and_its_log_probs_given_all_before(old: Served):
    with in_flight(old, "recompute"):
        answer, met = await across_two_updates(old)
    for version, which in zip(met, ("old", "new", "third"), strict=True):
        mine = answer.versions == version
        expected = old.reference_logprobs(which, prompt(10), answer.ids, COLD)
        assert np.abs(answer.logprobs - expected)[mine].max() < 1e-3
        others = old.reference_logprobs("third" if which == "old" else "old", prompt(10), answer.ids, COLD)
        assert np.abs(answer.logprobs - others)[mine].mean() > 0.1


async def test_tokens_that_go_on_through_an_update_are_of_their_version_over_the_keys_and_values_before(
    old: Served,
):
    """The reference feeds each token to the weights of its version and keeps all keys and values, as the engine does."""
    answer, met = await across_two_updates(old)
    which = dict(zip(met, ("old", "new", "third"), strict=True))
    expected = old.reference_over_kept_cache(prompt(10), answer, which, COLD)
    assert np.abs(answer.logprobs - expected).max() < 1e-3
    anew = old.reference_logprobs("third", prompt(10), answer.ids, COLD)
    assert np.abs(answer.logprobs - anew)[answer.versions == met[2]].mean() > 0.1


async def test_versions_are_exact_for_requests_that_arrive_finish_and_run_while_weights_change(old: Served):
    """Requests keep coming while five versions are served; each token's log-prob is that of the version it names."""
    served = {old.serving: "old"}
    tasks, long = [], asyncio.create_task(long_request(old, "spanning", prompt(20)))
    await until_running(old, "spanning", 10)
    for index, which in enumerate(("new", "third", "old", "new", "third")):
        for burst in range(8):
            tasks.append(asyncio.create_task(old.generate(prompt(20, burst), 12, seed=index, temperature=COLD)))
            await asyncio.sleep(0)
        served[await old.serve(which)] = which
    answers = await asyncio.gather(*tasks)
    spanning = await long
    assert len(set(spanning.versions.tolist())) > 1
    assert np.abs(spanning.logprobs - old.reference_over_kept_cache(prompt(20), spanning, served, COLD)).max() < 1e-3
    for index, answer in enumerate(answers):
        expected = old.reference_over_kept_cache(prompt(20, index % 8), answer, served, COLD)
        assert np.abs(answer.logprobs - expected).max() < 1e-3


async def test_an_answer_that_is_whole_before_its_commit_is_answered_waits_for_its_versions(
    old: Served, monkeypatch: pytest.MonkeyPatch
):
    core, may_answer, before = old.engine.client.engine_core, asyncio.Event(), old.serving
    asked = core.call_utility_async

    async def late(method: str, *arguments: Any) -> Any:
        answer = await asked(method, *arguments)
        if method == COMMIT:
            await may_answer.wait()
        return answer

    monkeypatch.setattr(core, "call_utility_async", late)
    task = asyncio.create_task(long_request(old, "whole", prompt(10)))
    await until_running(old, "whole", 10)
    serving = asyncio.create_task(old.serve("new"))
    async with asyncio.timeout(60):
        while old.engine.load.running:
            await asyncio.sleep(0.005)
    assert not (await asyncio.wait({task}, timeout=0.1))[0]
    may_answer.set()
    version = await serving
    answer = await asyncio.wait_for(task, 60)
    assert answer.versions[-1] == version
    expected = old.reference_over_kept_cache(prompt(10), answer, {before: "old", version: "new"}, COLD)
    assert np.abs(answer.logprobs - expected).max() < 1e-3


async def test_updates_are_plain_copies_found_by_watching_the_loader(old: Served):
    (opened,) = old.engine.opened
    assert opened.no_plan == ""
    assert opened.copies == 2 * 11 + 2  # per layer q, k, v, o, two head norms, gate, up, down, two norms; embedding and norm
    model = old.model("old")
    assert opened.nbytes == 4 * sum(parameter.numel() for parameter in model.parameters())


async def test_after_an_update_greedy_answers_and_log_probs_are_the_new_weights_with_prefix_caching_on(old: Served):
    prompts = [prompt(200, i) for i in range(4)]
    before = await asyncio.gather(*(old.generate(p, 24, temperature=0.0) for p in prompts))
    cached = await asyncio.gather(*(old.generate(p, 24, temperature=0.0) for p in prompts))
    version = await old.serve("new")
    after = await asyncio.gather(*(old.generate(p, 24, temperature=0.0) for p in prompts))
    assert all(answer.cached_tokens > 0 for answer in cached)
    assert all(answer.cached_tokens == 0 for answer in after)
    assert [a.ids.tolist() for a in before] != [a.ids.tolist() for a in after]
    for p, answer in zip(prompts, after, strict=True):
        assert set(answer.versions.tolist()) == {version}
        assert answer.ids.tolist() == old.greedy("new", p, len(answer.ids))
    sampled = await asyncio.gather(*(old.generate(p, 24, seed=3) for p in prompts))
    for p, answer in zip(prompts, sampled, strict=True):
        assert np.abs(answer.logprobs - old.reference_logprobs("new", p, answer.ids)).max() < 1e-3


async def test_a_request_that_waits_while_the_version_changes_finds_no_blocks_of_the_weights_before(old: Served):
    ids = prompt(200, 77)
    await old.generate(ids, 4)
    assert (await old.generate(ids, 4)).cached_tokens > 0
    core = old.engine.client.engine_core
    await core.pause_scheduler_async(mode="keep", clear_cache=False)
    waiting = asyncio.create_task(old.engine.generate("waits", ids, Sampling(COLD, 24, 0), 0))
    while not old.engine._requests or not old.engine._requests["waits"].internal:
        await asyncio.sleep(0.005)
    version = await old.serve("new")
    await old.engine.client.resume_generation()
    answer = await asyncio.wait_for(waiting, 60)
    assert answer.cached_tokens == 0
    assert set(answer.versions.tolist()) == {version}
    assert np.abs(answer.logprobs - old.reference_logprobs("new", ids, answer.ids, COLD)).max() < 1e-3


async def test_a_discarded_version_leaves_the_old_one_serving(old: Served):
    manifest = old.publish("new")
    state = await old.engine.prepare(manifest)
    assert state.prepared == manifest.version
    held = await old.engine.discard(manifest.version)
    assert held.prepared is None
    with pytest.raises(WeightsRefused, match=f"weights version {manifest.version} can't be committed: nothing is staged"):
        await old.engine.commit(manifest.version)
    await old.assert_serves("old")


async def test_a_partial_version_is_refused_before_anything_is_touched(old: Served):
    """q_proj alone of a fused layer: vLLM itself would take it without a word."""
    whole = old.publish("new")
    with pytest.raises(WeightsRefused, match=r"2 tensors are missing: model.layers.0.self_attn.k_proj.weight, model.layers.1"):
        await old.engine.prepare(without(whole, "k_proj"))
    await old.assert_serves("old")


async def test_a_stranger_and_a_wrong_shape_are_refused_in_words(old: Served):
    whole = old.publish("new")
    with pytest.raises(
        WeightsRefused, match=r"1 tensors are missing: model.norm.weight; 1 tensors are not the model's: model.stranger"
    ):
        await old.engine.prepare(with_norm(whole, name="model.stranger"))
    with pytest.raises(WeightsRefused, match=r"model.norm.weight has shape \[32, 2\] but the model's is \[64\]"):
        await old.engine.prepare(with_norm(whole, shape=(32, 2)))
    await old.assert_serves("old")


async def test_a_corrupted_segment_is_refused_and_the_old_version_serves_on(old: Served):
    manifest = old.publish("new")
    path = Path(manifest.location)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightsRefused, match=rf"weights version {manifest.version} at .* have checksum crc32:"):
        await old.engine.prepare(manifest)
    await old.assert_serves("old")


async def test_in_flight_abort_ends_running_requests_at_an_update(old: Served):
    with in_flight(old, "abort"):
        task = asyncio.create_task(long_request(old, "cut", prompt(8)))
        await until_running(old, "cut", 5)
        before = old.serving
        await old.serve("new")
        answer = await asyncio.wait_for(task, 60)
    assert answer.finish_reason == "abort"
    assert set(answer.versions.tolist()) == {before}
    await old.assert_serves("new")


async def test_256_requests_at_once_are_all_answered(old: Served):
    answers = await asyncio.gather(*(old.generate(prompt(20, i), 6, seed=i) for i in range(256)))
    assert len(answers) == 256
    assert all(1 <= len(answer.ids) <= 6 for answer in answers)


@contextmanager
def in_flight(served: Served, mode: str) -> Iterator[None]:
    kept = served.engine._sync
    served.engine._sync = kept.model_copy(update={"in_flight": mode})
    try:
        yield
    finally:
        served.engine._sync = kept


async def long_request(served: Served, name: str, tokens: np.ndarray):
    """400 tokens: at this temperature the end token is never drawn."""
    return await served.engine.generate(name, tokens, Sampling(COLD, 400, 11), 0)


async def until_running(served: Served, name: str, tokens: int) -> None:
    async with asyncio.timeout(60):
        while True:
            counts = [count for held, count in (await served.engine.running()).items() if held.startswith(name)]
            if counts and counts[0] >= tokens:
                return


def without(manifest: WeightManifest, part: str) -> WeightManifest:
    kept = tuple(spec for spec in manifest.tensors if part not in spec.name)
    return msgspec.structs.replace(manifest, tensors=kept)


def with_norm(manifest: WeightManifest, **fields) -> WeightManifest:
    """The manifest, its last norm described otherwise."""
    specs = (msgspec.structs.replace(s, **fields) if s.name == "model.norm.weight" else s for s in manifest.tensors)
    return msgspec.structs.replace(manifest, tensors=tuple(specs))


async def test_each_step_is_told_while_a_long_answer_is_generated(old: Served):
    steps = 0

    def stepped() -> None:
        nonlocal steps
        steps += 1

    old.engine.on_step(stepped)
    answer = await old.generate(prompt(6), 200, temperature=COLD)
    old.engine.on_step(lambda: None)
    assert len(answer.ids) == 200
    assert 50 <= steps <= 202


async def test_the_engine_says_how_full_its_cache_is_while_it_works_and_that_it_is_empty_after(old: Served):
    loads = []
    old.engine.on_step(lambda: loads.append(old.engine.load))
    await asyncio.gather(*(old.generate(prompt(6), 200, temperature=COLD) for _ in range(3)))
    old.engine.on_step(lambda: None)
    assert max(load.running for load in loads) == 3
    used = [load.kv_used for load in loads if load.running == 3]
    assert 0 < used[0] < used[-1] < 1  # 206 tokens are more than one of its blocks
    assert (old.engine.load.running, old.engine.load.waiting, old.engine.load.kv_used) == (0, 0, 0.0)


KEPT = [Support(top_k=5), Support(top_p=0.8), Support(min_p=0.3), Support(top_k=40, top_p=0.9, min_p=0.02)]


@pytest.mark.parametrize("support", KEPT)
async def test_logprobs_of_a_cut_distribution_are_those_that_the_trainer_computes(old: Served, support: Support):
    import torch

    prompts = [prompt(5 + index, index) for index in range(8)]
    sampling = [Sampling(HOT, 24, seed, support.top_k, support.top_p, support.min_p) for seed in range(8)]
    answers = await asyncio.gather(*(old.engine.generate(old.name(), p, s, 0) for p, s in zip(prompts, sampling, strict=True)))
    differences, raised = [], []
    for p, answer in zip(prompts, answers, strict=True):
        tokens = torch.as_tensor(np.concatenate([p, answer.ids]).astype(np.int64))
        with torch.no_grad():
            model = old.model("old")
            hidden = model.model(tokens[None]).last_hidden_state[0, len(p) - 1 : -1]
            head = model.get_output_embeddings().weight
            ours, whole = (logprobs(hidden, head, tokens[len(p) :], HOT, 64, kept)[0].numpy() for kept in (support, WHOLE))
        differences.append(np.abs(answer.logprobs - ours))
        raised.append(answer.logprobs - whole)
    assert np.concatenate(differences).max() < 1e-3
    assert np.concatenate(raised).mean() > 0.05  # the sampler's log-probs are of the tokens that are left


async def test_an_answer_ends_with_the_stop_text_and_all_its_tokens_are_there(old: Served):
    whole = await old.generate(prompt(9), 40, seed=3, temperature=COLD)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(old.folders["old"])
    mark = tokenizer.decode(whole.ids[4:6].tolist())
    stopped = await old.engine.generate(old.name(), prompt(9), Sampling(COLD, 40, 3, stop=(mark,)), 0)
    count = len(stopped.ids)
    assert stopped.finish_reason == "stop"
    assert stopped.ids.tolist() == whole.ids[:count].tolist()
    assert tokenizer.decode(stopped.ids.tolist()).endswith(mark)
    assert mark not in tokenizer.decode(stopped.ids[:-1].tolist())
    assert len(stopped.logprobs) == len(stopped.versions) == count <= 6
    np.testing.assert_allclose(stopped.logprobs, whole.logprobs[:count], atol=1e-4)


async def test_a_sleeping_engine_answers_what_ran_and_what_came_meanwhile_by_the_next_version(old: Served):
    """On a CPU the memory stays; the order of things is that of a GPU (tests/gpu/check_sleep.py)."""
    before = old.serving
    running = asyncio.create_task(long_request(old, "running", prompt(8)))
    await until_running(old, "running", 5)
    async with asyncio.timeout(60):
        await old.engine.sleep()
        answer = await running
    assert (len(answer.ids), set(answer.versions.tolist())) == (400, {before})
    late = asyncio.create_task(old.generate(prompt(9), 12, seed=4, temperature=COLD))
    manifest = old.publish("new")
    await old.engine.prepare(manifest)
    assert not late.done()
    await old.engine.commit(manifest.version)
    async with asyncio.timeout(60):
        answer = await late
    old.holds, old.serving = "new", manifest.version
    assert set(answer.versions.tolist()) == {manifest.version}
    assert np.abs(answer.logprobs - old.reference_logprobs("new", prompt(9), answer.ids, COLD)).max() < 1e-3
    assert answer.cached_tokens == 0
