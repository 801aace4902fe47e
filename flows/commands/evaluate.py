"""`ablation evaluate PATH_OR_REPO[:SUBFOLDER]`: draws and judges samples of any checkpoint, ours or not.

The work is that of children (`python -m evaluation.run`), so that this process needs no torch. Killed and started again
with the same words, it goes on where it was.
"""

import argparse
import importlib.util
import json
import logging
import re
import shutil
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from evaluation.errors import InputError, MachineError
from evaluation.files import check_writable
from evaluation.manifests import Provenance, Revisions, damaged, read_manifest
from evaluation.problems import BENCHMARKS, Prepared, prepare
from evaluation.program import explain
from evaluation.prompts import RENDERINGS, PromptSpec, default_rendering, resolve
from evaluation.protocol import Protocol
from evaluation.request import REQUEST, Engine, Request, Unit, read_request, write_request
from flows.commands.answer import Answer
from flows.commands.checkpoints import Checkpoint, locate
from flows.commands.flags import add_data, add_gsm8k
from flows.commands.score import score_answer
from flows.experiments import EXPERIMENTS
from tasks.evaluator import Evaluator
from tasks.launch import STOPPING, ChildFailed
from tasks.settings import settings
from training.cell import MODELS

log = logging.getLogger(__name__)

ENGINES: tuple[str, ...] = get_args(Engine)
DEFAULTS = {
    p.benchmark: p
    for name in ("full", "smoke", "score_centering", "score_centering_smoke")
    for p in EXPERIMENTS[name].protocols
}
"""The protocol of each benchmark, as its experiment declares it; flags change single fields."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("checkpoint", metavar="PATH_OR_REPO[:SUBFOLDER]", help="a local folder, or ORG/NAME on the Hub")
    parser.add_argument("--benchmark", help=f"{', '.join(DEFAULTS)}; default: that of the checkpoint's training")
    parser.add_argument("--n", type=int, help="samples a problem")
    parser.add_argument("--temperature", type=float, help="0 draws greedily")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--max-tokens", type=int, help="new tokens a sample")
    parser.add_argument("--seed", type=int, help="default 0")
    parser.add_argument("--num-problems", type=int, metavar="N", help="only the first N, ids ascending")
    parser.add_argument(
        "--prompt", help="chat, docstring or plain; default: the manifest's, else chat if there is a template"
    )
    parser.add_argument("--engine", default="transformers", help="transformers (default) or vllm")
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads; default 1")
    parser.add_argument("--out", metavar="DIR", help="default: ./evaluations/CHECKPOINT/PROTOCOL")
    add_data(parser)
    add_gsm8k(parser)


def execute(args: argparse.Namespace) -> Answer:
    """Draw, judge and answer with the score."""
    from evaluation.scores import Score

    check_flags(args)
    checkpoint = locate(args.checkpoint)
    protocol = protocol_of(args, checkpoint)
    prompt = prompt_of(args.prompt, protocol, checkpoint)
    label = re.sub(r"[^\w.-]+", "_", checkpoint.label.strip("/"))
    out = Path(args.out) if args.out else Path("evaluations") / label / protocol.folder
    work = out.with_name(out.name + ".work")
    check_writable("out", out.parent)
    files = (args.mbpp, args.mbpp_plus, args.gsm8k)
    prepared = prepare(BENCHMARKS[protocol.benchmark].training, 0, [protocol.benchmark], work / "problems", *files)
    unit = unit_of(checkpoint, protocol, prompt, prepared, out)
    request = Request(
        prompt=prompt,
        problems={protocol.benchmark: prepared.benchmarks[protocol.benchmark]},
        units=(unit,),
        engine=args.engine,
        device=args.device or ("cuda" if shutil.which("nvidia-smi") else "cpu"),
        num_threads=args.threads,
        judge_workers=args.threads,
        caged=settings().caged,
    )
    refuse_other(unit, out, work)
    write_request(work, request)
    try:
        run_evaluation(work, request)
    except (InputError, MachineError):
        if not (out / "samples.jsonl").is_file():
            shutil.rmtree(work)  # nothing was begun: the corrected command starts afresh
        raise
    score = Score.model_validate_json((out / "score.json").read_text(encoding="utf-8"))
    if score.num_errors == 0:
        shutil.rmtree(work)  # what the judge failed on is tried again by the same command, with the same samples
    return score_answer(score, out)


def check_flags(args: argparse.Namespace) -> None:
    """Refuse an engine, device or number of threads that cannot be, before the model is looked for.

    Raises:
        InputError: there is no such thing.
        MachineError: there is, but not here.
    """
    if args.engine not in ENGINES:
        raise InputError("engine", args.engine, "unknown", f"use one of {', '.join(ENGINES)}")
    if args.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise MachineError("engine", "vllm", "vLLM is not installed here", "install it, or use --engine transformers")
    if args.threads < 1:
        raise InputError("threads", args.threads, "nothing runs on fewer than one", "use 1 or more")
    if args.device is not None and not re.fullmatch(r"cpu|cuda(:[0-9]+)?", args.device):
        raise InputError("device", args.device, "unknown", "use cpu, cuda or cuda:N")
    if (args.device or "").startswith("cuda") and not settings().gpus:
        raise MachineError("device", args.device, "this host has no GPU", "use --device cpu")


def protocol_of(args: argparse.Namespace, checkpoint: Checkpoint) -> Protocol:
    """Return the benchmark's protocol with the fields that flags change."""
    manifest = checkpoint.manifest
    trained_on = (manifest.cell_config or {}).get("benchmark", "mbpp") if manifest else "mbpp"
    benchmark = args.benchmark or next(b for b in DEFAULTS if BENCHMARKS[b].training == trained_on)
    if benchmark not in DEFAULTS:
        raise InputError("benchmark", benchmark, "unknown", f"use one of {', '.join(DEFAULTS)}")
    flags = {
        "n": args.n,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "max_new_tokens": args.max_tokens,
        "seed": args.seed,
        "num_problems": args.num_problems,
    }
    given = {field: value for field, value in flags.items() if value is not None}
    try:
        protocol = DEFAULTS[benchmark].replace(**given)
    except ValidationError as e:
        raise explain(e, {"max_new_tokens": "max_tokens"}) from e
    there = BENCHMARKS[benchmark].num_problems
    if (args.num_problems or 0) > there:
        raise InputError("num_problems", args.num_problems, f"{benchmark} has {there}", f"use at most {there}")
    room = json.loads((checkpoint.files / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    if args.max_tokens and room and args.max_tokens >= room:
        reason = f"the model's context has {room} tokens, its prompt included"
        raise InputError("max_tokens", args.max_tokens, reason, "ask for fewer")
    return protocol


def prompt_of(asked: str | None, protocol: Protocol, checkpoint: Checkpoint) -> PromptSpec:
    """Return the prompt specification: as asked, else as the checkpoint was trained, else by its tokenizer.

    Raises:
        InputError: no such specification, or not the one that the checkpoint's manifest was trained with.
    """
    manifest = checkpoint.manifest
    trained = (manifest.cell_config or {}).get("model") if manifest else None
    own = MODELS[trained].rendering if trained in MODELS else None
    default = own if own in RENDERINGS[protocol.prompt] else default_rendering(checkpoint.files, protocol.prompt)
    rendering = asked or default
    spec = resolve(checkpoint.files, name=protocol.prompt, rendering=rendering)
    if asked is None and manifest and manifest.prompt_sha256 not in (None, spec.sha256):
        raise InputError(
            "prompt",
            spec.sha256[:12],
            f"the checkpoint was trained with {manifest.prompt_sha256[:12]}",
            "ask for another rendering with --prompt if you mean it",
        )
    return spec


def unit_of(checkpoint: Checkpoint, protocol: Protocol, prompt: PromptSpec, prepared: Prepared, out: Path) -> Unit:
    """Return the one unit of the request, with the checkpoint's own provenance if it has one."""
    provenance = Provenance(
        split_sha256=prepared.split_sha256,
        prompt_sha256=prompt.sha256,
        revisions=Revisions(model=checkpoint.identity, datasets=prepared.revisions),
    )
    manifest = checkpoint.manifest
    if manifest is not None:
        own = {f: getattr(manifest, f) for f in ("cell", "global_step", "fingerprint", "cell_config")}
        provenance = provenance.replace(**own)
    return Unit(
        label=checkpoint.label,
        cell=provenance.cell,
        global_step=provenance.global_step or 0,
        model_path=checkpoint.path,
        model_revision=checkpoint.revision,
        model_subfolder=checkpoint.subfolder,
        protocol=protocol,
        provenance=provenance,
        out=str(out.absolute()),
    )


def refuse_other(unit: Unit, out: Path, work: Path) -> None:
    """Refuse to go on in folders that hold anything but this very evaluation, finished or not.

    Raises:
        InputError: `out` or its work folder is somebody else's.
    """
    if (work / REQUEST).is_file():
        same = read_request(work).units == (unit,)
    elif out.is_dir() and any(out.iterdir()):
        manifest, score, mine = read_manifest(out), out / "score.json", unit.provenance
        same = (
            manifest is not None
            and score.is_file()
            and (manifest.revisions, manifest.prompt_sha256) == (mine.revisions, mine.prompt_sha256)
            and damaged(out) is None
            and json.loads(score.read_text(encoding="utf-8"))["protocol_sha256"] == unit.protocol.sha256
        )
    else:
        same = not out.exists() or out.is_dir()
    if not same:
        raise InputError("out", out, "holds something else", "give another --out, or remove it")


def run_evaluation(work: Path, request: Request) -> None:
    """Run the children to their end; a score with harness errors is an answer, any other failure is raised.

    Raises:
        AblationError: a child's own line.
    """
    evaluator = Evaluator(work, request)
    tails = [Lines(evaluator.log(part)) for part in ("draw", "judge")]

    def forward() -> None:
        for tail in tails:
            tail.forward()

    STOPPING.clear()
    try:
        with evaluator:
            evaluator.score(list(request.units), forward)
    except ChildFailed:
        if not (Path(request.units[0].out) / "score.json").is_file():
            raise
    finally:
        forward()


class Lines:
    """What a child writes, told as it comes."""

    def __init__(self, path: Path) -> None:
        self.path, self.told = path, 0
        path.unlink(missing_ok=True)

    def forward(self) -> None:
        """Tell the lines that are new; a child's error is raised, and told once."""
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.is_file() else ""
        lines = text.splitlines()
        for line in lines[self.told :]:
            if not line.startswith("error: "):
                log.info("%s", line)
        self.told = len(lines)
