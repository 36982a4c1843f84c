"""Where a version waits in a worker: received beside the main thread, broken off, put in place, or received in place."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from telescope.inference.vllm.staging import Staging
from telescope.records import WeightGroup, WeightManifest
from telescope.weights.base import TransferFailed
from telescope.weights.buckets import ModelTensor, buckets, lay_out
from telescope.weights.host_memory import HostReceiver
from telescope.weights.transports.disk import DiskPublisher, DiskReader

SPECS, NBYTES = lay_out([ModelTensor("a", "float32", (3,)), ModelTensor("b", "float32", (2, 2))])
GROUP = WeightGroup(4, ("trainer-0", "server-0/0"))
DEADLINE_S = 60.0


class Broadcast:
    """A receiver whose bytes count up from 0; it can be held back, and cancelled meanwhile."""

    def __init__(self, fails_after: int = 99) -> None:
        self.go = threading.Event()
        self.go.set()
        self.cancelled: list[int | None] = []
        self.closed = False
        self.received = 0
        self._fails_after = fails_after

    def receive(self, manifest, group, staging, deadline_s) -> str:
        self._wait(deadline_s)
        staging[: manifest.nbytes] = torch.arange(manifest.nbytes, dtype=torch.uint8)
        self.received += 1
        return f"sample:{manifest.version}"

    def receive_buckets(self, manifest, group, load, deadline_s) -> str:
        self._wait(deadline_s)
        for number, bucket in enumerate(buckets(manifest.tensors, 0)):
            if number == self._fails_after:
                raise TransferFailed("trainer-0 went away")
            load(bucket, torch.arange(bucket.start, bucket.stop).to(torch.uint8))
        return f"sample:{manifest.version}"

    def cancel(self, epoch=None) -> None:
        self.cancelled.append(epoch)
        self.go.set()

    def close(self) -> None:
        self.closed = True

    def _wait(self, deadline_s: float) -> None:
        if not self.go.wait(deadline_s) or self.cancelled:
            raise TransferFailed("broken off while server-1/0 were awaited", ("server-1/0",))


class Parameters:
    """What was put in place, by name."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}

    def put(self, flat, specs) -> None:
        self.held |= {spec.name: flat(spec.name).clone() for spec in specs}


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version, "gloo", "tcp://127.0.0.1:1/x", SPECS, NBYTES, "")


def expected(index: int) -> torch.Tensor:
    spec = SPECS[index]
    return torch.arange(spec.offset, spec.offset + spec.nbytes, dtype=torch.uint8).view(torch.float32)


def make(place: str, receiver: Broadcast) -> Staging:
    return Staging(place, torch.device("cpu"), "run", lambda transport: receiver)


def begin(staging: Staging, version: int, parameters: Parameters, refuse: str = ""):
    staging.begin(manifest(version), GROUP, lambda: refuse, parameters.put, DEADLINE_S)
    arrival = staging.get(version)
    assert arrival is not None
    return arrival


def until_over(arrival) -> None:
    arrival._thread.join(DEADLINE_S)
    assert arrival.over


@pytest.mark.parametrize("place", ["full", "host"])
def test_a_version_arrives_in_the_buffer_while_the_main_thread_goes_on(place):
    receiver, parameters = Broadcast(), Parameters()
    receiver.go.clear()
    staging = make(place, receiver)
    arrival = begin(staging, 1, parameters)
    assert not arrival.over
    receiver.go.set()
    until_over(arrival)
    assert (arrival.cause, arrival.checksum, arrival.touched) == ("", "sample:1", False)
    assert torch.equal(arrival.flat("a"), expected(0))
    assert torch.equal(arrival.flat("b"), expected(1))
    assert parameters.held == {}


def test_the_buffer_stays_where_it_is_from_version_to_version():
    staging, parameters = make("full", Broadcast()), Parameters()
    staging.reserve(NBYTES)
    address = staging.buffer.data_ptr()
    for version in (1, 2):
        until_over(begin(staging, version, parameters))
        staging.done()
        assert staging.get(version) is None
    assert staging.buffer.data_ptr() == address


def test_a_refused_version_is_not_received():
    receiver = Broadcast()
    arrival = begin(make("full", receiver), 1, Parameters(), refuse="it does not fit")
    until_over(arrival)
    assert arrival.cause == "it does not fit"
    assert receiver.received == 0


