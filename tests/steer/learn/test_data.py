"""Reading rows and pairs of every shape, and splits that never take a group apart."""

import json
from pathlib import Path

import pytest

from lmhead.errors import BadInput
from lmhead.steer.learn.builtin import builtin_data
from lmhead.steer.learn.data import Data, Pair, Row, closed, hashes, split, split_pairs
from lmhead.steer.learn.reading import read_data


def written(tmp_path: Path, text: str, name: str = "data.csv") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_statements(tmp_path: Path) -> None:
    data = read_data(
        written(tmp_path, 'statement,label\n"Ice, it is cold",1\nFire is wet!,0\nHm.,\n')
    )
    assert data.rows == (Row("Ice, it is cold.", 1), Row("Fire is wet!", 0), Row("Hm.", None))
    assert [row.text for row in data.labelled] == ["Ice, it is cold.", "Fire is wet!"]


def test_answers_to_a_question_are_one_group(tmp_path: Path) -> None:
    data = read_data(written(tmp_path, "question,answer,label\nWhy?,So,true\nWhy?,Not so,false\n"))
    assert [row.text for row in data.rows] == ["Q: Why?\nA: So.", "Q: Why?\nA: Not so."]
    assert {row.group for row in data.rows} == {"Q: Why?\nA:"}
    assert [row.label for row in data.rows] == [1, 0]


def test_a_column_can_say_what_belongs_together(tmp_path: Path) -> None:
    lines = [f"City {i} is in {c},{label},{i}" for i in range(40) for c, label in ("a1", "b0")]
    data = read_data(written(tmp_path, "\n".join(["statement,label,group", *lines])))
    assert {row.group for row in data.rows} == {str(i) for i in range(40)}
    parts = split(data, 0, labels=8, unlabelled=10, validation=10)
    every = (parts.labelled, parts.unlabelled, parts.validation, parts.test)
    groups = [{row.group for row in part} for part in every]
    assert sum(map(len, groups)) == len(set().union(*groups))
    alone = read_data(
        written(tmp_path, "statement,label,group\nx,1,\n")
    )  # an empty one says nothing
    assert alone.rows[0].group == "x."


def rows_with(tmp_path: Path, columns: str, line: str, shared: bool) -> Data:
    lines = [
        f"City {i} is in {c},{label}," + line.format(i=i if shared else f"{i}{c}", c=c, k=i // 20)
        for i in range(40)
        for c, label in (("a", 1), ("b", 0))
    ]
    return read_data(written(tmp_path, "\n".join([f"statement,label,{columns}", *lines])))


def test_a_column_that_true_and_false_rows_share_keeps_them_together(tmp_path: Path) -> None:
    used = rows_with(tmp_path, "City,country", "x{i},{c}", True)
    assert (used.group, used.offered) == ("city", ())  # two countries are classes, no subjects
    assert {row.group for row in used.rows} == {f"x{i}" for i in range(40)}
    no_repeats = rows_with(tmp_path, "city", "x{i}", False)
    assert (no_repeats.group, no_repeats.offered) == (None, ())
    told_apart = read_data(
        written(
            tmp_path,
            "statement,label,source\n" + "\n".join(f"s{i},{i % 2},w{i % 20}" for i in range(80)),
        )
    )
    assert (told_apart.group, told_apart.offered) == (None, ("source",))  # no value has both
    assert told_apart.rows[0].group == "s0."


def test_pairs_from_json_lines(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "Ice is", "true": "cold", "false": " hot"})
    data = read_data(written(tmp_path, line + "\n\n", "data.jsonl"))
    assert data.pairs == (Pair("Ice is", " cold", " hot"),)
    assert data.rows == (Row("Ice is cold.", 1, "Ice is"), Row("Ice is hot.", 0, "Ice is"))


