"""The page: hostile text stays text, everything is inside it, and every number leads to its file."""

import base64
import hashlib
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hostile_report import HOSTILE, hostile_report

from evaluation.curves import classify
from evaluation.given import ReportInput, SampleShown
from evaluation.page import explorer
from evaluation.page.document import report_page
from evaluation.page.markup import Markup, tag, text
from evaluation.report import make_finding, write_report
from evaluation.tables import headline


class Reader(HTMLParser):
    """What a browser would make of the page, as far as the standard library knows."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), (name, attrs)
        self.tags.append((name, dict(attrs)))
        if name not in {"meta", "input", "br", "hr"}:
            self.open.append(name)
            self.texts.setdefault(name, []).append("")

    def handle_startendtag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attrs)))

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data


@pytest.fixture(scope="module")
def given() -> ReportInput:
    return hostile_report()


@pytest.fixture(scope="module")
def page(given: ReportInput) -> str:
    base = given.base[given.primary]
    runs = [classify(r, base, given.primary, given.criterion, given.clusters(given.primary)) for r in given.runs]
    return report_page(given, make_finding(given), runs)


@pytest.fixture(scope="module")
def read(page: str) -> Reader:
    return Reader(page)


def test_what_models_and_names_say_stays_text(page: str, read: Reader) -> None:
    assert read.open == []
    counted = Counter(name for name, _ in read.tags)
    assert (counted["script"], counted["style"], counted["img"], counted["iframe"], counted["a"] > 5) == (
        1,
        1,
        0,
        0,
        True,
    )
    for name, attributes in read.tags:
        assert not [a for a in attributes if a.startswith("on") or a in {"style", "src", "srcdoc", "action"}], name
        assert (attributes.get("href") or "#").startswith("#"), attributes
    assert any("<script>document.title" in shown for shown in read.texts["pre"])
    for payload in HOSTILE:
        assert payload not in page or not set(payload) & set("<>\"'&"), payload
    page.encode("utf-8")
    assert "\x1b" not in page and "\u202e" not in page and "\\u202e" in page


def test_nothing_is_fetched_and_only_our_script_may_run(read: Reader) -> None:
    policy = next(a["content"] or "" for n, a in read.tags if n == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    for kind in ("script", "style"):
        (source,) = read.texts[kind]
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
        assert not any(word in source for word in ("http", "@import", "innerHTML", "eval("))


def test_every_link_has_its_place_and_every_place_its_name_once(read: Reader) -> None:
    places = [a["id"] for _, a in read.tags if "id" in a]
    assert len(places) == len(set(places))
    links = [(a["href"] or "").removeprefix("#") for n, a in read.tags if n == "a"]
    assert set(links) <= set(places)
    assert sum(x.startswith("f-") for x in links) > 4  # folders of the tables lead to their files


def test_the_files_are_there_with_their_hashes(given: ReportInput, page: str) -> None:
    sources = [*given.sources, *(s for r in given.runs for s in r.sources)]
    assert sources
    for path, digest in sources:
        assert text(path) in page and digest in page


def test_the_answer_comes_first(given: ReportInput, page: str) -> None:
    finding = make_finding(given)
    page = page.replace('<span class="nb">', "").replace("</span>", "")
    body = page[page.index("<main>") :]
    shown = (given.question, headline(given, finding), finding.sentence, "Where the arms break")
    order = [body.index(text(x)) for x in shown]
    assert order == sorted(order)
    assert text("half the seeds <b>") in page and "planned things are missing" in page


def test_pictures_and_cells_say_what_they_show(read: Reader) -> None:
    for name, attributes in read.tags:
        if name == "svg":
            assert "aria-label" in attributes or attributes.get("aria-hidden") == "true"
        if name == "td":
            assert attributes["data-label"]
    marks = [a["class"] or "" for n, a in read.tags if n == "path" and "mark" in (a.get("class") or "")]
    assert {m.split()[-1] for m in marks} == {"stable", "degraded", "collapsed", "diverged", "incomplete"}


def test_programs_are_bounded_and_what_is_left_out_is_counted(given: ReportInput) -> None:
    long = SampleShown(
        problem_id="Mbpp/0", folder="m/global_step_0", index=0, source="\u00e9" * 900_000, base="fail", plus="fail",
        tests_passed=0, tests_total=3,
    )  # fmt: skip
    many = replace(given, samples=(long,) * 5000)
    page = explorer.explorer(many)
    assert len(page.encode()) < 2 * explorer.BYTES
    shown = page.count("<pre")
    assert 0 < shown < 5000 and f"{5000 - shown} programs were left out" in page and "more characters" in page


def test_without_scripts_everything_is_there(read: Reader, given: ReportInput) -> None:
    entries = [a for n, a in read.tags if n == "details" and "data-id" in a]
    assert [a["data-id"] for a in entries] == list(given.base["mbpp_plus"].problems)
    assert not any("hidden" in a for a in entries)
    assert "hidden" in next(a for n, a in read.tags if n == "form")
    kinds = {k for a in entries for k in (a["data-kinds"] or "").split("|") if k}
    assert kinds == {"with programs", "lost", "gained", "contaminated"}


def test_an_experiment_without_anything_has_a_page(given: ReportInput, tmp_path) -> None:
    runs = tuple(replace(r, end=None, rewards=(), scores={}, figures={}, sources=()) for r in given.runs)
    write_report(tmp_path, replace(given, runs=runs, base={}, samples=(), sources=()))
    found = Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert found.open == [] and "No score is stored yet." in found.texts["p"]


def test_markup_escapes_what_is_not_markup() -> None:
    assert tag("p", "<b>", title='" onx="1') == '<p title="&quot; onx=&quot;1">&lt;b&gt;</p>'
    assert tag("p", Markup("<b>x</b>")) == "<p><b>x</b></p>"
    assert text("a\x00b\ud800c\td\ne") == "a\\u0000b\\ud800c\td\ne"
