"""The command's manners: one answer on stdout, everything else on stderr, documented exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evaluation.manifests import Provenance, write_manifest
from flows.cli import build_parser, main
from flows.commands import COMMANDS
from training.store import open_store

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
CONTRACT = ["run", "plan", "split", "score", "evaluate", "report", "verify", "publish", "doctor"]


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict, str]:
    """Run with --json in this process; return exit code, document and stderr."""
    capsys.readouterr()
    code = main([*words, "--json"])
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    return code, json.loads(out), err


def spawn(*words: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **more,
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a").write_text("aa")
    write_manifest(folder, "checkpoint", Provenance())
    open_store(str(tmp_path / "store")).publish(folder, "x/global_step_2")
    return tmp_path / "store"


def test_the_subcommands_of_the_contract() -> None:
    assert list(COMMANDS) == CONTRACT


@pytest.mark.parametrize("command", [None, *CONTRACT])
def test_help_is_on_stdout_and_names_every_flag(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*([command] if command else []), "--help"])
    out, err = capsys.readouterr()
    assert left.value.code == 0 and err == ""
    assert "--json" in out and "--debug" in out


def test_the_flags_are_the_words_of_the_flow_parameters() -> None:
    from flows.parameters import Parameters

    flags = vars(build_parser().parse_args(["run", "smoke"]))
    assert set(Parameters.model_fields) - {"end_by"} <= set(flags)


@pytest.mark.parametrize("place", ["before", "after"])
def test_json_may_stand_before_or_after_the_subcommand(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--json", "plan", "full"] if place == "before" else ["plan", "full", "--json"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == "plan/1" and err == ""


def test_plan_has_the_keys_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan, _ = answer(capsys, "plan", "full", "--hosts", "2", "--slots", "3")
    assert code == 0
    assert {"schema", "experiment", "cells", "samples_per_checkpoint", "totals", "assumptions"} <= plan.keys()
    for cell in plan["cells"]:
        assert {"name", "model", "arm", "lr", "seed", "steps", "epochs", "checkpoints"} <= cell.keys()
    assert {"cells", "checkpoints", "samples", "checkpoint_gb", "sample_gb", "gpu_hours"} <= plan["totals"].keys()
    assert {"makespan_h", "critical_path_h"} <= plan["schedule"].keys()
    assert (len(plan["cells"]), plan["samples_per_checkpoint"]) == (6, 104_640)


def test_cells_are_listed_with_commas_or_again(capsys: pytest.CaptureFixture[str]) -> None:
    names = [c["name"] for c in answer(capsys, "plan", "full")[1]["cells"]]
    for words in (["--cells", f"{names[1]}, {names[4]}"], ["--cells", names[1], "--cells", names[4]]):
        found = answer(capsys, "plan", "full", *words)[1]
        assert [c["name"] for c in found["cells"]] == [names[1], names[4]]


def test_split_of_the_real_files(capsys: pytest.CaptureFixture[str]) -> None:
    mbpp, plus = SHARED / "data" / "mbpp.jsonl", SHARED / "data" / "MbppPlus-v0.2.0.jsonl"
    if not mbpp.is_file():
        pytest.skip("needs ../shared/data")
    code, split, err = answer(capsys, "split", "--mbpp", str(mbpp), "--mbpp-plus", str(plus))
    assert (code, err) == (0, "")
    assert split["counts"] == {"train": 320, "plus": 378, "test": 276, "canonical_test": 500}
    assert split["sha256"]["train"].startswith("2b51d00c") and split["sha256"]["test"].startswith("918b42ee")
    assert split["ids"]["train"] == sorted(split["ids"]["train"]) and sum(split["ids"]["train"]) == 244_169
    assert main(["split", "--mbpp", str(mbpp), "--mbpp-plus", str(plus)]) == 0
    text = capsys.readouterr().out
    assert "mbpp_test276 276" in text and "canonical test split has 500" in text  # SPLIT-001


def test_verify_says_zero_or_one(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, err = answer(capsys, "verify", str(store))
    assert (code, found["ok"], found["folders"], found["problems"]) == (0, True, 1, [])
    assert "checking x/global_step_2" in err
    (store / "x" / "global_step_2" / "a").write_text("ab")
    code, found, _ = answer(capsys, "verify", store.as_uri())
    assert (code, found["ok"]) == (1, False)
    assert found["problems"] == [
        {"path": "x/global_step_2/a", "kind": "hash", "detail": found["problems"][0]["detail"]}
    ]


def test_doctor_tells_every_check_and_decides_by_the_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = answer(capsys, "doctor")
    checks = {c["name"]: c for c in found["checks"]}
    assert {"python", "packages", "cores and memory", "gpu", "engine", "judge cage", "store", "disk", "hub"} <= set(
        checks
    )
    assert all(c["detail"] for c in checks.values())
    assert found["ok"] == all(c["ok"] for c in checks.values() if c["needed"])
    assert code == (0 if found["ok"] else 3)
    assert not checks["hub"]["needed"] and not checks["gpu"]["needed"]
    code, found, _ = answer(capsys, "doctor", "--experiment", "full")
    checks = {c["name"]: c for c in found["checks"]}
    assert checks["gpu"]["needed"] and checks["hub"]["needed"]
    if not checks["gpu"]["ok"]:
        assert code == 3


def test_doctor_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(capsys, "doctor", "--store", str(tmp_path / "store"))
    assert [p for p in (tmp_path / "store").rglob("*") if p.is_file()] == []


def test_light_commands_start_within_a_second_of_processor_time() -> None:
    """About 0.35 s on a quiet core; scipy alone would take another second."""
    code = (
        "import resource, sys\n"
        "from flows.cli import main\n"
        "main(['plan', 'full', '--json'])\n"
        "u = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(u.ru_utime + u.ru_stime, file=sys.stderr)\n"
    )
    seconds = [
        float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stderr)
        for _ in range(3)
    ]
    assert min(seconds) < 1


def test_what_a_library_prints_is_no_part_of_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    COMMANDS_PLAN = COMMANDS["plan"]

    def loud(args: object) -> object:
        print("progress 1/2")
        return COMMANDS_PLAN.execute(args)  # type: ignore[arg-type]

    import dataclasses

    COMMANDS["plan"] = dataclasses.replace(COMMANDS_PLAN, execute=loud)  # type: ignore[arg-type]
    try:
        _, plan, err = answer(capsys, "plan", "full")
    finally:
        COMMANDS["plan"] = COMMANDS_PLAN
    assert plan["schema"] == "plan/1" and "progress 1/2" in err


def test_a_reader_that_leaves_changes_nothing() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "plan", "ladder"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.wait(30) == 0
    assert child.stderr.read() == b""
    child.stderr.close()


def test_file_names_that_are_no_text_do_not_break_the_line() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "flows.cli", "verify", b"/nowhere/\xff\xe2\x98\x83", "--json"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"},
    )
    assert found.returncode == 2
    assert json.loads(found.stdout)["exit_code"] == 2
    assert found.stderr.startswith(b"error: store=file:///nowhere/") and found.stderr.count(b"\n") == 1


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_exits_75_and_says_that_the_same_command_goes_on(store: Path, sent: signal.Signals) -> None:
    os.mkfifo(store / "x" / "global_step_2" / "pipe")  # a reader of this would wait for ever
    big = store / "x" / "global_step_4"
    big.mkdir()
    with (big / "a").open("wb") as f:
        f.truncate(60 << 30)  # sparse: hashing it takes a minute
    manifest = (store / "x" / "global_step_2" / "MANIFEST.json").read_text()
    (big / "MANIFEST.json").write_text(manifest.replace('"size_bytes": 2', f'"size_bytes": {60 << 30}'))
    child = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "verify", str(store)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs inherit "ignored"
    )
    assert child.stderr is not None
    for line in child.stderr:
        if "global_step_4" in line:
            break
    time.sleep(0.2)
    child.send_signal(sent)
    assert child.wait(30) == 75
    assert child.stderr.read().startswith("error: signal=INT or TERM: stopped; the same command goes on")
    child.stderr.close()


@pytest.mark.campaign
def test_doctor_proves_exact_resume_here() -> None:
    from flows.commands.proof import prove_resume

    full, lora = prove_resume()
    assert (full.name, lora.name) == ("exact resume", "exact resume, LoRA")
    for check in (full, lora):
        assert check.ok and "weights" in check.detail
    assert full.detail != lora.detail


def test_score_judges_a_file_and_writes_what_the_contract_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from evaluation.problems import load_benchmark

    right, wrong = load_benchmark("toy_plus")[:2]
    rows = [
        {"task_id": right.problem_id, "solution": right.reference},
        {"task_id": wrong.problem_id, "solution": f"def {wrong.entry_point}(*args): return None"},
    ]
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps(r) + "\n" for r in rows))
    flags = ["--benchmark", "toy_plus", "--partial", "--no-cache", "--out", str(tmp_path / "out"), "--workers", "1"]
    code, score, _ = answer(capsys, "score", str(samples), *flags)
    assert (code, score["schema"], score["benchmark"]) == (0, "score/1", "toy_plus")
    assert score["outcomes"] == {"pass": 1, "fail": 1, "timeout": 0, "harness_error": 0}
    assert score["pass_at_k"]["plus"]["1"]["value"] == 0.5
    assert score["problems"][right.problem_id]["plus"] == 1
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "verdicts.jsonl",
        "score.json",
        "samples_eval_results.json",
    }
    assert main(["score", str(samples), *flags]) == 0
    assert "2 of 128 problems x 1: 1 pass, 1 fail" in capsys.readouterr().out


@pytest.mark.slow
def test_evaluate_draws_judges_and_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--benchmark", "toy_plus", "--n", "2", "--num-problems", "8", "--out", str(tmp_path / "out")]
    words = ["evaluate", str(ROOT / "training" / "toy_model"), *flags]
    code, score, err = answer(capsys, *words)
    assert (code, score["n"], score["num_problems"]) == (0, 2, 8)
    assert "16 of 16 samples" in err
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"samples.jsonl", "verdicts.jsonl", "score.json", "MANIFEST.json"}
    assert not (tmp_path / "out.work").exists()
    drawn = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]  # EVAL-127
    assert len({(r["task_id"], r["index"]) for r in drawn}) == len(drawn) == 16
    assert len({r["completion"] for r in drawn}) > 8
    assert answer(capsys, *words)[1] == score
    assert answer(capsys, *words, "--seed", "1")[0] == 2  # another evaluation does not overwrite this one
