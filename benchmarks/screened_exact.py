"""The screened head against the exact answer: real states, states made to break it, and draws.

    python benchmarks/screened_exact.py [--models M ...] [--states 5200] [--hard 400]
        [--draws 200000] [--json]

1. Real hidden states of varied text: the greedy token and the 50 best, beside those of float64
   scores, equal ones by their ids. Where float64 sums cannot tell two scores apart, they are added
   up without rounding.
2. States made to break it: on the bisector of two rows that compete, a few bits to either side;
   and along the residuals of rows, where the bounds are as loose as they get.
3. Draws at four temperatures, with edits and with top-k: chi-square against the softmax of the
   float64 scores. All draws of one context share one pass over the copy; the rest is done anew.
   The first of them are also made by `sample` itself, from the same random numbers, and must be
   the same tokens.

Ends with an error where one answer differs, or where a p-value is below 1e-5.
"""

import argparse
import gc
import inspect
import json
import math
import pydoc
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lmhead.head import Edit, LMHead
from lmhead.head.screened import ScreenedHead
from lmhead.head.screening.rejection import Chances, pick, proposals
from lmhead.head.screening.rows import touch
from lmhead.loading import Model, load

PAGES = ("json", "argparse", "collections", "decimal", "email", "logging", "pathlib", "ssl")
SOURCES = ("textwrap", "heapq", "fractions", "dataclasses", "tokenize", "statistics")
LICENCE = Path(__file__).parents[1] / "LICENSE"
LANGUAGES = (
    "Der Fluss trat über die Ufer, als der Schnee schmolz. Am Abend saßen wir am Fenster und "
    "sahen zu, wie die Lichter der Stadt eines nach dem anderen angingen. Niemand sprach.",
    "Il pleuvait depuis trois jours quand elle décida de partir. Sa valise, trop lourde, "
    "contenait des livres qu'elle n'avait jamais lus et des lettres sans réponse.",
    "El mercado abría a las siete. Los pescadores traían sardinas, pulpo y, algunas veces, "
    "historias que nadie creía. ¿Cuánto cuesta esto? Dos euros con cincuenta.",
    "今天天气很好，我们去公园散步吧。湖边有很多人在放风筝，孩子们跑来跑去，笑声一直传到桥的另一边。",
    "駅前の小さな喫茶店で、彼は毎朝同じ席に座り、新聞を読みながら苦いコーヒーを飲んでいた。",
    "Зимой дни коротки, а вечера длинны. Мы читали вслух у печки, и за окном медленно падал снег.",
    "كان البحر هادئًا في ذلك الصباح، والقوارب تعود واحدة تلو الأخرى إلى الميناء القديم.",
    "गाँव के बाहर एक पुराना बरगद का पेड़ था, जिसके नीचे बच्चे रोज़ शाम को खेलते थे।",
)
CHAT = (
    ("How do I boil an egg?", "Put it into boiling water for seven minutes, then cool it."),
    ("What is 17 times 23?", "17 x 23 = 391, because 17 x 20 = 340 and 17 x 3 = 51."),
    ("Write a haiku about rain.", "Grey morning whispers / on the tin roof of the shed / rain."),
    ("Why is the sky blue?", "Air scatters short waves of light more strongly than long ones."),
)
CONTEXTS = ("The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, there was a")
TEMPERATURES = (0.5, 0.7, 1.0, 1.5)
COMPILED = 320  # draws that `sample` makes too
WINDOW = 512  # tokens that see each other


def texts() -> Iterator[str]:
    """Yield text of many kinds, the short kinds first."""
    yield from LANGUAGES
    for question, answer in CHAT:
        yield f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
        yield f"<start_of_turn>user\n{question}<end_of_turn>\n<start_of_turn>model\n{answer}"
    yield LICENCE.read_text()
    for page, source in zip(PAGES, SOURCES, strict=False):
        yield pydoc.plain(pydoc.render_doc(page))[:8000]
        yield inspect.getsource(import_module(source))[:8000]


def hidden_states(model: Model, wanted: int) -> Tensor:
    """What enters the head, `[wanted, d]`."""
    found: list[Tensor] = []
    for text in texts():
        ids = model.tokenizer(text)["input_ids"]
        for first in range(0, len(ids), WINDOW):
            with torch.inference_mode():
                part = torch.tensor([ids[first : first + WINDOW]])
                found.append(model.body(part, use_cache=False)[0][0])
        if sum(map(len, found)) >= wanted:
            break
    states = torch.cat(found)[:wanted].clone()
    if len(states) < wanted:
        raise SystemExit(f"the texts give {len(states)} states; ask for no more than that")
    return states


