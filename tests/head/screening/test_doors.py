"""What must not shake a screened head: hostile copies, forks, settings, no writable folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lmhead
from lmhead.errors import BadCheckpoint, LMHeadError
from lmhead.head import LMHead
from lmhead.head.screened import ScreenedHead
from lmhead.head.screening.bounds import Screen

V, D = 300, 40


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))


def random_head(dtype: torch.dtype = torch.float32) -> LMHead:
    return LMHead(torch.randn(V, D, generator=torch.Generator().manual_seed(0)).to(dtype))


def tamper(path: Path, name: str, row: int, value: float) -> None:
    """Change one row of a tensor in the file, and nothing of what the file says of itself."""
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    tensors[name][row] = value
    path.unlink()  # not in place: it is mapped
    save_file(tensors, path, about)


@pytest.mark.parametrize(
    ("name", "row", "value"),
    [
        ("q", 7, 0),
        ("q", 299, 5),
        ("q", 0, -128),
        ("scale", 7, 0.0),
        ("scale", 7, float("nan")),
        ("scale", 7, 1e-38),
        ("residual", 7, 0.0),
        ("residual", 7, float("nan")),
        ("residual", 7, float("inf")),
        ("norm", 7, 0.01),
        ("norm", 7, -1.0),
        ("norm", 310, float("nan")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_is_held_against_the_weights(
    tmp_path: Path, name: str, row: int, value: float, dtype: torch.dtype
) -> None:
    head = random_head(dtype)
    path = ScreenedHead.from_head(head, tmp_path, save=True).path
    assert path is not None
    assert ScreenedHead.from_head(head, tmp_path).path == path
    tamper(path, name, row, value)
    with pytest.raises(BadCheckpoint, match=r"not a copy of this head's weights.*lmhead screen"):
        ScreenedHead.from_head(head, tmp_path)
    again = ScreenedHead.from_head(head, tmp_path, save=True, rebuild=True)
    h = torch.randn(5, D)
    assert torch.equal(again.topk(h, 9).ids, ScreenedHead.from_head(head).topk(h, 9).ids)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_an_honest_copy_is_always_taken(tmp_path: Path, scale: float, kind: str) -> None:
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(507, 252, generator=g) * torch.rand(507, 1, generator=g) * scale
    weight[5] = 0
    weight[6] = 1e-44
    head = LMHead(weight.to(getattr(torch, kind)))
    path = ScreenedHead.from_head(head, tmp_path, save=True).path
    assert ScreenedHead.from_head(head, tmp_path).path == path


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(lmhead.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": source, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


HEAD = """
import os, sys, torch, warnings
from lmhead.head import LMHead
from lmhead.head.screened import ScreenedHead
dense = LMHead(torch.randn(5000, 64, generator=torch.Generator().manual_seed(0)))
h = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
expected = dense.topk(h, 5).ids
"""


@pytest.mark.parametrize("env", [{}, {"OMP_NUM_THREADS": "1"}])
def test_the_callers_number_of_threads_stays(env: dict[str, str]) -> None:
    pytest.importorskip("numba", reason="numba is missing")
    script = (
        HEAD
        + """
if not os.environ.get("OMP_NUM_THREADS"):
    torch.set_num_threads(1)
before = torch.get_num_threads()
head = ScreenedHead.from_head(dense)
assert torch.equal(head.topk(h, 5).ids, expected)
head.sample(h)
print(before, torch.get_num_threads())
torch.set_num_threads(2)
head.topk(h, 5)
print(torch.get_num_threads())
"""
    )
    reported = run(script, **{"OMP_NUM_THREADS": "", **env})
    assert reported.stdout.split() == ["1", "1", "2"], reported.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_survives() -> None:
    pytest.importorskip("numba", reason="numba is missing")
    script = (
        HEAD
        + """
head = ScreenedHead.from_head(dense)
assert head.compiled and torch.equal(head.topk(h, 5).ids, expected)
sys.stdout.flush()
if (child := os.fork()) == 0:
    assert torch.equal(head.topk(h, 5).ids, expected) and not head.compiled
    head.sample(h)
    assert not ScreenedHead.from_head(dense).compiled
    try:
        ScreenedHead.from_head(dense, kernels="numba")
    except Exception as error:
        print(type(error).__name__, "spawn" in str(error), flush=True)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert head.compiled and torch.equal(head.topk(h, 5).ids, expected)
"""
    )
    reported = run(script)
    assert reported.stdout.split() == [LMHeadError.__name__, "True", "7"], reported.stderr


def without_a_place(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Copy the source so that nothing can be kept beside it, and point all else to nowhere."""
    import shutil

    source = tmp_path / "src"
    here = Path(lmhead.__file__).parent
    shutil.copytree(here, source / "lmhead", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "lmhead/head/screening/__pycache__").write_text("a file where a folder must be")
    nowhere = str(tmp_path / "file")
    Path(nowhere).write_text("")
    kept = ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA")
    return source, {"PYTHONPATH": str(source), **dict.fromkeys(kept, f"{nowhere}/x")}


def test_numba_without_a_place_to_write(tmp_path: Path) -> None:
    pytest.importorskip("numba", reason="numba is missing")
    _, env = without_a_place(tmp_path)
    script = (
        HEAD
        + """
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(2):
        head = ScreenedHead.from_head(dense)
        assert torch.equal(head.topk(h, 5).ids, expected)
print(head.compiled, len(seen), "LMHEAD_CACHE" in str(seen[0].message) if seen else "")
"""
    )
    reported = run(script, **env, LMHEAD_CACHE=f"{tmp_path}/file/y")
    assert reported.stdout.split() == ["False", "1", "True"], reported.stderr
    reported = run(script, **env, LMHEAD_CACHE=f"{tmp_path}/cache")  # ours is enough
    assert reported.stdout.split() == ["True", "0"], reported.stderr
    # numba's files hold pickles and machine code: none is read where others could have put it
    (tmp_path / "cache" / "numba").chmod(0o777)
    reported = run(script, **env, LMHEAD_CACHE=f"{tmp_path}/cache")
    assert reported.stdout.split() == ["False", "1", "True"], reported.stderr


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_another_default_dtype_changes_nothing(
    default: torch.dtype, dtype: torch.dtype, kernels: str
) -> None:
    h = torch.randn(2, D, generator=torch.Generator().manual_seed(1))
    expected = ScreenedHead.from_head(random_head(dtype)).topk(h, 5)
    dense = random_head(dtype)
    torch.set_default_dtype(default)
    try:
        head = ScreenedHead.from_head(dense, kernels=kernels)  # type: ignore[arg-type]
        best = head.topk(h, 5)
        nan = torch.full((1, D), torch.nan, dtype=torch.float32)
        assert head.topk(nan, 3).logits.isnan().all()  # the dense fall-back
        assert head.sample(h, top_p=0.9, generator=torch.Generator()).shape == (2,)
        assert head.candidates(h, 3, [torch.tensor([1])] * 2).logits.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(best.ids, expected.ids)
    assert torch.equal(best.logits, expected.logits)
    assert isinstance(head.screen, Screen)
