"""One prompt for training and evaluation."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from evaluation.errors import InputError
from evaluation.problems import load_benchmark, prepare, read_problems
from evaluation.prompts import (
    INSTRUCTION,
    STOP_STRINGS,
    PromptSpec,
    check,
    default_rendering,
    prompt_ids,
    read_template,
    render,
    resolve,
    stopped,
)
from evaluation.records import Problem

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
MBPP, MBPP_PLUS = str(DATA / "mbpp.jsonl"), str(DATA / "MbppPlus-v0.2.0.jsonl")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the local copies of MBPP and MBPP+")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PROBLEM = Problem(
    problem_id="Mbpp/1",
    text="Write a function to double a number.",
    entry_point="dbl",
    reference="",
    asserts=("assert dbl(4) == 8", "assert dbl(1) == 2"),
)
DOCSTRING = '"""\nWrite a function to double a number.\nassert dbl(4) == 8\n"""\n'


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A folder as Qwen's base models have it: three different ideas of where a text ends."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    config = transformers.Qwen3Config(
        vocab_size=260,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        eos_token_id=256,
        bos_token_id=None,
    )
    config.save_pretrained(folder)
    transformers.GenerationConfig(eos_token_id=[256, 259]).save_pretrained(folder)
    return folder


def loaded(folder: Path):
    import transformers

    return (
        transformers.AutoTokenizer.from_pretrained(folder),
        transformers.AutoConfig.from_pretrained(folder),
        transformers.GenerationConfig.from_pretrained(folder),
    )


@pytest.mark.parametrize(("rendering", "stop_ids"), [("chat", (256, 258, 259)), ("docstring", (256, 259))])
def test_files_and_loaded_objects_agree(model_dir, rendering, stop_ids):
    """The union of all stop ids, with the chat end token for chat alone; both ways of reading give one answer."""
    spec = resolve(model_dir, name="mbpp/1", rendering=rendering)
    assert spec.stop_ids == stop_ids
    check(spec, *loaded(model_dir))
    assert {"<|endoftext|>", "<|fim|>"} <= set(spec.end_markers)
    assert PromptSpec.model_validate_json(spec.model_dump_json()).sha256 == spec.sha256


def test_a_checkpoint_that_stores_the_union_resolves_to_the_same_specification(model_dir, tmp_path):
    """A trained model's generation config lists every stop id; its scores must name the training's prompt."""
    spec = resolve(model_dir, name="mbpp/1", rendering="chat")
    tokenizer, config, generation = loaded(model_dir)
    generation.eos_token_id = list(spec.stop_ids)
    for part in (tokenizer, config, generation):
        part.save_pretrained(tmp_path)
    assert resolve(tmp_path, name="mbpp/1", rendering="chat") == spec


def test_a_mismatch_fails(model_dir):
    tokenizer, config, generation = loaded(model_dir)
    spec = resolve(model_dir, name="mbpp/1", rendering="chat")
    with pytest.raises(InputError, match="stop_ids"):
        check(spec.replace(stop_ids=(256, 258)), tokenizer, config, generation)
    with pytest.raises(InputError, match="stop_ids"):
        check(spec, tokenizer, config, SimpleNamespace(eos_token_id=[1, 256, 259]))
    tokenizer.chat_template = CHATML + " "
    with pytest.raises(InputError, match="chat_template"):
        check(spec, tokenizer, config, generation)
    check(resolve(model_dir, name="mbpp/1", rendering="docstring"), tokenizer, config, generation)


def test_chat_is_evalplus_instruction_in_the_models_template_with_thinking_off(model_dir):
    spec = resolve(model_dir, name="mbpp/1", rendering="chat")
    tokenizer = loaded(model_dir)[0]
    text = render(spec, PROBLEM, tokenizer.apply_chat_template)
    assert text == (
        f"<|im_start|>user\n{INSTRUCTION}\n```\n{DOCSTRING.strip()}\n```\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert tokenizer.decode(prompt_ids(spec, PROBLEM, tokenizer)) == text
    assert prompt_ids(spec, PROBLEM, tokenizer).count(257) == 2, "special tokens of the template are single ids"


def test_docstring_is_evalplus_form_for_base_models(model_dir):
    spec = resolve(model_dir, name="mbpp/1", rendering="docstring")
    assert render(spec, PROBLEM) == DOCSTRING
    assert spec.template_sha256 is None
    assert stopped(spec, "def dbl(x): return x\nassert dbl")
    assert not stopped(spec, "def dbl(x):\n    assert x")


def test_stop_strings_and_instruction_are_evalplus_own():
    utility = pytest.importorskip("evalplus.provider.utility")
    assert set(utility.EOS) <= set(STOP_STRINGS)
    assert set(STOP_STRINGS) - set(utility.EOS) == set(utility.extra_eos_for_direct_completion("mbpp"))
    import evalplus.codegen

    assert INSTRUCTION in Path(evalplus.codegen.__file__).read_text()


@needs_data
@pytest.mark.parametrize("rendering", ["chat", "docstring"])
def test_every_prompt_names_its_function_and_shows_no_other_problem(model_dir, rendering):
    """EVAL-116; SPLIT-006: no worked examples, so no evaluated problem stands in another's prompt."""
    spec = resolve(model_dir, name="mbpp/1", rendering=rendering)
    template = loaded(model_dir)[0].apply_chat_template
    by_benchmark = {b: load_benchmark(b, MBPP, MBPP_PLUS) for b in ("mbpp_plus", "mbpp_test276")}
    for problem in (p for ps in by_benchmark.values() for p in ps):
        text = render(spec, problem, template)
        assert problem.entry_point in text
        assert text.count(problem.asserts[0]) == 1
        assert problem.asserts[1] not in text or problem.asserts[1] in problem.asserts[0]
        assert text.count("Write") <= 1 + problem.text.count("Write")