def test_truthfulqa_as_it_is(tmp_path: Path) -> None:
    header = "Type,Category,Question,Best Answer,Best Incorrect Answer,Correct Answers,Source"
    data = read_data(written(tmp_path, f"{header}\nA,B,Who?,Nobody,Me,Nobody; No one,x\n"))
    assert data.pairs == (Pair("Q: Who?\nA:", " Nobody", " Me"),)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "statement,label\n  ,1\n", "line 2: the statement is empty"),
        ("a.csv", "statement,label\nx,maybe\n", "the label is 'maybe'"),
        ("a.csv", "words,label\nx,1\n", "has the fields words, label"),
        ("a.csv", "statement,label\n", "holds no rows"),
        ("a.csv", "prompt,true,false\na,b,b\n", "are the same"),
        ("a.jsonl", "[1]\n", "not a JSON object"),
        ("a.jsonl", "{\n", "a.jsonl:1 is not JSON"),
        ("a.txt", "x", "expected a name that ends in .csv or .jsonl"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_data(written(tmp_path, text, name))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no data file"):
        read_data(tmp_path / "none.csv")
    (tmp_path / "latin.csv").write_bytes(b"statement,label\n\xe9t\xe9,1\n")
    with pytest.raises(BadInput, match="is not UTF-8"):
        read_data(tmp_path / "latin.csv")


@pytest.mark.parametrize(
    ("text", "after"),
    [("a", "a."), ("a.", "a."), ("a? ", "a?"), ('"a"', '"a"'), ("a,", "a,.")],
)
def test_a_statement_ends_in_a_mark(text: str, after: str) -> None:
    assert closed(text) == after


def test_builtin_endings_tell_nothing_by_themselves() -> None:
    data = read_data("builtin")
    assert data is builtin_data()
    assert len(data.pairs) >= 250
    assert len(data.rows) == 2 * len(data.pairs)
    assert len({p.prompt for p in data.pairs}) == len(data.pairs)
    assert {p.false for p in data.pairs} <= {p.true for p in data.pairs}
    assert all(p.true != p.false and p.true[0] == " " for p in data.pairs)
    assert Pair("The capital of France is", " Paris", " Athens", "France") in data.pairs
    assert any(p.prompt == "The main language of Saudi Arabia is" for p in data.pairs)


def test_a_split_keeps_groups_whole_and_classes_even() -> None:
    parts = split(builtin_data(), 3, labels=32, unlabelled=100, validation=40)
    groups = [{row.group for row in part} for part in (parts.labelled, parts.validation)]
    groups += [{row.group for row in parts.test}, {row.group for row in parts.unlabelled}]
    assert len(set.union(*groups)) == sum(map(len, groups))
    assert [row.label for row in parts.labelled].count(1) == 16
    assert parts.to_dict() == {
        "labels": 74, "labelled": 32, "unlabelled": 100, "validation": 42, "test": 136, "seed": 3,
    }  # fmt: skip


def test_a_split_depends_on_the_seed_and_not_on_the_order_of_the_file() -> None:
    data = builtin_data()
    turned = Data(data.name, data.rows[::-1])
    first, again = split(data, 1), split(turned, 1)
    assert {r.text for r in first.test} == {r.text for r in again.test}
    assert {r.text for r in first.labelled} == {r.text for r in again.labelled}
    assert {r.text for r in first.test} != {r.text for r in split(data, 2).test}


def test_unlabelled_rows_join_the_unlabelled() -> None:
    rows = tuple(Row(f"{i}.", i % 2) for i in range(40)) + tuple(Row(f"u{i}.") for i in range(20))
    parts = split(Data("d", rows), 0, labels=8, validation=4, unlabelled=1000)
    assert len([r for r in parts.unlabelled if r.label is None]) >= 15
    assert all(r.label is not None for r in (*parts.labelled, *parts.validation, *parts.test))


def test_an_uneven_class_fills_up() -> None:
    rows = tuple(Row(f"{i}.", int(i < 4)) for i in range(60))
    parts = split(Data("d", rows), 0, labels=16, validation=0, test=0.0)
    assert len(parts.labelled) == 16
    assert sum(row.label or 0 for row in parts.labelled) == 4


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([Row(f"{i}.", 1) for i in range(50)], {}, "have the labels 1; expected both"),
        ([Row(f"{i}.") for i in range(50)], {}, "have the labels none"),
        ([Row(f"{i}.", i % 2) for i in range(50)], {"labels": 45}, "expected 45 to train on"),
        ([Row(f"{i}.", i % 2) for i in range(50)], {"labels": 1}, "at least 2"),
        ([Row(f"{i}.", i % 2) for i in range(50)], {"test": 1.0}, "test is 1.0"),
    ],
)
def test_data_that_cannot_be_split(rows: list[Row], options: dict[str, float], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        split(Data("d", tuple(rows)), 0, **{"validation": 0, **options})  # type: ignore[arg-type]


def test_pairs_about_one_subject_are_held_out_together() -> None:
    train, held = split_pairs(builtin_data().pairs, 0)
    assert not {p.group for p in train} & {p.group for p in held}
    japan = {p.prompt for p in builtin_data().pairs if p.group == "Japan"}
    assert len(japan) == 3  # its capital, its continent, its language
    assert japan <= {p.prompt for p in train} or japan <= {p.prompt for p in held}


def test_pairs_are_held_out_by_prompt() -> None:
    pairs = [Pair(f"p{i // 2}", f" {i}", " x") for i in range(40)]
    train, held = split_pairs(pairs, 0)
    assert len(held) == 10
    assert not {p.prompt for p in train} & {p.prompt for p in held}
    with pytest.raises(BadInput, match="cannot be split"):
        split_pairs(pairs[:2], 0)


def test_hashes_are_of_the_text() -> None:
    assert hashes([Row("a.", 1), Row("a.", 0)]) == [Row("a.").sha256]
    assert hashes([Pair("a", " b", " c")]) != hashes([Pair("a", " c", " b")])
