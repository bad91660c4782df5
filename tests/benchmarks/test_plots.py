"""Pictures show the numbers of the result files, name every provider, are readable on light and dark pages, and are up to date."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support import sample_results

pytest.importorskip("matplotlib")

import matplotlib
import matplotlib.image
from matplotlib.backend_bases import RendererBase
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

from benchmarks import cell_tables, front, pictures, plots, results
from benchmarks.harness import RESULTS
from benchmarks.suites import SUITES

GROUNDS = ("#ffffff", "#0d1117")
COMMITTED = sorted(RESULTS.glob("*/*.json"))
Record = dict


@pytest.fixture(scope="module", params=list(itertools.product(sample_results.MACHINES, SUITES)), ids="-".join)
def record(request: pytest.FixtureRequest, samples: Path) -> Record:
    machine, suite = request.param
    return results.load(samples / machine / f"{suite}.json")


@pytest.fixture(scope="module")
def written(record: Record) -> tuple[list[tuple[str, tuple[float, ...]]], tuple[float, float]]:
    """(text, its box in pixels) of all that is drawn, and the size of the picture."""
    figure = plots.draw(pictures.picture(record))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        draw = Text.draw

        def recorded(text: Text, renderer: RendererBase) -> None:
            if text.get_visible() and text.get_text().strip():
                found.append((text.get_text(), text.get_window_extent(renderer).extents))
            draw(text, renderer)

        patch.setattr(Text, "draw", recorded)
        figure.draw_without_rendering()
    return found, figure.bbox.size


def described(path: Path) -> dict:
    """The numbers in the description of a picture."""
    if path.suffix == ".png":
        return json.loads(Image.open(path).info["Description"])
    found = ElementTree.parse(path).find(".//{http://purl.org/dc/elements/1.1/}description")
    assert found is not None and found.text
    return json.loads(found.text)


def test_no_text_touches_another_or_leaves_the_picture(written: tuple) -> None:
    found, (width, height) = written
    assert len(found) > 8
    for text, (x0, y0, x1, y1) in found:
        assert x0 >= 0 and y0 >= 0 and x1 <= width and y1 <= height, text
    for (one, a), (other, b) in itertools.combinations(found, 2):
        beside, above = max(a[0], b[0]) - min(a[2], b[2]), max(a[1], b[1]) - min(a[3], b[3])
        assert beside >= 2 or above >= -1, f"{one!r} touches {other!r}"


def test_every_provider_is_named_in_the_picture(record: Record, written: tuple) -> None:
    words = re.sub(r"\s+", " ", " ".join(text for text, _ in written[0]))
    bars = isinstance(pictures.picture(record).panels[0], pictures.Bars)
    for cell in cell_tables.headline(record)[0] if bars else record["cells"]:
        for row in cell["providers"]:
            if not (bars and row.get("limit")):  # the line at 1
                assert row["name"] in words


def test_bars_are_times_over_the_limit(samples: Path) -> None:
    record = results.load(samples / "sample-cpu" / "hidden.json")
    cells = cell_tables.headline(record)[0]
    panels = pictures.picture(record).panels
    assert [panel.title for panel in panels] == ["fp32, 256 x 1,024 x 151,936", "bf16, 256 x 1,024 x 151,936"]
    for panel, cell in zip(panels, cells, strict=True):
        assert isinstance(panel, pictures.Bars)
        timed = {
            r["name"]: r["ms"] / cell["limit"]["ms"] for r in cell["providers"] if r["status"] == "ok" and not r.get("limit")
        }
        assert {bar.name: bar.value for bar in panel.bars} == pytest.approx(timed, rel=1e-3)
    assert panels[1].wrong == ["eager PyTorch, 16-bit softmax"]
    assert "eager PyTorch, 16-bit softmax" not in {bar.name for bar in panels[1].bars}


def test_a_step_is_compared_with_eager_in_time_and_memory(samples: Path) -> None:
    record = results.load(samples / "sample-cpu" / "step.json")
    rows = {row["name"]: row for row in record["cells"][0]["providers"]}
    time, memory = pictures.picture(record).panels
    eager = rows["eager PyTorch"]["ms"]
    assert {b.name: b.value for b in time.bars} == pytest.approx({n: r["ms"] / eager for n, r in rows.items()}, rel=1e-3)
    assert {b.name: b.value for b in memory.bars} == pytest.approx({n: r["extra_mb"] for n, r in rows.items()}, rel=1e-3)


@pytest.mark.parametrize("suite", ["logits", "rows", "step"])
def test_failures_of_all_or_of_the_baseline_are_drawn(suite: str, samples: Path) -> None:
    record = results.load(samples / "sample-cpu" / f"{suite}.json")
    rows = [row for cell in record["cells"] for row in cell["providers"]]
    for gone in ("eager PyTorch", *(row["name"] for row in rows)):
        for row in rows:
            if row["name"] == gone:
                row |= {"status": "failed", "reason": "out of memory"}
        for cell in record["cells"]:
            cell["limit"] = None if all(r["status"] != "ok" for r in cell["providers"] if r.get("limit")) else cell["limit"]
        shown = pictures.picture(record)
        plots.draw(shown).draw_without_rendering()
        assert gone in str(shown)
    assert not any(panel.bars if isinstance(panel, pictures.Bars) else panel.curves for panel in shown.panels)


def test_curves_are_the_times_and_the_memory_of_a_sweep(samples: Path) -> None:
    record = results.load(samples / "sample-cpu" / "length.json")
    time, memory = pictures.picture(record).panels
    for panel, key, unit in ((time, "ms", "time, ms (log)"), (memory, "extra_mb", "extra memory, MB (log)")):
        assert panel.y_axis == unit and panel.log
        for curve in panel.curves:
            rows = [(c["rows"], r) for c in record["cells"] for r in c["providers"] if r["name"] == curve.name]
            rows = [(x, r) for x, r in rows if r["status"] == "ok"]
            assert curve.x == [x for x, _ in rows]
            assert curve.y == pytest.approx([r[key] for _, r in rows], rel=1e-3)
    assert {curve.name for curve in memory.curves} == {"grpo_kernels", "eager PyTorch"}
    assert next(c for c in time.curves if c.name == "eager PyTorch").x == [4096, 16384]
    assert pictures.picture(record).notes == ["skipped: eager PyTorch [65,536]"]


def luminance(colour: str) -> float:
    parts = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(colour)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: str, other: str) -> float:
    """WCAG 2."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_read_on_light_and_dark() -> None:
    best = math.sqrt(contrast(*GROUNDS))  # of one colour on both grounds
    for ground in GROUNDS:
        assert contrast(plots.TEXT, ground) > 0.97 * best
        for colour in (plots.MUTED, plots.HIGHLIGHT, *plots.COLOURS.values()):
            assert contrast(colour, ground) >= 3, colour


