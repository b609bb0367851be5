"""Builds what is published and looks at it: wheel, sdist, advisories, bill of materials.

python scripts/dist.py        # in the venv of `make dist`
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
LOCK = ROOT / "requirements-dev.lock"
_UNREACHABLE = ("ConnectionError", "ServiceError", "Max retries", "timed out", "resolve", "Proxy")


def run(*arguments: object) -> None:
    """Run a module of this interpreter; a failure ends the program."""
    subprocess.run([sys.executable, "-P", "-m", *map(str, arguments)], cwd=ROOT, check=True)


def audit() -> str:
    """Ask for known vulnerabilities of every pinned package; say so where nobody answers."""
    command = [sys.executable, "-P", "-m", "pip_audit", "--disable-pip", "--no-deps"]
    command += ["--progress-spinner", "off", "--requirement", str(LOCK)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode == 0:
        return "no known vulnerability in what requirements-dev.lock names"
    if "Found " not in said and any(word in said for word in _UNREACHABLE):
        return "NOT DONE: the advisory service could not be reached from here"
    raise SystemExit(f"pip-audit found something, or failed:\n{said}")


def main() -> None:
    """Do it all into dist/."""
    shutil.rmtree(DIST, ignore_errors=True)
    run("build", "--no-isolation", "--outdir", DIST, ROOT)
    files = sorted(DIST.glob("lmhead-*"))
    run("twine", "check", "--strict", *files)
    torch = next(
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    everything = DIST / "everything.txt"
    everything.write_text(f"{LOCK.read_text()}{torch}\n")
    bill = DIST / "lmhead.cdx.json"
    run("cyclonedx_py", "requirements", everything, "--pyproject", ROOT / "pyproject.toml",
        "--output-reproducible", "--of", "JSON", "--output-file", bill)  # fmt: skip
    everything.unlink()
    print(f"advisories: {audit()}")
    for path in [*files, bill]:
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
