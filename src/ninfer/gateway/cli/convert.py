"""``ninfer convert``: a checkpoint folder becomes an artifact."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add_commands(commands: Any) -> None:
    p = commands.add_parser("convert", help="make an artifact from a checkpoint", description=convert.__doc__)
    p.add_argument("source", metavar="FOLDER", help="folder with config.json, *.safetensors and the tokenizer files")
    p.add_argument("output", metavar="ARTIFACT", help="path of the .ninfer file to write; it must not exist")
    p.add_argument("--recipe", required=True, help="bf16, fp8, q8, q6, q4-mixed or import")
    p.add_argument("--name", help="public model name kept in the artifact")
    p.add_argument("--dflash", metavar="FOLDER", help="checkpoint folder of a DFlash companion, to become a part of it")
    p.add_argument("--dflash2", metavar="FOLDER", help="the same of a DFlash2 companion")
    p.add_argument(
        "--proposal-head", metavar="FILE", help="drafting scores these tokens alone: JSON ids, or .npy counts of all"
    )
    p.add_argument("--proposal-rows", type=int, metavar="N", help="most frequent tokens of counts; default: 131072")
    p.add_argument("--quiet", "-q", action="store_true", help="no progress bar")
    p.set_defaults(command=convert)


def convert(arguments: argparse.Namespace) -> int:
    """Convert a Hugging Face folder. Nothing is left behind when it fails or is interrupted."""
    from ninfer.convert import convert as work

    report = work(
        arguments.source,
        arguments.output,
        recipe=arguments.recipe,
        name=arguments.name,
        dflash=arguments.dflash,
        dflash2=arguments.dflash2,
        proposal_head=arguments.proposal_head,
        proposal_rows=arguments.proposal_rows,
        progress=False if arguments.quiet else None,
    )
    print(report, file=sys.stderr)
    return 0
