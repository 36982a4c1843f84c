"""What a hostile program tries, as a table: code that reports what it achieved, and the report that says it achieved nothing.

Limits under which they run: 128 MB, 16 MB of files, 16 processes, 1 core, 64 kB of output, no network.
"""

# ruff: noqa: E501
from __future__ import annotations

from dataclasses import dataclass

from telescope.environments.sandboxes.base import Limits

LIMITS = Limits(memory_mb=128, disk_mb=16, processes=16, cpus=1.0, output_kb=64, time_s=60.0)

FILTERED = ("bubblewrap", "podman")
"""Where a filter of system calls is ours; gVisor's kernel answers for itself."""
PRELUDE = """
import ctypes, errno, os, signal, socket, struct, sys, time
def tried(action):
    try:
        return action() or "done"
    except OSError as error:
        return errno.errorcode.get(error.errno, "OSError")
    except MemoryError:
        return "MemoryError"
def syscall(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(number, *(ctypes.c_long(a) for a in arguments))
    return "done" if done >= 0 else errno.errorcode[ctypes.get_errno()]
def write(path, content=b"x"):
    with open(path, "wb") as file:
        file.write(content)
def fill(path, megabytes):
    with open(path, "wb", buffering=0) as file:
        for _ in range(megabytes):
            left = memoryview(bytes(1 << 20))
            while left:
                left = left[file.write(left):]
"""


@dataclass(frozen=True)
class Attack:
    name: str
    code: str
    report: str | tuple[str, ...]
    """What it prints when it has failed; several where providers differ in how they refuse."""
    ending: str = "exited"
    only: tuple[str, ...] = ("bubblewrap", "gvisor", "podman")
    limit_s: float = 60.0

    @property
    def reports(self) -> tuple[str, ...]:
        return (self.report,) if isinstance(self.report, str) else self.report


