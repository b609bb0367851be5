"""One way from a MODEL to something that answers: `load` gives body, head and tokenizer.

The body is everything below the head (`lmhead.body`); this file assembles and computes nothing.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmhead.body import Body, TorchBody
from lmhead.errors import BadCheckpoint, BadInput, UnsupportedModel
from lmhead.files.checkpoint import open_checkpoint
from lmhead.head import LMHead
from lmhead.head.pretrained import causal_config
from lmhead.models.registry import DEFAULT_MODEL
from lmhead.models.resolve import resolve
from lmhead.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Model:
    """A model ready to use: its body, its head and its tokenizer."""

    name: str
    folder: Path
    body: Body
    head: LMHead
    tokenizer: "PreTrainedTokenizerBase"

    @cached_property
    def reachable(self) -> int:
        """How many of the head's rows have a token; the rows from here on are padding."""
        highest = max(self.tokenizer.get_vocab().values(), default=-1)
        return min(highest + 1, self.head.vocab_size)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a text: those of the generation config, and the tokenizer's own."""
        config = self.body.model.generation_config or self.body.config
        given = config.eos_token_id
        ids = given if isinstance(given, list) else [given]
        return tuple(dict.fromkeys(i for i in (*ids, self.tokenizer.eos_token_id) if i is not None))

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer knows how to wrap a conversation."""
        return bool(self.tokenizer.chat_template)

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Turn a prompt into ids, wrapped in the chat template if asked, and check them."""
        if not prompt:
            raise BadInput("the prompt is empty; expected some text")
        if chat:
            if not self.has_chat_template:
                raise BadInput(
                    f"{self.name} has no chat template; expected a chat model, or leave out chat"
                )
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer(prompt)["input_ids"]
        return self.check_ids(ids)

    def check_ids(self, ids: list[int]) -> list[int]:
        """Return `ids` if the model can read them, else say why not."""
        if not ids:
            raise BadInput("the prompt holds no token; expected text that the tokenizer knows")
        rows = self.body.model.get_input_embeddings().weight.shape[0]
        if (highest := max(ids)) >= rows or min(ids) < 0:
            raise BadCheckpoint(
                f"the tokenizer of {self.name} gives id {highest:,}, but the embedding has only "
                f"{rows:,} rows; expected the tokenizer that belongs to the model"
            )
        if (context := self.body.context) and len(ids) > context:
            raise BadInput(
                f"the prompt has {len(ids):,} tokens, but {self.name} reads at most {context:,}; "
                "shorten it"
            )
        return ids

    def room(self, ids: list[int], max_tokens: int) -> int:
        """Return how many tokens can follow `ids`, at most `max_tokens` and at least 1."""
        context = self.body.context
        return min(max_tokens, max(1, context - len(ids))) if context else max_tokens

    def decode(self, ids: list[int]) -> str:
        """Turn ids into text, without special tokens."""
        text = self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def last_hidden(self, ids: list[int]) -> Tensor:
        """Return what enters the head at the last position, `[d]`."""
        with torch.no_grad():  # not inference_mode: the caller may go on with h as it likes
            h, _ = self.body(torch.tensor([ids]), use_cache=False)
        return h[0, -1]

    def token_text(self, token_id: int) -> str:
        """Return a token as it looks within a text, its leading space included."""
        decode = self.tokenizer.decode
        # Alone, many tokenizers strip a leading space; behind another token none does.
        before = decode([self._anchor])
        text = decode([self._anchor, token_id])
        if text.startswith(before) and text != before and "�" not in text:
            return str(text[len(before) :])
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        return str(piece) if piece is not None else ""

    @cached_property
    def _anchor(self) -> int:
        return int(self.tokenizer("a", add_special_tokens=False)["input_ids"][-1])


def load(
    model: "str | Path | Model" = DEFAULT_MODEL,
    *,
    body: str = "torch",
    progress: Progress = silent,
) -> Model:
    """Load MODEL: a folder, a `.gguf` file, a built-in name or a Hugging Face id.

    `body="max"` runs a GPT-2 as a Modular MAX graph (extra `max`); everything else is torch.
    """
    if body not in ("torch", "max"):
        raise BadInput(f"body is {body!r}; expected 'torch' or 'max'")
    if isinstance(model, Model):
        return model
    folder = resolve(model, progress)
    # pickles, truncated files and headless models are refused before transformers loads them
    open_checkpoint(folder)
    causal_config(folder)
    runs = _max_body(folder, progress) if body == "max" else None
    with progress(f"loading {model}", total=None):
        runs = runs or TorchBody(_model(folder))
        head = LMHead.from_model(runs.model)
        tokenizer = _tokenizer(folder)
    return Model(str(model), folder, runs, head, tokenizer)


def _max_body(folder: Path, progress: Progress) -> Body:
    from lmhead.body.max_body import MaxBody

    return MaxBody.from_pretrained(folder, progress)


def _model(folder: Path) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what its warnings say is checked below
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UnsupportedModel(
            f"transformers knows no causal language model for {folder} ({reason}); expected one "
            "that AutoModelForCausalLM loads without remote code"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    if missing := sorted(told["missing_keys"]):
        raise BadCheckpoint(
            f"{folder} lacks {len(missing)} of the tensors of a {type(model).__name__} "
            f"({missing[0]}, ...), which would be random; expected a whole causal language model"
        )
    loaded: PreTrainedModel = model.eval()
    return loaded


def _tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception
        reason = str(error).strip().splitlines()[0]
        raise BadCheckpoint(
            f"{folder} has no tokenizer that transformers can load ({reason}); "
            "expected a tokenizer.json"
        ) from error
