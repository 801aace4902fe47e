"""What the tasks do to folders and the store: publish, take up, refuse, audit; each without a server."""

import importlib.util
import json
import threading
from pathlib import Path

import pytest

from evaluation.curves import RunEvidence
from evaluation.errors import IncompleteError, InputError, MachineError, Stopped
from evaluation.files import whole_folder, write_json
from evaluation.manifests import is_complete, write_manifest
from evaluation.problems import write_problems
from evaluation.problems.toy import generate
from evaluation.report import ReportInput, make_finding
from flows.experiments import EXPERIMENTS
from tasks import launch
from tasks.cells import command, fetch_resume, runtime_of, write_folder
from tasks.checkpoints import publish, publish_open_files, seal
from tasks.data import audit_work, check_machine
from tasks.models import locate_model, prompt_of
from tasks.progress import Board, Progress
from tasks.scores import evaluator_of, model_of, score
from tasks.settings import Settings
from tasks.wandb_results import entries_of, tell_wandb
from training.cell import MODELS
from training.folder import CellFile, Result


def make_folder(path, kind, work, cell, step=None, **files):
    with whole_folder(path) as partial:
        for name, text in files.items():
            (partial / name.replace("__", ".")).write_text(text)
        write_manifest(partial, kind, work.identity(cell).provenance(cell.name, step))


def train_to(work, cell, *steps):
    folder = work.folder(cell)
    folder.logs.mkdir(parents=True, exist_ok=True)
    folder.rollouts.mkdir(parents=True, exist_ok=True)
    for step in steps:
        for s in range(1, step + 1):
            folder.rollout(s).write_text(f"rollouts of {s}")
        folder.steps_jsonl.write_text("".join(json.dumps({"global_step": s}) + "\n" for s in range(1, step + 1)))
        make_folder(folder.resume(step), "resume", work, cell, step, steps__jsonl=folder.steps_jsonl.read_text())
        make_folder(folder.checkpoint(step), "checkpoint", work, cell, step, weights=f"w{step}")


def stored(work, cell):
    return sorted(work.store.backend.list(cell.name))


def test_publishing_sends_the_checkpoint_its_resume_state_and_the_records_so_far(make_work):
    work = make_work()
    cell = work.cells[0]
    train_to(work, cell, 2)
    publish(work, cell, 2)
    assert stored(work, cell) == [
        "generation.json",
        "global_step_2/MANIFEST.json",
        "global_step_2/weights",
        "logs/steps.jsonl",
        "resume/step_2/MANIFEST.json",
        "resume/step_2/steps.jsonl",
        "rollouts/step_000001.parquet",
        "rollouts/step_000002.parquet",
    ]
    assert work.store.verify().ok
    assert work.published(cell, 2)
    assert not list(work.folder(cell).root.glob("*.publish"))


def test_only_the_newest_two_resume_states_stay_and_no_half_of_an_older_one(make_work):
    work = make_work(steps=8)
    cell = work.cells[0]
    half = work.store.backend.root / cell.name / "resume" / "step_1"
    half.mkdir(parents=True)
    (half / "optimizer.pt").write_text("half of a killed upload")
    for step in (2, 4, 6):
        train_to(work, cell, step)
        publish(work, cell, step)
    assert work.store.numbered(f"{cell.name}/resume", "step_") == [4, 6]
    assert not [p for p in stored(work, cell) if p.startswith(("resume/step_1/", "resume/step_2/"))]
    assert work.store.verify().ok


def test_a_resume_state_that_was_rotated_away_is_no_failure_and_leaves_nothing(make_work):
    work = make_work()
    cell = work.cells[0]
    train_to(work, cell, 2)
    half = work.store.backend.root / cell.name / "resume" / "step_2"
    half.mkdir(parents=True)
    (half / "steps.jsonl").write_text("half of a killed upload")
    (work.folder(cell).resume(2) / "MANIFEST.json").unlink()  # the trainer is removing it
    publish(work, cell, 2)
    assert work.published(cell, 2)
    assert not [p for p in stored(work, cell) if p.startswith("resume/")]


