"""How often a model reads a text, and how long that takes: train, eval and detect on one file.

    python benchmarks/detect_time.py DATA [-m MODEL] [--rows 1500] [--threads 2] [--keep FOLDER]

The three run one after another, with an empty cache of states. Tokens are counted where they enter
the model: read twice, the texts would have more than they have. Seconds are of the CPU, of all
threads, from when the model is loaded.
"""

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lmhead.loading import load
from lmhead.steer.judge.detector import detect
from lmhead.steer.judge.evaluation import Detected, evaluate
from lmhead.steer.learn.reading import read_data
from lmhead.steer.learn.training import train


class Counter:
    """Tokens that the embedding is asked for; padding, and the tokens that `Blocks` tries, are 0.

    What several texts begin with is read once for all of them, so that a model that reads every
    text once sees fewer tokens than the texts have, and one that reads a text twice sees more.
    """

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, _module: Any, args: tuple[Any, ...], _result: Any) -> None:
        """Count what is read."""
        self.tokens += int((args[0] != 0).sum())


def main() -> None:
    """Read the options, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="+", metavar="DATA")
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", help="a cache to leave behind; else it is removed")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    every = [read_data(source) for source in options.data]
    rows = tuple({row.text: row for data in every for row in data.rows}.values())[: options.rows]
    data = replace(every[0], rows=rows, pairs=())
    model = load(options.model)
    counter = Counter()
    model.body.model.get_input_embeddings().register_forward_hook(counter)
    tokens = sum(len(model.encode(row.text)) for row in rows)
    with TemporaryDirectory() as folder:
        os.environ["LMHEAD_CACHE"] = str(Path(options.keep or folder))
        started = time.process_time()
        print(f"{len(rows):,} different texts of {tokens:,} tokens, {options.threads} threads")
        vector = train(data, model)
        reported(
            f"train: {vector.card.metrics['validation_auroc']:.3f} out of fold", counter, started
        )
        found = evaluate(vector, data, model)
        assert isinstance(found, Detected)
        reported(f"eval: AUROC {found.auroc.value:.3f}", counter, started)
        scores = detect(vector, list(rows), model)
        reported(f"detect: {len(scores):,} scores", counter, started)
        print(f"for each token of a text {counter.tokens / tokens:.3f} were read")


def reported(what: str, counter: Counter, started: float) -> None:
    """Print how far it is."""
    spent = time.process_time() - started
    print(f"{what}; {counter.tokens:,} tokens read, {spent:.1f} s of CPU so far", flush=True)


if __name__ == "__main__":
    main()
