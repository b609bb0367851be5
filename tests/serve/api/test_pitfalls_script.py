"""benchmarks/serve_pitfalls.py, which asks any server, finds nothing wrong with this one."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from serving import Live, Settings, serving

pytestmark = pytest.mark.model
FILE = Path(__file__).parents[3] / "benchmarks" / "serve_pitfalls.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("serve_pitfalls", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_tiny_model_passes_all_that_it_can_show(live: Live, script: Any, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    with (
        serving(live.model, Settings(drain=5, origins=(script.ORIGIN,))) as other,
        script.Server(other.url, "tiny", live.model.tokenizer, None, None) as asked,
    ):
        found = script.ask(asked)
    # random weights say no emoji, and the CPU time of this process is not the server's alone
    untold = {name for name, result in found.items() if result.startswith("?")}
    assert untold == {"whole_characters", "disconnect_cancels"}
    assert {name: r for name, r in found.items() if r != "pass" and name not in untold} == {}
    wrong = {**found, "own_seed": "the same seed gives another text"}
    for name, results in (("a", found), ("b", wrong)):
        (tmp_path / name).write_text(json.dumps(results))
    rows = script.table([f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}"]).splitlines()
    assert rows[0] == "| | a | b |"
    assert "| A seed repeats its own request, and no other | yes | no |" in rows
    assert rows[-1] == f"| of {len(found)} | {len(found) - 2} | {len(found) - 3} |"


def test_a_server_without_them_is_told_what_is_wrong(live: Live, script: Any) -> None:
    """Asked for another model it refuses every request, and every check must notice."""
    with script.Server(live.url, "another", live.model.tokenizer, None, None) as asked:
        found = script.ask(asked)
    passed = {name for name, result in found.items() if result == "pass"}
    # what asks for a refusal gets one
    assert passed <= {"errors_as_objects", "unsupported_refused"}, found
