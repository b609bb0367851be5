"""Trimming: counting against plain encode_batch, the surgery's time and memory, the head's speed.

Prints ratios from one run. Run: python benchmarks/trim.py [MODEL]

With --corpus FILE (such as examples/documents.py writes) it makes a whole trim with the defaults
instead, and prints the processor's time of every stage; with --quick beside it a quick one, and the
ratio of both. With --ready it times a trim with a ready keep-set: as a command, in a process that
has loaded its libraries, and from GGUF to GGUF.
With --judge FOLDER (repeatable) it asks on --corpus, texts that no trim has seen, how often the
model would leave the keep-set of each trimmed folder: the same continuations, and the same texts
as it reads them, for all.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lmhead.models.registry import DEFAULT_MODEL
from lmhead.models.resolve import resolve
from lmhead.trim.checkpoint import vocabulary_tensors, write_trimmed
from lmhead.trim.corpus import Corpus
from lmhead.trim.counts import count
from lmhead.trim.folder import ModelFolder
from lmhead.trim.idmap import TrimMap
from lmhead.trim.keepset import Keep, choose, rounded, wanted
from lmhead.trim.report import TrimRequest
from lmhead.trim.run import trim_model

ROUNDS = 3
TEXTS, JUDGED = 96, 96  # how many texts keep-sets are judged on, and how many tokens of each


def corpus_of_sources(folder: Path) -> Corpus:
    """The standard library's own sources, one file per text."""
    texts = [f.read_text("utf-8", "ignore") for f in sorted(Path(os.__file__).parent.glob("*.py"))]
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), "utf-8")
    return Corpus((path,))


def main(model: str) -> None:
    folder = ModelFolder.open(resolve(model))
    with tempfile.TemporaryDirectory() as scratch:
        corpus = corpus_of_sources(Path(scratch))
        texts = [text.text for text in corpus]
        size = sum(len(t.encode()) for t in texts)
        tokenizer = folder.tokenizer.built
        ours, plain = [], []
        for _ in range(ROUNDS):  # turn by turn, so that both see the same machine
            start = time.perf_counter()
            for at in range(0, len(texts), 50):
                tokenizer.encode_batch(texts[at : at + 50])
            plain.append(time.perf_counter() - start)
            start = time.perf_counter()
            first, held = count(folder.tokenizer, corpus)
            ours.append(time.perf_counter() - start)
        print(f"counting: {size / min(ours) / 1e6:.2f} MB/s, {min(plain) / min(ours):.2f} times "
              "the speed of tokenizers.encode_batch")  # fmt: skip

        start = time.perf_counter()
        counts = (first + held).counts
        kept = choose(
            folder.tokenizer, folder.required_ids(), wanted(folder.tokenizer, Keep(), counts)
        )
        ids = TrimMap.of(rounded(folder.tokenizer, kept, folder.rows).ids, folder.rows)
        print(
            f"keep-set: {ids.kept_rows:,} of {ids.rows:,} rows, {time.perf_counter() - start:.2f} s"
        )

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        write_trimmed(folder, ids, Path(scratch) / "out")
        took = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        largest = max(t.nbytes for t in folder.checkpoint.tensors.values())
        print(
            f"surgery: {took:.2f} s; peak {peak / 1024:.0f} MB, {(peak - before) / 1024:.0f} "
            f"MB of it the surgery's (mapped pages included); largest tensor {largest / 1e6:.0f} MB"
        )
        cut = vocabulary_tensors(folder)
        total = sum(t.nbytes for t in folder.checkpoint.tensors.values())
        gone = sum(t.nbytes for t in cut.values()) * (1 - ids.kept_rows / ids.rows)
        print(f"bytes: {gone / total:.1%} of the model went away")

    import torch

    name = max(cut, key=lambda n: cut[n].nbytes)
    W = folder.checkpoint.read(name)
    Wk = W[torch.from_numpy(ids.row_ids)]
    h = torch.randn(1, W.shape[1], dtype=W.dtype)
    times: dict[str, list[float]] = {"whole": [], "trimmed": []}
    with torch.inference_mode():
        for _ in range(30):
            for label, weight in (("whole", W), ("trimmed", Wk)):
                start = time.perf_counter()
                torch.nn.functional.linear(h, weight)
                times[label].append(time.perf_counter() - start)
    whole, trimmed = (sorted(times[k])[15] for k in ("whole", "trimmed"))
    print(
        f"head, one token: {whole * 1e3:.2f} ms to {trimmed * 1e3:.2f} ms, x{whole / trimmed:.2f}"
    )


