"""lmhead inside transformers: models that work as before, with less memory."""

from lmhead.patch.loss import patch_loss, unpatch_loss

__all__ = ["patch_loss", "unpatch_loss"]
