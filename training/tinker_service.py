"""A service that speaks Tinker's protocol, through its SDK (`pip install '.[tinker]'`): the only file that touches it.

The SDK finds the service and its key by itself (TINKER_BASE_URL, TINKER_API_KEY) and repeats what failed in passing,
without an end. Here every call has a time limit, a request to stop is heard while completions are being drawn, and a
failure is one line: what a person must mend (exit 2 or 3), or what may be better the next time (exit 75).

Axes: T completion token, K the sampler's head.
"""

import concurrent.futures
import functools
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from evaluation.errors import InputError, MachineError, Stopped
from evaluation.generation import Completion, Head
from training.cell import MODELS, Cell
from training.grpo import Grpo

SLICE_S = 0.2
"""How soon a signal is noticed."""
SESSION_S = 120.0
"""How long a session is waited for: nothing is under way yet, and a wrong address looks like a service that is down."""
CLOSE_S = 5.0
"""How long a session's end is waited for."""
ABSENT_LOGPROB = -9e4
"""The SDK fills the places of a head that the service left empty with -99999."""
GRAD_NORMS = ("grad_norm", "skyrl.ai/grad_norm")
"""What services call it; the protocol has no name for it."""

Loss = Callable[[list[torch.Tensor]], torch.Tensor]
"""Log-probs of each datum's targets, (T,) or (T, 1 + K), to the loss whose gradient is taken."""


@dataclass(frozen=True)
class Update:
    """One completion to learn from."""

    prompt_ids: Sequence[int]
    completion: Completion

    def targets(self, top_k: int) -> torch.Tensor:
        """Return (N,) or, with a head, (N, 1 + K) targets for the N inputs: each the next token, then the head.

        Prompt positions have targets as well, of no effect: their gradient is zero.
        """
        tokens = self.completion.token_ids
        own = torch.tensor([*self.prompt_ids[1:], *tokens])
        if not top_k:
            return own
        assert self.completion.head is not None
        targets = torch.zeros(len(own), 1 + top_k, dtype=torch.long)
        targets[:, 0] = own
        targets[-len(tokens) :, 1:] = torch.from_numpy(self.completion.head.ids.astype(np.int64))
        return targets