class Oracle:
    """The exact order, from float64 scores of every row."""

    def __init__(self, head: LMHead) -> None:
        self.weight = head.weight.detach().double()[: head.vocab_size]  # [V, d]
        self.largest = float(self.weight.square().sum(1).max().sqrt())

    def best(self, h: Tensor, k: int) -> Tensor:
        """Return the k best ids of states h `[B, d]`."""
        z = h.double() @ self.weight.T  # [B, V]
        values, ids = z.topk(k + 1)  # [B, k + 1]
        error = (h.shape[1] + 8) * 2.0**-52 * self.largest * h.double().norm(dim=1)
        close = ((values[:, :-1] - values[:, 1:]) <= 2 * error[:, None]).any(1)
        for n in close.nonzero()[:, 0].tolist():
            some = (z[n] >= values[n, k - 1] - 4 * error[n]).nonzero()[:, 0].tolist()
            state = h[n].double()
            score = {i: math.fsum((self.weight[i] * state).tolist()) for i in some}
            ids[n, :k] = torch.tensor(sorted(some, key=lambda i, s=score: (-s[i], i))[:k])
        return ids[:, :k]


def differences(head: ScreenedHead, oracle: Oracle, h: Tensor) -> int:
    """Count the states whose greedy token or 50 best tokens are not the exact ones."""
    wrong = 0
    for part in h.split(16):
        ids = oracle.best(part, 50)
        fifty = head.topk(part, 50).ids
        one = head.topk(part, 1).ids
        wrong += int(((fifty != ids).any(1) | (one[:, 0] != ids[:, 0])).sum())
    return wrong


def near_ties(head: ScreenedHead, h: Tensor) -> Tensor:
    """Move states onto the bisector of two neighbours in rank, and a few bits off it."""
    weight = head.dense.weight.detach().double()
    ids = head.topk(h, 51).ids  # [n, 51]
    found = []
    for better, worse in ((0, 1), (1, 2), (49, 50)):
        apart = weight[ids[:, better]] - weight[ids[:, worse]]  # [n, d]
        x = h.double()
        x = x - apart * ((x * apart).sum(1) / apart.square().sum(1))[:, None]
        step = apart * (x.norm(dim=1) / apart.norm(dim=1))[:, None]
        found += [(x + offset * step).float() for offset in (0.0, 1e-8, -1e-8, 1e-7, -1e-7)]
    return torch.cat(found)


def loosest(head: ScreenedHead, h: Tensor, generator: torch.Generator) -> Tensor:
    """Lean states towards the residual of a row, alone and together with what they were."""
    screen, V, d = head.screen, head.vocab_size, head.hidden_size
    rows = torch.randint(V, (len(h),), generator=generator)
    rows[::2] = head.topk(h, 1).ids[::2, 0]
    copy = screen.q[rows, :d].float() * screen.scale[rows, None]
    residual = head.dense.weight.detach()[rows] - copy
    residual *= (h.norm(dim=1) / residual.norm(dim=1).clamp(min=1e-30))[:, None]
    return torch.cat([residual, -residual, h + residual, h - residual, h + 0.1 * residual])


def p_value(counts: np.ndarray, p: np.ndarray) -> float:
    """Chi-square of counts `[V]` against p `[V]`; rare tokens share bins, by their ids."""
    if counts[p == 0].any():
        return 0.0
    expected = p * counts.sum()
    rare = expected < 8
    groups = np.arange(len(p))[rare] % 64
    shared = np.bincount(groups, expected[rare], minlength=64)
    seen = np.bincount(groups, counts[rare], minlength=64)
    few = shared < 8
    e = np.concatenate((expected[~rare], shared[~few], [shared[few].sum()]))
    c = np.concatenate((counts[~rare], seen[~few], [seen[few].sum()]))
    if e[-1] < 5:  # too few even together: with the smallest bin of the others
        at = e[:-1].argmin()
        e[at], c[at] = e[at] + e[-1], c[at] + c[-1]
        e, c = e[:-1], c[:-1]
    from scipy.stats import chisquare  # a tool of ours, not of lmhead's

    return float(chisquare(c, e * (c.sum() / e.sum())).pvalue) if len(c) > 1 else 1.0


