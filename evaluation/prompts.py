"""The prompt specification: one hashed rendering, stop rule and extraction for training and evaluation alike.

`mbpp/1` shows a problem's text and the first of its asserts, which names the function (EVAL-116). Renderings:
`chat` (EvalPlus's instruction inside the model's own chat template, thinking off), `docstring` (EvalPlus's form for
base models: a file's docstring that the completion continues, with EvalPlus's stop strings) and `plain` (`toy/1`).
`gsm8k/1` and `sums/1` show the question alone, `chat` with an instruction to end with `#### NUMBER` (spec B). There are
no worked examples in a prompt: MBPP's usual ones, ids 2, 3 and 4, are MBPP+ problems (SPLIT-006).

Nothing here imports transformers: `resolve` reads a model folder's JSON files, and `check` compares what it found
with the objects that a child process has really loaded.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from evaluation.answers import find_answer, write_answer
from evaluation.errors import InputError
from evaluation.extraction import cut, fenced_program, strip_end_markers
from evaluation.records import Problem, Record, sha256_json

Rendering = Literal["chat", "docstring", "plain"]

INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
)
"""EvalPlus 0.3.1's instruction (`evalplus.codegen.run_codegen`)."""

ANSWER_INSTRUCTION = (
    "Solve the following problem step by step. Then give the final answer, a number without units, on a last line of "
    "its own after ####, like this:\n#### 42"
)
"""Of `gsm8k/1`."""

STOP_STRINGS = (
    "<|endoftext|>",
    "<|endofmask|>",
    "</s>",
    "\nif __name__",
    "\ndef main(",
    "\nprint(",
    '\n"""',
    "\nassert",
)
"""EvalPlus 0.3.1's for base models: `provider.utility.EOS` and those of direct completion on MBPP."""

END_MARKERS = ("<|endoftext|>", "<|im_end|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<end_of_turn>")
"""Texts that a decoder may leave after the program; they are never part of one (EXTRACT-040)."""

CHAT_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
"""Tokens that end a chat turn: a stop id when the model's template writes it. Base models lack it in their configs."""

RENDERINGS: dict[str, tuple[Rendering, ...]] = {
    "mbpp/1": ("chat", "docstring"),
    "toy/1": ("plain",),
    "gsm8k/1": ("chat", "plain"),
    "sums/1": ("plain",),
}
"""Prompt names and the renderings each has."""

PROMPTS = {name.partition("/")[0]: name for name in RENDERINGS}
"""The prompt name of each training benchmark."""


class PromptSpec(Record):
    """Everything between a problem and its program, but for the model: hashed into every manifest."""

    name: Literal["mbpp/1", "toy/1", "gsm8k/1", "sums/1"]
    rendering: Rendering
    instruction: str = ""
    """Words before the problem (`chat` only)."""
    stop_strings: tuple[str, ...] = ()
    """The completion ends before the first of them."""
    extraction: Literal["fenced/1", "continue/1", "whole/1", "answer/1"]
    """How a completion becomes a program: last defining fenced block, cut at the stop strings, as it stands; or the
    final answer in it as a line `#### NUMBER`, empty where there is none (`evaluation/answers.py`)."""
    stop_ids: tuple[int, ...]
    """Union of the stop ids of tokenizer, config and generation config, and the chat end token; ascending."""
    end_markers: tuple[str, ...] = END_MARKERS
    """Texts of the stop tokens and their like, removed from a program's end."""
    template_sha256: str | None = None
    """Of the chat template's text (`chat` only)."""

    @property
    def sha256(self) -> str:
        """The `prompt_sha256` of manifests and scores."""
        return sha256_json(self)


