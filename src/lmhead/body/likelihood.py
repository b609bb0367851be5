"""How likely a model finds a text: some figures of its tokens, each given those before it.

Symbols: B texts, T tokens, P of them scored (no prompt, no padding), V vocabulary rows, F figures.
The stop is the last token of a text that has more than one scored: the mark that ends a statement.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lmhead.head import LMHead
from lmhead.head.distributions import Distributions, Space

# log p is that of the token; best, that of the likeliest one; entropy, that of the law.
FIGURES = (
    "mean log p",
    "sum of log p",
    "least log p",
    "last three log p",  # before the stop, as all that are called last
    "last log p",
    "log p of the stop",
    "mean log p - best",
    "least log p - best",
    "last three log p - best",
    "mean entropy",
    "last three entropy",
    "mean log rank",
    "largest log rank",
    "last three log rank",
    "mean log p + entropy",
    "last three log p + entropy",
)
MEAN, LAST = FIGURES.index("mean log p"), FIGURES.index("last three log p")
_LAST = 3
_STATES, _TOKENS = 512, 2048  # whose logits are held at a time: 4 MB, which stay in the cache


def summed_up(texts: Sequence[Tensor]) -> Tensor:
    """Return the figures of texts, `[B, F]`, from those of their scored tokens, `[n, 4]` each."""
    result = torch.zeros(len(texts), len(FIGURES))
    for b, tokens in enumerate(texts):
        if len(tokens):
            result[b] = _of_text(tokens)
    return result


@torch.no_grad()
def figures_of_tokens(head: LMHead, h: Tensor, place: Tensor, targets: Tensor) -> Tensor:
    """Return log p, the likeliest token's, the entropy and the log rank of P tokens, `[P, 4]`.

    `targets [P]`, each of which h `[n, d]` at its `place [P]` predicts. A state may predict several
    tokens, or none; `place` never falls.
    """
    parts = []
    begin, V = 0, head.vocab_size
    space = Space.to_hold(_STATES * _TOKENS, h.device)
    for first in range(0, len(h), _STATES):
        states = h[first : first + _STATES]
        end = begin + int((place[begin:] < first + len(states)).sum())
        if end == begin:
            continue
        at = (place[begin:end] - first).to(h.device)
        wanted = targets[begin:end].to(h.device)
        own = head.score(states[at], wanted[:, None])[:, 0].float()
        # Most states predict one token: they are compared as they lie, the others taken out first.
        again = torch.zeros_like(at, dtype=torch.bool)
        again[1:] = at[1:] == at[:-1]
        others = again.nonzero()[:, 0]
        once = torch.full((len(states),), math.inf, device=h.device)
        once[at[~again]] = own[~again]
        all_, more = Distributions(len(states), 1, h.device), torch.zeros_like(own)
        above = torch.zeros(len(states), device=h.device)
        for token in range(0, V, _TOKENS):
            z = head.stretch(states, token, min(token + _TOKENS, V)).float()
            # their own product may have rounded otherwise; no token is likelier than itself
            inside = ((wanted >= token) & (wanted < token + _TOKENS)).nonzero()[:, 0]
            z[at[inside], wanted[inside] - token] = own[inside]
            # ones in float32 add up far quicker than booleans, and exactly: V is below 2^24
            above += z.gt(once[:, None]).float().sum(-1)
            if len(others):
                more[others] += z[at[others]].gt(own[others, None]).float().sum(-1)
            all_.add(z, token, space)
        more[~again] = above[at[~again]]
        logp = (own.double() - all_.peak[at] - all_.log_total[at]).float()
        found = (logp, -all_.log_total[at].float(), all_.entropy[at].float(), more.log1p())
        parts.append(torch.stack(found, 1).cpu())
        begin = end
    return torch.cat(parts) if parts else torch.zeros(0, 4)


def _of_text(tokens: Tensor) -> Tensor:
    """Sum up the tokens of one text, `[n, 4]` with n at least 1."""
    said = tokens[:-1] if len(tokens) > 1 else tokens  # without the stop
    logp, best, entropy, rank = tokens.unbind(1)
    last = said[-_LAST:].mean(0)
    return torch.stack(
        [
            logp.mean(),
            logp.sum(),
            said[:, 0].min(),
            last[0],
            said[-1, 0],
            logp[-1],
            (logp - best).mean(),
            (said[:, 0] - said[:, 1]).min(),
            last[0] - last[1],
            entropy.mean(),
            last[2],
            rank.mean(),
            said[:, 3].max(),
            last[3],
            (logp + entropy).mean(),
            last[0] + last[2],
        ]
    )
