"""`hard_cooldown/1`, rule by rule, against random histories: what was drawn is checked from outside the buffer."""

import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest
from pydantic import ValidationError

from training.arms import Replay
from training.replay import Draw, ReplayBuffer, Stocked

RULES = ("hard_cooldown", "hard", "uniform")
SMALL = Replay(draws=6, cooldown=3, max_age=7, max_reuse=3, stock_per_problem=4, draws_per_problem=2)


@dataclass
class Group:
    problem: str
    texts: list[str]
    rewards: list[float]


def history(seed: int, steps: int = 40, problems: int = 7, prompts: int = 3, rollouts: int = 5) -> list[list[Group]]:
    """Random groups of few distinct texts, so that duplicates, full stocks and comebacks all happen."""
    rng = random.Random(seed)
    skill = {f"P/{i}": rng.random() for i in range(problems)}
    return [
        [
            Group(
                p,
                [f"{p}:{rng.randrange(8)}" for _ in range(rollouts)],
                [float(rng.random() < skill[p]) for _ in range(rollouts)],
            )
            for p in rng.sample(sorted(skill), prompts)
        ]
        for _ in range(steps)
    ]


def feed(buffer: ReplayBuffer, step: int, groups: list[Group]) -> None:
    for g in groups:
        ids = [(t, [ord(c) for c in t]) for t in g.texts]
        buffer.add(step, g.problem, [1, 2, 3], ids, g.rewards)


def play(buffer: ReplayBuffer, steps: list[list[Group]], first: int = 1) -> list[Draw]:
    """Draw, then take in the step's groups, as the trainer does."""
    draws = []
    for step, groups in enumerate(steps, first):
        draws.append(buffer.draw(step))
        feed(buffer, step, groups)
    return draws


def buffer_of(p: dict[str, list[tuple[str, float]]], step: int = 1, *, term: Replay = SMALL, seed: int = 0):
    """Return a buffer after one step with the given (text, reward) groups."""
    buffer = ReplayBuffer(term, seed)
    feed(buffer, step, [Group(k, [t for t, _ in v], [r for _, r in v]) for k, v in p.items()])
    return buffer


@dataclass
class Item:
    text: str
    born: int
    order: int
    last: int = -1000
    uses: int = 0


@dataclass
class Reference:
    """The rules written down a second time, naively; it follows the draws and says what could be drawn."""

    term: Replay
    stock: dict[str, list[Item]] = field(default_factory=lambda: defaultdict(list))
    rate: dict[str, float] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def eligible(self, step: int) -> dict[str, list[Item]]:
        for p in self.stock:
            self.stock[p] = [i for i in self.stock[p] if step - i.born <= self.term.max_age]
        cooled = self.term.rule != "hard_cooldown"
        return {
            p: items
            for p, items in self.stock.items()
            if items and (cooled or p not in self.last or step - self.last[p] >= self.term.cooldown)
        }

    def follow(self, step: int, draw: Draw) -> None:
        """Check one draw against the rules, then mark what it took."""
        eligible = self.eligible(step)
        assert draw.eligible == sum(map(len, eligible.values()))
        per_problem = Counter(r.problem_id for r in draw.rollouts)
        assert set(per_problem) <= set(eligible)
        cap = 10**9 if self.term.rule == "uniform" else self.term.draws_per_problem
        assert all(n <= cap for n in per_problem.values())
        assert len({(r.problem_id, r.text) for r in draw.rollouts}) == len(draw.rollouts)
        assert len(draw.rollouts) == min(self.term.draws, sum(min(cap, len(v)) for v in eligible.values()))
        assert draw.shortfall == self.term.draws - len(draw.rollouts)
        for p, n in per_problem.items():
            mine = [r for r in draw.rollouts if r.problem_id == p]
            if self.term.rule != "uniform":
                order = sorted(eligible[p], key=lambda i: (i.last, i.born, i.order))
                assert [r.text for r in mine] == [i.text for i in order[:n]]
            for r in mine:
                item = next(i for i in eligible[p] if i.text == r.text)
                assert r.born == item.born < step
                assert (r.uses, step - r.born <= self.term.max_age) == (item.uses, True)
                item.last, item.uses = step, item.uses + 1
            self.last[p] = step
            self.stock[p] = [i for i in self.stock[p] if i.uses < self.term.max_reuse]

    def take_in(self, step: int, groups: list[Group]) -> None:
        for g in groups:
            mean = sum(g.rewards) / len(g.rewards)
            self.rate[g.problem] = (self.rate[g.problem] + mean) / 2 if g.problem in self.rate else mean
            for text, reward in zip(g.texts, g.rewards, strict=True):
                if reward == 1 and text not in [i.text for i in self.stock[g.problem]]:
                    self.stock[g.problem].append(Item(text, step, self.count))
                    self.count += 1
                    self.stock[g.problem] = self.stock[g.problem][-self.term.stock_per_problem :]

    def agrees(self, buffer: ReplayBuffer) -> None:
        mine = {p: [(i.text, i.born, i.uses) for i in v] for p, v in self.stock.items() if v}
        theirs = {p: [(s.text, s.born, s.uses) for s in v] for p, v in buffer.stock.items() if v}
        assert mine == theirs
        assert buffer.pass_rate == pytest.approx(self.rate, abs=0)


