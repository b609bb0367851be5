"""Trim: a smaller vocabulary, with proof that nothing you need has changed.

- `tokenizer`, `bpe`: what a tokenizer is made of, and how to cut it exactly.
- `corpus`, `counts`, `scripts`, `keepset`: which ids to keep.
- `observing`, `observations`, `resume`, `coverage`, `estimate`: what the model itself would say.
- `checkpoint`, `gguf`, `keepfile`: the three forms of the result.
- `inputs`, `proof`, `greedy`, `verify`: the proof. `card`, `report`: what is said of it.
- `run` does it all.
"""
