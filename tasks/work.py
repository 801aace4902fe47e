"""One execution of an experiment: its cells, folders, store and identities; and what is there of what is planned."""

from dataclasses import dataclass, field
from pathlib import Path

from evaluation.errors import InputError
from evaluation.manifests import Revisions, damaged, is_complete
from evaluation.problems import Prepared
from evaluation.program import read_record
from evaluation.prompts import PromptSpec
from evaluation.protocol import Protocol
from evaluation.request import is_drawn
from tasks.fence import Fence
from tasks.logs import parse_result
from tasks.models import ModelFiles
from training.cell import MODELS, Cell, Identity, Model
from training.experiment import Experiment
from training.folder import CellFile, Receipt, Result, RunFolder
from training.store import Store


@dataclass(frozen=True)
class Work:
    """Everything the tasks of one flow run share; made once, before anything trains."""

    experiment: Experiment
    cells: tuple[Cell, ...]
    runs: Path
    store: Store
    prepared: Prepared
    files: ModelFiles
    prompt: PromptSpec
    scores_here: bool = True
    """Checkpoints are scored on the host that trains them."""
    end_by: float | None = None
    """Unix time by which cells have saved and ended: the end of the experiment's budget."""
    fences: list[Fence] = field(default_factory=list, compare=False, repr=False)

    @property
    def fence(self) -> Fence:
        """What this process has claimed in the store."""
        if not self.fences:
            self.fences.append(Fence(self.store))
        return self.fences[0]

    @property
    def model(self) -> Model:
        """The base model of every cell."""
        return MODELS[self.cells[0].model]

    @property
    def needs_gpu(self) -> bool:
        """Whether cells and scores run on GPUs."""
        return self.experiment.needs_gpu or self.model.needs_gpu

    @property
    def trains_on_gpu(self) -> bool:
        """Whether cells hold GPUs of ours; a service has its own."""
        return self.needs_gpu and self.cells[0].backend == "local"

    def identity(self, cell: Cell | None) -> Identity:
        """Identity of a cell, or of the base model's scores."""
        return Identity(
            cell_config=cell,
            split_sha256=self.prepared.split_sha256,
            prompt_sha256=self.prompt.sha256,
            revisions=Revisions(model=self.files.identity, datasets=self.prepared.revisions),
        )

    def folder(self, cell: Cell) -> RunFolder:
        """Local run directory of a cell."""
        return RunFolder(self.runs / cell.name)

    def score_rel(self, cell: Cell | None, protocol: Protocol, step: int) -> str:
        """Place of a score in the store; the base model's are under the model's name."""
        return self._score_rel(cell.name if cell else self.model.name, protocol, step)

    @staticmethod
    def _score_rel(name: str, protocol: Protocol, step: int) -> str:
        return f"{name}/scores/{protocol.folder}/global_step_{step}"

    def result(self, cell: Cell) -> Result | None:
        """How a cell ended, once its logs are sealed in the store, and its rollouts whole."""
        if not self.store.has(f"{cell.name}/logs"):
            return None
        raw, rollouts = self.store.read(f"{cell.name}/logs/result.json"), f"{cell.name}/rollouts"
        result = parse_result(self.store, cell.name, raw)
        if result is None or self.store.has(rollouts):
            return result
        # A cell that diverged while it sampled its first step has none.
        none = result.end == "diverged" and result.last_step <= 1 and not self.store.backend.list(rollouts)
        return result if none else None

    def expected(self, cell: Cell) -> tuple[int, ...]:
        """Checkpoints that must be there: all, or those before a recorded divergence."""
        result = self.result(cell)
        if result is not None and result.end == "diverged" and result.onset_step is not None:
            return tuple(s for s in cell.checkpoints if s < result.onset_step)
        return cell.checkpoints

    def published(self, cell: Cell, step: int) -> bool:
        """Whether a checkpoint is complete in the store."""
        return self.store.has(f"{cell.name}/global_step_{step}")

    def ready(self, cell: Cell, step: int) -> bool:
        """Whether a checkpoint is complete on this disk."""
        return is_complete(self.folder(cell).checkpoint(step))

    def ended_here(self, cell: Cell) -> bool:
        """Whether the cell has ended on this disk, its logs and rollouts sealed."""
        folder = self.folder(cell)
        parts = [p for p in (folder.logs, folder.rollouts) if p.is_dir()]
        return folder.result_json.is_file() and all(is_complete(p) for p in parts)

    def scored(self, cell: Cell | None, step: int) -> bool:
        """Whether every protocol has a complete score in the store."""
        return all(self.store.has(self.score_rel(cell, p, step)) for p in self.experiment.protocols)

    def drawn(self, name: str, step: int) -> bool:
        """Whether every sample of a cell's (or the base model's) checkpoint is on this disk: no GPU is needed now."""
        outs = (self.runs / self._score_rel(name, p, step) for p in self.experiment.protocols)
        return all(map(is_drawn, outs))

    def unscored(self) -> list[str]:
        """Name every published checkpoint, and the base, that lacks a score under a protocol, in order."""
        base = [] if self.scored(None, 0) else [f"{self.model.name}/global_step_0 (score)"]
        steps = [(c, s) for c in self.cells for s in c.checkpoints if self.published(c, s) and not self.scored(c, s)]
        return base + [f"{c.name}/global_step_{s} (score)" for c, s in steps]

    def missing(self) -> list[str]:
        """Name everything planned that is not in the store, in order."""
        base = [] if self.scored(None, 0) else [f"{self.model.name}/global_step_0 (score)"]
        return base + [m for c in self.cells for m in self._missing(c)]

    def _missing(self, cell: Cell) -> list[str]:
        found = self.unpublished(cell)
        if self.result(cell) is not None:
            published = (s for s in self.expected(cell) if self.published(cell, s))
            found += [f"{cell.name}/global_step_{s} (score)" for s in published if not self.scored(cell, s)]
        return found

    def unpublished(self, cell: Cell) -> list[str]:
        """Name what training a cell should have published and has not."""
        if self.result(cell) is None:
            return [f"{cell.name} (not ended)"]
        steps = (s for s in self.expected(cell) if not self.published(cell, s))
        return [f"{cell.name}/global_step_{s} (checkpoint{self._damage(cell, s)})" for s in steps]

    def _damage(self, cell: Cell, step: int) -> str:
        """Say why a checkpoint of an ended cell cannot be published: running again would not make it again."""
        local, receipt = self.folder(cell).checkpoint(step), self.folder(cell).receipt(step)
        if receipt.is_file() and not local.is_dir():
            was = read_record(Receipt, receipt).store
            return f": its copy here went when {was} had it: use that store, or another --runs folder"
        difference = damaged(local) if local.is_dir() else None
        return f": {local}: {difference}: restore it, or use another --runs folder" if difference else ""

    def difference_here(self, cell: Cell) -> str | None:
        """Return in what the run directory of a cell is another's; None if it is not, or is not there.

        Raises:
            InputError: its cell.json cannot be read.
        """
        path, identity = self.folder(cell).cell_json, self.identity(cell)
        if not path.is_file():
            return None
        found = read_record(CellFile, path).identity
        return None if found.fingerprint == identity.fingerprint else "; ".join(identity.differences(found)[:4])

    def refuse_others(self) -> None:
        """Refuse a store or a run directory that another configuration has written to.

        Raises:
            InputError: with the fields that differ.
        """
        for cell in self.cells:
            identity = self.identity(cell)
            if difference := self.difference_here(cell):
                where = self.folder(cell).root
                raise InputError("runs", where, f"holds another run ({difference})", "use another --runs folder")
            steps = [f"{cell.name}/global_step_{s}" for s in cell.checkpoints]
            scores = [self.score_rel(cell, p, s) for p in self.experiment.protocols for s in cell.checkpoints]
            for rel in (f"{cell.name}/logs", f"{cell.name}/rollouts", *steps, *scores):
                self.store.refuse_other(rel, identity)
        for protocol in self.experiment.protocols:
            self.store.refuse_other(self.score_rel(None, protocol, 0), self.identity(None))
