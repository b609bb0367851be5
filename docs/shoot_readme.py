"""Take the picture at the top of the README: the terminal, and the page beside it.

    python docs/shoot_readme.py

Runs some commands, and puts what they print beside a picture of the page (docs/shoot_explore.py
takes that one). Needs Chromium, playwright and pillow.
"""

import base64
import html
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "explore" / "funnel-1280-light.webp"
PICTURE = DOCS / "readme.webp"
COMMANDS = (
    ("next", "The capital of France is", "--top", "5"),
    ("why", "The capital of France is", "--against", " London", "--top", "5"),
    ("inspect", "gemma3-270m"),
)
STYLE = """
body { margin: 0; padding: 26px; width: 1572px; background: #e8eaf6; display: flex; gap: 26px;
       font-family: system-ui, sans-serif; align-items: stretch; }
.window { border-radius: 10px; overflow: hidden; box-shadow: 0 6px 24px #0003; }
.bar { background: #d5d8ec; padding: 9px 12px; display: flex; gap: 7px; }
.bar i { width: 11px; height: 11px; border-radius: 50%; background: #9fa8da; }
.terminal { background: #1b1e2e; flex: none; width: 760px; }
pre { margin: 0; white-space: pre-wrap; padding: 14px 18px; color: #dfe3f5;
      font: 14.5px/1.42 "DejaVu Sans Mono", monospace; }
pre b { color: #9ecbff; }
.page { flex: 1; background: #fff; }
.page img { display: block; width: 786px; }
"""


def said(arguments: tuple[str, ...]) -> str:
    """Return what a command prints on a terminal of 84 columns."""
    done = subprocess.run(
        [sys.executable, "-m", "lmhead", *arguments],
        env=os.environ | {"COLUMNS": "84", "TERMINAL_WIDTH": "84", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


def document() -> str:
    """Return the page that is photographed."""
    shown = []
    for command in COMMANDS:
        words = " ".join(f'"{word}"' if " " in word else word for word in command)
        shown.append(f"<b>$ lmhead {html.escape(words)}</b>\n{html.escape(said(command))}\n")
    page = base64.b64encode(PAGE.read_bytes()).decode()
    bar = '<div class="bar"><i></i><i></i><i></i></div>'
    return (
        f"<!doctype html><meta charset=utf-8><style>{STYLE}</style><body>"
        f'<div class="window terminal">{bar}<pre>{chr(10).join(shown)}</pre></div>'
        f'<div class="window page">{bar}<img src="data:image/webp;base64,{page}"></div>'
    )


def main() -> None:
    """Write the picture."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1624, "height": 760})
        page.set_content(document())
        page.wait_for_timeout(500)
        picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
        picture.convert("RGB").save(PICTURE, quality=80, method=6)
        browser.close()
    print(f"{PICTURE.name} {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
