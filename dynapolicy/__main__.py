"""``python -m dynapolicy``: exit status 0 fine, 1 something falls short, 2 bad usage or bad input."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from .artifacts import command as artifacts_command
from .commands import doctor, knobs, plan
from .commands.output import complain
from .errors import CeilingError, DynapolicyError, DynapolicyWarning

__all__ = ["main"]

#: Name, what it does, and the module with ``add_arguments`` and ``run``.
COMMANDS: tuple[tuple[str, str, Any], ...] = (
    ("knobs", "every environment variable, and what is set now", knobs),
    ("plan", "what declared buckets come to; 1 when something would run eager", plan),
    ("doctor", "does a policy hold in every thread, task and process; 1 when it doesn't", doctor),
    ("artifacts", "what is kept, whether it is whole, and what can go; 1 when something is damaged", artifacts_command),
)


def _parser() -> argparse.ArgumentParser:
    text = "One owner for a program's torch.compile configuration."
    parser = argparse.ArgumentParser(prog="python -m dynapolicy", description=text)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, purpose, module in COMMANDS:
        command = commands.add_parser(name, help=purpose, description=purpose)
        command.add_argument("--json", action="store_true", help="print records as JSON")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit status."""
    arguments = _parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("always", DynapolicyWarning)
        warnings.showwarning = lambda message, *_args, **_kwargs: complain(message)
        try:
            return int(arguments.run(arguments))
        except DynapolicyError as error:
            complain(error)
            return 1 if isinstance(error, CeilingError) else 2


if __name__ == "__main__":
    sys.exit(main())
