"""The page itself: the question, the answer in one sentence, the ladder; then details, each number with its file.

Nothing is fetched: the content security policy forbids it, and allows no script but the one whose hash it names, so
that even a completion that got past the escaping would not run.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from evaluation.curves import Classified
from evaluation.findings import Finding
from evaluation.given import ReportInput
from evaluation.markup import Table
from evaluation.page.explorer import explorer
from evaluation.page.markup import Markup, joined, tag, unbroken
from evaluation.page.pictures import curves_pictures, ladder_picture, patterns
from evaluation.tables import (
    answer_tables,
    arms_table,
    clean_text,
    contamination_table,
    cost_table,
    forgetting_table,
    headline,
    onset_table,
    overlaps_table,
    runs_table,
    scores_table,
    sharpened_text,
    sharpening_table,
    sources_table,
)

HERE = Path(__file__).parent


def report_page(given: ReportInput, finding: Finding, runs: Sequence[Classified]) -> str:
    """Return the whole page."""
    style, script = ((HERE / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    head = joined(
        tag("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{given.experiment}: {headline(given, finding)}"),
        Markup(f"<style>{style}</style>"),
    )
    sections = _sections(given, finding, runs)
    links = (tag("a", title, href=f"#{key}") for key, title, _ in sections)
    body = joined(
        tag("a", "To the answer", href="#answer", class_="skip"),
        patterns(),
        tag("header", tag("h1", given.experiment), tag("nav", *links, aria_label="Sections")),
        tag("main", *(_section(*s) for s in sections)),
        Markup(f"<script>{script}</script>"),
    )
    return f"<!DOCTYPE html>\n{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def _section(key: str, title: str, content: Markup) -> Markup:
    return tag("section", tag("h2", title, id=key), content, aria_labelledby=key)


def _sections(given: ReportInput, finding: Finding, runs: Sequence[Classified]) -> list[tuple[str, str, Markup]]:
    anchors = _anchors(given)

    def show(*tables: Table | None) -> Markup:
        return joined(*(_table(t, anchors) for t in tables if t is not None))

    protocols = given.protocols
    seen = show(overlaps_table(given), contamination_table(given))
    found = [
        ("answer", "Answer", _answer(given, finding)),
        ("ladder", "Ladder", joined(ladder_picture(given, finding, runs), show(*answer_tables(given, finding)))),
        ("runs", "Runs", joined(show(runs_table(given, finding)), _signs(given), show(onset_table(given, finding)))),
        ("curves", "Curves", curves_pictures(given)),
        ("arms", "Arms", show(arms_table(given)) or tag("p", "There is no pair of runs to compare.")),
        (
            "forgetting",
            "Forgetting",
            show(*(f(given, p) for p in protocols for f in (forgetting_table, sharpening_table))),
        ),
        ("contamination", "Contamination", joined(_clean(finding), seen) or tag("p", "Nothing is known of it.")),
        ("scores", "Scores", _scores(given, anchors)),
        ("explorer", "Problems", explorer(given)),
        ("cost", "Cost", show(cost_table(given)) or tag("p", "Nothing is recorded.")),
        ("provenance", "Provenance", _provenance(given, finding)),
    ]
    return found


def _answer(given: ReportInput, finding: Finding) -> Markup:
    gaps = ""
    if finding.missing:
        gaps = tag(
            "p", tag("a", f"{len(finding.missing)} planned things are missing", href="#provenance"), class_="warn"
        )
    status = tag("p", "Statistical status: ", unbroken(finding.statistical_status), class_="note")
    return joined(
        tag("p", given.question, class_="question"),
        tag("p", unbroken(headline(given, finding)), class_="sentence"),
        tag("p", unbroken(finding.sentence)),
        status,
        _clean(finding),
        tag("p", sharpened, class_="note") if (sharpened := sharpened_text(given)) else "",
        gaps,
    )


def _clean(finding: Finding) -> Markup:
    told = clean_text(finding)
    return tag("p", unbroken(told), class_="note") if told else Markup()


def _signs(given: ReportInput) -> Markup:
    items = [tag("li", tag("code", run.label), f" {sign}") for run in given.runs for sign in run.signs]
    return tag("ul", *items, class_="plain") if items else Markup()


def _scores(given: ReportInput, anchors: dict[str, str]) -> Markup:
    note = tag("p", "The last checkpoint of each run; every checkpoint, suite, subset and k is in scores.csv.")
    return joined(note, *(_table(scores_table(given, p, ends=True), anchors) for p in given.protocols))


def _anchors(given: ReportInput) -> dict[str, str]:
    """Return the place in the table of files of each folder that a table names, the primary protocol's score of it."""
    protocol = given.protocols[0].folder
    found = {}
    for path, _ in (*given.sources, *(s for r in given.runs for s in r.sources)):
        cell, _, rest = path.partition("/")
        if rest.startswith(f"scores/{protocol}/"):
            found[f"{cell}/{rest.split('/')[2]}"] = _anchor(path)
        elif rest.endswith("steps.jsonl"):
            found[cell] = _anchor(path)
    return found


def _anchor(path: str) -> str:
    return f"f-{hashlib.sha256(path.encode()).hexdigest()[:12]}"


def _table(table: Table, anchors: dict[str, str]) -> Markup:
    """Return a table whose rows become cards on a narrow screen; folders link to the file they rest on."""
    head, *rows = table.rows
    first = tag("thead", tag("tr", *(tag("th", h, scope="col") for h in head)))
    body = (tag("tr", *(_cell(h, c, anchors) for h, c in zip(head, row, strict=True))) for row in rows)
    note = tag("p", table.note, class_="note") if table.note else Markup()
    return joined(tag("table", tag("caption", table.title), first, tag("tbody", *body)), note)


def _cell(head: str, value: str, anchors: dict[str, str]) -> Markup:
    place = anchors.get(value.removesuffix(" (base)"))
    return tag("td", tag("a", value, href=f"#{place}") if place else unbroken(value), data_label=head)


def _provenance(given: ReportInput, finding: Finding) -> Markup:
    parts = []
    for title, lines in (("Missing", finding.missing), ("Departures", finding.departures), ("Notes", given.notes)):
        empty = "none" if title != "Notes" else ""
        if lines or empty:
            parts.append(tag("h3", title))
            parts.append(tag("ul", *(tag("li", x) for x in lines)) if lines else tag("p", empty))
    made = Table("Made by", (("what", "value"), *given.provenance.items())) if given.provenance else None
    parts.append(_table(made, {}) if made else Markup())
    if (files := sources_table(given)) is not None:
        rows = (tag("li", tag("code", p), " ", tag("code", h), id=_anchor(p)) for p, h in files.rows[1:])
        title = tag("summary", f"{len(files.rows) - 1} files that the numbers come from, with their sha256")
        parts.append(tag("details", title, tag("ul", *rows, class_="plain files"), id="files"))
    return joined(*parts)