class Service:
    """One cell's training on the service: a training client, and a sampling client a step."""

    def __init__(self, cell: Cell, patience_s: float, stopping: Callable[[], str | None]) -> None:
        """Find the SDK; nothing is asked of the service yet.

        Args:
            cell: says model, rank, seed and head.
            patience_s: how long a call may take.
            stopping: returns why to stop, if there is a reason.

        Raises:
            MachineError: the SDK is not here.
        """
        try:
            import tinker  # pyright: ignore[reportMissingImports]
        except ImportError as e:
            raise MachineError("backend", "tinker", "its SDK is not installed", "pip install '.[tinker]'") from e
        self.tinker: Any = tinker
        self.cell, self.patience_s, self.stopping = cell, patience_s, stopping
        self.top_k = cell.center.top_k if cell.center else 0
        self.client: Any = None
        self.training: Any = None
        self.sampling: Any = None

    def begin(self, state: str | None) -> None:
        """Open a session; make a new LoRA in it, or take up a saved state, optimizer included.

        Raises:
            InputError: the service has no such model, or no such state.
            MachineError: there is no key, or the service refuses it.
            Stopped: the service does not answer.
        """
        patience_s = min(SESSION_S, self.patience_s)
        self.client = self._wait(_apart(self.tinker.ServiceClient), "a session", patience_s=patience_s)

        def create() -> Any:  # waits for the session where it is called
            if state is not None:
                return self.client.create_training_client_from_state_with_optimizer(state)
            words = {"rank": self.cell.lora_rank, "seed": self.cell.seed}
            # A head that is tied to the embedding has no adapter in a complete model; local cells give it none either.
            return self.client.create_lora_training_client(MODELS[self.cell.model].source, train_unembed=False, **words)

        self.training = self._wait(self._wait(_apart(create), "a session", patience_s=patience_s), "a training client")

    def draw(
        self, grpo: Grpo, stop_ids: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """Draw a group for each prompt from the weights as they are now; one seed a group.

        Raises:
            InputError: the service does not give the log-probs that the cell needs.
            Stopped: asked to, or it took too long.
        """
        types = self.tinker.types
        self.sampling = self._wait(self.training.save_weights_and_get_sampling_client(), "a sampling client", True)
        futures = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            how = types.SamplingParams(
                max_tokens=grpo.max_new_tokens,
                seed=seed % (1 << 31),
                stop=list(stop_ids),
                temperature=grpo.temperature,
                top_k=-1,
                top_p=1.0,
            )
            asked = {"topk_sample_logprobs": self.top_k} if self.top_k else {}
            ids = types.ModelInput.from_ints(list(prompt))
            futures.append(self.sampling.sample(ids, grpo.rollouts_per_prompt, how, **asked))
        asked_at = time.monotonic()
        answers = [self._wait(f, "samples", True, asked_at) for f in futures]
        return [[self._completion(s) for s in answer.sequences] for answer in answers]

    def _completion(self, sequence: Any) -> Completion:
        tokens, logprobs = list(sequence.tokens), sequence.logprobs
        if logprobs is None or len(logprobs) != len(tokens):
            raise InputError("backend", "tinker", "the service gives no log-probs of its samples", "use another one")
        head = None
        if self.top_k:
            found, shape = sequence.topk_logprobs_np, (len(tokens), self.top_k)
            if found is None or found.logprobs.shape != shape or (found.logprobs < ABSENT_LOGPROB).any():
                reason = f"the service does not give the {self.top_k} likeliest tokens of every position"
                raise InputError("backend", "tinker", reason, "use one that honours topk_sample_logprobs")
            head = Head(found.token_ids, found.logprobs)
        reason = "stop" if sequence.stop_reason == "stop" else "length"
        return Completion(tokens, list(logprobs), reason, entropy_sum=-float(sum(logprobs)), head=head)

    def add_gradient(self, updates: Sequence[Update], loss: Loss) -> None:
        """Let the service compute the gradient of `loss`. A stop is not heard from here to the step's end.

        Args:
            updates: the completions; the service scores their tokens, and their heads.
            loss: given the log-probs of each completion's own positions, in order.
        """
        types = self.tinker.types
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints([*u.prompt_ids, *u.completion.token_ids[:-1]]),
                loss_fn_inputs={"target_tokens": types.TensorData.from_torch(u.targets(self.top_k))},
            )
            for u in updates
        ]

        def custom(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            own = [lp[-len(u.completion.token_ids) :] for lp, u in zip(logprobs, updates, strict=True)]
            return loss(own), {}

        self._wait(self.training.forward_backward_custom(data, custom), "a gradient")

    def optimize(self) -> float | None:
        """Take the optimizer's step by the gradient that is there; return its norm if the service tells it."""
        g = self.cell.grpo
        adam = self.tinker.types.AdamParams(
            learning_rate=self.cell.lr,
            beta1=g.adam_beta1,
            beta2=g.adam_beta2,
            eps=g.adam_eps,
            weight_decay=g.weight_decay,
            grad_clip_norm=g.max_grad_norm,
        )
        metrics = self._wait(self.training.optim_step(adam), "an optimizer step").metrics or {}
        return next((float(metrics[k]) for k in GRAD_NORMS if k in metrics), None)

    def save(self, name: str) -> str:
        """Save weights and optimizer on the service; return the address they are taken up by."""
        return str(self._wait(self.training.save_state(name, overwrite=True), "a saved state").path)

    def export(self, name: str, folder: Path) -> None:
        """Fetch the weights in Hugging Face's format, the adapters or the whole model, into an empty folder."""
        saved = self._wait(self.training.save_weights_external(name), "exported weights")
        rest = self._wait(_apart(self.client.create_rest_client), "a session")
        urls = self._wait(rest.get_external_weights_urls(saved.path), "addresses of exported weights").urls
        for file, url in urls.items():
            target = (folder / file).resolve()
            if not target.is_relative_to(folder.resolve()):
                raise InputError("backend", "tinker", f"the service names a file {file!r}", "use another one")
            target.parent.mkdir(parents=True, exist_ok=True)
            self._wait(_apart(functools.partial(_download, url, target, self.patience_s)), file)

    def __enter__(self) -> Self:
        """Return itself; the session is begun by `begin`."""
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        """End the session, and with it its heartbeats; whether the service hears of it is no matter for long."""
        status = "success" if kind is None else "interrupted" if issubclass(kind, Stopped) else "errored"
        if self.client is not None:
            concurrent.futures.wait([_apart(lambda: self.client.close(status).result())], timeout=CLOSE_S)

    def _wait(
        self,
        future: Any,
        what: str,
        stoppable: bool = False,
        began: float | None = None,
        patience_s: float | None = None,
    ) -> Any:
        """Return a call's result.

        Args:
            future: of the call.
            what: it is for.
            stoppable: by a signal, too.
            began: monotonic time from which it is waited for; None is now.
            patience_s: how long; None is as long as any call may take.

        Raises:
            InputError, MachineError: what a person must mend.
            Stopped: asked to stop, or nothing came in time, or the service failed.
        """
        inner = future.future() if hasattr(future, "future") else future
        patience_s = self.patience_s if patience_s is None else patience_s
        end = (time.monotonic() if began is None else began) + patience_s
        while not concurrent.futures.wait([inner], timeout=SLICE_S).done:
            if stoppable and (reason := self.stopping()):
                inner.cancel()
                raise Stopped(f"{reason}: stopped while waiting for {what}; run the same command again")
            if time.monotonic() > end:
                inner.cancel()
                waited = f"waited {patience_s:.0f} s for {what}"
                raise Stopped(f"service=tinker: {waited}; run the same command again")
        failure = inner.exception()
        if failure is not None:
            told = self._told(failure, what)
            raise failure if told is failure else told from failure
        return inner.result()

    def _told(self, failure: BaseException, what: str) -> BaseException:
        """Return the failure of a call as one that a person or a launcher can act on; an unknown one as it is."""
        t, said = self.tinker, " ".join(str(failure).split())[:300] or type(failure).__name__
        if "api_key" in said:
            return MachineError("TINKER_API_KEY", "", said, "set it")
        if isinstance(failure, t.AuthenticationError | t.PermissionDeniedError | t.BillingError):
            return MachineError("TINKER_API_KEY", "...", f"asked for {what}: {said}", "check the key and the account")
        theirs = str(getattr(failure, "category", "")) == "user"  # of a RequestFailedError
        if theirs or isinstance(failure, t.BadRequestError | t.NotFoundError | t.UnprocessableEntityError):
            return InputError("backend", "tinker", f"asked for {what}: {said}", "check model, state and service")
        if isinstance(failure, t.TinkerError | ConnectionError | TimeoutError | OSError):
            return Stopped(f"service=tinker: asked for {what}: {said}; run the same command again")
        return failure


def _apart(work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Do something that may block in a thread that nobody waits for at the end: an executor's would be joined."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def go() -> None:
        try:
            future.set_result(work())
        except BaseException as e:  # noqa: BLE001  raised where the result is asked for
            future.set_exception(e)

    threading.Thread(target=go, daemon=True).start()
    return future


def _download(url: str, target: Path, timeout_s: float) -> None:
    if not url.startswith(("http://", "https://")):
        raise InputError("backend", "tinker", f"an address that is none: {url[:80]}", "use another service")
    with urllib.request.urlopen(url, timeout=timeout_s) as answer, target.open("wb") as out:
        while block := answer.read(1 << 20):
            out.write(block)
        promised = answer.headers.get("Content-Length")
        if promised is not None and out.tell() != int(promised):  # which read(n) says nothing of
            raise ConnectionError(f"{out.tell()} bytes of {promised} came")
