"""Beam search: the most probable text that `beams` hypotheses side by side can find.

A hypothesis is scored by the sum of its log-probabilities; a finished one by that sum divided by
its length. The search ends when no running hypothesis, scored at its present length, beats the
worst of `beams` finished ones. These are the rules of transformers' `num_beams` with its defaults,
and the ids are the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.generation.prompts import Prompt, encoded
from lmhead.generation.request import Generation
from lmhead.head import Head
from lmhead.loading import Model


@dataclass(frozen=True)
class _Hypothesis:
    ids: tuple[int, ...]
    score: float


@torch.inference_mode()
def beam_search(
    model: Model, prompt: Prompt, beams: int, max_tokens: int, chat: bool, head: Head | None = None
) -> Generation:
    """Return the best continuation of `prompt` that a search over `beams` hypotheses finds."""
    if beams < 2:
        raise BadInput(f"beams is {beams}; expected at least 2 for a beam search")
    head = head or model.head
    said, prompt_ids = encoded(model, prompt, chat=chat)
    limit = model.room(prompt_ids, max_tokens)
    stops = set(model.stop_ids)
    # enough candidates that `beams` go on even if every hypothesis could end in every stop id
    width = max(2, 1 + len(stops)) * beams
    h, memory = model.body.run(torch.tensor([prompt_ids]))  # [1, T, d], later [beams, 1, d]
    running = [_Hypothesis((), 0.0)]
    finished: list[_Hypothesis] = []
    for length in range(1, limit + 1):
        candidates = _best(head, h[:, -1], running, width, model.reachable)
        going: list[tuple[int, _Hypothesis]] = []
        for rank, (row, candidate) in enumerate(candidates):
            if candidate.ids[-1] not in stops and length < limit:
                going.append((row, candidate))
            elif rank < beams:  # those behind are there only to go on with
                finished.append(_Hypothesis(candidate.ids, candidate.score / length))
        finished = sorted(finished, key=lambda f: -f.score)[:beams]
        going = going[:beams]
        if not going:
            break
        if len(finished) == beams and going[0][1].score / length <= finished[-1].score:
            break
        running = [hypothesis for _, hypothesis in going]
        memory.select([row for row, _ in going])
        ids = torch.tensor([[hypothesis.ids[-1]] for hypothesis in running])
        h, memory = model.body.run(ids, memory)
    best = finished[0].ids
    ended = best[-1] in stops
    text = model.decode(list(best[:-1] if ended else best))
    return Generation(said, text, tuple(prompt_ids), best, "stop" if ended else "length")


def _best(
    head: Head, h: Tensor, running: list[_Hypothesis], width: int, V: int
) -> list[tuple[int, _Hypothesis]]:
    """Return the `width` best continuations by one token, each with the row it goes on from."""
    z = head(h).float()[:, :V]  # [beams, V]
    scores = torch.log_softmax(z, dim=-1) + torch.tensor([[b.score] for b in running])
    best = torch.topk(scores.flatten(), min(width, scores.numel()))
    rows = []
    for place, score in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        row, token = divmod(place, V)
        rows.append((row, _Hypothesis((*running[row].ids, token), score)))
    return rows
