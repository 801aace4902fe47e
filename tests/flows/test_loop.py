"""The level-triggered loop, on real folders and a real store, with units that are plain threads."""

import errno
import threading
import time
from concurrent.futures import Future as LocalFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError

from evaluation.files import whole_folder, write_json
from evaluation.manifests import write_manifest
from flows.loop import Loop, Units
from tasks.checkpoints import publish, seal
from tasks.work import Work
from training.folder import Result


@dataclass
class Handle:
    wrapped_future: LocalFuture
    state = None

    def wait(self):
        self.wrapped_future.result()


@dataclass
class Crew:
    """Does every unit's work by writing what the real one would leave behind; keeps a list of what it did."""

    work: Work
    pause_s: float = 0.0
    diverge_at: dict = field(default_factory=dict)
    broken: set = field(default_factory=set)
    passing: dict = field(default_factory=dict)
    done: list = field(default_factory=list)
    busy: dict = field(default_factory=lambda: {"train": 0, "score": 0})
    most: dict = field(default_factory=lambda: {"train": 0, "score": 0})
    together: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))

    def submit(self, kind, action, *key, after=()):
        def body():
            for handle in after:
                handle.wrapped_future.result()
            with self.lock:
                self.done.append((kind, *key))
                if kind in self.busy:
                    self.busy[kind] += 1
                    self.most[kind] = max(self.most[kind], self.busy[kind])
                    self.together |= all(self.busy.values())
            try:
                if (kind, *key) in self.broken:
                    raise RuntimeError("broken")
                if error := self.passing.pop((kind, *key), None):
                    raise error
                action()
            finally:
                with self.lock:
                    if kind in self.busy:
                        self.busy[kind] -= 1

        return Handle(self.pool.submit(body))

    def units(self, publishing=True, scoring=True):
        return Units(
            train=lambda c: self.submit("train", lambda: self.train(c), c.name),
            publish=(lambda c, s: self.submit("publish", lambda: publish(self.work, c, s), c.name, s))
            if publishing
            else None,
            seal=(lambda c: self.submit("seal", lambda: seal(self.work, c), c.name)) if publishing else None,
            score=(lambda c, s, after: self.submit("score", lambda: self.score(c, s), c and c.name, s, after=after))
            if scoring
            else None,
        )

    def train(self, cell):
        folder, identity = self.work.folder(cell), self.work.identity(cell)
        end = self.diverge_at.get(cell.name)
        for step in cell.checkpoints:
            time.sleep(self.pause_s)
            if end is not None and step >= end:
                break
            for path, kind in ((folder.resume(step), "resume"), (folder.checkpoint(step), "checkpoint")):
                if not path.exists():
                    with whole_folder(path) as partial:
                        (partial / "weights").write_bytes(b"%d" % step)
                        write_manifest(partial, kind, identity.provenance(cell.name, step))
        folder.rollouts.mkdir(parents=True, exist_ok=True)
        last = cell.steps if end is None else end
        write_json(folder.result_json, Result(end="diverged" if end else "finished", last_step=last, onset_step=end))
        for path, kind in ((folder.logs, "logs"), (folder.rollouts, "rollouts")):
            write_manifest(path, kind, identity.provenance(cell.name))

    def score(self, cell, step):
        time.sleep(self.pause_s)
        for protocol in self.work.experiment.protocols:
            out = self.work.runs / self.work.score_rel(cell, protocol, step)
            out.mkdir(parents=True, exist_ok=True)
            (out / "score.json").write_text("{}")
            write_manifest(out, "score", self.work.identity(cell).provenance(cell and cell.name, step))
            self.work.store.publish(out, self.work.score_rel(cell, protocol, step))


def run(work, crew, **options):
    loop = Loop(work, crew.units(), options.pop("max_training", 2), look_every_s=0.01, **options)
    loop.run()
    return loop


