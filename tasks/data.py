"""Before anything trains: preflight, the split, the model's prompt specification, and the audits that gate training."""

import http.client
import importlib.util
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from prefect import task

from evaluation.errors import IncompleteError, MachineError
from evaluation.exact import audit as audit_judge
from evaluation.exact import open_judge
from evaluation.files import sha256_file, write_json
from evaluation.problems import Prepared, prepare, read_problems
from evaluation.prompts import PromptSpec
from evaluation.records import Problem, Program
from evaluation.scores import EXCEPTED
from tasks.models import ModelFiles, locate_model, prompt_of
from tasks.retries import ONCE_EACH
from tasks.settings import Settings, settings
from tasks.work import Work
from training.cell import MODELS, Cell, Model
from training.experiment import Experiment
from training.reporters import refuse_absent

logger = logging.getLogger(__name__)

SERVICE_PATIENCE_S = 20.0
"""For its first answer."""


def check_machine(experiment: Experiment, cells: Sequence[Cell], settings: Settings) -> None:
    """Refuse at once what cannot work here, with what is missing and what would run; nothing is written.

    Raises:
        MachineError: no GPU for cells that need one, or a reporter that is not installed.
    """
    needs_gpu = experiment.needs_gpu or MODELS[cells[0].model].needs_gpu
    if settings.launcher == "process" and needs_gpu and not settings.gpus:
        miniature = "score_centering_smoke" if experiment.criterion.rule == "drop" else "smoke"
        would = f"{len(cells)} cells of {cells[0].steps} steps, {len(cells[0].checkpoints)} checkpoints each"
        raise MachineError(
            "gpu",
            "none",
            f"{experiment.name} needs a GPU in this launcher ({would} would run)",
            f"run on a GPU host, set ABLATION_LAUNCHER=deployment with workers, or try `ablation run {miniature}`",
        )
    if settings.launcher == "process":
        refuse_absent(settings.report_to)


def check_service(cells: Sequence[Cell], settings: Settings) -> None:
    """Refuse at once a service that cannot be used from here, where it trains the cells and no other host asks it.

    Raises:
        MachineError: its SDK is not installed, there is no key, or nobody answers where it is said to be.
    """
    if settings.launcher != "process" or cells[0].backend != "tinker":
        return
    if importlib.util.find_spec("tinker") is None:
        raise MachineError("backend", "tinker", "its SDK is not installed", "pip install '.[tinker]'")
    if not settings.service_key:
        raise MachineError("TINKER_API_KEY", "", "there is no key for the service", "set it, or `tinker auth login`")
    url = settings.service_url
    try:
        if url is not None:
            urllib.request.urlopen(url, timeout=SERVICE_PATIENCE_S).close()
    except urllib.error.HTTPError:  # somebody is there
        pass
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise MachineError("TINKER_BASE_URL", url, " ".join(str(e).split()), "check address and network") from e


@task(name="split", task_run_name="split {experiment.benchmark}", **ONCE_EACH)
def split(
    experiment: Experiment, out: Path, mbpp: str | None, mbpp_plus: str | None, gsm8k: str | None = None
) -> Prepared:
    """Write the problems of every part and the split that defines them."""
    benchmarks = [p.benchmark for p in experiment.protocols]
    return prepare(experiment.benchmark, experiment.data_seed, benchmarks, out, mbpp, mbpp_plus, gsm8k)


@task(name="base model", task_run_name="find {model.name}", **ONCE_EACH)
def resolve_model(model: Model, benchmark: str, runs: Path) -> tuple[ModelFiles, PromptSpec]:
    """Find the base model's files and resolve the one prompt specification of training and evaluation."""
    files = locate_model(model, runs)
    return files, prompt_of(model, files, benchmark)


@task(name="audit", task_run_name="audit the judge and the problems", **ONCE_EACH)
def audit(work: Work) -> str:
    """Prove that the judge passes every reference solution and no planted cheat; return what was seen."""
    return audit_work(work)


def audit_work(work: Work) -> str:
    """Audit the judge, then every problem's own reference; what passed once with the same bytes is not run again.

    Raises:
        IncompleteError: a cheat passed, or a reference solution failed: rewards would be wrong.
        MachineError: no cage here.
    """
    scored = {p.benchmark: p.num_problems for p in work.experiment.protocols}
    parts = {"train": work.prepared.train, **{b: work.prepared.benchmarks[b] for b in scored}}
    hashes = {name: f"{sha256_file(Path(p))} first {scored.get(name)}" for name, p in parts.items()}
    problems = {name: read_problems(Path(p))[: scored.get(name)] for name, p in parts.items()}
    version, checks = audit_judge(problems["train"], settings().caged)
    seen = {"judge": version, **hashes}
    done = work.runs / "data" / "audit.json"
    strange = [p.prompt for p in work.experiment.protocols if p.prompt != work.prompt.name]
    if strange:
        raise IncompleteError(f"prompt={strange[0]}: scored with another prompt than {work.prompt.name}, trained with")
    failed = [c for c in checks if not c.ok]
    if failed:
        raise IncompleteError(f"judge={failed[0].name}: {failed[0].detail}; do not train with this judge")
    if _seen(done) == seen:
        return f"{len(checks)} cheats refused; references as audited before"
    counts = {name: _audit_references(name, found, work.runs) for name, found in problems.items()}
    write_json(done, {"schema": "audit/1", "seen": seen, "references": counts})
    return f"{len(checks)} cheats refused; references pass: {counts}"


def _seen(path: Path) -> object:
    """Return what an earlier audit has seen; None if there was none, or its note is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["seen"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _audit_references(name: str, problems: list[Problem], runs: Path) -> int:
    programs = [Program(problem_id=p.problem_id, source=p.reference) for p in problems]
    suites = "reward" if name == "train" else "both"
    with open_judge(problems, suites=suites, cache=runs / "data" / "references", caged=settings().caged) as judge:
        verdicts = judge.judge(programs)
    failed = [v for v in verdicts if not v.passed]
    for verdict in failed:
        if verdict.problem_id in EXCEPTED:
            logger.warning("%s: the reference solution is too slow here (%s)", verdict.problem_id, verdict.detail)
    hard = [v for v in failed if v.problem_id not in EXCEPTED]
    if hard:
        raise IncompleteError(
            f"reference={hard[0].problem_id}: fails its own tests of {name} ({hard[0].detail}), {len(hard)} in all; "
            "do not train on these files"
        )
    return len(verdicts) - len(failed)
