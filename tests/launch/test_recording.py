"""Records of trajectories are bounded; what they hold, `test_train.py` reads."""

from __future__ import annotations

from launch.records import open_records, within_limit


def test_records_begin_with_their_version_and_are_bounded(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    path.write_text('{"step": 0, "ver')  # left by a full disk
    open_records(path, resume_step=0)
    assert path.read_text() == '{"step": 0, "version": 2}\n'
    # A step's first group is written in any case.
    lines = [{"text": "x" * 90}] * 5
    assert [len(list(within_limit(lines, limit))) for limit in (250, 10)] == [2, 1]
