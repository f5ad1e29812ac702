"""``ninfer completion``: completion scripts, generated from the parsers."""

from __future__ import annotations

import argparse
from typing import Any

SHELLS = ("bash", "zsh", "fish")
_EXAMPLES = """\
examples:
  ninfer completion bash > ~/.local/share/bash-completion/completions/ninfer
  ninfer completion zsh > "${fpath[1]}/_ninfer"
  ninfer completion fish > ~/.config/fish/completions/ninfer.fish
"""


def add_commands(commands: Any) -> None:
    p = commands.add_parser(
        "completion",
        help="print a shell's completion script",
        description=completion.__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("shell", choices=SHELLS, help="the shell to complete in")
    p.set_defaults(command=completion)


def completion(arguments: argparse.Namespace) -> int:
    """Print a script that completes commands, options and file names of this version."""
    import shtab

    from ninfer.gateway.cli import parser

    top = parser()
    _complete_files(top, {"FILE": shtab.FILE, "ARTIFACT": shtab.FILE, "FOLDER": shtab.DIRECTORY})
    print(shtab.complete(top, shell=arguments.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, kinds: dict[str, Any]) -> None:
    """Complete paths where an option's placeholder says that it takes one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _complete_files(child, kinds)
        elif action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]
