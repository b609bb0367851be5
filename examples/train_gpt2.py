"""Train a small GPT-2 on any text file, on a CPU, in minutes.

    python examples/train_gpt2.py shakespeare.txt
    python examples/train_gpt2.py shakespeare.txt --steps 2000 --out runs/long --seed 1
    torchrun --nproc-per-node 2 examples/train_gpt2.py shakespeare.txt

The tokenizer (byte-level BPE) is trained on the same text. The loss goes through
`lmhead.linear_cross_entropy`, so the logits, the largest tensor of such a small model, are never
held. Stop it whenever you like, with Ctrl-C or `kill -9`: the same command goes on from the last
checkpoint, and its losses are those of a run that was never stopped. For that, the batch of a step
depends on nothing but the seed and the step, and a checkpoint is one file that is replaced whole.

Under torchrun each rank takes some of the sequences of a step and some of the head's rows; the
losses are those of one rank but for rounding, and a run may go on with another number of ranks.

In the folder `--out` you find: `model/`, which transformers and lmhead load; `losses.png`, where
matplotlib is installed (the extra `plot`); and `state.safetensors`, the checkpoint.
"""

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from lmhead.errors import BadInput, LMHeadError, how_to_install
from lmhead.head import LMHead
from lmhead.loss import linear_cross_entropy
from lmhead.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lmhead.ranks import ranks_of

END = "<|endoftext|>"
console = Console(stderr=True)


@dataclass(frozen=True)
class Settings:
    """Everything that the losses depend on."""

    text_sha256: str
    steps: int
    seed: int
    vocab: int  # V
    context: int  # T, tokens of a sequence
    batch: int  # B, sequences of a step
    width: int  # d
    layers: int
    heads: int
    learning_rate: float


