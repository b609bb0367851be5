"""Feeds mutated files to the readers: each must answer or raise an LMHeadError, soon and in bounds.

    python tests/fuzz/harness.py --count 20000            # every reader
    python tests/fuzz/harness.py gguf --count 0           # one reader, until Ctrl-C
    python tests/fuzz/harness.py gguf --replay FILE       # one file again, with its traceback

A reader fails if it raises anything else, takes more than two seconds of processor time, asks for
300 MB on top of what it starts with (also if it then says so), or ends the process. What made it
fail is kept in `--keep`. All mutations of a reader run in one process, which has read the sound
file before: what a reader does not give back adds up. The files are in memory where there is a
place for that (/dev/shm).
"""

import argparse
import gc
import hashlib
import json
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import exchanged
import read_by_others

SECONDS, BYTES = 2.0, 300 * 2**20
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "logit_scale": 0.5,
    "tie_word_embeddings": True,
    "text_config": {"vocab_size": 32, "model_type": "gemma2", "final_logit_softcapping": 30.0},
    "quantization_config": {"bits": 4, "config_groups": {"a": {"weights": {"num_bits": 4}}}},
}
OTHERS: list[dict[str, Any]] = [
    {"model_type": "gpt2", "vocab_size": 9, "n_embd": 4, "n_layer": 1, "n_positions": 8},
    {"model_type": "phi", **{k: v for k, v in LLAMA.items() if isinstance(v, int)}},
    {"model_type": "opt", "vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1}
    | {"ffn_dim": 8, "max_position_embeddings": 8, "word_embed_proj_dim": 2},
    {
        "text_config": LLAMA,
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
    },
]
TOKENIZER = {
    "added_tokens": [{"id": 31, "content": "<unused1>", "special": True}],
    "model": {"type": "BPE", "vocab": {chr(97 + i): i for i in range(20)}, "merges": ["a b"]},
}


def packed(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors_seed() -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "model.embed_tokens.weight": {"dtype": "F32", "shape": [32, 8], "data_offsets": [0, 1024]},
        "model.norm.weight": {"dtype": "BF16", "shape": [8], "data_offsets": [1024, 1040]},
    }
    return packed(header, bytes(1040))


def gguf_seed(kind: str = "gpt2") -> bytes:
    """A whole one-block GPT-2 or Llama with its tokenizer."""
    import gguf
    import numpy as np

    d, V, f = 8, 300, 16
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        writer = gguf.GGUFWriter(path, kind)
        writer.add_block_count(1)
        writer.add_context_length(16)
        writer.add_embedding_length(d)
        writer.add_feed_forward_length(f)
        writer.add_head_count(2)
        writer.add_string("tokenizer.chat_template", "{{ messages }}")
        common = {"token_embd.weight": (V, d), "output_norm.weight": (d,)}
        block = {"attn_norm.weight": (d,), "ffn_norm.weight": (d,), "attn_output.weight": (d, d)}
        block |= {"ffn_up.weight": (f, d), "ffn_down.weight": (d, f)}
        if kind == "gpt2":
            writer.add_layer_norm_eps(1e-5)
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_list([chr(0x100 + i) for i in range(V - 1)] + ["\u0100\u0101"])
            writer.add_token_merges(["\u0100 \u0101"])
            common |= {"position_embd.weight": (16, d), "output_norm.bias": (d,)}
            block |= {"attn_norm.bias": (d,), "ffn_norm.bias": (d,), "attn_output.bias": (d,)}
            block |= {"ffn_up.bias": (f,), "ffn_down.bias": (d,)}
            block |= {"attn_qkv.weight": (3 * d, d), "attn_qkv.bias": (3 * d,)}
        else:
            writer.add_layer_norm_rms_eps(1e-5)
            writer.add_rope_freq_base(10000.0)
            writer.add_tokenizer_model("llama")
            bytes_ = [f"<0x{i:02X}>" for i in range(256)]
            words = ["<unk>", "<s>", "</s>", "a", "b", "ab"]
            texts = [*words, *bytes_, *(f"w{i}" for i in range(V - 262))]
            writer.add_token_list(texts)
            writer.add_token_scores([-float(i) for i in range(V)])
            writer.add_token_types([2, 3, 3, 1, 1, 1, *[6] * 256, *[1] * (V - 262)])
            block |= {"ffn_gate.weight": (f, d)}
            block |= {f"attn_{n}.weight": (d, d) for n in "qkv"}
        writer.add_eos_token_id(2)
        shapes = common | {f"blk.0.{name}": shape for name, shape in block.items()}
        values = np.random.default_rng(0)
        for name, shape in shapes.items():
            writer.add_tensor(name, values.standard_normal(shape).astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


# ---- readers, each of which is given the content of a file and a folder to put it

Reader = Callable[[bytes, Path], None]


def read_safetensors(data: bytes, folder: Path) -> None:
    from lmhead.files.safetensors import open_safetensors

    (folder / "model.safetensors").write_bytes(data)
    open_safetensors(folder / "model.safetensors")


def inspect_folder(name: str) -> Reader:
    def read(data: bytes, folder: Path) -> None:
        from lmhead.inspect import inspect_model

        for other, content in (
            ("config.json", json.dumps(LLAMA).encode()),
            ("model.safetensors", safetensors_seed()),
            ("tokenizer.json", json.dumps(TOKENIZER).encode()),
        ):
            (folder / other).write_bytes(content)
        (folder / name).write_bytes(data)
        if name.endswith(".index.json"):  # which is not looked at where all is in one file
            (folder / "model.safetensors").rename(folder / "a.safetensors")
        inspect_model(folder).to_dict()

    return read


def inspect_config(data: bytes, folder: Path) -> None:
    from lmhead.inspect import inspect_model

    (folder / "config.json").write_bytes(data)
    inspect_model(folder).to_dict()


def read_gguf(data: bytes, folder: Path) -> None:
    from lmhead.files.gguf import open_gguf
    from lmhead.inspect import inspect_model

    path = folder / "x.gguf"
    path.write_bytes(data)
    file = open_gguf(path)
    for value in file.metadata.values():
        if not isinstance(value, str | int | float):
            value[:]
    inspect_model(path).to_dict()


def convert(data: bytes, folder: Path) -> None:
    from lmhead.models.convert import convert_gguf

    (folder / "x.gguf").write_bytes(data)
    target = folder / "out"
    target.mkdir(exist_ok=True)
    convert_gguf(folder / "x.gguf", target)


def read_stamp(data: bytes, folder: Path) -> None:
    from lmhead.files.stamp import check, verify

    (folder / "weights").write_bytes(b"x")
    (folder / "lmhead.json").write_bytes(data)
    verify(folder)
    (folder / "lmhead.json").write_bytes(data)
    check(folder)


def stamp_seed() -> Any:
    known = {"sha256": hashlib.sha256(b"x").hexdigest(), "bytes": 1, "mtime_ns": 1, "ctime_ns": 1}
    return {"conversion": 1, "source": "x.gguf", "files": {"weights": known}}


def _targets() -> dict[str, tuple[bool, Callable[[], list[Any]], Reader]]:
    index = {"metadata": {"total_size": 1}, "weight_map": {"a": "a.safetensors"}}
    plain = {key: value for key, value in LLAMA.items() if key != "text_config"}
    decoder = {"added_tokens_decoder": {"31": {"content": "<pad>"}}, "x": [1]}
    models = [gguf_seed, lambda: gguf_seed("llama")]
    return {
        "safetensors": (False, lambda: [safetensors_seed()], read_safetensors),
        "gguf": (False, lambda: [make() for make in models], read_gguf),
        "convert": (False, lambda: [make() for make in models], convert),
        "config": (True, lambda: [plain, *OTHERS], inspect_config),
        "config-and-weights": (True, lambda: [LLAMA, *OTHERS], inspect_folder("config.json")),
        "index": (True, lambda: [index], inspect_folder("model.safetensors.index.json")),
        "tokenizer": (True, lambda: [TOKENIZER], inspect_folder("tokenizer.json")),
        "tokenizer-config": (True, lambda: [decoder], inspect_folder("tokenizer_config.json")),
        "stamp": (True, lambda: [stamp_seed()], read_stamp),
        **exchanged.targets(),
        **read_by_others.targets(),
    }


# ---- mutations

_NUMBERS = [
    0,
    1,
    2,
    7,
    8,
    31,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63,
    2**64 - 1,
]


def mutated_bytes(random_: random.Random, seed: bytes) -> bytes:
    """Change a few bytes, numbers or stretches, mostly where the header is."""
    data = bytearray(seed)
    for _ in range(random_.choice((1, 1, 1, 2, 4, 16))):
        top = len(data) if random_.random() < 0.2 else min(len(data), 4096)
        at = random_.randrange(max(1, top))
        kind = random_.randrange(7)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << random_.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = random_.choice((0, 1, 0x7F, 0x80, 0xFF, random_.randrange(256)))
        elif kind == 2:
            width = random_.choice("BHIQ")
            size = struct.calcsize(width)
            number = random_.choice(_NUMBERS) & (2 ** (8 * size) - 1)
            data[at : at + size] = struct.pack("<" + width, number)
        elif kind == 3:
            del data[at : at + random_.choice((1, 4, 8, 100))]
        elif kind == 4:
            data[at:at] = random_.randbytes(random_.choice((1, 4, 8, 64)))
        elif kind == 5:
            length = random_.choice((4, 8, 40, 200))
            source = random_.randrange(max(1, len(data)))
            data[at : at + length] = data[source : source + length]
        else:
            del data[random_.randrange(len(data) + 1) :]
    return bytes(data)


def hostile(random_: random.Random) -> Any:
    """Make a value of any kind."""
    choices: list[Callable[[], Any]] = [
        lambda: random_.choice(_NUMBERS),
        lambda: -random_.choice(_NUMBERS),
        lambda: random_.choice((1e308, -1e308, 0.5, float("nan"), float("inf"), 10**400, 1e-320)),
        lambda: random_.choice((True, False, None, "", "x", "\0", "\ud800", "../x", "/etc/passwd")),
        lambda: "x" * random_.choice((100, 10_000)),
        list,
        dict,
        lambda: [hostile(random_) for _ in range(random_.randrange(4))],
        lambda: {str(i): hostile(random_) for i in range(random_.randrange(4))},
        lambda: _deep(random_.choice((10, 200, 900))),
        lambda: list(range(random_.choice((50, 5000)))),
    ]
    return random_.choice(choices)()


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def mutated_json(random_: random.Random, seed: Any) -> bytes:
    """Replace, remove, rename or add values of an object, or spoil its text."""
    if random_.random() < 0.1:
        return mutated_bytes(random_, json.dumps(seed).encode())
    if random_.random() < 0.02:
        return random_.choice((b"[", b'{"a":')) * 100_000
    value = json.loads(json.dumps(seed))
    for _ in range(random_.choice((1, 1, 2, 4))):
        value = _changed(random_, value)
    return json.dumps(value).encode()


def _changed(random_: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and random_.random() < 0.9:
        key = random_.choice(list(value))
        kind = random_.random()
        if kind < 0.1:
            del value[key]
        elif kind < 0.15:
            value[random_.choice(("", "x", "\0", "9" * 400, "\ud800"))] = value.pop(key)
        else:
            value[key] = _changed(random_, value[key])
        return value
    if isinstance(value, list) and value and random_.random() < 0.8:
        at = random_.randrange(len(value))
        value[at] = _changed(random_, value[at])
        return value
    return hostile(random_)


# ---- the run


def fuzz(name: str, count: int, seed: int, keep: Path | None, seconds: float) -> int:
    """Try `count` mutations (0: without end) on one reader; return how many failed."""
    is_json, make, read = _targets()[name]
    seeds = make()
    random_ = random.Random(seed)
    mutate: Callable[[random.Random, Any], bytes] = mutated_json if is_json else mutated_bytes
    if name == "template":
        mutate = read_by_others.mutated_template
    with tempfile.TemporaryDirectory() as warm:
        # The seeds themselves, so that everything is imported; the first one is a sound file.
        encoded = [json.dumps(content).encode() if is_json else content for content in seeds]
        outcomes = [_run(read, content, Path(warm))[0] for content in encoded]
        if outcomes[0] is not None:
            raise SystemExit(f"{name}: the seed itself is refused: {outcomes[0]}")
    gc.collect()
    gc.freeze()  # what the libraries made is not searched again with every file
    _limit_memory()
    failed = answered = tried = 0
    slowest = 0.0
    ends = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        while (count == 0 or tried < count) and time.monotonic() < ends:
            data = mutate(random_, random_.choice(seeds))
            tried += 1
            for left in Path(folder).iterdir():
                if left.is_file():
                    left.unlink()
            if keep:
                (keep / f"{name}.last").write_bytes(data)  # should the process not come back
            outcome, took = _run(read, data, Path(folder))
            slowest = max(slowest, took)
            answered += outcome is None
            if (outcome and outcome != "ours") or took > SECONDS:
                failed += 1
                why = outcome if outcome != "ours" else f"{took:.1f} s"
                print(f"{name} #{tried}: {why}")
                if keep:
                    (keep / f"{name}.{seed}.{tried}").write_bytes(data)
    print(f"{name}: {tried:,} tried, {answered:,} read, {failed} failed, slowest {slowest:.2f} s")
    return failed


def _run(read: Reader, data: bytes, folder: Path) -> tuple[str | None, float]:
    """Return None if it was read, "ours" for an LMHeadError, else the error; and the time."""
    from lmhead.errors import LMHeadError

    started = time.process_time()
    try:
        read(data, folder)
        outcome = None
    except LMHeadError as error:
        outcome = "ours" if "\n" not in str(error) else f"more than one line: {error!r:.200}"
        if _asked_for_too_much(error):
            outcome = f"all the memory there is: {error!r:.200}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error!s:.200}"
    return outcome, time.process_time() - started


def _asked_for_too_much(error: BaseException | None) -> bool:
    """Tell whether an error of ours stands for memory that was not to be had.

    A chat template runs under a limit of its own, below that of the harness; it may come up to it.
    """
    if "chat template" in str(error) and "takes more than" in str(error):
        return False
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if os.name == "posix" else 0
    limit = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> int:
    """Run one reader, or each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("reader", nargs="?", help="one reader; all where it is left out")
    parser.add_argument("--count", type=int, default=2000, help="mutations; 0 for no end")
    parser.add_argument("--json-count", type=int, help="mutations of JSON; as --count")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after as many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for what made a reader fail")
    parser.add_argument("--replay", type=Path, help="read this file, and nothing else")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # on tiny models torch's threads only wait
    if given.keep:
        given.keep.mkdir(parents=True, exist_ok=True)
    if given.replay:
        with tempfile.TemporaryDirectory() as folder:
            _targets()[given.reader][2](given.replay.read_bytes(), Path(folder))
        return 0
    if given.reader == "schema" and find_spec("llguidance") is None:
        print("schema: not tried, llguidance is not installed (extra `guided`)")
        return 0
    if given.reader:
        return min(1, fuzz(given.reader, given.count, given.seed, given.keep, given.seconds))
    failed = []
    for name, (is_json, *_) in _targets().items():
        count = given.count if given.json_count is None or not is_json else given.json_count
        command = [sys.executable, __file__, name, "--count", str(count)]
        command += ["--seed", str(given.seed), "--seconds", str(given.seconds)]
        command += ["--keep", str(given.keep)] if given.keep else []
        code = subprocess.run(command, check=False).returncode
        if code:
            failed.append(f"{name} (exit code {code})")
    print("failed: " + ", ".join(failed) if failed else "all readers held")
    return min(1, len(failed))


if __name__ == "__main__":
    sys.exit(main())