def resolve(model_dir: Path, *, name: str, rendering: str) -> PromptSpec:
    """Return the specification of one model folder, from its JSON files alone.

    Args:
        model_dir: local folder with config.json and the tokenizer's files; weights are not read.
        name: one of `RENDERINGS`.
        rendering: one that the name has (`RENDERINGS`).

    Raises:
        InputError: no such name or rendering, no chat template where `chat` needs one, or no stop id at all.
    """
    if rendering not in RENDERINGS.get(name, ()):
        if name in RENDERINGS:
            known = " or ".join(RENDERINGS[name])
            raise InputError("prompt", rendering, f"{name} has no such rendering", f"use --prompt {known}")
        raise InputError("prompt", name, "no such prompt specification", f"use one of {', '.join(RENDERINGS)}")
    template = read_template(model_dir)
    if rendering == "chat" and template is None:
        raise InputError("prompt", "chat", f"{model_dir} has no chat template", f"use --prompt {RENDERINGS[name][-1]}")
    vocabulary, eos = _read_tokens(model_dir)
    ids = _collect_ids(
        _eos_ids(_read_json(model_dir / "config.json")),
        _eos_ids(_read_json(model_dir / "generation_config.json")),
        [vocabulary[eos]] if eos in vocabulary else [],
        _chat_end_ids(rendering, template, vocabulary),
    )
    if not ids:
        raise InputError("model", model_dir, "no stop id in config, generation config or tokenizer", "add eos_token_id")
    return _build(name, rendering, ids, template, {i: t for t, i in vocabulary.items()})


def default_rendering(model_dir: Path, name: str = "mbpp/1") -> Rendering:
    """Return how a model that says nothing else is prompted: `chat` if its tokenizer has a template."""
    known = RENDERINGS[name]
    return "chat" if "chat" in known and read_template(model_dir) is not None else known[-1]


def check(spec: PromptSpec, tokenizer: Any, config: Any, generation_config: Any) -> None:
    """Compare a specification with the loaded transformers objects, before anything is drawn.

    Args:
        spec: what the cell or the request says.
        tokenizer: has `eos_token_id`, `chat_template`, `get_vocab()`.
        config: has `eos_token_id`.
        generation_config: has `eos_token_id`, or is None.

    Raises:
        InputError: another stop id or another template; training and evaluation would measure different things.
    """
    template = _default_template(tokenizer.chat_template)
    found = _collect_ids(
        _as_ids(getattr(tokenizer, "eos_token_id", None)),
        _as_ids(_config_value(config)),
        _as_ids(getattr(generation_config, "eos_token_id", None)),
        _chat_end_ids(spec.rendering, template, tokenizer.get_vocab()),
    )
    if found != spec.stop_ids:
        raise InputError(
            "stop_ids",
            list(found),
            f"the prompt specification stops at {list(spec.stop_ids)}",
            "use the specification of this model's own files",
        )
    if spec.rendering == "chat" and (template is None or _sha256(template) != spec.template_sha256):
        raise InputError(
            "chat_template",
            None if template is None else _sha256(template),
            f"the prompt specification has {spec.template_sha256}",
            "use the tokenizer that the checkpoint was trained with",
        )


def render(spec: PromptSpec, problem: Problem, apply_chat_template: Callable[..., Any] | None = None) -> str:
    """Return the prompt of one problem.

    Args:
        spec: the specification.
        problem: its text and, of MBPP, its first assert are shown.
        apply_chat_template: the tokenizer's method; needed for `chat` only.
    """
    if spec.rendering == "plain":
        return problem.text + "\n"
    if spec.extraction == "answer/1":
        return _turn(f"{spec.instruction}\n\n{problem.text}", apply_chat_template)
    docstring = f'"""\n{problem.text}\n{problem.asserts[0]}\n"""\n'
    assert problem.entry_point in docstring, f"{problem.problem_id}: the prompt does not name {problem.entry_point}"
    if spec.rendering == "docstring":
        return docstring
    return _turn(f"{spec.instruction}\n```\n{docstring.strip()}\n```\n", apply_chat_template)


def _turn(message: str, apply_chat_template: Callable[..., Any] | None) -> str:
    """Return a user's message in the model's own chat form, thinking off, ready for the answer."""
    assert apply_chat_template is not None, "the chat rendering needs the tokenizer's template"
    return apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )


def prompt_ids(spec: PromptSpec, problem: Problem, tokenizer: Any) -> list[int]:
    """Return the token ids of a problem's prompt: the one way that both rollouts and samples are prompted.

    A chat template writes its special tokens itself; the other renderings get those the tokenizer adds.
    """
    text = render(spec, problem, tokenizer.apply_chat_template if spec.rendering == "chat" else None)
    return list(tokenizer.encode(text, add_special_tokens=spec.rendering != "chat"))


