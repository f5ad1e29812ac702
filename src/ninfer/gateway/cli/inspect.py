"""``ninfer inspect`` and ``ninfer verify``: what an artifact holds, and whether its bytes are legal."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add_commands(commands: Any) -> None:
    p = commands.add_parser("inspect", help="show what an artifact holds", description=inspect.__doc__)
    p.add_argument("artifact", metavar="ARTIFACT", help="path of the .ninfer entry file")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(command=inspect)
    p = commands.add_parser("verify", help="check every object of an artifact", description=verify.__doc__)
    p.add_argument("artifact", metavar="ARTIFACT", help="path of the .ninfer entry file")
    p.set_defaults(command=verify)


def inspect(arguments: argparse.Namespace) -> int:
    """Print components, number formats, sizes and leftovers. Reads the directory only."""
    from ninfer.artifact import inspect as look
    from ninfer.artifact import open_artifact

    with open_artifact(arguments.artifact) as source:
        report = look(source)
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else report)
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Read every byte: sizes, alignment, gaps, legal codes and scales. Exit code 1 when anything is wrong."""
    from ninfer.artifact import open_artifact
    from ninfer.artifact import verify as check

    with open_artifact(arguments.artifact) as source:
        findings = check(source)
        objects = len(source.directory.objects)
    for finding in findings:
        print(f"{finding.severity}: {finding.where}: {finding.message}")
    errors = sum(finding.severity == "error" for finding in findings)
    print(f"{objects} objects, {errors} errors", file=sys.stderr)
    return 1 if errors else 0