def test_sealed_records_replace_the_open_ones(make_work):
    work = make_work()
    cell = work.cells[0]
    folder = work.folder(cell)
    train_to(work, cell, 2)
    publish(work, cell, 2)
    train_to(work, cell, 4)
    write_json(folder.result_json, Result(end="finished", last_step=4, onset_step=None))
    for part in (folder.logs, folder.rollouts):
        write_manifest(part, part.name, work.identity(cell).provenance(cell.name))
    assert work.result(cell) is None
    seal(work, cell)
    assert work.result(cell) == Result(end="finished", last_step=4, onset_step=None)
    part = next(p for p in (Path(work.store.url.removeprefix("file://")) / cell.name / "rollouts").glob("step_*"))
    part.write_bytes(part.read_bytes()[:1])
    assert work.result(cell) is None  # a damaged part is published again
    seal(work, cell)
    assert work.result(cell) is not None
    before = stored(work, cell)
    publish_open_files(work, cell)  # late: the records are closed
    assert stored(work, cell) == before
    assert work.store.verify().ok


def test_another_host_goes_on_from_the_stored_resume_state(make_work, tmp_path):
    work = make_work()
    cell = work.cells[0]
    train_to(work, cell, 2)
    publish(work, cell, 2)
    work.folder(cell).root.rename(tmp_path / "the other host's disk")
    fetch_resume(work, cell)
    folder = work.folder(cell)
    assert folder.resumes() == [2]
    assert is_complete(folder.resume(2))
    assert [json.loads(x)["global_step"] for x in folder.steps_jsonl.read_text().splitlines()] == [1, 2]
    assert sorted(p.name for p in folder.rollouts.iterdir()) == ["step_000001.parquet", "step_000002.parquet"]
    train_to(work, cell, 3)
    fetch_resume(work, cell)  # this disk is further now: nothing is fetched over it
    assert len(folder.steps_jsonl.read_text().splitlines()) == 3
    lost, kept = folder.rollout(1), folder.rollout(2)
    before = lost.read_bytes(), kept.stat().st_mtime_ns
    lost.unlink()
    fetch_resume(work, cell)  # but what it has lost since: without it the records could not be sealed
    assert (lost.read_bytes(), kept.stat().st_mtime_ns) == before


def test_a_checkpoint_whose_bytes_changed_on_this_disk_is_scored_from_the_store(make_work, caplog):
    work = make_work()
    cell = work.cells[0]
    train_to(work, cell, 2)
    publish(work, cell, 2)
    with model_of(work, cell, 2) as (path, _):
        assert Path(path) == work.folder(cell).checkpoint(2)
    (work.folder(cell).checkpoint(2) / "weights").write_text("w3")  # of the same size
    with model_of(work, cell, 2) as (path, _):
        assert (Path(path) / "weights").read_text() == "w2"
    assert "weights has other bytes than its manifest says; the store's copy is scored" in caplog.text
    stored_weights = work.store.backend.root / cell.name / "global_step_2" / "weights"
    stored_weights.write_text("w3")
    with pytest.raises(OSError, match="hash differs from its manifest; run `ablation verify`"), model_of(work, cell, 2):
        pass


def test_what_has_changed_since_its_manifest_is_not_published(make_work):
    work = make_work()
    cell = work.cells[0]
    train_to(work, cell, 2)
    (work.folder(cell).checkpoint(2) / "weights").write_text("w3")
    with pytest.raises(ValueError, match="weights has other bytes than its manifest says"):
        publish(work, cell, 2)
    assert not work.published(cell, 2)


def test_a_checkpoint_that_no_rerun_brings_back_is_named_with_its_damage(make_work):
    work = make_work()
    cell = work.cells[0]
    folder = work.folder(cell)
    train_to(work, cell, 2)
    train_to(work, cell, 4)
    write_json(folder.result_json, Result(end="finished", last_step=4, onset_step=None))
    for part in (folder.logs, folder.rollouts):
        write_manifest(part, part.name, work.identity(cell).provenance(cell.name))
    publish(work, cell, 4)
    seal(work, cell)
    (missing,) = work.unpublished(cell)
    assert missing == f"{cell.name}/global_step_2 (checkpoint)"
    damaged = next(p for p in sorted(folder.checkpoint(2).iterdir()) if p.name != "MANIFEST.json")
    damaged.write_bytes(b"")
    (missing,) = work.unpublished(cell)
    assert f"global_step_2: {damaged.name} has 0 bytes where its manifest says" in missing
    assert missing.endswith("restore it, or use another --runs folder)")


