"""The ``ninfer`` command. The answer goes to standard output, everything else to standard error.

Exit codes: 0 done, 1 the library refused or failed (one line says why), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ninfer import __version__
from ninfer.errors import NinferError


def parser() -> argparse.ArgumentParser:
    """The whole command line; each subcommand's module adds its own part."""
    from ninfer.gateway.cli import bench, convert, inspect, run

    top = argparse.ArgumentParser(prog="ninfer", description="Run and prepare models of the Qwen3.5 family.")
    top.add_argument("--version", action="version", version=f"ninfer {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (run, inspect, convert, bench):
        module.add_commands(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except NinferError as error:
        print(f"ninfer: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"ninfer: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ninfer: interrupted", file=sys.stderr)
        return 130
