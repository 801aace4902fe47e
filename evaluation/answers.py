r"""The final answer in a text, as an exact number: no tolerance, and no guess at the last number.

Where the answer stands (spec B): after the last `####`, else in the last `\boxed{}`, else there is none. The last
marker decides even if nothing readable follows it: a model that restates its answer has withdrawn the one before.

What is read there is one number: signs (also U+2212 and its like), thousands separators, currencies, units, per cent,
decimals, fractions and scale words (`1.5 million`) are understood; what merely explains (brackets, further sentences,
a clause after "for" or "because") is left out. Where more than one number is left the text names no answer: nothing is
glued together or chosen. An equation counts by its plain sides, which must agree.
"""

import re
from fractions import Fraction

MARKER = "####"
BOX = "\\boxed"

_CLOSING = re.compile(r"^([ \t]*####.*\S)[ \t]*####+[ \t]*$", re.MULTILINE)
"""A heading closed as it was opened: `#### 18 ####`."""
_MINUS = dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d"), "-")
_DIGITS = {0xFF10 + d: str(d) for d in range(10)}
_PARTS = {ord(c): f" {v}" for c, v in {"\u00bd": "1/2", "\u00bc": "1/4", "\u00be": "3/4"}.items()}
_SIGNS = _MINUS | _DIGITS | _PARTS | {0xFF0C: ",", 0xFF0E: ".", 0x2044: "/", 0x2215: "/", 0x2248: "=", 0xFF1A: ":"}

_GROUPS = re.compile(r"(?<=\d)(?:[\u00a0\u2009\u202f~]|\\[,;:! ]|\{,\}|,\\!)(?=\d{3}(?!\d))")
"""Between groups of three digits, beside the comma: hard and thin blanks, and what LaTeX writes there."""
_CURRENCY = "[$\u20ac\u00a3\u00a5\u20b9\u00a2]"
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}|(\d)\s*(\d))")
_OPERATORS = re.compile(r"\\(?:times|cdot|div|pm|sqrt|pi)\b|\d\s*[\^\u00b2\u00b3]")
"""What turns a number into another one: a text with it is no plain number (`m^2` is a unit)."""
_REASONS = r"as|at|after|because|by|for|from|if|in|on|over|per|since|than|when|which|with"
_CLAUSE = re.compile(rf"(?<=\d)(\D*?)\b(?:{_REASONS})\b.*", re.IGNORECASE)
_STEP = re.compile(r"\b(?:case|method|option|part|problem|question|step)\s*\d+", re.IGNORECASE)
_TOKEN = re.compile(r"(?<![\w^.])-?\+?(?:\d+\s+(?=\d+/\d))?[\d.]*\d(?:[\d.,:/]*\d)?(?:e[-+]?\d+(?!\w))?", re.I)
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?:(?P<mixed>\d+)\s+)?(?P<whole>\d{1,3}(?:,\d{3})+|\d*)(?P<decimals>\.\d+)?"
    r"(?:e(?P<exponent>[-+]?\d{1,2}))?(?:/(?P<below>\d+))?",
    re.IGNORECASE,
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_SCALE = re.compile(rf"\s*({'|'.join(_SCALES)})s?\b", re.IGNORECASE)
_LONGEST, _LONGEST_NUMBER = 400, 60
"""Characters of a text that can still be an answer, and of a number in it."""


def find_answer(text: str) -> Fraction | None:
    """Return the number that a text gives as its final answer; None if it gives none, or not one."""
    text = _CLOSING.sub(r"\1", text)
    if MARKER in text:
        tail = text[text.rindex(MARKER) + len(MARKER) :]
        line = next((x for x in tail.splitlines() if x.strip()), "")
        if BOX in tail and not re.search(r"\d", line.partition(BOX)[0]):
            return _boxed(tail)
        return read_number(line)
    return _boxed(text) if BOX in text else None


def write_answer(value: Fraction | None) -> str:
    """Return the line that `find_answer` reads the same number from; empty where there is no answer."""
    return "" if value is None else f"{MARKER} {value}"


def read_number(text: str) -> Fraction | None:
    """Return the one number that a short text stands for; None if there is no such number."""
    if len(text) > _LONGEST:
        return None
    text = _explanations_removed(_plain(text))
    sides = [_single(side) for side in text.split("=")]
    values = {value for value in sides if value is not None}
    return values.pop() if len(values) == 1 else None


def _boxed(text: str) -> Fraction | None:
    """Read the last box; one that is never closed was cut off and is no answer."""
    start = text.rindex(BOX) + len(BOX)
    content = text[start:].lstrip()
    if not content.startswith("{"):
        return None
    depth = 0
    for i, char in enumerate(content[: _LONGEST + 2]):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return read_number(content[1:i])
    return None


def _plain(text: str) -> str:
    """Return the text without markup: signs as in ASCII, LaTeX and Markdown and calculator notes gone."""
    text = re.sub(r"<<[^<>]*>>", "", text.translate(_SIGNS))
    text = _GROUPS.sub(",", text).replace("\\\\", " ")
    text = _FRACTION.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]} ", text)
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox)\b", " ", text)
    text = re.sub(rf"-\s*\\?{_CURRENCY}\s*", "-", text)
    text = re.sub(rf"\\[\[\]()%]|\\?{_CURRENCY}|[{{}}*`_]", " ", text)
    text = re.sub(r"\\(?:approx|equiv)\b", "=", text)
    return re.sub(r"^\s*([-+])\s+(?=[\d.])", r"\1", text)


def _explanations_removed(text: str) -> str:
    """Return the first sentence, without brackets, an introduction up to a colon, and a clause that gives reasons."""
    first = next((s for s in re.split(r"[.!?;](?=\s|$)", text) if s.strip()), "")
    outside = re.sub(r"[(\[][^()\[\]]*[)\]]", " ", first)
    text = outside if re.search(r"\d", outside) else first
    text = re.sub(r"^.*(?<!\d):|^.*:(?!\d)", "", text)
    return _CLAUSE.sub(r"\1", _STEP.sub(" ", text))


def _single(text: str) -> Fraction | None:
    """Return the only number of a text; None without one, with several, or with arithmetic around it."""
    found = list(_TOKEN.finditer(text))
    if len(found) != 1 or _OPERATORS.search(text):
        return None
    scale = _SCALE.match(text, found[0].end())
    value = _value(found[0][0])
    return value if value is None or scale is None else value * _SCALES[scale[1].lower()]


def _value(token: str) -> Fraction | None:
    """Return the value of a token such as `-1,234.50`, `3/4` or `2 1/2`; None if it is not written as a number."""
    m = _NUMBER.fullmatch(token)
    if (
        m is None
        or len(token) > _LONGEST_NUMBER
        or not (m["whole"] or m["decimals"])
        or (m["mixed"] and not m["below"])
    ):
        return None
    below = int(m["below"] or 1)
    if below == 0:
        return None
    value = Fraction((m["whole"].replace(",", "") or "0") + (m["decimals"] or "")) / below
    value = (value + int(m["mixed"] or 0)) * Fraction(10) ** int(m["exponent"] or 0)
    return -value if m["sign"] == "-" else value
