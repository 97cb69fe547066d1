import pytest

from colibri_bench.demo_model import demo_gguf
from colibri_repack import repack


@pytest.fixture(scope="session")
def demo_file(tmp_path_factory):
    """The demo model, repacked."""
    path = tmp_path_factory.mktemp("demo") / "demo.colibri"
    with demo_gguf() as source:
        repack(source, path)
    return path
