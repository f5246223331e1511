"""Where a memoryview lies: for what asks for memory by address, or for memory that is aligned."""

import ctypes


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer`` (PEP 3118); only ``buf`` is of interest."""

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
    """The address of its first byte, of read-only views, too, where ctypes' own way fails.

    Raises ValueError for a view that is dead. Caller guarantees: the memory stays where it is for
    as long as the address is used.
    """
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