@pytest.mark.parametrize("rule", RULES)
def test_every_draw_of_many_random_histories_obeys_the_rules(rule: str) -> None:
    drawn = short = 0
    for seed in range(60):
        rng = random.Random(f"{rule}{seed}")
        term = Replay(
            rule=rule,
            draws=rng.choice([1, 3, 6, 20]),
            cooldown=rng.choice([0, 1, 3, 5]),
            max_age=rng.choice([1, 4, 12, 100]),
            max_reuse=rng.choice([1, 2, 8]),
            stock_per_problem=rng.choice([1, 3, 32]),
            draws_per_problem=rng.choice([1, 2, 4]),
        )
        buffer, reference = ReplayBuffer(term, seed), Reference(term)
        for step, groups in enumerate(history(seed), 1):
            draw = buffer.draw(step)
            reference.follow(step, draw)
            feed(buffer, step, groups)
            reference.take_in(step, groups)
            reference.agrees(buffer)
            drawn, short = drawn + len(draw.rollouts), short + (draw.shortfall > 0)
    assert drawn > 2000
    assert short > 100


def test_the_specified_numbers_are_the_defaults() -> None:
    t = Replay()
    assert (t.version, t.rule, t.weight, t.draws, t.cooldown) == ("hard_cooldown/1", "hard_cooldown", 0.1, 128, 5)
    assert (t.max_age, t.max_reuse, t.stock_per_problem, t.draws_per_problem) == (100, 8, 32, 4)


def test_nothing_is_drawn_from_an_empty_buffer_and_the_shortfall_says_so() -> None:
    draw = ReplayBuffer(Replay(), 0).draw(1)
    assert draw.rollouts == ()
    assert draw.figures == {
        "eligible": 0,
        "drawn": 0,
        "shortfall": 128,
        "unique_problems": 0,
        "mean_age": None,
        "mean_uses": None,
    }


def test_the_figures_of_a_draw() -> None:
    buffer = buffer_of({"P/1": [("a", 1), ("b", 1)], "P/2": [("c", 1), ("d", 0)]}, 1)
    assert buffer.draw(4).figures == {
        "eligible": 3,
        "drawn": 3,
        "shortfall": 3,
        "unique_problems": 2,
        "mean_age": 3.0,
        "mean_uses": 0.0,
    }
    assert buffer.draw(7).figures["mean_uses"] == 1.0


def test_only_a_reward_of_one_enters() -> None:
    buffer = buffer_of({"P/1": [("half", 0.5), ("none", 0.0), ("whole", 1.0)]})
    assert [s.text for s in buffer.stock["P/1"]] == ["whole"]
    assert buffer.pass_rate == {"P/1": 0.5}


def test_the_pass_rate_starts_at_the_first_mean_and_is_halved_towards_the_next() -> None:
    buffer, seen = ReplayBuffer(SMALL, 0), []
    for step, rewards in enumerate([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], 1):
        feed(buffer, step, [Group("P/1", list("abcd"), [float(r) for r in rewards])])
        seen.append(buffer.pass_rate["P/1"])
    assert seen == [0.25, 0.625, 0.3125, 0.40625]


