"""A client of memcached: fills it with values, and then sets random ones of them anew, for ever. After each unit it reads
one value back; a value that is not as it was written ends it. Arguments: the server's socket, how many values, how many
sets are a unit."""

import binascii
import os
import socket
import sys

VALUE_BYTES = 1024
# Commands that are sent at once.
TOGETHER = 100
# Each value is a piece of a table of random letters, which is far larger than the pieces in a few neighbouring pages.
TABLE = binascii.b2a_base64(os.urandom(6 << 20), newline=False)
OFFSETS = len(TABLE) - VALUE_BYTES
STORED = b"STORED\r\n" * TOGETHER


def expect(server, expected):
    """Reads exactly these bytes."""
    answer = b""
    while len(answer) < len(expected):
        read = server.recv(1 << 16)
        if not read:
            sys.exit("the server closed the connection")
        answer += read
    if answer != expected:
        sys.exit(f"{answer[:80]} for {expected[:80]}")


def set_values(server, keys):
    """Gives each key a new value; the last of these values."""
    numbers = memoryview(os.urandom(4 * TOGETHER)).cast("I")
    parts = []
    for key, number in zip(keys, numbers):
        offset = number % OFFSETS
        value = TABLE[offset:offset + VALUE_BYTES]
        parts.append(b"set %016d 0 0 %d\r\n%b\r\n" % (key, VALUE_BYTES, value))
    server.sendall(b"".join(parts))
    expect(server, STORED)
    return value


def main(path, values, unit):
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    for first in range(0, values, TOGETHER):
        set_values(server, range(first, first + TOGETHER))
    print("lab ready")
    units = 0
    while True:
        for _ in range(0, unit, TOGETHER):
            keys = [number % values for number in memoryview(os.urandom(4 * TOGETHER)).cast("I")]
            value = set_values(server, keys)
        server.sendall(b"get %016d\r\n" % keys[-1])
        expect(server, b"VALUE %016d 0 %d\r\n%b\r\nEND\r\n" % (keys[-1], VALUE_BYTES, value))
        units += 1
        print("lab unit", units)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
