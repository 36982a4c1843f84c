"""A process of a test run that behaves as its first argument says. Standard library only, so that it starts at once."""

import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

FOREVER_S = 600


def main() -> int:
    if "waits_for_the_signal" not in sys.argv:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))  # as every process does
    behaviour, *rest = sys.argv[1 : sys.argv.index("--run-dir")]
    run = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    name = sys.argv[sys.argv.index("--name") + 1]
    (run / "pids").mkdir(exist_ok=True)
    code = BEHAVIOURS[behaviour](run, name, *rest)
    sys.stderr.flush()
    return code


def ready(run: Path, name: str, *others: int) -> None:
    partial = run / "pids" / f".{name}"
    partial.write_text(" ".join(map(str, (os.getpid(), *others))))
    partial.rename(run / "pids" / name)


def wait_for_all(run: Path) -> None:
    """Until every stand-in of the plan is up: on a busy machine they start seconds apart."""
    names = [process["name"] for process in json.loads((run / "plan.json").read_bytes())["processes"]]
    give_up_at = time.monotonic() + 10
    while not all((run / "pids" / name).exists() for name in names) and time.monotonic() < give_up_at:
        time.sleep(0.01)


def wait_for_end(run: Path, name: str) -> None:
    """Until that stand-in has died."""
    pid = int((run / "pids" / name).read_text().split()[0])
    try:
        select.select([os.pidfd_open(pid)], [], [], 10)
    except ProcessLookupError:
        return


def on_term(code: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(code))


def obey(run: Path, name: str) -> int:
    """Runs until told to leave, then leaves with 143, as a real component does."""
    on_term(143)
    print(f"{name} is up", file=sys.stderr, flush=True)
    ready(run, name)
    time.sleep(FOREVER_S)
    return 0


def supervisor_channel() -> socket.socket:
    return socket.socket(fileno=int(os.environ["TELESCOPE_SUPERVISOR_FD"]))


def note_heard(run: Path, channel: socket.socket) -> None:
    with (run / "heard").open("ab") as file:
        file.write(channel.recv(65_536) + b"\n")


def relays(run: Path, name: str) -> int:
    """An orchestrator that tells the supervisor each line written to the pipe `say` (and then notes it in `said`),
    and writes what it hears to `heard`."""
    on_term(143)
    channel = supervisor_channel()
    os.mkfifo(run / "say")
    lines = os.open(run / "say", os.O_RDWR)
    ready(run, name)
    while True:
        readable, _, _ = select.select([lines, channel], [], [])
        if lines in readable:
            for line in os.read(lines, 65_536).splitlines():
                channel.send(line)
                with (run / "said").open("ab") as file:
                    file.write(line + b"\n")
        if channel in readable:
            note_heard(run, channel)


def finish(run: Path, name: str, seconds: str = "0") -> int:
    on_term(143)
    ready(run, name)
    wait_for_all(run)
    time.sleep(float(seconds))
    return 0


def closing(run: Path, name: str) -> int:
    """Has done all, and is told of a failure before it has ended."""
    on_term(0)
    ready(run, name)
    time.sleep(FOREVER_S)
    return 1


def closing_badly(run: Path, name: str, message: str) -> int:
    """Has failed for a reason of its own, and is told of another failure before it has ended."""
    (run / "failures" / f"{name}.txt").write_text(message)
    on_term(1)
    ready(run, name)
    time.sleep(FOREVER_S)
    return 1


def crash(run: Path, name: str, code: str, message: str, seconds: str = "0") -> int:
    ready(run, name)
    wait_for_all(run)
    time.sleep(float(seconds))
    print(message, file=sys.stderr)
    return int(code)


def follow(run: Path, name: str, leader: str, code: str, message: str) -> int:
    """Crashes because another one has died."""
    ready(run, name)
    wait_for_all(run)
    wait_for_end(run, leader)
    time.sleep(0.5)  # a closed socket takes a moment to be noticed; two shims that report in one instant have no order
    print(message, file=sys.stderr)
    return int(code)


def confess(run: Path, name: str, code: str, message: str, seconds: str = "0") -> int:
    """Writes its own failure sentence before it goes."""
    ready(run, name)
    wait_for_all(run)
    time.sleep(float(seconds))
    (run / "failures" / f"{name}.txt").write_text(message)
    return int(code)


