"""The cage of untrusted programs: what a process gives up for good before it sees one.

Guarantees, on Linux x86_64 with seccomp (required). A program cannot open a file for writing, open a network socket,
reach another process (memory, signals, tracing, descriptors), start one, set a timer, or raise its own limits. It can
read the standard library, shared libraries and numpy; no other file where the kernel has landlock, and no file at all
where it has not. Its environment is empty, and the only descriptor it inherits is the one its values leave through.

Does not guarantee: anything against a bug of the kernel or of CPython behind the calls that are left; secrecy of the
names of files (only their content is out of reach); fairness between programs that fill the memory bus. It cannot keep
a program from returning the right value for a wrong reason.

Where the required part is missing nothing runs, unless ABLATION_UNCAGED=1 says that it shall: then programs run with
limits and an empty environment only, and may do to this machine what its user may.

Layers: seccomp (required), no_new_privs, rlimits, landlock (when the kernel has it), no capabilities, an unused user
(when root, and that user can read the standard library), and network, IPC and host-name namespaces of its own (when
allowed: a Kubernetes pod with the default profile forbids them, and nothing above rests on them).
"""

import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterable, Sequence

_libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SYS_CAPSET = 126
_CAP_DAC_READ_SEARCH = 1 << 2
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
STACK_BYTES = 1 << 30
UNUSED_UID = 65533
"""Owns nothing: not nobody, which other daemons run as."""


class CageMissing(OSError):
    """The kernel refuses a part of the cage that is required."""


def _call(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise CageMissing(code, f"{what}: {os.strerror(code)}")
    return result


_prctl = _libc.prctl
_prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)


def prctl(option: int, value: int = 0) -> None:
    """Set one process attribute (prctl(2) with one argument)."""
    _call(_prctl(option, value, None, 0, 0), f"prctl {option}")


# System calls by x86_64 number. First what CPython needs to compute, read its library and answer.
COMPUTING = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "readv": 19, "writev": 20, "access": 21, "select": 23, "sched_yield": 24, "mremap": 25,
    "madvise": 28, "dup": 32, "nanosleep": 35, "getpid": 39,
    "recvfrom": 45, "exit": 60, "uname": 63, "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrlimit": 97,
    "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108,
    "getppid": 110, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204,
    "getdents64": 217, "set_tid_address": 218, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229,
    "clock_nanosleep": 230, "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233, "newfstatat": 262,
    "pselect6": 270, "ppoll": 271, "set_robust_list": 273, "epoll_pwait": 281, "epoll_create1": 291,
    "getrandom": 318, "membarrier": 324, "statx": 332, "rseq": 334,
}  # fmt: skip
# What the zygote needs to fork a child and hand over its descriptor; a child loses these.
FORKING = {
    "sendmsg": 46, "recvmsg": 47, "fork": 57, "vfork": 58, "wait4": 61, "prctl": 157, "setrlimit": 160,
}  # fmt: skip
_SENDTO, _SOCKETPAIR, _CLONE, _FCNTL, _IOCTL, _KILL, _TGKILL, _OPENAT, _PRLIMIT, _CLONE3 = (
    44, 53, 56, 72, 16, 62, 234, 257, 302, 435,
)  # fmt: skip
_LOAD, _EQUAL, _SET, _RETURN, _GREATER = 0x20, 0x15, 0x45, 0x06, 0x35
_ALLOW, _ERRNO, _DIE = 0x7FFF0000, 0x00050000, 0x80000000
_AUDIT_X86_64 = 0xC000003E
_NUMBER, _ARCH = 0, 4
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0o20000000
_CLONE_THREAD, _CLONE_OTHER = 0x00010000, 0x7E028000 | 0x2000
_AF_UNIX = 1
_FIONBIO, _FIOCLEX = 0x5421, 0x5451
_HARMLESS_FCNTL = (0, 1, 2, 3, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC. Not F_SETOWN and F_SETSIG: they would send signals."""

Instruction = tuple[int, int, int, int]


def _argument(index: int, high: bool = False) -> Instruction:
    """Load one half of an argument of the call."""
    return (_LOAD, 0, 0, 16 + 8 * index + 4 * high)


def _head() -> list[Instruction]:
    """Kill anything that is not plain x86_64, then load the call's number."""
    return [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_X86_64),
        (_RETURN, 0, 0, _DIE),
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER, 0, 1, 0x40000000),
        (_RETURN, 0, 0, _DIE),
    ]


