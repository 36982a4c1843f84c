"""Weights over NCCL between two cards, and a server that dies or freezes in the middle: `python -m tests.gpu.check_transports`.

Needs two GPUs; prints what it found and ends with an error at the first thing that is not so. The same things are tested over
gloo on any machine (tests/weights/test_collective.py); this shows them of NCCL, and that a GPU's checksums are a CPU's.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from telescope.weights.buckets import ModelTensor, lay_out
from telescope.weights.sampled_digest import digests, text
from tests.gpu.needed import need_gpus
from tests.weights.company import Company

BULK = 262_144
"""Rows of 4 KiB: 1 GiB, more than NCCL's buffers hold. They come after the first bucket, where the faults are."""


def check(what: str, holds: bool, found: Any = "") -> None:
    print(f"{'ok ' if holds else 'NO '} {what} {found}", flush=True)
    if not holds:
        raise SystemExit(1)


def same_digests() -> None:
    random = torch.Generator().manual_seed(0)
    sizes = [1 << 25, *(7 * 13**power for power in range(6)), 9 << 22, 0, 1 << 21, 3 << 22, 17]
    specs, nbytes = lay_out([ModelTensor(f"t{place}", "uint8", (size,)) for place, size in enumerate(sizes)])
    flat = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random)
    for whole in (False, True):
        on_cpu, on_gpu = (text(digests(data, specs, whole=whole), whole=whole) for data in (flat, flat.cuda()))
        check(f"a GPU's digests are a CPU's (whole={whole})", on_cpu == on_gpu, on_gpu)


def right(said: dict[str, Any], sent: dict[str, Any]) -> bool:
    return said.get("same") == said.get("of") and said.get("received") == sent.get("sent")


def one_update(company: Company, version: int, epoch: int, server: int, **how: Any) -> None:
    started = time.monotonic()
    sent, received = company.update(version, epoch, servers=[company.servers[server]], **how)
    check(f"version {version}, epoch {epoch}", right(received[0], sent[0]), f"{time.monotonic() - started:.2f} s {sent[0]}")


def main() -> int:
    argparse.ArgumentParser(prog="python -m tests.gpu.check_transports", description=str(__doc__).splitlines()[0]).parse_args()
    need_gpus(2)
    same_digests()
    with Company(ranks=1, servers=4, gpus=["0", "1", "1", "1", "1"]) as company:
        company.set_up(1, bucket_bytes=4096, bulk=1024)
        one_update(company, 1, 0, 0)
        one_update(company, 2, 0, 0, server_0={"whole": True})
        company.set_up(1, bucket_bytes=0, dtype="bfloat16")
        one_update(company, 1, 0, 0)
        for staging in ("pinned", "pageable"):
            company.set_up(1, bucket_bytes=4096, bulk=1024, staging=staging)
            one_update(company, 1, 0, 0)
        company.set_up(1, bucket_bytes=4096, bulk=BULK, update_timeout_s=20.0)
        one_update(company, 1, 0, 0)
        broken(company, 2, 0, 0, "die_at", abort=True)
        one_update(company, 2, 1, 1)
        broken(company, 3, 1, 1, "stop_at", abort=True)
        one_update(company, 3, 2, 2)
        company.set_up(1, bucket_bytes=4096, bulk=BULK, update_timeout_s=3.0)
        one_update(company, 1, 0, 2)
        broken(company, 2, 0, 2, "stop_at", abort=False)
        one_update(company, 2, 1, 3)
    print("all is well")
    return 0


def broken(company: Company, version: int, epoch: int, server: int, fault: str, *, abort: bool) -> None:
    """The server dies or freezes with 1 GiB on its way; the sender is told to break off, or is left to its deadline."""
    company.publish(version)
    company.begin(version, epoch, servers=[company.servers[server]], **{f"server_{server}": {fault: 0}})
    if fault == "die_at":
        company.servers[server].process.wait(60)
    else:
        company.servers[server].said()
    started = time.monotonic()
    if abort:
        company.ranks[0].tell(abort=epoch)
    failed = company.ranks[0].said(30)
    seconds = time.monotonic() - started
    check(f"{fault}: the sender is free again", "failed" in failed and seconds < 5, f"{seconds:.3f} s {failed}")


if __name__ == "__main__":
    sys.exit(main())
