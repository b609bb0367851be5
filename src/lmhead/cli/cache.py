"""`lmhead cache`: what is kept on this machine, whether it is sound, and how to remove it."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmhead.cli.options import Json
from lmhead.errors import BadInput

if TYPE_CHECKING:
    from lmhead.files.contents import Entry

app = typer.Typer(
    name="cache",
    help="List, check and remove what lmhead has cached (in ~/.cache/lmhead, or LMHEAD_CACHE).",
)


@app.callback(invoke_without_command=True)
def _cache(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_()


def _names(incomplete: str) -> list[str]:
    from lmhead.files.contents import entries

    return [entry.name for entry in entries() if entry.name.startswith(incomplete)]


@app.command("list")
def list_(json: Json = False) -> None:
    """List what is cached: models, converted GGUF files, int8 copies of heads, states of texts."""
    from rich.text import Text

    from lmhead.cli import render
    from lmhead.cli.plain import plain
    from lmhead.files.cache import cache_root
    from lmhead.files.contents import KINDS, entries

    found = entries()
    total = sum(entry.nbytes for entry in found)
    if json:
        rows = [_as_dict(entry) for entry in found]
        render.print_json({"cache": str(cache_root()), "bytes": total, "entries": rows})
        return
    if not found:
        render.say(f"nothing is cached in {cache_root()}")
        return
    table = render.table("name", "what", "last used", "size", left=3)
    for entry in found:
        name = Text(plain(entry.name))
        table.add_row(name, KINDS[entry.kind], _day(entry.used), render.size(entry.nbytes))
    render.out().print(table)
    render.say(f"{render.size(total)} in {cache_root()}")


@app.command("verify")
def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="The entries to check; by default all.", autocompletion=_names
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Hash every file again and compare it with the recorded hash. Exits with 1 if one differs."""
    from lmhead.cli import render
    from lmhead.files.stamp import read_stamp
    from lmhead.files.stamp import verify as verify_folder

    found = []
    for entry in _chosen(names):
        wrong = None
        if read_stamp(entry.folder) is not None:
            wrong = verify_folder(entry.folder, render.progress)
        found.append({"name": entry.name, "kind": entry.kind, "wrong": wrong})
    if json:
        render.print_json({"entries": found})
    else:
        for row in found:
            render.say(f"{row['name']}: {_verdict(row)}")
    if any(row["wrong"] for row in found):
        raise typer.Exit(1)


def _verdict(row: dict[str, Any]) -> str:
    if row["wrong"] is None:
        checked_then = {
            "screens": "checked against its head when it is used",
            "states": "every text is checked when it is used",
        }
        return checked_then.get(row["kind"], "made by another version of lmhead")
    if not row["wrong"]:
        return "sound"
    again = f"`lmhead pull {row['name']} --verify`"
    if row["kind"] != "models":
        again = f"`lmhead cache remove {row['name']}`, and it is made again when it is used"
    return f"DAMAGED ({', '.join(row['wrong'])}); {again}"


@app.command("remove")
def remove(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="A name that `lmhead cache` lists.", autocompletion=_names
        ),
    ],
    json: Json = False,
) -> None:
    """Remove cached entries by name; they are downloaded or made again when needed."""
    from lmhead.files.contents import remove as remove_entry

    chosen = _chosen(names)
    for entry in chosen:
        remove_entry(entry)
    _tell_removed(chosen, json)


@app.command("limit")
def limit(
    size: Annotated[
        str,
        typer.Argument(metavar="SIZE", help="A size such as 5GB or 800MB; 0 removes everything."),
    ],
    json: Json = False,
) -> None:
    """Remove the least recently used entries until the rest takes at most SIZE."""
    from lmhead.files.contents import keep_below, size_of

    _tell_removed(keep_below(size_of(size, "SIZE")), json)


def _chosen(names: "list[str] | None") -> "list[Entry]":
    from lmhead.files.contents import entries
    from lmhead.models.resolve import suggestion

    there = entries()
    if not names:
        return there
    known = {entry.name for entry in there}
    for name in names:
        if name not in known:
            hint = suggestion(name, known) or "`lmhead cache` lists what is there"
            raise BadInput(f"nothing is cached under the name {name!r}; {hint}")
    return [entry for entry in there if entry.name in names]


def _tell_removed(removed: "list[Entry]", json: bool) -> None:
    from lmhead.cli import render

    total = sum(entry.nbytes for entry in removed)
    if json:
        render.print_json({"removed": [_as_dict(entry) for entry in removed], "bytes": total})
        return
    for entry in removed:
        render.say(f"removed {entry.name} ({render.size(entry.nbytes)})")
    if len(removed) != 1:
        render.say(f"{render.size(total)} freed" if removed else "nothing to remove")


def _as_dict(entry: "Entry") -> dict[str, Any]:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "folder": str(entry.folder),
        "bytes": entry.nbytes,
        "last_used": _day(entry.used),
    }


def _day(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d")
