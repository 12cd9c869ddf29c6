"""What is said of processes that differ."""

from __future__ import annotations

from pathlib import Path

from ..support.step_differences import described


def test_values_and_kernels_by_name(tmp_path: Path) -> None:
    caches = {name: tmp_path / name for name in ("plain", "inverse")}
    for name, folder in caches.items():
        (folder / "TRITON" / "key").mkdir(parents=True)
        text = f"\t.file 1 {folder}\n\tadd.f32 1;\n\t.loc 1 2\n"
        (folder / "TRITON" / "key" / "same.ptx").write_text(f"{text}.section .debug {folder}")
        (folder / "TRITON" / "key" / "other.ptx").write_text(f"{text}fma {name};\n")
    same = {"step 0: loss": "a", "step 0: gradient of w": "b"}
    assert not described({"plain": same, "inverse": dict(same)}, caches)
    text = described({"plain": same, "inverse": {**same, "step 0: gradient of w": "c"}}, caches)
    lines = text.splitlines()
    assert lines[:2] == ["1 values differ, first of all:", "  step 0: gradient of w: b in plain; c in inverse"]
    assert lines[2] == "1 kernels differ:"
    assert lines[3].startswith("  other: ")
    assert len(lines) == 4
