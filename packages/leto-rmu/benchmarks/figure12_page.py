"""The page of figure 12: two runs held against the reference, as far as all have got."""

from __future__ import annotations

from typing import Any

from proof_place import done_of, head

KILL_EVERY = 10  # iterations
NAMES = {"reference": "reference", "parity_alone": "RMP alone", "with_updater": "RMP and RMU"}


def held(result: dict[str, Any], mode: str) -> dict[str, Any]:
    """A run held against the reference, as far as both have got."""
    expected, found, last = result["reference"], result[mode], str(result["iterations"])
    equal = [a == b for a, b in zip(found["losses"], expected["losses"], strict=False)]
    states = [
        state == expected["states"][str(t)]
        for t, state in found.get("recovered", [])
        if str(t) in expected["states"]
    ]
    end = expected["states"].get(last) if mode == "reference" else found.get("end")
    return {
        "equal": sum(equal),
        "of": len(equal),
        "first": equal.index(False) if False in equal else None,
        "states": sum(states),
        "recovered": len(states),
        "end": None if end is None or last not in expected["states"] else end == expected["states"][last],
    }


def total(result: dict[str, Any]) -> tuple[bool, str]:
    """Whether the plan was fulfilled, and a sentence about it."""
    planned, parts = len(range(KILL_EVERY - 1, result["iterations"], KILL_EVERY)), []
    for mode, name in NAMES.items():
        found = (
            held(result, mode) if mode in result and "reference" in result else {"recovered": 0, "end": None}
        )
        if mode != "reference":
            parts.append((found["recovered"], planned, f"kills recovered from and compared ({name})"))
        parts.append((int(found["end"] is not None), 1, f"ends compared ({name})"))
    return done_of(parts)


def verdict(result: dict[str, Any]) -> list[str]:
    """What is not as it has to be, of what could be compared."""
    wrong = []
    if "reference" in result and "with_updater" in result:
        found = held(result, "with_updater")
        if found["first"] is not None or found["states"] < found["recovered"] or found["end"] is False:
            wrong.append(f"RMP and RMU differs from the reference: {found}")
    if "reference" in result and "parity_alone" in result and held(result, "parity_alone")["end"]:
        wrong.append("RMP alone has to go wrong, and did not")
    return wrong


def markdown(result: dict[str, Any]) -> str:
    lines = [*head("Figure 12: killed inside the update", result, "gpu_figure12.py"), total(result)[1], ""]
    lines += [f"**Failed**: {error}\n" for error in [*result["errors"], *verdict(result)]]
    kills = {mode: len(result.get(mode, {}).get("kills", [])) for mode in ("parity_alone", "with_updater")}
    lines += [
        f"A GPT of {result['parameters'] / 1e6:.1f} M parameters, {result['iterations']} iterations, seed "
        f"{result['seed']}, scheme {result['scheme']}.",
        f"Kills inside the update: {kills['parity_alone']} with RMP alone, {kills['with_updater']} with RMP",
        "and RMU, each followed by the loss of 16 pages in every protection group and a poisoned parity page",
        "of each. State is compared by sums of all words, weighted by place.",
        "",
    ]
    modes = [mode for mode in NAMES if mode in result]
    if "reference" not in modes:
        return "\n".join([*lines, "There is no reference yet, and nothing to compare with it."])
    lines += [
        "| run | losses equal to the reference | first difference | recovered states equal "
        "| loss at the end | state at the end |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for mode in modes:
        found, losses = held(result, mode), result[mode]["losses"]
        first = "none" if found["first"] is None else found["first"]
        same = {None: "not reached", True: "every bit", False: "differs"}[found["end"]]
        last = f"{losses[-1]:.4f}" if found["end"] is not None else ""
        lines.append(
            f"| {NAMES[mode]} | {found['equal']} of {found['of']} | {first} "
            f"| {found['states']} of {found['recovered']} | {last} | {same} |"
        )
    at = [0, *(k for k in range(9, result["iterations"], 10)), *range(10, result["iterations"], 10)]
    at = sorted({k for k in at if k < result["iterations"]} | {result["iterations"] - 1})
    lines += ["", "| iteration | " + " | ".join(NAMES[mode] for mode in modes) + " |"]
    lines.append("| ---: |" + " ---: |" * len(modes))
    for k in at:
        row = [result[mode]["losses"] for mode in modes]
        lines.append("| " + " | ".join([str(k), *(f"{x[k]:.4f}" if k < len(x) else "" for x in row)]) + " |")
    return "\n".join(lines)
