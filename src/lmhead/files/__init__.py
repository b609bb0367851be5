"""Bytes on disk: read with stated limits, written whole or not at all, and kept in the cache."""
