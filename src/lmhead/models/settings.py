"""What of a model's configuration is not the configuration's to say.

A config.json may name the code that computes attention: `"attn_implementation": "org/repo:fn"` is
fetched from the Hub and run, if the package `kernels` is installed, and `flash_attention_2` falls
back to such a kernel. What runs is the user's choice, never that of a file: of such settings only
the two that torch and transformers bring themselves are kept, and transformers chooses else.
"""

from typing import Any

_ATTENTION = ("eager", "sdpa")
_EXPERTS = ("eager", "batched_mm", "grouped_mm")


def keep_own_code(config: Any) -> Any:
    """Take out of a transformers configuration, and of those inside it, what names other code."""
    inside = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    parts = [part for part in inside if part is not None]
    if getattr(config, "_attn_implementation_internal", None) not in _ATTENTION:
        config._attn_implementation_internal = None
    if getattr(config, "_experts_implementation_internal", None) not in _EXPERTS:
        config._experts_implementation_internal = None
    for part in parts:
        keep_own_code(part)
    return config
