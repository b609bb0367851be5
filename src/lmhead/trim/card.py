"""The card beside a trim: what was kept, the proof, and how to verify it, for whoever finds it."""

from pathlib import Path

from lmhead.trim.report import TrimReport

ORIGINAL = "README.original.md"  # the card of the original, where it had one
_FRONT = "---"


def card(report: TrimReport, *, front: str = "", original: bool = False) -> str:
    """Return the card as Markdown; `front` is the metadata block of the original's."""
    ids, name = report.ids, report.out.name if report.out else "this trim"
    gone = 1 - ids.kept_rows / ids.rows
    lines = [
        *([front] if front else []),
        f"# {report.model}, with {ids.kept_rows:,} of {ids.rows:,} rows of its vocabulary",
        "",
        f"`lmhead trim` took away {gone:.1%} of the vocabulary of `{report.model}` and changed "
        "nothing else: every other weight is the original's, byte for byte.",
        *(["", f"The card of the original is `{ORIGINAL}`."] if original else []),
        "",
        "## What was kept",
        "",
        *(f"- {reason}: {count:,} tokens" for reason, count in report.reasons.items()),
    ]
    if report.texts:
        lines.append(f"- the corpus had {report.texts:,} texts of {report.tokens:,} tokens")
    lines += ["", *_coverage(report), "## The proof", "", *_proof(report)]
    lines += [
        "",
        "## How to verify it",
        "",
        "```console",
        f"$ lmhead verify {report.model} {name}",
        "```",
        "",
        "`lmhead_trim.json` has the full report: the id map, every check, and what the models ran "
        "on. The ids differ from the original's; `id_map` says which became which.",
        "",
    ]
    return "\n".join(lines)


def _coverage(report: TrimReport) -> list[str]:
    found = report.coverage
    if found is None:
        return ["The model was not run: it may want to say a token that was dropped.", ""]
    lines = [
        f"The model was run at {found.positions:,} positions. Its top choice at each is kept, "
        f"and {found.share:.2%} of all its probability.",
        "",
    ]
    if (held := found.estimate) is not None:
        lines += [
            f"On held-back texts, {held.texts_left} of {held.texts} continuations of "
            f"{held.max_tokens} tokens would leave the keep-set (95 %: {held.low:.1%} to "
            f"{held.high:.1%}), at {held.step_rate:.2%} of {held.steps:,} steps.",
            "",
        ]
    return lines


def _proof(report: TrimReport) -> list[str]:
    proof = report.proof
    if proof is None:
        return ["No proof was made."]
    lines = ["| check | looked at | failed | |", "| --- | --- | --- | --- |"]
    for check in proof.checks:
        note = " ".join(check.note.split()).replace("|", "\\|")
        lines.append(f"| {check.name} | {check.tested:,} | {check.failed:,} | {note} |")
    if proof.inputs is None:
        lines += ["", "No model ran for this proof (`--no-run`): logits and greedy text were not "
                  "compared. `lmhead verify` does that."]  # fmt: skip
    elif proof.ran_by == "lmhead":
        lines += ["", "lmhead ran the trimmed model itself; `lmhead verify` runs it with "
                  "transformers."]  # fmt: skip
    return lines


def write_card(folder: Path, report: TrimReport) -> None:
    """Write README.md into a trimmed folder; the original's moves aside, its metadata stays."""
    path = folder / "README.md"
    old = path.read_text("utf-8", errors="replace") if path.is_file() else ""
    if old:
        path.rename(folder / ORIGINAL)
    path.write_text(card(report, front=_front(old), original=bool(old)), "utf-8")


def _front(text: str) -> str:
    """Return the metadata block that a card begins with, if it has one: licence, tags."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != _FRONT or _FRONT not in (x.strip() for x in lines[1:]):
        return ""
    end = next(at for at, line in enumerate(lines) if at and line.strip() == _FRONT)
    return "\n".join([*lines[: end + 1], ""])
