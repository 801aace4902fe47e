"""The cage of untrusted programs: what a process gives up for good before it sees one.

Guarantees, on Linux x86_64, where seccomp works (it is required): no program opens a file for writing, a socket or
another process's memory; starts a process or another program; signals anybody but itself; raises its own limits. It
reads no file outside the Python installation where landlock is present (elsewhere it can read what the user can, but
has no way to send it anywhere but into its own wrong answer). Its environment is empty and it inherits no descriptor
but the one its answers go through. Run as root, it works as an unused user.

Does not guarantee: anything against a bug of the kernel or of CPython that seccomp does not cover; fairness between
programs that fill the memory bandwidth; and it cannot keep a program from returning the right value for a wrong reason.

Layers: rlimits, no_new_privs, landlock (when the kernel has it), seccomp (mandatory), another uid (when root). No
namespaces: a Kubernetes pod with the default profile forbids them, and nothing here rests on them.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterable, Sequence

_libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SYS_SECCOMP = 317
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
MEMORY_BYTES = 4 << 30
"""EvalPlus's limit on a program's address space."""
UNUSED_UID = 65533
"""Owns nothing: not nobody, which other daemons run as."""


class CageMissing(OSError):
    """The kernel refuses a part of the cage that is required."""


def _call(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise CageMissing(code, f"{what}: {os.strerror(code)}")
    return result


def prctl(option: int, value: int = 0) -> None:
    """Set one process attribute (prctl(2) with one argument)."""
    zero = ctypes.c_ulong(0)
    _call(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


# System calls by x86_64 number. The child's list is what CPython needs to compute, read its library and answer.
CHILD_CALLS = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "readv": 19, "writev": 20, "access": 21, "select": 23, "sched_yield": 24, "mremap": 25,
    "madvise": 28, "dup": 32, "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39,
    "exit": 60, "uname": 63, "fcntl": 72, "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrlimit": 97,
    "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108,
    "getppid": 110, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204,
    "getdents64": 217, "set_tid_address": 218, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229,
    "clock_nanosleep": 230, "exit_group": 231, "newfstatat": 262, "pselect6": 270, "ppoll": 271,
    "set_robust_list": 273, "getrandom": 318, "membarrier": 324, "statx": 332, "rseq": 334,
}  # fmt: skip
ZYGOTE_CALLS = {
    "fork": 57, "vfork": 58, "wait4": 61, "sendmsg": 46, "recvmsg": 47, "sendto": 44, "recvfrom": 45, "clone": 56,
    "clone3": 435, "setrlimit": 160, "prlimit64": 302, "prctl": 157, "seccomp": SYS_SECCOMP, "kill": 62,
    "tgkill": 234, "dup2": 33, "dup3": 292, "openat": 257, "ioctl": 16, "close_range": 436,
}  # fmt: skip
_LOAD, _EQUAL, _SET, _RETURN, _GREATER = 0x20, 0x15, 0x45, 0x06, 0x35
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_AUDIT_X86_64 = 0xC000003E
_NUMBER, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0o20000000
_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E028000 | 0x2000

Instruction = tuple[int, int, int, int]


def _head() -> list[Instruction]:
    """Kill anything that is not plain x86_64, then load the call's number."""
    return [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER, 0, 1, 0x40000000),
        (_RETURN, 0, 0, _KILL),
    ]


def _allow(numbers: Iterable[int]) -> list[Instruction]:
    return [i for n in sorted(numbers) for i in ((_EQUAL, 0, 1, n), (_RETURN, 0, 0, _ALLOW))]


def _refuse(code: int = errno.EPERM) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)


def _when(number: int, body: Sequence[Instruction]) -> list[Instruction]:
    """Run `body`, which must return, for one call."""
    return [(_EQUAL, 0, len(body), number), *body]


def zygote_filter() -> list[Instruction]:
    """Allow what a child may need and what forking one needs; everything else fails with EPERM."""
    return [*_head(), *_allow({*CHILD_CALLS.values(), *ZYGOTE_CALLS.values()}), _refuse()]


