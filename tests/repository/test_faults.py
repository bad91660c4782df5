"""The faults that prove the tests' power still fit the code: see tests/faults.py."""

from __future__ import annotations

from faults import FAULTS, ROOT


def test_each_fault_changes_one_place() -> None:
    assert FAULTS and all(fault.old != fault.new for fault in FAULTS)
    assert not [fault for fault in FAULTS if (ROOT / fault.file).read_text().count(fault.old) != 1]
    assert not [fault for fault in FAULTS for name in fault.tests.split() if not (ROOT / name).is_file()]
