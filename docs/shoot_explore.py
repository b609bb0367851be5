"""Take the pictures of docs/explore: every panel, 390 and 1280 pixels wide, in both themes.

    python docs/shoot_explore.py [URL]

Without the URL of a running `lmhead explore` it starts one of its own. Needs Chromium, playwright
and pillow.
"""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "explore"
PANELS = ("next", "funnel", "lens", "why", "steer", "size")
PROMPT = "prompt=The+Eiffel+Tower+stands+in+the+city+of"
STATE = {
    "next": "temperature=1.3&min_p=0.01",
    "funnel": "temperature=1.3&top_k=200&top_p=0.95&min_p=0.005&repetition_penalty=1.1",
    "lens": "follow=7042",
    "why": "",
    "steer": "steer=words:9724:7042&alpha=0.8&n=24",
    "size": "",
}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]


def shoot(url: str) -> None:
    """Write all pictures."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS, headless=True)
        for theme in ("light", "dark"):
            context = browser.new_context(color_scheme=theme)
            page = context.new_page()
            page.set_default_timeout(240_000)
            for panel in PANELS:
                page.goto("about:blank")
                page.goto(f"{url}#tab={panel}&{PROMPT}&{STATE[panel]}")
                page.wait_for_selector("body[data-ready]")
                if panel == "steer":
                    page.wait_for_selector("#kl-live")
                    page.click("#steer-go")
                    page.wait_for_selector("text=done")
                page.wait_for_timeout(300)
                page.wait_for_function("() => !document.querySelector('.working')")
                for width, height in ((390, 1500), (1280, 1180)):
                    page.set_viewport_size({"width": width, "height": height})
                    page.wait_for_timeout(300)
                    picture = Image.open(io.BytesIO(page.screenshot()))
                    to = FOLDER / f"{panel}-{width}-{theme}.webp"
                    picture.convert("RGB").save(to, quality=72, method=6)
                    print(f"{to.name} {to.stat().st_size:,} bytes")
            context.close()
        browser.close()


def main() -> None:
    """Take them of a running server, or of one that is started for it."""
    if len(sys.argv) > 1:
        shoot(sys.argv[1])
        return
    command = [sys.executable, "-m", "lmhead", "explore", "--no-browser", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        reported = ""
        while process.stdout is not None and not reported.rstrip().endswith("}"):
            reported += process.stdout.readline()
        shoot(json.loads(reported)["url"])
    finally:
        process.terminate()


if __name__ == "__main__":
    main()
