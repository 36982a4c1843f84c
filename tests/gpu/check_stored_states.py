"""Weights and moments in host memory, and moments in bfloat16, on one GPU: `python -m tests.gpu.check_stored_states`.

Parameters of 0.9 GB take four steps by `StoredStates` and, with the same gradients, by torch's AdamW alone, whose moments are
rounded by hand after each: weights and moments must be the same to the bit. What lies in host memory must be pinned. Prints how
long the last step took, and its peak of memory. Exits 0 only if all hold. No pytest module: it needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from telescope.backends.common.staging import pin
from telescope.backends.common.stored_states import Home, StoredStates
from tests.gpu.needed import need_gpus

DEVICE = "cuda:0"
SIZES = (150_000_000, 1_024, 60_000_000, 4_096, 20_000_000, 1_000_003)
"""Of parameters, of which the first comes alone."""
SHARES: dict[str, Sequence[int]] = {"none": (), "half": (2, 3, 4), "all": range(len(SIZES))}
"""Places of the parameters that are in host memory."""
DTYPES: dict[str, dict[str, torch.dtype]] = {
    "float32": {},
    "bfloat16": {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16},
}
STEPS = 4


def draw_gradients(step: int) -> list[Tensor]:
    random = torch.Generator(DEVICE).manual_seed(100 + step)
    return [torch.randn(size, generator=random, device=DEVICE) * 1e-3 for size in SIZES]


def make_parameters(hosted: Sequence[int]) -> list[nn.Parameter]:
    random = torch.Generator(DEVICE).manual_seed(1)
    found = []
    for place, size in enumerate(SIZES):
        drawn = torch.randn(size, generator=random, device=DEVICE)
        parameter = nn.Parameter(drawn.cpu() if place in hosted else drawn)
        if place in hosted:
            pin(parameter)
        found.append(parameter)
    return found


def make_optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def read(parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights and moments, in float32 on the CPU."""
    moments = [optimizer.state[parameter][kind] for parameter in parameters for kind in ("exp_avg", "exp_avg_sq")]
    return [tensor.detach().float().cpu() for tensor in (*parameters, *moments)]


def step_plainly(dtypes: dict[str, torch.dtype]) -> list[Tensor]:
    """By torch alone."""
    parameters = make_parameters(())
    optimizer = make_optimizer(parameters)
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, draw_gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        for state in optimizer.state.values():
            for kind, dtype in dtypes.items():
                state[kind].copy_(state[kind].to(dtype))
    return read(parameters, optimizer)


def step_stored(dtypes: dict[str, torch.dtype], hosted: Sequence[int]) -> tuple[list[Tensor], bool, str]:
    """Also whether all that lies in host memory is pinned, and what the last step took."""
    parameters = make_parameters(hosted)
    optimizer, away = make_optimizer(parameters), [parameters[place] for place in hosted]
    homes = {id(parameter) for parameter in away}
    stored = StoredStates(
        optimizer, DEVICE, lambda parameter, kind: Home(on_host=id(parameter) in homes, dtype=dtypes.get(kind)), away
    )
    for step in range(STEPS):
        given = list(zip(parameters, draw_gradients(step), strict=True))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        stored.step_with(given)
        torch.cuda.synchronize()
        took = time.perf_counter() - began
    said = f"the last step took {took * 1e3:.0f} ms, {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at the most"
    every = [*away, *(optimizer.state[parameter][kind] for parameter in away for kind in ("exp_avg", "exp_avg_sq"))]
    return read(parameters, optimizer), all(tensor.is_pinned() for tensor in every), said


def main() -> int:
    argparse.ArgumentParser(description=str(__doc__).splitlines()[0]).parse_args()
    need_gpus()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    good = True
    for name, dtypes in DTYPES.items():
        expected = step_plainly(dtypes)
        for share, hosted in SHARES.items():
            found, pinned, said = step_stored(dtypes, hosted)
            same = all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
            good &= same and pinned
            print(
                f"moments in {name}, {share} hosted: {'the same' if same else 'OTHER NUMBERS'}"
                f"{'' if pinned else ', NOT PINNED'}, {said}",
                flush=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
