"""The final answer of a text: gold answers, the known faults of graders, and what models write."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.answers import find_answer, read_number, write_answer

SHARED = Path(__file__).resolve().parents[3] / "shared"
MINUS, THIN = "\u2212", "\u202f"


def grade(gold: int, completion: str) -> int:
    return int(find_answer(completion) == gold)


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="needs the local copy of GSM8K")
def test_every_gold_answer_has_the_value_after_its_marker():
    """GSM8K-147, 148, 163: commas, signs, and nothing but what follows the only marker; all 8,792 rows."""
    seen = 0
    for split in ("train", "test"):
        for line in (SHARED / "data" / f"gsm8k_{split}.jsonl").read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)["answer"]
            _, gold = answer.split("####")
            assert find_answer(answer) == int(gold.replace(",", ""))
            seen += 1
    assert seen == 8792


FAULTS = [
    ("GSM8K-147", 2125, "#### 2125", 1),
    ("GSM8K-147", 2125, "#### 2,125", 1),
    ("GSM8K-148", -10, "#### -10", 1),
    ("GSM8K-148", -10, "#### 10", 0),
    ("GSM8K-153", 20, "#### 18\nWait, recheck.\n#### 20", 1),
    ("GSM8K-153", 18, "#### 18\nWait, recheck.\n#### 20", 0),
    ("GSM8K-153", 20, r"\boxed{18} ... \boxed{20}", 1),
    ("GSM8K-154", 12, r"\boxed{\frac{1}{2}}", 0),
    ("GSM8K-155", 34, r"\boxed{3 \text{ apples and } 4 \text{ pears}}", 0),
    ("GSM8K-157", -5, "#### The answer is -$5", 1),
    ("GSM8K-157", -5, f"#### The answer is {MINUS}5.", 1),
    ("GSM8K-158", 3, "Therefore 9 apples.\n3. Done", 0),
    ("GSM8K-158", 9, "1. 2+2=4 ... 2. 4+5=9. So 9 in 2 steps.", 0),
    ("GSM8K-160", 18, "#### 180", 0),
    ("GSM8K-160", 5, "#### 15", 0),
    ("GSM8K-161", 50, "#### 50%", 1),
    ("GSM8K-161", 50, "#### 50 dollars", 1),
    ("GSM8K-161", 50, "#### 50.0", 1),
    ("GSM8K-161", 50, "#### 50.5", 0),
]


@pytest.mark.parametrize(("fault", "gold", "completion", "reward"), FAULTS)
def test_known_faults(fault, gold, completion, reward):
    assert grade(gold, completion) == reward


def test_the_half_of_fault_154_and_the_words_of_157_have_their_values():
    assert find_answer(r"\boxed{\frac{1}{2}}") == Fraction(1, 2)
    assert read_number("The answer is -$5") == read_number(f"The answer is {MINUS}5.") == -5


@pytest.mark.skipif(not (SHARED / "cases").is_dir(), reason="needs the collected cases")
def test_every_collected_fault_of_this_area_has_a_test():
    rows = [json.loads(x) for x in (SHARED / "cases" / "faults.jsonl").read_text(encoding="utf-8").splitlines()]
    known = {r["id"] for r in rows if r["area"] == "gsm8k"}
    elsewhere = {"GSM8K-162", "GSM8K-163"}  # test_gsm8k.py
    assert known == {fault for fault, *_ in FAULTS} | elsewhere


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # signs and separators
        (f"#### {MINUS}1,234", -1234),
        ("#### - 5", -5),
        ("#### +5", 5),
        ("#### Total - 18", 18),
        (f"#### 1{THIN}234{THIN}567", 1234567),
        (r"#### 1{,}234", 1234),
        (r"#### 1\,234", 1234),
        ("#### 1 234", None),
        ("#### 12,34", None),
        ("#### 1,2345", None),
        ("#### 1.000.000", None),
        ("#### 2,50", None),
        ("#### \uff11\uff18", 18),
        # currencies, units, scale
        ("#### $18.00", 18),
        ("#### $-5", -5),
        ("#### \u20ac5", 5),
        ("#### 70,000$", 70000),
        ("#### USD 5,000", 5000),
        ("#### 25 m^2", 25),
        ("#### 18km", 18),
        ("#### 1.5 million dollars", 1_500_000),
        # decimals, fractions, powers
        ("#### .5", Fraction(1, 2)),
        ("#### 5.", 5),
        ("#### 6/3", 2),
        ("#### 2 1/2", Fraction(5, 2)),
        ("#### 3\u00bd", Fraction(7, 2)),
        (r"#### -\frac{1}{2}", Fraction(-1, 2)),
        ("#### 1e3", 1000),
        ("#### 1e400", None),
        ("#### 2^3", None),
        ("#### 10^{3}", None),
        (r"#### \sqrt{16}", None),
        ("#### 1/0", None),
        ("#### 5:30", None),
        # several numbers: never glued, never chosen
        ("#### 18 or 20", None),
        ("#### 18, 20", None),
        ("#### 10-20", None),
        ("#### 9 + 9", None),
        ("#### 9 * 2 = 18", 18),
        ("#### 18 = 9 * 2", 18),
        ("#### x = 18", 18),
        ("#### 18 = 20", None),
        # what explains is left out
        ("#### 18 (9 eggs at $2 each)", 18),
        ("#### 18. She sells 9 eggs at 2 dollars.", 18),
        ("#### 18 dollars for 9 eggs", 18),
        ("#### 18\n\nI hope that these 2 steps help!", 18),
        ("#### Answer: 18", 18),
        ("#### Step 2: add them", None),
        ("#### Step 2", None),
        # markup
        ("####18", 18),
        ("#### **18**", 18),
        ("#### $18$", 18),
        (r"#### \(18\)", 18),
        ("###### 18", 18),
        ("#### 18 ####", 18),
        ("#### <<9*2=18>>18", 18),
        ("#### 18<|im_end|>", 18),
        ("####\n18", 18),
        (r"#### $\boxed{18}$", 18),
        ("#### Final Answer\n\\boxed{18}", 18),
        (r"\boxed{\text{18 dollars}}", 18),
        (r"\boxed{\boxed{18}}", 18),
        (r"\boxed{18}" + "\n#### 20", 20),
        # cut off: the last marker decides
        ("", None),
        ("18", None),
        ("####", None),
        ("#### 18\nOr rather\n####", None),
        (r"\boxed{18} is wrong, it is \boxed{2", None),
        (r"\boxed 18", None),
        ("#### " + "9" * 5000, None),
    ],
)
def test_what_models_write(text, value):
    assert find_answer(text) == value


@given(st.text(alphabet="0123456789.,-+/#$%\\{}boxedfrac =()<>*:e\u2212\u00bd\n ", max_size=60))
def test_any_text_is_read_without_an_exception_and_its_answer_reads_back(text):
    for written in (text, f"#### {text}", f"\\boxed{{{text}}}"):
        value = find_answer(written)
        assert find_answer(write_answer(value)) == value


@given(st.integers(-(10**9), 10**9))
def test_integers_survive_every_usual_spelling(n):
    for shown in (f"{n}", f"{n:,}", f"{n}.0", f"{n:,}.00", f"{n}".replace("-", MINUS), f"$ {abs(n):,}", f"{n} eggs"):
        assert find_answer(f"So it is 7.\n#### {shown}") == (abs(n) if "$" in shown else n)
