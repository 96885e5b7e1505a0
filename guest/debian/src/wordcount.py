"""Words counted by map and reduce: texts are mapped to partitions of (word, count) pairs, each partition
is reduced to its words' totals, and all of it begins anew. Arguments: a folder in RAM, how many texts of
4 MiB."""

import os
import random
import sys
import zlib
from collections import Counter
from itertools import accumulate

TEXT_BYTES = 4 << 20
PARTITIONS = 8
WORDS = 20_000
SENTENCES = 4_000


def unit():
    unit.count += 1
    print("lab unit", unit.count)


unit.count = 0


def write_texts(folder, count):
    """Texts of sentences over a vocabulary in which a few words are frequent; their number of words."""
    letters = "etaoinshrdlucmfw"
    words = ["".join(random.choices(letters, k=random.randint(2, 12))) for _ in range(WORDS)]
    weights = list(accumulate(1 / rank for rank in range(1, WORDS + 1)))
    lengths = {}
    while len(lengths) < SENTENCES:
        sentence = random.choices(words, cum_weights=weights, k=random.randint(5, 40))
        lengths[" ".join(sentence) + "\n"] = len(sentence)
    sentences = list(lengths)
    sentences_a_text = TEXT_BYTES * SENTENCES // sum(map(len, sentences))
    total = 0
    for number in range(count):
        chosen = random.choices(sentences, k=sentences_a_text)
        total += sum(map(lengths.get, chosen))
        with open(f"{folder}/text.{number}", "w") as text:
            text.writelines(chosen)
    return total


def map_text(folder, number):
    with open(f"{folder}/text.{number}") as text:
        counts = Counter(text.read().split())
    parts = [[] for _ in range(PARTITIONS)]
    for word, count in counts.items():
        parts[zlib.crc32(word.encode()) % PARTITIONS].append(f"{word} {count}\n")
    for part, lines in enumerate(parts):
        with open(f"{folder}/part.{part}.{number}", "w") as out:
            out.writelines(lines)


def reduce_part(folder, part, texts):
    """The number of words of a partition; their totals go to a file, its input is removed."""
    totals = Counter()
    for number in range(texts):
        path = f"{folder}/part.{part}.{number}"
        with open(path) as lines:
            for line in lines:
                word, count = line.split()
                totals[word] += int(count)
        os.remove(path)
    with open(f"{folder}/total.{part}", "w") as out:
        out.writelines(f"{word} {count}\n" for word, count in totals.most_common())
    return totals.total()


def main():
    folder, texts = sys.argv[1], int(sys.argv[2])
    random.seed(1)
    words = write_texts(folder, texts)
    print("lab ready")
    while True:
        for number in range(texts):
            map_text(folder, number)
            unit()
        counted = 0
        for part in range(PARTITIONS):
            counted += reduce_part(folder, part, texts)
            unit()
        if counted != words:
            sys.exit(f"wordcount: {counted} words instead of {words}")


main()
