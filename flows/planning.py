"""What an experiment will cost, by arithmetic alone: no GPU, network, server or data is touched.

    cell hours  = (start_s + steps x (sampling_s + training_s + overhead_s)) / 3600
      sampling_s  = max(rollouts x completion_tokens / sampling_tokens_per_s, max_new_tokens x decode_step_s)
      training_s  = (rollouts + replayed) x (prompt_tokens + completion_tokens) / training_tokens_per_s
    score hours = samples x completion_tokens / scoring_tokens_per_s / 3600
    slot hours  = sum of cell hours + (checkpoints + 1 for the base) x score hours

A slot is what trains one cell or draws for one score: a GPU where the experiment needs one, else a CPU core. Every
number that is assumed is in `assumptions` of the plan with its unit and source, so that the hours can be recomputed by
hand. Judging runs on the CPU cores beside a GPU and is not counted; the tail of a step (its longest completion) is.
"""

import heapq
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from evaluation.problems import num_samples
from evaluation.protocol import Protocol
from evaluation.records import Record
from flows.parameters import Parameters
from flows.rates import RATES, Assumption, Rates
from training.cell import MODELS, Cell

HEADLINE_LR = 1e-6
"""Rate of the headline runs that `full` and `ladder` are read against (spec: more rungs)."""


class PlannedCell(Record):
    """One row of the grid."""

    name: str
    model: str
    arm: str
    lr: float
    seed: int
    steps: int
    epochs: float
    checkpoints: tuple[int, ...]
    hours: float
    """Of one slot, training only."""


class Totals(Record):
    """Sums over the grid."""

    cells: int
    checkpoints: int
    samples: int
    """The base included."""
    checkpoint_gb: float
    """Published weights in the model's own dtype, 10^9 bytes."""
    sample_gb: float
    """samples.jsonl and verdicts.jsonl."""
    resume_gb: float
    """Local disk: the newest two resume states of each cell, fp32 weights and both moments."""
    gpu_hours: float
    """0 where no GPU is needed."""
    core_hours: float
    """0 where a GPU does the work."""


class Against(Record):
    """Where the rates lie, seen from the headline rate: never "all below" (REPORT-128)."""

    headline_lr: float
    below: tuple[float, ...]
    equal: tuple[float, ...]
    above: tuple[float, ...]


class Schedule(Record):
    """List scheduling on identical slots: cells first, then scores as their checkpoints appear."""

    slots: int
    makespan_h: float
    critical_path_h: float
    """The longest cell and its last score: no number of slots is faster."""


class Plan(Record):
    """`ablation plan` (contracts: plan/1)."""

    schema_: Literal["plan/1"] = Field(default="plan/1", alias="schema")
    experiment: str
    cells: tuple[PlannedCell, ...]
    samples_per_checkpoint: int
    samples_by_benchmark: dict[str, int]
    score_hours: float
    """Of one slot, one checkpoint."""
    totals: Totals
    against: Against | None
    """None for experiments in miniature, whose rates have nothing to do with the headline's."""
    assumptions: dict[str, Assumption]
    budget_minutes: int | None = None
    """Wall time of all runs together, after which the rest is incomplete."""
    schedule: Schedule | None = None


def make_plan(parameters: Parameters, hosts: int | None = None, slots: int | None = None) -> Plan:
    """Return the plan of an experiment; with `hosts` or `slots` (a host) also how long it takes on so many."""
    spec, grid = parameters.spec, parameters.grid
    model, rates = MODELS[grid[0].model], RATES[grid[0].model]
    samples = {p.benchmark: num_samples(p) for p in spec.protocols}
    score_h = score_hours(spec.protocols, rates)
    cells = tuple(_planned(c, spec.num_training_problems, rates) for c in grid)
    num_checkpoints = sum(len(c.checkpoints) for c in cells)
    slot_hours = sum(c.hours for c in cells) + (num_checkpoints + 1) * score_h
    total_samples = (num_checkpoints + 1) * sum(samples.values())
    on_gpu = spec.needs_gpu or model.needs_gpu
    weight_bytes = 2 if model.published_dtype == "bfloat16" else 4
    return Plan(
        experiment=spec.name,
        cells=cells,
        samples_per_checkpoint=sum(samples.values()),
        samples_by_benchmark=samples,
        score_hours=score_h,
        totals=Totals(
            cells=len(cells),
            checkpoints=num_checkpoints,
            samples=total_samples,
            checkpoint_gb=round(num_checkpoints * weight_bytes * model.num_parameters / 1e9, 3),
            sample_gb=round(total_samples * rates.sample_bytes / 1e9, 3),
            resume_gb=round(len(cells) * 2 * 12 * model.num_parameters / 1e9, 3),
            gpu_hours=round(slot_hours, 3) if on_gpu else 0.0,
            core_hours=0.0 if on_gpu else round(slot_hours, 3),
        ),
        against=_against([c.lr for c in cells]) if spec.scale == "full" else None,
        assumptions=rates.assumptions,
        budget_minutes=spec.budget_minutes,
        schedule=_scheduled(cells, score_h, hosts or 1, slots or 1, parameters.max_parallel_cells)
        if hosts or slots
        else None,
    )


