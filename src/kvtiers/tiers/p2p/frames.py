"""What goes over a TCP data connection.

The consumer connects to the port and shows the token of the session, both of which it learnt on the
control channel; a token is good for one connection. The producer then sends frames: a header of 32
bytes, little-endian, and the bytes of one chunk::

    0   8  transfer                 16  8  bytes of the chunk
    8   4  place of the chunk in it 24  8  XXH3-64 of the bytes
    12  4  zero

Bytes go from the producer's memory into the consumer's slot; the kernel's buffers are all that lies
between. A frame for a transfer that was stopped is read and thrown away, each chunk once; any other
frame that was not asked for ends the session. Nothing here is encrypted, and XXH3 is no signature:
see decision 0022 for what that means beyond loopback.
"""

import struct

GREETING = b"KVTD"
"""What a consumer says first; the token follows."""
TOKEN_BYTES = 16
HEADER = struct.Struct("<QIIQQ")
TURN_BYTES = 8 << 20
"""Moved for one connection before others have their turn."""