def extract(spec: PromptSpec, completion: str, problem: Problem) -> str:
    """Return the program that a completion stands for; always a text, never an exception (wrong is the judge's word).

    Nothing that the model wrote inside the program is dropped or reordered: helpers, decorators, constants and demo
    statements stay (EXTRACT-041 .. 043, 048).
    """
    text = cut(completion, spec.stop_strings)
    if spec.extraction == "answer/1":
        return write_answer(find_answer(strip_end_markers(text, spec.end_markers)))
    if spec.extraction == "fenced/1":
        text = fenced_program(strip_end_markers(text, spec.end_markers), problem.entry_point)
    return strip_end_markers(text, spec.end_markers)


def stopped(spec: PromptSpec, text: str) -> bool:
    """True when a completion holds a stop string, so that its sampling may end."""
    return any(s in text for s in spec.stop_strings)


def read_template(model_dir: Path) -> str | None:
    """Return the chat template as transformers would load it: the .jinja file first, else the tokenizer's config."""
    jinja = model_dir / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    for file in ("chat_template.json", "tokenizer_config.json"):
        found = _read_json(model_dir / file).get("chat_template")
        if isinstance(found, list):
            found = {t["name"]: t["template"] for t in found}
        if found is not None:
            return _default_template(found)
    return None


def _build(
    name: str, rendering: str, ids: tuple[int, ...], template: str | None, texts: Mapping[int, str]
) -> PromptSpec:
    markers = (*END_MARKERS, *(texts[i] for i in ids if i in texts))
    read = name in {"gsm8k/1", "sums/1"}
    extraction = "answer/1" if read else {"chat": "fenced/1", "docstring": "continue/1", "plain": "whole/1"}[rendering]
    instruction = ANSWER_INSTRUCTION if read else INSTRUCTION
    return PromptSpec.model_validate(
        {
            "name": name,
            "rendering": rendering,
            "instruction": instruction if rendering == "chat" else "",
            "stop_strings": STOP_STRINGS if rendering == "docstring" else (),
            "extraction": extraction,
            "stop_ids": ids,
            "end_markers": tuple(dict.fromkeys(markers)),
            "template_sha256": _sha256(template) if rendering == "chat" and template is not None else None,
        }
    )


def _default_template(template: Any) -> str | None:
    """Return the template that transformers uses where a tokenizer has several, by name."""
    return template.get("default") if isinstance(template, dict) else template


def _chat_end_ids(rendering: str, template: str | None, vocabulary: Mapping[str, int]) -> list[int]:
    if rendering != "chat" or template is None:
        return []
    return [vocabulary[t] for t in CHAT_END_TOKENS if t in template and t in vocabulary]


def _collect_ids(*sources: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({i for source in sources for i in source}))


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, list | tuple) else [int(value)]


def _config_value(config: Any) -> Any:
    """Return a config's stop ids; those of a model with several parts are in its text part."""
    own = getattr(config, "eos_token_id", None)
    return own if own is not None else getattr(getattr(config, "text_config", None), "eos_token_id", None)


def _eos_ids(config: Mapping[str, Any]) -> list[int]:
    own = config.get("eos_token_id")
    return _as_ids(own if own is not None else (config.get("text_config") or {}).get("eos_token_id"))


def _read_tokens(model_dir: Path) -> tuple[dict[str, int], str | None]:
    """Return the ids of added tokens and of the end token by text, and the end token's text."""
    tokenizer, settings = _read_json(model_dir / "tokenizer.json"), _read_json(model_dir / "tokenizer_config.json")
    tokens = {str(t["content"]): int(t["id"]) for t in tokenizer.get("added_tokens") or ()}
    tokens |= {str(_text(t)): int(i) for i, t in (settings.get("added_tokens_decoder") or {}).items()}
    eos = _text(settings.get("eos_token") or _read_json(model_dir / "special_tokens_map.json").get("eos_token"))
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if eos is not None and eos not in tokens and isinstance(vocabulary, dict) and eos in vocabulary:
        tokens[eos] = int(vocabulary[eos])
    return tokens, eos


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError("model", path, f"not JSON ({error})", "fetch the model's files again") from error


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
