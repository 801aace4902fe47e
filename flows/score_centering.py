"""The flow `score-centering`: score centering against plain GRPO, by name, in a form and from a command line."""

from prefect import flow
from prefect.client.schemas.objects import State

from flows.ablation import RUNNER
from flows.lr_ablation import run_to_state
from flows.parameters import AtLeastOne, Backend, CenteringName, ModelName, Seeds


@flow(
    name="score-centering",
    flow_run_name="score-centering {experiment}",
    task_runner=RUNNER,
    persist_result=False,
)
def score_centering(
    experiment: CenteringName = "score_centering_smoke",
    store: str | None = None,
    runs: str | None = None,
    model: ModelName | None = None,
    seeds: Seeds | None = None,
    cells: list[str] | None = None,
    max_parallel_cells: AtLeastOne | None = None,
    gsm8k: str | None = None,
    backend: Backend = "local",
) -> State:
    """Train both arms, score every checkpoint greedily as soon as it exists, and report who drops from peak to end.

    Args:
        experiment: Which grid to run.
        store: URL of the store; default file://RUNS/store.
        runs: Local run directories, one a cell; default ./runs/EXPERIMENT.
        model: Registry token of another base model.
        seeds: How many seeds, 0 to n-1.
        cells: Names of cells; default all.
        max_parallel_cells: Cells training at a time; default what the machine serves.
        gsm8k: Local folder with gsm8k_train.jsonl and gsm8k_test.jsonl instead of the hub's.
        backend: Who trains the cells: this machine, or Tinker's service (TINKER_API_KEY, TINKER_BASE_URL).
    """
    return run_to_state(
        experiment=experiment,
        store=store,
        runs=runs,
        model=model,
        seeds=seeds,
        cells=tuple(cells) if cells else None,
        max_parallel_cells=max_parallel_cells,
        gsm8k=gsm8k,
        backend=backend,
    )
