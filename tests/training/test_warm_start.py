"""The warm start: corpus, tokenizer, batches and loss by known answers; the same bytes twice; the shipped folder."""

import hashlib
import json
import math
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation.files import sha256_file
from evaluation.problems import sums
from evaluation.problems.toy import generate, solution
from evaluation.prompts import check, extract, render, resolve
from training.warm_start import (
    BATCH,
    EOS_ID,
    MISTAKE_PROBABILITY,
    WRONG_PROBABILITY,
    batches,
    build_model,
    loss_of,
    main,
    prompt,
    rate,
    train_tokenizer,
    warm_start,
    write_corpus,
    write_sums_corpus,
)

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "training" / "toy_model"
SUMS = ROOT / "training" / "sums_model"
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "warm_start.json",
}


@pytest.fixture(scope="module")
def toy():
    return generate(0)


@pytest.fixture(scope="module")
def corpus(toy):
    return write_corpus(toy)


@pytest.fixture(scope="module")
def shipped():
    return AutoModelForCausalLM.from_pretrained(SHIPPED), AutoTokenizer.from_pretrained(SHIPPED)


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: sha256_file(p) for p in folder.iterdir()}


def test_corpus_is_of_the_warm_start_problems_alone(toy, corpus):
    assert Counter(p for p, _ in corpus) == {prompt(p): 8 for p in toy.warm_start}
    others = {prompt(p) for p in (*toy.train, *toy.held_out)}
    assert not others & {p for p, _ in corpus}
    assert write_corpus(toy) == corpus
    assert write_corpus(toy, seed=2) != corpus


def test_the_references_share_of_the_corpus_is_what_the_probabilities_say(toy, corpus):
    """A problem whose operations have m mistakes keeps its reference with (1 - .45)^m, but for one in twenty."""
    right = 0.0
    for p in toy.warm_start:
        mistakes: list[str] = []
        solution(toy.compositions[p.problem_id], lambda form, seen=mistakes: seen.append(form) or False)
        right += (1 - MISTAKE_PROBABILITY) ** len(mistakes) / len(toy.warm_start)
    references = {(prompt(p), p.reference) for p in toy.warm_start}
    share = sum(row in references for row in corpus) / len(corpus)
    sigma = math.sqrt(right * (1 - right) / len(corpus))
    assert (1 - WRONG_PROBABILITY) * right - 4 * sigma < share < right + 4 * sigma
    for _, code in corpus:
        compile(code, "<corpus>", "exec")


def test_training_and_the_prompt_specification_say_the_same(toy):
    spec = resolve(SHIPPED, name="toy/1", rendering="plain")
    for p in toy.held_out[:20]:
        assert render(spec, p) == prompt(p)
        assert extract(spec, p.reference + "<eos>", p).strip() == p.reference.strip()


def test_shipped_tokenizer_is_the_recipes(corpus):
    made = train_tokenizer([text for pair in corpus for text in pair])
    stored = json.loads((SHIPPED / "tokenizer.json").read_text())
    assert json.loads(made.to_str())["model"] == stored["model"]


def test_tokenizer_gives_every_text_back_and_programs_fit(toy, shipped):
    _, tokenizer = shipped
    for p in (*toy.train, *toy.held_out):
        for text in (prompt(p), p.reference):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert len(tokenizer(p.reference)["input_ids"]) + 1 <= 64
    hostile = "\x00 é 漢字 🙂 \r\n\t<eos"
    assert tokenizer.decode(tokenizer(hostile)["input_ids"]) == hostile


def test_rate_warms_up_and_falls_to_its_floor():
    assert rate(0, 400) == pytest.approx(4e-3 / 20)
    assert rate(19, 400) == rate(20, 400) == pytest.approx(4e-3)
    assert rate(210, 400) == pytest.approx(2e-3)
    assert rate(399, 400) == pytest.approx(8e-5)
    assert all(rate(i + 1, 400) <= rate(i, 400) for i in range(20, 399))


def test_batches_go_through_every_pair_before_any_comes_again():
    pairs = [([i], [i] * random.Random(i).randint(1, 40)) for i in range(8 * BATCH * 2)]
    drawn = list(batches(pairs, 32))
    first, second = drawn[:16], drawn[16:]
    assert all(len(b) == BATCH for b in drawn)
    for half in (first, second):
        assert Counter(p[0] for b in half for p, _ in b) == Counter(range(len(pairs)))
    assert first != second
    assert list(batches(pairs, 32)) == drawn
    spread = [max(len(c) for _, c in b) - min(len(c) for _, c in b) for b in drawn]
    assert sum(spread) / len(spread) < 15


def test_loss_of_a_padded_batch_is_the_token_mean_of_its_rows():
    model = build_model(50)
    pairs = [([5, 6, 7], [8, 9, EOS_ID]), ([10], [11, EOS_ID]), ([12, 13, 14, 15, 16], [17, 18, 19, 20, EOS_ID])]
    total = count = 0
    for p, c in pairs:
        logprobs = torch.log_softmax(model(torch.tensor([p + c])).logits[0], -1)
        total -= sum(logprobs[len(p) + i - 1, token].item() for i, token in enumerate(c))
        count += len(c)
    assert loss_of(model, pairs).item() == pytest.approx(total / count, rel=1e-5)
    assert total / count == pytest.approx(math.log(50), rel=0.05)


