"""The page in a real Chromium: every panel is used as a person would use it."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lmhead import next_tokens
from lmhead.sampling import Sampler, SamplingParams
from lmhead.steer import SteeringVector

pytestmark = pytest.mark.model
FRANCE = "The capital of France is"
PANELS = ("next", "funnel", "lens", "why", "steer", "size")
WORKS = "() => !document.querySelector('.working')"
DRAWN = {  # what is there once a panel shows its result
    "next": "#panel-next .bar",
    "funnel": "#panel-funnel .bar",
    "lens": ".lens .cell",
    "why": "#why-sum .badge",
    "steer": "#panel-steer .facts dd",
    "size": "#panel-size .facts dd",
}


def words(page: Any, panel: str = "next", among: str = ".bars") -> list[str]:
    """The tokens of the bars, spaces shown as dots."""
    script = "(l) => l.filter((e) => e.offsetParent).map((e) => e.textContent)"
    found: list[str] = page.locator(f"#panel-{panel} {among} .word").evaluate_all(script)
    return found


def dotted(text: str) -> str:
    return re.sub(r"^ +", lambda run: "·" * len(run[0]), text)


def state(page: Any) -> dict[str, str]:
    """The address, once it has been written."""
    page.wait_for_timeout(250)
    pairs = page.evaluate("[...new URLSearchParams(location.hash.slice(1))]")
    return dict(pairs)


def type_prompt(page: Any, text: str) -> None:
    with page.expect_response(lambda r: r.url.endswith("/api/logits")):
        page.fill("#prompt", text)
    page.wait_for_function("() => document.getElementById('status').textContent.includes('tokens')")


def test_next_shows_what_the_model_says(opened: Any, model: Any) -> None:
    page = opened()
    type_prompt(page, "Water boils at")
    python = next_tokens("Water boils at", model, top=14)
    assert words(page) == [dotted(t.token) for t in python.tokens]
    first = page.locator("#panel-next .bar").first
    assert f"{python.tokens[0].logit:.2f}" in first.inner_text()
    # a click appends
    first.click()
    page.wait_for_selector(".chip.new")
    assert state(page) == {"prompt": "Water boils at", "more": str(python.tokens[0].id)}
    # alternatives on hover, and going on from one of them, inside the prompt
    page.hover(".chip >> nth=2")
    pop = page.locator("#alternatives")
    pop.wait_for()
    other = pop.locator(".alt:not(.own)").first
    reported = other.locator("code").inner_text()
    with page.expect_response(lambda r: r.url.endswith("/api/logits")):
        other.click()
    page.wait_for_function("() => document.querySelectorAll('.chip').length === 3")
    assert dotted(page.locator(".chip >> nth=2").text_content()) == reported
    # the same by keyboard
    page.focus(".chip >> nth=1")
    page.keyboard.press("Enter")
    pop.wait_for()
    page.keyboard.press("Escape")
    assert pop.is_hidden()
    assert page.evaluate("document.activeElement.className").startswith("chip")


def test_generation_streams_stops_and_survives_a_reload(opened: Any) -> None:
    page = opened("n=6&seed=3&temperature=0.7")
    page.click("#generate")
    page.wait_for_function("() => document.querySelectorAll('.chip.new').length >= 2")
    page.wait_for_function("() => !document.getElementById('generate').disabled")
    page.wait_for_function("() => /appended/.test(document.getElementById('status').textContent)")
    text = page.locator("#strip").text_content()
    address = state(page)
    assert len(address["more"].split(",")) == 6
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert page.locator("#strip").text_content() == text
    assert page.locator(".chip.new").count() == 6
    # a long one is stopped
    page.fill("#n", "4000")
    page.locator("#n").blur()
    page.click("#generate")
    page.wait_for_function("() => document.querySelectorAll('.chip.new').length >= 9")
    page.click("#stop")
    page.wait_for_selector("text=/stopped after \\d+ tokens/")
    page.wait_for_function("() => !document.getElementById('generate').disabled")
    assert 9 <= page.locator(".chip.new").count() < 400


def test_funnel_follows_sliders_and_the_keyboard(opened: Any, model: Any) -> None:
    page = opened("tab=funnel")
    page.fill('[aria-label="temperature, number"]', "0.5")
    page.keyboard.press("Enter")
    top_p = page.locator("#c-top_p")
    top_p.focus()
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    assert state(page)["top_p"] == "0.95"

    def python(order: Any) -> list[tuple[str, int]]:
        params = SamplingParams(temperature=0.5, top_p=0.95)
        sampler = Sampler.from_params(params, order, vocab_size=model.reachable)
        with torch.inference_mode():
            z = model.head(model.last_hidden(FRANCE)).float()
        return [(s.name, s.left) for s in sampler.trace(z[None])[0].steps[1:]]

    def shown() -> list[tuple[str, int]]:
        script = """(l) => l.filter((e) => !e.classList.contains('off'))
          .map((e) => [e.dataset.stage, e.querySelector('.did b').textContent])"""
        found = page.locator(".stage").evaluate_all(script)
        return [(name, int(left.replace(",", ""))) for name, left in found]

    assert shown() == python("hf")
    page.click('[data-order="llama.cpp"]')
    assert shown() == python("llama.cpp")
    # top_p behind the temperature, by keyboard: an order of one's own
    handle = page.locator('[data-stage="temperature"] .handle')
    handle.focus()
    order = ["llama.cpp"]
    while order != ["temperature", "top_p"]:
        page.keyboard.press("ArrowUp")
        order = [name for name, _ in shown()]
    assert page.evaluate("document.activeElement.className") == "handle"
    own = state(page)["order"].split(",")
    assert own.index("temperature") + 1 == own.index("top_p")
    assert shown() == python([n for n in own if n != "guided"])
    # the same by mouse, back to where it was
    page.set_viewport_size({"width": 1280, "height": 1800})
    box, below = handle.bounding_box(), page.locator('[data-stage="mirostat"]').bounding_box()
    page.mouse.move(box["x"] + 8, box["y"] + 8)
    page.mouse.down()
    page.mouse.move(box["x"] + 8, below["y"] - 4, steps=6)
    page.mouse.up()
    assert state(page)["order"] == "llama.cpp"
    # a ban
    word = words(page, "funnel")[0]
    page.locator("#panel-funnel .bar").first.click()
    assert words(page, "funnel")[0] != word
    assert page.locator(".tag").inner_text().startswith("banned")
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert [name for name, _ in shown()] == ["banned_ids", "top_p", "temperature"]


def test_lens_ends_in_the_models_logits(opened: Any, model: Any) -> None:
    page = opened("tab=lens")
    page.wait_for_selector(".lens")
    assert page.locator(".badge").first.inner_text() == (
        "✓ The last block equals the model’s logits, bit by bit"
    )
    assert page.locator(".lens tbody tr").count() == 31
    last = page.locator(".lens tbody tr >> nth=0").locator(".cell").last
    best = next_tokens(FRANCE, model, top=1).tokens[0]
    assert last.text_content() == dotted(best.token)
    cell = page.locator(".lens tbody tr >> nth=6").locator(".cell").last
    cell.hover()
    assert page.locator(".words li").count() == 5
    pinned = cell.text_content()
    cell.click()
    page.wait_for_selector("figcaption >> text=Pinned")
    assert pinned in page.locator("figcaption").inner_text()
    assert page.locator("#panel-lens circle").count() == 31
    last.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    assert "block 28" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.select_option("#metric", "rank")
    assert state(page)["metric"] == "rank"
    page.reload()
    page.wait_for_selector("figcaption >> text=Pinned")


def test_why_sums_to_the_difference(opened: Any, model: Any) -> None:
    page = opened("tab=why")
    page.wait_for_selector("#why-sum .badge")
    assert page.locator("#why-sum .badge").inner_text() == "✓ equal to 1e-4"
    page.fill("#pick-b", "London")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    [london] = model.encode(" London")
    assert state(page)["b"] == str(london)
    page.wait_for_selector("#why-sum code >> text=London")
    page.wait_for_function(WORKS)
    best = next_tokens(FRANCE, model, top=1).tokens[0]
    with torch.inference_mode():
        z = model.head(model.last_hidden(FRANCE)).float()
    gap = float(z[best.id] - z[london])
    assert f"+{gap:.3f}"[:-1] in page.locator("#why-sum").inner_text()
    values = page.locator(".pulls .num").all_inner_texts()
    rest = page.locator("#panel-why > .card > p.small").inner_text()
    numbers = [float(v.replace("−", "-")) for v in values]
    more = re.search(r"([+−][\d.]+)", rest)
    total = sum(numbers) + (float(more[1].replace("−", "-")) if more else 0)
    assert total == pytest.approx(gap, abs=0.03)  # each is shown with three digits
    page.click("label:has(#heads)")
    page.wait_for_selector(".pulls >> text=/head \\d/")
    assert page.locator("#why-sum .badge").inner_text() == "✓ equal to 1e-4"


def test_steer_within_its_limits(opened: Any, tmp_path: Path) -> None:
    page = opened("tab=steer&n=5")
    page.fill("#pick-up", " London")
    page.keyboard.press("Enter")
    page.wait_for_selector("#kl-live")
    slider = page.locator("#c-alpha")
    slider.focus()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('#panel-steer .word').offsetParent")
    kl = live(page)
    bound = re.search(r"KL ≤ ([\d.]+)", page.locator("#panel-steer").inner_text())
    assert bound
    assert 0 < kl <= float(bound[1])
    assert "London" in words(page, "steer", ".bars >> nth=0 >>")[0]
    # the guard holds it back
    page.click("label:has(#guard)")
    page.fill('[aria-label="KL cap, nats, number"]', "0.002")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "() => parseFloat(document.getElementById('kl-live').textContent) <= 0.00205"
    )
    assert live(page) <= 0.0021
    address = state(page)
    assert address["steer"].startswith("words:")
    assert address["cap"] == "0.002"
    # both texts, and stopping them
    page.click("#steer-go")
    page.wait_for_selector("text=/held back \\d of 5 tokens/")
    plain, steered = page.locator(".output").all_inner_texts()
    assert plain
    assert steered
    # a file of one's own
    v = torch.randn(576, generator=torch.Generator().manual_seed(1))
    file = SteeringVector(v / v.norm() * 3, 12, 2.0).save(tmp_path / "mine.safetensors")
    page.set_input_files("#upload", file)
    page.wait_for_function("() => location.hash.includes('file')")
    page.wait_for_selector("text=none below the head")
    assert "mine.safetensors, layer 12" in page.locator("#vector").inner_text()
    page.reload()
    page.wait_for_selector("#kl-live")
    assert page.locator("#vector").input_value() == state(page)["steer"].removeprefix("file:")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"nothing")
    page.expected = ["400 (Bad Request)"]
    page.set_input_files("#upload", bad)
    page.wait_for_selector("#panel-steer .problem")


def live(page: Any) -> float:
    page.wait_for_timeout(150)
    page.wait_for_load_state("networkidle")
    return float(page.locator("#kl-live").inner_text().split()[0])


def test_size_tells_what_fewer_rows_save(opened: Any) -> None:
    page = opened("tab=size")
    page.wait_for_selector("#panel-size .facts dd")
    assert "head and embedding" in page.locator(".map").get_attribute("aria-label")
    before = page.locator("#panel-size output").inner_text()
    page.focus("#rows")
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    after = page.locator("#panel-size output").inner_text()
    kept = [int(t.split(" of ")[0].replace(",", "")) for t in (before, after)]
    assert kept[0] - kept[1] == 5 * 64
    share = float(page.locator("#panel-size .facts").inner_text().split("Coverage")[1].split()[0])
    assert 90 < share < 99.1
    page.fill("#corpus", "Ein Text in einer anderen Sprache, über Bäume und Vögel.")
    with page.expect_response(lambda r: r.url.endswith("/api/coverage")):
        page.click("#measure")
    page.wait_for_function(WORKS)
    assert state(page)["rows"] == str(kept[1])


def test_the_exported_file_shows_the_same_without_a_network(
    opened: Any, browser: Any, tmp_path: Path
) -> None:
    page = opened("tab=funnel&temperature=1.5&top_k=40&min_p=0.001&order=vllm")
    shown = {}
    for panel in ("lens", "why", "size", "next", "funnel"):
        page.click(f"#tab-{panel}")
        page.wait_for_selector(DRAWN[panel])
        page.wait_for_function(WORKS)
        shown[panel] = page.locator(f"#panel-{panel}").inner_text()
    with page.expect_download() as download:
        page.click("#export")
    file = tmp_path / "page.html"
    download.value.save_as(file)
    same(browser, file, shown)


def same(browser: Any, file: Path, shown: dict[str, str]) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    page = context.new_page()
    page.set_default_timeout(240_000)
    wrong: list[str] = []
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("request", lambda r: wrong.append(r.url) if r.url.startswith("http") else None)
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready]")
    for panel, text in shown.items():
        page.click(f"#tab-{panel}")
        page.wait_for_selector(DRAWN[panel])
        page.wait_for_function(WORKS)
        assert page.locator(f"#panel-{panel}").inner_text() == text, panel
    # the sliders of the funnel still work
    page.click("#tab-funnel")
    before = page.locator("#panel-funnel .big").inner_text()
    page.fill('[aria-label="k, number"]', "3")
    page.keyboard.press("Enter")
    assert page.locator("#panel-funnel .big").inner_text() != before
    assert page.locator("#panel-funnel .big").inner_text().startswith("3 of")
    context.close()
    assert wrong == []


def test_a_restarted_server_is_noticed(opened: Any, site: Any) -> None:
    page = opened()
    page.expected = ["ERR_", "Failed to load"]
    site.restart()
    type_prompt(page, "Another prompt")
    page.wait_for_selector("#banner >> text=restarted")
    page.click("#banner button")
    page.wait_for_selector("body[data-ready]")
    assert page.locator("#banner").is_hidden()
    assert page.input_value("#prompt") == "Another prompt"
    site.stop()
    page.fill("#prompt", "Is anybody there")
    page.wait_for_selector("#banner >> text=does not answer")
    site.restart()


def test_two_tabs_do_not_disturb_each_other(opened: Any, model: Any) -> None:
    one, two = opened("n=12&temperature=0"), opened("prompt=Two+and+two+make")
    one.click("#generate")
    two.click("#tab-lens")
    two.wait_for_selector(".lens")
    one.wait_for_function("() => document.querySelectorAll('.chip.new').length === 12")
    assert words(two, "next") == []
    two.click("#tab-next")
    python = next_tokens("Two and two make", model, top=14)
    assert words(two) == [dotted(t.token) for t in python.tokens]
    assert state(two)["prompt"] == "Two and two make"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_and_nothing_overflows(opened: Any, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is missing")
    page = opened("temperature=0.7&top_p=0.9&steer=words:4649:&alpha=2", theme=theme)
    for panel in PANELS:
        page.click(f"#tab-{panel}")
        page.wait_for_selector(DRAWN[panel])
        page.wait_for_function(WORKS)
        found = axe.Axe().run(page).response["violations"]
        reported = [(v["id"], v["impact"], [n["target"] for n in v["nodes"]][:3]) for v in found]
        assert reported == [], panel
        for width in (390, 620, 900, 1280, 1600):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (panel, width)
        page.set_viewport_size({"width": 1280, "height": 900})


def test_slow_work_is_cancelled(opened: Any) -> None:
    page = opened("tab=size")
    page.wait_for_selector("#panel-size .facts dd")
    page.fill(
        "#corpus", "\n".join(f"Sentence {i} of a long text about trees." for i in range(2000))
    )
    page.click("#measure")
    page.click(".working >> text=Cancel")
    page.wait_for_selector("text=Cancelled.")
    began = time.monotonic()
    type_prompt(page, "The server is free again")
    assert time.monotonic() - began < 60


def test_json_is_in_the_address(opened: Any) -> None:
    page = opened("tab=funnel&banned_ids=260,338&top_k=7&order=vllm")
    assert page.locator(".tag").count() == 2
    assert json.loads(page.evaluate("JSON.stringify(location.hash)"))
    assert page.locator("#panel-funnel .big").inner_text().startswith("7 of 49,152")