@pytest.mark.parametrize("suite", ["hidden", "rows"])
def test_only_these_colours_are_used(suite: str, samples: Path, tmp_path: Path) -> None:
    svg, _ = plots.save(pictures.picture(results.load(samples / "sample-gpu" / f"{suite}.json")), tmp_path / "picture")
    used = set(re.findall(r"#[0-9a-f]{6}\b", svg.read_text()))
    assert plots.HIGHLIGHT in used
    assert used <= {plots.TEXT, plots.MUTED, plots.HIGHLIGHT, *plots.COLOURS.values()}


def test_the_background_is_transparent(samples: Path, tmp_path: Path) -> None:
    _, png = plots.save(pictures.picture(results.load(samples / "sample-cpu" / "rows.json")), tmp_path / "picture")
    alpha = matplotlib.image.imread(png)[..., 3]
    assert (alpha == 0).mean() > 0.8


def test_the_same_file_gives_the_same_pictures(samples: Path, tmp_path: Path) -> None:
    shown = pictures.picture(results.load(samples / "sample-cpu" / "active.json"))
    for one, other in zip(plots.save(shown, tmp_path / "a"), plots.save(shown, tmp_path / "b"), strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert described(one) == json.loads(plots.described(shown))


def test_the_command_writes_beside_the_files_or_elsewhere(
    samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sample-cpu/step", "sample-cpu/length", "sample-gpu/step"):
        results.save(tmp_path / "in" / f"{name}.json", results.load(samples / f"{name}.json"))
    plots.main(["--results", str(tmp_path / "in"), "--out", str(tmp_path / "out")])
    names = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.*")}
    drawn = ("sample-cpu/step", "sample-cpu/length", "sample-cpu/front", "sample-gpu/step", "sample-gpu/front")
    assert names == {f"{x}{kind}" for x in drawn for kind in (".svg", ".png")}
    told = capsys.readouterr().out
    assert all(name in told for name in names)
    plots.main(["--results", str(tmp_path / "in")])
    assert sorted(p.name for p in (tmp_path / "in/sample-gpu/plots").iterdir()) == [
        "front.png", "front.svg", "step.png", "step.svg",
    ]  # fmt: skip


def test_without_result_files_the_command_says_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="python -m benchmarks"):
        plots.main(["--results", str(tmp_path)])


@pytest.mark.skipif(not COMMITTED, reason="nothing has been measured")
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_committed_pictures_are_current(path: Path, tmp_path: Path) -> None:
    """Compared by the numbers in them, and by their bytes if matplotlib has the version that drew them."""
    shown = pictures.picture(results.load(path))
    drawn = [path.parent / "plots" / f"{path.stem}{kind}" for kind in (".svg", ".png")]
    for old in drawn:
        assert old.exists() and described(old) == json.loads(plots.described(shown)), "run `python -m benchmarks.plots`"
    if f"Matplotlib v{matplotlib.__version__}," in drawn[0].read_text():
        assert plots.save(shown, tmp_path / "new")[0].read_bytes() == drawn[0].read_bytes(), "run `python -m benchmarks.plots`"


@pytest.mark.parametrize("machine", cell_tables.machines(RESULTS))
def test_the_committed_front_is_current(machine: str) -> None:
    """As above; its two rows have the names of their own cell."""
    shown = front.picture(RESULTS, machine)
    for kind in (".svg", ".png"):
        old = RESULTS / machine / "plots" / f"{front.NAME}{kind}"
        assert old.exists() and described(old) == json.loads(plots.described(shown)), "run `python -m benchmarks.plots`"
    page = plots.draw(shown, front.COLUMNS)
    for axes, panel in zip(page.axes[::2], shown.panels[::2], strict=True):
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert names == [bar.name for bar in sorted(panel.bars, key=lambda bar: bar.value)] + panel.wrong


def test_committed_pictures_belong_to_a_file() -> None:
    shown = [p for p in RESULTS.glob("*/plots/*") if p.stem != front.NAME]
    orphans = [p for p in shown if not (p.parent.parent / f"{p.stem}.json").exists()]
    assert not orphans
