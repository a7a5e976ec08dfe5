"""The page that shows one step runs as it stands."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "one_step.md"


def test_the_step_of_the_page_raises_what_it_is_to_raise(monkeypatch, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    code = "\n".join(blocks)
    assert len(code.splitlines()) <= 150
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "step.py").write_text(code)
    found = runpy.run_path(str(tmp_path / "step.py"))
    assert [len(group) for group in found["groups"]] == [8] * 4
    assert found["rewards_NG"].std(axis=1).max() > 0
    assert abs(found["advantage_NG"].sum(axis=1)).max() < 1e-4
    before, after = (found["favour"](found[name]) for name in ("params", "new"))
    assert after - before > 1e-3
