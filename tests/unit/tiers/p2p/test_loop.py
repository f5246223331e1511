"""The I/O thread's loop, on this thread."""

import os
import time

import pytest
import zmq

from kvtiers.tiers.p2p.loop import Loop


def test_a_call_of_a_closed_loop_touches_nobodys_descriptor():
    """A name may resolve a minute after the engine has stopped."""
    loop = Loop(time.monotonic)
    woken = loop._woken
    loop.call(lambda: None)
    loop.close()
    readable, writable = os.pipe()
    if writable != woken:
        os.dup2(writable, woken)  # what the system does with a number that is free
    try:
        os.set_blocking(readable, False)
        loop.call(lambda: None)
        with pytest.raises(BlockingIOError):
            os.read(readable, 8)
    finally:
        for fd in {readable, writable, woken}:
            os.close(fd)


def test_a_message_of_many_parts_takes_turns_and_no_memory():
    """One of two million parts, of two bytes each, stopped everything for six seconds."""
    context, loop, heard = zmq.Context(), Loop(time.monotonic), []
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    try:
        ours.bind("inproc://many-parts")
        theirs.connect("inproc://many-parts")
        loop.attach(ours, heard.append)
        theirs.send_multipart([b"%d" % n for n in range(10_000)])
        theirs.send_multipart([b"a", b"b"])
        (fd,) = loop._sockets
        turns = 0
        while len(heard) < 2:
            loop._read(fd)
            turns += 1
        assert turns == 3
        assert heard == [[b"%d" % n for n in range(10)], [b"a", b"b"]]
        assert not loop._begun
    finally:
        loop.close()
        context.destroy(0)


def test_a_socket_that_is_detached_leaves_no_half_message():
    context, loop = zmq.Context(), Loop(time.monotonic)
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    try:
        ours.bind("inproc://half")
        theirs.connect("inproc://half")
        loop.attach(ours, print)
        theirs.send_multipart([b""] * 10_000)
        (fd,) = loop._sockets
        loop._read(fd)
        assert loop._begun
        loop.detach(ours)
        assert not loop._begun
    finally:
        loop.close()
        context.destroy(0)
