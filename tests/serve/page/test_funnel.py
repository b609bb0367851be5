"""The page's sampling equals Python's: the same ids left, and probabilities to 1e-6."""

import base64
import os
from typing import Any

import pytest
import torch

from lmhead.errors import LMHeadError
from lmhead.sampling import SamplingParams
from lmhead.sampling.breakers import breakers_of
from page_settings import cases, pythons

pytestmark = pytest.mark.model
COUNT = int(os.environ.get("LMHEAD_SETTINGS", "200"))

RUN = """
async ([about, settings, V, base64]) => {
  const { Funnel } = await import("/static/funnel_run.js");
  const { probabilities } = await import("/static/sampling.js");
  const { decoded } = await import("/static/api.js");
  const z = decoded(base64).slice(0, V);
  return settings.map(({ params, order, seq }) => {
    const steps = new Funnel(about).run(z, seq, { ...about.defaults, ...params }, order);
    const { c } = steps[steps.length - 1];
    return {
      ids: [...c.ids], p: [...probabilities(c)],
      steps: steps.map((s) => [s.name, s.left, s.cut, s.moved]),
    };
  });
}
"""


def test_the_browser_samples_as_python_does(model: Any, site: Any, browser: Any) -> None:
    prompt = model.encode("The cat sat on the mat. The dog sat on the mat. The cat sat")
    output = model.encode(" on the mat: the cat sat on the")[-9:]
    with torch.inference_mode():
        z = model.head(model.last_hidden([*prompt, *output])).float()
    known = breakers_of(model.tokenizer, SamplingParams().dry_sequence_breakers)
    breakers = {str(i): known[i] for i in {*prompt, *output} if i in known}
    wanted, settings = [], []
    for case in cases(COUNT + 20, 7, prompt, output):
        try:
            found = pythons(case, z, model.reachable, model.stop_ids, model.tokenizer)
        except LMHeadError:  # nothing left: not what is compared here
            continue
        seq = {
            "prompt": case["prompt"],
            "output": case["output"],
            "breakers": breakers,
            "uniform": found["uniform"],
        }
        params = {**case["params"], "stop_ids": list(model.stop_ids)}
        wanted.append(found)
        settings.append({"params": params, "order": case["order"], "seq": seq})
    wanted, settings = wanted[:COUNT], settings[:COUNT]
    assert len(settings) == COUNT
    page = browser.new_page()
    page.goto(f"{site.url}api/alive")
    about = page.evaluate("fetch('/api/model').then((r) => r.json())")
    reported = base64.b64encode(z.numpy().tobytes()).decode()
    given = page.evaluate(RUN, [about, settings, model.reachable, reported])
    page.close()
    worst = 0.0
    for n, (python, js) in enumerate(zip(wanted, given, strict=True)):
        assert js["ids"] == python["ids"], settings[n]
        worst = max(worst, *(abs(a - b) for a, b in zip(js["p"], python["p"], strict=True)))
        for own, other in zip(js["steps"], python["steps"], strict=True):
            assert own[:2] == other[:2], settings[n]
            assert own[2:] == pytest.approx(other[2:], abs=2e-6), settings[n]
    assert worst < 1e-6
