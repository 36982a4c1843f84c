"""How long it takes to simulate a large cluster on one core: `python -m benchmarks.flow.simulate`.

256 lanes a server, as many rollouts alive as lanes (B·G), max_async_rollout as a run has it by default (`--max-async`),
log-normal completions around 2,000 tokens.
"""

from __future__ import annotations

import argparse
import resource
import time

from telescope.flow.settings import FlowSettings
from telescope.planning.latencies import EngineTimes, Latencies, constant, lognormal
from telescope.planning.simulator import SimulatedCluster, simulate

GROUP, LANES = 8, 256


def load() -> Latencies:
    """About one H100 a server and a 3B model."""
    return Latencies(
        prompt_tokens=lognormal(300, 0.5, 4096),
        completion_tokens=lognormal(2000, 0.8, 8192),
        engine=EngineTimes(
            step_s=0.003, sequence_s=20e-6, kv_token_s=1.2e-8, prefill_token_s=1e-5, kv_tokens=1_500_000, max_seqs=LANES
        ),
        reward_s=constant(0.05),
        train_step_s=1.0,
        train_token_s=4e-5,
        sync_s=2.0,
        pause_s=0.1,
        equal_share=0.1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--max-async", type=int, default=2)
    given = parser.parse_args()
    groups = given.servers * LANES // GROUP // (given.max_async + 1)
    settings = FlowSettings(
        number_of_steps=given.steps,
        prompts_batch_size_for_trainer=groups,
        group_size=GROUP,
        max_async_rollout=given.max_async,
        max_concurrent_prompts_per_server=LANES // GROUP,
        environments=(("task", 1.0),),
        rollout_deadline_s=1e6,
    )
    workers = -(-given.servers * LANES // 1024)
    cluster = SimulatedCluster(
        servers=given.servers, ranks=given.servers // 2, server_capacity=LANES, workers=workers, max_tokens=8192
    )
    started, wall = time.process_time(), time.perf_counter()
    outcome = simulate(settings, cluster, load())
    seconds, wall = time.process_time() - started, time.perf_counter() - wall
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{given.servers} servers x {LANES} lanes, {given.steps} steps of {groups * GROUP} rollouts, M={given.max_async}: "
        f"{seconds:.1f} CPU seconds "
        f"({wall:.1f} s of wall-clock), {outcome.events:,} events, {outcome.events / seconds:,.0f} events/s, {memory:.1f} GiB; "
        f"step {outcome.step_s:.1f} s, servers generate {outcome.servers_generating:.0%}, {outcome.sequences:.0f} sequences "
        f"each, trainer trains {outcome.trainer_training:.0%}, age at most {outcome.counts.age_max}, ok={outcome.ok}"
    )


if __name__ == "__main__":
    main()