def test_a_text_in_stock_changes_nothing_and_the_cap_pushes_out_the_oldest() -> None:
    buffer = buffer_of({"P/1": [(t, 1) for t in "abcd"]}, 1)
    feed(buffer, 2, [Group("P/1", ["b", "a", "b"], [1, 1, 1])])
    assert [(s.text, s.born) for s in buffer.stock["P/1"]] == [(t, 1) for t in "abcd"]
    feed(buffer, 3, [Group("P/1", ["e", "a"], [1, 1])])  # `e` pushes `a` out, so `a` comes back and pushes `b` out
    assert [(s.text, s.born) for s in buffer.stock["P/1"]] == [("c", 1), ("d", 1), ("e", 3), ("a", 3)]


def test_the_same_text_of_two_problems_is_two_rollouts() -> None:
    draw = buffer_of({"P/1": [("x", 1)], "P/2": [("x", 1)]}).draw(2)
    assert sorted(r.problem_id for r in draw.rollouts) == ["P/1", "P/2"]


def test_age_and_reuse_push_out_and_the_text_may_come_back() -> None:
    buffer = buffer_of({"P/1": [("old", 1)]}, 1, term=SMALL.replace(rule="hard"))
    assert [len(buffer.draw(s).rollouts) for s in (2, 3, 4, 5)] == [1, 1, 1, 0]
    feed(buffer, 5, [Group("P/1", ["old"], [1])])
    assert [len(buffer.draw(s).rollouts) for s in (12, 13)] == [1, 0]  # 7 steps old, then 8
    feed(buffer, 13, [Group("P/1", ["old"], [1])])
    assert [(r.born, r.uses) for r in buffer.draw(14).rollouts] == [(13, 0)]


def test_a_used_up_text_may_come_back_in_the_very_step_that_used_it_up() -> None:
    buffer = buffer_of({"P/1": [("x", 1)]}, 1, term=SMALL.replace(rule="hard", max_reuse=1))
    assert len(buffer.draw(2).rollouts) == 1
    feed(buffer, 2, [Group("P/1", ["x"], [1])])
    assert [(r.born, r.uses) for r in buffer.draw(3).rollouts] == [(2, 0)]


def test_the_cooldown_counts_steps_between_replays_of_a_problem() -> None:
    buffer = buffer_of({"P/1": [("a", 1), ("b", 1), ("c", 1)]}, 1, term=SMALL.replace(draws=1, cooldown=5, max_age=99))
    got = [s for s in range(2, 30) if buffer.draw(s).rollouts]
    assert got == [2, 7, 12, 17, 22, 27]


def test_of_a_problem_the_least_recently_replayed_then_the_oldest_then_the_first_to_enter() -> None:
    term = SMALL.replace(rule="hard", draws=1, max_reuse=99, max_age=99)
    buffer = buffer_of({"P/1": [("a", 1), ("b", 1)]}, 1, term=term)
    feed(buffer, 2, [Group("P/1", ["c"], [1])])
    assert [buffer.draw(s).rollouts[0].text for s in range(3, 10)] == ["a", "b", "c", "a", "b", "c", "a"]


def test_problems_are_chosen_in_proportion_to_their_weight() -> None:
    """First choices of many seeds against max((1 - p)^2, 0.01), by a chi-squared test (3 degrees, p = 0.0001)."""
    rewards = {"P/0": [1, 0, 0, 0], "P/1": [1, 1, 0, 0], "P/2": [1, 1, 1, 0], "P/3": [1, 1, 1, 1]}
    weights = {"P/0": 0.75**2, "P/1": 0.25, "P/2": 0.0625, "P/3": 0.01}
    groups = {p: [(f"{p}{i}", float(r)) for i, r in enumerate(v)] for p, v in rewards.items()}
    count, trials = Counter(), 6000
    state = buffer_of(groups).state()
    for seed in range(trials):
        buffer = ReplayBuffer(SMALL.replace(draws=1), seed)
        buffer.restore(state)
        count[buffer.draw(2).rollouts[0].problem_id] += 1
    expected = {p: trials * w / sum(weights.values()) for p, w in weights.items()}
    assert sum((count[p] - e) ** 2 / e for p, e in expected.items()) < 21.1


