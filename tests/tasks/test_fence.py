"""Two hosts, one store, one cell: whoever claimed it last writes; the older one stops, nothing of it complete."""

import dataclasses
import threading

import pytest

from evaluation.files import whole_folder
from evaluation.manifests import write_manifest
from tasks import fence
from tasks.cells import tick
from tasks.checkpoints import publish, seal
from tasks.children import Tail
from tasks.fence import RECORD, Fence, Fenced
from tasks.progress import Board
from training.folder import Result


@pytest.fixture
def hosts(make_work, tmp_path):
    first = make_work()
    return first, dataclasses.replace(first, runs=tmp_path / "other", fences=[])


def write(work, cell, path, kind, step=None, **files):
    with whole_folder(path) as partial:
        for name, text in files.items():
            (partial / name).write_text(text)
        write_manifest(partial, kind, work.identity(cell).provenance(cell.name, step))


def train_to(work, cell, step):
    folder = work.folder(cell)
    write(work, cell, folder.resume(step), "resume", step, state=f"s{step}")
    write(work, cell, folder.checkpoint(step), "checkpoint", step, weights=f"w{step}")


def test_the_older_host_writes_no_manifest_once_a_younger_one_has_claimed(hosts):
    old, young = hosts
    cell = old.cells[0]
    for work in hosts:
        train_to(work, cell, 2)
    publish(old, cell, 2)
    young.fence.claim(cell.name, young.folder(cell).root)

    train_to(old, cell, 4)
    for _ in range(2):  # again: what is lost is never claimed back by the same process
        with pytest.raises(Fenced, match=f"cell={cell.name}: taken over by process"):
            publish(old, cell, 4)
    assert not old.published(cell, 4)
    assert old.store.numbered(f"{cell.name}/resume", "step_") == [2]

    train_to(young, cell, 4)
    publish(young, cell, 4)
    assert young.published(cell, 4)
    assert young.store.verify().ok


def test_a_claim_in_the_midst_of_an_upload_stops_it_before_its_manifest(hosts, monkeypatch):
    old, young = hosts
    cell = old.cells[0]
    train_to(old, cell, 2)
    sent = old.store.backend.put

    def put(local, key):
        sent(local, key)
        if key.endswith("/weights"):
            young.fence.claim(cell.name, young.folder(cell).root)

    monkeypatch.setattr(old.store.backend, "put", put)
    with pytest.raises(Fenced):
        publish(old, cell, 2)
    assert old.store.manifest(f"{cell.name}/global_step_2") is None


def test_the_record_goes_when_the_cell_has_ended_and_nobody_writes_it_afterwards(hosts):
    old, young = hosts
    cell = old.cells[0]
    old.fence.claim(cell.name, old.folder(cell).root)
    train_to(young, cell, 2)
    publish(young, cell, 2)
    result = Result(end="finished", last_step=2, onset_step=None).model_dump_json(by_alias=True)
    write(young, cell, young.folder(cell).rollouts, "rollouts", step_000001="r")
    write(young, cell, young.folder(cell).logs, "logs", **{"result.json": result})
    seal(young, cell)
    assert young.result(cell) is not None
    assert RECORD not in young.store.backend.list(cell.name)
    with pytest.raises(Fenced, match="ended"):
        old.fence.check(cell.name)


def test_a_trainer_is_ended_within_a_look_and_not_by_a_store_that_is_away(hosts, monkeypatch):
    old, young = hosts
    cell, board = old.cells[0], Board(quiet=True)
    tail = Tail(cell.name, old.folder(cell).root / "train.log")
    monkeypatch.setattr(fence, "LOOK_EVERY_S", 0.0)
    old.fence.claim(cell.name, old.folder(cell).root)
    tick(old, cell, board, tail)

    def away(_):
        raise ConnectionError("down")

    with monkeypatch.context() as patched:
        patched.setattr(old.store.backend, "read", away)
        tick(old, cell, board, tail)
    young.fence.claim(cell.name, young.folder(cell).root)
    with pytest.raises(Fenced):
        tick(old, cell, board, tail)


def test_of_many_that_claim_at_once_one_holds_the_cell(hosts, tmp_path):
    work, _ = hosts
    fences = [Fence(work.store) for _ in range(8)]
    start = threading.Barrier(len(fences))

    def claim(number):
        start.wait()
        try:
            fences[number].claim("cell", tmp_path / str(number))
        except Fenced:
            return

    for i in range(len(fences)):
        (tmp_path / str(i)).mkdir()
    threads = [threading.Thread(target=claim, args=(i,)) for i in range(len(fences))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    holding = 0
    for f in fences:
        try:
            f.check("cell")
            holding += 1
        except Fenced:
            continue
    assert holding == 1