_ALLOWED: Instruction = (_RETURN, 0, 0, _ALLOW)


def _refused(code: int = errno.EPERM) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)


def _one_of(numbers: Iterable[int], then: Instruction) -> list[Instruction]:
    return [i for n in numbers for i in ((_EQUAL, 0, 1, n), then)]


def _when(number: int, body: Sequence[Instruction]) -> list[Instruction]:
    """Run `body`, which must return, for one call."""
    return [(_EQUAL, 0, len(body), number), *body]


def zygote_filter() -> "Filter":
    """Allow computing and forking; what a program never needs in any form fails from here on, with EPERM."""
    anonymous = [_argument(4), (_EQUAL, 0, 3, 0), _argument(4, high=True), (_EQUAL, 0, 1, 0), _ALLOWED, _refused()]
    return _assembled(
        [
            *_head(),
            *_one_of(COMPUTING.values(), _ALLOWED),
            *_one_of(FORKING.values(), _ALLOWED),
            *_one_of((_CLONE, _KILL, _TGKILL, _OPENAT, _PRLIMIT), _ALLOWED),
            # No address: else a datagram socket of a pair could write to any named socket of the machine.
            *_when(_SENDTO, anonymous),
            *_when(_SOCKETPAIR, [_argument(0), (_EQUAL, 0, 1, _AF_UNIX), _ALLOWED, _refused()]),
            *_when(_FCNTL, [_argument(1), *_one_of(_HARMLESS_FCNTL, _ALLOWED), _refused()]),
            *_when(_IOCTL, [_argument(1), *_one_of((_FIONBIO, _FIOCLEX), _ALLOWED), _refused(errno.ENOTTY)]),
            *_when(_CLONE3, [_refused(errno.ENOSYS)]),  # the C library then uses clone, whose flags can be read
            _refused(),
        ]
    )


_PID_MARK = 0x5EED5EED


def child_filter(files: bool) -> "Filter":
    """Take away forking, and signals to others; stacked on the zygote's filter.

    Args:
        files: whether reading files is allowed: only where landlock says which.
    """
    only_self = [_argument(0), (_EQUAL, 0, 1, _PID_MARK), _ALLOWED, _refused()]
    only_read = [_argument(2), (_SET, 1, 0, _WRITES), _ALLOWED, _refused()]
    only_get = [_argument(2), (_EQUAL, 0, 3, 0), _argument(2, high=True), (_EQUAL, 0, 1, 0), _ALLOWED, _refused()]
    only_thread = [_argument(0), (_SET, 0, 2, _CLONE_THREAD), (_SET, 1, 0, _CLONE_OTHER), _ALLOWED, _refused()]
    return _assembled(
        [
            *_head(),
            *_one_of(FORKING.values(), _refused()),
            *_when(_KILL, only_self),
            *_when(_TGKILL, only_self),
            *_when(_CLONE, only_thread),
            *_when(_PRLIMIT, only_get),
            *_when(_OPENAT, only_read if files else [_refused(errno.EACCES)]),
            _ALLOWED,
        ]
    )


