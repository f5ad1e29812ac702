"""The ``ninfer`` command. The answer goes to standard output, everything else to standard error; both are UTF-8.

Each subcommand is a module: ``add_commands`` declares its options, a function runs it and returns the exit code.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from ninfer import __version__
from ninfer.errors import InvalidRequest, NinferError

EXIT_CODES = """\
exit codes:
  0    done
  1    failed: an artifact, file, device or running request; one line says why
  2    refused: an option, a prompt, a message, a tool or an output form; one line says which
  3    the answer was cut before it was complete in its output form (--json-object, --regex, ...)
  130  interrupted
  141  whoever read the output went away
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line; each subcommand's module adds its own part."""
    from ninfer.gateway.cli import bench, completion, convert, inspect, run, serve

    top = argparse.ArgumentParser(
        prog="ninfer",
        description="Run, measure and prepare models of the Qwen3.5 family.",
        epilog="'ninfer COMMAND --help' says what a command takes.\n\n" + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"ninfer {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (run, serve, inspect, convert, bench, completion):
        module.add_commands(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user's error is one line on standard error, never a traceback."""
    for stream, errors in (sys.stdin, "strict"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace"):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)
    try:
        arguments = parser().parse_args(argv)
        code = int(arguments.command(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk is told here, not by the interpreter on its way out
        return code
    except BrokenPipeError:
        _stop_writing()
        return 141
    except NinferError as error:
        print(f"ninfer: {_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequest) else 1
    except OSError as error:
        _stop_writing()
        place = f"{error.filename}: " if error.filename is not None else ""
        print(f"ninfer: {place}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ninfer: interrupted", file=sys.stderr)
        return 130


def _line(error: NinferError) -> str:
    """The error's text on one line, without what a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in str(error))


def _stop_writing() -> None:
    """Send what is still buffered nowhere: a second failed write, when the interpreter ends, would be reported."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