def test_a_folder_of_another_configuration_is_refused_and_a_runtime_is_not_part_of_it(make_work):
    work = make_work()
    cell = work.cells[0]
    write_folder(work, cell)
    write_folder(work, cell)
    found = CellFile.model_validate_json(work.folder(cell).cell_json.read_text())
    assert found.identity.fingerprint == work.identity(cell).fingerprint
    other = make_work(steps=6)
    assert other.cells[0].name == cell.name
    with pytest.raises(InputError, match="holds another configuration"):
        write_folder(other, other.cells[0])
    with pytest.raises(InputError, match=r"holds another run \(cell_config.steps: 6 -> 4\)"):  # before anything starts
        other.refuse_others()
    work.refuse_others()
    runtime = runtime_of(work, cell)
    assert (runtime.device, runtime.num_threads, runtime.sampler) == ("cpu", 1, "transformers")


def test_gpus_of_a_cell_are_its_processes(make_work, monkeypatch):
    work = make_work(needs_gpu=True)
    cell, folder = work.cells[0], work.folder(work.cells[0])
    for count, module in ((1, "training.run"), (2, "training.launch")):
        monkeypatch.setattr("tasks.cells.settings", lambda n=count: Settings(gpus=("0", "1"), gpus_per_cell=n))
        runtime = runtime_of(work, cell)
        assert (runtime.device, runtime.num_processes) == ("cuda", count)
        assert command(runtime, folder)[2:] == [module, str(folder.root)]
    monkeypatch.setattr("tasks.cells.settings", lambda: Settings(gpus_per_cell=63))
    with pytest.raises(InputError, match="num_processes=63: does not divide"):
        write_folder(work, cell)
    assert not folder.cell_json.exists()
    monkeypatch.setattr("tasks.cells.settings", lambda: Settings(gpus_per_cell=2))
    assert runtime_of(make_work(), cell).num_processes == 1


@pytest.mark.parametrize("part", ["checkpoint", "score"])
def test_a_store_of_another_configuration_is_refused_with_the_difference(make_work, part):
    other = make_work(steps=6)
    cell = other.cells[0]
    rel = (
        f"{cell.name}/global_step_2"
        if part == "checkpoint"
        else other.score_rel(cell, other.experiment.protocols[0], 2)
    )
    make_folder(other.runs / "x", part, other, cell, 2, weights="w")
    other.store.publish(other.runs / "x", rel)
    other.refuse_others()
    with pytest.raises(InputError, match="steps: 4 -> 6"):
        make_work().refuse_others()


def test_a_gpu_is_asked_for_before_anything_is_spent(make_work):
    work, full = make_work(), EXPERIMENTS["full"]
    check_machine(work.experiment, work.cells, Settings())
    with pytest.raises(MachineError, match="6 cells of 500 steps, 17 checkpoints each") as caught:
        check_machine(full, full.cells(), Settings())
    assert caught.value.exit_code == 3
    check_machine(full, full.cells(), Settings(gpus=("0",)))
    check_machine(full, full.cells(), Settings(launcher="deployment"))


def test_a_reporter_that_is_not_installed_is_refused_before_anything_is_spent(make_work):
    work = make_work()
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed here")
    here = Settings(report_to=("wandb",))
    with pytest.raises(MachineError, match=r"report_to=wandb: the package is not installed; .*`watch`.*REPORT_TO"):
        check_machine(work.experiment, work.cells, here)
    check_machine(work.experiment, work.cells, here.replace(launcher="deployment"))  # the hosts look


def test_reporters_are_handed_to_the_trainer_outside_its_identity(make_work, monkeypatch):
    work = make_work()
    before = work.identity(work.cells[0]).fingerprint
    monkeypatch.setenv("ABLATION_REPORT_TO", "tensorboard,trackio")
    runtime = runtime_of(work, work.cells[0])
    assert (runtime.report_to, runtime.experiment) == (("tensorboard", "trackio"), "micro")
    assert work.identity(work.cells[0]).fingerprint == before