def child_filter(pid: int) -> list[Instruction]:
    """Allow computing, reading files and answering; stacked on the zygote's filter, so the stricter of both holds."""
    kill_self = [(_LOAD, 0, 0, _ARG0), (_EQUAL, 0, 1, pid), (_RETURN, 0, 0, _ALLOW), _refuse()]
    only_read = [(_LOAD, 0, 0, _ARG2), (_SET, 1, 0, _WRITES), (_RETURN, 0, 0, _ALLOW), _refuse()]
    only_thread = [
        (_LOAD, 0, 0, _ARG0),
        (_SET, 0, 2, _CLONE_THREAD),
        (_SET, 1, 0, _CLONE_NEW),
        (_RETURN, 0, 0, _ALLOW),
        _refuse(),
    ]
    only_get = [(_LOAD, 0, 0, _ARG2), (_EQUAL, 0, 1, 0), (_RETURN, 0, 0, _ALLOW), _refuse()]
    return [
        *_head(),
        *_allow(CHILD_CALLS.values()),
        *_when(ZYGOTE_CALLS["kill"], kill_self),
        *_when(ZYGOTE_CALLS["tgkill"], kill_self),
        *_when(ZYGOTE_CALLS["openat"], only_read),
        *_when(ZYGOTE_CALLS["clone"], only_thread),
        *_when(ZYGOTE_CALLS["clone3"], [_refuse(errno.ENOSYS)]),
        *_when(ZYGOTE_CALLS["prlimit64"], only_get),
        *_when(ZYGOTE_CALLS["ioctl"], [_refuse(errno.ENOTTY)]),
        _refuse(),
    ]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(instructions: Sequence[Instruction]) -> None:
    """Install a seccomp filter for good.

    Raises:
        CageMissing: the kernel has no seccomp, or this is no x86_64.
    """
    if platform.machine() != "x86_64":
        raise CageMissing(errno.ENOSYS, f"seccomp filter for {platform.machine()} is not written")
    raw = b"".join(struct.pack("<HBBI", c, t, f, k & 0xFFFFFFFF) for c, t, f, k in instructions)
    buffer = ctypes.create_string_buffer(raw, len(raw))
    program = _Program(len(instructions), ctypes.cast(buffer, ctypes.c_void_p))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    zero = ctypes.c_ulong(0)
    mode = ctypes.c_ulong(2)
    _call(_libc.prctl(ctypes.c_int(PR_SET_SECCOMP), mode, ctypes.byref(program), zero, zero), "seccomp")


def restrict_files(readable: Iterable[str]) -> int:
    """Allow reading below `readable` and nothing else of any file system; return the landlock version, 0 if absent."""
    version = _libc.syscall(SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return 0
    rights = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        rights |= (1 << bit) if version >= since else 0
    attributes = struct.pack("<Q", rights)
    attributes += struct.pack("<Q", 3) if version >= 4 else b""  # TCP bind and connect
    attributes += struct.pack("<Q", 3) if version >= 6 else b""  # abstract sockets and signals outside
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    size, none = ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)
    rules = _call(_libc.syscall(SYS_LANDLOCK_CREATE, buffer, size, none), "landlock_create_ruleset")
    for path in readable:
        try:
            fd = os.open(path, os.O_PATH)
        except OSError:
            continue
        access = 0b1101 if os.path.isdir(path) else 0b0101
        rule = ctypes.create_string_buffer(struct.pack("<Qi", access, fd), 12)
        _call(_libc.syscall(SYS_LANDLOCK_ADD, ctypes.c_int(rules), ctypes.c_int(1), rule, none), f"landlock {path}")
        os.close(fd)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _call(_libc.syscall(SYS_LANDLOCK_RESTRICT, ctypes.c_int(rules), none), "landlock_restrict_self")
    os.close(rules)
    return version


def drop_user(needed: str) -> bool:
    """Become an unused user when root, unless that user could not read `needed`; return whether that happened."""
    if os.getuid() != 0 or not _open_to_others(needed):
        return False
    try:
        os.setgroups([])
        os.setresgid(UNUSED_UID, UNUSED_UID, UNUSED_UID)
        os.setresuid(UNUSED_UID, UNUSED_UID, UNUSED_UID)
    except OSError:
        return False  # root without the capability: the other layers hold all the same
    return True


def _open_to_others(path: str) -> bool:
    while True:
        if not os.stat(path).st_mode & 0o001:
            return False
        if path == "/":
            return True
        path = path.rsplit("/", 1)[0] or "/"


def limit(address_bytes: int, cpu_s: int) -> None:
    """Set a program's own limits: no core, no file writes, few descriptors."""
    r = resource
    for what, value in (
        (r.RLIMIT_AS, address_bytes),
        (r.RLIMIT_CPU, cpu_s),
        (r.RLIMIT_NOFILE, 64),
        (r.RLIMIT_FSIZE, 0),
        (r.RLIMIT_CORE, 0),
    ):
        r.setrlimit(what, (value, value))