def test_the_second_choice_is_by_weight_among_the_problems_still_open() -> None:
    """With one draw a problem, P(first a, then b) is known in closed form."""
    groups = {"A": [("a", 1.0), ("x", 0.0)], "B": [("b", 1.0)], "C": [("c", 1.0), ("y", 1.0)]}
    w = {"A": 0.25, "B": 0.01, "C": 0.01}
    state, count, trials = buffer_of(groups).state(), Counter(), 4000
    for seed in range(trials):
        buffer = ReplayBuffer(SMALL.replace(draws=2, draws_per_problem=1), seed)
        buffer.restore(state)
        count["".join(r.problem_id for r in buffer.draw(2).rollouts)] += 1
    total = sum(w.values())
    expected = {a + b: trials * w[a] / total * w[b] / (total - w[a]) for a in w for b in w if a != b}
    assert set(count) <= set(expected)
    assert sum((count[k] - e) ** 2 / e for k, e in expected.items()) < 25.7  # 5 degrees, p = 0.0001


def test_uniform_draws_all_positives_alike_whatever_their_problem() -> None:
    groups = {"A": [(f"a{i}", 1.0) for i in range(4)], "B": [("b", 1.0), *((f"n{i}", 0.0) for i in range(9))]}
    state, count, trials = buffer_of(groups).state(), Counter(), 4000
    for seed in range(trials):
        buffer = ReplayBuffer(SMALL.replace(rule="uniform", draws=1), seed)
        buffer.restore(state)
        count[buffer.draw(2).rollouts[0].text] += 1
    assert len(count) == 5
    assert sum((n - trials / 5) ** 2 / (trials / 5) for n in count.values()) < 23.5  # 4 degrees, p = 0.0001


@pytest.mark.parametrize("rule", RULES)
def test_a_draw_is_a_function_of_seed_step_and_buffer(rule: str) -> None:
    """Also of no global random state, and not of the order in which a step's problems came."""
    term, steps = SMALL.replace(rule=rule, draws=3), history(5)
    one, two, other = (ReplayBuffer(term, seed) for seed in (0, 0, 1))
    random.seed(1)
    first = play(one, steps)
    random.seed(2)
    assert play(two, steps) == first
    assert play(other, steps) != first
    state = json.loads(json.dumps(one.state()))
    shuffled = dict(reversed(state["stock"].items()))
    assert list(shuffled) != list(state["stock"])
    again = ReplayBuffer(term, 0)
    again.restore(state | {"stock": shuffled})
    assert again.draw(41) == one.draw(41)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stop", [0, 1, 13, 39])
def test_a_buffer_restored_from_json_goes_on_with_the_same_draws(rule: str, stop: int) -> None:
    term, steps = SMALL.replace(rule=rule), history(11)
    whole = ReplayBuffer(term, 3)
    expected = play(whole, steps)
    before, after = ReplayBuffer(term, 3), ReplayBuffer(term, 3)
    play(before, steps[:stop])
    text = json.dumps(before.state(), allow_nan=False)
    after.restore(json.loads(text))
    assert json.dumps(after.state()) == text
    assert play(after, steps[stop:], stop + 1) == expected[stop:]
    assert after.state() == whole.state()


def test_a_saved_state_does_not_change_with_the_buffer() -> None:
    steps = history(2)
    buffer = ReplayBuffer(SMALL, 0)
    play(buffer, steps[:10])
    state = buffer.state()
    text = json.dumps(state)
    play(buffer, steps[10:], 11)
    assert json.dumps(state) == text


def test_what_is_handed_out_is_frozen_and_stays_as_it_was() -> None:
    buffer = buffer_of({"P/1": [("a", 1)]}, term=SMALL.replace(rule="hard"))
    handed = buffer.draw(2).rollouts[0]
    assert (handed.last, handed.uses) == (Stocked.model_fields["last"].default, 0)
    with pytest.raises(ValidationError):
        handed.uses = 9  # type: ignore[misc]
    assert isinstance(handed.token_ids, tuple)
    assert isinstance(handed.prompt_ids, tuple)
    buffer.draw(3)
    assert handed.uses == 0
    assert buffer.stock["P/1"][0].uses == 2


def test_token_ids_are_copied_in() -> None:
    buffer, ids, prompt = ReplayBuffer(SMALL, 0), [1, 2], [9]
    buffer.add(1, "P/1", prompt, [("a", ids)], [1.0])
    ids.append(3)
    prompt.clear()
    rollout = buffer.draw(2).rollouts[0]
    assert (rollout.token_ids, rollout.prompt_ids) == ((1, 2), (9,))


def test_a_group_without_a_reward_for_each_rollout_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        ReplayBuffer(SMALL, 0).add(1, "P/1", [1], [("a", [1]), ("b", [2])], [1.0])
