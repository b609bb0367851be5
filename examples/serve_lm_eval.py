"""The evaluation harness (lm-eval) against a running `lmhead serve`, and against its `hf` backend.

    lmhead serve -m smollm2-135m &
    pip install 'lm-eval[api,hf]'
    python examples/serve_lm_eval.py
    python examples/serve_lm_eval.py --compare FOLDER

It makes three small tasks of its own (multiple choice, perplexity of texts, generate until a stop
text), so that nothing is fetched, and runs them through `local-completions` with a batch size of 8.
The tokenizer is the server's own (`tokenizer_backend=remote`); with `--compare` the same tasks run
on the model's folder with the `hf` backend, and answers and log-likelihoods are compared.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

QUESTIONS = (
    ("The capital of France is", ("Paris", "London", "Rome", "Madrid"), 0),
    ("The capital of Japan is", ("Osaka", "Tokyo", "Seoul", "Beijing"), 1),
    ("Water freezes at a temperature of", ("zero degrees Celsius", "fifty degrees"), 0),
    ("The opposite of hot is", ("warm", "cold", "tall", "green"), 1),
    ("A triangle has", ("two sides", "three sides", "nine sides"), 1),
    ("Bees make", ("honey", "bread", "glass", "paper money"), 0),
    ("The sun rises in the", ("west", "north", "east", "cellar"), 2),
    ("Dogs like to chew on", ("bones", "clouds", "numbers"), 0),
    ("The first month of the year is", ("June", "January", "October"), 1),
    ("Two plus two equals", ("four", "seven", "eleven"), 0),
)
TEXTS = (
    "Once upon a time there was a king who had three daughters. The youngest was the wisest.",
    "The train leaves at noon, and it takes four hours to reach the coast.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "She opened the door quietly; nobody had noticed that she was gone. 🦙",
    "def add(a, b):\n    return a + b\n",
)
STARTS = (
    "One, two, three, four,",
    "The days of the week are Monday,",
    "Question: What is the capital of Italy?\nAnswer:",
    "Roses are red, violets are",
)

CHOICE = """\
task: own_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.json}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """\
task: own_perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/texts.json}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}]
"""
UNTIL = """\
task: own_until
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/starts.json}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{start}}}}"
doc_to_target: ""
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 16, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""
TASKS = {"own_choice": CHOICE, "own_perplexity": ROLLING, "own_until": UNTIL}


def write_tasks(folder: Path) -> None:
    """Write the tasks and what they ask."""
    rows: dict[str, list[dict[str, Any]]] = {
        "choice": [
            {"question": question, "choices": list(choices), "answer": answer}
            for question, choices, answer in QUESTIONS
        ],
        "texts": [{"text": text} for text in TEXTS],
        "starts": [{"start": start} for start in STARTS],
    }
    for name, reported in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in reported)
        (folder / f"{name}.json").write_text(lines)
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))


def evaluate(folder: Path, model: str, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Run the tasks; return metrics, and every answer of the model."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=tasks,
        batch_size=8,
        log_samples=True,
        bootstrap_iters=0,
        **more,
    )
    assert found is not None
    return found


def answers(found: dict[str, Any]) -> dict[str, list[Any]]:
    """Return what the model answered, task by task."""
    return {
        name: [sample["resps"] for sample in sorted(rows, key=lambda row: row["doc_id"])]
        for name, rows in found["samples"].items()
    }


def largest_difference(ours: Any, theirs: Any) -> float:
    """Compare nested answers: numbers by how far they are apart, everything else exactly."""
    if isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        return max((largest_difference(a, b) for a, b in zip(ours, theirs, strict=True)), default=0)
    try:
        return abs(float(ours) - float(theirs))  # lm-eval writes log-likelihoods as texts
    except (TypeError, ValueError):
        return 0.0 if str(ours) == str(theirs) else math.inf


def main() -> int:
    """Run the tasks against a server, and compare where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8401")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--compare", metavar="FOLDER", help="The model's folder, for `hf`.")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="Use this tokenizer, not the server's."
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_tasks(folder)
        served = {
            "model": given.model,
            "base_url": f"{given.url}/v1/completions",
            "num_concurrent": 1,
            "max_retries": 1,
            "max_length": given.max_length,
            "tokenizer_backend": "huggingface" if given.tokenizer else "remote",
        }
        if given.tokenizer:
            served["tokenizer"] = given.tokenizer
        ours = evaluate(folder, "local-completions", served)
        print(json.dumps(ours["results"], indent=1, default=str))
        if not given.compare:
            return 0
        local = {"pretrained": given.compare, "dtype": "float32"}
        theirs = evaluate(folder, "hf", local, device="cpu")
    worst = 0.0
    for name, reported in answers(ours).items():
        apart = largest_difference(reported, answers(theirs)[name])
        print(f"{name}: {len(reported)} rows, largest difference {apart:.2e}")
        worst = max(worst, apart)
    return int(worst > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