def cell_hours(cell: Cell, rates: Rates) -> float:
    """Return the hours that one slot trains a cell."""
    completion = min(rates["completion_tokens"], cell.grpo.max_new_tokens)
    rollouts = cell.grpo.prompts_per_step * cell.grpo.rollouts_per_prompt
    replayed = cell.replay.draws if cell.replay else 0
    sampling_s = max(
        rollouts * completion / rates["sampling_tokens_per_s"], cell.grpo.max_new_tokens * rates["decode_step_s"]
    )
    training_s = (rollouts + replayed) * (rates["prompt_tokens"] + completion) / rates.training_tokens_per_s
    return (rates["start_s"] + cell.steps * (sampling_s + training_s + rates["overhead_s"])) / 3600


def score_hours(protocols: Sequence[Protocol], rates: Rates) -> float:
    """Return the hours that one slot draws the samples of one checkpoint."""
    tokens = sum(num_samples(p) * min(rates["completion_tokens"], p.max_new_tokens) for p in protocols)
    return tokens / rates["scoring_tokens_per_s"] / 3600


def schedule(
    cells: Sequence[tuple[float, Sequence[float]]], score_h: float, slots: int, max_cells: int | None = None
) -> float:
    """Return the makespan in hours of list scheduling: longest cells first, then scores in order of appearance.

    Args:
        cells: (hours, fractions of the cell at which a checkpoint appears).
        score_h: hours of one score; the base's is ready at once.
        slots: identical slots, each does one thing at a time.
        max_cells: cells training at a time; None is as many as there are slots.
    """
    waiting = sorted(cells, key=lambda c: c[0])
    running: list[tuple[float, bool]] = []  # (end, is a cell)
    releases: list[float] = []  # when a checkpoint appears
    now, ready, training = 0.0, 1, 0
    while waiting or ready or running or releases:
        while waiting and len(running) < slots and training < (max_cells or slots):
            hours, fractions = waiting.pop()
            heapq.heappush(running, (now + hours, True))
            training += 1
            for fraction in fractions:
                heapq.heappush(releases, now + hours * fraction)
        while ready and len(running) < slots:
            heapq.heappush(running, (now + score_h, False))
            ready -= 1
        now = min([e for e, _ in running[:1]] + releases[:1])
        while running and running[0][0] <= now:
            training -= heapq.heappop(running)[1]
        while releases and releases[0] <= now:
            heapq.heappop(releases)
            ready += 1
    return now


def _scheduled(cells: Sequence[PlannedCell], score_h: float, hosts: int, slots: int, max_cells: int | None) -> Schedule:
    jobs = [(c.hours, [n / c.steps for n in c.checkpoints]) for c in cells]
    return Schedule(
        slots=hosts * slots,
        makespan_h=round(schedule(jobs, score_h, hosts * slots, max_cells), 3),
        critical_path_h=round(max(c.hours for c in cells) + score_h, 3),
    )


def _planned(cell: Cell, num_problems: int, rates: Rates) -> PlannedCell:
    return PlannedCell(
        name=cell.name,
        model=cell.model,
        arm=cell.arm,
        lr=cell.lr,
        seed=cell.seed,
        steps=cell.steps,
        epochs=cell.epochs(num_problems),
        checkpoints=cell.checkpoints,
        hours=cell_hours(cell, rates),
    )


def _against(lrs: Sequence[float]) -> Against:
    rungs = sorted(set(lrs))
    return Against(
        headline_lr=HEADLINE_LR,
        below=tuple(r for r in rungs if r < HEADLINE_LR),
        equal=tuple(r for r in rungs if r == HEADLINE_LR),
        above=tuple(r for r in rungs if r > HEADLINE_LR),
    )
