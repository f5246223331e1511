"""Where a memoryview lies: what transports that read and write memory by address need to know."""

import ctypes


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of CPython's buffer protocol (PEP 3118)."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


def address_of(view: memoryview) -> int:
    """The address of its first byte. Raises ValueError for a view that is dead.

    Caller guarantees: the memory stays where it is for as long as the address is used.
    """
    if not view.nbytes:  # raises for a dead view
        return 0
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = int(buffer.buf or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address
