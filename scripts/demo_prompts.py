"""The demo's questions: four narrow reasoning-gym families, in turn, so that any prefix is balanced.

    python scripts/demo_prompts.py write TRAIN.jsonl HELDOUT.jsonl
    python scripts/demo_prompts.py pack CONVERSATIONS.jsonl PACKED.jsonl.gz

`write` makes the prompts; `draftsmith regenerate` answers the training ones; `pack` puts the conversations back into a
balanced order and compresses them, byte for byte the same each time. Needs `pip install 'draftsmith[demo]'`.

The families were chosen by what SmolLM2-135M-Instruct makes of them: short prompts, answers of about 10 to 60 tokens
that follow a few patterns, yet repeat parts of the question, so that a drafter must read it. Most answers are wrong,
which is no harm: a drafter imitates its target and is never scored on truth.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import reasoning_gym

from draftsmith.data.prompts import content_id

FAMILIES = {
    "letter_counting": {},
    "gcd": {"max_value": 200},
    "time_intervals": {"task_types": ["time", "time_seconds"]},
    "chain_sum": {},
}

# Item i of a reasoning-gym set with seed s is drawn from Random(s + i), so these two ranges never meet.
TRAIN_SEED, HELDOUT_SEED = 0, 1_000_000
TRAIN_PER_FAMILY, HELDOUT_PER_FAMILY = 400, 12


def questions(family: str, seed: int) -> Iterator[str]:
    """Distinct questions of a family, in the order of their seeds."""
    seen = set()
    for item in reasoning_gym.create_dataset(family, seed=seed, size=10_000, **FAMILIES[family]):
        if item["question"] not in seen:
            seen.add(item["question"])
            yield item["question"]


def take(family: str, seed: int, count: int, *, other_than: set[str]) -> list[dict]:
    rows = []
    for question in questions(family, seed):
        if question not in other_than:
            messages = [{"role": "user", "content": question}]
            rows.append({"id": content_id(messages), "messages": messages, "tags": [family]})
        if len(rows) == count:
            return rows
    raise SystemExit(f"{family} has only {len(rows)} distinct questions; {count} were asked for.")


def in_turn(by_family: dict[str, list[dict]]) -> list[dict]:
    """First of each family, second of each, and so on."""
    return [row for turn in zip_longest(*by_family.values()) for row in turn if row is not None]


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(train_path: Path, heldout_path: Path) -> None:
    train, heldout = {}, {}
    for family in FAMILIES:
        train[family] = take(family, TRAIN_SEED, TRAIN_PER_FAMILY, other_than=set())
        trained_on = {row["messages"][0]["content"] for row in train[family]}
        heldout[family] = take(family, HELDOUT_SEED, HELDOUT_PER_FAMILY, other_than=trained_on)
    for path, by_family in ((train_path, train), (heldout_path, heldout)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lines(in_turn(by_family)))


def pack(conversations: Path, packed: Path) -> None:
    by_family: dict[str, list[dict]] = {family: [] for family in FAMILIES}
    for line in conversations.read_bytes().splitlines():
        row = json.loads(line)
        by_family[row["tags"][0]].append(row)
    for rows in by_family.values():
        rows.sort(key=lambda row: row["id"])  # whatever order the batches were answered in
    fewest = min(len(rows) for rows in by_family.values())
    rows = in_turn({family: rows[:fewest] for family, rows in by_family.items()})
    packed.write_bytes(gzip.compress(lines(rows), compresslevel=9, mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for verb, names in ((write, ("train", "heldout")), (pack, ("conversations", "packed"))):
        sub = verbs.add_parser(verb.__name__)
        for name in names:
            sub.add_argument(name, type=Path)
        sub.set_defaults(verb=verb, names=names)
    arguments = parser.parse_args()
    arguments.verb(*(vars(arguments)[name] for name in arguments.names))


if __name__ == "__main__":
    main()