def test_a_forgotten_version_breaks_off_its_receive_and_its_epoch():
    receiver = Broadcast()
    receiver.go.clear()
    staging = make("full", receiver)
    arrival = begin(staging, 1, Parameters())
    staging.forget(1)
    until_over(arrival)
    assert (arrival.cause, arrival.missing) == ("weights version 1 were broken off", ("server-1/0",))
    assert receiver.cancelled == [4]


def test_a_version_that_is_forgotten_while_it_is_checked_is_not_received():
    receiver, begun, over = Broadcast(), threading.Event(), threading.Event()
    staging = make("full", receiver)

    def check() -> str:
        assert begun.wait(DEADLINE_S)
        staging.forget(1)
        return ""

    staging.begin(manifest(1), GROUP, check, Parameters().put, DEADLINE_S, lambda arrival: over.set())
    begun.set()
    assert over.wait(DEADLINE_S)
    assert staging.get(1).cause == "weights version 1 were broken off"
    assert (receiver.received, receiver.cancelled) == (0, [4])


def test_the_next_version_waits_for_the_end_of_the_one_it_replaces():
    receiver = Broadcast()
    receiver.go.clear()
    staging = make("full", receiver)
    first = begin(staging, 1, Parameters())
    second = begin(staging, 2, Parameters())
    receiver.cancelled.clear()
    until_over(second)
    assert first.over
    assert first.cause == "weights version 1 were broken off"
    assert staging.get(1) is None


def test_a_version_that_is_not_staged_goes_into_the_parameters_as_it_arrives():
    parameters = Parameters()
    staging = make("none", Broadcast())
    arrival = begin(staging, 1, parameters)
    until_over(arrival)
    assert (arrival.cause, arrival.checksum, arrival.touched) == ("", "sample:1", True)
    assert torch.equal(parameters.held["a"], expected(0))
    assert torch.equal(parameters.held["b"], expected(1))
    assert staging.buffer.numel() == 0


@pytest.mark.parametrize(("fails_after", "touched"), [(0, False), (1, True)])
def test_a_failure_after_the_first_bucket_is_told_as_no_way_back(fails_after, touched):
    arrival = begin(make("none", Broadcast(fails_after)), 1, Parameters())
    until_over(arrival)
    assert (arrival.cause, arrival.touched) == ("trainer-0 went away", touched)


@pytest.mark.parametrize("harmed", [False, True])
def test_what_is_pulled_in_place_is_checked_whole_before_it_may_be_committed(tmp_path, harmed: bool):
    values = torch.arange(3.0), torch.ones(2, 2)
    kinds = [ModelTensor("a", "float32", (3,)), ModelTensor("b", "float32", (2, 2))]
    manifest = DiskPublisher(tmp_path, lambda: kinds).publish(1, zip(("a", "b"), values, strict=True))
    if harmed:
        file = Path(manifest.location)
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    parameters = Parameters()
    staging = Staging("none", torch.device("cpu"), "run", lambda transport: HostReceiver(DiskReader()))
    staging.begin(manifest, None, lambda: "", parameters.put, DEADLINE_S)
    arrival = staging.get(1)
    until_over(arrival)
    assert (arrival.touched, parameters.held) == (False, {})
    assert ("have checksum" in arrival.cause) is harmed
    if not harmed:
        arrival.put_buckets()
        assert arrival.touched
        assert torch.equal(parameters.held["b"], values[1].reshape(-1))


def test_a_close_breaks_off_and_closes_the_receivers():
    receiver = Broadcast()
    receiver.go.clear()
    staging = make("full", receiver)
    arrival = begin(staging, 1, Parameters())
    deadline = time.monotonic() + DEADLINE_S
    while "gloo" not in staging._receivers and time.monotonic() < deadline:
        arrival._thread.join(0.01)
    staging.close()
    until_over(arrival)
    assert receiver.closed


@pytest.mark.parametrize(("refuse", "checksum"), [("", "sample:1"), ("it does not fit", "")])
def test_whoever_waits_is_told_when_a_version_is_over_whatever_came_of_it(refuse, checksum):
    staging, told, rung = make("full", Broadcast()), [], threading.Event()

    def ended(arrival) -> None:
        told.append((arrival.over, arrival.cause, arrival.checksum))
        rung.set()

    staging.begin(manifest(1), GROUP, lambda: refuse, Parameters().put, DEADLINE_S, ended)
    assert rung.wait(DEADLINE_S)
    assert told == [(True, refuse, checksum)]
