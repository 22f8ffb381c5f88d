"""Offer the command line `herdsman`: parse, call, print.

Data goes to standard output, everything else to standard error; no traceback reaches a user
unless --debug asks for it. Boundary: only `main` is here, so that importing it costs nothing;
`app` lists the commands, `errors` maps what goes wrong to sentences and exit codes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code; the entry point of the console script."""
    _open_standard_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    code = _run(args)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        code = code or 0
        _forget_stdout()
    sys.exit(code)


def _open_standard_streams() -> None:
    """Point closed standard descriptors at nothing.

    The next file that is opened would get their number, and what is printed would be written
    into it: a lock, a log, a database. What is executed from here inherits them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(number, True)
    # The interpreter has None where it found no descriptor.
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _run(args: list[str]) -> int:
    from supervisor.cli import errors
    from supervisor.cli.app import command

    debug = os.environ.get("HERDSMAN_DEBUG") == "1" or "--debug" in args
    try:
        result = command().main(args, prog_name="herdsman", standalone_mode=False)
    except SystemExit as left:  # completion scripts, and run, which is its own master
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except errors.OutputClosed:
        return 0
    except BaseException as error:
        if debug:
            import traceback

            traceback.print_exc()
        explained = errors.explain(error)
        errors.tell(explained)
        return explained.code
    code = result if isinstance(result, int) else 0
    if code == errors.INTERRUPTED:  # the parser swallowed the exception, and its words
        errors.tell(errors.explain(KeyboardInterrupt()))
    return code


def _forget_stdout() -> None:
    """Point standard output at nothing, so that the interpreter's last flush does not complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, sys.stdout.fileno())
    except (OSError, ValueError):
        pass
    finally:
        os.close(null)
