"""A filter of system calls for bubblewrap's guests, as the bytes that `bwrap --seccomp` reads. Pure.

A list of what is denied (EPERM), not of what is allowed: programs of any kind must run, and namespaces are the wall. Denied is
what reaches deep into the kernel and what could keep memory that no limit counts. Numbers are those of the kernel's tables for
x86-64 (arch/x86/entry/syscalls/syscall_64.tbl) and AArch64 (include/uapi/asm-generic/unistd.h); program layout: seccomp(2).
"""

from __future__ import annotations

import errno
import struct

DENIED: dict[str, dict[str, int]] = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103, "uselib": 134,
        "personality": 135, "pivot_root": 155, "acct": 163, "chroot": 161, "mount": 165, "umount2": 166, "swapon": 167,
        "swapoff": 168, "reboot": 169, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179,
        "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "move_pages": 279,
        "migrate_pages": 256, "unshare": 272, "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303,
        "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
        "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
        "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442,
        "quotactl_fd": 443, "memfd_secret": 447,
    },
    "aarch64": {
        "io_setup": 0, "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89,
        "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "syslog": 116,
        "ptrace": 117, "reboot": 142, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "shmctl": 195, "shmat": 196,
        "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "migrate_pages": 238,
        "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
        "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "memfd_create": 279,
        "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294, "io_uring_setup": 425, "io_uring_enter": 426,
        "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
        "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
    },
}  # fmt: skip
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_X32 = 0x40000000
_NEW_USER_NAMESPACE = 0x10000000
_AF_UNIX = 1

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; the low half comes first on both
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def program(machine: str) -> bytes | None:
    """The filter for `platform.machine()`, e.g. 1040 bytes for x86_64; None where no table of numbers is known."""
    if machine not in DENIED:
        return None
    deny, no_such_call = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_EQUAL, _ARCH[machine], 1, 0),
        _line(_RETURN, _KILL),  # another architecture's numbers mean other calls
        _line(_LOAD, _NUMBER),
        _line(_AT_LEAST, _X32, 0, 1),
        _line(_RETURN, deny),
        # clone3 hides its flags behind a pointer: told that it is not there, libc takes clone.
        _line(_EQUAL, _CLONE3, 0, 1),
        _line(_RETURN, no_such_call),
    ]
    for number in sorted(DENIED[machine].values()):
        lines += [_line(_EQUAL, number, 0, 1), _line(_RETURN, deny)]
    lines += [
        _line(_EQUAL, _CLONE[machine], 0, 4),
        _line(_LOAD, _FIRST_ARGUMENT),
        _line(_ANY_BIT, _NEW_USER_NAMESPACE, 0, 1),
        _line(_RETURN, deny),
        _line(_RETURN, _ALLOW),
        # Only sockets of one machine's files: some families (AF_VSOCK) are not held by a network namespace.
        _line(_EQUAL, _SOCKET[machine], 0, 3),
        _line(_LOAD, _FIRST_ARGUMENT),
        _line(_EQUAL, _AF_UNIX, 1, 0),
        _line(_RETURN, deny),
        _line(_RETURN, _ALLOW),
    ]
    return b"".join(lines)


def _line(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, when_true, when_false, value)
