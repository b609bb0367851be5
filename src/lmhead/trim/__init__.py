"""Trim: a smaller vocabulary, with proof that nothing you need has changed.

- `tokenizer`, `bpe`: what a tokenizer is made of, and how to cut it exactly.
- `corpus`, `counts`, `scripts`, `keepset`: which ids to keep.
- `coverage`: what the model itself would say.
- `checkpoint`, `gguf`, `keepfile`: the three forms of the result.
- `proof`, `verify`: the proof. `run` does it all.
"""