def test_wandb_that_is_not_chosen_or_not_there_costs_nothing(make_work, monkeypatch, caplog):
    work = make_work()
    cell = work.cells[0]
    given = ReportInput(
        experiment="micro", question="", registered_sha256="r", model="toy", protocols=work.experiment.protocols,
        criterion=work.experiment.criterion, base={}, arm_labels={"nobuf": "x", "hardcd_lam0p1": "y"},
        runs=tuple(
            RunEvidence(
                label=c.name, arm=c.arm, lr=c.lr, seed=0, steps=4, checkpoints=(2, 4),
                end="finished" if c is cell else None,
            )
            for c in work.cells
        ),
    )  # fmt: skip
    finding = make_finding(given)
    monkeypatch.delenv("ABLATION_REPORT_TO", raising=False)
    tell_wandb(work, given, finding)
    assert not (work.runs / "wandb.json").exists()
    assert [e["run"]["name"] for e in entries_of(work, given, finding)] == [cell.name]  # only what has ended
    if importlib.util.find_spec("wandb") is None:
        monkeypatch.setenv("ABLATION_REPORT_TO", "wandb")
        tell_wandb(work, given, finding)
        assert "pass@k and class were not told to W&B: report_to=wandb: the package is not installed" in caplog.text


def test_what_a_trainer_says_is_shown_with_reward_gradient_norm_and_time_left(tmp_path, capsys):
    write_json(tmp_path / "p.json", {"step": 3, "steps": 9, "reward": 0.25, "grad_norm": 0.1234, "seconds_left": 61.2})
    board = Board()
    board.terminal = False
    board.show("toy_toy_nobuf_lr3e4", tmp_path / "p.json")
    assert "toy_toy_nobuf_lr3e4: step 3 of 9, reward 0.250, grad norm 0.123, 61 s left" in capsys.readouterr().err
    assert Progress(step=1, steps=2, reward="NaN", grad_norm="Infinity", seconds_left=0).text == (
        "reward NaN, grad norm Infinity, 0 s left"
    )
    assert Progress(step=1, steps=2, reward=0.5, seconds_left=0).grad_norm is None  # written by an older trainer


def test_an_evaluation_that_cannot_start_fails_its_scores_in_its_own_words(make_work):
    work = make_work()
    child = evaluator_of(work)
    with pytest.raises(InputError, match="no problems of toy_plus"):
        score(work, None, 0, child)
    child.close()
    assert not work.scored(None, 0)


def test_stopping_ends_a_score_that_waits(make_work):
    work = make_work()
    child = evaluator_of(work)
    threading.Timer(0.5, launch.STOPPING.set).start()
    with pytest.raises((Stopped, InputError)):
        score(work, None, 0, child)
    child.close()


def test_the_audit_stops_training_on_a_broken_reference_and_remembers_a_good_one(make_work):
    work = make_work()
    made = generate(0)
    train, held_out = list(made.train[:4]), list(made.held_out[:16])
    write_problems(Path(work.prepared.benchmarks["toy_plus"]), held_out)
    broken = train[0].replace(reference=f"def {train[0].entry_point}(*a):\n    return 'broken'\n")
    write_problems(Path(work.prepared.train), [broken, *train[1:]])
    with pytest.raises(IncompleteError, match=f"reference={broken.problem_id}: fails its own tests of train"):
        audit_work(work)
    write_problems(Path(work.prepared.train), train)
    assert "references pass: {'train': 4, 'toy_plus': 16}" in audit_work(work)
    assert "as audited before" in audit_work(work)
    for garbage in ("", "{", "[]", '{"schema": "audit/1"}', "null"):
        (work.runs / "data" / "audit.json").write_text(garbage)
        assert "references pass" in audit_work(work)


def test_models_are_known_by_their_bytes(tmp_path, monkeypatch):
    files = locate_model(MODELS["toy"], tmp_path)
    assert files.identity.startswith("sha256:")
    assert files.revision is None
    assert prompt_of(MODELS["toy"], files, "toy").rendering == "plain"
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(MachineError, match=r"model=Qwen/Qwen3.*: cannot be fetched"):
        locate_model(MODELS["qwen3_1p7b_base"], tmp_path)
