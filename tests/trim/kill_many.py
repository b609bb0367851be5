"""Kill trims at random moments and look at what is left; run as a program by test_publish.

Prints one JSON object: how many attempts were killed, how many had finished before, how many left
the target absent or whole, and how many left anything else. Forks, so that the imports are paid
once.
"""

import filecmp
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from lmhead.trim.keepset import Keep
from lmhead.trim.report import TrimRequest
from lmhead.trim.run import trim_model


def attempt(source: str, ids: Path, out: Path) -> None:
    trim_model(TrimRequest(source, Keep(ids=ids)), out, force=True)


def is_whole(out: Path, reference: Path) -> bool:
    names = {p.name for p in reference.iterdir()}
    if {p.name for p in out.iterdir()} != names:
        return False
    weights = {name for name in names if name.endswith((".safetensors", "tokenizer.json"))}
    return all(filecmp.cmp(out / n, reference / n, shallow=False) for n in weights) and bool(
        json.loads((out / "lmhead_trim.json").read_text())["proof"]["passed"]
    )


def main(source: str, ids: Path, where: Path, kills: int) -> None:
    # What a trim imports when it gets there is imported here once.
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    reference, out = where / "reference", where / "out"
    start = time.monotonic()
    if (pid := os.fork()) == 0:
        attempt(source, ids, reference)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    whole_time = time.monotonic() - start
    rng = random.Random(0)
    found = {"killed": 0, "finished": 0, "absent": 0, "whole": 0, "half": 0}
    number = 0
    while found["killed"] < kills:  # one that was finished before its moment came does not count
        number += 1
        # Half of them write a new folder, half replace one.
        if number % 2:
            shutil.rmtree(out, ignore_errors=True)
        elif not out.exists():
            shutil.copytree(reference, out)
        if (pid := os.fork()) == 0:
            attempt(source, ids, out)
            os._exit(0)
        time.sleep(rng.uniform(0, whole_time))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        found["killed" if os.WIFSIGNALED(status) else "finished"] += 1
        if not out.exists():
            found["absent"] += 1
        else:
            found["whole" if is_whole(out, reference) else "half"] += 1
    attempt(source, ids, out)  # and what the killed ones left is swept
    found["left_over"] = len([p for p in where.iterdir() if p not in (reference, out)])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
