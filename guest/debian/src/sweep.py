"""A client of Redis: fills it with values of nearly a page each, and then reads a piece of each of them in turn, for
ever; a piece that is not as it was written ends it. Arguments: the server's socket, how many values, how many
of them are a unit."""

import os
import socket
import sys

VALUE_BYTES = 4000
PIECE = 24
# Commands that are sent at once.
TOGETHER = 100
# The next value lies this many further: neighbours in time are none in memory.
STRIDE = 7919


def command(*words):
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        word = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(word), word))
    return b"".join(parts)


def piece(key):
    return b"%024d" % (key * 0x9E3779B97F4A7C15 % 10**PIECE)


def value(key):
    """Half noise, half text, the piece in the middle."""
    half = (VALUE_BYTES - PIECE) // 2
    text = b"value of %d; " % key
    return os.urandom(half) + piece(key) + (text * (half // len(text) + 1))[:half]


class Server:
    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)

    def ask(self, commands, expected):
        """Sends commands, and expects exactly these bytes in answer."""
        self.socket.sendall(b"".join(commands))
        answer = bytearray()
        while len(answer) < len(expected):
            read = self.socket.recv(1 << 16)
            if not read:
                sys.exit("the server closed the connection")
            answer += read
        if answer != expected:
            at = next(at for at, (one, other) in enumerate(zip(answer, expected)) if one != other)
            sys.exit(f"wrong at {at}: {bytes(answer[at:at + 40])} for {bytes(expected[at:at + 40])}")


def main(path, values, unit):
    server = Server(path)
    for first in range(0, values, TOGETHER):
        keys = range(first, min(first + TOGETHER, values))
        server.ask([command(b"SET", key, value(key)) for key in keys], b"+OK\r\n" * len(keys))
    if values % STRIDE == 0:
        values -= 1
    # Made once, so that the server's memory is measured, not this program.
    begin = (VALUE_BYTES - PIECE) // 2
    order = [number * STRIDE % values for number in range(values)]
    batches = []
    for first in range(0, values, TOGETHER):
        keys = order[first:first + TOGETHER]
        asked = [command(b"GETRANGE", key, begin, begin + PIECE - 1) for key in keys]
        answers = b"".join(b"$%d\r\n%s\r\n" % (PIECE, piece(key)) for key in keys)
        batches.append((b"".join(asked), answers))
    print("lab ready")
    units = done = 0
    while True:
        for asked, answers in batches:
            server.ask([asked], answers)
            done += TOGETHER
            if done >= unit:
                done -= unit
                units += 1
                print("lab unit", units)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
