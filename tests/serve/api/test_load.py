"""Many clients at once: a smaller run of benchmarks/serve.py, on a tiny model."""

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import Live

pytestmark = pytest.mark.model
FILE = Path(__file__).parents[3] / "benchmarks" / "serve.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_serve", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_serve"] = module
    spec.loader.exec_module(module)
    return module


def test_sixty_mixed_requests_give_what_each_gives_alone(live: Live, bench: Any) -> None:
    """Steered ones, slow readers, bad bodies and clients that leave, all at the same time."""
    failed = live.server.worker.counts.failed
    reported = asyncio.run(
        bench.mixed(live.url, ["v0", "v1", "v2", "v3"], 60, 20, 1, None, max_tokens=12, distinct=20)
    )
    assert reported["different"] == []
    assert (reported["good"], reported["left"], reported["bad"], reported["slow"]) == (48, 6, 6, 6)
    assert reported["steered"] >= 12
    assert live.idle()
    assert live.server.worker.counts.failed == failed
    assert live.get("/readyz").status_code == 200


def test_guarded_tokens_keep_their_cap_by_plain_transformers(live: Live, bench: Any) -> None:
    reported = asyncio.run(
        bench.guarded(live.url, ["v0", "v1", "v2", "v3"], tokens=120, each=20, kl_cap=0.1)
    )
    added = {}
    for name in ("v0", "v1", "v2", "v3"):
        v = live.server.vectors.get(name).vectors[0]
        added[name] = (v.layer, v.direction)
    found = bench.recompute(live.model.body.model, reported, added)
    assert found["tokens"] >= 120
    assert found["held_back"] > 60, "a cap that holds nothing back proves nothing"
    assert found["largest_share_of_cap"] <= 1
    assert found["kl_differs_by"] < 1e-4
    assert found["logprob_differs_by"] < 1e-3
