"""How long `from unisono import init` takes beyond NumPy's own import: `python bench/import_time.py`.

Each round starts two fresh interpreters, one after the other, so that a slow moment of the machine affects
both: one imports NumPy, the other NumPy and then unisono, and each times its own import. A name is taken from
unisono, because `import unisono` alone imports nothing. The table shows the median and quartiles. The goal:
below 0.15 s beyond NumPy's. The slowest modules come from -X importtime.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

GOAL_S = 0.15
# As after an install: byte code is cached.
ENV = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
OURS = "from unisono import init"
TIMED = "import time; a = time.perf_counter(); {0}; b = time.perf_counter(); print(b - a)"


def seconds(statement: str, before: str = "pass") -> float:
    script = f"{before}; {TIMED.format(statement)}"
    return float(
        subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, env=ENV).stdout
    )


def quartiles(times: list[float]) -> str:
    low, median, high = statistics.quantiles(times, n=4)
    return f"{median * 1e3:8.1f} ms   ({low * 1e3:.1f} to {high * 1e3:.1f})"


def slowest_modules(count: int) -> list[tuple[float, str]]:
    """Modules that unisono imports beyond NumPy's, by their own import time."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import numpy; {OURS}"],
        capture_output=True,
        text=True,
        check=True,
        env=ENV,
    )
    rows = [line.removeprefix("import time:").split("|") for line in done.stderr.splitlines() if "|" in line]
    modules = [(int(own) / 1e6, name.strip()) for own, _, name in rows[1:]]
    start = next(i for i, (_, name) in enumerate(modules) if name == "numpy") + 1
    return sorted(modules[start:], reverse=True)[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    seconds(OURS)  # the first run writes the byte code
    numpy, ours = [], []
    for _ in range(rounds):
        numpy.append(seconds("import numpy"))
        ours.append(seconds(OURS, before="import numpy"))
    print(f"import numpy                 {quartiles(numpy)}")
    print(f"import unisono, after NumPy  {quartiles(ours)}   goal: below {GOAL_S * 1e3:.0f} ms")
    print(f"goal {'reached' if statistics.median(ours) < GOAL_S else 'MISSED'}; {rounds} rounds")
    for own, name in slowest_modules(8):
        print(f"  {own * 1e3:6.1f} ms  {name}")


if __name__ == "__main__":
    main()
