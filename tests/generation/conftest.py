from pathlib import Path

import pytest

from lmhead.loading import Model, load


@pytest.fixture(scope="session")
def model(smollm2: Path) -> Model:
    return load(smollm2)
