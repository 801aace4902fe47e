"""HTML as a string type that only escaping makes: whatever is not `Markup` is text, and text never becomes markup.

Guarantees: a string of a model, a file name or an error can neither open nor close an element, leave an attribute, nor
hide characters; the page is valid UTF-8. The page's content security policy (document.py) is the second lock.
"""

import re
from html import escape

VOID = frozenset({"br", "hr", "input", "meta", "use", "path", "circle", "line", "rect", "polyline", "polygon"})


HIDDEN = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069\\ufeff\\ud800-\\udfff]"
)
"""Characters without a glyph, shown by their code: controls, lone surrogates, marks that turn the text around."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Return a value as HTML text; what is `Markup` stays as it is, what cannot be seen is shown by its code."""
    if isinstance(value, Markup):
        return value
    return Markup(escape(HIDDEN.sub(lambda m: f"\\u{ord(m[0]):04x}", str(value)), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element; `class_` and `data_id` mean `class` and `data-id`, None leaves an attribute out."""
    given = ((k.rstrip("_").replace("_", "-"), v) for k, v in attributes.items() if v is not None)
    head = "".join(f" {k}" if v is True else f' {k}="{text(v)}"' for k, v in given)
    if name in VOID and not children:
        return Markup(f"<{name}{head}>" if name in {"br", "hr", "input", "meta"} else f"<{name}{head}/>")
    return Markup(f"<{name}{head}>{''.join(map(text, children))}</{name}>")


def joined(*parts: object) -> Markup:
    """Return parts one after the other."""
    return Markup("".join(map(text, parts)))


def unbroken(value: str) -> Markup:
    """Return text whose rates (`3e-4`) stay on one line."""
    parts = re.split(r"(\d[\d.]*e-?\d+)", value)
    return joined(*(tag("span", p, class_="nb") if i % 2 else p for i, p in enumerate(parts)))
