"""One style of errors: one line on stderr, exit code 2 for usage, options as they are typed."""

import pytest

from lmhead.cli import run
from lmhead.cli.app import command
from lmhead.cli.explain import as_typed

USAGE = {
    "next": "error: PROMPT is missing; see `lmhead next --help`",
    "next x --top 0": "error: --top is 0; expected at least 1; see `lmhead next --help`",
    "next x --top=1.5": "error: --top is 1.5; expected a whole number; see `lmhead next --help`",
    "generate x --temperature hot": "error: --temperature is hot; expected a number; "
    "see `lmhead generate --help`",
    "generate x --top-p 2": "error: --top-p is 2",
    "generate x --temperature -1": "error: --temperature is -1",
    "generate x --min-tokens 4 --banned-ids x": "error: --banned-ids is 'x'",
    "nxt": "error: there is no command nxt; did you mean next?",
    "foo": "error: there is no command foo; see `lmhead --help`",
    "steer trian": "error: there is no command trian; did you mean train?",
    "next x --tpo 3": "error: there is no option --tpo; did you mean --top or --top-k or --top-p?",
    "next x --nothing": "error: there is no option --nothing; see `lmhead next --help`",
    "next x y": "error: got more than expected: y; see `lmhead next --help`",
    "generate x -n": "error: option '-n' requires an argument; see `lmhead generate --help`",
    "count x -o y --errors no": "error: --errors: 'no' is not one of 'fail', 'skip'; "
    "see `lmhead count --help`",
}


@pytest.mark.parametrize("line", USAGE)
def test_usage(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(USAGE[line]), err
    assert err.count("\n") == 1


def test_a_failure_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["next", "x", "-m", "no-such-model"]) == 1
    lines = capsys.readouterr().err.splitlines()  # a line of progress comes first, where it is slow
    assert lines[-1].startswith("error: ")
    assert lines[:-1] in ([], ["fetching no-such-model ..."])


def test_options_are_named_as_they_are_typed() -> None:
    generate = command().commands["generate"]
    for library, typed in {
        "top_p is 2, expected less": "--top-p is 2, expected less",
        "beams and top_k do not go together": "--beams and --top-k do not go together",
        "temperature is hot": "--temperature is hot",
        "the temperature is hot": "the temperature is hot",  # a word, not a name
        "got 'top_p' and \"min_p\"": "got 'top_p' and \"min_p\"",  # what a user wrote stays
        "no file top_p.json": "no file top_p.json",
    }.items():
        assert as_typed(library, generate) == typed


@pytest.mark.parametrize("name", ["next", "generate", "inspect", "pull"])
def test_flags_have_no_type_in_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "--json" in out or name == "pull"
    assert "<bool>" not in out


def test_m_names_the_model_wherever_it_is_an_argument() -> None:
    found = 0
    for name, part in command().commands.items():
        arguments = {p.metavar for p in part.params if p.param_type_name == "argument"}
        if arguments & {"MODEL", "ORIGINAL"}:
            found += 1
            assert any("-m" in p.opts for p in part.params), f"lmhead {name} takes no -m"
    assert found >= 4


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    import lmhead

    assert run([flag]) == 0
    assert capsys.readouterr().out == f"lmhead {lmhead.__version__}\n"
