"""Replay of past rollouts, `hard_cooldown/1`, and its controls `hard` and `uniform`. No torch: texts, ids and counts.

The rules are the specification's (A, `hard_cooldown`, 1 to 7). A draw is a pure function of (seed, step, buffer);
what it changes (who was replayed when) is the buffer's own state, saved with every resume state.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from evaluation.records import Record
from training.arms import Replay

FLOOR = 0.01
"""A problem always solved is still drawn now and then."""
_NEVER = -(10**9)


class Stocked(Record):
    """One past rollout with reward 1."""

    uid: int
    """Order of entry: the last tie-break."""
    problem_id: str
    born: int
    """Step it was sampled at."""
    last: int = _NEVER
    """Step it was last replayed at."""
    uses: int = 0
    text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


class Draw(Record):
    """What one step replays, and the figures that are logged with it."""

    step: int
    rollouts: tuple[Stocked, ...]
    eligible: int
    """Rollouts in stock of eligible problems."""
    shortfall: int
    """How many fewer than asked for."""

    @property
    def figures(self) -> dict[str, Any]:
        """Counts, age and reuse for steps.jsonl."""
        count = len(self.rollouts)
        return {
            "eligible": self.eligible,
            "drawn": count,
            "shortfall": self.shortfall,
            "unique_problems": len({r.problem_id for r in self.rollouts}),
            "mean_age": sum(self.step - r.born for r in self.rollouts) / count if count else None,
            "mean_uses": sum(r.uses for r in self.rollouts) / count if count else None,
        }


class ReplayBuffer:
    """Past positives by problem, and each problem's running pass rate."""

    def __init__(self, term: Replay, seed: int) -> None:
        self.term, self.seed = term, seed
        self.stock: dict[str, list[Stocked]] = {}
        self.pass_rate: dict[str, float] = {}
        self.last_replayed: dict[str, int] = {}
        self.next_uid = 0

    def add(
        self,
        step: int,
        problem_id: str,
        prompt_ids: Sequence[int],
        completions: Sequence[tuple[str, Sequence[int]]],
        rewards: Sequence[float],
    ) -> None:
        """Take in one group of `step`; call it after the step's draw, so that only earlier steps are ever drawn.

        Args:
            step: the optimizer step that sampled the group.
            problem_id: its problem.
            prompt_ids: tokens of its prompt.
            completions: (text, token ids) of each rollout.
            rewards: one a rollout; those of 1 enter the stock unless their text is there.
        """
        mean = sum(rewards) / len(rewards)
        old = self.pass_rate.get(problem_id)
        self.pass_rate[problem_id] = mean if old is None else (old + mean) / 2
        mine = self.stock.setdefault(problem_id, [])
        for (text, ids), reward in zip(completions, rewards, strict=True):
            if reward != 1 or any(s.text == text for s in mine):
                continue
            mine.append(
                Stocked(
                    uid=self.next_uid,
                    problem_id=problem_id,
                    born=step,
                    text=text,
                    prompt_ids=tuple(prompt_ids),
                    token_ids=tuple(ids),
                )
            )
            self.next_uid += 1
            if len(mine) > self.term.stock_per_problem:
                mine.pop(0)

    def draw(self, step: int) -> Draw:
        """Choose this step's rollouts and mark them replayed."""
        self._retire(step)
        rng = random.Random(hashlib.sha256(f"{self.seed}/{step}/replay".encode()).digest())
        eligible = self._eligible(step)
        count = sum(len(v) for v in eligible.values())
        chosen = self._uniform(eligible, rng) if self.term.rule == "uniform" else self._hard(eligible, rng)
        self._mark(chosen, step)
        return Draw(step=step, rollouts=tuple(chosen), eligible=count, shortfall=self.term.draws - len(chosen))

    def _retire(self, step: int) -> None:
        for mine in self.stock.values():
            mine[:] = [s for s in mine if step - s.born <= self.term.max_age and s.uses < self.term.max_reuse]

    def _eligible(self, step: int) -> dict[str, list[Stocked]]:
        """Problems with stock and past their cooldown, ids in order."""
        cooldown = self.term.cooldown if self.term.rule == "hard_cooldown" else 0
        return {
            p: list(mine)
            for p, mine in sorted(self.stock.items())
            if mine and step - self.last_replayed.get(p, _NEVER) >= cooldown
        }

    def _uniform(self, eligible: dict[str, list[Stocked]], rng: random.Random) -> list[Stocked]:
        pool = [s for mine in eligible.values() for s in mine]
        return rng.sample(pool, min(self.term.draws, len(pool)))

    def _hard(self, eligible: dict[str, list[Stocked]], rng: random.Random) -> list[Stocked]:
        """Problem by problem, hard ones more often; of each the least recently replayed rollout."""
        left = {p: sorted(mine, key=lambda s: (-s.last, -s.born, -s.uid)) for p, mine in eligible.items()}
        chosen: list[Stocked] = []
        taken = dict.fromkeys(left, 0)
        while len(chosen) < self.term.draws:
            open_problems = [p for p in left if left[p] and taken[p] < self.term.draws_per_problem]
            if not open_problems:
                break
            weights = [max((1 - self.pass_rate[p]) ** 2, FLOOR) for p in open_problems]
            problem = rng.choices(open_problems, weights)[0]
            chosen.append(left[problem].pop())
            taken[problem] += 1
        return chosen

    def _mark(self, chosen: Sequence[Stocked], step: int) -> None:
        marked = {s.uid: s.replace(last=step, uses=s.uses + 1) for s in chosen}
        for mine in self.stock.values():
            mine[:] = [marked.get(s.uid, s) for s in mine]
        self.last_replayed.update({s.problem_id: step for s in chosen})
        self._retire(step)  # what is used up leaves now: its text may come back with this very step's groups

    def state(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {
            "stock": {p: [s.model_dump(mode="json") for s in mine] for p, mine in self.stock.items()},
            "pass_rate": dict(self.pass_rate),
            "last_replayed": dict(self.last_replayed),
            "next_uid": self.next_uid,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Become the buffer that `state` was taken of."""
        self.stock = {p: [Stocked.model_validate(s) for s in mine] for p, mine in state["stock"].items()}
        self.pass_rate = dict(state["pass_rate"])
        self.last_replayed = dict(state["last_replayed"])
        self.next_uid = state["next_uid"]
