"""Counts the system calls that the main thread of a child makes between two marks, by ptrace."""

import ctypes
import os
import platform
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

MARK = -4242
"""A file descriptor that cannot be; a call about it begins or ends the count."""
MEMORY = {"mmap", "munmap", "mremap", "brk", "madvise"}
"""What allocators do now and then, in any Python code."""

_SEIZE, _INTERRUPT, _SYSCALL, _INFO = 0x4206, 0x4207, 24, 0x420E
_SYSGOOD = 1
_STOP = signal.SIGTRAP | 0x80
_NUMBERS = {
    "x86_64": {"mmap": 9, "munmap": 11, "brk": 12, "mremap": 25, "madvise": 28, "futex": 202},
    "aarch64": {"futex": 98, "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222, "madvise": 233},
}
_NAMES = {number: name for name, number in _NUMBERS.get(platform.machine(), {}).items()}
_FUTEX_WAKES = {1, 4, 5, 10}
"""FUTEX_WAKE, _CMP_REQUEUE, _WAKE_OP and _WAKE_BITSET; whatever else there is waits."""
_FUTEX_OPERATION = 0x7F


def mark() -> None:
    """In the child: begin or end the count. The interpreter lock is kept."""
    ctypes.PyDLL(None).lseek(MARK, 0, 0)


class _Info(ctypes.Structure):
    """``struct ptrace_syscall_info`` of a call that begins."""

    _fields_ = [
        ("op", ctypes.c_uint8),
        ("arch", ctypes.c_uint32),
        ("instruction_pointer", ctypes.c_uint64),
        ("stack_pointer", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("args", ctypes.c_uint64 * 6),
        ("rest", ctypes.c_uint64 * 4),
    ]

    @property
    def begins(self) -> bool:
        return self.op == 1

    @property
    def is_mark(self) -> bool:
        return (self.args[0] - MARK) & 0xFFFFFFFF == 0

    @property
    def name(self) -> str:
        name = _NAMES.get(self.number, f"number {self.number}")
        if name != "futex":
            return name
        return "wake" if self.args[1] & _FUTEX_OPERATION in _FUTEX_WAKES else "wait"


def count(command: Sequence[str]) -> Counter[str]:
    """Run ``command``, which prints a line, reads one, and calls ``mark`` twice.

    Skips the test where tracing is not allowed or not known.
    """
    if not _NAMES:
        pytest.skip(f"the numbers of {platform.machine()}'s system calls are not listed here")
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline(), "the child ended before it was ready"
        _ptrace(_SEIZE, child.pid, 0, _SYSGOOD)
        _ptrace(_INTERRUPT, child.pid, 0, 0)
        child.stdin.write(b"go\n")
        child.stdin.flush()
        counted = _follow(child.pid)
        child.returncode = 0
        return counted
    finally:
        if child.returncode is None:
            child.kill()
            with suppress(ChildProcessError):
                os.waitpid(child.pid, 0)
        for pipe in (child.stdin, child.stdout):
            pipe.close()  # type: ignore[union-attr]


def _follow(pid: int) -> Counter[str]:
    counted: Counter[str] = Counter()
    marks = 0
    info = _Info()
    while True:
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            assert os.waitstatus_to_exitcode(status) == 0, "the child failed"
            assert marks == 2, f"the child made {marks} marks"
            return counted
        stop = os.WSTOPSIG(status)
        deliver = 0 if stop in (_STOP, signal.SIGTRAP) else stop
        if stop == _STOP:
            _ptrace(_INFO, pid, ctypes.sizeof(info), ctypes.addressof(info))
            if info.begins and info.is_mark:
                marks += 1
            elif info.begins and marks == 1:
                counted[info.name] += 1
        _ptrace(_SYSCALL, pid, 0, deliver)


def _ptrace(request: int, pid: int, address: int, data: int) -> None:
    call: Callable[..., int] = ctypes.CDLL(None, use_errno=True).ptrace
    number = ctypes.c_long(request), ctypes.c_int(pid)
    if call(*number, ctypes.c_void_p(address), ctypes.c_void_p(data)) == -1:
        error = ctypes.get_errno()
        if request == _SEIZE:
            pytest.skip(f"no process may be traced here: {os.strerror(error)}")
        raise OSError(error, os.strerror(error))
