"""What people see: lines of children at a bearable rate, bars, costs; and that none of it can do harm."""

import json
import logging

import httpx
import pytest

from tasks import children, shown
from tasks.children import Tail
from tasks.costs import Planned, show_costs, spent
from tasks.shown import Bar, Counted, key_of, link


@pytest.fixture
def told(caplog):
    """Messages of the children's logger so far; emptied by reading."""
    caplog.set_level(logging.INFO, logger="tasks.children")

    def read():
        messages = [r.getMessage() for r in caplog.records if r.name == "tasks.children"]
        caplog.clear()
        return messages

    return read


def append(path, text):
    with path.open("ab") as f:
        f.write(text if isinstance(text, bytes) else text.encode())


def test_a_tail_tells_whole_new_lines_only(tmp_path, told):
    log = tmp_path / "log"
    append(log, "of an earlier attempt\n")
    tail = Tail("cell", log)
    append(log, "one\ntwo\nhal")
    tail.tell(at_once=True)
    assert told() == ["cell: one", "cell: two"]
    append(log, "f\n")
    tail.tell(at_once=True)
    assert told() == ["cell: half"]
    tail.tell(at_once=True)
    assert told() == []


def test_a_chatty_child_is_told_in_a_few_lines_now_and_then(tmp_path, told):
    log = tmp_path / "log"
    tail = Tail("cell", log)
    tail.tell()  # nothing is there yet
    append(log, "".join(f"line {i}\n" for i in range(10_000)))
    tail.tell()
    said = told()
    assert said[:4] == [f"cell: line {i}" for i in range(9_996, 10_000)]
    assert len(said) == 5 and said[4].endswith(f"lines before these are in {log}")
    append(log, "soon after\n")
    tail.tell()
    assert told() == []
    tail.told -= children.EVERY_S
    tail.tell()
    assert told() == ["cell: soon after"]


def test_bars_colours_and_bytes_are_told_as_a_terminal_shows_them(tmp_path, told):
    log = tmp_path / "log"
    tail = Tail("cell", log)
    append(
        log, "10%\r50%\r100% done\n\x1b[31mred\x1b[0m\n\n   \nbad \xff byte\n".encode("latin-1") + b"x" * 9_999 + b"\n"
    )
    tail.tell(at_once=True)
    assert told() == ["cell: 100% done", "cell: red", "cell: bad � byte", f"cell: {'x' * children.LINE_LENGTH}"]


def test_a_child_of_several_tasks_tells_each_its_own(tmp_path, told):
    log = tmp_path / "log"
    three, thirty = (Tail("evaluation", log, only=f"cell/global_step_{n}:") for n in (3, 30))
    append(log, "cell/global_step_30: 5 of 9 samples\ncell/global_step_3: 1 of 9 samples\n")
    three.tell(at_once=True)
    assert told() == ["evaluation: cell/global_step_3: 1 of 9 samples"]
    thirty.tell(at_once=True)
    assert told() == ["evaluation: cell/global_step_30: 5 of 9 samples"]


def test_lines_are_counted_as_they_come(tmp_path):
    counted = Counted(tmp_path / "samples.jsonl")
    assert counted.count() == 0
    append(counted.path, "a\nb\nhal")
    assert counted.count() == 2
    append(counted.path, "f\n" + "x\n" * 3)
    assert counted.count() == 6
    counted.path.write_text("a\n")  # a cut line was dropped: the file was written anew
    assert counted.count() == 1


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("progress", "toy_toy_nobuf_lr3e4"), "progress-toy-toy-nobuf-lr3e4"),
        (("scoring", "qwen3_1p7b_base_mbpp_nobuf_lr2p5e6_s1 step 30"),
         "scoring-qwen3-1p7b-base-mbpp-nobuf-lr2p5e6-s1-step-30"),
        (("folder", "Ä/b."), "folder-b"),
    ],
)  # fmt: skip
def test_keys_are_what_the_server_takes(words, key):
    assert key_of(*words) == key


def test_without_a_run_nothing_is_shown_and_without_a_server_it_costs_a_line(monkeypatch, caplog):
    def refused(*_, **__):
        raise httpx.ConnectError("no server")

    monkeypatch.setattr(shown, "create_progress_artifact", refused)
    monkeypatch.setattr(shown, "create_link_artifact", refused)
    Bar("progress", "a").move(0.5, "half")
    link("folder", "a", "file:///a", "its folder")
    assert caplog.records == []
    monkeypatch.setattr(shown.TaskRunContext, "get", lambda: object())
    Bar("progress", "a").move(0.5, "half")
    link("folder", "a", "file:///a", "its folder")
    assert [r.getMessage() for r in caplog.records] == [
        "a: progress could not be shown in the Prefect UI: no server",
        "a could not be shown in the Prefect UI: no server",
    ]


def test_a_bar_moves_now_and_then(monkeypatch):
    sent = []
    monkeypatch.setattr(shown, "try_to_show", lambda what, action: sent.append(what))
    bar = Bar("progress", "a")
    for _ in range(50):
        bar.move(0.5, "half")
    bar.move(1.0, "ended", at_once=True)
    assert len(sent) == 2


def test_what_was_spent_is_counted_from_the_store(make_work, tmp_path):
    work = make_work()
    first = work.cells[0].name
    for rel, size in (
        (f"{first}/global_step_2/model.safetensors", 3_000_000),
        (f"{first}/global_step_4/model.safetensors", 2_000_000),
        (f"{first}/resume/step_4/optimizer.pt", 9_000_000),  # dropped again: no cost that stays
        (f"{first}/scores/toy_plus-1/global_step_2/samples.jsonl", 400_000),
        ("toy/scores/toy_plus-1/global_step_0/samples.jsonl", 100_000),
        ("reports/micro/report.md", 7_000_000),
    ):
        path = tmp_path / "store" / rel
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    steps = [{"global_step": n, "seconds": 900.0, "loss": "NaN"} for n in (1, 2, 3, 4)]
    log = tmp_path / "store" / first / "logs" / "steps.jsonl"
    log.parent.mkdir()
    log.write_text("".join(json.dumps(s) + "\n" for s in steps))
    assert spent(work) == (1.0, 0.005, 0.0005)


def test_costs_that_cannot_be_read_end_nothing(make_work, monkeypatch, caplog):
    work = make_work()
    planned = Planned(unit="core-hours", training_h=1, scoring_h=1, checkpoint_gb=1, sample_gb=1)

    def away(*_):
        raise ConnectionError("the store is away")

    monkeypatch.setattr(type(work.store.backend), "list", away)
    show_costs(work, planned, ended=True)
    assert "the store is away" in caplog.text
