"""Postmark's transactions (Katcher, NetApp TR3022): each reads a file or appends to it, and makes a file or removes one.

$1: folder; $2: files at the beginning; $3: transactions.
"""

import os
import random
import sys

SIZES = (4 << 10, 10_000_000)
# At most this is appended, or read at once.
PIECE = 64 << 10
# Contents begin at any byte of it: no page is like another.
POOL = random.Random(1).randbytes(32 << 20)


def content(chance, size):
    at = chance.randrange(len(POOL) - size)
    return POOL[at : at + size]


def main(folder, count, transactions):
    chance = random.Random(2)
    names = []
    made = 0

    def make():
        nonlocal made
        made += 1
        name = os.path.join(folder, f"file{made}")
        with open(name, "wb") as file:
            file.write(content(chance, chance.randrange(*SIZES)))
        names.append(name)

    for _ in range(count):
        make()
    for _ in range(transactions):
        name = chance.choice(names)
        if chance.random() < 0.5:
            with open(name, "rb") as file:
                while file.read(PIECE):
                    pass
        else:
            with open(name, "ab") as file:
                file.write(content(chance, chance.randrange(1, PIECE)))
        if chance.random() < 0.5:
            make()
        else:
            at = chance.randrange(len(names))
            os.remove(names[at])
            names[at] = names[-1]
            names.pop()


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
