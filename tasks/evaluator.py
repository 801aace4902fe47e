"""The two children that score checkpoints: one draws, on a GPU where that is needed, and one judges what is drawn.

They share a request and the units' folders, and nothing else: the GPU goes back when drawing ends, either may be killed
and started again alone, and the next checkpoint is drawn while this one is judged.
"""

import functools
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

from evaluation.errors import AblationError, Stopped
from evaluation.manifests import is_complete
from evaluation.request import FAILURE, Request, Unit, is_drawn, write_request
from tasks.launch import STOPPING, ChildDied, ChildFailed, locked, on_device, run_to_end
from tasks.settings import child_environment

logger = logging.getLogger(__name__)

Part = Literal["draw", "judge"]
LOOK_EVERY_S = 0.2


class Evaluator:
    """Both halves of `python -m evaluation.run`, each started when there is something for it, and fed by a request."""

    def __init__(self, folder: Path, request: Request, *, needs_gpu: bool = False) -> None:
        self.folder, self.request, self.needs_gpu = folder, request, needs_gpu
        self.lock = threading.Lock()
        self.threads: dict[Part, threading.Thread] = {}
        self.errors: dict[Part, AblationError] = {}
        """Why a half ended, if not by its own decision."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            STOPPING.set()  # nobody waits for what is being drawn
        self.close()

    def log(self, part: Part) -> Path:
        """What a half writes."""
        return self.folder / f"{part}.log"

    def score(self, units: list[Unit], on_tick: Callable[[], None] = lambda: None) -> None:
        """Wait until every unit's folder is complete, calling `on_tick` as long.

        Raises:
            ChildFailed: a unit was given up.
            ChildDied: a half was killed again and again.
            InputError, MachineError: a half cannot run with this request, or here.
            Stopped: the flow is being torn down.
        """
        for unit in units:
            (Path(unit.out) / FAILURE).unlink(missing_ok=True)
        with self.lock:
            self.errors.clear()
            kept = [u for u in self.request.units if u.out not in {x.out for x in units}]
            self._write(units=(*kept, *units))
        while waiting := [u for u in units if not is_complete(Path(u.out))]:
            for unit in waiting:
                failure = Path(unit.out) / FAILURE
                if failure.is_file():
                    raise ChildFailed(failure.read_text(encoding="utf-8").strip())
            if STOPPING.is_set():
                raise Stopped("signal=TERM: stopped while scoring; the same command goes on")
            self._ensure_running(draws=not all(is_drawn(Path(u.out)) for u in waiting))
            on_tick()
            time.sleep(LOOK_EVERY_S)

    def close(self) -> None:
        """Tell the children that nothing more will come, and wait for them."""
        with self.lock:
            if self.request.units:
                self._write(closed=True)
            threads = list(self.threads.values())
        for thread in threads:
            thread.join()

    def _write(self, **changes: object) -> None:
        self.request = self.request.replace(**changes)
        write_request(self.folder, self.request)

    def _ensure_running(self, *, draws: bool) -> None:
        with self.lock:
            for error in self.errors.values():
                raise error
            parts: list[Part] = ["judge", "draw"] if draws else ["judge"]
            for part in parts:
                thread = self.threads.get(part)
                if thread is None or not thread.is_alive():
                    # The leash ends a child with the thread that started it, so this one stays until the child's end.
                    run = functools.partial(self._run, part)
                    self.threads[part] = threading.Thread(target=run, name=f"evaluation-{part}", daemon=True)
                    self.threads[part].start()

    def _run(self, part: Part) -> None:
        """Run a half once to its end; `errors` holds why if it did not end by its own decision."""
        try:
            # The child inherits the lock: a killed flow's child may still be writing into the same folders.
            gpu = self.needs_gpu and part == "draw"
            with locked(self.folder / f"{part}.lock") as held, on_device(gpu) as (env, fds):
                run_to_end(
                    [sys.executable, "-m", "evaluation.run", str(self.folder), "--only", part],
                    log=self.log(part),
                    env=child_environment(1) | env,
                    keep_fds=(held, *fds),
                    on_tick=functools.partial(self._leave, part),
                )
        except _NothingComes:
            logger.info("%s: what was not drawn is not judged", self.folder)
        except ChildFailed as e:
            given_up = [u for u in self.request.units if (Path(u.out) / FAILURE).is_file()]
            if not given_up:
                self.errors[part] = e  # no unit's fault, and starting it again would end the same way
        except AblationError as e:
            self.errors[part] = e
        except OSError as e:
            units = len(self.request.units)
            self.errors[part] = ChildDied(f"evaluation={units} units: could not be started ({e}); read {self.folder}")

    def _leave(self, part: Part) -> None:
        """End who judges, once whoever drew has failed and nobody will start it again."""
        if part == "judge" and self.request.closed and "draw" in self.errors:
            raise _NothingComes


class _NothingComes(Exception):
    """The samples that a judge waits for will not be drawn."""