def _assembled(instructions: Sequence[Instruction]) -> "Filter":
    return Filter(b"".join(struct.pack("<HBBI", c, t, f, k & 0xFFFFFFFF) for c, t, f, k in instructions))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def require_x86_64() -> None:
    """Refuse other processors: their system calls have other numbers.

    Raises:
        CageMissing: this is no x86_64 Linux.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise CageMissing(errno.ENOSYS, f"no seccomp filter for {platform.system()} {platform.machine()} is written")


class Filter:
    """A seccomp filter in memory, so that a child has little left to do; every page that it touches is copied."""

    def __init__(self, code: bytes) -> None:
        self.buffer = ctypes.create_string_buffer(code, len(code))
        self.program = _Program(len(code) // 8, ctypes.addressof(self.buffer))
        self.address = ctypes.addressof(self.program)
        mark = struct.pack("<I", _PID_MARK)
        self.marks = [i for i in range(0, len(code), 4) if code[i : i + 4] == mark]

    def install(self, pid: int = 0) -> None:
        """Install it for good, in the process of this pid where it names one.

        Raises:
            CageMissing: the kernel has no seccomp.
        """
        for at in self.marks:
            struct.pack_into("<I", self.buffer, at, pid)
        _call(_prctl(PR_SET_NO_NEW_PRIVS, 1, None, 0, 0), "no_new_privs")
        _call(_prctl(PR_SET_SECCOMP, 2, self.address, 0, 0), "seccomp")


_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3


def restrict_files(listable: Iterable[str], readable: Iterable[str]) -> int:
    """Allow listing folders, and reading files and below folders, of `readable`; nothing else of any file system.

    Returns:
        The landlock version; 0 if the kernel has none, and then nothing is restricted.
    """
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
    for path in listable:
        _allow_below(rules, path, _READ_FOLDER)
    for path in readable:
        _allow_below(rules, path, _READ_FILE | (_READ_FOLDER if os.path.isdir(path) else 0))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _call(_libc.syscall(SYS_LANDLOCK_RESTRICT, ctypes.c_int(rules), none), "landlock_restrict_self")
    os.close(rules)
    return version


def _allow_below(rules: int, path: str, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH)
    except OSError:
        return  # not on this machine
    rule = ctypes.create_string_buffer(struct.pack("<Qi", access, fd), 12)
    added = _libc.syscall(SYS_LANDLOCK_ADD, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint32(0))
    _call(added, f"landlock {path}")
    os.close(fd)


_NEW_NETWORK, _NEW_IPC, _NEW_HOST_NAME, _NEW_USER = 0x40000000, 0x08000000, 0x04000000, 0x10000000


def leave_namespaces() -> bool:
    """Leave the machine's network, IPC and host name, where root, or a user with namespaces of its own, may.

    Not its process ids: the judge reads each program's waiting time by its id.
    """
    without = _NEW_NETWORK | _NEW_IPC | _NEW_HOST_NAME
    return _libc.unshare(ctypes.c_int(without)) == 0 or _libc.unshare(ctypes.c_int(without | _NEW_USER)) == 0


MAX_THREADS = 2048
"""Of all lanes together."""


def be_ended_first() -> None:
    """Where the machine runs out of memory, the kernel is to end a program, neither the judge nor a trainer."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as f:  # where there is a /proc
        f.write(b"1000")


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


def drop_capabilities() -> None:
    """Give up every capability; root keeps reading what another user owns, within what landlock leaves."""
    keep = _CAP_DAC_READ_SEARCH if os.getuid() == 0 else 0
    header = struct.pack("<Ii", 0x20080522, 0)
    if _libc.syscall(SYS_CAPSET, header, struct.pack("<6I", keep, keep, 0, 0, 0, 0)) < 0:
        _call(_libc.syscall(SYS_CAPSET, header, bytes(24)), "capset")


def limit_zygote(threads: bool) -> None:
    """Set the limits that hold for zygote and children alike: no core, no file writes, few descriptors and threads.

    Args:
        threads: whether they are counted for the judge alone: the user is its own.
    """
    if threads:
        resource.setrlimit(resource.RLIMIT_NPROC, (MAX_THREADS, MAX_THREADS))
    for what, value in ((resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (value, value))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))  # recursion through C, as deep as under EvalPlus


def limit_child(address_bytes: int, cpu_s: int) -> None:
    """Set a program's own limits; SIGXCPU tells that the processor time ran out."""
    resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 2))
