"""The commands, by name. A call imports its own command alone, so that it starts quickly."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import CodeType
from typing import Annotated, Any

import typer

from lmhead import __version__

# Where each command is, in the order of the help; of a group first its own `app`.
COMMANDS = {
    "inspect": "inspect.inspect",
    "next": "next.next_",
    "lens": "lens.lens",
    "why": "why.why",
    "read": "read.read",
    "geometry": "geometry.geometry",
    "compare": "compare.compare",
    "generate": "generate.generate",
    "explore": "explore.explore",
    "score": "score.score",
    "choose": "choose.choose",
    "screen": "screen.screen",
    "trim": "trim.trim",
    "verify": "verify.verify",
    "count": "count.count",
    "steer": "steer.app",
    "steer train": "steer_train.train",
    "steer eval": "steer_eval.eval_",
    "steer frontier": "steer_frontier.frontier",
    "detect": "detect.detect",
    "serve": "serve.serve",
    "models": "models.models",
    "pull": "models.pull",
    "cache": "cache.app",
    "doctor": "doctor.doctor",
}


def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Show the version and exit.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --version: print everything a bug report needs.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Show the full traceback of an error (works in any position)."
        ),
    ] = False,
) -> None:
    """See, shrink, speed up, train through and steer the last layer of a language model."""
    if version:
        typer.echo(f"lmhead {__version__}")
        if verbose:
            from lmhead.cli.doctor import facts, facts_table

            for name, value in facts_table(facts())[1:]:
                typer.echo(f"{name}: {value}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@cache
def command(name: str | None = None, *, brief: bool = False) -> Any:
    """Return the parser of the command line: all of it, or with this one command alone.

    `brief` leaves the commands' own options out, which the list of all commands does not show.
    """
    app = typer.Typer(
        name="lmhead",
        help="See, shrink, speed up, train through and steer the last layer of a language model.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_options)
    for path in COMMANDS:
        if " " not in path and name in (None, path):
            if brief:
                app.command(path)(_stub(path))
            elif isinstance(found := _found(path), typer.Typer):
                app.add_typer(found)
            else:
                app.command(path)(found)
    made = typer.main.get_command(app)
    _tidy(made)
    return made


def _stub(path: str) -> Any:
    def stub() -> None: ...

    stub.__doc__ = _docstring(path) or _found(path).info.help
    return stub


def _docstring(path: str) -> str | None:
    """Return what a command says of itself, out of its compiled file, which is not run.

    Running all of them would take a quarter of the time of `lmhead --help`. A group has none.
    """
    module, name = COMMANDS[path].split(".")
    spec = find_spec(f"lmhead.cli.{module}")
    code = spec.loader.get_code(spec.name) if spec else None  # type: ignore[union-attr]
    for part in code.co_consts if code else ():
        if isinstance(part, CodeType) and part.co_name == name:
            return part.co_consts[0] if isinstance(part.co_consts[0], str) else None
    return None


@cache
def _found(path: str) -> Any:
    module, name = COMMANDS[path].split(".")
    found = getattr(import_module(f"lmhead.cli.{module}"), name)
    if isinstance(found, typer.Typer):
        for inner in COMMANDS:
            if inner.startswith(f"{path} "):
                found.command(inner.removeprefix(f"{path} "))(_found(inner))
    return found


def _tidy(group: Any) -> None:
    """Show flags without a type; a flag takes no value."""
    for part in [group, *getattr(group, "commands", {}).values()]:
        if part is not group:
            _tidy(part)
        part.get_params = _with_plain_flags(part.get_params)


def _with_plain_flags(get_params: Any) -> Any:
    def plain(context: Any) -> Any:
        params = get_params(context)
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params

    return plain
