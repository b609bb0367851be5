"""Start-up: `inspect` as a command, `load` in a fresh process, a trim with a ready keep-set.

    python benchmarks/loading.py                     # this tree
    python benchmarks/loading.py --before TREE       # against another checkout, turn by turn

Every run is a process of its own, after one that compiles what it imports and fills the file cache.
Prints the best and the median of all turns, by the clock and of the processor, and with --before
the ratios. Ends with an error if `inspect` imports torch or takes 0.5 s at its best, or if the best
time of the processor is more than 1.05 of what it was before.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parents[1]
LIMIT, SLOWER = 0.5, 1.05  # seconds of `inspect`; what may be noise
ROWS = 20_000


class Took(NamedTuple):
    """What one process took, in seconds: by the clock, and of the processor."""

    wall: float
    cpu: float


def environment(tree: Path) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return plain | {"PYTHONPATH": str(tree / "src"), "HF_HUB_OFFLINE": "1"}


def run(tree: Path, arguments: list[str]) -> Took:
    """Run Python with the sources of a tree, and wait for it."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=environment(tree),
        cwd=tree / "benchmarks",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} in {tree}: {said.decode()[-2000:]}")
    return Took(wall, used.ru_utime + used.ru_stime)


def imports_torch(tree: Path, arguments: list[str]) -> bool:
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, env=environment(tree), capture_output=True, check=True)
    return any(line.split(b"|")[-1].strip() == b"torch" for line in done.stderr.splitlines())


def measured(
    trees: dict[str, Path], tasks: dict[str, list[str]], turns: int, scratch: Path
) -> dict[tuple[str, str], list[Took]]:
    """Time every task in every tree, turn by turn; the first of a turn is another each time."""
    took: dict[tuple[str, str], list[Took]] = {}
    for turn in range(-1, turns):  # turn -1 is not counted
        for task, arguments in tasks.items():
            for name, tree in list(trees.items())[:: 1 if turn % 2 else -1]:
                out = scratch / f"{name}{turn}"
                more = ["--out", str(out)] if "trim" in arguments else []
                found = run(tree, [*arguments, *more])
                shutil.rmtree(out, ignore_errors=True)
                if turn >= 0:
                    took.setdefault((task, name), []).append(found)
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", action="append", help="a word of the tasks to run: trim")
    given = parser.parse_args()
    trees = ({"before": given.before.resolve()} if given.before else {}) | {"now": HERE}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        (scratch / "ids").write_text("\n".join(map(str, range(ROWS))), "utf-8")
        trim = ["-m", "lmhead", "trim", given.model, "--ids", str(scratch / "ids")]
        tasks = {
            f"inspect {given.model}": ["-m", "lmhead", "inspect", given.model],
            "inspect gemma-7b": ["-m", "lmhead", "inspect", "gemma-7b"],
            f"load {given.model}": ["-c", f"import lmhead; lmhead.load({given.model!r})"],
            f"trim {given.model}": trim,
        }
        if given.only:
            tasks = {t: a for t, a in tasks.items() if any(word in t for word in given.only)}
        wrong = [t for t, a in tasks.items() if t[:7] == "inspect" and imports_torch(HERE, a)]
        took = measured(trees, tasks, given.turns, scratch)
    problems = [f"{task} imports torch" for task in wrong]
    for task in tasks:
        best: dict[str, Took] = {}
        middle: dict[str, Took] = {}
        for name in trees:
            columns = list(zip(*took[task, name], strict=True))
            best[name] = Took(*map(min, columns))
            middle[name] = Took(*map(statistics.median, columns))
            reported = "best {:.3f} s by the clock, {:.3f} s of CPU; median {:.3f} and {:.3f} s"
            print(f"{task}, {name}: {reported.format(*best[name], *middle[name])}")
        if task.startswith("inspect") and best["now"].wall >= LIMIT:
            problems.append(f"{task} takes {best['now'].wall:.2f} s; {LIMIT} s are promised")
        if given.before:
            ratios = [
                after / before
                for of in (best, middle)
                for after, before in zip(of["now"], of["before"], strict=True)
            ]
            reported = "best {:.2f} and {:.2f}, median {:.2f} and {:.2f}"
            print(f"  now over before: {reported.format(*ratios)}")
            if ratios[1] > SLOWER:
                problems.append(f"{task} takes {ratios[1]:.2f} times the CPU of before")
    print("; ".join(problems) or "all as promised")
    return len(problems) and 1


if __name__ == "__main__":
    sys.exit(main())
