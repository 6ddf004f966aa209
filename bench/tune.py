"""Measures every algorithm at every size and writes the table by which `auto` chooses.

    python bench/tune.py

For each kind of link (shared memory, TCP) and number of ranks, all algorithms of a collective take turns in
one set of processes. The result goes to src/unisono/plans/measured.json, with the machine and the date. It
takes at most eight minutes. Run it on an idle machine, then look at the diff.

It also prints the figures of these links for the cost model (plans/cost.py), which decides where nothing was
measured: more ranks, several hosts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import unisono as uni
from unisono.bench.machine import described
from unisono.bench.tuning import links_measured, measured, thresholds
from unisono.plans.cost import LINKS
from unisono.plans.measured import PATH
from unisono.plans.units import bytes_text, seconds_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks")
    parser.add_argument("--kinds", default="shm,tcp")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn", type=float, default=0.006, help="seconds of one algorithm's turn")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=PATH)
    args = parser.parse_args()
    kinds, numbers = args.kinds.split(","), [int(n) for n in args.ranks.split(",")]
    budget_s = args.budget / len(kinds) / len(numbers)

    whole: dict[str, Any] = {"machine": described(), "any": {}, "ordered": {}}
    for kind in kinds:
        env = {"UNISONO_SHM": "1" if kind == "shm" else "0"}
        show_links(kind, uni.spawn(links_measured, 2, env=env)[0])
        for ranks in numbers:
            rows = uni.spawn(
                measured, ranks, args.rounds, args.turn, budget_s, env=env, timeout=2 * budget_s + 60
            )[0]
            times: dict[str, dict[int, dict[str, float]]] = {}
            for collective, nbytes, name, seconds in rows:
                times.setdefault(collective, {}).setdefault(nbytes, {})[name] = seconds
            show(kind, ranks, times)
            for order in ("any", "ordered"):
                for collective, steps in thresholds(times, ranks, kind, ordered=order == "ordered").items():
                    of_kind = whole[order].setdefault(kind, {})
                    of_kind.setdefault(collective, {})[str(ranks)] = steps
    write(whole, args.out)
    print(f"written to {args.out}")


def show_links(kind: str, found: dict[str, float]) -> None:
    print(f"{kind}: " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    now = {name: getattr(LINKS[kind], name) for name in found}
    print("  in plans/cost.py: " + ", ".join(f"{name} {value:.3g}" for name, value in now.items()))


def show(kind: str, ranks: int, times: dict[str, dict[int, dict[str, float]]]) -> None:
    print(f"\n{kind}, {ranks} ranks")
    for collective, by_size in times.items():
        for nbytes, by_name in by_size.items():
            order = sorted(by_name.items(), key=lambda item: item[1])
            shown = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in order)
            print(f"  {collective:<15} {bytes_text(nbytes):>8}  {shown}")


def write(whole: dict[str, Any], path: Path) -> None:
    """One line for each collective, so that a diff is readable."""
    lines = ["{", f'"machine": {json.dumps(whole["machine"])},']
    for order in ("any", "ordered"):
        lines.append(f'"{order}": {{')
        for kind, collectives in whole[order].items():
            lines.append(f'  "{kind}": {{')
            lines += [f'    "{name}": {json.dumps(by_size)},' for name, by_size in collectives.items()]
            lines[-1] = lines[-1].removesuffix(",")
            lines.append("  },")
        lines[-1] = lines[-1].removesuffix(",")
        lines.append("},")
    lines[-1] = lines[-1].removesuffix(",")
    text = "\n".join([*lines, "}"]) + "\n"
    json.loads(text)
    path.write_text(text)


if __name__ == "__main__":
    main()
