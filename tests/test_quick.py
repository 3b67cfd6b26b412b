"""`make quick` runs the tests of what changed, except for slow ones."""
import sys

from conftest import ROOT

sys.path.insert(0, str(ROOT/"scripts"))
from quick import find_tests   # noqa: E402


def test_a_changed_file_brings_its_tests():
    assert "tests/tokens/test_encode.py" in find_tests("nbs/04_tokens/04_encode.ipynb")
    assert find_tests("tests/runs/test_directory.py") == ["tests/runs/test_directory.py"]
    assert find_tests("tests/training/test_together.py") == find_tests("README.md") == []
    for path in find_tests("nbs/11_training/06_train.ipynb"): assert (ROOT/path).exists() and "launch" not in path
