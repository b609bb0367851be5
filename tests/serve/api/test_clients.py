"""Other real clients, where they are installed: openai for node, litellm, lm-evaluation-harness."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serving import Live

pytestmark = pytest.mark.model
ROOT = Path(__file__).parents[3]


def test_openai_for_node(live: Live, tmp_path: Path) -> None:
    """examples/serve_clients.mjs, with the node_modules that LMHEAD_NODE_MODULES names."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    installed = os.environ.get("LMHEAD_NODE_MODULES")
    if installed is None or not (Path(installed) / "openai").is_dir():
        pytest.skip("needs `npm install openai`, and its node_modules in LMHEAD_NODE_MODULES")
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    script = tmp_path / "clients.mjs"
    script.write_text((ROOT / "examples" / "serve_clients.mjs").read_text())
    (tmp_path / "node_modules").symlink_to(installed)
    done = subprocess.run(
        [node, str(script), live.url, "tiny"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["error"] == "model_not_found"


def test_the_example_for_python(live: Live) -> None:
    """examples/serve_clients.py: openai, and litellm where it is installed."""
    pytest.importorskip("openai", reason="needs the openai client")
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    script = ROOT / "examples" / "serve_clients.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), live.url, "tiny"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "there is no model 'another'" in json.loads(done.stdout)["openai"]["errors"][0]


def test_litellm(live: Live) -> None:
    if importlib.util.find_spec("litellm") is None:
        pytest.skip("needs litellm: pip install litellm")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LITELLM, live.url],
        capture_output=True,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # it would fetch prices
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


LITELLM = """
import sys, litellm
url = sys.argv[1] + "/v1"
asked = dict(model="openai/tiny", api_base=url, api_key="none", max_tokens=6, seed=1,
             messages=[{"role": "user", "content": "Hello"}])
plain = litellm.completion(**asked, logprobs=True, top_logprobs=2)
assert len(plain.choices[0].logprobs.content) == 6
parts = litellm.completion(**asked, stream=True)
text = "".join(part.choices[0].delta.content or "" for part in parts)
assert text == plain.choices[0].message.content, (text, plain)
one = litellm.text_completion(model="text-completion-openai/tiny", api_base=url, api_key="none",
                              prompt="Hello", max_tokens=4, temperature=0)
assert one.usage.completion_tokens == 4
try:
    litellm.completion(**{**asked, "model": "openai/another"})
except litellm.NotFoundError as error:
    assert "there is no model" in str(error)
else:
    raise AssertionError("another model was served")
steered = litellm.completion(**asked, extra_body={"steering": [{"name": "v1", "kl_cap": 0.1}]})
assert steered.choices[0].message.content
print("ok")
"""


def test_lm_evaluation_harness(live: Live, tmp_path: Path) -> None:
    """examples/serve_lm_eval.py: the same answers and log-likelihoods as its `hf` backend."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("needs lm-eval: pip install 'lm-eval[api,hf]'")
    live.model.body.model.save_pretrained(tmp_path)
    live.model.tokenizer.save_pretrained(tmp_path)
    script = ROOT / "examples" / "serve_lm_eval.py"
    done = subprocess.run(
        [sys.executable, str(script), "--url", live.url, "--model", "tiny",
         "--compare", str(tmp_path), "--max-length", "1024"],
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