class Run:
    """A model in training: its weights, its optimizer, and the losses so far."""

    def __init__(self, settings: Settings, V: int) -> None:
        self.settings = settings
        config = GPT2Config(
            vocab_size=V,
            n_positions=settings.context,
            n_embd=settings.width,
            n_layer=settings.layers,
            n_head=settings.heads,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config, torch.Generator().manual_seed(settings.seed))
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if p.ndim != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
        )
        self.losses: list[float] = []
        self.ranks = ranks_of()

    def step(self, ids: Tensor) -> None:
        """Take the next step of the training on the ids of the text, [n]."""
        number = len(self.losses)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * schedule(number, self.settings.steps)
        sequences = self.batch(ids, number)  # [B, T + 1]
        mine = sequences.tensor_split(self.ranks.size)[self.ranks.rank]
        loss = self.loss(mine, apart=True)
        self.optimizer.zero_grad()
        loss.backward()
        for p in self.model.parameters():  # each rank has what its sequences and its rows give
            self.ranks.sum_(p.grad, "adding up gradients")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())

    def batch(self, ids: Tensor, number: int) -> Tensor:
        """Draw the sequences of one step, [B, T + 1]."""
        draw = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + number)
        T = self.settings.context
        starts = torch.randint(len(ids) - T, (self.settings.batch, 1), generator=draw)
        return ids[starts + torch.arange(T + 1)]

    def loss(self, sequences: Tensor, apart: bool = False) -> Tensor:
        """Give the mean cross-entropy of each token after the ones before it.

        `apart`: each rank has sequences of its own, and the mean is over all of them.
        """
        h = self.model.transformer(sequences[:, :-1]).last_hidden_state  # [B, T, d]
        weight, targets, ranks = self.model.lm_head.weight, sequences[:, 1:], self.ranks
        if ranks.size == 1:
            return linear_cross_entropy(h, weight, targets)
        rows = weight.tensor_split(ranks.size)[ranks.rank]
        return linear_cross_entropy(h, rows, targets, group=ranks.group, sequence_parallel=apart)

    @torch.no_grad()
    def evaluate(self, ids: Tensor) -> float:
        """Give the mean loss over a whole text, in pieces of T tokens."""
        T = self.settings.context
        pieces = [ids[i : i + T + 1] for i in range(0, len(ids) - 1, T)]
        total = sum(float(self.loss(piece[None])) * (len(piece) - 1) for piece in pieces)
        return total / (len(ids) - 1)

    def save(self, path: Path) -> None:
        """Write the checkpoint: the old file stands until the new one is whole and on the disk."""
        if self.ranks.rank:  # all ranks have the same
            return
        tensors = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()}
        for i, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{key}": value for key, value in state.items()}
        about = {"settings": json.dumps(asdict(self.settings)), "losses": json.dumps(self.losses)}
        part = path.with_suffix(".part")
        save_file(tensors, part, about)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)

    def restore(self, path: Path) -> None:
        """Go on where the checkpoint was written."""
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
            theirs, mine = json.loads(about["settings"]), asdict(self.settings)
            if theirs != mine:
                other = next(key for key in mine if mine[key] != theirs.get(key))
                raise BadInput(
                    f"{path} is of a run with {other} = {theirs.get(other)}, not {mine[other]}; "
                    "give the same text and options to go on, or another --out to begin anew"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(tensors[f"model.{name}"])
        optimizer = self.optimizer.state_dict()
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, i, key = name.split(".")
                optimizer["state"].setdefault(int(i), {})[key] = tensor.clone()
        self.optimizer.load_state_dict(optimizer)
        self.losses = json.loads(about["losses"])

    @torch.inference_mode()
    def sample(self, tokens: int, generator: torch.Generator) -> list[int]:
        """Draw a text, from the start of a document."""
        head = LMHead.from_model(self.model)
        new, cache, text = torch.tensor([[0]]), None, []
        for _ in range(min(tokens, self.settings.context)):
            h, cache = self.model.transformer(new, past_key_values=cache, use_cache=True)
            new = head.sample(h[:, -1:], 0.8, top_k=50, generator=generator)  # [1, 1]
            text.append(int(new))
        return text


def schedule(step: int, steps: int) -> float:
    """Give the share of the learning rate: up in a twentieth of the steps, then a cosine down."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def make_tokenizer(text: str, V: int) -> Tokenizer:
    """Train a byte-level BPE of at most V tokens; token 0 stands between documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=V, special_tokens=[END], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def save_model(run: Run, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model and its tokenizer as a Hugging Face folder."""
    run.model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": run.settings.context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


def plot(losses: list[float], valid: float, path: Path) -> None:
    """Draw the losses over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1, label="training")
    axes.axhline(
        valid, color="black", linestyle="--", linewidth=1, label="held-out text, at the end"
    )
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, from the last checkpoint if there is one; return what `--json` prints."""
    text = args.text.read_text(encoding="utf-8", errors="replace")
    settings = Settings(
        sha256(text.encode()).hexdigest(),
        **{key: getattr(args, key) for key in Settings.__annotations__ if key != "text_sha256"},
    )
    args.out.mkdir(parents=True, exist_ok=True)
    console.print(f"training a tokenizer on {args.text}, {len(text):,} characters")
    tokenizer = make_tokenizer(text, settings.vocab)
    ids = torch.tensor(tokenizer.encode(text).ids)
    held_out = len(ids) // 20
    train_ids, valid_ids = ids[:-held_out], ids[-held_out:]
    if len(train_ids) <= settings.context + 1 or held_out < 2:
        raise BadInput(
            f"{args.text} has {len(ids):,} tokens; expected more than {settings.context * 2}: "
            "take a longer text, or a smaller --context"
        )
    run = Run(settings, tokenizer.get_vocab_size())
    if settings.batch < run.ranks.size:
        raise BadInput(
            f"--batch is {settings.batch}, for {run.ranks.size} ranks; expected one sequence each"
        )
    size = sum(p.numel() for p in run.model.parameters())
    console.print(f"{len(ids):,} tokens, {size:,} parameters")

    state = args.out / "state.safetensors"
    if state.exists():
        run.restore(state)
        console.print(f"going on after step {len(run.losses):,} of {state}")
    start, before = time.perf_counter(), len(run.losses)
    columns = (TextColumn("loss {task.fields[loss]:.3f}"), MofNCompleteColumn())
    with Progress(*columns, BarColumn(), TimeRemainingColumn(), console=console) as progress:
        recent = run.losses[-1] if run.losses else math.nan
        task = progress.add_task("", total=settings.steps, completed=before, loss=recent)
        while len(run.losses) < settings.steps:
            run.step(train_ids)
            progress.update(task, advance=1, loss=run.losses[-1])
            if len(run.losses) % args.save_every == 0 or len(run.losses) == settings.steps:
                run.save(state)
    seconds = time.perf_counter() - start

    valid = run.evaluate(valid_ids)
    first = run.ranks.rank == 0
    if first:
        save_model(run, tokenizer, args.out / "model")
    picture = args.out / "losses.png"
    if not first:
        pass
    elif find_spec("matplotlib"):
        plot(run.losses, valid, picture)
    else:
        console.print(
            f"no loss curve: it needs matplotlib; install it with: {how_to_install('plot')}"
        )
    sample = run.sample(args.sample, torch.Generator().manual_seed(settings.seed))
    return {
        "model": str(args.out / "model"),
        "picture": str(picture) if picture.exists() else None,
        "parameters": size,
        "tokens": len(ids),
        "resumed_after": before,
        "seconds": seconds,
        "losses": run.losses,
        "valid_loss": valid,
        "sample": tokenizer.decode(sample),
    }


def main() -> int:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, metavar="TEXT", help="any text file, in UTF-8")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt2"), help="folder to write to")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab", type=int, default=4096, help="tokens to learn")
    parser.add_argument("--context", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--width", type=int, default=256, help="of the hidden state")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--sample", type=int, default=120, help="tokens to draw at the end")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE", "1") != "1":  # torchrun
        dist.init_process_group("gloo")
        console.quiet = dist.get_rank() > 0
    try:
        result = train(args)
        rank = ranks_of().rank
        ranks_of().end()
    except (LMHeadError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from the last checkpoint")
        return 130
    if rank:
        return 0
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    sys.stdout.write(result["sample"] + "\n")
    per_step = result["seconds"] / max(1, args.steps - result["resumed_after"])
    console.print(
        f"loss {result['losses'][-1]:.3f} in training, {result['valid_loss']:.3f} on held-out "
        f"text; {result['seconds']:.0f} s, {per_step:.2f} s per step; model: {result['model']}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
