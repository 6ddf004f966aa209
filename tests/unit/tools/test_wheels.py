"""tools/wheels.py: which examples run from a wheel where an extra is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "tools"))
try:
    import wheels
finally:
    sys.path.remove(str(ROOT / "tools"))


def test_exactly_the_torch_examples_need_an_extra() -> None:
    needing = {
        path.name
        for path in (ROOT / "examples").glob("*.py")
        if wheels.imported_by(path.read_text()) & set(wheels.OPTIONAL)
    }
    assert needing == {"torch_ddp.py", "torch_fsdp.py"}


def test_imports_are_found_wherever_they_stand() -> None:
    source = "import numpy as np\ndef f():\n    from torch.nn import Linear\nfrom . import d\nimport a.b, c\n"
    assert wheels.imported_by(source) == {"numpy", "torch", "a", "c"}


def test_a_module_is_looked_for_without_importing_it() -> None:
    assert wheels.is_importable(Path(sys.executable), "numpy")
    assert not wheels.is_importable(Path(sys.executable), "no_such_module_of_ours")
