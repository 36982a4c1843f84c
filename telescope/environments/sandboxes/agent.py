"""Runs inside a local sandbox and does what the parent asks: one command, one file at a time. Standard library only.

Its source is handed to `python3 -I -S -c`, so it imports nothing of Telescope and little of Python. Frames go both ways over
standard input and output: 4 bytes length, a JSON header, then as many bytes as the header's `sizes` say.

It does not trust what it runs: the guest gets none of its descriptors, can't look into it (not dumpable), meets its limits
before its first instruction, and after each command nothing of it is left. Nor does the parent trust this agent: it keeps its
own clock and counts bytes itself.
"""

import contextlib
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # as type checkers read it, without the cost of importing typing
if TYPE_CHECKING:
    from collections.abc import Iterator

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_CHUNK = 65536
_FIRST = "/proc/self/oom_score_adj"


class Agent:
    """`alone`: whether this process has a pid namespace of its own, in which it may kill everything but itself. `guest`: the
    user that commands run as and files belong to, where it is another than the agent's. `forbidden`: a filter of system calls
    (seccomp.py) for this process and all that it starts; empty where whoever started it has set one."""

    def __init__(self, alone: bool, guest: "int | None", forbidden: bytes) -> None:
        self.alone = alone
        self.guest = guest
        self.requests = os.fdopen(os.dup(0), "rb", buffering=0)
        self.replies = os.fdopen(os.dup(1), "wb", buffering=0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):  # what it complains about itself, it says to the parent
            os.dup2(nothing, fd)
        os.close(nothing)
        # Opened before the process turns undumpable: afterwards the file belongs to root.
        self.oom_fd = -1
        with contextlib.suppress(OSError):  # a kernel without it (gVisor's) has its own rule
            self.oom_fd = os.open(_FIRST, os.O_RDWR | os.O_CLOEXEC)
        self.own_score = os.read(self.oom_fd, 16).decode().strip() if self.oom_fd >= 0 else ""
        self.wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # of the first process: ignored, while a handler of Python's would hear it
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        self.hide()
        if forbidden:
            forbid(forbidden)

    def hide(self) -> None:
        """Keeps the guest, which runs under the same user, from this process's memory and descriptors."""
        if self.alone:
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)

    def serve(self) -> None:
        self.answer({"ok": True, "hello": os.getpid()})
        while True:
            head = self.read(4)
            if head is None:
                return
            header = json.loads(self.need(struct.unpack(">I", head)[0]))
            body = self.need(header["sizes"][0])
            try:
                self.answer(*getattr(self, "do_" + header["op"])(header, body))
            except OSError as error:
                self.answer({"ok": False, "error": f"{type(error).__name__}: {error}"})

    def read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            part = self.requests.read(min(_CHUNK, size - len(parts)))
            if part is None:  # gVisor makes the line non-blocking
                select.select([self.requests], [], [])
                continue
            if not part:
                return None
            parts += part
        return bytes(parts)

    def need(self, size: int) -> bytes:
        got = self.read(size)
        if got is None:
            raise SystemExit(0)  # the parent is gone
        return got

    def answer(self, header: dict[str, object], *bodies: bytes) -> None:
        head = json.dumps({**header, "sizes": [len(body) for body in bodies]}).encode()
        for part in (struct.pack(">I", len(head)), head, *bodies):
            view = memoryview(part)
            while view:
                done = self.replies.write(view)
                if done is None:
                    select.select([], [self.replies], [])
                else:
                    view = view[done:]

    def do_put(self, header: dict[str, object], body: bytes) -> tuple[dict[str, object]]:
        path = str(header["path"])
        with self.as_guest():
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "wb", opener=open_regular) as file:
                file.write(body)
        return ({"ok": True},)

    def do_get(self, header: dict[str, object], body: bytes) -> tuple[dict[str, object], bytes]:
        most = int(str(header["most"]))
        with self.as_guest(), open(str(header["path"]), "rb", opener=open_regular) as file:
            return {"ok": True}, file.read(most + 1) or b""

    @contextlib.contextmanager
    def as_guest(self) -> "Iterator[None]":
        if self.guest is not None:
            os.seteuid(self.guest)
        try:
            yield
        finally:
            if self.guest is not None:
                os.seteuid(0)

    def do_exec(self, header: dict[str, object], body: bytes) -> tuple[dict[str, object], bytes, bytes]:
        ends = [os.pipe() for _ in range(3)]
        pid = self.fork(header, [ends[0][0], ends[1][1], ends[2][1]])
        os.close(ends[0][0])
        os.close(ends[1][1])
        os.close(ends[2][1])
        deadline = time.monotonic() + float(str(header["timeout_s"]))
        try:
            streams, ending = relay(
                pid, body, (ends[0][1], ends[1][0], ends[2][0]), self.wake[0], deadline, int(str(header["output"]))
            )
        finally:
            self.kill(pid)
        return {"ok": True, "ending": ending[0], "code": ending[1]}, *streams

    def fork(self, header: dict[str, object], fds: list[int]) -> int:
        self.oom("1000")  # inherited: out of memory, the guest goes first
        pid = os.fork()
        if pid:
            self.oom(self.own_score)  # no less than it was: that takes a right which nobody here has
            return pid
        try:
            os.setsid()
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and that would be inherited
            for target, fd in enumerate(fds):
                os.dup2(fd, target)
            for name, most in dict(header["rlimits"]).items():  # type: ignore[call-overload]
                resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
            if self.guest is not None:
                os.setgroups([])
                os.setresgid(self.guest, self.guest, self.guest)
                os.setresuid(self.guest, self.guest, self.guest)
            os.chdir(str(header["cwd"]))
            argv = list(header["argv"])  # type: ignore[call-overload]
            os.execvpe(argv[0], argv, dict(header["env"]))  # type: ignore[call-overload]
        except BaseException as error:  # noqa: BLE001 - the edge of a process that is about to be another program
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(127)

    def oom(self, score: str) -> None:
        if self.oom_fd >= 0:
            os.pwrite(self.oom_fd, score.encode(), 0)

    def kill(self, pid: int) -> None:
        """Ends everything that a command has started. Outside a pid namespace only its own group can be named."""
        try:
            if self.alone:
                os.kill(-1, signal.SIGKILL)
            else:
                os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            pass