def test_everything_once_and_a_second_pass_does_nothing(make_work):
    work = make_work()
    crew = Crew(work)
    run(work, crew)
    assert work.missing() == []
    assert len(crew.done) == len(set(crew.done))
    kinds = [k for k, *_ in crew.done]
    assert {k: kinds.count(k) for k in set(kinds)} == {"train": 2, "publish": 4, "seal": 2, "score": 5}
    again = Crew(work)
    run(work, again)
    assert again.done == []


@pytest.mark.parametrize("lost", ["score", "checkpoint", "records"])
def test_only_what_is_missing_is_done_again(make_work, lost):
    work = make_work()
    run(work, Crew(work))
    cell = work.cells[0]
    rel = {
        "score": work.score_rel(cell, work.experiment.protocols[0], 2),
        "checkpoint": f"{cell.name}/global_step_2",
        "records": f"{cell.name}/logs",
    }[lost]
    (Path(work.store.backend.root) / rel / "MANIFEST.json").unlink()
    crew = Crew(work)
    run(work, crew)
    expected = {
        "score": ("score", cell.name, 2),
        "checkpoint": ("publish", cell.name, 2),
        "records": ("seal", cell.name),
    }
    assert crew.done == [expected[lost]]
    assert work.missing() == []


def test_a_checkpoint_is_scored_while_its_cell_trains_on(make_work):
    work = make_work()
    crew = Crew(work, pause_s=0.15)
    run(work, crew)
    first_score = next(i for i, (k, name, *_) in enumerate(crew.done) if k == "score" and name)
    assert first_score < crew.done.index(("publish", crew.done[first_score][1], 4))
    assert crew.together


def test_a_failed_unit_is_not_tried_again_and_the_others_go_on(make_work):
    work = make_work()
    broken = work.cells[0].name
    crew = Crew(work, broken={("train", broken), ("score", None, 0)})
    run(work, crew)
    assert crew.done.count(("train", broken)) == 1
    assert work.missing() == [f"{work.model.name}/global_step_0 (score)", f"{broken} (not ended)"]


def test_records_are_sealed_only_when_every_checkpoint_is_stored(make_work):
    work = make_work()
    name = work.cells[0].name
    crew = Crew(work, broken={("publish", name, 2)})
    run(work, crew)
    assert ("seal", name) not in crew.done
    assert f"{name} (not ended)" in work.missing()
    mended = Crew(work)
    run(work, mended)
    assert work.missing() == []
    assert ("train", name) not in mended.done


def test_a_diverged_cell_is_complete_without_its_later_checkpoints(make_work):
    work = make_work()
    name = work.cells[1].name
    crew = Crew(work, diverge_at={name: 3})
    run(work, crew)
    assert work.missing() == []
    assert ("score", name, 2) in crew.done
    assert ("score", name, 4) not in crew.done


def test_cells_wait_for_a_slot(make_work):
    work = make_work(lrs=(1e-4, 3e-4, 1e-3))
    crew = Crew(work, pause_s=0.02)
    run(work, crew, max_training=2)
    assert crew.most["train"] == 2
    assert work.missing() == []


def test_scores_wait_for_a_slot_and_none_is_lost(make_work):
    work = make_work(lrs=(1e-4, 3e-4, 1e-3))
    crew = Crew(work, pause_s=0.02)
    run(work, crew, max_scoring=1)
    assert crew.most["score"] == 1
    assert work.missing() == []


def test_an_only_gpu_is_never_trained_and_scored_on_by_plan(make_work):
    work = make_work()
    crew = Crew(work)
    run(work, crew, max_training=1, scores_first=True)
    trains = [i for i, (k, *_) in enumerate(crew.done) if k == "train"]
    assert crew.done[0] == ("score", None, 0)
    second = crew.done[trains[1]][1]
    assert all(
        i < trains[1] for i, (k, name, *_) in enumerate(crew.done) if k == "score" and name not in (None, second)
    )


def test_a_parent_without_the_disks_only_trains_and_scores(make_work):
    work = make_work()
    host = Crew(work)

    def whole_cell(cell):
        host.train(cell)
        for step in cell.checkpoints:
            publish(work, cell, step)
        seal(work, cell)

    crew = Crew(work)
    units = crew.units(publishing=False)
    units = Units(lambda c: crew.submit("train", lambda: whole_cell(c), c.name), None, None, units.score)
    Loop(work, units, 9, look_every_s=0.01).run()
    assert work.missing() == []
    assert {k for k, *_ in crew.done} == {"train", "score"}


