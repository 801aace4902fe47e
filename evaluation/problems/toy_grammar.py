"""The operations that generated problems are composed of: words, code, and one plausible misconception of each.

Integer problems are source x filter x map x reduce; string problems are transform x transform x result. A misconception
is what a warm-start solution writes instead of the right form; it is never part of a problem or its tests.
"""

from evaluation.records import Record


class Operation(Record):
    """One operation of a composition."""

    words: tuple[str, ...] = ("",)
    """Ways to say it; `{k}` and `{m}` are the problem's constants."""
    code: str = ""
    """Expression or statement; `{it}` is the generator that a reduction consumes."""
    name: str = ""
    """Its part of the function's name."""
    mistake: str | None = None
    """The form a sloppy solution uses."""


class Source(Record):
    """Where the integers of a problem come from."""

    parameter: str
    code: str
    words: str
    mistake: str | None = None


FILTERS: dict[str, Operation] = {
    "none": Operation(),
    "even": Operation(words=("even",), code="x % 2 == 0", name="even", mistake="x % 2"),
    "odd": Operation(words=("odd",), code="x % 2 == 1", name="odd", mistake="x % 2 == 0"),
    "pos": Operation(words=("positive",), code="x > 0", name="positive", mistake="x >= 0"),
    "gt": Operation(words=("greater than {k}", "above {k}"), code="x > {k}", name="above", mistake="x >= {k}"),
    "lt": Operation(words=("less than {k}", "below {k}"), code="x < {k}", name="below", mistake="x <= {k}"),
    "div": Operation(
        words=("divisible by {k}", "that are multiples of {k}"),
        code="x % {k} == 0",
        name="div",
        mistake="x // {k} == 0",
    ),
}
POSTFIX_FILTERS = frozenset({"gt", "lt", "div"})
"""Said after the noun: `numbers in a list above 3`."""

MAPS: dict[str, Operation] = {
    "none": Operation(code="x"),
    "sq": Operation(words=("squares of the",), code="x * x", name="squares", mistake="2 * x"),
    "cube": Operation(words=("cubes of the",), code="x ** 3", name="cubes", mistake="x * x"),
    "dbl": Operation(words=("doubles of the",), code="2 * x", name="doubles", mistake="x + 2"),
    "add": Operation(words=("results of adding {m} to the",), code="x + {m}", name="plus", mistake="x * {m}"),
    "mul": Operation(words=("results of multiplying by {m} the",), code="x * {m}", name="times", mistake="x + {m}"),
    "mod": Operation(words=("remainders modulo {m} of the",), code="x % {m}", name="mod", mistake="x // {m}"),
}

REDUCES: dict[str, Operation] = {
    "sum": Operation(words=("sum of the", "total of the"), code="sum({it})", name="total"),
    "max": Operation(
        words=("largest of the", "maximum of the"), code="max({it}, default=0)", name="largest", mistake="max([{it}])"
    ),
    "min": Operation(
        words=("smallest of the", "minimum of the"), code="min({it}, default=0)", name="smallest", mistake="min([{it}])"
    ),
    "count": Operation(
        words=("number of distinct values among the",), code="len(set({it}))", name="distinct", mistake="len([{it}])"
    ),
    "sorted": Operation(words=("sorted list of the",), code="sorted({it})", name="sort", mistake="[{it}]"),
    "desc": Operation(
        words=("list in descending order of the",),
        code="sorted({it}, reverse=True)",
        name="desc",
        mistake="sorted([{it}])",
    ),
    "list": Operation(words=("list of the",), code="[{it}]", name="make"),
}
WITH_DEFAULT = frozenset({"max", "min"})
"""Reductions of nothing give 0, and the statement says so."""

SOURCES: dict[str, Source] = {
    "list": Source(parameter="nums", code="nums", words="numbers in a list"),
    "digits": Source(parameter="n", code="[int(d) for d in str(n)]", words="digits of n"),
    "range": Source(parameter="n", code="range(1, n + 1)", words="integers from 1 to n", mistake="range(1, n)"),
    "words": Source(parameter="s", code="[len(w) for w in s.split()]", words="word lengths in a sentence"),
}

TRANSFORMS: dict[str, Operation] = {
    "upper": Operation(
        words=("convert it to upper case",), code="s = s.upper()", name="upper", mistake="s = s.title()"
    ),
    "swap": Operation(
        words=("swap the case of the letters",), code="s = s.swapcase()", name="swap", mistake="s = s.upper()"
    ),
    "rev": Operation(words=("reverse it",), code="s = s[::-1]", name="reverse", mistake="s = s[:-1]"),
    "novow": Operation(
        words=("remove the vowels",),
        code="s = ''.join(c for c in s if c not in 'aeiouAEIOU')",
        name="vowels",
        mistake="s = ''.join(c for c in s if c not in 'aeiou')",
    ),
    "digits": Operation(
        words=("keep only the digits",),
        code="s = ''.join(c for c in s if c.isdigit())",
        name="digits",
        mistake="s = ''.join(c for c in s if c.isalnum())",
    ),
    "head": Operation(
        words=("take the first {k} characters",), code="s = s[:{k}]", name="first", mistake="s = s[{k}:]"
    ),
    "tail": Operation(words=("take the last {k} characters",), code="s = s[-{k}:]", name="last", mistake="s = s[-{k}]"),
    "nospace": Operation(
        words=("remove the spaces",), code="s = s.replace(' ', '')", name="spaces", mistake="s = s.strip()"
    ),
    "revw": Operation(
        words=("reverse the order of the words",),
        code="s = ' '.join(s.split()[::-1])",
        name="words",
        mistake="s = s[::-1]",
    ),
    "sortw": Operation(
        words=("sort the words",),
        code="s = ' '.join(sorted(s.split()))",
        name="sort",
        mistake="s = ' '.join(s.split())",
    ),
    "sortc": Operation(
        words=("sort the characters",), code="s = ''.join(sorted(s))", name="chars", mistake="s = sorted(s)"
    ),
}

RESULTS: dict[str, Operation] = {
    "none": Operation(words=("return the string",), code="s", name="string"),
    "len": Operation(words=("return its length",), code="len(s)", name="length"),
    "words": Operation(
        words=("return the number of words",), code="len(s.split())", name="count", mistake="s.count(' ')"
    ),
    "dist": Operation(
        words=("return the number of distinct characters",), code="len(set(s))", name="distinct", mistake="len(s)"
    ),
    "vow": Operation(
        words=("return the number of vowels",),
        code="sum(c in 'aeiouAEIOU' for c in s)",
        name="vowels",
        mistake="sum(c in 'aeiou' for c in s)",
    ),
    "up": Operation(
        words=("return the number of upper case letters",),
        code="sum(c.isupper() for c in s)",
        name="upper",
        mistake="sum(c.isalpha() for c in s)",
    ),
    "dig": Operation(
        words=("return the sum of its digits",),
        code="sum(int(c) for c in s if c.isdigit())",
        name="sum",
        mistake="sum(c.isdigit() for c in s)",
    ),
}

VERBS = ("find", "return", "compute", "get")
WORDS = tuple("red Blue sky 42 tree Apple moon a7b river Stone x9 code Queen lamp 305 Tiger open Ice zebra up".split())  # noqa: SIM905
