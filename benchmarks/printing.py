"""A measured cell as text."""

from __future__ import annotations

LEGEND = """ms: median of n runs, interleaved; p20, p80: quantiles. U: the bytes of the logits, N x V; NHV: tokens x hidden x vocabulary.
limit: what the hardware needs for the least that the contract asks for, measured in the same run (the fastest of those named so).
error: the worst of the loss (by the mean |advantage|), gradients and their worst row (relative), log-probs and entropy (absolute)."""


def ways(row: dict) -> str:
    """What a limit is the sum of, and the ways that took longer, in ms."""
    found = []
    for name in row["of"]:
        part, _, way = name.partition(", ")
        others = [(x.partition(", ")[2], ms) for x, ms in row["ways"].items() if x.startswith(f"{part}, ") and x != name]
        slower = ", ".join(f"{x} {ms:.3g}" for x, ms in others if not isinstance(ms, str))
        found.append(f"{part} {row['ways'][name]:.3g} by {way}" + (f" ({slower})" if slower else ""))
    return "; ".join(found)


def table(cell: dict) -> str:
    """The cell as a table, then the reasons of the providers that were not timed."""
    contract, rows = cell["contract"], cell["providers"]
    shape = " x ".join(f"{cell[x]:,}" for x in ("rows", "hidden", "vocab") if cell[x])
    active = "" if cell["active"] == 1 else f", {cell['active']:.1%} of the sequences with an advantage"
    timed = [r for r in rows if r["status"] == "ok"]
    rates = [key for key in ("gbps_1u", "gbps_2u", "gbps_3u", "tflops", "tflops_dense") if any(key in r for r in timed)]
    convention = next((r["flop_convention"] for r in timed if "flop_convention" in r), "")
    heads = {"gbps_1u": "GB/s 1U", "gbps_2u": "GB/s 2U", "gbps_3u": "GB/s 3U", "tflops": "TFLOP/s", "tflops_dense": "as dense"}
    eager = next((r["ms"] for r in timed if r["name"] == "eager PyTorch"), None)
    ratio = "x limit" if cell["limit"] else "x eager"
    head = ["", "ms", "p20", "p80", "n", ratio, "x copy", *(heads[key] for key in rates), "% limit", "extra MB", "error"]
    lines = [[*head, "compiles", "syncs"]]
    for r in timed:
        base = cell["limit"]["ms"] if cell["limit"] else eager
        lines.append(
            [
                r["name"] + (" (limit)" if r.get("limit") else ""),
                *(f"{r[key]:.3g}" if r[key] < 1000 else f"{r[key]:.0f}" for key in ("ms", "p20", "p80")),
                str(r["runs"]),
                f"{r['ms'] / base:.2f}" if base else "",
                f"{r['x_copy']:.2f}" if "x_copy" in r else "",
                *(f"{r[key]:.3g}" for key in rates),
                f"{100 / r['x_limit']:.0f}" if r["x_limit"] else "",
                f"{r['extra_mb']:.0f}" if "extra_mb" in r else "",
                f"{max(r['errors'].values()):.0e}" if "errors" in r else "",
                *("" if r.get(key) is None else str(r[key]) for key in ("compiles", "syncs")),
            ]
        )
    kept = [i for i, name in enumerate(lines[0]) if i == 0 or any(line[i] for line in lines[1:])]
    widths = [max(len(line[i]) for line in lines) for i in kept]
    text = [f"{contract}, {shape}, {cell['dtype']}{active}" + (f"; TFLOP/s of {convention}" if convention else "")]
    for line in lines:
        text.append("  ".join(line[i].rjust(w) if i else line[i].ljust(w) for i, w in zip(kept, widths, strict=True)).rstrip())
    text += [f"  {r['name']} (limit): {ways(r)}" for r in timed if r.get("ways")]
    text += [f"  {r['name']}: {r['status']}, {r['reason']}" for r in rows if r["status"] != "ok"]
    text += (
        [f"  CUDA's allocator asked again {cell['alloc_retries']} times while this was timed"]
        if cell.get("alloc_retries")
        else []
    )
    return "\n".join(text)