class Outage:
    """A storage system that is out of reach while `down`."""

    def __init__(self, backend):
        self.backend, self.down, self.refused = backend, False, 0

    def __getattr__(self, name):
        if self.down:
            self.refused += 1
            raise ConnectionError(f"{name}: no route to the store")
        return getattr(self.backend, name)


def test_cells_train_on_while_the_store_is_out_of_reach_and_the_backlog_is_published_later(make_work):
    work = make_work()
    crew = Crew(work, pause_s=0.05)
    work.store.backend = outage = Outage(work.store.backend)
    loop = Loop(work, crew.units(), 2, look_every_s=0.01, again_every_s=0.05)
    thread = threading.Thread(target=loop.run)
    thread.start()
    while ("train", work.cells[0].name) not in crew.done:
        time.sleep(0.005)
    outage.down = True
    while not all(work.ended_here(c) for c in work.cells if ("train", c.name) in crew.done):
        time.sleep(0.01)
    time.sleep(0.3)  # longer than a look and a try again
    assert outage.refused > 2
    outage.down = False
    thread.join(60)
    assert not thread.is_alive()
    assert work.missing() == []
    assert [d for d in crew.done if d[0] == "train"] == [("train", c.name) for c in work.cells]


def test_patience_with_a_store_ends(make_work):
    work = make_work()
    work.store.backend = outage = Outage(work.store.backend)
    outage.down = True
    with pytest.raises(ConnectionError, match="no route"):
        Loop(work, Crew(work).units(), 2, look_every_s=0.01, again_every_s=0.02, patience_s=0.1).run()


def no_slot(cause):
    """What a task with a tag ends with when the server cannot be asked for a slot."""
    error = ConcurrencySlotAcquisitionError("Unable to acquire concurrency slots on ['tag:score']")
    error.__cause__ = cause
    return error


def answered(status):
    request = httpx.Request("POST", "http://server")
    return httpx.HTTPStatusError(str(status), request=request, response=httpx.Response(status, request=request))


AWAY = {
    "no connection": httpx.ConnectError("All connection attempts failed"),
    "no answer": httpx.ReadTimeout(""),
    "busy": answered(503),
    "no slot": no_slot(httpx.ConnectError("All connection attempts failed")),
    "no slot, busy": no_slot(answered(503)),
}


@pytest.mark.parametrize("why", AWAY)
def test_what_failed_for_want_of_the_server_is_submitted_again_whatever_it_is(make_work, why):
    work = make_work()
    name = work.cells[0].name
    once = [("train", name), ("publish", name, 2), ("seal", name), ("score", name, 2), ("score", None, 0)]
    crew = Crew(work, passing=dict.fromkeys(once, AWAY[why]))
    run(work, crew, again_every_s=0.02)
    assert work.missing() == []
    assert not crew.passing
    assert {unit: crew.done.count(unit) for unit in once} == dict.fromkeys(once, 2)


@pytest.mark.parametrize("error", [answered(404), no_slot(answered(422)), no_slot(RuntimeError("other"))])
def test_what_the_server_refuses_is_not_tried_again(make_work, error):
    work = make_work()
    crew = Crew(work, passing={("score", None, 0): error})
    run(work, crew, again_every_s=0.02)
    assert crew.done.count(("score", None, 0)) == 1
    assert work.missing() == [f"{work.model.name}/global_step_0 (score)"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.EACCES, None])
def test_what_a_person_must_mend_is_not_waited_for(make_work, number):
    work = make_work()

    def broken(local, key):
        raise OSError(number, "refused", str(local)) if number else OSError("reads back other bytes")

    work.store.backend.put = broken
    crew = Crew(work)
    run(work, crew, again_every_s=0.02)
    published = [d for d in crew.done if d[0] == "publish"]
    assert len(published) == len(set(published)) > 0