def relay(
    pid: int, stdin: bytes, fds: tuple[int, int, int], wake: int, deadline: float, output: int
) -> tuple[tuple[bytes, bytes], tuple[str, int]]:
    """Feed and read a command until it exits, floods or runs out of time. Gives its output and (ending, exit code)."""
    kept: dict[int, bytearray] = {fds[1]: bytearray(), fds[2]: bytearray()}
    feed, poll, open_fds = memoryview(stdin), select.poll(), set(fds)
    for fd in fds:
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLOUT if fd == fds[0] else select.POLLIN)
    poll.register(wake, select.POLLIN)

    def close(fd: int) -> None:
        poll.unregister(fd)
        os.close(fd)
        open_fds.discard(fd)

    def read(ready: set[int]) -> bool:
        for fd in ready & open_fds & kept.keys():
            if not drain(fd, kept[fd], output):
                close(fd)
        return any(len(kept[fd]) > output for fd in kept)

    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return (bytes(kept[fds[1]]), bytes(kept[fds[2]])), ("timed_out", 137)
            ready = {fd for fd, _ in poll.poll(min(left * 1000 + 1, 60_000))}
            if fds[0] in ready:
                feed = push(fds[0], feed)
                if not feed:
                    close(fds[0])
            flooded = read(ready)
            code = exit_code(pid, wake) if wake in ready else None
            if code is not None:
                flooded = read(open_fds) or flooded  # what still lies in the pipes; who holds them open does not count
            if flooded or code is not None:
                cut = tuple(bytes(kept[fd][:output]) for fd in fds[1:])
                return (cut[0], cut[1]), ("flooded" if flooded else "exited", 137 if code is None else code)
    finally:
        for fd in list(open_fds):
            close(fd)


def push(fd: int, feed: memoryview) -> memoryview:
    """What is left to be written; nothing where nobody reads any more."""
    try:
        return feed[os.write(fd, feed[:_CHUNK]) :] if feed else feed
    except BlockingIOError:
        return feed
    except BrokenPipeError:
        return feed[:0]


def exit_code(pid: int, wake: int) -> int | None:
    """As a shell tells it, or None while the command runs."""
    with contextlib.suppress(BlockingIOError):
        os.read(wake, _CHUNK)
    done, status = os.waitpid(-1, os.WNOHANG)
    while done not in (0, pid):  # an orphan, which comes to the first process of a sandbox
        done, status = os.waitpid(-1, os.WNOHANG)
    if not done:
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def drain(fd: int, into: bytearray, most: int) -> bool:
    """Read what is there, at most one byte beyond `most`. False: the other end is closed."""
    while len(into) <= most:
        try:
            part = os.read(fd, min(_CHUNK, most + 1 - len(into)))
        except BlockingIOError:
            return True
        if not part:
            return False
        into += part
    return True


def forbid(program: bytes) -> None:
    """Have the kernel filter this process's system calls by a program for its packet filter, 8 bytes an instruction."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    libc = ctypes.CDLL(None, use_errno=True)
    whole = Program(len(program) // 8, program)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(whole), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


def open_regular(path: str, flags: int) -> int:
    """Waits for no pipe's other end. Raises OSError for all that is not a regular file."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("it is not a regular file")
    return fd


if __name__ == "__main__":
    # A process that only thinks it is alone would kill its user's other processes: the number says whether it is.
    words = dict(word.partition("=")[::2] for word in sys.argv[1:])
    alone = "alone" in words and os.getpid() <= 2
    Agent(alone, int(words["guest"]) if "guest" in words else None, bytes.fromhex(words.get("forbid", ""))).serve()
