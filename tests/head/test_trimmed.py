"""TrimmedHead: kept logits bit-equal, original ids, everything else out of reach."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lmhead.errors import BadInput
from lmhead.head import Head, LMHead
from lmhead.head.trimmed import TrimmedHead
from lmhead.trim.idmap import TrimMap
from lmhead.trim.keepfile import KeepFile

V, d = 507, 123


@pytest.fixture
def head() -> LMHead:
    g = torch.Generator().manual_seed(0)
    return LMHead(
        torch.randn(V, d, generator=g),
        torch.randn(V, generator=g),
        nn.LayerNorm(d),
        softcap=30.0,
        scale=0.5,
    )


@pytest.fixture
def kept() -> list[int]:
    return sorted(torch.randperm(V, generator=torch.Generator().manual_seed(1))[:99].tolist())


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, d, generator=torch.Generator().manual_seed(2))


def test_it_is_a_head(head: LMHead, kept: list[int]) -> None:
    trimmed = TrimmedHead(head, kept)
    assert isinstance(trimmed, Head)
    assert (trimmed.vocab_size, trimmed.hidden_size) == (V, d)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3)])
@pytest.mark.parametrize("from_block", [False, True])
def test_kept_logits_are_those_of_the_whole_head(
    head: LMHead, kept: list[int], shape: tuple[int, ...], from_block: bool
) -> None:
    h = states(*shape)
    z, z_trimmed = head(h, from_block=from_block), TrimmedHead(head, kept)(h, from_block=from_block)
    assert z_trimmed.shape == z.shape
    torch.testing.assert_close(z_trimmed[..., kept], z[..., kept], rtol=0, atol=1e-5)
    gone = torch.ones(V, dtype=torch.bool)
    gone[kept] = False
    assert torch.isneginf(z_trimmed[..., gone]).all()


@pytest.mark.parametrize("n", [1, 2, 64])
@pytest.mark.parametrize(("rows", "width"), [(49152, 576), (50257, 768)])
def test_kept_logits_are_bit_equal_at_real_sizes(n: int, rows: int, width: int) -> None:
    # Row counts that are not a multiple of anything: their last rows are added up in another order.
    g = torch.Generator().manual_seed(3)
    whole = LMHead(torch.randn(rows, width, generator=g))
    some = torch.randperm(rows, generator=g)[:13619]
    kept = torch.cat([some, torch.tensor([rows - 1, rows - 15])]).unique()
    h = torch.randn(n, width, generator=g)
    assert torch.equal(TrimmedHead(whole, kept)(h)[:, kept], whole(h)[:, kept])


def test_topk_and_samples_are_original_ids(head: LMHead, kept: list[int]) -> None:
    trimmed, h = TrimmedHead(head, kept), states(4)
    best = trimmed.topk(h, 7)
    masked = trimmed(h)
    assert torch.equal(best.ids, masked.topk(7).indices)
    assert torch.equal(best.logits, masked.topk(7).values)
    drawn = trimmed.sample(h, generator=torch.Generator().manual_seed(5))
    assert set(drawn.tolist()) <= set(kept)
    assert torch.equal(trimmed.sample(h, temperature=0.0), best.ids[:, 0])
    with pytest.raises(BadInput, match="99"):
        trimmed.topk(h, 100)


def test_samples_follow_the_law_of_the_kept_logits(head: LMHead, kept: list[int]) -> None:
    trimmed, h = TrimmedHead(head, kept), states() * 0.2
    p = torch.softmax(trimmed(h), -1)
    many = h.expand(20_000, d)
    drawn = trimmed.sample(many, generator=torch.Generator().manual_seed(6))
    found = torch.bincount(drawn, minlength=V) / len(many)
    # Six standard errors of the likeliest token: a false alarm in one of 10^8 seeds.
    assert (found - p).abs().max() < 6 * (p.max() * (1 - p.max()) / len(many)).sqrt()


def test_a_keep_set_file_belongs_to_one_head(head: LMHead, kept: list[int], tmp_path: Path) -> None:
    path = tmp_path / "keep.safetensors"
    KeepFile(TrimMap.of(kept, V), "tiny", head.sha256).save(path)
    trimmed = TrimmedHead.from_file(head, path)
    assert trimmed.kept.tolist() == kept
    assert trimmed.sha256 == TrimmedHead(head, kept).sha256
    assert trimmed.sha256 != TrimmedHead(head, kept[:-1]).sha256
    with pytest.raises(BadInput, match="was made for"):
        TrimmedHead.from_file(LMHead(torch.randn(V, d)), path)
    with pytest.raises(BadInput, match="not a keep-set file"):
        TrimmedHead.from_file(head, tmp_path / "none")


@pytest.mark.parametrize("ids", [[], [3], [3, 3], [5, 3], [-1, 3], [3, V]])
def test_keep_sets_that_fit_no_head_are_refused(head: LMHead, ids: list[int]) -> None:
    with pytest.raises(BadInput, match="keep-set"):
        TrimmedHead(head, ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("d", [576, 123])
def test_bit_equal_wherever_the_weight_begins(d: int, dtype: torch.dtype) -> None:
    """Weights of a mapped file begin anywhere in a cache line; some products depend on that."""
    rng = torch.Generator().manual_seed(0)
    for first in (0, 1, 3, 10):
        room = torch.randn(3001 * d + first, generator=rng).to(dtype)
        head = LMHead(room[first:].view(3001, d))
        for n in (1, 2, 5, 17):
            h = torch.randn(n, d, generator=rng).to(dtype)
            whole = head(h)
            for count in (70, 1000, 2500):
                ids = torch.randperm(3001, generator=rng)[:count].sort().values
                assert torch.equal(TrimmedHead(head, ids)(h)[:, ids], whole[:, ids]), (first, n)