@needs_data
def test_training_and_evaluation_prompt_one_problem_alike(tmp_path, model_dir):
    """EVAL-126: the same token ids, by way of files, for a problem that is trained on or evaluated."""
    tokenizer = loaded(model_dir)[0]
    made = prepare("mbpp", 0, ["mbpp_plus"], tmp_path, MBPP, MBPP_PLUS)
    stored = read_problems(made.train)[0]
    evaluated = Problem.model_validate_json(stored.model_dump_json()).replace(problem_id="Mbpp/9999")
    for rendering in ("chat", "docstring"):
        spec = resolve(model_dir, name="mbpp/1", rendering=rendering)
        again = PromptSpec.model_validate_json(spec.model_dump_json())
        assert prompt_ids(spec, stored, tokenizer) == prompt_ids(again, evaluated, tokenizer)


def test_the_shipped_model_has_the_plain_prompt():
    spec = resolve(ROOT / "training" / "toy_model", name="toy/1", rendering="plain")
    assert spec.stop_ids == (0,)
    assert "<eos>" in spec.end_markers
    assert render(spec, PROBLEM) == "Write a function to double a number.\n"


def write(folder: Path, **files: dict) -> Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize(
    ("files", "stop_ids"),
    [
        ({"config": {"eos_token_id": 2}}, (2,)),
        ({"config": {"eos_token_id": [5, 2]}, "generation_config": {"eos_token_id": 2}}, (2, 5)),
        ({"config": {"text_config": {"eos_token_id": 7}}}, (7,)),
        ({"config": {}, "tokenizer_config": {"eos_token": "e", "added_tokens_decoder": {"4": {"content": "e"}}}}, (4,)),
        ({"tokenizer_config": {"eos_token": {"content": "e"}}, "tokenizer": {"model": {"vocab": {"e": 0}}}}, (0,)),
        ({"special_tokens_map": {"eos_token": "e"}, "tokenizer": {"added_tokens": [{"id": 9, "content": "e"}]}}, (9,)),
    ],
)
def test_stop_ids_are_found_in_every_file(tmp_path, files, stop_ids):
    assert resolve(write(tmp_path, **files), name="mbpp/1", rendering="docstring").stop_ids == stop_ids


def test_template_is_found_as_transformers_finds_it(tmp_path):
    assert default_rendering(tmp_path) == "docstring"
    write(tmp_path, tokenizer_config={"chat_template": [{"name": "tool_use", "template": "t"}]})
    assert read_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(tmp_path, tokenizer_config={"chat_template": named})
    assert read_template(tmp_path) == "d"
    (tmp_path / "chat_template.jinja").write_text("j")
    assert read_template(tmp_path) == "j"
    assert default_rendering(tmp_path) == "chat"


@pytest.mark.parametrize(
    ("name", "rendering", "reason"),
    [
        ("mbpp/1", "plain", "mbpp/1 has no such rendering; use --prompt chat or docstring"),
        ("mbpp/2", "chat", "no such prompt specification"),
        ("mbpp/1", "chat", "no chat template"),
        ("mbpp/1", "docstring", "no stop id"),
    ],
)
def test_impossible_specifications_are_refused(tmp_path, name, rendering, reason):
    with pytest.raises(InputError, match=reason):
        resolve(tmp_path, name=name, rendering=rendering)


def test_broken_model_files_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        resolve(tmp_path, name="mbpp/1", rendering="docstring")
