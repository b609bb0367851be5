"""Markup: whatever a token holds, it stays text."""

from lmhead import markup


def test_nothing_of_a_token_becomes_markup() -> None:
    evil = '"><script>alert(1)</script>'
    cell = markup.Cell(evil, 0.5, evil)
    for made in (
        markup.table([evil], [[evil, cell]], caption=evil),
        markup.spans([cell]),
        markup.page(evil, ""),
    ):
        assert "<script" not in made
        assert "&lt;script&gt;" in made


def test_a_page_loads_nothing() -> None:
    made = markup.page("title", markup.spans([markup.Cell("a b\n", -1.0)]))
    assert made.startswith("<!doctype html>")
    assert "default-src 'none'" in made
    assert "http://" not in made
    assert "https://" not in made
    assert "src=" not in made.replace("default-src", "").replace("style-src", "")


def test_colours_have_two_sides() -> None:
    assert markup.colour(1) != markup.colour(-1)
    assert markup.colour(7) == markup.colour(1)
