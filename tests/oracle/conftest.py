"""One pool of real processes for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import Pool


@pytest.fixture(scope="session")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """4 gloo processes, in groups of 4 and of 2."""
    pool = Pool(4, tmp_path_factory.mktemp("gloo"))
    yield pool
    pool.close()
