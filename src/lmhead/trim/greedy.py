"""The parts of a proof that run models: logits to the last bit, and greedy text.

The trimmed model runs, and beside it the head of the original: both get the same states, for every
weight below the head was found equal, byte by byte. Logits over the kept ids must be equal to the
last bit. Greedy text goes on as long as both heads choose the same token; they may part only where
the original chooses a token that was dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead.body.tap import tapped
from lmhead.errors import UnsupportedModel
from lmhead.head.dense import LMHead
from lmhead.head.find.locate import output_layer
from lmhead.head.find.pretrained import read_head
from lmhead.head.trimmed import TrimmedHead
from lmhead.loading import Model
from lmhead.models.architecture import find_head
from lmhead.progress import Progress
from lmhead.trim.folder import ModelFolder
from lmhead.trim.idmap import TrimMap
from lmhead.trim.inputs import Greedy, ProofInputs
from lmhead.trim.observing import continue_greedily, few_threads, logits
from lmhead.trim.proof import Check

FEW_TOKENS = 256  # for which a second thread waits longer than it works, where others run


def whole_head(original: ModelFolder, model: Model | None, trimmed: Model) -> Any:
    """Return the original's head: that of the model if it is loaded, else read by itself.

    Where rows are all that a trim changed in it, only they are read. What else the head does is
    then that of the trimmed one, whose logits are compared with those of its whole model.
    """
    head: Any = trimmed.head
    if model is not None:
        head = model.head
    elif head.bias is None and head.vocab_size == head.weight.shape[0]:
        shapes = {name: header.shape for name, header in original.checkpoint.tensors.items()}
        found = find_head(shapes, original.checkpoint.config, str(original.folder))
        head = LMHead(
            original.checkpoint.read(found.weight).to(head.weight.dtype),
            norm=head.norm,
            softcap=head.softcap,
            scale=head.scale,
            tied=head.tied,
            logits_dtype=head.logits_dtype,
            state_size=head.state_size,
        )
    else:
        head = read_head(original.folder, LMHead)
    if head.weight.shape[0] != original.rows:
        raise UnsupportedModel(
            f"{original.folder} answers with {head.weight.shape[0]:,} rows, but the matrix that "
            f"was taken for its head has {original.rows:,}; use --form head"
        )
    return head


def both_logits(
    texts: Sequence[Sequence[int]],
    ids: TrimMap,
    whole: Any,
    second: Model,
    first: Model | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the logits `[T, K]` of kept ids, of the original and of the trimmed model."""
    kept = torch.from_numpy(ids.row_ids)
    lengths = [len(row) for row in texts]
    # What is filled up stands behind a text, where no model that generates looks.
    filled = [[*row, *[row[-1]] * (max(lengths) - len(row))] for row in texts]
    before, after = torch.tensor(filled), torch.tensor([ids.to_trimmed(row) for row in filled])
    caught: list[Tensor] = []
    threads = torch.get_num_threads()

    def see(h: Tensor) -> Tensor:
        torch.set_num_threads(threads)  # logits come as they always do
        caught.append(h)
        return h

    model = second.body.model
    with torch.inference_mode():
        with tapped(output_layer(model), enter=see), few_threads(before.numel(), FEW_TOKENS):
            remember = getattr(second.body, "remember", None)
            found = model(input_ids=after, use_cache=remember is not None)
            z_new: Tensor = found.logits  # [n, T, K]
        if remember is not None:
            rows = [ids.to_trimmed(row) for row in texts]
            remember(rows, caught[-1], found.past_key_values)
        if first is not None:
            z: Tensor = first.body.model(input_ids=before, use_cache=False).logits  # [n, T, V]
        else:  # the same states under the original's head
            h = caught[-1].flatten(0, -2)
            z = logits(whole, h).to(z_new.dtype).view(*after.shape, -1)
        old = [z[at, :n, kept] for at, n in enumerate(lengths)]
    return old, [z_new[at, :n] for at, n in enumerate(lengths)]


@dataclass(frozen=True)
class Parting:
    """Where greedy texts part: at which token, and whether the original chose a kept one."""

    step: int
    explained: bool


