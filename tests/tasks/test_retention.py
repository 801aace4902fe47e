"""The local copy of a published checkpoint: when it goes, when it stays, and what a trainer makes of its absence."""

import shutil
from dataclasses import replace

import pytest

from evaluation.files import whole_folder, write_json
from evaluation.manifests import MANIFEST, write_manifest
from tasks.checkpoints import publish
from tasks.retention import reading, spare, spare_all
from tasks.scores import model_of
from training.folder import Result


def write(work, cell, path, kind, step):
    with whole_folder(path) as partial:
        (partial / "weights").write_text(f"w{step}")
        write_manifest(partial, kind, work.identity(cell).provenance(cell.name, step))


def train_to(work, cell, step):
    folder = work.folder(cell)
    for path, kind in ((folder.resume(step), "resume"), (folder.checkpoint(step), "checkpoint")):
        write(work, cell, path, kind, step)


def score_in_store(work, cell, step):
    for protocol in work.experiment.protocols:
        rel = work.score_rel(cell, protocol, step)
        write(work, cell, work.runs / rel, "score", step)
        work.store.publish(work.runs / rel, rel)


@pytest.fixture
def trained(make_work):
    work = make_work()
    train_to(work, work.cells[0], 2)
    return work, work.cells[0]


def test_it_stays_until_it_is_published_and_scored(trained):
    work, cell = trained
    local = work.folder(cell).checkpoint(2)
    assert not spare(work, cell, 2)
    publish(work, cell, 2)
    assert local.is_dir()  # its score is still to be made, from this disk
    score_in_store(work, cell, 2)
    assert spare(work, cell, 2)
    assert not local.exists()
    assert work.store.verify().ok
    with model_of(work, cell, 2) as (path, _):
        assert path.endswith(f"fetched/{cell.name}/global_step_2")


def test_where_another_host_scores_it_goes_with_its_upload(trained):
    work, cell = trained
    work = replace(work, scores_here=False)
    publish(work, cell, 2)
    assert not work.folder(cell).checkpoint(2).exists()
    assert work.folder(cell).resumes() == [2]


def test_whoever_reads_it_keeps_it(trained):
    work, cell = trained
    publish(work, cell, 2)
    score_in_store(work, cell, 2)
    local = work.folder(cell).checkpoint(2)
    with reading(local) as first, reading(local) as second:
        assert first and second
        assert not spare(work, cell, 2)
        assert (local / "weights").read_text() == "w2"
    assert spare(work, cell, 2)
    with reading(local) as there:
        assert not there


def test_what_a_kill_left_goes_at_the_next_start(trained):
    work, cell = trained
    publish(work, cell, 2)
    score_in_store(work, cell, 2)
    local = work.folder(cell).checkpoint(2)
    (local / MANIFEST).unlink()  # killed while it was removed
    spare_all(work)
    assert not local.exists()


def test_a_damaged_upload_keeps_the_copy(trained):
    work, cell = trained
    publish(work, cell, 2)
    score_in_store(work, cell, 2)
    (work.store.backend.root / cell.name / "global_step_2" / "weights").unlink()
    assert not spare(work, cell, 2)
    publish(work, cell, 2)
    assert work.published(cell, 2)


def test_a_trainer_does_not_write_again_what_the_store_has(trained):
    from training.callbacks import make_checkpoint
    from training.folder import CellFile

    work, cell = trained
    publish(work, cell, 2)
    score_in_store(work, cell, 2)
    spare(work, cell, 2)
    identity = work.identity(cell)
    cell_file = CellFile(
        cell=cell, prompt=work.prompt, split_sha256=identity.split_sha256, revisions=identity.revisions
    )
    make_checkpoint(work.folder(cell), cell_file, None, None, 2)  # neither model nor tokenizer is touched
    assert not work.folder(cell).checkpoint(2).exists()


def test_with_another_store_the_line_says_where_the_checkpoint_is(trained):
    work, cell = trained
    publish(work, cell, 2)
    score_in_store(work, cell, 2)
    spare(work, cell, 2)
    train_to(work, cell, 4)
    folder = work.folder(cell)
    write_json(folder.result_json, Result(end="finished", last_step=4, onset_step=None))
    write_manifest(folder.logs, "logs", identity := work.identity(cell).provenance(cell.name))
    folder.rollouts.mkdir()
    write_manifest(folder.rollouts, "rollouts", identity)
    shutil.rmtree(work.store.backend.root)
    for part in (folder.rollouts, folder.logs):
        work.store.publish(part, f"{cell.name}/{part.name}")
    (first, _) = work.unpublished(cell)
    assert f"its copy here went when {work.store.url} had it: use that store, or another --runs folder" in first
