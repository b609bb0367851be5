"""MaxHead answers as the dense head does, within the rounding of float32."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from lmhead.errors import BadInput, MissingExtra, UnsupportedModel, how_to_install
from lmhead.head import Head, LMHead, Scale
from lmhead.head.max_head import MaxHead
from lmhead.progress import Advance

needs_max = pytest.mark.skipif(
    find_spec("max") is None, reason="Modular MAX is not installed (extra max)"
)
# MAX takes minutes for a graph that it has not compiled before
pytestmark = [pytest.mark.timeout(3600), pytest.mark.bare]

V, D = 507, 36


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def states(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, D, generator=draw(seed))


def dense_head(dtype: torch.dtype = torch.float32) -> LMHead:
    """A head with everything that a head can have."""
    norm = nn.LayerNorm(D)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(D, generator=draw(2)))
    return LMHead(
        torch.randn(V + 5, D, generator=draw(3)).to(dtype),
        torch.randn(V + 5, generator=draw(4)).to(dtype),
        norm.to(dtype),
        softcap=7.0,
        scale=Scale(3.0, divide=True),
        vocab_size=V,
    ).eval()


@pytest.fixture(scope="module")
def heads() -> tuple[LMHead, MaxHead]:
    dense = dense_head()
    return dense, MaxHead.from_head(dense)


def test_without_max_the_error_names_the_extra_and_the_licence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "max.experimental.nn", None)
    with pytest.raises(MissingExtra) as raised:
        MaxHead.from_head(dense_head())
    assert how_to_install("max") in str(raised.value)
    assert "LicenseRef-MAX-Platform-Software-License" in str(raised.value)


@needs_max
def test_licence_is_the_one_that_the_package_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import metadata

    licence = metadata("max")["License"]
    monkeypatch.setitem(sys.modules, "max.experimental.nn", None)
    with pytest.raises(MissingExtra, match=licence):
        MaxHead.from_head(dense_head())


@needs_max
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("from_block", [False, True])
def test_logits(heads: tuple[LMHead, MaxHead], shape: tuple[int, ...], from_block: bool) -> None:
    dense, ours = heads
    h = states(*shape)
    expected, got = dense(h, from_block=from_block), ours(h, from_block=from_block)
    assert got.shape == (*shape, V)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected.detach(), atol=1e-5, rtol=0)


@needs_max
def test_topk_and_sample(heads: tuple[LMHead, MaxHead]) -> None:
    dense, ours = heads
    h = states(4, 2)
    best, got = dense.topk(h, 9), ours.topk(h, 9)
    assert torch.equal(got.ids, best.ids)
    torch.testing.assert_close(got.logits, best.logits.detach(), atol=1e-5, rtol=0)
    assert torch.equal(ours.sample(h, temperature=0.0), best.ids[..., 0])
    for top_k in (None, 5):
        drawn = ours.sample(h, 0.8, top_k, generator=draw(9))
        assert torch.equal(drawn, dense.sample(h, 0.8, top_k, generator=draw(9)))
    with pytest.raises(BadInput, match=f"from 1 to the vocabulary's {V}"):
        ours.topk(h, V + 1)


@needs_max
def test_is_a_head_with_the_name_of_its_weights(heads: tuple[LMHead, MaxHead]) -> None:
    dense, ours = heads
    assert isinstance(ours, Head)
    assert (ours.vocab_size, ours.hidden_size, ours.sha256) == (V, D, dense.sha256)


@needs_max
def test_wrong_states_are_refused(heads: tuple[LMHead, MaxHead]) -> None:
    _, ours = heads
    with pytest.raises(BadInput, match="width 35"):
        ours(torch.zeros(2, D - 1))
    with pytest.raises(BadInput, match="not ids"):
        ours(torch.zeros(2, D, dtype=torch.long))
    with pytest.raises(UnsupportedModel, match=r"float64.*use the dense head"):
        MaxHead.from_head(dense_head(torch.float64))


@needs_max
def test_says_that_it_compiles_and_reads_bfloat16() -> None:
    titles = []

    @contextmanager
    def progress(title: str, total: int | None = None) -> Iterator[Advance]:
        titles.append(title)
        yield lambda _n: None

    dense = dense_head(torch.bfloat16)
    ours = MaxHead.from_head(dense, progress=progress)
    assert len(titles) == 1
    assert titles[0].startswith("compiling")
    h = states(6).bfloat16()
    got = ours(h, from_block=True)
    assert got.dtype == torch.bfloat16
    exact = dense_head(torch.bfloat16).float()(dense.norm(h).float())  # type: ignore[misc]
    # one rounding of the result, where the dense head rounds after every step
    torch.testing.assert_close(got, exact.detach().bfloat16(), atol=0, rtol=2**-7)


@needs_max
def test_processes_started_afterwards_keep_their_environment(
    heads: tuple[LMHead, MaxHead],
) -> None:
    """MAX points PYTHONEXECUTABLE elsewhere; a child would then miss the virtual environment."""
    import subprocess

    done = subprocess.run([sys.executable, "-c", "import lmhead, torch"], capture_output=True)
    assert done.returncode == 0, done.stderr
