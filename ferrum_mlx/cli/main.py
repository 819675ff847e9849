"""The command `ferrum-mlx`. Subcommands are imported when they are called, so that --help stays light."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from importlib import import_module

import click

from ferrum_mlx.errors import FerrumError, cut, one_line
from ferrum_mlx.sanitize import sanitize

# command → (where it is, what --help says of it)
_COMMANDS = {
    "chat": ("ferrum_mlx.cli.chat:chat", "Talk to a model in the terminal."),
    "run": ("ferrum_mlx.cli.run:run", "Answer prompts and exit."),
    "bench": ("ferrum_mlx.cli.bench:bench", "Measure speed, alone and beside other engines."),
    "verify": (
        "ferrum_mlx.cli.verify:verify",
        "Check on this machine that batching, caching and the like change nothing.",
    ),
    "models": ("ferrum_mlx.cli.models:models", "List, download and remove models."),
    "doctor": ("ferrum_mlx.cli.doctor:doctor", "Show what this machine offers and what would be used."),
}
_INTERRUPTED = 130


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in _COMMANDS.items()])


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.",
)
@click.version_option(package_name="ferrum-mlx", prog_name="ferrum-mlx")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """A local LLM engine you can see."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def main() -> None:
    """Entry point: runs the command line and exits; every error is one line on stderr."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell: `<&-`
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    code = _run(sys.argv[1:])
    if code == _INTERRUPTED:
        # An engine's build cannot be stopped, and an interpreter that shuts down while MLX works in its
        # thread aborts the process. The clients are closed by now; only the streams are left to flush.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads it any more
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _run(args: list[str]) -> int:
    debug = bool(os.environ.get("FERRUM_DEBUG"))
    try:
        code = cli.main(args, prog_name="ferrum-mlx", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "ferrum-mlx"
        said = cut(error.format_message().rstrip("."), 400)  # click names the value, however long
        return _fail(f"{said}; see {command} --help", error.exit_code)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except FerrumError as error:
        if debug:
            raise
        return _fail(str(error), error.exit_code)
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO) and error.filename is None:
            _discard_output()
            return _fail(f"cannot write the output: {os.strerror(error.errno)}; write it elsewhere", 1)
        return _fail(f"an unexpected error, {one_line(error)}; set FERRUM_DEBUG=1 for the traceback", 1)


def _discard_output() -> None:
    """What stdout still holds would fail again when the interpreter ends, with a code of its own."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _fail(message: str, code: int) -> int:
    click.echo("ferrum-mlx: " + " ".join(sanitize(message).split()), err=True)
    return code
