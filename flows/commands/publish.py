"""`ablation publish STORE --hub ORG/NAME`: the same layout on the Hugging Face Hub, with a model card."""

import argparse
import logging
import re

from evaluation.errors import InputError
from flows.commands.answer import Answer
from training.store import open_store

log = logging.getLogger(__name__)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("store", help="URL or path of a store")
    parser.add_argument("--hub", required=True, metavar="ORG/NAME", help="model repository, made if absent")


def execute(args: argparse.Namespace) -> Answer:
    """Upload and answer with the folders."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", args.hub, re.ASCII):
        raise InputError("hub", args.hub, "is not a repository's name", "write ORG/NAME")
    store = open_store(args.store)
    from huggingface_hub import HfApi

    from training.hub import publish_store

    folders = publish_store(store, args.hub, HfApi(), lambda rel: log.info("publishing %s", rel))
    document = {"schema": "publish/1", "repo": args.hub, "folders": folders}
    return Answer(document, f"{len(folders)} folders at {args.hub}")
