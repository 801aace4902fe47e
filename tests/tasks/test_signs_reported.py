"""A rate of 1e-1 on the small model, trained, scored and reported: what broke, since when, and the report."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from evaluation.curves import RunEvidence
from evaluation.findings import Finding
from evaluation.problems import prepare
from evaluation.report import ReportInput
from flows.experiments import EXPERIMENTS
from tasks.cells import train
from tasks.checkpoints import publish, seal
from tasks.models import locate_model, prompt_of
from tasks.progress import Board
from tasks.reports import gather, publish_report
from tasks.scores import evaluator_of, score
from tasks.wandb_results import entries_of
from tasks.work import Work
from training.cell import MODELS
from training.folder import Result
from training.store import open_store

STEPS = 24
"""At least 20: shorter runs are never called collapsed."""


@dataclass(frozen=True)
class Ended:
    """What the rate left behind."""

    work: Work
    given: ReportInput
    finding: Finding

    @property
    def runs(self) -> Iterator[tuple[RunEvidence, Result, list[dict[str, Any]]]]:
        for cell, run in zip(self.work.cells, self.given.runs, strict=True):
            result = self.work.result(cell)
            assert result is not None
            raw = self.work.store.read(f"{cell.name}/logs/steps.jsonl")
            assert raw is not None
            yield run, result, [json.loads(line) for line in raw.decode().splitlines()]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    root = tmp_path_factory.mktemp("rate")
    experiment = EXPERIMENTS["micro"].replace(lrs=(0.1,), steps=STEPS, stride=STEPS)
    benchmarks = [p.benchmark for p in experiment.protocols]
    prepared = prepare(experiment.benchmark, experiment.data_seed, benchmarks, root / "data", None, None)
    model = MODELS[experiment.model]
    files = locate_model(model, root)
    prompt = prompt_of(model, files, experiment.benchmark)
    store = open_store(str(root / "store"))
    work = Work(experiment, experiment.cells(), root / "runs", store, prepared, files, prompt)
    child = evaluator_of(work)
    score(work, None, 0, child)
    for cell in work.cells:
        train(work, cell, Board(quiet=True))
        for step in work.folder(cell).checkpoints():
            publish(work, cell, step)
            score(work, cell, step, child)
        seal(work, cell)
    child.close()
    given = gather(store, experiment, work.cells, work.missing(), prepared.contamination)
    return Ended(work, given, publish_report(store, given, root / "report", {}))


def broken_off(row: dict[str, Any]) -> bool:
    return any(not math.isfinite(float(row[k])) for k in ("reward", "loss", "grad_norm"))


def test_every_run_is_called_diverged_or_collapsed_with_the_onset_that_its_log_gives(ended: Ended) -> None:
    assert {r.class_ for r in ended.finding.runs} <= {"diverged", "collapsed"}
    for (_, result, rows), found in zip(ended.runs, ended.finding.runs, strict=True):
        if found.class_ == "diverged":
            assert result.end == "diverged"
            assert found.onset_step == result.onset_step == rows[-1]["global_step"]
            assert not any(map(broken_off, rows[:-1]))
            continue
        assert (result.end, len(rows)) == ("finished", STEPS)  # a collapse trains on
        rewards = [row["reward"] for row in rows]
        means = [sum(rewards[max(0, t - 10) : t]) / min(t, 10) for t in range(1, STEPS + 1)]
        low = [t >= 3 and means[t - 1] < max(means[2:t]) / 2 for t in range(1, STEPS + 1)]
        assert low[-1]
        assert found.onset_step == max(t for t in range(1, STEPS + 1) if all(low[t - 1 :]) and not low[t - 2])


def test_its_signs_are_those_of_its_log(ended: Ended) -> None:
    for run, result, rows in ended.runs:
        assert len(rows) >= 5
        flat = [row["varied_groups"] == 0 for row in rows]
        limit = ended.work.experiment.grpo.max_new_tokens
        long = [row["mean_tokens"] >= 0.9 * limit or row["truncated_fraction"] >= 0.9 for row in rows]
        expected = {
            name: next(t + 1 for t in range(len(rows)) if all(shown[t : t + 5]) and t + 5 <= len(rows))
            for name, shown in (("constant_reward", flat), ("length_explosion", long))
        }
        assert {s.name: s.onset_step for s in result.signs if s.name in expected} == expected
        assert run.signs[0].startswith(f"{result.signs[0].name.replace('_', ' ')}: ")


def test_the_report_comes_out_and_shows_them(ended: Ended) -> None:
    assert ended.given.missing == ()
    assert ended.work.store.verify().ok
    raw = ended.work.store.read("reports/micro/report.md")
    assert raw is not None
    for run, result, _ in ended.runs:
        for sign in result.signs:
            assert f"- {run.label}: {sign.name.replace('_', ' ')}: {sign.detail}" in raw.decode()


def test_what_wandb_would_be_told_is_what_the_report_says(ended: Ended) -> None:
    entries = list(entries_of(ended.work, ended.given, ended.finding))
    assert [e["run"]["name"] for e in entries] == [c.name for c in ended.work.cells]
    for entry, found, cell in zip(entries, ended.finding.runs, ended.work.cells, strict=True):
        assert ended.work.identity(cell).fingerprint.startswith(entry["run"]["id"])
        assert entry["run"]["group"] == "micro"
        assert (entry["summary"]["class"], entry["summary"]["onset_step"]) == (found.class_, found.onset_step)
        base, *_ = entry["steps"]
        assert base["train/global_step"] == 0
        assert 0 <= base["eval/toy_plus/pass@1"] <= base["eval/toy_plus/pass@2"] <= 1
        assert Path(entry["dir"]) == ended.work.folder(cell).root
