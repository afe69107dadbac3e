"""The system calls that code in a sandbox may make: a list of what is allowed, as a filter of the
kernel's (seccomp, `man 2 seccomp`). All others fail with EPERM, those of the future too. Among them
are whatever makes processes, sockets, mounts, shared memory or signals.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: the column of the table, and the kernel's name for it (AUDIT_ARCH_...)."""

# name x86_64 aarch64; - where a machine has no such call
ALLOWED = """
read 0 63|write 1 64|close 3 57|fstat 5 80|lseek 8 62|mmap 9 222|mprotect 10 226|munmap 11 215
brk 12 214|rt_sigaction 13 134|rt_sigprocmask 14 135|rt_sigreturn 15 139|rt_sigpending 127 136
rt_sigtimedwait 128 137|rt_sigsuspend 130 133|sigaltstack 131 132|pread64 17 67|pwrite64 18 68
readv 19 65|writev 20 66|access 21 -|pipe 22 -|pipe2 293 59|select 23 -|pselect6 270 72|poll 7 -
ppoll 271 73|epoll_create1 291 20|epoll_ctl 233 21|epoll_wait 232 -|epoll_pwait 281 22
eventfd2 290 19|sched_yield 24 124|sched_getaffinity 204 123|mremap 25 216|madvise 28 233
dup 32 23|dup2 33 -|dup3 292 24|pause 34 -|nanosleep 35 101|clock_nanosleep 230 115
getitimer 36 102|setitimer 38 103|alarm 37 -|getpid 39 172|getppid 110 173|gettid 186 178
getuid 102 174|geteuid 107 175|getgid 104 176|getegid 108 177|getgroups 115 158|getpgrp 111 -
exit 60 93|exit_group 231 94|uname 63 160|flock 73 32|fsync 74 82|fdatasync 75 83|truncate 76 45
ftruncate 77 46|getdents64 217 61|getcwd 79 17|chdir 80 49|fchdir 81 50|rename 82 -
renameat 264 38|renameat2 316 276|mkdir 83 -|mkdirat 258 34|rmdir 84 -|unlink 87 -
unlinkat 263 35|link 86 -|linkat 265 37|symlink 88 -|symlinkat 266 36|readlink 89 -
readlinkat 267 78|chmod 90 -|fchmod 91 52|fchmodat 268 53|umask 95 166|gettimeofday 96 169
clock_gettime 228 113|clock_getres 229 114|time 201 -|times 100 153|getrusage 98 165
sysinfo 99 179|getrlimit 97 163|prlimit64 302 261|futex 202 98|set_robust_list 273 99
get_robust_list 274 100|set_tid_address 218 96|rseq 334 293|statfs 137 43|fstatfs 138 44
arch_prctl 158 -|open 2 -|openat 257 56|stat 4 -|lstat 6 -|newfstatat 262 79|statx 332 291
faccessat 269 48|faccessat2 439 439|utimensat 280 88|getrandom 318 278|membarrier 324 283
fadvise64 221 223|restart_syscall 219 128|wait4 61 260|waitid 247 95
"""
CLONE, CLONE3, FCNTL, IOCTL = (56, 220), (435, 435), (72, 25), (16, 29)
THREAD, NEW_NAMESPACES = 0x00010000, 0x7E020080
"""Flags of clone: a thread of the same process is allowed, a namespace of its own is not."""
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)
"""Descriptors and their flags; not who is sent signals (F_SETOWN), nor the size of pipes."""

LOAD, EQUAL, ANY_BIT, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST, SECOND = 0, 4, 16, 24
"""Offsets of `struct seccomp_data`: call, machine, the low halves of two arguments."""
X32 = 0x40000000
SET_SECCOMP, FILTER = 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def supported() -> bool:
    """Whether there is a table for this machine."""
    return platform.machine() in ARCHITECTURES


def restrict() -> None:
    """Put this process and its threads under the filter, for ever. PR_SET_NO_NEW_PRIVS must be set.

    Raises:
        OSError: the kernel has no seccomp.
    """
    code = b"".join(struct.pack("=HBBI", *each) for each in _instructions(platform.machine()))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def _instructions(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter as (code, jump if true, jump if false, operand)."""
    column, name = ARCHITECTURES[machine]
    fail = (RETURN, 0, 0, FAIL | errno.EPERM)
    absent = (RETURN, 0, 0, FAIL | errno.ENOSYS)
    program = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, name),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        # The 32-bit interface of x86_64 has numbers of its own.
        *((AT_LEAST, 0, 1, X32), absent),
        # With ENOSYS the C library goes on with clone, whose flags the filter can read; with ENOTTY
        # Python finds that no file is a terminal.
        *((EQUAL, 0, 1, CLONE3[column]), absent),
        *((EQUAL, 0, 1, IOCTL[column]), (RETURN, 0, 0, FAIL | errno.ENOTTY)),
        *((EQUAL, 0, 5, CLONE[column]), (LOAD, 0, 0, FIRST), (ANY_BIT, 1, 0, NEW_NAMESPACES)),
        *((ANY_BIT, 1, 0, THREAD), fail, (RETURN, 0, 0, ALLOW)),
        *((EQUAL, 0, 2 * len(FCNTL_COMMANDS) + 2, FCNTL[column]), (LOAD, 0, 0, SECOND)),
    ]
    for command in FCNTL_COMMANDS:
        program += [(EQUAL, 0, 1, command), (RETURN, 0, 0, ALLOW)]
    program.append(fail)
    for line in ALLOWED.replace("\n", "|").strip("|").split("|"):
        number = line.split()[1 + column]
        if number != "-":
            program += [(EQUAL, 0, 1, int(number)), (RETURN, 0, 0, ALLOW)]
    return [*program, fail]