def partings(
    inputs: ProofInputs,
    ids: TrimMap,
    whole: Any,
    model: Model,
    greedy: Greedy,
    *,
    reachable: int,
    kept: TrimmedHead | None = None,
    progress: Progress,
) -> list[Parting | None]:
    """Tell for every prompt where the trimmed model's greedy text parts from the original's.

    Where it is known from `greedy` how the original goes on, the trimmed head is asked at the same
    states. The other prompts are continued by the trimmed model, with the original's head asked at
    every step. `reachable` rows of the original have a token. With `kept` the model is the
    original, and answers by the kept rows in its own ids.
    """
    head: Any = model.head if kept is None else kept
    canonical = torch.from_numpy(ids.row_ids) if kept is None else torch.arange(ids.rows)

    def choices(h: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the trimmed head chooses, `[n]`, in its ids and in the original's."""
        new = logits(head, h)[:, : model.reachable].argmax(-1)
        return new, canonical[new]

    prompts = [*inputs.prompts, *inputs.fresh]
    known = {at: greedy[row] for at, row in enumerate(prompts) if row in greedy}
    others = [at for at in range(len(prompts)) if at not in known]
    parted: list[Parting | None] = [None] * len(prompts)
    steps = [0] * len(prompts)

    with torch.inference_mode():
        for at, (text, states) in known.items():
            last = min(len(text), inputs.max_tokens)
            same = torch.tensor(text[:last])
            found = choices(states[:last])[1]
            for step in (found != same).nonzero()[:, 0].tolist():
                # A tie may fall otherwise in a product of another size: ask both in the same.
                h = states[step : step + 1]
                old = int(logits(whole, h)[:, :reachable].argmax(-1))
                if old != int(choices(h)[1]):
                    parted[at] = Parting(step, old not in ids)
                    break

    def choose(h: Tensor, which: Sequence[int]) -> Tensor:
        new, found = choices(h)
        old = logits(whole, h)[:, :reachable].argmax(-1)
        for place, a, b in zip(which, old.tolist(), found.tolist(), strict=True):
            at = others[place]
            if a != b:
                parted[at] = Parting(steps[at], a not in ids)
            steps[at] += 1
        return torch.where(old == found, new, -1)

    starts = [list(prompts[at]) for at in others]
    continue_greedily(
        model,
        starts if kept is not None else [ids.to_trimmed(row) for row in starts],
        inputs.max_tokens,
        choose=choose,
        title="comparing greedy text",
        progress=progress,
    )
    return parted


def check_logits(old: list[Tensor], new: list[Tensor]) -> Check:
    """Compare the logits `[T, K]` of some texts bit by bit."""
    pairs = list(zip(old, new, strict=True))
    wrong = sum(not torch.equal(a, b) for a, b in pairs)
    numbers = sum(a.numel() for a in old)
    if not wrong:
        return Check("texts with other logits", len(pairs), 0, f"{numbers:,} logits bit-equal")
    gap = max(float((a - b).abs().max()) for a, b in pairs)
    scale = max(float(a.abs().max()) for a in old)
    # The weights were found equal byte by byte, so all that is left is how the matrix product of
    # this machine adds up for another number of rows.
    rounding = gap <= 1e-5 * max(1.0, scale)
    note = f"largest difference {gap:.1e}" + (", rounding of the matrix product" * rounding)
    return Check("texts with other logits", len(pairs), wrong, note, binding=not rounding)


def check_greedy(inputs: ProofInputs, parted: Sequence[Parting | None]) -> list[Check]:
    """Judge where greedy texts part: promised ones may not, others only for a reason."""
    seen, fresh = parted[: len(inputs.prompts)], parted[len(inputs.prompts) :]
    name = "prompts with other greedy text"
    checks = [_greedy(name, seen, inputs.max_tokens, inputs.binds)]
    if fresh:  # how often they part is an estimate; that they part for no reason is a failure
        checks.append(_greedy(f"fresh {name}", fresh, inputs.max_tokens, False))
    return checks


def _greedy(name: str, parted: Sequence[Parting | None], max_tokens: int, binds: bool) -> Check:
    found = [(at, part) for at, part in enumerate(parted) if part is not None]
    note = f"{max_tokens} tokens each"
    if found:
        at, first = found[0]
        note += f"; prompt {at + 1} from its token {first.step + 1} on"
    unexplained = sum(not part.explained for _, part in found)
    if found and not unexplained:
        note += "; the original chose a dropped token"
    return Check(name, len(parted), len(found), note, binds or unexplained > 0)