def test_two_short_runs_give_the_same_bytes_and_a_whole_folder(tmp_path, toy):
    """One in this process, one by the command with other thread settings; the full length is a campaign test."""
    warm_start(tmp_path / "a", steps=3)
    done = subprocess.run(
        [sys.executable, "-m", "training.warm_start", "--out", str(tmp_path / "b"), "--steps", "3", "--seed", "0"],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "5", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert set(hashes(tmp_path / "a")) == FILES
    last = json.loads(done.stderr.splitlines()[-1])
    assert last["out"] == str(tmp_path / "b") and last["last_loss"] > 3
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}
    loads(tmp_path / "b", toy.held_out[0].text)


def loads(folder: Path, text: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == 396_096
    assert (model.config.model_type, model.config.head_dim) == ("qwen3", 32)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tokenizer.is_fast and tokenizer.padding_side == "left"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 0
    check(resolve(folder, name="toy/1", rendering="plain"), tokenizer, model.config, model.generation_config)
    ids = tokenizer([text, "x"], padding=True, return_tensors="pt")
    assert ids["input_ids"][1, 0] == 1 and ids["attention_mask"][1].sum() == 1
    assert torch.isfinite(model(**ids).logits).all()


def test_shipped_folder_is_whole_and_is_what_its_recipe_says(toy, corpus):
    assert {p.name for p in SHIPPED.iterdir()} == FILES
    recipe = json.loads((SHIPPED / "warm_start.json").read_text())
    assert recipe["steps"] == 400 and recipe["seeds"] == {"problems": 0, "corpus": 1, "weights": 0, "order": 0}
    for name in ("model.safetensors", "tokenizer.json"):
        assert sha256_file(SHIPPED / name) == recipe["sha256"][name]
    assert hashlib.sha256(json.dumps(corpus).encode()).hexdigest() == recipe["sha256"]["corpus"]
    assert (SHIPPED / "model.safetensors").stat().st_size < 1_600_000
    loads(SHIPPED, toy.held_out[0].text)


def test_the_second_shipped_folder_is_what_its_recipe_says():
    """Its corpus is of the warm-start problems alone, worked as the recipe says; misreadings as often as declared."""
    made = sums.generate(0)
    rows = write_sums_corpus(made)
    recipe = json.loads((SUMS / "warm_start.json").read_text())
    assert {p.name for p in SUMS.iterdir()} == FILES
    assert recipe["mistake_probability"] == {key: c.mistaken for key, c in sums.CHANGES.items()}
    for name in ("model.safetensors", "tokenizer.json"):
        assert sha256_file(SUMS / name) == recipe["sha256"][name]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest() == recipe["sha256"]["corpus"]
    assert Counter(p for p, _ in rows) == Counter(prompt(p) for p in made.warm_start for _ in range(4))
    references = Counter((prompt(p), p.reference) for p in made.warm_start)
    right = sum(row in references for row in rows) / len(rows)
    expected = sum(
        math.prod(1 - sums.CHANGES[key].mistaken for key, _ in made.stories[p.problem_id].changes)
        for p in made.warm_start
    ) / len(made.warm_start)
    assert right == pytest.approx(expected, abs=0.03)


def test_shipped_model_writes_programs(toy, shipped):
    """Greedy and fresh from disk; how many are right is a campaign's (and the demo's) business."""
    model, tokenizer = shipped
    references = 0
    for p in toy.held_out[:24]:
        ids = tokenizer(prompt(p), return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=64, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert out[-1] == EOS_ID
        program = tokenizer.decode(out, skip_special_tokens=True)
        assert program.startswith(f"def {p.entry_point}(")
        references += program == p.reference
    assert references >= 4


@pytest.mark.parametrize(
    ("arguments", "field"),
    [(["--steps", "0"], "steps"), (["--steps", "-1"], "steps"), ([], "out")],
)
def test_bad_input_is_one_error_line(tmp_path, capsys, arguments, field):
    occupied = tmp_path / "mine"
    occupied.mkdir()
    (occupied / "thesis.txt").write_text("keep")
    out = occupied if field == "out" else tmp_path / "new"
    assert main(["--out", str(out), *arguments]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and error[0].startswith(f"error: {field}=")
    assert (occupied / "thesis.txt").read_text() == "keep"
    assert not (tmp_path / "new").exists()


def test_a_file_in_the_way_is_refused(tmp_path, capsys):
    (tmp_path / "f").write_text("x")
    assert main(["--out", str(tmp_path / "f")]) == 2
    assert "out=" in capsys.readouterr().err


@pytest.mark.campaign
def test_the_full_recipe_twice_gives_the_same_bytes(tmp_path):
    """About a minute each on one core; against the shipped bytes it may differ on another processor."""
    for name in ("a", "b"):
        warm_start(tmp_path / name)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