class Stages:
    """Prints what each stage took, of the processor and by the clock; adds up what loading did."""

    def __init__(self) -> None:
        self.loading = 0.0

    @contextmanager
    def __call__(self, title: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield lambda _: None
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        self.loading += cpu if title.startswith("loading") else 0.0
        print(f"  {title}: {cpu:.1f} s of CPU, {wall:.1f} s by the clock", flush=True)


def load_libraries(model: str) -> None:
    """Load the model once, and with it everything that transformers imports by and by."""
    from lmhead import load

    load(model)


def whole(model: str, corpus: Path, **limits: int) -> float:
    """Trim with the defaults, from the corpus to the proof; return the seconds by the clock."""
    import torch

    load_libraries(model)
    request = TrimRequest(model, corpus=Corpus((corpus,)), coverage=0.99, resume=False, **limits)
    stages = Stages()
    cpu, wall = time.process_time(), time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        report = trim_model(request, Path(scratch) / "out", progress=stages)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(f"{model}, {torch.get_num_threads()} threads: {cpu - stages.loading:.1f} s of CPU after "
          f"loading ({cpu:.1f} s with it, {wall:.1f} s by the clock), {report.texts:,} texts, "
          f"{report.ids.kept_rows:,} of {report.ids.rows:,} rows")  # fmt: skip
    if report.coverage is not None and report.coverage.estimate is not None:
        found, news = report.coverage.estimate, report.coverage.new_choices
        print(f"estimate: {found.texts_left} of {found.texts} continuations leave, "
              f"{found.step_rate:.2%} of {found.steps:,} steps; {news.rate:.2%} new choices "
              f"({news.low:.2%} to {news.high:.2%})")  # fmt: skip
    for check in report.proof.checks if report.proof else ():
        print(f"  {check.name}: {check.failed} of {check.tested:,}; {check.note}")
    return wall


def ready(model: str) -> None:
    """Trim with a ready keep-set, proved by model runs and by files alone."""
    with tempfile.TemporaryDirectory() as scratch:
        ids, out = Path(scratch) / "ids", Path(scratch) / "out"
        ids.write_text("\n".join(map(str, range(20_000))), "utf-8")
        for more in ((), ("--no-run",)):
            command = [sys.executable, "-m", "lmhead", "trim", model, "--ids", str(ids)]
            before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run([*command, "--out", str(out), *more], check=True, capture_output=True)
            wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            reported = f"{cpu:.1f} s of CPU, {wall:.1f} s by the clock"
            print(f"as a command {' '.join(more)}: {reported}", flush=True)
            shutil.rmtree(out)
        load_libraries(model)
        for form in ("model", "gguf"):
            for run in (True, False):
                cpu, wall = time.process_time(), time.perf_counter()
                request = TrimRequest(model, Keep(ids=ids), run=run)
                trim_model(request, out, form=form, force=True)  # type: ignore[arg-type]
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                reported = f"{cpu:.1f} s of CPU, {wall:.1f} s by the clock"
                print(
                    f"--form {form}, models {'run' if run else 'do not run'}: {reported}",
                    flush=True,
                )


def judge(model: str, corpus: Path, folders: list[Path]) -> None:
    """Compare keep-sets by what the model says on other texts: on all of them the same."""
    import torch

    from lmhead import load
    from lmhead.trim.estimate import News, binomial_interval
    from lmhead.trim.observing import Group, lots, observe_continuations, read_lot

    loaded = load(model)
    rows = [loaded.encode(text.text)[:JUDGED] for text in Corpus((corpus,)) if text.text.strip()]
    rows = rows[:TEXTS]
    starts = [row[:32] for row in rows]
    said = observe_continuations(loaded, Group(starts, whole=False), max_tokens=64)[0].texts
    read = []
    for lot in lots(rows):
        chosen = read_lot(loaded, lot)[1]
        read += torch.split(chosen, [len(ids) for ids in lot])
    for folder in folders:
        report = json.loads((folder / "lmhead_trim.json").read_text("utf-8"))
        kept = set(report["id_map"]["kept"])
        left = [sum(i not in kept for i in text) for text in said]
        low, high = binomial_interval(sum(n > 0 for n in left), len(left))
        steps = News.of([(len(text), n) for text, n in zip(said, left, strict=True)])
        away = [(len(ids), sum(i not in kept for i in ids.tolist())) for ids in read]
        places = News.of(away)
        print(f"{folder}: {report['kept_rows']:,} rows; {sum(n > 0 for n in left)} of {len(left)} "
              f"continuations leave ({low:.1%} to {high:.1%}), {steps.rate:.2%} of "
              f"{steps.positions:,} steps ({steps.low:.2%} to {steps.high:.2%}), {places.rate:.2%} "
              f"of {places.positions:,} positions read ({places.low:.2%} to {places.high:.2%})",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--corpus", type=Path, help="make a whole trim on these texts")
    parser.add_argument("--quick", action="store_true", help="and a quick one, with --corpus")
    parser.add_argument("--ready", action="store_true", help="trim with a ready keep-set")
    parser.add_argument("--judge", type=Path, action="append", help="a trimmed folder to judge")
    arguments = parser.parse_args()
    if arguments.judge:
        judge(arguments.model, arguments.corpus, arguments.judge)
    elif arguments.ready:
        ready(arguments.model)
    elif arguments.corpus:
        seconds = whole(arguments.model, arguments.corpus)
        if arguments.quick:
            from lmhead.cli.trim import QUICK

            share = whole(arguments.model, arguments.corpus, **QUICK) / seconds
            print(f"--quick takes {share:.2f} of the time of a whole trim, by the clock")
    else:
        main(arguments.model)
