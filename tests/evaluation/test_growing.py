"""Samples are judged while their file grows: each is seen once, whole, whatever is cut or replaced meanwhile."""

import json
import random

import pytest

from evaluation.errors import InputError
from evaluation.judging import Growing

WANTED = frozenset((f"toy/{p}", i) for p in range(5) for i in range(4))


def line(key):
    row = {"task_id": key[0], "index": key[1], "completion": "c", "solution": f"{key[0]} {key[1]}\nnaïve"}
    return (json.dumps(row | {"finish_reason": "stop", "num_tokens": 1}, ensure_ascii=False) + "\n").encode()


@pytest.mark.parametrize("seed", range(30))
def test_every_sample_is_seen_once_however_the_file_grows(tmp_path, seed):
    """Written in pieces of any size, cut by kills, and written anew in another order with what was whole."""
    chance = random.Random(seed)
    path = tmp_path / "samples.jsonl"
    growing, seen = Growing(path, WANTED), []
    assert growing.more() == [] and not growing.complete
    written: list = []
    while not growing.complete:
        left = [k for k in WANTED if k not in written]
        key = chance.choice(left or sorted(WANTED))
        text = line(key)
        with path.open("ab") as f:
            if chance.random() < 0.2:  # a kill in the middle of a line: who goes on keeps what is whole
                f.write(text[: chance.randrange(1, len(text))])
                f.flush()
                if chance.random() < 0.5:
                    seen += growing.more()
                chance.shuffle(written)
                fresh = tmp_path / "fresh"
                fresh.write_bytes(b"".join(map(line, written)))
                fresh.replace(path)
            else:
                at = chance.randrange(len(text))
                f.write(text[:at])
                f.flush()
                seen += growing.more()
                f.write(text[at:])
                written.append(key)
        if chance.random() < 0.7:
            seen += growing.more()
    assert sorted((s.task_id, s.index) for s in seen) == sorted(WANTED)
    assert growing.rows.keys() == WANTED
    assert growing.more() == []


def test_samples_that_nobody_asked_for_are_left_alone(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(line(("toy/9", 0)) + line(("toy/0", 7)) + line(("toy/0", 1)))
    growing = Growing(path, WANTED)
    assert [(s.task_id, s.index) for s in growing.more()] == [("toy/0", 1)]


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(line(("toy/0", 1)))
    growing = Growing(path, WANTED)
    assert len(growing.more()) == 1
    with path.open("ab") as f:
        f.write(line(("toy/0", 2)) + b'{"task_id": \n')
    with pytest.raises(InputError, match=r"samples\.jsonl=line 3"):
        growing.more()
