"""The real engine: vLLM's AsyncLLM in this process, its EngineCore in a child process.

Owns how requests, aborts and weight updates are asked of vLLM 0.25 to 0.32. Token ids go in; ids, processed log-probs and
weight versions come out. What runs inside the worker is worker_extension.py's; which arguments vLLM gets is options.py's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from telescope.config.models import end_ids
from telescope.config.sections import WeightSyncSettings
from telescope.inference.engine import (
    EngineDead,
    EngineRefused,
    Generated,
    LoadReport,
    RequestRefused,
    WeightsRefused,
    WeightState,
)
from telescope.inference.vllm.engine_health import EngineProcesses, answer_within, raise_when_dead
from telescope.inference.vllm.logprob_path import LogprobPath
from telescope.inference.vllm.model_tensors import checkpoint_tensors, is_tied, version_bytes
from telescope.inference.vllm.options import (
    ServerPlan,
    engine_arguments,
    logprob_bytes,
    served_dtype,
    share_beside,
    spare_bytes,
)
from telescope.inference.vllm.outputs import first_line, generated, said, start_failure, step_teller
from telescope.inference.vllm.patches import COMMIT, SLEEP, WAKE, teach_core
from telescope.inference.vllm.routing_path import RoutingPath
from telescope.inference.vllm.token_versions import TokenVersions, VersionSpans
from telescope.inference.vllm.worker_protocol import Comparison, StageState, StagingNotices, UpdateSetup, UpdateSupport
from telescope.records import Sampling, WeightGroup, WeightManifest

FIRST_LOOK_S, LONGEST_LOOK_S = 0.02, 0.1
"""Workers that have given no notice are asked after these pauses, which double, whether a version is staged; each question
costs them part of a step."""
BREAK_OFF_S = 20.0
"""For a version's threads to end once it is broken off: they wait for nothing longer than a transport's abort."""
CLOSE_S = 1.0
"""The engine's farewell to its libraries takes seconds and saves nothing: after this it is killed."""
GREEDY: tuple[dict[str, Any], ...] = ({"temperature": 0.0},)
WARM_UP: tuple[dict[str, Any], ...] = (
    *({"temperature": temperature} for temperature in (1.0, 1.0, 0.6, 1.3)),
    *({"temperature": 1.0, **cut} for cut in ({"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1})),
    *GREEDY,
)
"""How the requests of the start are drawn: in all ways that rollouts may be."""
WARM_UP_PROMPT = 4
"""Tokens of the shortest of them."""
SEED_LIMIT = 2**63

log = logging.getLogger(__name__)


@dataclass
class _EngineRequest:
    """A request between `generate` and its answer. `internal` is vLLM's own id once it has one."""

    spans: VersionSpans = field(default_factory=VersionSpans)
    aborted: bool = False
    internal: str = ""


class VllmEngine:
    """See `Engine`. `start` and all else must be called from one event loop, in the process's main thread: the engine's
    process dies with the thread that started it."""

    def __init__(self, plan: ServerPlan, weight_sync: WeightSyncSettings) -> None:
        self._plan = plan
        self._sync = weight_sync
        self._requests: dict[str, _EngineRequest] = {}
        self._state = WeightState(version=plan.version, prepared=None, checksum="", pause_s=0.0)
        self._staged: WeightManifest | None = None
        self._arriving: int | None = None
        self._called_off = False
        """Whether the version that arrives is not wanted any more."""
        self._held = False
        """Whether the engine is paused because a version is received in place."""
        self._asleep = False
        self._weights = asyncio.Lock()
        self._llm: Any = None
        self._children = EngineProcesses()
        self._notices = StagingNotices()
        self._versions: TokenVersions
        self.logprobs = LogprobPath(self._rpc)
        """By which way the log-probs of answers come."""
        self.routing = RoutingPath(self._rpc) if plan.router_replay else None
        self.opened: tuple[UpdateSupport, ...] = ()
        """How each worker takes updates, once started."""
        self._stepped: Callable[[], None] = lambda: None
        self._said_load = LoadReport()

    async def start(self) -> None:
        """Load the model; blocks the event loop while vLLM starts its child, for there is nothing to be served yet."""
        import torch
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        self._tokens_input, self._sampling_params, self._final_only = tokens_input, SamplingParams, RequestOutputKind.FINAL_ONLY
        self._stop_ids = list(end_ids(self._plan.folder))
        try:
            arguments = engine_arguments(self._plan) | self._memory()
            config = AsyncEngineArgs(**arguments).create_engine_config()
        except (ValueError, TypeError, KeyError, OSError, RuntimeError) as error:
            log.debug("the cause", exc_info=True)
            raise EngineRefused(f"vLLM refuses model.name={self._plan.model.name} or its settings: {said(error)}") from error
        if self._plan.device == "cpu":  # where torch was imported before OMP_NUM_THREADS stood; the fork inherits it
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        # vLLM asks for a fresh interpreter on a CPU; a fork has everything imported already. No thread of ours runs yet.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        teach_core()
        self._notices.open()
        self._children.expect_new()
        try:
            self._llm = AsyncLLM.from_vllm_config(config, stat_loggers=[step_teller(self._has_stepped)])
        except RuntimeError as error:
            raise EngineDead(start_failure(str(error))) from error
        self._children.watch_new()
        self._vocabulary = config.model_config.get_vocab_size()
        self._max_model_len = config.model_config.max_model_len
        self._versions = TokenVersions(
            self._llm.engine_core, self._spans_of, salted=self._sync.reset_prefix_cache, version=self._plan.version
        )
        await self._open()
        if self.routing is not None:
            await self.routing.open()
        await self._warm_up()

    def _memory(self) -> dict[str, float]:
        """On a GPU: vLLM's share, less what updates and log-probs need. Asks the driver, not CUDA, which must not be up before
        the fork."""
        if self._plan.device == "cpu":
            return {}
        from vllm.platforms import current_platform

        inference, card = self._plan.inference, int(current_platform.get_device_total_memory())
        whole = version_bytes(checkpoint_tensors(self._plan.folder), is_tied(self._plan.folder), served_dtype(self._plan))
        updates, logprobs = self._update_bytes(), logprob_bytes(self._plan)
        if not updates:
            return {"gpu_memory_utilization": inference.gpu_memory_utilization - logprobs / card}
        weights, spare = whole // inference.tensor_parallel_size, updates + logprobs
        purpose = f"weight_sync.staging={self._sync.staging}"
        return {"gpu_memory_utilization": share_beside(inference.gpu_memory_utilization, card, weights, spare, purpose)}

    def _update_bytes(self) -> int:
        """That updates need on each card beside vLLM."""
        return spare_bytes(self._plan, self._sync)

    async def _open(self) -> None:
        """Ask the workers how they take updates; said once in the log."""
        opening = UpdateSetup(
            self._plan.run, self._plan.name, self._sync.staging, self._sync.update_timeout_s, self._sync.init_timeout_s,
            self._notices.workers_end, self._plan.plugin_path, self._sync.transport_kwargs,
        )  # fmt: skip
        answers = await self._rpc("telescope_open", msgspec.json.encode(opening).decode())
        self.opened = tuple(msgspec.json.decode(answer, type=UpdateSupport) for answer in answers)
        for opened in self.opened:
            if opened.refused:
                raise EngineDead(opened.refused)
            log.log(logging.WARNING if opened.no_plan else logging.INFO, "%s", opened.way)
        if idle := self.opened[0].idle:
            log.warning("vLLM computes nothing with %d tensors of the model's files, %s first", len(idle), idle[0])

    def on_step(self, stepped: Callable[[], None]) -> None:
        self._stepped = stepped

    @property
    def load(self) -> LoadReport:
        return self._said_load

    def _has_stepped(self, load: LoadReport, sampled: bool) -> None:
        self._said_load = load
        if sampled:
            self._stepped()

    async def dead(self) -> str:
        return await self._children.first_end()

    @property
    def _limit(self) -> str:
        """Of what an order about weights may take, as sentences name it."""
        return f"weight_sync.update_timeout_s={self._sync.update_timeout_s:g} s"

    @property
    def client(self) -> Any:
        """vLLM's AsyncLLM, for the HTTP application beside the link."""
        return self._llm

    # ---- requests ---------------------------------------------------------------------------------------------------

    @raise_when_dead
    async def generate(self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling, priority: int) -> Generated:
        self._check_request(request_id, prompt_ids, sampling)
        request = self._requests[request_id] = _EngineRequest()
        started = time.monotonic()
        try:
            output = await self._finished(request, request_id, prompt_ids, sampling, priority)
            completion = output.outputs[0]
            logprobs = await self.logprobs.of(completion, request.internal, len(prompt_ids))
            routed = None
            if self.routing is not None and completion.finish_reason != "abort":  # nobody trains on what was broken off
                routed = await self.routing.of(request.internal, len(prompt_ids) + len(completion.token_ids))
            await self._versions.settled()
        finally:
            del self._requests[request_id]
        return generated(output, logprobs, routed, request.spans, self._state.version, time.monotonic() - started)

    def _adapter_of(self, request_id: str) -> Any:
        """vLLM's LoRARequest for a request; lora_engine.py has some."""
        return None

    @raise_when_dead
    async def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None and not request.aborted:
            request.aborted = True
            if request.internal:
                await self._llm.abort(request.internal, internal=True)

    def _spans_of(self, request_id: str, internal: str) -> VersionSpans | None:
        """Called as the request is sent to the engine's process."""
        request = self._requests.get(request_id)
        if request is not None:
            request.internal = internal
        return None if request is None else request.spans

    @raise_when_dead
    async def running(self) -> dict[str, int]:
        """Sampled tokens of each request that the engine's worker holds, by vLLM's internal id (`<ours>-<8 digits>`)."""
        answers: list[dict[str, int]] = await self._rpc("telescope_running")
        return answers[0]

    def _check_request(self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling) -> None:
        if request_id in self._requests:
            raise RequestRefused(f"request {request_id} is being served already")
        if not 0 < len(prompt_ids) < self._max_model_len:
            raise RequestRefused(
                f"a prompt of {len(prompt_ids)} tokens leaves no room for an answer: "
                f"inference.max_model_len={self._max_model_len}"
            )
        if sampling.max_tokens < 1:
            raise RequestRefused(f"max_tokens={sampling.max_tokens} must be at least 1")
        if prompt_ids.min() < 0 or prompt_ids.max() >= self._vocabulary:
            raise RequestRefused(
                f"the prompt has token ids from {prompt_ids.min()} to {prompt_ids.max()}; "
                f"the model knows 0 to {self._vocabulary - 1}"
            )

    def _params(self, prompt_tokens: int, sampling: Sampling) -> Any:
        return self._sampling_params(
            temperature=sampling.temperature,
            max_tokens=min(sampling.max_tokens, self._max_model_len - prompt_tokens),
            seed=sampling.seed % SEED_LIMIT,
            stop_token_ids=self._stop_ids,
            logprobs=0 if self.logprobs.asked else None,
            flat_logprobs=True,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            stop=list(sampling.stop),
            detokenize=bool(sampling.stop),  # stop strings are looked for in the text
            output_kind=self._final_only,
        )

    async def _finished(
        self, request: _EngineRequest, request_id: str, prompt_ids: np.ndarray, sampling: Sampling, priority: int
    ) -> Any:
        """vLLM's final output of the request. Aborts it in the engine if this task is cancelled."""
        from vllm.exceptions import VLLMValidationError

        try:
            prompt = self._tokens_input(prompt_token_ids=prompt_ids.tolist())
            params = self._params(len(prompt_ids), sampling)
            collector = await self._llm.add_request(
                request_id, prompt, params, lora_request=self._adapter_of(request_id), priority=priority
            )
            request.internal = collector.request_id
            if request.aborted:
                await self._llm.abort(request.internal, internal=True)
            while not (output := await collector.get()).finished:
                pass
        except asyncio.CancelledError:
            if request.internal:
                await self._llm.abort(request.internal, internal=True)
            raise
        except (ValueError, VLLMValidationError) as error:  # vLLM's own check of the request
            raise RequestRefused(str(error)) from error
        return output

    # ---- weights ----------------------------------------------------------------------------------------------------

    @raise_when_dead
    async def prepare(self, manifest: WeightManifest, group: WeightGroup | None = None) -> WeightState:
        async with self._weights:
            version, self._staged = manifest.version, None
            self._state = replace(self._state, prepared=None)
            self._arriving, self._called_off = version, False
            limit_s = self._sync.update_timeout_s + 2 * BREAK_OFF_S
            try:
                async with asyncio.timeout(limit_s):
                    await self._hold_if_unstaged(manifest)
                    checksum = await self._stage(manifest, group)
            except TimeoutError as error:
                raise EngineDead(
                    f"the engine's workers have not answered for {limit_s:g} s (weights {version}; {self._limit} and "
                    f"{2 * BREAK_OFF_S:g} s to break off): they hang"
                ) from error
            except WeightsRefused:  # and only then: what can't be taken back is never sampled from
                if self._asleep:  # it waits for a version that it can take
                    self._held = False
                elif self._held:
                    async with answer_within(BREAK_OFF_S, f"the order to go on without weights {version}"):
                        await self._release()
                raise
            finally:
                self._arriving = None
            self._staged = msgspec.structs.replace(manifest, checksum=checksum)
            self._state = replace(self._state, prepared=manifest.version)
            return self._state

    @raise_when_dead
    async def commit(self, version: int) -> WeightState:
        from vllm.v1.engine.exceptions import EngineDeadError

        async with self._weights:
            if self._staged is None or self._staged.version != version:
                held = "nothing" if self._staged is None else f"version {self._staged.version}"
                raise WeightsRefused(f"weights version {version} can't be committed: {held} is staged")
            started = time.perf_counter()
            try:
                async with asyncio.timeout(self._sync.update_timeout_s):
                    await self._load(version)
            except EngineDeadError:
                raise
            except Exception as error:  # vLLM raises plain Exception; whatever it is, the model may be half new by now
                why = f"not within {self._limit}" if isinstance(error, TimeoutError) else first_line(error)
                raise EngineDead(
                    f"weights version {version} could not be loaded ({why}): the engine may hold a mixture and must end"
                ) from error
            pause_s = time.perf_counter() - started
            self._state = WeightState(version=version, prepared=None, checksum=self._staged.checksum, pause_s=pause_s)
            self._staged = None
            return self._state

    @raise_when_dead
    async def discard(self, version: int) -> WeightState:
        if self._arriving == version:  # whoever waits in `prepare` is told
            self._called_off = True
            await self._forget(version)
        async with self._weights:
            if self._staged is not None and self._staged.version == version:
                if self._held:
                    raise EngineDead(
                        f"weights version {version} were received in place (weight_sync.staging=none): no way back"
                    )
                await self._forget(version)
                self._staged = None
                self._state = replace(self._state, prepared=None)
            return self._state

    async def _forget(self, version: int) -> None:
        async with answer_within(BREAK_OFF_S, f"the order to forget weights {version}"):
            await self._rpc("telescope_forget", version)

    @raise_when_dead
    async def compare(self, version: int) -> Comparison:
        """How the served parameters compare with the staged version, over all workers. Nothing is changed."""
        async with answer_within(self._sync.update_timeout_s, f"the comparison with weights {version}"):
            answers = [msgspec.json.decode(answer, type=Comparison) for answer in await self._rpc("telescope_compare", version)]
        other = sorted({name for answer in answers for name in answer.other})
        return Comparison(min(answer.tensors for answer in answers), tuple(other))

    @raise_when_dead
    async def sleep(self) -> None:
        limit_s, core = self._sync.update_timeout_s, self._llm.engine_core
        level = 2 if self._plan.inference.sleep_while_training == "drop_weights" else 1
        async with self._weights:
            if self._asleep:
                return
            try:
                async with asyncio.timeout(limit_s):
                    await core.pause_scheduler_async(mode="wait", clear_cache=True)  # what runs is answered, what comes waits
                    await core.call_utility_async(SLEEP, level)
            except TimeoutError as error:
                raise EngineDead(
                    f"the engine did not fall asleep within {self._limit}: a request runs longer, or the engine hangs"
                ) from error
            self._asleep = True

    async def _hold_if_unstaged(self, manifest: WeightManifest) -> None:
        """A broadcast that is not staged writes to the parameters as it comes: nothing may be sampled until it is committed."""
        if self._sync.staging != "none" or not manifest.collective:
            return
        core = self._llm.engine_core
        if self._asleep:
            await core.call_utility_async(WAKE)
        else:
            await core.pause_scheduler_async(mode="keep", clear_cache=False)
        self._held = True

    async def _release(self) -> None:
        self._held = False
        await self._llm.resume_generation()

    async def _stage(self, manifest: WeightManifest, group: WeightGroup | None) -> str:
        """The checksum of what has arrived. Where it does not arrive whole, every worker is first brought to an end of it: only
        then is it known whether a parameter was written. Raises `WeightsRefused` where none was, else `EngineDead`."""
        version, limit_s = manifest.version, self._sync.update_timeout_s
        order = self._notices.expect(len(self.opened))
        await self._rpc("telescope_stage", *(msgspec.json.encode(value).decode() for value in (manifest, group)), order)
        if self._called_off:  # the order to forget it may have reached the workers before this one
            await self._rpc("telescope_forget", version)
        states = await self._settled(version, limit_s, lambda states: all(state.over for state in states) or _cause(states))
        cause = _cause(states)
        if not cause and all(state.over for state in states):
            return states[0].checksum
        cause = cause or f"weights version {version} did not arrive within {self._limit}"
        await self._rpc("telescope_forget", version)
        states = await self._settled(version, BREAK_OFF_S, lambda states: all(state.over for state in states))
        if any(state.touched for state in states):
            raise EngineDead(f"{cause}; weight_sync.staging=none has no way back")
        if self._held and not all(state.over for state in states):
            raise EngineDead(f"{cause}; and it could not be broken off within {BREAK_OFF_S:g} s")
        raise WeightsRefused(cause, next((state.missing for state in states if state.missing), ()))

    async def _settled(self, version: int, limit_s: float, enough: Callable[[list[StageState]], object]) -> list[StageState]:
        """How far every worker is with the version, once that is `enough`, or when the limit has passed."""
        end, pause_s = time.monotonic() + limit_s, FIRST_LOOK_S
        while True:
            states = await self._notices.wait(max(0.0, min(pause_s, end - time.monotonic())))
            if states is None:
                answers = await self._rpc("telescope_stage_state", version)
                states = [msgspec.json.decode(answer, type=StageState) for answer in answers]
            if enough(states) or time.monotonic() >= end:
                return states
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)

    async def _load(self, version: int) -> None:
        """`continue`: between two steps, without a pause; running requests keep their keys and values. `recompute`: these are
        computed anew by the new weights: each log-prob is the new weights' given all tokens before. `abort`: they end."""
        core = self._llm.engine_core  # AsyncLLM.pause_generation adds a sleep of 20 ms to this
        in_flight = "sleeps" if self._asleep else self._sync.in_flight  # it is paused, and nothing is in flight
        if in_flight in ("recompute", "abort"):
            mode = "keep" if in_flight == "recompute" else "abort"
            await core.pause_scheduler_async(mode=mode, clear_cache=in_flight == "recompute")
        order = core.call_utility_async(COMMIT, version, self._sync.update_timeout_s)
        self._versions.commit_is_sent(version)
        sampled = await order
        ours = {request.internal: request.spans for request in self._requests.values() if request.internal}
        self._versions.commit_is_answered(version, sampled, ours)
        if in_flight != "continue" or self._held:
            self._asleep = False
            await self._release()

    # ---- life -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        self._children.stop_watching()
        self._notices.close()
        if self._llm is not None:
            llm, self._llm = self._llm, None
            del self._versions
            if llm.output_handler is not None:  # it would take the end for a failure
                llm.output_handler.cancel()
            await asyncio.to_thread(llm.shutdown, CLOSE_S)
        await asyncio.to_thread(self._children.end_all, CLOSE_S)

    async def _warm_up(self) -> None:
        """What vLLM imports and compiles at its first requests shall not be charged to a rollout; and their log-probs show by
        which way those of rollouts may come."""
        await self.logprobs.begin_trial()
        await self._try_all("both")
        await self.logprobs.end_trial()
        if not self.logprobs.asked:  # vLLM computes less where nobody asks
            try:
                await self._try_all("kept")
            except RequestRefused as error:
                await self.logprobs.give_up(str(error))
        if self.routing is not None:
            self.routing.check_trial()
        await self._llm.reset_prefix_cache()

    async def _try_all(self, name: str) -> None:
        """Answers in all ways of drawing, of prompts of different lengths, so that no two are alike to the engine."""
        room = max(1, min(3, self._max_model_len - WARM_UP_PROMPT))
        for wave in (WARM_UP, GREEDY):
            asked = []
            for index, how in enumerate(wave):
                prompt = np.zeros(min(WARM_UP_PROMPT + index, self._max_model_len - room), dtype=np.int32)
                asked.append(self.generate(f"{name}-{index}", prompt, Sampling(max_tokens=room, seed=index, **how), 0))
            await asyncio.gather(*asked)

    async def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        answers: list[Any] = await self._llm.collective_rpc(method, args=arguments)
        return answers


def _cause(states: list[StageState]) -> str:
    """Why a version is not taken, by the first worker that says so."""
    return next((state.cause for state in states if state.cause), "")
