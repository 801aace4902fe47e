"""`ablation evaluate`: which checkpoint, which protocol, which prompt, and whose output folder."""

import argparse
import shutil
from pathlib import Path

import pytest

from evaluation.errors import InputError, MachineError
from evaluation.files import write_json
from evaluation.manifests import Provenance, Revisions, write_manifest
from evaluation.problems import prepare
from evaluation.prompts import resolve
from evaluation.request import Request, write_request
from flows.commands.checkpoints import Checkpoint, locate
from flows.commands.evaluate import DEFAULTS, configure, prompt_of, protocol_of, refuse_other, unit_of
from flows.commands.score import parse_ks, problems_of
from training.cell import Cell, Identity

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "training" / "toy_model"
CELL = Cell(model="toy", benchmark="toy", arm="nobuf", lr=3e-4, steps=4, stride=2)


def words(*text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    configure(parser)
    return parser.parse_args(list(text))


def trained(folder: Path, prompt_sha256: str) -> Path:
    """Make a whole checkpoint of a cell of ours, without weights."""
    shutil.copytree(TOY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    identity = Identity(
        cell_config=CELL,
        split_sha256="s",
        prompt_sha256=prompt_sha256,
        revisions=Revisions(model="m", datasets={"toy": "d"}),
    )
    write_manifest(folder, "checkpoint", identity.provenance(CELL.name, 2))
    return folder


@pytest.fixture
def ours(tmp_path: Path) -> Checkpoint:
    spec = resolve(TOY, name="toy/1", rendering="plain")
    return locate(str(trained(tmp_path / CELL.name / "global_step_2", spec.sha256)))


def test_a_folder_a_file_url_and_a_subfolder_name_one_checkpoint(ours: Checkpoint) -> None:
    path = Path(ours.path)
    spellings = (
        str(path),
        path.as_uri(),
        f"{path.parent}:{path.name}",
        f"{path.parent.parent}:{CELL.name}/{path.name}",
    )
    assert {locate(s).path for s in spellings} == {str(path)}
    assert ours.manifest is not None and ours.manifest.global_step == 2


@pytest.mark.parametrize("text", ["/nowhere", "nowhere", "", "/nowhere:sub", ":", "a/b/c", "../x", "tests:nope"])
def test_nothing_there_is_wrong_input(text: str) -> None:
    with pytest.raises(InputError):
        locate(text)


def test_a_folder_without_a_model_or_that_differs_from_its_manifest_is_refused(
    ours: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        locate(str(tmp_path))
    (Path(ours.path) / "config.json").write_text("{}")
    with pytest.raises(InputError, match="differs from its manifest"):
        locate(ours.path)


def test_the_protocol_is_that_of_the_checkpoint_s_training_with_flags_on_top(ours: Checkpoint, tmp_path: Path) -> None:
    assert protocol_of(words(ours.path), ours) == DEFAULTS["toy_plus"]
    assert protocol_of(words(str(TOY)), locate(str(TOY))) == DEFAULTS["mbpp_plus"]
    flags = "x --benchmark mbpp_test276 --n 4 --temperature 1 --top-p 1 --max-tokens 9 --seed 3 --num-problems 2"
    found = protocol_of(words(*flags.split()), ours)
    assert (found.benchmark, found.n, found.temperature, found.top_p) == ("mbpp_test276", 4, 1.0, 1.0)
    assert (found.max_new_tokens, found.seed, found.num_problems) == (9, 3, 2)


@pytest.mark.parametrize("flags", ["--n 0", "--top-p 0", "--top-p 2", "--temperature -1", "--max-tokens 0"])
def test_impossible_protocols_are_refused(ours: Checkpoint, flags: str) -> None:
    with pytest.raises(InputError):
        protocol_of(words(ours.path, *flags.split()), ours)


def test_greedy_sampling_asks_for_one_sample(ours: Checkpoint) -> None:
    with pytest.raises(InputError, match="use n=1"):
        protocol_of(words(ours.path, "--temperature", "0"), ours)
    assert protocol_of(words(ours.path, "--temperature", "0", "--n", "1"), ours).n == 1


def test_an_unknown_benchmark_is_refused(ours: Checkpoint) -> None:
    with pytest.raises(InputError, match="mbpp_plus"):
        protocol_of(words(ours.path, "--benchmark", "humaneval"), ours)


def test_another_prompt_than_the_trained_one_is_refused_unless_asked_for(tmp_path: Path) -> None:
    other = locate(str(trained(tmp_path / "c", "0" * 64)))
    with pytest.raises(InputError, match="trained with 000000000000"):
        prompt_of(None, DEFAULTS["toy_plus"], other)
    assert prompt_of("plain", DEFAULTS["toy_plus"], other).rendering == "plain"


def test_a_model_that_says_nothing_is_prompted_by_its_tokenizer(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(TOY, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert prompt_of(None, DEFAULTS["mbpp_plus"], locate(str(bare))).rendering == "docstring"
    with pytest.raises(InputError, match="no chat template"):
        prompt_of("chat", DEFAULTS["mbpp_plus"], locate(str(bare)))
    (bare / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert prompt_of(None, DEFAULTS["mbpp_plus"], locate(str(bare))).rendering == "chat"
    with pytest.raises(InputError):
        prompt_of("rhyme", DEFAULTS["mbpp_plus"], locate(str(bare)))


def test_an_output_folder_holds_one_evaluation(ours: Checkpoint, tmp_path: Path) -> None:
    protocol = DEFAULTS["toy_plus"]
    prompt = prompt_of(None, protocol, ours)
    out, work = tmp_path / "out", tmp_path / "out.work"
    prepared = prepare("toy", 0, ["toy_plus"], work / "problems")
    unit = unit_of(ours, protocol, prompt, prepared, out)
    assert unit.cell == CELL.name and unit.global_step == 2 and unit.provenance.cell_config is not None
    refuse_other(unit, out, work)
    write_request(work, Request(prompt=prompt, problems=prepared.benchmarks, units=(unit,)))
    refuse_other(unit, out, work)  # begun
    other = unit.replace(protocol=protocol.replace(n=4))
    with pytest.raises(InputError, match="something else"):
        refuse_other(other, out, work)
    shutil.rmtree(work)
    out.mkdir()
    refuse_other(unit, out, work)  # empty
    (out / "thesis.tex").write_text("")
    with pytest.raises(InputError, match="something else"):
        refuse_other(unit, out, work)
    (out / "thesis.tex").unlink()
    write_json(out / "score.json", {"protocol_sha256": protocol.sha256})
    write_manifest(out, "score", unit.provenance)
    refuse_other(unit, out, work)  # finished
    with pytest.raises(InputError, match="something else"):
        refuse_other(other, out, work)
    with pytest.raises(InputError, match="something else"):
        refuse_other(unit.replace(provenance=Provenance()), out, work)


@pytest.mark.parametrize(
    ("text", "ks"), [(None, ()), ("1", (1,)), ("10,1", (1, 10)), (" 1, 10 ", (1, 10)), ("2,2", (2,))]
)
def test_ks_are_read(text: str | None, ks: tuple[int, ...]) -> None:
    assert parse_ks(text) == ks


@pytest.mark.parametrize("text", ["", "0", "-1", "1,", "a", "1.5", "1;2", "9" * 4400])
def test_other_ks_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_ks(text)


def test_problems_come_from_our_file_or_the_benchmark_s(tmp_path: Path) -> None:
    prepared = prepare("toy", 0, ["toy_plus"], tmp_path)
    own = problems_of("toy_plus", prepared.benchmarks["toy_plus"], None, None)
    assert own == problems_of("toy_plus", None, None, None)
    plus = ROOT.parent / "shared" / "data" / "MbppPlus-v0.2.0.jsonl"
    if not plus.is_file():
        pytest.skip("needs ../shared/data")
    assert len(problems_of("mbpp_plus", str(plus), None, None)) == 378


def test_no_hub_is_this_machine_s_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MachineError, match="Hub cannot be reached"):
        locate("nobody-here/no-such-model")
