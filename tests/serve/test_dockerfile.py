"""The Dockerfile names what is there: files, extras, options, port and path."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
STEPS = [line.split(" ", 1) for line in TEXT.splitlines() if line and not line.startswith("#")]


def steps(name: str) -> list[str]:
    return [rest for word, rest in STEPS if word == name]


def test_what_is_copied_is_there_and_is_all_that_the_build_reads() -> None:
    sources = [path for line in steps("COPY") for path in line.split()[:-1]]
    assert [path for path in sources if not (ROOT / path).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {"pyproject.toml", "src", project["readme"], *project["license-files"]}
    (install,) = [line for line in steps("RUN") if "pip install" in line]
    needed.add(re.findall(r"--constraint (\S+)", install)[0])
    assert needed <= set(sources)
    extras = re.findall(r"'\.\[([a-z,]+)\]'", install)[0].split(",")
    assert set(extras) <= set(project["optional-dependencies"])


def test_it_runs_as_a_user_without_rights_who_owns_the_volume() -> None:
    names = [word for word, _ in STEPS]
    (user,), (volume,) = steps("USER"), steps("VOLUME")
    made = " ".join(steps("RUN"))
    assert f"useradd --create-home --uid 10001 {user}" in made
    assert f"chown {user} {volume}" in made
    assert f"LMHEAD_CACHE={volume}" in " ".join(steps("ENV"))
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "RUN" not in names[names.index("USER") :]


def test_its_command_starts_nothing_without_a_key() -> None:
    """The very words of the image, without the variable that holds the key."""
    words = [*json.loads(steps("ENTRYPOINT")[0]), *json.loads(steps("CMD")[0])]
    assert words[0] == "lmhead"
    there = {name: value for name, value in os.environ.items() if name != "LMHEAD_KEY"}
    done = subprocess.run(
        [sys.executable, "-m", *words], env=there, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr  # an option that is wrong
    assert done.stderr.startswith("error: "), done.stderr
    assert "LMHEAD_KEY" in done.stderr


def test_the_health_check_asks_what_is_served() -> None:
    from lmhead.serve.api.security import OPEN

    (check,), (port,) = steps("HEALTHCHECK"), steps("EXPOSE")
    host, asked, path = re.findall(r"http://([\d.]+):(\d+)(/\w+)", check)[0]
    assert (host, asked) == ("127.0.0.1", port)
    assert path in OPEN
    code = (ROOT / "src" / "lmhead" / "cli" / "serve.py").read_text(encoding="utf-8")
    assert f"= {port}," in code
