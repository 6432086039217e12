"""The benchmark of large sets of tars, on a small one."""

from pathlib import Path

import pytest

from benchmarks import data_order


def test_every_phase_measures_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_order, "SHARD", 100)
    data_order.write(tmp_path, 250)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"shard-{i:06d}.tar" for i in range(3)]
    found = {phase: data_order.run(phase, tmp_path, 2) for phase in data_order.PHASES}
    assert all(phase["seconds"] >= 0 and phase["peak_mib"] > 0 for phase in found.values())
    assert found["draw"]["batches"] == found["draw_block"]["batches"] == 2
    assert found["read"]["examples"] == data_order.BATCH
    assert found["read"]["bytes"] == found["read_block"]["bytes"] > data_order.BATCH * 60
    assert "bytes_per_example" in found["open"]
