"""The command line itself: lazy subcommands, ``--version``, and one place for errors."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import click

from kvformat import FORMAT_VERSION, __version__
from kvformat.cli.failure import answer
from kvformat.cli.process import interruptions_clean_up
from kvformat.errors import UsageError

COMMANDS: Final = {
    "encode": "Write a KV cache (.npy or .safetensors) to an artifact.",
    "calibrate": "Make a calibration profile, for smaller files of one model.",
    "decode": "Restore a cache, whole or in part, to .npy or .safetensors.",
    "inspect": "Show what an artifact says about itself; reads only its front.",
    "verify": "Check every byte of an artifact against the specification.",
    "evaluate": "Measure what a restored cache does to a model's output.",
    "extract": "Take one video segment out of an artifact, to look at it.",
    "cp": "Copy an artifact between any two places, verified on the way.",
    "serve": "Serve the artifacts below a directory over HTTP, read-only.",
    "store": "Look at a store of serving engines, tidy, check and convert it.",
    "plan": "Compare the cost of tracks, raw tensors and computing again.",
    "integration": "Print the launch configuration of a serving engine with a store.",
    "doctor": "Show what this installation can do.",
    "demo": "Encode, inspect, verify, restore and damage a small real cache.",
}
SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
EPILOG: Final = (
    "Exit codes: 0 ok, 64 wrong request, 65 invalid file, 69 unsupported, 74 storage failed, "
    "76 a cache of something else, 70 a bug in kvformat, 130 interrupted. See spec section 14."
)


class Program(click.Group):
    """A group whose subcommands are imported late and whose errors all end in ``answer``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which people meet them."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of that name."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"kvformat.cli.{cmd_name}")
        command: click.Command = module.command
        interruptions_clean_up()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of that name; for an unknown one, the nearest is suggested."""
        name = args[0]
        if name in COMMANDS or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        from difflib import get_close_matches

        near = get_close_matches(name.lower()[:40], COMMANDS, 1)
        raise UsageError(
            "usage.argument",
            "there is no such command",
            expected=", ".join(COMMANDS),
            found=ascii(name[:80]),
            next_step=f"kvformat {near[0]}" if near else "kvformat --help",
        )

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in ``--help``, without importing a subcommand."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(  # type: ignore[override]  # one way to end, for the shell and for tests
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Any:
        """Run, report a failure in one line, and exit with the code of section 14."""
        arguments = list(sys.argv[1:] if args is None else args)
        if "_KVFORMAT_COMPLETE" in os.environ:
            return super().main(arguments, prog_name or "kvformat", **extra)

        def act() -> None:
            with self.make_context(prog_name or "kvformat", arguments, **extra) as context:
                self.invoke(context)

        options = arguments[: arguments.index("--")] if "--" in arguments else arguments
        return sys.exit(answer(act, as_json="--json" in options))


@click.command(cls=Program, context_settings=SETTINGS, epilog=EPILOG)
@click.version_option(__version__, message=f"%(prog)s %(version)s, format version {FORMAT_VERSION}")
def cli() -> None:
    """kvformat: one verified file for an LLM KV cache.

    URL is a local path or an fsspec URL such as s3://bucket/prefix.kvf.
    """
