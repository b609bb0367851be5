"""A step of a batch whose rows have the bits of a run alone, against the model's own arithmetic.

Both take turns on the same sequences: a step of the body, and the logits of its rows. The promise
itself, bit by bit, is in `tests/body/test_row_body.py`.

    python benchmarks/rows.py
    OMP_NUM_THREADS=1 python benchmarks/rows.py --model smollm2-135m
"""

import argparse
import statistics
import time

import torch

import lmhead
from lmhead.body.row_body import RowBody, row_body
from lmhead.head.rowwise import rowwise

TEXT = "Once upon a time, in a small village by the sea,"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    plain, model = lmhead.load(given.model), lmhead.load(given.model)
    began = time.perf_counter()
    apart = row_body(model.body)
    assert isinstance(apart, RowBody), "the rows of this model depend on each other"
    print(f"{torch.get_num_threads()} threads; trial {time.perf_counter() - began:.1f} s")
    bodies = {"plain": plain.body, "rows": apart}
    ids = model.encode(TEXT)
    for rows in given.rows:
        prompts = [ids[: 3 + i % 5] for i in range(rows)]
        states = {name: body.prefill(prompts, room=128)[1] for name, body in bodies.items()}
        steps: dict[str, list[float]] = {name: [] for name in bodies}
        heads: dict[str, list[float]] = {name: [] for name in bodies}
        for turn in range(given.rounds):
            for name, body in bodies.items():
                began = time.perf_counter()
                h, states[name] = body.run(torch.full((rows, 1), 100 + turn), states[name])
                steps[name].append(time.perf_counter() - began)
                with rowwise(name == "rows"):
                    began = time.perf_counter()
                    model.head(h[:, -1])
                    heads[name].append(time.perf_counter() - began)
        shown = ", ".join(
            f"{name} {1000 * statistics.median(steps[name]):.1f} + "
            f"{1000 * statistics.median(heads[name]):.1f} ms"
            for name in bodies
        )
        print(f"{rows} rows, body + logits: {shown}", flush=True)


if __name__ == "__main__":
    main()
