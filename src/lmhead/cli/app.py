"""The commands, by name. Each body imports what it needs when it runs, so that help is instant."""

from functools import cache
from typing import Annotated, Any

import typer

from lmhead import __version__
from lmhead.cli import cache as cache_command
from lmhead.cli import (
    count,
    detect,
    generate,
    inspect,
    models,
    next,
    score,
    screen,
    steer,
    steer_eval,
    steer_frontier,
    steer_train,
    trim,
    verify,
)

app = typer.Typer(
    name="lmhead",
    help="See, shrink, speed up, train through and steer the last layer of a language model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lmhead {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (works anywhere).")
    ] = False,
) -> None:
    """See, shrink, speed up, train through and steer the last layer of a language model."""


app.command("inspect")(inspect.inspect)
app.command("next")(next.next_)
app.command("generate")(generate.generate)
app.command("score")(score.score)
app.command("screen")(screen.screen)
app.command("trim")(trim.trim)
steer.app.command("train")(steer_train.train)
steer.app.command("eval")(steer_eval.eval_)
steer.app.command("frontier")(steer_frontier.frontier)
app.add_typer(steer.app)
app.command("detect")(detect.detect)
app.command("verify")(verify.verify)
app.command("count")(count.count)
app.command("models")(models.models)
app.command("pull")(models.pull)
app.add_typer(cache_command.app)


@cache
def command() -> Any:
    """Return the whole command line as one parser, made once."""
    made = typer.main.get_command(app)
    _tidy(made)
    return made


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
