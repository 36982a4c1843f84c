"""How fast local sandboxes start and run: `python -m benchmarks.environments.sandboxes [--starts 60] [--providers …]`.

For each provider and number of workers: sandboxes started, used for one `python3 -c pass` and deleted a second, the median and
99th percentile of start and command in milliseconds, and a further command in a sandbox that is there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import time

from telescope.environments.sandboxes.base import Limits, Provider
from telescope.environments.sandboxes.pool import SandboxSettings

COMMAND = ["python3", "-I", "-S", "-c", "pass"]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1000


async def measured(provider: Provider, limits: Limits, starts: int, workers: int) -> str:
    slots = asyncio.Semaphore(workers)
    started: list[float] = []
    ran: list[float] = []
    again: list[float] = []

    async def one() -> None:
        async with slots:
            at = time.perf_counter()
            sandbox = await provider.create(limits)
            started.append(time.perf_counter() - at)
            for times in (ran, again):
                at = time.perf_counter()
                outcome = await sandbox.exec(COMMAND)
                times.append(time.perf_counter() - at)
                assert outcome.ok, outcome
            await sandbox.delete()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(starts)))
    rate = starts / (time.perf_counter() - began)
    both = [f"{statistics.median(times) * 1000:.0f} / {percentile(times, 0.99):.0f}" for times in (started, ran, again)]
    return f"| {provider.name} | {workers} | {rate:.1f} | {' | '.join(both)} |"


async def main(arguments: argparse.Namespace) -> None:
    limits = Limits(time_s=120.0)
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Linux {platform.release()}\n")
    print(
        "| provider | workers | sandboxes/s | start p50 / p99 ms | first command | second command |\n|---|---|---|---|---|---|"
    )
    for name in arguments.providers.split(","):
        provider = SandboxSettings.model_validate({"provider": name}).make_provider()
        await provider.start(limits)
        try:
            for workers in (1, 4):
                print(await measured(provider, limits, arguments.starts, workers), flush=True)
        finally:
            await provider.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=60)
    parser.add_argument("--providers", default="bubblewrap,gvisor,unsafe_subprocess")
    asyncio.run(main(parser.parse_args()))
