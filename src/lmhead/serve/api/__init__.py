"""The OpenAI-style server: one file for each thing that it answers."""
