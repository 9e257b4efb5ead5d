import os
import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def quick(tmp_path):
    """A folder in memory where there is one: for sweeps of hundreds of runs whose flushes nobody has to wait for."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="dfexp-test-"))
    yield folder
    shutil.rmtree(folder)