ATTACKS = (
    # The network
    Attack("reach_the_hosts_loopback", "print(tried(lambda: socket.create_connection(('127.0.0.1', PORT), 5) and 'in'))",
           ("EPERM", "ECONNREFUSED", "ENETUNREACH", "EADDRNOTAVAIL")),
    Attack("reach_an_address", "print(tried(lambda: socket.create_connection(('1.1.1.1', 53), 5) and 'out'))",
           ("EPERM", "ENETUNREACH", "EHOSTUNREACH", "EADDRNOTAVAIL")),
    Attack("resolve_a_name", "try: print(socket.getaddrinfo('example.com', 80))\nexcept OSError: print('no name')", "no name"),
    Attack("talk_to_the_hypervisor", "print(tried(lambda: socket.socket(40, socket.SOCK_STREAM) and 'vsock'))",
           ("EPERM", "EAFNOSUPPORT", "EINVAL")),
    Attack("see_an_interface",
           "print(tried(lambda: sorted(line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line)))",
           ("['lo']", "ENOENT", "done")),
    Attack("reach_an_abstract_unix_socket", "s = socket.socket(socket.AF_UNIX)\nprint(tried(lambda: s.connect('\\0ABSTRACT')))",
           ("ECONNREFUSED", "EACCES", "EINVAL")),
    # Files
    Attack("write_to_the_system", "print(tried(lambda: write('/usr/bin/python3')), tried(lambda: write('/usr/lib/x')))",
           ("EROFS EROFS", "EACCES EACCES", "ETXTBSY EROFS", "EROFS EACCES", "EACCES EROFS")),
    Attack("write_to_the_root", "print(tried(lambda: write('/x')), tried(lambda: os.mkdir('/new')))",
           ("EROFS EROFS", "EACCES EACCES", "EACCES EROFS", "EROFS EACCES")),
    Attack("write_to_dev", "print(tried(lambda: write('/dev/x')))", ("EROFS", "EACCES")),
    Attack("read_root_and_passwords", "print(*(os.path.exists(p) for p in ('/root', '/etc/passwd', '/etc/shadow', '/home', 'SECRET')))",
           "False False False False False", only=("bubblewrap", "gvisor")),
    Attack("read_a_file_of_the_host", "print(os.path.exists('SECRET'), tried(lambda: os.listdir('/root')))",
           ("False ENOENT", "False EACCES")),
    Attack("read_the_environment", "print(sorted(os.environ.keys() - {'LC_CTYPE', 'PWD'}), 'HUSH' in str(os.environ))",
           "['HOME', 'LANG', 'PATH'] False"),
    Attack("read_the_agents_environment",
           "print('HUSH' in ''.join(tried(lambda: open(f'/proc/{p}/environ').read()) for p in os.listdir('/proc') if p.isdigit()))",
           "False"),
    Attack("fill_the_disk", "print(tried(lambda: fill('/tmp/a', 12)), tried(lambda: fill('/tmp/b', 12)))",
           ("done ENOSPC", "done EFBIG")),
    Attack("write_one_large_file", "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nprint(tried(lambda: fill('/tmp/a', 40)))",
           ("ENOSPC", "EFBIG")),
    Attack("fill_shared_memory", "print(tried(lambda: fill('/dev/shm/a', 12)))", ("ENOSPC", "EACCES", "EFBIG", "ENOENT")),
    Attack("use_a_device_of_its_own", "print(tried(lambda: os.mknod('/tmp/d', 0o20666, os.makedev(1, 1)) or open('/tmp/d') and 'in'))",
           ("EPERM", "EACCES", "ENXIO")),
    Attack("become_root", "print(tried(lambda: os.setuid(0)), tried(lambda: os.chroot('/tmp')), os.getuid())", ("EPERM EPERM 65534", "EINVAL EPERM 65534")),
    Attack("raise_its_limits",
           "import resource as r\ndef up(what):\n    try: r.setrlimit(what, (r.RLIM_INFINITY,) * 2); return 'raised'\n"
           "    except (ValueError, OSError): return 'no'\nprint(up(r.RLIMIT_CPU), up(r.RLIMIT_NPROC), up(r.RLIMIT_FSIZE))",
           "no no no"),
    # Memory
    Attack("take_two_gigabytes", "print(tried(lambda: bytearray(2 << 30) and 'taken'))", "MemoryError"),
    Attack("hide_memory_in_a_memfd", "print(tried(lambda: os.memfd_create('m') and 'made'))", "EPERM", only=FILTERED),
    Attack("hide_memory_in_system_v", "print(syscall(29, 0, 64 << 20, 0o1600))", "EPERM", only=FILTERED),
    # Time and processes
    Attack("loop_for_ever", "while True: pass", "", ending="timed_out", limit_s=1.0),
    Attack("sleep_for_ever", "time.sleep(600)", "", ending="timed_out", limit_s=1.0),
    Attack("ignore_signals", "for n in range(1, 64):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
           "time.sleep(600)", "", ending="timed_out", limit_s=1.0),
    Attack("fork_until_it_fails",
           "n = 0\ntry:\n    while n < 300:\n        if not os.fork(): time.sleep(600)\n        n += 1\nexcept OSError: pass\n"
           "print(n <= 20)", "True"),
    Attack("start_threads_until_it_fails",
           "import threading\nn = 0\ntry:\n    while n < 300:\n        threading.Thread(target=time.sleep, args=(600,), daemon=True)"
           ".start(); n += 1\nexcept (RuntimeError, MemoryError): pass\nprint(n <= 20, flush=True)\nos._exit(0)", "True"),
    Attack("hold_its_output_open", "if not os.fork():\n    os.setsid()\n    time.sleep(600)\nprint('left')", "left"),
    Attack("see_other_processes",
           "print(len([p for p in os.listdir('/proc') if p.isdigit() and open(f'/proc/{p}/comm').read().strip() not in "
           "('bwrap', 'python3', 'agent')]))", "0"),
    Attack("nice_itself_up", "print(tried(lambda: os.nice(-20) and 'nicer'))", ("EPERM", "EACCES"), only=FILTERED),
    # Output
    Attack("print_fifty_megabytes", "sys.stdout.write('x' * (50 << 20))", "x" * (64 << 10), ending="flooded"),
    Attack("complain_fifty_megabytes", "sys.stderr.write('x' * (50 << 20))", "", ending="flooded"),
    # The kernel
    Attack("call_bpf", "print(syscall(321, 0, 0, 0))", "EPERM", only=FILTERED),
    Attack("call_io_uring", "print(syscall(425, 1, 0))", "EPERM", only=FILTERED),
    Attack("call_keyctl", "print(syscall(250, 0, 0))", "EPERM", only=FILTERED),
    Attack("call_ptrace", "print(syscall(101, 0, 0))", "EPERM", only=FILTERED),
    Attack("call_perf", "print(syscall(298, 0, 0, -1, -1, 0))", "EPERM", only=FILTERED),
    Attack("call_mount", "print(syscall(165, 0, 0, 0, 0, 0))", "EPERM", only=FILTERED),
    Attack("make_a_user_namespace", "print(syscall(272, 0x10000000), syscall(56, 0x10000000 | 17, 0, 0, 0, 0))", "EPERM EPERM",
           only=FILTERED),
    Attack("use_the_x32_numbers", "print(syscall(0x40000000 + 39))", ("EPERM", "ENOSYS"), only=FILTERED),
    # What watches it
    Attack("read_the_agents_memory", "print(tried(lambda: open(f'/proc/{os.getppid()}/mem', 'rb') and 'in'))", ("EACCES", "ENOENT")),
    Attack("write_to_any_process_above",
           "print(sorted({tried(lambda: os.open(f'/proc/{p}/mem', os.O_RDWR) and 'opened') for p in os.listdir('/proc')"
           " if p.isdigit() and int(p) != os.getpid()} & {'opened'}))", "[]"),
    Attack("look_into_any_process_above",
           "print(sorted({tried(lambda: os.listdir(f'/proc/{p}/fd') and 'listed') for p in os.listdir('/proc')"
           " if p.isdigit() and int(p) != os.getpid()} & {'listed'}))", "[]", only=FILTERED),
    Attack("speak_for_the_agent",
           "import json\nhead = json.dumps({'ok': True, 'ending': 'exited', 'code': 0, 'sizes': [6, 0]}).encode()\n"
           "for n in range(30):\n    try:\n        with open(f'/proc/{os.getppid()}/fd/{n}', 'wb', buffering=0) as file:\n"
           "            file.write(struct.pack('>I', len(head)) + head + b'FORGED')\n    except OSError: pass\nprint('honest')", "honest"),
    Attack("inherit_a_descriptor",
           "print(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')))", "[0, 1, 2] 4"),
)  # fmt: skip
