"""The fake engine: answers that follow from their inputs, some of them right; weights checked like real ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from telescope.config.models import EMBEDDED
from telescope.environments.tasks.countdown import Countdown
from telescope.environments.tasks.reverse_letters import ReverseLetters
from telescope.inference.engine import RequestRefused, WeightsRefused
from telescope.inference.fake import Characters, FakeEngine
from telescope.records import Sampling
from telescope.weights.transports.shared_memory import SharedMemoryPublisher, SharedMemoryReader

RUN = "fake-tests"
PROMPT = np.array([2, 20, 21, 22, 4], dtype=np.int32)
END = 1


@pytest.fixture
def publisher(tmp_path: Path):
    made = SharedMemoryPublisher(RUN, tmp_path)
    yield made
    made.close()


def engine(token_s: float = 0.0, model: str = "tiny") -> FakeEngine:
    return FakeEngine(EMBEDDED / model, SharedMemoryReader(RUN), max_model_len=64, token_s=token_s)


def sampling(seed: int = 0, max_tokens: int = 32) -> Sampling:
    return Sampling(temperature=1.0, max_tokens=max_tokens, seed=seed)


async def test_equal_prompt_seed_and_version_give_equal_answers_and_other_seeds_others():
    answers = [await engine().generate("a", PROMPT, sampling(seed), 0) for seed in (1, 1, 2, 3, 4)]
    texts = [tuple(answer.ids.tolist()) for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts)) >= 3


async def test_answers_end_with_the_end_token_unless_cut():
    whole = await engine().generate("a", PROMPT, sampling(), 0)
    cut = await engine().generate("a", PROMPT, sampling(max_tokens=1), 0)
    assert (whole.ids[-1], whole.finish_reason) == (END, "stop")
    assert (cut.ids.tolist(), cut.finish_reason) == (whole.ids[:1].tolist(), "length")
    assert len(whole.ids) == len(whole.logprobs) == len(whole.versions)
    assert (whole.logprobs <= 0).all()


@pytest.mark.parametrize(("model", "task"), [("tiny", Countdown()), ("tiny_reverse", ReverseLetters())])
async def test_some_answers_to_an_embedded_task_are_right_and_some_wrong(model: str, task: Countdown | ReverseLetters):
    characters = Characters(EMBEDDED / model)
    fake = engine(model=model)
    rewards = []
    for index in range(50):
        prompt = task.prompts("train")[index]
        ids = np.array([4, *characters.ids(prompt.turns[0]["content"]), 5], dtype=np.int32)
        answer = await fake.generate("a", ids, sampling(index), 0)
        rewards.append(task.reward(prompt, characters.text(answer.ids[:-1])).total)
    assert 0.05 <= np.mean(np.array(rewards) == 1.0) <= 0.9
    assert min(rewards) == 0.0


async def test_an_abort_ends_a_running_answer_with_its_tokens_so_far():
    fake = engine(token_s=3600.0)
    task = asyncio.create_task(fake.generate("slow", PROMPT, sampling(), 0))
    await asyncio.sleep(0)  # it has begun
    await fake.abort("slow")
    answer = await asyncio.wait_for(task, 60)
    assert answer.finish_reason == "abort"
    assert len(answer.ids) < len((await engine().generate("slow", PROMPT, sampling(), 0)).ids)


async def test_tokens_after_a_commit_carry_the_new_version(publisher: SharedMemoryPublisher):
    """Prepared before it begins, committed on its first token: all the others are still to come."""
    fake, committed = engine(token_s=0.2), []
    manifest = publisher.publish(3, [("w", np.ones(4, np.float32))])
    assert (await fake.prepare(manifest)).prepared == 3
    fake.on_step(lambda: None if committed else committed.append(asyncio.ensure_future(fake.commit(3))))
    answer = await fake.generate("slow", PROMPT, sampling(2), 0)
    state = await committed[0]
    assert (state.version, state.prepared, state.checksum) == (3, None, manifest.checksum)
    assert answer.versions[0] == 0
    assert answer.versions[-1] == 3


async def test_a_damaged_version_is_refused_and_the_old_one_stays(publisher: SharedMemoryPublisher):
    fake = engine()
    manifest = publisher.publish(1, [("w", np.ones(4, np.float32))])
    content = bytearray(Path(manifest.location).read_bytes())
    content[3] ^= 1
    Path(manifest.location).write_bytes(content)
    with pytest.raises(WeightsRefused, match=r"weights version 1 at .* have checksum"):
        await fake.prepare(manifest)
    with pytest.raises(WeightsRefused, match="weights version 1 can't be committed: nothing is staged"):
        await fake.commit(1)
    assert (await fake.discard(1)).version == 0


async def test_a_prompt_without_room_is_refused():
    with pytest.raises(RequestRefused, match=r"inference.max_model_len=64"):
        await engine().generate("a", np.zeros(64, np.int32), sampling(), 0)


async def test_an_answer_ends_behind_a_stop_text_which_stays():
    whole = await engine().generate("a", PROMPT, sampling(2), 0)
    characters = Characters(EMBEDDED / "tiny")
    mark = characters.text(whole.ids[:1])
    stopped = await engine().generate("a", PROMPT, msgspec.structs.replace(sampling(2), stop=("nowhere", mark)), 0)
    assert (stopped.ids.tolist(), stopped.finish_reason) == (whole.ids[:1].tolist(), "stop")
    assert len(whole.ids) > 1
