"""The entry point of the ``kvformat`` script; what takes time is imported behind its handlers."""

from __future__ import annotations

import atexit

from kvformat.cli.process import answer_stands, interruptions_end_at_once, open_streams


def run() -> None:
    """Take charge of signals and streams first, then be the program."""
    interruptions_end_at_once()
    atexit.register(answer_stands)  # called last, because it is registered first
    open_streams()
    try:
        _run()
    except KeyboardInterrupt:  # while a failure was being told
        raise SystemExit(130) from None
    finally:
        interruptions_end_at_once()  # the answer is given and nothing is left to clean up


def _run() -> None:
    import os
    import sys
    import warnings

    from kvformat.cli.failure import DEBUG_VARIABLE
    from kvformat.cli.program import cli

    if not sys.warnoptions and DEBUG_VARIABLE not in os.environ:
        warnings.simplefilter("ignore")  # libraries must not write beside the one error line
    cli.main(prog_name="kvformat")