def laws(
    head: ScreenedHead, oracle: Oracle, h: Tensor, draws: int
) -> Iterator[tuple[str, float, float]]:
    """Draw from one context h `[d]`; yield what was done, its p-value, proposals per draw."""
    y = oracle.weight @ h.double()  # [V]
    order = y.argsort(descending=True, stable=True)
    state = h[None].numpy()
    V = head.vocab_size
    scanner, transform = head._scanner, head._transform
    edit = Edit.repetition(order[:40:3].tolist(), 1.3).then(Edit.add({int(order[9]): 2.0}))
    edit = edit.then(Edit.ban(order[1:3].tolist()))
    edited = y.index_copy(0, edit.ids, edit.change(y[edit.ids]))
    kept = torch.full_like(y, -torch.inf).index_copy(0, order[:50], y[order[:50]])

    def counted(one: Callable[[], int]) -> np.ndarray:
        return np.bincount([one() for _ in range(draws)], minlength=V).astype(float)

    for n, T in enumerate(TEMPERATURES):
        generator = torch.Generator().manual_seed(n)
        compiled = head.sample(h.expand(COMPILED, -1), T, generator=generator)
        generator.manual_seed(n)
        for name, change, law in (("", None, y), (" with edits", edit, edited)):
            query = scanner.read(state, V)[0]
            touched = touch(query, change, transform)
            made = proposals(query, touched, transform, T, scanner.weights, scanner.sums)
            tried = 0
            if change is None:
                first = Chances().draw([generator] * COMPILED)
                again = [made.draw(generator, one)[0] for one in first]
                if again != compiled.tolist():
                    raise SystemExit("the compiled loop draws other tokens from the same numbers")

            def one(made=made, generator=generator) -> int:
                nonlocal tried
                token, count = made.draw(generator)
                tried += count
                if token < 0:
                    raise SystemExit("a draw ran out of tries")
                return token

            counts = counted(one)
            yield f"T={T}{name}", p_value(counts, torch.softmax(law / T, -1).numpy()), tried / draws
        top = scanner.read(state, V)[0].best(50)
        counts = counted(lambda top=top, T=T, g=generator: int(top.ids[pick(top.z, T, g)]))
        yield f"T={T} top-50", p_value(counts, torch.softmax(kept / T, -1).numpy()), 1.0


def check(name: str, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, object]:
    model = load(name)
    label = model.folder.name
    head = ScreenedHead.from_head(model.head, model.folder)
    oracle = Oracle(model.head)
    share = head.screen.nbytes / (head.vocab_size * head.hidden_size * 4)
    say(f"{label}: the copy takes {share:.1%} of the float32 head")
    result: dict[str, object] = {"copy_share": share}

    h = hidden_states(model, options.states)
    if options.states:
        result["states"], result["wrong"] = len(h), differences(head, oracle, h)
        rows = head.stats.rescored / head.stats.states
        say(f"{label}: {len(h):,} states, {result['wrong']} differ ({rows:.0f} rows scored each)")
    if options.hard:
        some = h[torch.linspace(0, len(h) - 1, options.hard // 20).long()]
        ties, loose = near_ties(head, some), loosest(head, some, torch.Generator().manual_seed(0))
        for kind, hard in (("near_ties", ties), ("loosest", loose)):
            result[kind], result[f"{kind}_wrong"] = len(hard), differences(head, oracle, hard)
            say(f"{label}: {len(hard):,} {kind}, {result[f'{kind}_wrong']} differ")
    result["fallbacks"] = dict(head.stats.fallbacks)
    values: dict[str, float] = {}
    for context in CONTEXTS[: options.contexts] if options.draws else ():
        state = model.last_hidden(model.encode(context)).detach().float()
        for what, p, tried in laws(head, oracle, state, options.draws):
            values[f"{context!r} {what}"] = p
            say(f"{label}: {context!r:36} {what:16} p = {p:.4f}  {tried:.2f} proposals a draw")
    return {**result, "p_values": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["smollm2-135m", "gemma3-270m"])
    parser.add_argument("--states", type=int, default=5200, help="real states per model")
    parser.add_argument("--hard", type=int, default=800, help="states made to break it, per model")
    parser.add_argument("--draws", type=int, default=200_000, help="per context and temperature")
    parser.add_argument("--contexts", type=int, default=2, help=f"of {len(CONTEXTS)}")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = {}
    for name in options.models:
        say = (lambda text: None) if options.json else (lambda text: print(text, flush=True))
        report[name] = check(name, options, say)
        gc.collect()
    if options.json:
        print(json.dumps(report, indent=2))
    wrong = sum(r.get(k, 0) for r in report.values() for k in r if k.endswith("wrong"))
    values = [p for r in report.values() for p in r["p_values"].values()]
    if wrong or min(values, default=1.0) < 1e-5:
        raise SystemExit(f"{wrong} answers differ; the smallest p-value is {min(values):.2g}")


if __name__ == "__main__":
    main()
