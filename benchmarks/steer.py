"""What vectors trained by lmhead detect, move and harm, on data that you give.

    python benchmarks/steer.py DATA... [-m MODEL] [--only head,detect,frontier,steer,time]
                               [--seeds 3] [--work DIR] [--json]

DATA are files that `lmhead steer train` reads, or `builtin`; `FILE::WORDS` takes the rows that hold
the words. Five tables, each the mean over the seeds (0, 1, ...), which also make the splits:

- head: `tsv` at the head's input with budget 2.0, against the same training without; once at the
  epoch that the validation rows choose, and once at the last one, where a free vector has grown;
- detect: `tsv` at the layer against the recipe to the letter, `auto`, and every baseline, on the
  test rows; 32 labels, up to 500 unlabelled rows, 100 validation rows, a quarter held out;
- frontier: constraints at that layer, on the first DATA: effect against harm, at the last epoch;
- steer: on held-out pairs of the first DATA that has any, a vector at a strength that wrecks the
  text: fitted to a budget and then guarded, as it is, and only guarded;
- time: how long `tsv` takes with 32 labels and 500 unlabelled rows.

Every result is kept in the folder WORK as soon as it is there; a run that was stopped goes on.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from tempfile import gettempdir
from typing import Any

import torch

from lmhead.body.blocks import Blocks
from lmhead.body.states import States
from lmhead.loading import Model, load
from lmhead.steer import SteeringVector, certify
from lmhead.steer.bound.constraints import Constraints
from lmhead.steer.judge.baselines import score_baselines
from lmhead.steer.judge.detector import prototype_scores, score_rows
from lmhead.steer.judge.evaluation import Steered, evaluate
from lmhead.steer.judge.frontier import PROMPT, SETTINGS, measure_point
from lmhead.steer.learn.data import Data
from lmhead.steer.learn.reading import read_data
from lmhead.steer.learn.request import Request
from lmhead.steer.learn.training import known, labels_of, train
from lmhead.steer.learn.tsv import Settings
from lmhead.steer.measure import harm, token_head
from lmhead.steer.metrics import auroc_interval
from lmhead.steer.prompts import NEUTRAL
from lmhead.steer.runs import Runs
from lmhead.steer.states import read_states

TABLES = ("head", "detect", "frontier", "steer", "time")
Result = dict[str, Any]


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work = options, Path(options.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.model: Model = load(options.model)
        self.data = [take(source) for source in options.data]
        blocks = Blocks(self.model.body)  # says where they are out of reach
        self.layer: int = len(blocks) // 2 if options.layer < 0 else options.layer
        about = f"{options.model} {self.model.head.sha256} {self.layer} {options.unbounded}"
        about += f" {Settings()} {SETTINGS}"
        self.tag = hashlib.sha256(about.encode()).hexdigest()[:8]  # of what results depend on

    def once(self, name: str, compute: Callable[[], Result]) -> Result:
        """Return the kept result of this name, or compute and keep it."""
        path = self.work / f"{name}-{self.tag}.json"
        if path.is_file():
            found: Result = json.loads(path.read_text())
            return found
        started = time.perf_counter()
        found = compute()
        found["seconds"] = round(time.perf_counter() - started, 1)
        staging = path.with_suffix(".part")
        staging.write_text(json.dumps(found))
        staging.replace(path)
        if not self.options.json:
            print(f"  {name}: {found['seconds']} s", flush=True)
        return found

    def states(self, data: Data) -> States:
        return read_states(self.model, data.rows)

    def vector(self, name: str, data: Data, request: Request) -> SteeringVector:
        """Train a vector, or read the one that was trained under this name."""
        path = self.work / f"{name}-{self.tag}.safetensors"
        if not path.is_file():
            checkpoint = self.work / f"{name}-{self.tag}.training"
            train(data, self.model, request, checkpoint=checkpoint).save(path)
            checkpoint.unlink(missing_ok=True)
        return SteeringVector.load(path)


def take(source: str) -> Data:
    path, _, words = source.partition("::")
    data = read_data(path)
    if words:
        rows = tuple(row for row in data.rows if words in row.text)
        data = replace(data, name=f"{data.name} ({words.strip()})", rows=rows)
    return data


def name_of(data: Data) -> str:
    return "".join(c if c.isalnum() else "-" for c in data.name)


def head_table(bench: Bench, seeds: Sequence[int]) -> list[Result]:
    rows = []
    for data in bench.data:
        for last, budget in ((False, None), (False, 2.0), (True, None), (True, 2.0)):
            kind = f"{'last' if last else 'chosen'} epoch, {budget or 'no'} budget"

            def compute(
                data: Data = data, budget: float | None = budget, last: bool = last
            ) -> Result:
                found: Result = {"range": [], "prompts_range": [], "auroc": [], "test": []}
                for seed in seeds:
                    request = Request(
                        method="tsv",
                        layer="head",
                        seed=seed,
                        settings=Settings(last=last),
                        constraints=Constraints(budget=budget),
                    )
                    vector = train(data, bench.model, request)
                    neutral = Runs.read(bench.model, NEUTRAL, "head")
                    seen = harm(token_head(bench.model), *neutral.compare(vector.added))
                    found["range"].append(certify(bench.model, vector).range)
                    found["prompts_range"].append(float(seen.range.max()))
                    found["auroc"].append(vector.card.metrics["validation_auroc"])
                    found["test"].append(test_auroc(bench, vector, data, request)["value"])
                return found

            key = f"head-{name_of(data)}-{budget}-{'last' if last else 'chosen'}-{len(seeds)}"
            rows.append({"data": data.name, "constraint": kind, **bench.once(key, compute)})
    return rows


def test_auroc(bench: Bench, vector: SteeringVector, data: Data, request: Request) -> Result:
    rows = request.split(data).test
    scores = score_rows(vector, rows, bench.model)
    return auroc_interval(scores, labels_of(rows), seed=request.seed).to_dict()


def detect_table(bench: Bench, seeds: Sequence[int]) -> list[Result]:
    rows = []
    for data in bench.data:
        for seed in seeds:
            request = Request(method="tsv", layer=bench.layer, seed=seed)

            def linear(data: Data = data, seed: int = seed) -> Result:
                states = bench.states(data)
                request = Request(method="auto", seed=seed)
                parts = request.split(data)
                index = {row: i for i, row in enumerate(data.rows)}
                seen = (*parts.labelled, *parts.unlabelled, *parts.validation)
                test = states[torch.tensor([index[row] for row in parts.test])]
                fitted = known(parts, states[torch.tensor([index[row] for row in seen])])
                vector = train(data, bench.model, request, states=states)
                scores = score_rows(vector, parts.test, bench.model, states=test)
                found = auroc_interval(scores, labels_of(parts.test), seed=seed).to_dict()
                others = {
                    b.name: b.auroc.to_dict() for b in score_baselines(parts, fitted, test, seed)
                }
                return {"auto": found, **others}

            found = bench.once(f"linear-{name_of(data)}-{seed}", linear)
            found.pop("seconds")
            if bench.options.tsv:

                def ours(data: Data = data, request: Request = request) -> Result:
                    name = f"tsv-{name_of(data)}-{request.seed}"
                    vector = bench.vector(name, data, request)
                    return test_auroc(bench, vector, data, request)

                found["tsv"] = bench.once(f"tsv-{name_of(data)}-{seed}", ours)
                letter = replace(request, settings=Settings(as_published=True))

                def theirs(data: Data = data, request: Request = letter) -> Result:
                    name = f"letter-{name_of(data)}-{request.seed}"
                    return test_auroc(bench, bench.vector(name, data, request), data, request)

                found["tsv to the letter"] = bench.once(f"letter-{name_of(data)}-{seed}", theirs)
            rows.append({"data": data.name, "split": request.split(data).to_dict(), **found})
    return rows


def frontier_table(bench: Bench, seeds: Sequence[int]) -> list[Result]:
    data, layer = bench.data[0], bench.layer
    neutral = Runs.read(bench.model, NEUTRAL, layer)
    rows = []
    for name, constraints in SETTINGS:
        for seed in seeds:
            request = Request(
                method="tsv",
                layer=layer,
                unlabelled=0,
                seed=seed,
                settings=Settings(last=True),
                constraints=constraints,
            )

            def compute(name: str = name, request: Request = request) -> Result:
                key = f"frontier-{name_of(data)}-{name.replace(' ', '-')}-{request.seed}"
                vector = bench.vector(key, data, request)
                valid = request.split(data).validation
                r = Runs.read(bench.model, valid, layer).last(vector.added)
                scores = prototype_scores(vector, r)
                effect = auroc_interval(scores, labels_of(valid)).value
                point = measure_point(name, request.seed, effect, vector, bench.model, neutral)
                test = test_auroc(bench, vector, data, request)["value"]
                return {**point.to_dict(), "test": test}

            key = f"frontier-{name_of(data)}-{layer}-{name.replace(' ', '-')}-{seed}"
            rows.append(bench.once(key, compute))
    return rows


def steer_table(bench: Bench, seeds: Sequence[int]) -> list[Result]:
    data = next((d for d in bench.data if d.pairs), None) or read_data("builtin")
    rows = []
    for method in bench.options.methods.split(","):
        for seed in seeds:

            def compute(method: str = method, seed: int = seed) -> Result:
                request = Request(
                    job="steer", method=method, seed=seed, constraints=Constraints(budget=2.0)
                )
                vector = bench.vector(f"steer-{name_of(data)}-{method}-{seed}", data, request)
                found: Result = {"method": method, "seed": seed, "layer": vector.layer}
                strong = vector.alpha * bench.options.unbounded
                ways: dict[str, dict[str, Any]] = {
                    "within": {"alpha": strong, "budget": 2.0, "fit": True},
                    "unbounded": {"alpha": strong},
                    "guarded": {"alpha": strong, "budget": 2.0},
                }
                for name, options in ways.items():
                    done = evaluate(vector, data, bench.model, seed=seed, **options)
                    assert isinstance(done, Steered)
                    seen = done.audit
                    found["pairs"] = done.pairs
                    found[name] = {
                        "alpha": done.alpha,
                        "gain": done.gain.to_dict(),
                        "range": seen.max_range,
                        "max_kl": seen.max_kl,
                        "perplexity": seen.perplexity[1] / seen.perplexity[0],
                        "distinct_2": seen.distinct_2[1] / seen.distinct_2[0],
                        "text": seen.continuations[0][2],
                    }
                return found

            rows.append(bench.once(f"steer-fit-{name_of(data)}-{method}-{seed}", compute))
    return rows


def time_table(bench: Bench, _seeds: Sequence[int]) -> list[Result]:
    data = max(bench.data, key=lambda d: len(d.rows))
    request = Request(method="tsv", layer=bench.layer)
    started = time.perf_counter()
    train(data, bench.model, request)
    took = time.perf_counter() - started
    return [
        {
            "data": data.name,
            "split": request.split(data).to_dict(),
            "layer": request.layer,
            "threads": torch.get_num_threads(),
            "train_seconds": round(took, 1),
        }
    ]


def spread(values: Sequence[float]) -> str:
    about = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{about}"


def show(name: str, rows: list[Result]) -> None:
    print(f"\n{name}")
    if name == "head":
        for row in rows:
            reported = [
                f"{k} {spread(row[k])}" for k in ("range", "prompts_range", "auroc", "test")
            ]
            print(f"  {row['data']:24} {row['constraint']:26} " + ", ".join(reported))
    elif name == "detect":
        for data in dict.fromkeys(row["data"] for row in rows):
            mine = [row for row in rows if row["data"] == data]
            print(f"  {data}: {mine[0]['split']}")
            for method in [k for k in mine[0] if k not in ("data", "split")]:
                found = [row[method] for row in mine]
                each = "  ".join(
                    f"{f['value']:.3f} [{f['low']:.3f}, {f['high']:.3f}]" for f in found
                )
                print(f"    {method:20} {spread([f['value'] for f in found])}    {each}")
    elif name == "frontier":
        for kind in dict.fromkeys(row["name"] for row in rows):
            mine = [row for row in rows if row["name"] == kind]
            keys = ("effect", "test", "max_delta", "max_kl", "median_kl", "flips")
            print(f"  {kind:20} " + ", ".join(f"{k} {spread([r[k] for r in mine])}" for k in keys))
            print(f"    {PROMPT}{mine[0]['text']!r}")
    else:
        for row in rows:
            print("  " + json.dumps(row, ensure_ascii=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="*", default=["builtin"], metavar="DATA")
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--only", default=",".join(TABLES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layer", type=int, default=-1, help="of tsv; the middle, if not given")
    parser.add_argument("--unbounded", type=float, default=32.0, help="times the bounded alpha")
    parser.add_argument("--methods", default="mean-diff,gradient", help="of steer")
    parser.add_argument(
        "--no-tsv", dest="tsv", action="store_false", help="baselines and auto only"
    )
    parser.add_argument("--work", default=str(Path(gettempdir()) / "lmhead-bench-steer"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    tables = {
        "head": head_table, "detect": detect_table, "frontier": frontier_table,
        "steer": steer_table, "time": time_table,
    }  # fmt: skip
    seeds = range(options.seeds)
    results = {name: tables[name](bench, seeds) for name in options.only.split(",")}
    if options.json:
        print(json.dumps({"model": options.model, "seeds": list(seeds), **results}, indent=2))
        return
    print(f"{options.model}, seeds {list(seeds)}, {options.threads} threads")
    for name, rows in results.items():
        show(name, rows)


if __name__ == "__main__":
    main()
