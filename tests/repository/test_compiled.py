"""The table of what has run of the compiled kernels."""

from __future__ import annotations

import compiled

from benchmarks.printing import marked
from benchmarks.results import load


def test_the_page_says_what_the_file_says() -> None:
    record = load(compiled.FILE)
    assert record and all(set(found["outcomes"]) == {"passed"} for found in record.values())
    assert len({found["source"] for found in record.values()}) == 1
    start, end = marked("compiled", compiled.COMMAND)
    assert f"{start}\n{compiled.block(record)}\n{end}" in compiled.PAGE.read_text()


def test_runs_of_one_version_and_target_are_a_line() -> None:
    def found(cases: int, error: float) -> dict[str, object]:
        done = {"instructions": 2_000_000}
        return {
            "outcomes": {"passed": cases},
            "kernels": 3,
            "launches": {"a": 2},
            "done": done,
            "largest": {"log-probs": error},
        }

    record = {"3.9.0 sm_90 7": found(4, 2e-7), "3.9.0 sm_90 0": found(5, 1e-7), "3.6.0 sm_90 1": found(4, 3e-7)}
    *lines, _, lack = [line.strip("| ").split(" | ") for line in compiled.block(record).splitlines()[2:]]
    assert lack == [
        "Of these kernels not run yet: 3.6.0 sm_90 (in order, shuffled), 3.6.0 sm_100 (in order, reversed, shuffled), 3.9.0 sm_90 "
        "(reversed), 3.9.0 sm_100 (in order, reversed, shuffled)."
    ]
    assert lines == [
        ["3.6.0", "sm_90", "reversed", "4", "3", "2", "2 M", "3.0e-07"],
        ["3.9.0", "sm_90", "in order, shuffled", "5 + 4", "3", "4", "4 M", "2.0e-07"],
    ]


def test_a_run_of_other_kernels_takes_the_place_of_all_before() -> None:
    record = compiled.with_run({"a": {"source": "x"}}, "b", {"source": "x"})
    assert list(record) == ["a", "b"]
    assert list(compiled.with_run(record, "a", {"source": compiled.source()})) == ["a"]
