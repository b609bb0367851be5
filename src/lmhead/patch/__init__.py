"""lmhead inside transformers: models that work as before, with less memory or in less time."""

from lmhead.patch.generate import (
    GeneratePath,
    GenerateStats,
    explain_generate,
    patch_generate,
    unpatch_generate,
)
from lmhead.patch.loss import patch_loss, unpatch_loss

__all__ = [
    "GeneratePath",
    "GenerateStats",
    "explain_generate",
    "patch_generate",
    "patch_loss",
    "unpatch_generate",
    "unpatch_loss",
]
