"""The keep-set file: which rows of a head to use, in the form that draft heads are given.

A safetensors file with
- `kept [K]` int64: the canonical ids, ascending (a frequency-ranked draft head takes this list),
- `d2t [K]` int64: canonical id minus new id, and `t2d [V]` bool: whether an id is kept (the two
  maps of an EAGLE-3 draft head),
and in its metadata the rows V and the SHA-256 of the head it was made for.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmhead.errors import BadInput
from lmhead.files.jsons import open_file
from lmhead.trim.idmap import TrimMap

_KIND = "lmhead keep-set"


@dataclass(frozen=True)
class KeepFile:
    """A keep-set and the head that it belongs to."""

    ids: TrimMap
    model: str
    head_sha256: str

    def save(self, path: Path) -> None:
        """Write the file; the same keep-set gives the same bytes."""
        from safetensors.numpy import save

        kept = self.ids.row_ids
        t2d = np.zeros(self.ids.rows, np.bool_)
        t2d[kept] = True
        tensors = {"kept": kept, "d2t": kept - np.arange(len(kept)), "t2d": t2d}
        metadata = {
            "kind": _KIND,
            "model": self.model,
            "rows": str(self.ids.rows),
            "head_sha256": self.head_sha256,
        }
        data = save(tensors, metadata)
        (length,) = struct.unpack_from("<Q", data)
        # The library writes the metadata in an order that changes from run to run.
        header = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True, separators=(",", ":"))
        path.write_bytes(data[:8] + header.encode().ljust(length) + data[8 + length :])

    @classmethod
    def load(cls, path: Path) -> "KeepFile":
        """Read a file that `save` wrote."""
        from safetensors import SafetensorError, safe_open

        try:
            open_file(path).close()  # no pipe that would keep us waiting
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                if metadata.get("kind") != _KIND:
                    raise ValueError("its metadata does not say so")
                kept, d2t, t2d = (file.get_tensor(name) for name in ("kept", "d2t", "t2d"))
            rows = int(metadata["rows"])
            if kept.ndim != 1 or kept.dtype != np.int64:
                raise ValueError(f"its ids are {kept.dtype} {list(kept.shape)}, not int64 [K]")
            ids = TrimMap(tuple(kept.tolist()), rows)
            whole = np.zeros(len(t2d) if t2d.ndim == 1 else 0, np.bool_)
            if len(whole) != rows or ids.kept_rows != len(kept):
                raise ValueError(f"its ids do not fit {rows:,} rows")
            whole[kept] = True
            if not np.array_equal(t2d, whole) or not np.array_equal(
                d2t + np.arange(len(kept)), kept
            ):
                raise ValueError("its three lists of ids do not agree")
            return cls(ids, metadata["model"], metadata["head_sha256"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadInput(
                f"{path} is not a keep-set file ({error}); expected what `lmhead trim --form head` "
                "writes"
            ) from error