def deaf(run: Path, name: str) -> int:
    """Ignores SIGTERM and SIGINT."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ready(run, name)
    time.sleep(FOREVER_S)
    return 0


def waits_for_the_signal(run: Path, name: str) -> int:
    """As one that still imports: it has let no signal in when one comes, and deals with it later. Then it notes what it
    has heard of the supervisor."""
    ready(run, name)
    came = signal.sigtimedwait((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), 60)
    channel = supervisor_channel()
    while select.select([channel], [], [], 0)[0]:
        note_heard(run, channel)
    (run / "summary.json").write_text('{"steps": 0}')
    return 128 + came.si_signo if came else 1


def family(run: Path, name: str) -> int:
    """Has a child in a session of its own and a grandchild, both deaf, like an engine with its workers."""
    reader, writer = os.pipe()
    engine = os.fork()
    if engine == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        grandchild = os.fork()
        if grandchild:
            os.write(writer, str(grandchild).encode())
        time.sleep(FOREVER_S)
        os._exit(0)
    grandchild = int(os.read(reader, 20))
    on_term(143)
    ready(run, name, engine, grandchild)
    time.sleep(FOREVER_S)
    return 0


def engine_owner(run: Path, name: str) -> int:
    """Watches its engine child and fails with a sentence of its own when that dies."""
    engine = os.fork()
    if engine == 0:
        time.sleep(FOREVER_S)
        os._exit(0)
    on_term(143)
    ready(run, name, engine)
    _, status = os.waitpid(engine, 0)
    message = f"the engine process of {name} died ({os.waitstatus_to_exitcode(status)})"
    (run / "failures" / f"{name}.txt").write_text(message)
    return 1


def leave_orphan(run: Path, name: str) -> int:
    """Ends with 0 and leaves a deaf daemon behind."""
    daemon = os.fork()
    if daemon == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(FOREVER_S)
        os._exit(0)
    ready(run, name, daemon)
    wait_for_all(run)
    return 0


def stop_shim(run: Path, name: str) -> int:
    """Leaves a child behind that stops the shim as soon as the shim tells it to go, which it does after its report."""
    ready_to_go, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGSTOP))
        os.write(told, b"x")
        time.sleep(FOREVER_S)
        time.sleep(FOREVER_S)
        os._exit(0)
    os.read(ready_to_go, 1)
    on_term(143)
    ready(run, name, child)
    time.sleep(FOREVER_S)
    return 0


def signal_group(run: Path, name: str) -> int:
    """Kills its own process group, as careless code does."""
    ready(run, name)
    wait_for_all(run)
    os.killpg(os.getpgrp(), signal.SIGKILL)
    return 0


def show_environment(run: Path, name: str) -> int:
    (run / "environment").mkdir(exist_ok=True)
    (run / "environment" / name).write_text("\n".join(f"{key}={value}" for key, value in sorted(os.environ.items())))
    ready(run, name)
    return 0


def write_status(run: Path, name: str) -> int:
    """An orchestrator that trains three steps and sums up."""
    ready(run, name)
    for step in (1, 2, 3):
        partial = run / ".status"
        partial.write_text(
            f'{{"state": "running", "step": {step}, "steps": 3, "reward": 0.{step}, "sampled_tokens_per_s": 5100}}'
        )
        partial.rename(run / "status.json")
        time.sleep(1.2)
    (run / "summary.json").write_text('{"steps": 3, "reward_policy_last": 0.3, "rollouts": {"trained": 24, "failed": 0}}')
    return 0


def notes(run: Path, name: str) -> int:
    """Has a file elsewhere that is to go with it, and is killed, or kills itself: nothing of its own runs after that."""
    from telescope.runlog import temporary

    shared = Path(os.environ["NOTED"])
    shared.write_text("of a process that is killed")
    temporary.note(temporary.make(), [shared])
    ready(run, name)
    if os.environ["KILLED"]:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER_S)
    return 0


BEHAVIOURS = {
    function.__name__: function
    for function in (
        closing, closing_badly, obey, relays,
        finish, crash, follow, confess, deaf, waits_for_the_signal, family, engine_owner, leave_orphan,
        stop_shim, signal_group, show_environment, write_status, notes,
    )
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
