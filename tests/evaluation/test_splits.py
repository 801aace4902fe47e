"""Who trains and who evaluates."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from evaluation.errors import InputError
from evaluation.problems import load_benchmark, load_split, prepare, read_problems, write_problems
from evaluation.records import Problem
from evaluation.splits import MBPP_SHA256, Ids, Split, partition

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
MBPP, MBPP_PLUS = str(DATA / "mbpp.jsonl"), str(DATA / "MbppPlus-v0.2.0.jsonl")
needs_data = pytest.mark.skipif(not Path(MBPP).is_file(), reason="needs the local copies of MBPP and MBPP+")


@needs_data
def test_the_real_partition():
    """SPLIT-001: 276 is not the canonical test split, which has 500 problems; SPLIT-003: 320, not 474."""
    split = load_split(MBPP, MBPP_PLUS)
    assert split.counts.model_dump() == {"train": 320, "plus": 378, "test": 276, "canonical_test": 500}
    assert split.sha256.model_dump() == MBPP_SHA256
    assert sum(split.ids.train) == 244_169
    assert {1, 5, 10} <= set(split.ids.train)
    assert {2, 3, 4, 6, 7, 8, 9} <= set(split.ids.plus)  # SPLIT-006: MBPP's usual examples are evaluated problems
    assert split.sources["mbpp"].rows == 974
    assert split.sources["mbpp"].sha256 == "ccf64ceae9c5403bf50a044cb6d505bfd2a2963ee58338ba268fd65beab92a9f"
    assert Split.model_validate_json(split.model_dump_json(by_alias=True)) == split


@needs_data
def test_line_order_does_not_matter(tmp_path):
    """SPLIT-004."""
    shuffled = []
    for path in (MBPP, MBPP_PLUS):
        lines = Path(path).read_text().splitlines()
        random.Random(0).shuffle(lines)
        shuffled.append(tmp_path / Path(path).name)
        shuffled[-1].write_text("\n".join(lines))
    assert load_split(*map(str, shuffled)).ids == load_split(MBPP, MBPP_PLUS).ids


def test_partition_is_by_id():
    ids = partition([600, 11, 5, 6, 12], [6, 12])
    assert (ids.train, ids.plus, ids.test) == ((5, 600), (6, 12), (11,))
    with pytest.raises(ValueError, match="not in MBPP"):
        partition([5], [6])


def test_parts_must_be_disjoint_and_ascending():
    for train, plus in (((1, 2), (2,)), ((2, 1), ()), ((1, 1), ())):
        with pytest.raises(ValidationError):
            Ids(train=train, plus=plus, test=())


@needs_data
def test_prepared_files_hold_the_problems(tmp_path):
    made = prepare("mbpp", 0, ["mbpp_plus"], tmp_path, MBPP, MBPP_PLUS)
    train = read_problems(made.train)
    assert [p.number for p in train] == list(made.split.ids.train)
    assert all(p.base_inputs is None and p.plus_inputs is None for p in train)
    for name in ("mbpp_plus", "mbpp_test276"):
        assert read_problems(made.benchmarks[name]) == load_benchmark(name, MBPP, MBPP_PLUS)
    stored = json.loads((tmp_path / "split.json").read_text())
    assert stored["schema"] == "split/1"
    assert Split.model_validate(stored).identity == made.split_sha256
    assert made.revisions["mbpp"].startswith("sha256:ccf64ceae9")
    # One benchmark or two asked for: the same split. Another text of one problem: another identity.
    assert prepare("mbpp", 0, ["mbpp_test276"], tmp_path, MBPP, MBPP_PLUS).split_sha256 == made.split_sha256
    other = made.split.replace(problems={**made.split.problems, "train": "0" * 64})
    assert other.identity != made.split_sha256


def test_a_rerun_leaves_the_files_alone(tmp_path):
    made = prepare("toy", 3, ["toy_plus"], tmp_path)
    files = sorted(tmp_path.iterdir())
    assert [f.name for f in files] == ["contamination.json", "split.json", "toy_plus.jsonl", "train.jsonl"]
    before = [(f.stat().st_mtime_ns, f.read_bytes()) for f in files]
    files[0].write_text("cut off")
    assert prepare("toy", 3, ["toy_plus"], tmp_path) == made
    assert [f.read_bytes() for f in files] == [b for _, b in before]
    assert [f.stat().st_mtime_ns for f in files[1:]] == [t for t, _ in before[1:]]


def test_generated_splits_have_the_same_schema(tmp_path):
    one, two = (prepare("toy", seed, ["toy_plus"], tmp_path / str(seed)) for seed in (1, 2))
    assert one.split.counts.model_dump() == {"train": 320, "plus": 128, "test": 0, "canonical_test": 0}
    assert one.split.ids == two.split.ids
    assert one.split_sha256 != two.split_sha256, "the ids are the same, the problems are not"
    assert len(load_benchmark("toy_plus", data_seed=1)) == 128


def test_unknown_benchmarks_are_refused(tmp_path):
    for call in (
        lambda: prepare("toy", 0, ["mbpp_plus"], tmp_path),
        lambda: prepare("gsm", 0, [], tmp_path),
        lambda: load_benchmark("humaneval"),
        lambda: read_problems(tmp_path / "none.jsonl"),
    ):
        with pytest.raises(InputError):
            call()


def test_infinite_inputs_survive_the_file(tmp_path):
    """`Mbpp/404` compares infinities."""
    problem = Problem(
        problem_id="Mbpp/404",
        text="t",
        entry_point="f",
        reference="",
        asserts=("assert f(1)",),
        plus_inputs=[[float("inf"), -float("inf"), 1e-30]],
    )
    write_problems(tmp_path / "p.jsonl", [problem])
    assert read_problems(tmp_path / "p.jsonl") == [problem]
    (tmp_path / "p.jsonl").write_text('{"problem_id": 3}\n')
    with pytest.raises(InputError):
        read_problems(tmp_path / "p.jsonl")


@needs_data
def test_local_files_need_no_heavy_library():
    code = (
        "import sys; from evaluation.problems import load_split; load_split(*sys.argv[1:]);"
        "print([m for m in ('torch', 'transformers', 'datasets', 'evalplus', 'pandas') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code, MBPP, MBPP_PLUS], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
