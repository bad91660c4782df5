"""A measured cell, and other tables, as text."""

from __future__ import annotations

Table = list[list[str]]  # head and lines

LEGEND = """ms: median of n runs, interleaved; p20, p80: quantiles; host ms: of the host in a call, which the GPU need not wait for.
U: the bytes of the logits, N x V; NHV: tokens x hidden x vocabulary.
limit: what the hardware needs for the least that the contract asks for, measured in the same run (the fastest of those named so).
error: the worst of the loss (by the mean |advantage|), gradients and their worst row (relative), log-probs and entropy (absolute)."""


#: The note below a table with rows whose gradient is drawn.
DRAWN = "Errors of gradients in sparse rows are those of one draw: unbiased noise around the dense gradient, not a wrong result"


def entropy(cell: dict) -> str:
    """The mean entropy of the rows of a cell, if they were made for one."""
    asked_for = cell.get("entropy")
    return "" if asked_for is None else f", mean entropy {cell.get('entropy_reached', asked_for):.2f} nats"


def worst(row: dict) -> str:
    """The largest error; for a gradient that is drawn, the relative noise of all rows together."""
    if not row.get("errors"):
        return ""
    if row.get("drawn"):
        return f"noise {max(x for name, x in row['errors'].items() if 'worst row' not in name):.1%}"
    return f"{max(row['errors'].values()):.0e}"


def ways(row: dict) -> str:
    """The parts of a limit, and the ways to compute them that took longer, in ms."""
    parts = []
    for name in row["of"]:
        part, _, way = name.partition(", ")
        others = [(x.partition(", ")[2], ms) for x, ms in row["ways"].items() if x.startswith(f"{part}, ") and x != name]
        slower = ", ".join(f"{x} {ms:.3g}" for x, ms in others if not isinstance(ms, str))
        parts.append(f"{part} {row['ways'][name]:.3g} by {way}" + (f" ({slower})" if slower else ""))
    return "; ".join(parts)


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
    head = [
        "",
        "ms",
        "p20",
        "p80",
        "n",
        "host ms",
        ratio,
        "x copy",
        *(heads[key] for key in rates),
        "% limit",
        "extra MB",
        "error",
    ]
    lines = [[*head, "compiles", "syncs"]]
    for r in timed:
        base = cell["limit"]["ms"] if cell["limit"] else eager
        lines.append(
            [
                r["name"] + (" (limit)" if r.get("limit") else ""),
                *(f"{r[key]:.3g}" if r[key] < 1000 else f"{r[key]:.0f}" for key in ("ms", "p20", "p80")),
                str(r["runs"]),
                f"{r['host_ms']:.2f}" if "host_ms" in r else "",
                f"{r['ms'] / base:.2f}" if base else "",
                f"{r['x_copy']:.2f}" if "x_copy" in r else "",
                *(f"{r[key]:.3g}" for key in rates),
                f"{100 / r['x_limit']:.0f}" if r["x_limit"] else "",
                f"{r['extra_mb']:.0f}" if "extra_mb" in r else "",
                worst(r),
                *("" if r.get(key) is None else str(r[key]) for key in ("compiles", "syncs")),
            ]
        )
    kept = [i for i, name in enumerate(lines[0]) if i == 0 or any(line[i] for line in lines[1:])]
    widths = [max(len(line[i]) for line in lines) for i in kept]
    text = [
        f"{contract}, {shape}, {cell['dtype']}{active}{entropy(cell)}" + (f"; TFLOP/s of {convention}" if convention else "")
    ]
    for line in lines:
        text.append("  ".join(line[i].rjust(w) if i else line[i].ljust(w) for i, w in zip(kept, widths, strict=True)).rstrip())
    text += [f"  {r['name']} (limit): {ways(r)}" for r in timed if r.get("ways")]
    text += [f"  {DRAWN}"] if any(r.get("drawn") for r in timed) else []
    text += [f"  {r['name']}: {r['status']}, {r['reason']}" for r in rows if r["status"] != "ok"]
    text += (
        [f"  CUDA's allocator asked again {cell['alloc_retries']} times while this was timed"]
        if cell.get("alloc_retries")
        else []
    )
    return "\n".join(text)


def render(table: Table, markdown: bool) -> str:
    if markdown:
        lines = [table[0], ["---", *("---:" for _ in table[0][1:])], *table[1:]]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in table
    )


# ---- pages with generated blocks


def marked(name: str, command: str) -> tuple[str, str]:
    return f"<!-- {name}: generated by `{command}` -->", f"<!-- end of {name} -->"


def replace_block(text: str, page: str, name: str, block: str, command: str) -> str:
    """The page with what stands between the markers of `name` replaced."""
    start, end = marked(name, command)
    head, _, rest = text.partition(start)
    _, marker, tail = rest.partition(end)
    if not marker:
        raise SystemExit(f"{page} lacks the markers of {name}: {start} ... {end}")
    return f"{head}{start}\n{block}\n{end}{tail}"
